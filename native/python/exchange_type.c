/* exchange_type.c: see exchange_type.h. Translates arguments and references, and nothing else.
 *
 * An owner token is the object given to `submit`; a memory token is an Answer, or the memoryview of what is sent.
 * An Exchange is never freed while something is under way: MPI would write to memory that is no longer there.
 */
#include "python/exchange_type.h"

#include <endian.h>
#include <string.h>
#include <sys/eventfd.h>

#include "mpi/exchange.h"
#include "base/pool.h"

/* Answers that are taken over from the MPI thread at once. */
#define COMPLETIONS_AT_ONCE 64

typedef struct {
    PyObject_HEAD
    struct fsx_exchange exchange;
    struct fsx_pool pool;
    PyTypeObject *answer_type;
} ExchangeObject;

/* ---- Answer --------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    ExchangeObject *exchange; /* whose pool the memory belongs to */
    void *memory;
    size_t capacity;
    Py_ssize_t bytes;
} AnswerObject;

static AnswerObject *new_answer(ExchangeObject *exchange, Py_ssize_t bytes) {
    AnswerObject *self = (AnswerObject *)exchange->answer_type->tp_alloc(exchange->answer_type, 0);
    if (self == NULL)
        return NULL;
    self->memory = fsx_pool_take(&exchange->pool, (size_t)bytes, &self->capacity);
    self->bytes = bytes;
    self->exchange = (ExchangeObject *)Py_NewRef((PyObject *)exchange);
    if (self->memory == NULL) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    return self;
}

static void answer_dealloc(AnswerObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->memory != NULL)
        fsx_pool_give(&self->exchange->pool, self->memory, self->capacity);
    Py_XDECREF(self->exchange);
    type->tp_free(self);
    Py_DECREF(type);
}

static int answer_buffer(PyObject *object, Py_buffer *view, int flags) {
    const AnswerObject *self = (AnswerObject *)object;
    return PyBuffer_FillInfo(view, object, self->memory, self->bytes, 1, flags);
}

static Py_ssize_t answer_length(PyObject *object) { return ((AnswerObject *)object)->bytes; }

static PyType_Slot answer_slots[] = {
    {Py_tp_doc, "Memory into which a peer's answer comes; to be read when it has arrived."},
    {Py_tp_dealloc, answer_dealloc},
    {Py_bf_getbuffer, answer_buffer},
    {Py_sq_length, answer_length},
    {0, NULL},
};
static PyType_Spec answer_spec = {"fanstore._native.Answer", sizeof(AnswerObject), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, answer_slots};

/* ---- Exchange: life ------------------------------------------------------------------------------------------- */

