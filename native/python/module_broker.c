/* module_broker.c: fanstore._native.Broker, the door between Python and chunks/broker.c. Translates arguments and nothing
 * else, but for the line of reads that were done and that Python has not taken yet.
 *
 * Typed for Python in fanstore/_native.pyi.
 */
#define PY_SSIZE_T_CLEAN
#include "python/module_broker.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "chunks/reads.h"
#include "chunks/shared.h"
#include "clients/fetchers.h"
#include "python/exchange_type.h"

/* Things of one kind that one call of take() returns at most. */
#define TAKEN_MOST 64u

/* A read of Python's. */
struct py_read {
    struct fsx_read read;
    struct broker_object *owner;
    uint64_t token;
    int error;
    struct py_read *next;
    PyObject *bytes; /* of the read's length; nobody else's until it is taken */
};

typedef struct broker_object {
    PyObject_HEAD
    PyObject *index;    /* keeps the index alive */
    PyObject *exchange; /* and this the exchange; NULL if other nodes are Python's */
    Py_buffer marks;
    int wake;
    struct fsx_broker *broker; /* NULL once it was stopped */
    struct fsx_fetchers *fetchers; /* NULL until programs ask for chunks */
    uint64_t capacity_bytes;
    bool started;
    pthread_mutex_t lock; /* guards what follows */
    struct py_read *done, **done_end;
} BrokerObject;

static PyObject *broker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"index", "marks", "verify", "capacity_bytes", "shared_readers", "loaders", "wake", NULL};
    PyObject *index_object;
    Py_buffer marks;
    int verify, wake;
    unsigned long long capacity_bytes;
    unsigned int shared_readers, loaders;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Ow*iKIIi", keywords, &index_object, &marks, &verify, &capacity_bytes,
                                     &shared_readers, &loaders, &wake))
        return NULL;
    const struct fsx_index *index = fsx_index_of(index_object);
    BrokerObject *self = NULL;
    if (index == NULL)
        goto fail;
    if ((uint64_t)marks.len != index->entries + index->chunk_records || verify < FSX_VERIFY_FIRST ||
        verify > FSX_VERIFY_NEVER || loaders < 1 || loaders > 64 || shared_readers < 1) {
        PyErr_SetString(PyExc_ValueError, "an argument of Broker is out of range");
        goto fail;
    }
    self = (BrokerObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        goto fail;
    self->wake = -1;
    self->done_end = &self->done;
    pthread_mutex_init(&self->lock, NULL);
    cpu_set_t cores;
    const int count = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : CPU_SETSIZE;
    self->wake = fcntl(wake, F_DUPFD_CLOEXEC, 0);
    if (self->wake < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        goto fail;
    }
    self->broker = fsx_broker_new(&(struct fsx_broker_settings){
        .index = index, .marks = marks.buf, .verify = (enum fsx_verify)verify, .capacity_bytes = capacity_bytes,
        .shared_readers = shared_readers, .loaders = loaders, .cores = (uint32_t)count, .wake = self->wake});
    if (self->broker == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    self->capacity_bytes = capacity_bytes;
    self->index = Py_NewRef(index_object);
    self->marks = marks;
    return (PyObject *)self;
fail:
    PyBuffer_Release(&marks);
    Py_XDECREF(self);
    return NULL;
}

static void free_done(BrokerObject *self) {
    for (struct py_read *read = self->done, *next; read != NULL; read = next) {
        next = read->next;
        Py_DECREF(read->bytes);
        free(read);
    }
    self->done = NULL;
    self->done_end = &self->done;
}

/* End all threads; false if some are in the hands of a disk after `limit_ms`: then the broker is left behind for good. */
static bool end_threads(BrokerObject *self, unsigned long limit_ms) {
    fsx_broker_end(self->broker);
    for (unsigned long waited_ms = 0;
         fsx_broker_running(self->broker) + (self->fetchers != NULL ? fsx_fetchers_end(self->fetchers) : 0) > 0; waited_ms++) {
        if (waited_ms >= limit_ms)
            return false;
        poll(NULL, 0, 1);
    }
    return true;
}

static void free_broker(BrokerObject *self) {
    if (self->fetchers != NULL)
        fsx_fetchers_free(self->fetchers);
    self->fetchers = NULL;
    fsx_broker_free(self->broker);
}

static void broker_dealloc(BrokerObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    bool ended = self->broker == NULL || !self->started || end_threads(self, 1000);
    if (ended) {
        free_broker(self);
        if (self->wake >= 0)
            close(self->wake);
        Py_XDECREF(self->exchange);
        if (self->index != NULL) {
            PyBuffer_Release(&self->marks);
            Py_DECREF(self->index);
        }
        free_done(self);
        pthread_mutex_destroy(&self->lock);
        type->tp_free(self);
    }
    Py_DECREF(type);
}

static bool is_usable(const BrokerObject *self) {
    if (self->broker == NULL)
        PyErr_SetString(PyExc_ValueError, "the broker was stopped");
    return self->broker != NULL;
}

/* ---- life ---------------------------------------------------------------------------------------------------------- */

static PyObject *broker_ask_peers(BrokerObject *self, PyObject *args) {
    PyObject *exchange_object;
    unsigned int rank;
    double limit_s;
    if (!PyArg_ParseTuple(args, "OId", &exchange_object, &rank, &limit_s))
        return NULL;
    struct fsx_exchange *exchange = fsx_exchange_of(exchange_object);
    if (exchange == NULL)
        return NULL;
    if (self->started || self->exchange != NULL || !(limit_s > 0 && limit_s < 1e9)) {
        PyErr_SetString(PyExc_ValueError, "this is said once, before the start, with a limit");
        return NULL;
    }
    if (fsx_broker_ask_peers(self->broker, exchange, rank, (uint64_t)(limit_s * 1e9)) != 0)
        return PyErr_NoMemory();
    self->exchange = Py_NewRef(exchange_object);
    Py_RETURN_NONE;
}

/* For threads that are made now: Python's signals are for its main thread. Those of a crash stay with whoever crashes: a handler
 * that says where (faulthandler) would not run if they were blocked. */
static void block_signals(sigset_t *before) {
    const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS};
    sigset_t all;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        sigdelset(&all, own[i]);
    pthread_sigmask(SIG_SETMASK, &all, before);
}

