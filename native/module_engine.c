/* module_engine.c: fanstore._native.Engine, the door between Python and engine.c. Translates arguments and nothing else.
 *
 * Typed for Python in fanstore/_native.pyi.
 */
#define PY_SSIZE_T_CLEAN
#include "module_engine.h"

#include <errno.h>
#include <sched.h>
#include <stdbool.h>

#include "exchange_type.h"

/* Crossings that one call of take() returns at most, and failures of take_failures(). */
#define TAKEN_MOST 64u

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"index", "marks", "uid", "gid", "hidden", "blocks", "files", "verify", "cache_bytes",
                               "workers", "shared_readers", "max_background", "outputs", "alone", "waits", "journal", "rank",
                               NULL};
    PyObject *index_object;
    Py_buffer marks;
    unsigned int uid, gid, workers, shared_readers, max_background, rank = 0;
    int verify, outputs = -1, alone = 1, waits = 0, journal = -1;
    long long hidden;
    unsigned long long blocks, files, cache_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Ow*IILKKiKIII|ippiI", keywords, &index_object, &marks, &uid, &gid, &hidden,
                                     &blocks, &files, &verify, &cache_bytes, &workers, &shared_readers,
                                     &max_background, &outputs, &alone, &waits, &journal, &rank))
        return NULL;
    const struct fsx_index *index = fsx_index_of(index_object);
    EngineObject *self = NULL;
    if (index == NULL)
        goto fail;
    if ((uint64_t)marks.len != index->entries + index->chunk_records || verify < FSX_VERIFY_FIRST ||
        verify > FSX_VERIFY_NEVER || workers < 1 || workers > FSX_ENGINE_WORKERS_MAX || max_background > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "an argument of Engine is out of range");
        goto fail;
    }
    self = (EngineObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        goto fail;
    self->settings = (struct fsx_engine_settings){
        .tree = {.index = index, .uid = uid, .gid = gid, .hidden = hidden, .blocks = blocks, .files = files},
        .content = fsx_content_new(index, marks.buf, (enum fsx_verify)verify, cache_bytes, shared_readers),
        .workers = workers,
        .max_background = (uint16_t)max_background,
    };
    if (self->settings.content == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    self->settings.names = fsx_names_ahead_new(index);
    if (self->settings.names == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    if (outputs >= 0) {
        self->settings.tree.outputs = fsx_outputs_new(outputs, index->entries, alone != 0, waits != 0, journal, rank);
        if (self->settings.tree.outputs == NULL) {
            PyErr_SetFromErrno(PyExc_OSError);
            goto fail;
        }
    }
    self->index = Py_NewRef(index_object);
    self->marks = marks;
    return (PyObject *)self;
fail:
    PyBuffer_Release(&marks);
    Py_XDECREF(self);
    return NULL;
}

static void engine_dealloc(EngineObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->engine != NULL && !fsx_engine_stop(self->engine, 1000))
        self->abandoned = true;
    if (!self->abandoned) {
        fsx_content_free(self->settings.content);
        fsx_names_ahead_free(self->settings.names);
        fsx_fetcher_free(self->settings.fetcher);
        Py_XDECREF(self->exchange);
        fsx_outputs_free(self->settings.tree.outputs);
        if (self->index != NULL) {
            PyBuffer_Release(&self->marks);
            Py_DECREF(self->index);
        }
    }
    type->tp_free(self);
    Py_DECREF(type);
}

static bool is_running(const EngineObject *self) {
    if (self->engine == NULL)
        PyErr_SetString(PyExc_ValueError, "the engine is not running");
    return self->engine != NULL;
}

static PyObject *engine_use(EngineObject *self, PyObject *args) {
    unsigned int partition;
    int fd, number, verified;
    if (!PyArg_ParseTuple(args, "Iiip", &partition, &fd, &number, &verified))
        return NULL;
    if (self->abandoned)
        Py_RETURN_FALSE;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = fsx_content_use(self->settings.content, partition, fd, (uint8_t)number, verified != 0);
    Py_END_ALLOW_THREADS
    if (error == 0)
        Py_RETURN_TRUE;
    if (error == EEXIST)
        Py_RETURN_FALSE;
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
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
    struct fsx_crossing crossings[TAKEN_MOST];
    const size_t count = fsx_engine_take(self->engine, crossings, TAKEN_MOST);
    PyObject *result = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; result != NULL && i < count; i++) {
        const struct fsx_crossing *c = &crossings[i];
        PyObject *item = Py_BuildValue("KiKKK", (unsigned long long)c->token, (int)c->kind, (unsigned long long)c->number,
                                       (unsigned long long)c->offset, (unsigned long long)c->length);
        if (item == NULL)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, (Py_ssize_t)i, item);
    }
    return result;
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

