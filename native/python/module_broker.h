/* module_broker.h: fanstore._native.Broker, for the other files of the extension module. */
#ifndef FANSTORE_PYTHON_MODULE_BROKER_H
#define FANSTORE_PYTHON_MODULE_BROKER_H

#include "python/module.h"

#include "chunks/broker.h"

/* The broker in a fanstore._native.Broker; NULL with TypeError for any other object. Lives as long as the object. */
struct fsx_broker *fsx_broker_of(PyObject *object);

/* As OperationStatistics.add of fanstore/telemetry/statistics.py takes it. */
PyObject *fsx_latency_tuple(const struct fsx_latency *latency);

/* Where bytes came from, and what of them was checked: {"sources": ..., "verification": ..., "direct_reads": ...}. */
PyObject *fsx_read_counts_dict(const struct fsx_read_counts *counts);

#endif