static PyObject *broker_start(BrokerObject *self, PyObject *unused) {
    (void)unused;
    if (self->started || !is_usable(self))
        return PyErr_Occurred() ? NULL : (PyErr_SetString(PyExc_ValueError, "it was started already"), NULL);
    sigset_t before;
    block_signals(&before);
    self->started = true;
    const int error = fsx_broker_start(self->broker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0)
        Py_RETURN_NONE;
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *broker_stop(BrokerObject *self, PyObject *argument) {
    const unsigned long limit_ms = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred())
        return NULL;
    if (self->broker == NULL)
        Py_RETURN_TRUE;
    bool ended;
    Py_BEGIN_ALLOW_THREADS
    ended = end_threads(self, limit_ms);
    Py_END_ALLOW_THREADS
    if (ended)
        free_broker(self);
    self->broker = NULL; /* nobody else may enter */
    if (!ended)
        Py_INCREF(self); /* for good: those threads will use it */
    return PyBool_FromLong(ended);
}

/* ---- sources ------------------------------------------------------------------------------------------------------- */

static PyObject *broker_use(BrokerObject *self, PyObject *args) {
    unsigned int partition;
    int fd, number, verified;
    if (!PyArg_ParseTuple(args, "Iiip", &partition, &fd, &number, &verified))
        return NULL;
    if (self->broker == NULL)
        Py_RETURN_FALSE;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = fsx_files_use(fsx_broker_files(self->broker), partition, fd, (uint8_t)number, verified != 0);
    Py_END_ALLOW_THREADS
    if (error == 0)
        Py_RETURN_TRUE;
    if (error == EEXIST)
        Py_RETURN_FALSE;
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *broker_route(BrokerObject *self, PyObject *args) {
    unsigned int partition;
    PyObject *ranks_object;
    if (!PyArg_ParseTuple(args, "IO", &partition, &ranks_object))
        return NULL;
    if (!is_usable(self))
        return NULL;
    if (self->exchange == NULL) {
        PyErr_SetString(PyExc_ValueError, "the broker asks no peers");
        return NULL;
    }
    PyObject *ranks = PySequence_Fast(ranks_object, "ranks are a sequence");
    if (ranks == NULL)
        return NULL;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(ranks);
    const int size = fsx_exchange_of(self->exchange)->size;
    int *numbers = PyMem_Calloc((size_t)count + 1, sizeof *numbers);
    bool right = numbers != NULL && partition < fsx_broker_index(self->broker)->partitions;
    for (Py_ssize_t i = 0; right && i < count; i++) {
        const long rank = PyLong_AsLong(PySequence_Fast_GET_ITEM(ranks, i));
        right = rank >= 0 && rank < size;
        numbers[i] = (int)rank;
    }
    Py_DECREF(ranks);
    if (!right && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "there is no such partition, or no such rank");
    if (right && !fsx_peers_route(fsx_broker_peers(self->broker), partition, numbers, (uint32_t)count)) {
        PyErr_NoMemory();
        right = false;
    }
    PyMem_Free(numbers);
    if (!right)
        return NULL;
    Py_RETURN_NONE;
}

static bool chunk_exists(const BrokerObject *self, unsigned int entry, unsigned int number) {
    const struct fsx_index *x = fsx_broker_index(self->broker);
    const bool exists = entry < x->entries && S_ISREG(x->mode[entry]) && x->size[entry] > 0 &&
                        number < (x->count[entry] > 0 ? x->count[entry] : 1);
    if (!exists)
        PyErr_SetString(PyExc_ValueError, "there is no such chunk");
    return exists;
}

static PyObject *broker_give(BrokerObject *self, PyObject *args) {
    unsigned int entry, number;
    int source;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "IIy*i", &entry, &number, &data, &source))
        return NULL;
    int told = -1;
    if (source < 0 || source >= FSX_CACHE) {
        PyErr_SetString(PyExc_ValueError, "there is no such source");
    } else if (self->broker != NULL && chunk_exists(self, entry, number)) {
        Py_BEGIN_ALLOW_THREADS
        told = fsx_broker_give(self->broker, (struct fsx_chunk_upcall){entry, number}, data.buf, (size_t)data.len,
                               (enum fsx_source)source, 0);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(told >= 0);
}

