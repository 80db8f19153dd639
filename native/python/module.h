/* module.h: what the files of the extension module share. */
#ifndef FANSTORE_PYTHON_MODULE_H
#define FANSTORE_PYTHON_MODULE_H

#include <Python.h>

#include "format/index.h"

/* The index in a fanstore._native.Index; NULL with TypeError for any other object. Lives as long as the object. */
const struct fsx_index *fsx_index_of(PyObject *object);

/* Add the class Broker, and Engine; -1 with an exception set. */
int fsx_module_add_broker(PyObject *module);
int fsx_module_add_engine(PyObject *module);

/* Add what fanstore.order needs; -1 with an exception set. */
int fsx_module_add_order(PyObject *module);

#endif