static PyObject *exchange_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"functions", "handles", "layout", "size", "message_bytes", "keep_bytes", NULL};
    unsigned long long f[7], byte, communicator, null_request, keep_bytes;
    unsigned int handle_bytes, status_bytes, error_offset;
    int size, message_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "(KKKKKKK)(KKK)(III)iiK", keywords, &f[0], &f[1], &f[2], &f[3], &f[4],
                                     &f[5], &f[6], &byte, &communicator, &null_request, &handle_bytes, &status_bytes,
                                     &error_offset, &size, &message_bytes, &keep_bytes))
        return NULL;
    if (handle_bytes > sizeof(uintptr_t) || error_offset + sizeof(int) > status_bytes || size < 1 || message_bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "no such MPI library");
        return NULL;
    }
    ExchangeObject *self = (ExchangeObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    struct fsx_exchange *x = &self->exchange;
    x->mpi = (struct fsx_mpi){
        .irecv = (int (*)(void *, int, uintptr_t, int, int, uintptr_t, void *))(uintptr_t)f[0],
        .isend = (int (*)(const void *, int, uintptr_t, int, int, uintptr_t, void *))(uintptr_t)f[1],
        .test = (int (*)(void *, int *, void *))(uintptr_t)f[2],
        .testsome = (int (*)(int, void *, int *, int *, void *))(uintptr_t)f[3],
        .cancel = (int (*)(void *))(uintptr_t)f[4],
        .get_count = (int (*)(const void *, uintptr_t, int *))(uintptr_t)f[5],
        .test_cancelled = (int (*)(const void *, int *))(uintptr_t)f[6],
        .byte = (uintptr_t)byte,
        .communicator = (uintptr_t)communicator,
        .null_request = (uintptr_t)null_request,
        .handle_bytes = handle_bytes,
        .status_bytes = status_bytes,
        .error_offset = error_offset,
    };
    x->size = size;
    x->buffer_bytes = FSX_HEADER_BYTES + message_bytes;
    x->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    x->notify = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    self->pool.keep_bytes = (size_t)keep_bytes;
    PyObject *module = PyType_GetModule(type);
    PyObject *answer_type = module == NULL ? NULL : PyObject_GetAttrString(module, "Answer");
    self->answer_type = (PyTypeObject *)answer_type;
    if (!fsx_exchange_open(x) || x->wake < 0 || x->notify < 0 || answer_type == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_OSError, "no memory or descriptors for requests between nodes");
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void exchange_dealloc(ExchangeObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    struct fsx_exchange *x = &self->exchange;
    if (fsx_exchange_is_idle(x)) {
        for (int i = 0; i < x->submitted_count; i++) {
            const struct fsx_question *question = &x->submitted[i];
            if (question->asker != NULL) {
                free(question->message);
                question->asker->completed(question->owner, FSX_FAILED, true);
                continue;
            }
            Py_DECREF((PyObject *)question->owner);
            Py_DECREF((PyObject *)question->memory);
        }
        for (int i = 0; i < x->completion_count; i++) {
            Py_DECREF((PyObject *)x->completions[i].owner);
            Py_XDECREF((PyObject *)x->completions[i].memory);
        }
        for (int i = 0; i < x->released_count; i++)
            Py_DECREF((PyObject *)x->released[i]);
        for (uint32_t i = 0; i < x->map_count; i++)
            Py_XDECREF((PyObject *)x->maps[i].memory);
        fsx_exchange_free(x);
    }
    fsx_pool_keep(&self->pool, 0);
    close(x->wake);
    close(x->notify);
    Py_XDECREF(self->answer_type);
    type->tp_free(self);
    Py_DECREF(type);
}

static bool is_peer(const ExchangeObject *self, int peer) {
    if (peer >= 0 && peer < self->exchange.size)
        return true;
    PyErr_SetString(PyExc_ValueError, "no such rank");
    return false;
}

/* The rank that a method of one argument was given, or -1 with an exception set. */
static int peer_argument(const ExchangeObject *self, PyObject *argument) {
    const long peer = PyLong_AsLong(argument);
    if (peer == -1 && PyErr_Occurred())
        return -1;
    return is_peer(self, peer > INT32_MAX ? -1 : (int)peer) ? (int)peer : -1;
}

/* ---- Exchange: trio thread ------------------------------------------------------------------------------------ */

static PyObject *exchange_submit(ExchangeObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 8 || !PyBytes_Check(args[6])) {
        PyErr_SetString(PyExc_TypeError, "submit(owner, peer, kind, partition, offset, length, text, answer_bytes)");
        return NULL;
    }
    const int peer = peer_argument(self, args[1]);
    if (peer < 0)
        return NULL;
    const unsigned long kind = PyLong_AsUnsignedLong(args[2]), partition = PyLong_AsUnsignedLong(args[3]);
    const unsigned long long offset = PyLong_AsUnsignedLongLong(args[4]);
    const unsigned long length = PyLong_AsUnsignedLong(args[5]);
    const Py_ssize_t text_bytes = PyBytes_GET_SIZE(args[6]), answer_bytes = PyLong_AsSsize_t(args[7]);
    if (PyErr_Occurred())
        return NULL;
    if (answer_bytes < 1 || answer_bytes > INT32_MAX || text_bytes > self->exchange.buffer_bytes - FSX_HEADER_BYTES ||
        kind > UINT32_MAX || partition > UINT32_MAX || length > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "no such question");
        return NULL;
    }
    AnswerObject *answer = new_answer(self, answer_bytes);
    if (answer == NULL)
        return NULL;
    uint32_t *message = malloc(FSX_HEADER_BYTES + (size_t)text_bytes);
    if (message == NULL) {
        Py_DECREF(answer);
        return PyErr_NoMemory();
    }
    const uint64_t offset_field = htole64(offset);
    message[0] = htole32((uint32_t)kind);
    message[1] = 0; /* the tag: chosen when it leaves */
    message[2] = htole32((uint32_t)partition);
    message[3] = htole32((uint32_t)length);
    memcpy(message + 4, &offset_field, sizeof offset_field);
    memcpy(message + 6, PyBytes_AS_STRING(args[6]), (size_t)text_bytes);
    const struct fsx_question question = {
        .owner = Py_NewRef(args[0]),
        .memory = Py_NewRef((PyObject *)answer),
        .answer = answer->memory,
        .message = message,
        .message_bytes = FSX_HEADER_BYTES + (int)text_bytes,
        .answer_bytes = (int)answer_bytes,
        .peer = peer,
    };
    fsx_exchange_submit(&self->exchange, &question);
    return (PyObject *)answer;
}