static PyObject *broker_refuse(BrokerObject *self, PyObject *args) {
    unsigned int entry, number;
    int error;
    if (!PyArg_ParseTuple(args, "IIi", &entry, &number, &error))
        return NULL;
    if (self->broker == NULL)
        return PyLong_FromLong(0);
    if (!chunk_exists(self, entry, number))
        return NULL;
    int told;
    Py_BEGIN_ALLOW_THREADS
    told = fsx_broker_give(self->broker, (struct fsx_chunk_upcall){entry, number}, NULL, 0, FSX_SHARED, error);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(told > 0 ? told : 0);
}

/* ---- wanting ------------------------------------------------------------------------------------------------------- */

static PyObject *broker_want(BrokerObject *self, PyObject *args) {
    unsigned int entry, number;
    int into_kernel = 0, stay = 0;
    if (!PyArg_ParseTuple(args, "II|pp", &entry, &number, &into_kernel, &stay) || !is_usable(self) ||
        !chunk_exists(self, entry, number))
        return NULL;
    bool added;
    Py_BEGIN_ALLOW_THREADS
    added = fsx_prefetch_add(fsx_broker_prefetch(self->broker), entry, number, into_kernel != 0, stay != 0);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(added);
}

static PyObject *broker_forget(BrokerObject *self, PyObject *args) {
    unsigned int entry, number;
    if (!PyArg_ParseTuple(args, "II", &entry, &number) || !is_usable(self) || !chunk_exists(self, entry, number))
        return NULL;
    fsx_broker_want(self->broker, NULL, entry, number, NULL, FSX_PASS);
    Py_RETURN_NONE;
}

