/* exchange_type.h: fanstore._native.Exchange and Answer, the door between Python and exchange.c. */
#ifndef FANSTORE_EXCHANGE_TYPE_H
#define FANSTORE_EXCHANGE_TYPE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Add both types to the module. -1 with an exception set if that fails. */
int fsx_add_exchange_types(PyObject *module);

#endif