static PyObject *exchange_take_completions(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    struct fsx_completion completions[COMPLETIONS_AT_ONCE];
    const int count = fsx_exchange_take_completions(&self->exchange, completions, COMPLETIONS_AT_ONCE);
    PyObject *list = PyList_New(count);
    for (int i = 0; i < count; i++) {
        PyObject *item = list == NULL ? NULL : Py_BuildValue("(Oi)", (PyObject *)completions[i].owner, completions[i].got);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, item);
        Py_DECREF((PyObject *)completions[i].owner);
        Py_XDECREF((PyObject *)completions[i].memory);
    }
    return list;
}

static PyObject *exchange_interrupt(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    fsx_exchange_interrupt(&self->exchange);
    Py_RETURN_NONE;
}

static PyObject *exchange_is_silent(ExchangeObject *self, PyObject *argument) {
    const int peer = peer_argument(self, argument);
    return peer < 0 ? NULL : PyBool_FromLong(__atomic_load_n(&self->exchange.peers[peer].silent, __ATOMIC_RELAXED));
}

static PyObject *exchange_set_silent(ExchangeObject *self, PyObject *argument) {
    const int peer = peer_argument(self, argument);
    if (peer < 0)
        return NULL;
    fsx_exchange_set_silent(&self->exchange, peer);
    Py_RETURN_NONE;
}

static PyObject *exchange_counters(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    const struct fsx_counters *c = &self->exchange.counters;
    return Py_BuildValue("{sK sK sK sK sK sK}", "fetches", (unsigned long long)c->fetches, "fetched_bytes",
                         (unsigned long long)c->fetched_bytes, "served", (unsigned long long)c->served, "served_bytes",
                         (unsigned long long)c->served_bytes, "late_answers", (unsigned long long)c->late_answers,
                         "timeouts", (unsigned long long)__atomic_load_n(&c->timeouts, __ATOMIC_RELAXED));
}

static PyObject *exchange_fileno(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(self->exchange.notify);
}

/* ---- Exchange: MPI thread ------------------------------------------------------------------------------------- */

static PyObject *exchange_run(ExchangeObject *self, PyObject *argument) {
    struct fsx_exchange *x = &self->exchange;
    const unsigned long long spin_ns = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    bool quiet;
    Py_BEGIN_ALLOW_THREADS
    quiet = fsx_exchange_run(x, spin_ns);
    Py_END_ALLOW_THREADS
    for (int i = 0; i < x->released_count; i++)
        Py_DECREF((PyObject *)x->released[i]);
    x->released_count = 0;
    return PyBool_FromLong(quiet);
}

static PyObject *exchange_take_event(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    struct fsx_exchange *x = &self->exchange;
    if (x->event_count == 0)
        Py_RETURN_NONE;
    const struct fsx_event event = x->events[0];
    memmove(x->events, x->events + 1, (size_t)--x->event_count * sizeof event);
    return Py_BuildValue("(Oii)", event.kind == FSX_HEARD ? Py_True : Py_False, event.peer, event.value);
}