static PyObject *broker_read_ahead_with(BrokerObject *self, PyObject *args) {
    int socket;
    unsigned int process;
    if (!PyArg_ParseTuple(args, "iI", &socket, &process) || !is_usable(self))
        return NULL;
    const int error = fsx_pages_ahead_use(fsx_prefetch_pages(fsx_broker_prefetch(self->broker)), socket, process);
    if (error == 0)
        Py_RETURN_NONE;
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *broker_end_reading_ahead(BrokerObject *self, PyObject *unused) {
    (void)unused;
    if (self->broker != NULL)
        fsx_pages_ahead_end(fsx_prefetch_pages(fsx_broker_prefetch(self->broker)));
    Py_RETURN_NONE;
}

static void read_done(struct fsx_read *read, const void *data, int error) {
    struct py_read *own = (struct py_read *)read;
    BrokerObject *self = own->owner;
    own->error = error;
    if (error == 0)
        memcpy(PyBytes_AS_STRING(own->bytes), data, read->length);
    pthread_mutex_lock(&self->lock);
    *self->done_end = own;
    self->done_end = &own->next;
    pthread_mutex_unlock(&self->lock);
    const uint64_t one = 1;
    while (write(self->wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* May this be read? False with ValueError set. */
static bool is_piece(BrokerObject *self, unsigned int entry, unsigned long long offset, unsigned int length) {
    const struct fsx_index *x = fsx_broker_index(self->broker);
    if (entry < x->entries && S_ISREG(x->mode[entry]) && length >= 1 && length <= FSX_CHUNK_BYTES &&
        offset <= x->size[entry] && length <= x->size[entry] - offset)
        return true;
    PyErr_SetString(PyExc_ValueError, "no such piece of a file");
    return false;
}

static PyObject *broker_read(BrokerObject *self, PyObject *args) {
    unsigned int entry, length;
    unsigned long long offset, token;
    if (!PyArg_ParseTuple(args, "IKIK", &entry, &offset, &length, &token) || !is_usable(self))
        return NULL;
    if (!is_piece(self, entry, offset, length))
        return NULL;
    struct py_read *read = calloc(1, sizeof *read);
    if (read == NULL)
        return PyErr_NoMemory();
    read->bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
    if (read->bytes == NULL) {
        free(read);
        return NULL;
    }
    read->read = (struct fsx_read){.entry = entry, .length = length, .offset = offset, .done = read_done};
    read->owner = self;
    read->token = token;
    Py_BEGIN_ALLOW_THREADS
    fsx_read_start(&read->read, self->broker, NULL);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *broker_read_nowait(BrokerObject *self, PyObject *args) {
    unsigned int entry, length;
    unsigned long long offset;
    if (!PyArg_ParseTuple(args, "IKI", &entry, &offset, &length) || !is_usable(self))
        return NULL;
    if (!is_piece(self, entry, offset, length))
        return NULL;
    struct fsx_read_counts *counts = fsx_broker_counts(self->broker);
    /* Room for a page more than is asked for, which reading may need. */
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length + FSX_BLOCK_SLACK);
    if (result == NULL)
        return NULL;
    uint8_t *target = (uint8_t *)PyBytes_AS_STRING(result);
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = fsx_broker_read_cached(self->broker, counts, entry, offset, length, target) ||
           (!fsx_broker_waits_for(self->broker, entry, offset, length) &&
            fsx_broker_read_plain(self->broker, counts, entry, offset, length, target));
    Py_END_ALLOW_THREADS
    if (done) {
        _PyBytes_Resize(&result, (Py_ssize_t)length);
        return result;
    }
    Py_DECREF(result);
    Py_RETURN_NONE;
}

/* ---- what there is to take ----------------------------------------------------------------------------------------- */

/* An item of a new list, which goes if there is none. */
static void put(PyObject **list, size_t i, PyObject *item) {
    if (item == NULL)
        Py_CLEAR(*list);
    else
        PyList_SET_ITEM(*list, (Py_ssize_t)i, item);
}

static PyObject *broker_take_upcalls(BrokerObject *self, PyObject *unused) {
    (void)unused;
    if (!is_usable(self))
        return NULL;
    struct fsx_chunk_upcall upcalls[TAKEN_MOST];
    const size_t count = fsx_broker_take_upcalls(self->broker, upcalls, TAKEN_MOST);
    PyObject *result = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; result != NULL && i < count; i++)
        put(&result, i, Py_BuildValue("II", upcalls[i].entry, upcalls[i].number));
    return result;
}

static PyObject *broker_take_failures(BrokerObject *self, PyObject *unused) {
    (void)unused;
    if (!is_usable(self))
        return NULL;
    struct fsx_failure failures[TAKEN_MOST];
    struct fsx_peers *peers = fsx_broker_peers(self->broker);
    const size_t count = peers == NULL ? 0 : fsx_peers_take_failures(peers, failures, TAKEN_MOST);
    PyObject *result = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; result != NULL && i < count; i++)
        put(&result, i, Py_BuildValue("iiI", (int)failures[i].kind, failures[i].peer, failures[i].partition));
    return result;
}

static PyObject *broker_take_reads(BrokerObject *self, PyObject *unused) {
    (void)unused;
    pthread_mutex_lock(&self->lock);
    struct py_read *first = self->done;
    self->done = NULL;
    self->done_end = &self->done;
    pthread_mutex_unlock(&self->lock);
    PyObject *result = PyList_New(0);
    for (struct py_read *read = first, *next; read != NULL; read = next) {
        next = read->next;
        PyObject *item = result == NULL ? NULL
                         : read->error == 0
                             ? Py_BuildValue("KO", (unsigned long long)read->token, read->bytes)
                             : Py_BuildValue("Ki", (unsigned long long)read->token, read->error);
        if (item == NULL || PyList_Append(result, item) != 0)
            Py_CLEAR(result);
        Py_XDECREF(item);
        Py_DECREF(read->bytes);
        free(read);
    }
    return result;
}

/* ---- programs that ask for chunks ------------------------------------------------------------------------------------ */

static PyObject *broker_share(BrokerObject *self, PyObject *args) {
    unsigned int threads, most;
    if (!PyArg_ParseTuple(args, "II", &threads, &most) || !is_usable(self))
        return NULL;
    if (!self->started || threads < 1 || threads > 64) {
        PyErr_SetString(PyExc_ValueError, "after the start, with 1 to 64 threads");
        return NULL;
    }
    if (self->fetchers == NULL) {
        sigset_t before;
        block_signals(&before);
        self->fetchers = fsx_fetchers_new(self->broker, threads, most, self->capacity_bytes);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    const int fd = self->fetchers == NULL ? -1 : fsx_shared_open(fsx_broker_shared(self->broker));
    return fd < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(fd);
}

static PyObject *broker_add_fetcher(BrokerObject *self, PyObject *unused) {
    (void)unused;
    if (!is_usable(self))
        return NULL;
    if (self->fetchers == NULL) {
        PyErr_SetString(PyExc_ValueError, "nothing is shared");
        return NULL;
    }
    const int fd = fsx_fetchers_add(self->fetchers);
    return fd < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(fd);
}

/* ---- statistics ---------------------------------------------------------------------------------------------------- */

static PyObject *broker_set_capacity(BrokerObject *self, PyObject *argument) {
    const unsigned long long bytes = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred() || !is_usable(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    fsx_broker_set_capacity(self->broker, bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *fsx_latency_tuple(const struct fsx_latency *latency) {
    return Py_BuildValue("KKKKy#", (unsigned long long)latency->count, (unsigned long long)latency->errors,
                         (unsigned long long)latency->total_ns, (unsigned long long)latency->max_ns,
                         (const char *)latency->buckets, (Py_ssize_t)sizeof latency->buckets);
}

PyObject *fsx_read_counts_dict(const struct fsx_read_counts *counts) {
#define SOURCE(s)                                                                                                       \
    (unsigned long long)counts->source[s].reads, (unsigned long long)counts->source[s].bytes,                          \
        (unsigned long long)counts->source[s].fetches, (unsigned long long)counts->source[s].fetched_bytes
    return Py_BuildValue("{s:{s:(KKKK),s:(KKKK),s:(KKKK),s:(KKKK)},s:(KK),s:K}", "sources", "local", SOURCE(FSX_LOCAL),
                         "remote", SOURCE(FSX_REMOTE), "shared", SOURCE(FSX_SHARED), "cache", SOURCE(FSX_CACHE),
                         "verification", (unsigned long long)counts->checked_chunks,
                         (unsigned long long)counts->checked_bytes, "direct_reads", (unsigned long long)counts->direct);
#undef SOURCE
}

static PyObject *broker_statistics(BrokerObject *self, PyObject *unused) {
    (void)unused;
    if (!is_usable(self))
        return NULL;
    struct fsx_cache_counts c;
    struct fsx_read_counts reads = {0};
    fsx_broker_count(self->broker, &c, &reads);
    struct fsx_fetcher_counts f = {0};
    if (self->fetchers != NULL)
        f = fsx_fetchers_count(self->fetchers);
    uint64_t begun;
    const uint32_t in_line = fsx_prefetch_count(fsx_broker_prefetch(self->broker), &begun);
    const struct fsx_pages_ahead_counts pages = fsx_pages_ahead_count(fsx_prefetch_pages(fsx_broker_prefetch(self->broker)));
    PyObject *result = fsx_read_counts_dict(&reads);
    const struct {
        const char *name;
        uint64_t value;
    } items[] = {{"capacity_bytes", c.capacity_bytes}, {"used_bytes", c.used_bytes}, {"chunks", c.chunks},
                 {"in_flight_bytes", c.in_flight_bytes}, {"mapped_bytes", c.mapped_bytes}, {"hits", c.hits},
                 {"misses", c.misses}, {"joined_loads", c.joined}, {"evictions", c.evictions},
                 {"failed_loads", c.failed}, {"upcalls", c.upcalls}, {"prefetched", c.prefetched},
                 {"prefetched_taken", c.prefetched_taken}, {"forgotten", c.forgotten},
                 {"late", c.late}, {"waited_ns", c.waited_ns},
                 {"in_line", in_line + pages.in_line}, {"ordered", begun},
                 {"into_kernel", pages.files}, {"into_kernel_bytes", pages.bytes}, {"fetchers", f.fetchers},
                 {"fetches", f.requests}, {"fetches_refused", f.refused}, {"leases", f.leases},
                 {"held_bytes", f.held_bytes}};
    PyObject *cache = PyDict_New();
    bool made = result != NULL && cache != NULL;
    for (size_t i = 0; made && i < sizeof items / sizeof *items; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(items[i].value);
        made = value != NULL && PyDict_SetItemString(cache, items[i].name, value) == 0;
        Py_XDECREF(value);
    }
    made = made && PyDict_SetItemString(result, "cache", cache) == 0;
    Py_XDECREF(cache);
    if (!made)
        Py_CLEAR(result);
    return result;
}

/* What peers have given: per rank chunks and bytes, and the time from question to answer. */
static PyObject *broker_fetched(BrokerObject *self, PyObject *unused) {
    (void)unused;
    if (!is_usable(self))
        return NULL;
    struct fsx_peers *peers = fsx_broker_peers(self->broker);
    if (peers == NULL) {
        PyErr_SetString(PyExc_ValueError, "the broker asks no peers");
        return NULL;
    }
    const int size = fsx_exchange_of(self->exchange)->size;
    PyObject *ranks = PyList_New(size);
    for (int rank = 0; ranks != NULL && rank < size; rank++) {
        const struct fsx_peer_counts counts = fsx_peers_count(peers, rank);
        PyObject *item = Py_BuildValue("KK", (unsigned long long)counts.fetches, (unsigned long long)counts.fetched_bytes);
        if (item == NULL)
            Py_CLEAR(ranks);
        else
            PyList_SET_ITEM(ranks, rank, item);
    }
    struct fsx_latency *answers = PyMem_Calloc(1, sizeof *answers);
    if (ranks == NULL || answers == NULL) {
        Py_XDECREF(ranks);
        PyMem_Free(answers);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    fsx_peers_count_answers(peers, answers);
    PyObject *latency = fsx_latency_tuple(answers);
    PyMem_Free(answers);
    return latency == NULL ? (Py_DECREF(ranks), NULL) : Py_BuildValue("NN", ranks, latency);
}

/* ---- class --------------------------------------------------------------------------------------------------------- */

static PyMethodDef broker_methods[] = {
    {"ask_peers", (PyCFunction)broker_ask_peers, METH_VARARGS, "ask_peers(exchange, rank, limit_s): ask other nodes"},
    {"start", (PyCFunction)broker_start, METH_NOARGS, "start(): start the threads"},
    {"stop", (PyCFunction)broker_stop, METH_O, "stop(limit_ms) -> whether all threads have ended"},
    {"use", (PyCFunction)broker_use, METH_VARARGS, "use(partition, fd, number, verified) -> whether it is read from this file now"},
    {"route", (PyCFunction)broker_route, METH_VARARGS, "route(partition, ranks): ask these for it from now on"},
    {"want", (PyCFunction)broker_want, METH_VARARGS, "want(entry, chunk, into_kernel=False, stay=False) -> whether it is in line now: bring it into the cache for one use, or to stay, if there is room"},
    {"forget", (PyCFunction)broker_forget, METH_VARARGS, "forget(entry, chunk): it need not stay any more"},
    {"read_ahead_with", (PyCFunction)broker_read_ahead_with, METH_VARARGS,
     "read_ahead_with(socket, process): have files read into the page cache of the mount there"},
    {"end_reading_ahead", (PyCFunction)broker_end_reading_ahead, METH_NOARGS, "end_reading_ahead(): no more of that"},
    {"read", (PyCFunction)broker_read, METH_VARARGS, "read(entry, offset, length, token): done when take_reads has it"},
    {"read_nowait", (PyCFunction)broker_read_nowait, METH_VARARGS,
     "read_nowait(entry, offset, length) -> bytes, or None if they cannot be had at once"},
    {"take_upcalls", (PyCFunction)broker_take_upcalls, METH_NOARGS, "take_upcalls() -> [(entry, chunk)]: bring their stored bytes"},
    {"take_failures", (PyCFunction)broker_take_failures, METH_NOARGS, "take_failures() -> [(kind, peer, partition)]"},
    {"take_reads", (PyCFunction)broker_take_reads, METH_NOARGS, "take_reads() -> [(token, bytes or errno)]"},
    {"give", (PyCFunction)broker_give, METH_VARARGS, "give(entry, chunk, stored, source) -> whether it was awaited"},
    {"refuse", (PyCFunction)broker_refuse, METH_VARARGS, "refuse(entry, chunk, errno) -> how many waited for it: it cannot be had"},
    {"share", (PyCFunction)broker_share, METH_VARARGS, "share(threads, most) -> descriptor of the cache, for programs that read it, so many at most"},
    {"add_fetcher", (PyCFunction)broker_add_fetcher, METH_NOARGS, "add_fetcher() -> descriptor of a socket over which chunks are asked for"},
    {"set_capacity", (PyCFunction)broker_set_capacity, METH_O, "set_capacity(bytes): keep no more than this"},
    {"statistics", (PyCFunction)broker_statistics, METH_NOARGS, "statistics() -> dict of counters"},
    {"fetched", (PyCFunction)broker_fetched, METH_NOARGS, "fetched() -> ([(chunks, bytes)] by rank, latency)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot broker_slots[] = {
    {Py_tp_doc, "Broker(...): chunks of the dataset for whoever wants them; see native/chunks/broker.h."},
    {Py_tp_new, broker_new},
    {Py_tp_dealloc, broker_dealloc},
    {Py_tp_methods, broker_methods},
    {0, NULL},
};

static PyType_Spec broker_spec = {"fanstore._native.Broker", sizeof(BrokerObject), 0, Py_TPFLAGS_DEFAULT, broker_slots};

struct fsx_broker *fsx_broker_of(PyObject *object) {
    if (strcmp(Py_TYPE(object)->tp_name, "fanstore._native.Broker") != 0) {
        PyErr_SetString(PyExc_TypeError, "a Broker is needed");
        return NULL;
    }
    if (!is_usable((BrokerObject *)object))
        return NULL;
    return ((BrokerObject *)object)->broker;
}

int fsx_module_add_broker(PyObject *module) {
    PyObject *broker = PyType_FromSpec(&broker_spec);
    const int result = broker == NULL ? -1 : PyModule_AddObjectRef(module, "Broker", broker);
    Py_XDECREF(broker);
    return result;
}
