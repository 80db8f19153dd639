/* exchange_type.h: fanstore._native.Exchange and Answer, the door between Python and exchange.c. */
#ifndef FANSTORE_PYTHON_EXCHANGE_TYPE_H
#define FANSTORE_PYTHON_EXCHANGE_TYPE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Add both types to the module. -1 with an exception set if that fails. */
int fsx_add_exchange_types(PyObject *module);

struct fsx_exchange;
/* The exchange in a fanstore._native.Exchange; NULL with TypeError for any other object. Lives as long as the object. */
struct fsx_exchange *fsx_exchange_of(PyObject *object);

#endif
