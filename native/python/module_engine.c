/* module_engine.c: fanstore._native.Engine, the door between Python and engine.c. Translates arguments and nothing else.
 *
 * Typed for Python in fanstore/_native.pyi.
 */
#define PY_SSIZE_T_CLEAN
#include "python/module_engine.h"

#include <errno.h>
#include <stdbool.h>

#include "python/module_broker.h"

/* Upcalls that one call of take() returns at most, and failures of take_failures(). */
#define TAKEN_MOST 64u

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"broker", "uid", "gid", "hidden", "blocks", "files", "workers", "max_background", "outputs",
                               "alone", "waits", "local", "journal", "rank", "begun", NULL};
    PyObject *broker_object;
    unsigned int uid, gid, workers, max_background, rank = 0;
    int outputs = -1, alone = 1, waits = 0, local = 0, journal = -1, begun = -1;
    long long hidden;
    unsigned long long blocks, files;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OIILKKII|ipppiIi", keywords, &broker_object, &uid, &gid, &hidden, &blocks,
                                     &files, &workers, &max_background, &outputs, &alone, &waits, &local, &journal, &rank, &begun))
        return NULL;
    struct fsx_broker *broker = fsx_broker_of(broker_object);
    if (broker == NULL)
        return NULL;
    if (workers < 1 || workers > FSX_ENGINE_WORKERS_MAX || max_background > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "an argument of Engine is out of range");
        return NULL;
    }
    const struct fsx_index *index = fsx_broker_index(broker);
    EngineObject *self = (EngineObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->settings = (struct fsx_engine_settings){
        .tree = {.index = index, .uid = uid, .gid = gid, .hidden = hidden, .blocks = blocks, .files = files},
        .broker = broker,
        .names = fsx_names_ahead_new(index),
        .begun = begun < 0 ? NULL : fsx_begun_new(begun),
        .workers = workers,
        .max_background = (uint16_t)max_background,
    };
    self->broker = Py_NewRef(broker_object);
    if (self->settings.names == NULL || (begun >= 0 && self->settings.begun == NULL)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    if (outputs >= 0) {
        self->settings.tree.outputs = fsx_outputs_new(outputs, index->entries, alone != 0, waits != 0, local != 0, journal, rank);
        if (self->settings.tree.outputs == NULL) {
            PyErr_SetFromErrno(PyExc_OSError);
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

static void engine_dealloc(EngineObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->engine != NULL && !fsx_engine_stop(self->engine, 1000))
        self->abandoned = true;
    if (!self->abandoned) {
        fsx_names_ahead_free(self->settings.names);
        fsx_begun_free(self->settings.begun);
        fsx_outputs_free(self->settings.tree.outputs);
        Py_XDECREF(self->broker);
    }
    type->tp_free(self);
    Py_DECREF(type);
}

static bool is_running(const EngineObject *self) {
    if (self->engine == NULL)
        PyErr_SetString(PyExc_ValueError, "the engine is not running");
    return self->engine != NULL;
}

static PyObject *engine_start(EngineObject *self, PyObject *args) {
    if (!PyArg_ParseTuple(args, "iii", &self->settings.device, &self->settings.socket, &self->settings.wake))
        return NULL;
    if (self->engine != NULL || self->abandoned) {
        PyErr_SetString(PyExc_ValueError, "the engine was started already");
        return NULL;
    }
    self->engine = fsx_engine_start(&self->settings); /* some milliseconds; with the GIL, so that it is started once */
    if (self->engine == NULL)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *engine_take(EngineObject *self, PyObject *unused) {
    (void)unused;
    if (!is_running(self))
        return NULL;
    struct fsx_upcall upcalls[TAKEN_MOST];
    const size_t count = fsx_engine_take(self->engine, upcalls, TAKEN_MOST);
    PyObject *result = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; result != NULL && i < count; i++) {
        const struct fsx_upcall *c = &upcalls[i];
        PyObject *item = Py_BuildValue("KiKKK", (unsigned long long)c->token, (int)c->kind, (unsigned long long)c->number,
                                       (unsigned long long)c->offset, (unsigned long long)c->length);
        if (item == NULL)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, (Py_ssize_t)i, item);
    }
    return result;
}

/* What is left may be taken after the end, too. */
static PyObject *engine_take_begun(EngineObject *self, PyObject *unused) {
    (void)unused;
    if (self->settings.begun == NULL) {
        PyErr_SetString(PyExc_ValueError, "files that are begun are not noted");
        return NULL;
    }
    uint64_t files[FSX_BEGUN_RING], lost = 0;
    size_t count = fsx_begun_take(self->settings.begun, files, &lost);
    if (count == 0 && !fsx_begun_wait(self->settings.begun))
        count = fsx_begun_take(self->settings.begun, files, &lost);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = Py_BuildValue("II", (unsigned int)(files[i] >> 32), (unsigned int)files[i]);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list == NULL ? NULL : Py_BuildValue("NK", list, (unsigned long long)lost);
}

static PyObject *engine_forward_missing(EngineObject *self, PyObject *wanted) {
    const int truth = PyObject_IsTrue(wanted);
    if (truth < 0)
        return NULL;
    if (self->engine != NULL)
        fsx_engine_forward_missing(self->engine, truth != 0);
    Py_RETURN_NONE;
}

static PyObject *engine_answer(EngineObject *self, PyObject *args) {
    unsigned long long token;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "Ky*", &token, &data))
        return NULL;
    if (self->engine != NULL) { /* who answers after the end speaks to nobody */
        struct fsx_engine *engine = self->engine;
        fsx_engine_enter(engine);
        Py_BEGIN_ALLOW_THREADS
        fsx_engine_answer(engine, token, data.buf, (size_t)data.len, 0);
        fsx_engine_leave(engine);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    Py_RETURN_NONE;
}

static PyObject *engine_resume(EngineObject *self, PyObject *argument) {
    const unsigned long long token = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    if (self->engine != NULL) {
        struct fsx_engine *engine = self->engine;
        fsx_engine_enter(engine);
        Py_BEGIN_ALLOW_THREADS
        fsx_engine_resume(engine, token);
        fsx_engine_leave(engine);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyObject *engine_fail(EngineObject *self, PyObject *args) {
    unsigned long long token;
    int error;
    if (!PyArg_ParseTuple(args, "Ki", &token, &error))
        return NULL;
    if (self->engine != NULL)
        fsx_engine_answer(self->engine, token, NULL, 0, error);
    Py_RETURN_NONE;
}

static PyObject *engine_ended(EngineObject *self, PyObject *unused) {
    (void)unused;
    if (!is_running(self))
        return NULL;
    int error;
    const bool ended = fsx_engine_ended(self->engine, &error);
    return Py_BuildValue("Oi", ended ? Py_True : Py_False, error);
}

static PyObject *engine_stop(EngineObject *self, PyObject *argument) {
    const unsigned long limit_ms = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred())
        return NULL;
    struct fsx_engine *engine = self->engine;
    bool stopped = true;
    if (engine != NULL) {
        self->engine = NULL; /* nobody else may enter while it ends */
        Py_BEGIN_ALLOW_THREADS
        stopped = fsx_engine_stop(engine, (uint32_t)limit_ms);
        if (self->settings.tree.outputs != NULL)
            fsx_outputs_finish(self->settings.tree.outputs);
        Py_END_ALLOW_THREADS
        self->abandoned = !stopped;
    }
    return PyBool_FromLong(stopped);
}

/* ---- names ahead -------------------------------------------------------------------------------------------------- */

static PyObject *engine_list_with(EngineObject *self, PyObject *args) {
    int socket;
    unsigned long long most;
    if (!PyArg_ParseTuple(args, "iK", &socket, &most))
        return NULL;
    const int error = fsx_names_ahead_use(self->settings.names, socket, most);
    if (error == 0)
        Py_RETURN_NONE;
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *engine_end_listing(EngineObject *self, PyObject *unused) {
    (void)unused;
    fsx_names_ahead_end(self->settings.names);
    Py_RETURN_NONE;
}

/* ---- statistics --------------------------------------------------------------------------------------------------- */

static bool add_operations(PyObject *result, const struct fsx_engine_counts *counts) {
    for (int op = 0; op < FSX_OPERATIONS; op++) {
        if (counts->operations[op].count == 0)
            continue;
        PyObject *latency = fsx_latency_tuple(&counts->operations[op]);
        const char *name = fsx_operation_name((enum fsx_operation)op);
        const bool added = latency != NULL && PyDict_SetItemString(result, name, latency) == 0;
        Py_XDECREF(latency);
        if (!added)
            return false;
    }
    return true;
}

static PyObject *engine_statistics(EngineObject *self, PyObject *unused) {
    (void)unused;
    if (!is_running(self))
        return NULL;
    struct fsx_engine_counts *counts = PyMem_Malloc(sizeof *counts);
    if (counts == NULL)
        return PyErr_NoMemory();
    fsx_engine_count(self->engine, counts);
    const struct fsx_kernel kernel = fsx_engine_kernel(self->engine);
    PyObject *operations = PyDict_New(), *reads = fsx_read_counts_dict(&counts->reads);
    PyObject *result = NULL;
    if (operations != NULL && reads != NULL && add_operations(operations, counts))
        result = Py_BuildValue(
            "{s:O,s:O,s:K,s:K,s:K,s:K,s:(IIK),s:(KKKK),s:(KKK),s:(KKK)}", "operations", operations, "reads", reads,
            "forwarded", (unsigned long long)counts->forwarded, "upcalls", (unsigned long long)counts->upcalls,
            "interrupted", (unsigned long long)counts->interrupted, "malformed", (unsigned long long)counts->malformed,
            "kernel", kernel.major, kernel.minor, (unsigned long long)kernel.flags, "outputs",
            (unsigned long long)counts->outputs.reads, (unsigned long long)counts->outputs.read_bytes,
            (unsigned long long)counts->outputs.writes, (unsigned long long)counts->outputs.written_bytes, "names_ahead",
            (unsigned long long)counts->names.listings, (unsigned long long)counts->names.names,
            (unsigned long long)counts->names.directories, "busy_poll", (unsigned long long)counts->polling.times,
            (unsigned long long)counts->polling.time_ns, (unsigned long long)counts->polling.requests);
    Py_XDECREF(operations);
    Py_XDECREF(reads);
    PyMem_Free(counts);
    return result;
}

/* ---- class -------------------------------------------------------------------------------------------------------- */

static PyMethodDef engine_methods[] = {
    {"start", (PyCFunction)engine_start, METH_VARARGS, "start(device, socket, wake): start the threads"},
    {"take", (PyCFunction)engine_take, METH_NOARGS, "take() -> [(token, kind, number, offset, length)] for Python to do"},
    {"take_begun", (PyCFunction)engine_take_begun, METH_NOARGS,
     "take_begun() -> ([(entry, thread)] that were begun to be read, how many were lost); with none, the next one wakes"},
    {"forward_missing", (PyCFunction)engine_forward_missing, METH_O,
     "forward_missing(wanted): whether Python answers for names that are not there"},
    {"answer", (PyCFunction)engine_answer, METH_VARARGS, "answer(token, data)"},
    {"resume", (PyCFunction)engine_resume, METH_O, "resume(token): the output is here, do what waits for it"},
    {"fail", (PyCFunction)engine_fail, METH_VARARGS, "fail(token, errno)"},
    {"list_with", (PyCFunction)engine_list_with, METH_VARARGS, "list_with(socket, most): have so many names listed ahead there"},
    {"end_listing", (PyCFunction)engine_end_listing, METH_NOARGS, "end_listing(): list no more names ahead"},
    FSX_OUTPUT_METHODS
    {"ended", (PyCFunction)engine_ended, METH_NOARGS, "ended() -> (whether the connection is at its end, errno or 0)"},
    {"statistics", (PyCFunction)engine_statistics, METH_NOARGS, "statistics() -> dict of counters"},
    {"stop", (PyCFunction)engine_stop, METH_O, "stop(limit_ms) -> whether all threads have ended"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_doc, "Engine(...): threads that answer FUSE requests without Python; see native/fuse/engine.h."},
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods},
    {0, NULL},
};

static PyType_Spec engine_spec = {"fanstore._native.Engine", sizeof(EngineObject), 0, Py_TPFLAGS_DEFAULT, engine_slots};

int fsx_module_add_engine(PyObject *module) {
    PyObject *engine = PyType_FromSpec(&engine_spec);
    if (engine == NULL || PyModule_AddObjectRef(module, "Engine", engine) != 0 ||
        PyModule_AddIntConstant(module, "LATENCY_BUCKETS", (long)FSX_BUCKETS) != 0) {
        Py_XDECREF(engine);
        return -1;
    }
    Py_DECREF(engine);
    return 0;
}