static PyObject *exchange_sleep(ExchangeObject *self, PyObject *argument) {
    const double seconds = PyFloat_AsDouble(argument);
    if (PyErr_Occurred())
        return NULL;
    const uint64_t ns = seconds <= 0 ? 0 : (uint64_t)(seconds * 1e9);
    Py_BEGIN_ALLOW_THREADS
    fsx_exchange_sleep(&self->exchange, ns);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *exchange_idle_s(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    return PyFloat_FromDouble((double)fsx_exchange_idle_ns(&self->exchange) / 1e9);
}

static PyObject *exchange_touch(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    fsx_exchange_touch(&self->exchange);
    Py_RETURN_NONE;
}

static PyObject *exchange_clear_interrupt(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    fsx_exchange_clear_interrupt(&self->exchange);
    Py_RETURN_NONE;
}

static PyObject *exchange_message(ExchangeObject *self, PyObject *args) {
    int peer, bytes;
    if (!PyArg_ParseTuple(args, "ii", &peer, &bytes) || !is_peer(self, peer))
        return NULL;
    if (bytes < 0 || bytes > self->exchange.buffer_bytes) {
        PyErr_SetString(PyExc_ValueError, "no message is that long");
        return NULL;
    }
    return PyBytes_FromStringAndSize((const char *)self->exchange.peers[peer].buffer, bytes);
}

static PyObject *exchange_listen(ExchangeObject *self, PyObject *argument) {
    const int peer = peer_argument(self, argument);
    if (peer < 0)
        return NULL;
    fsx_exchange_listen(&self->exchange, peer);
    Py_RETURN_NONE;
}

static PyObject *exchange_send(ExchangeObject *self, PyObject *args) {
    int peer, farewell;
    Py_buffer message;
    if (!PyArg_ParseTuple(args, "iy*p", &peer, &message, &farewell))
        return NULL;
    void *copy = is_peer(self, peer) ? malloc((size_t)message.len) : NULL;
    if (copy != NULL) {
        memcpy(copy, message.buf, (size_t)message.len);
        fsx_exchange_send(&self->exchange, peer, copy, (int)message.len, farewell);
    }
    PyBuffer_Release(&message);
    if (copy == NULL)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *exchange_reply(ExchangeObject *self, PyObject *args) {
    int peer, tag;
    PyObject *data;
    if (!PyArg_ParseTuple(args, "iiO", &peer, &tag, &data) || !is_peer(self, peer))
        return NULL;
    PyObject *view = PyMemoryView_GetContiguous(data, PyBUF_READ, 'C');
    if (view == NULL)
        return NULL;
    const Py_buffer *buffer = PyMemoryView_GET_BUFFER(view);
    if (buffer->len > INT32_MAX) {
        Py_DECREF(view);
        PyErr_SetString(PyExc_ValueError, "an answer is too long");
        return NULL;
    }
    fsx_exchange_reply(&self->exchange, peer, tag, buffer->buf, (int)buffer->len, view);
    Py_RETURN_NONE;
}

static PyObject *exchange_add_map(ExchangeObject *self, PyObject *args) {
    unsigned int partition;
    PyObject *data;
    if (!PyArg_ParseTuple(args, "IO", &partition, &data))
        return NULL;
    struct fsx_exchange *x = &self->exchange;
    if (partition < x->map_count && x->maps[partition].memory != NULL)
        Py_RETURN_NONE; /* the same */
    PyObject *view = PyMemoryView_GetContiguous(data, PyBUF_READ, 'C');
    if (view == NULL)
        return NULL;
    const Py_buffer *buffer = PyMemoryView_GET_BUFFER(view);
    if (!fsx_exchange_add_map(x, partition, buffer->buf, (size_t)buffer->len, view)) {
        Py_DECREF(view);
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

static PyObject *exchange_set_serving(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    self->exchange.serving = true;
    Py_RETURN_NONE;
}

static PyObject *exchange_set_closing(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    self->exchange.closing = true;
    Py_RETURN_NONE;
}

static PyObject *exchange_lose(ExchangeObject *self, PyObject *argument) {
    const int peer = peer_argument(self, argument);
    if (peer < 0)
        return NULL;
    fsx_exchange_lose(&self->exchange, peer);
    Py_RETURN_NONE;
}

static PyObject *exchange_part(ExchangeObject *self, PyObject *argument) {
    const int peer = peer_argument(self, argument);
    if (peer < 0)
        return NULL;
    fsx_exchange_part(&self->exchange, peer);
    Py_RETURN_NONE;
}

static PyObject *exchange_give_up(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    fsx_exchange_break(&self->exchange);
    Py_RETURN_NONE;
}

static PyObject *exchange_pending(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(fsx_exchange_pending(&self->exchange));
}

static PyObject *exchange_replies(ExchangeObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(self->exchange.sending + self->exchange.waiting_count);
}

#define METHOD(name, flags, doc) {#name, (PyCFunction)(void (*)(void))exchange_##name, flags, doc}
static PyMethodDef exchange_methods[] = {
    METHOD(submit, METH_FASTCALL, "submit(owner, peer, kind, partition, offset, length, text, answer_bytes) -> Answer"),
    METHOD(take_completions, METH_NOARGS, "take_completions() -> [(owner, bytes or -1)]; if empty, fileno() tells of the next"),
    METHOD(fileno, METH_NOARGS, "fileno() -> descriptor that becomes readable when something has completed"),
    METHOD(interrupt, METH_NOARGS, "interrupt(): let run or sleep return"),
    METHOD(is_silent, METH_O, "is_silent(peer) -> whether nothing has come from it since set_silent"),
    METHOD(set_silent, METH_O, "set_silent(peer): it has not answered in time"),
    METHOD(counters, METH_NOARGS, "counters() -> dict"),
    METHOD(run, METH_O, "run(spin_ns) -> whether there was no traffic for that long"),
    METHOD(take_event, METH_NOARGS, "take_event() -> None or (a message or a loss?, peer, its bytes or MPI's code)"),
    METHOD(sleep, METH_O, "sleep(seconds), or until there is something to do"),
    METHOD(idle_s, METH_NOARGS, "idle_s() -> seconds since the last traffic"),
    METHOD(touch, METH_NOARGS, "touch(): traffic may follow"),
    METHOD(clear_interrupt, METH_NOARGS, "clear_interrupt(): before looking for what the interrupt was for"),
    METHOD(message, METH_VARARGS, "message(peer, bytes) -> the message that was received"),
    METHOD(listen, METH_O, "listen(peer): receive its next message"),
    METHOD(send, METH_VARARGS, "send(peer, message, also to one that has gone)"),
    METHOD(reply, METH_VARARGS, "reply(peer, tag, data): answer a question"),
    METHOD(add_map, METH_VARARGS, "add_map(partition, data): answer FETCH out of this from now on"),
    METHOD(set_serving, METH_NOARGS, "set_serving(): answer FETCH from now on"),
    METHOD(set_closing, METH_NOARGS, "set_closing(): ask and answer nothing any more"),
    METHOD(lose, METH_O, "lose(peer): it is dead"),
    METHOD(part, METH_O, "part(peer): it has said BYE"),
    METHOD(give_up, METH_NOARGS, "give_up(): MPI cannot be used any more"),
    METHOD(pending, METH_NOARGS, "pending() -> requests under way"),
    METHOD(replies, METH_NOARGS, "replies() -> replies that are not through"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot exchange_slots[] = {
    {Py_tp_doc, "Exchange(functions, handles, layout, size, message_bytes, keep_bytes): see native/mpi/exchange.h."},
    {Py_tp_new, exchange_new},
    {Py_tp_dealloc, exchange_dealloc},
    {Py_tp_methods, exchange_methods},
    {0, NULL},
};
static PyType_Spec exchange_spec = {"fanstore._native.Exchange", sizeof(ExchangeObject), 0, Py_TPFLAGS_DEFAULT,
                                    exchange_slots};

struct fsx_exchange *fsx_exchange_of(PyObject *object) {
    /* The type is made once per module and has no subclass: its name is enough to know it by. */
    if (strcmp(Py_TYPE(object)->tp_name, "fanstore._native.Exchange") != 0) {
        PyErr_SetString(PyExc_TypeError, "an Exchange is needed");
        return NULL;
    }
    return &((ExchangeObject *)object)->exchange;
}

int fsx_add_exchange_types(PyObject *module) {
    PyType_Spec *specs[] = {&answer_spec, &exchange_spec};
    const char *names[] = {"Answer", "Exchange"};
    for (int i = 0; i < 2; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (type == NULL || PyModule_AddObjectRef(module, names[i], type) != 0) {
            Py_XDECREF(type);
            return -1;
        }
        Py_DECREF(type);
    }
    return 0;
}
