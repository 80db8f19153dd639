/* module_engine.h: fanstore._native.Engine, as the files that translate for it share it. */
#ifndef FANSTORE_PYTHON_MODULE_ENGINE_H
#define FANSTORE_PYTHON_MODULE_ENGINE_H

#include "python/module.h"

#include <stdbool.h>

#include "fuse/engine.h"

typedef struct {
    PyObject_HEAD
    PyObject *broker; /* keeps it alive, and with it the index */
    struct fsx_engine_settings settings;
    struct fsx_engine *engine; /* NULL before start and after stop */
    bool abandoned;            /* threads were left behind: nothing may be freed */
} EngineObject;

/* Methods that are about outputs: module_outputs.c. */
PyObject *fsx_engine_add_name(EngineObject *self, PyObject *args);
PyObject *fsx_engine_remove_name(EngineObject *self, PyObject *args);
PyObject *fsx_engine_mix(EngineObject *self, PyObject *argument);
PyObject *fsx_engine_describe(EngineObject *self, PyObject *args);
PyObject *fsx_engine_undescribe(EngineObject *self, PyObject *argument);
PyObject *fsx_engine_take_told(EngineObject *self, PyObject *argument);
PyObject *fsx_engine_drop(EngineObject *self, PyObject *argument);
PyObject *fsx_engine_open(EngineObject *self, PyObject *arguments);
PyObject *fsx_engine_begin_turn(EngineObject *self, PyObject *unused);
PyObject *fsx_engine_end_turn(EngineObject *self, PyObject *args);
PyObject *fsx_engine_disown(EngineObject *self, PyObject *argument);
PyObject *fsx_engine_own(EngineObject *self, PyObject *argument);
PyObject *fsx_engine_take_creates(EngineObject *self, PyObject *unused);
PyObject *fsx_engine_has_creates(EngineObject *self, PyObject *unused);

/* Rows of the table of methods. */
#define FSX_OUTPUT_METHODS                                                                                            \
    {"add_name", (PyCFunction)fsx_engine_add_name, METH_VARARGS,                                                        \
     "add_name(parent, name, inode=0): there is such an output; with its inode, a directory"},                         \
    {"remove_name", (PyCFunction)fsx_engine_remove_name, METH_VARARGS, "remove_name(parent, name) -> whether it was there"}, \
    {"describe", (PyCFunction)fsx_engine_describe, METH_VARARGS,                                                      \
     "describe(inode, mode, nlink, size, blocks, mtime_ns, uid, gid, valid_s): what stat says of a directory with outputs"}, \
    {"undescribe", (PyCFunction)fsx_engine_undescribe, METH_O,                                                         \
     "undescribe(inode) -> as take_told: Python answers for it"},                                                     \
    {"take_told", (PyCFunction)fsx_engine_take_told, METH_O,                                                          \
     "take_told(inode) -> how often the kernel was told of this directory since this was last asked"},                \
    {"mix", (PyCFunction)fsx_engine_mix, METH_O, "mix(entry): this directory of the dataset has outputs"},            \
    {"open", (PyCFunction)fsx_engine_open, METH_VARARGS,                                                              \
     "open(inode, flags): a new output is open; its handle, which is not the inode if it is open with direct I/O"}, \
    {"drop", (PyCFunction)fsx_engine_drop, METH_O, "drop(inode): the file of this output is gone, or another one"},   \
    {"has_creates", (PyCFunction)fsx_engine_has_creates, METH_NOARGS, "has_creates() -> has it created files that were not taken?"}, \
    {"take_creates", (PyCFunction)fsx_engine_take_creates, METH_NOARGS,                                                \
     "take_creates() -> [(inode, parent, name, mode, mtime_ns, (size, mtime_ns, ctime_ns) if it was closed or synced)]; without a name it was created before"},        \
    {"begin_turn", (PyCFunction)fsx_engine_begin_turn, METH_NOARGS,                                                   \
     "begin_turn() -> (new files, end of the journal or -1): nothing is created from now on"},                           \
    {"disown", (PyCFunction)fsx_engine_disown, METH_O,                                                                 \
     "disown(inode): in a turn; its content is for Python to note"},                                                   \
    {"own", (PyCFunction)fsx_engine_own, METH_O,                                                                       \
     "own(inode): in a turn; its next sync may be noted by the engine"},                                               \
    {"end_turn", (PyCFunction)fsx_engine_end_turn, METH_VARARGS,                                                     \
     "end_turn(next_inode, end of the journal or -1)"},

#endif