static PyObject *engine_keep(EngineObject *self, PyObject *args) {
    unsigned int entry, chunk;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "IIy*", &entry, &chunk, &data))
        return NULL;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = fsx_content_keep(self->settings.content, entry, chunk, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    if (error == EINVAL) {
        PyErr_SetString(PyExc_ValueError, "there is no such chunk, or it has another length");
        return NULL;
    }
    Py_RETURN_NONE; /* without memory it is not kept, that is all */
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

/* ---- other nodes -------------------------------------------------------------------------------------------------- */

static PyObject *engine_fetch_with(EngineObject *self, PyObject *args) {
    PyObject *exchange_object;
    unsigned int rank;
    double limit_s;
    if (!PyArg_ParseTuple(args, "OId", &exchange_object, &rank, &limit_s))
        return NULL;
    struct fsx_exchange *exchange = fsx_exchange_of(exchange_object);
    if (exchange == NULL)
        return NULL;
    if (self->engine != NULL || self->abandoned || self->settings.fetcher != NULL || !(limit_s > 0 && limit_s < 1e9)) {
        PyErr_SetString(PyExc_ValueError, "this is said once, before the start, with a limit");
        return NULL;
    }
    cpu_set_t cores;
    const int count = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : CPU_SETSIZE;
    self->settings.fetcher =
        fsx_fetcher_new(exchange, self->settings.content, rank, (uint64_t)(limit_s * 1e9), (uint32_t)count);
    if (self->settings.fetcher == NULL)
        return PyErr_NoMemory();
    self->exchange = Py_NewRef(exchange_object);
    Py_RETURN_NONE;
}

static struct fsx_fetcher *fetcher_of(const EngineObject *self) {
    if (self->settings.fetcher == NULL || self->abandoned)
        PyErr_SetString(PyExc_ValueError, "the engine does not fetch");
    return self->abandoned ? NULL : self->settings.fetcher;
}

static PyObject *engine_route(EngineObject *self, PyObject *args) {
    unsigned int partition;
    PyObject *ranks_object;
    struct fsx_fetcher *fetcher = fetcher_of(self);
    if (fetcher == NULL || !PyArg_ParseTuple(args, "IO", &partition, &ranks_object))
        return NULL;
    PyObject *ranks = PySequence_Fast(ranks_object, "ranks are a sequence");
    if (ranks == NULL)
        return NULL;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(ranks);
    const int size = fsx_exchange_of(self->exchange)->size;
    int *numbers = PyMem_Calloc((size_t)count + 1, sizeof *numbers);
    bool right = numbers != NULL && partition < self->settings.tree.index->partitions;
    for (Py_ssize_t i = 0; right && i < count; i++) {
        const long rank = PyLong_AsLong(PySequence_Fast_GET_ITEM(ranks, i));
        right = rank >= 0 && rank < size;
        numbers[i] = (int)rank;
    }
    Py_DECREF(ranks);
    if (!right && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "there is no such partition, or no such rank");
    if (right && !fsx_fetcher_route(fetcher, partition, numbers, (uint32_t)count)) {
        PyErr_NoMemory();
        right = false;
    }
    PyMem_Free(numbers);
    if (!right)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *engine_take_failures(EngineObject *self, PyObject *unused) {
    (void)unused;
    struct fsx_fetcher *fetcher = fetcher_of(self);
    if (fetcher == NULL)
        return NULL;
    struct fsx_failure failures[TAKEN_MOST];
    const size_t count = fsx_fetcher_take_failures(fetcher, failures, TAKEN_MOST);
    PyObject *result = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; result != NULL && i < count; i++) {
        PyObject *item = Py_BuildValue("iiI", (int)failures[i].kind, failures[i].peer, failures[i].partition);
        if (item == NULL)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, (Py_ssize_t)i, item);
    }
    return result;
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

static PyObject *latency_tuple(const struct fsx_latency *latency) {
    return Py_BuildValue("KKKKy#", (unsigned long long)latency->count, (unsigned long long)latency->errors,
                         (unsigned long long)latency->total_ns, (unsigned long long)latency->max_ns,
                         (const char *)latency->buckets, (Py_ssize_t)sizeof latency->buckets);
}

static bool add_operations(PyObject *result, const struct fsx_engine_counts *counts) {
    for (int op = 0; op < FSX_OPERATIONS; op++) {
        if (counts->operations[op].count == 0)
            continue;
        PyObject *latency = latency_tuple(&counts->operations[op]);
        const char *name = fsx_operation_name((enum fsx_operation)op);
        const bool added = latency != NULL && PyDict_SetItemString(result, name, latency) == 0;
        Py_XDECREF(latency);
        if (!added)
            return false;
    }
    return true;
}

/* What peers have given: per rank chunks and bytes, and the time from question to answer. */
static PyObject *engine_fetched(EngineObject *self, PyObject *unused) {
    (void)unused;
    struct fsx_fetcher *fetcher = fetcher_of(self);
    if (fetcher == NULL)
        return NULL;
    const int size = fsx_exchange_of(self->exchange)->size;
    PyObject *peers = PyList_New(size);
    for (int rank = 0; peers != NULL && rank < size; rank++) {
        const struct fsx_peer_counts counts = fsx_fetcher_count_peer(fetcher, rank);
        PyObject *item = Py_BuildValue("KK", (unsigned long long)counts.fetches, (unsigned long long)counts.fetched_bytes);
        if (item == NULL)
            Py_CLEAR(peers);
        else
            PyList_SET_ITEM(peers, rank, item);
    }
    struct fsx_latency *answers = PyMem_Calloc(1, sizeof *answers);
    if (peers == NULL || answers == NULL) {
        Py_XDECREF(peers);
        PyMem_Free(answers);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    fsx_fetcher_count_answers(fetcher, answers);
    PyObject *latency = latency_tuple(answers);
    PyMem_Free(answers);
    return latency == NULL ? (Py_DECREF(peers), NULL) : Py_BuildValue("NN", peers, latency);
}

static PyObject *engine_statistics(EngineObject *self, PyObject *unused) {
    (void)unused;
    if (!is_running(self))
        return NULL;
    struct fsx_engine_counts *counts = PyMem_Malloc(sizeof *counts);
    if (counts == NULL)
        return PyErr_NoMemory();
    fsx_engine_count(self->engine, counts);
    struct fsx_cache_counts cache;
    fsx_cache_count(fsx_content_cache(self->settings.content), &cache);
    const struct fsx_kernel kernel = fsx_engine_kernel(self->engine);
    PyObject *operations = PyDict_New();
    PyObject *result = NULL;
    if (operations != NULL && add_operations(operations, counts)) {
        const struct fsx_read_counts *r = &counts->reads;
#define ORIGIN(o)                                                                                                       \
    (unsigned long long)r->origin[o].reads, (unsigned long long)r->origin[o].bytes,                                     \
        (unsigned long long)r->origin[o].fetches, (unsigned long long)r->origin[o].fetched_bytes
        result = Py_BuildValue(
            "{s:O,s:{s:(KKKK),s:(KKKK),s:(KKKK),s:(KKKK)},s:(KK),s:K,s:K,s:K,s:K,s:K,s:{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K},"
            "s:(IIK),s:(KKKK),s:(KK),s:(KKK),s:(KKK)}",
            "operations", operations, "sources", "local", ORIGIN(FSX_LOCAL), "remote", ORIGIN(FSX_REMOTE), "shared",
            ORIGIN(FSX_SHARED), "cache", ORIGIN(FSX_CACHE), "verification", (unsigned long long)r->checked_chunks,
            (unsigned long long)r->checked_bytes, "direct_reads", (unsigned long long)r->direct, "forwarded",
            (unsigned long long)counts->forwarded, "crossings", (unsigned long long)counts->crossings, "interrupted",
            (unsigned long long)counts->interrupted, "malformed", (unsigned long long)counts->malformed, "cache",
            "capacity_bytes", (unsigned long long)cache.capacity_bytes, "used_bytes",
            (unsigned long long)cache.used_bytes, "chunks", (unsigned long long)cache.chunks, "hits",
            (unsigned long long)cache.hits, "misses", (unsigned long long)cache.misses, "joined_loads",
            (unsigned long long)cache.waits, "evictions", (unsigned long long)cache.evictions, "failed_loads",
            (unsigned long long)cache.failed, "kernel", kernel.major, kernel.minor, (unsigned long long)kernel.flags,
            "outputs", (unsigned long long)counts->outputs.reads, (unsigned long long)counts->outputs.read_bytes,
            (unsigned long long)counts->outputs.writes, (unsigned long long)counts->outputs.written_bytes,
            "read_ahead", (unsigned long long)counts->ahead.files, (unsigned long long)counts->ahead.wanted, "names_ahead",
            (unsigned long long)counts->names.listings, (unsigned long long)counts->names.names,
            (unsigned long long)counts->names.directories, "watch", (unsigned long long)counts->watch.times,
            (unsigned long long)counts->watch.time_ns, (unsigned long long)counts->watch.requests);
#undef ORIGIN
    }
    Py_XDECREF(operations);
    PyMem_Free(counts);
    return result;
}

/* ---- class -------------------------------------------------------------------------------------------------------- */

static PyMethodDef engine_methods[] = {
    {"use", (PyCFunction)engine_use, METH_VARARGS, "use(partition, fd, number, verified) -> whether it is read from this file now"},
    {"start", (PyCFunction)engine_start, METH_VARARGS, "start(device, socket, wake): start the threads"},
    {"take", (PyCFunction)engine_take, METH_NOARGS, "take() -> [(token, kind, number, offset, length)] for Python to do"},
    {"answer", (PyCFunction)engine_answer, METH_VARARGS, "answer(token, data)"},
    {"resume", (PyCFunction)engine_resume, METH_O, "resume(token): the output is here, do what waits for it"},
    {"fail", (PyCFunction)engine_fail, METH_VARARGS, "fail(token, errno)"},
    {"keep", (PyCFunction)engine_keep, METH_VARARGS, "keep(entry, chunk, content): put a chunk into the cache"},
    {"fetch_with", (PyCFunction)engine_fetch_with, METH_VARARGS, "fetch_with(exchange, rank, limit_s): ask other nodes"},
    {"route", (PyCFunction)engine_route, METH_VARARGS, "route(partition, ranks): ask these for it from now on"},
    {"take_failures", (PyCFunction)engine_take_failures, METH_NOARGS, "take_failures() -> [(kind, peer, partition)]"},
    {"fetched", (PyCFunction)engine_fetched, METH_NOARGS, "fetched() -> ([(chunks, bytes)] by rank, latency)"},
    {"list_with", (PyCFunction)engine_list_with, METH_VARARGS, "list_with(socket, most): have so many names listed ahead there"},
    {"end_listing", (PyCFunction)engine_end_listing, METH_NOARGS, "end_listing(): list no more names ahead"},
    FSX_OUTPUT_METHODS
    {"ended", (PyCFunction)engine_ended, METH_NOARGS, "ended() -> (whether the connection is at its end, errno or 0)"},
    {"statistics", (PyCFunction)engine_statistics, METH_NOARGS, "statistics() -> dict of counters"},
    {"stop", (PyCFunction)engine_stop, METH_O, "stop(limit_ms) -> whether all threads have ended"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_doc, "Engine(...): threads that answer FUSE requests without Python; see native/engine.h."},
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
