/* engine.c: see engine.h.
 *
 * Locks: `lock` guards what the kernel offered; upcalls and outputs have their own. What a worker counts is its own,
 * written without a lock and read by others as it happens to be: single 64-bit numbers.
 */
#include "fuse/engine.h"
#include "chunks/reads.h"
#include "base/nanoseconds.h"
#include "fuse/device.h"
#include "fuse/sending.h"
#include "outputs/writers.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* With outputs: a WRITE is never passed on, and its data begins with a page. */
#define PAGE 4096u
#define WRITE_HEAD (sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in))
#define OUTPUT_REQUEST_BYTES (WRITE_HEAD + FSX_OUTPUT_WRITE_BYTES + PAGE)
_Static_assert(WRITE_HEAD == 80 && PAGE % 8 == 0, "layout of the kernel's protocol");
/* Room for an answer with the rounding of direct I/O. Those of all workers lie one behind the other, in huge pages where the
 * kernel has them, so that a read is one request to the disk instead of one per page (some virtual disks take no more than
 * one segment per request), and none is wasted. */
#define ANSWER_ROOM (FSX_READ_BYTES + PAGE)
#define HUGE_BYTES ((size_t)2 << 20)
/* Largest reply of pyfuse3. */
#define PACKET_BYTES (256u << 10)

/* The upper bits of a unique number tell pyfuse3's replies to the workers apart; the kernel counts up from 2. */
#define WORKER_SHIFT 56
#define UNIQUE_MASK (((uint64_t)1 << WORKER_SHIFT) - 1)
_Static_assert(FSX_ENGINE_WORKERS_MAX < 1u << (64 - WORKER_SHIFT), "a worker's number fits above");

/* Wakes a worker from its read of the device, so that it sees that it must end. */
#define WAKE_SIGNAL (SIGRTMIN + 5)

struct worker {
    struct fsx_engine *engine;
    pthread_t thread;
    uint32_t number;
    int device;
    bool started;
    atomic_bool ended;
    uint8_t *block;   /* memory of the request */
    uint8_t *request; /* in the block, aligned to 8; of request_bytes */
    size_t request_bytes;
    uint8_t *answer; /* of ANSWER_ROOM, page-aligned */
    struct fsx_read_counts reads;
    struct fsx_poller poller;
    struct fsx_latency operations[FSX_OPERATIONS];
    uint64_t forwarded, upcalls, interrupted, malformed;
};

struct fsx_engine {
    struct fsx_engine_settings settings;
    struct fsx_tree tree; /* its flags are set by the pump before the kernel goes on */
    struct worker *workers;
    uint8_t *answers; /* memory of all workers */
    pthread_t pump;
    bool pump_started;
    atomic_bool pump_ended;
    uint8_t *packet; /* of the pump */
    struct fsx_sender *sender;
    atomic_bool stopping;
    atomic_bool ended;
    atomic_int error;
    struct fsx_writers writers;
    atomic_uint_least64_t init_unique; /* the INIT that pyfuse3 is to answer; 0 for none */

    struct fsx_busy_poll *polling;
    struct fsx_ahead *ahead;
    struct fsx_pages_ahead *pages; /* the broker's */
    struct fsx_upcalls *upcalls;
    atomic_uint visitors;      /* calls of Python under way; the engine is not freed before they end */
    atomic_uint waiting_reads; /* likewise */

    pthread_mutex_t lock;
    struct fsx_kernel kernel;      /* what INIT said; before that, zeros */
    struct fsx_latency late_reads; /* that were answered when their chunk came */
};

/* A READ of the dataset that waits for a chunk. */
struct waiting_read {
    struct fsx_read read; /* first */
    struct fsx_engine *engine;
    uint32_t worker; /* on whose device the answer goes */
    uint64_t unique;
    uint64_t start_ns;
};

/* ---- counting ----------------------------------------------------------------------------------------------------- */

static void count_operation(struct worker *worker, uint32_t opcode, int error, uint64_t start_ns) {
    /* As in operations.py: that there is no such thing, or no need for a message, is an ordinary answer. */
    const bool failed = error != 0 && error != ENOENT && error != ENODATA && error != ENOSYS;
    fsx_latency_record(&worker->operations[fsx_operation_of(opcode)], fsx_now_ns() - start_ns, failed);
}

/* ---- content of the dataset --------------------------------------------------------------------------------------- */

static void answer_read(struct fsx_read *read, const void *data, int error) {
    struct waiting_read *waiting = (struct waiting_read *)read;
    struct fsx_engine *engine = waiting->engine;
    fsx_device_reply(engine->workers[waiting->worker].device, waiting->unique, data, error == 0 ? read->length : 0, error);
    pthread_mutex_lock(&engine->lock);
    fsx_latency_record(&engine->late_reads, fsx_now_ns() - waiting->start_ns, error != 0);
    pthread_mutex_unlock(&engine->lock);
    free(waiting);
    atomic_fetch_sub(&engine->waiting_reads, 1); /* last: who sees none may free the engine */
}

static bool is_unique(const struct fsx_read *read, uint64_t unique) {
    return read->done == answer_read && ((const struct waiting_read *)read)->unique == unique;
}

static bool is_of_engine(const struct fsx_read *read, uint64_t engine) {
    return read->done == answer_read && (uintptr_t)((const struct waiting_read *)read)->engine == engine;
}

/* The end: nobody waits for a chunk any more. */
static void end_reads(struct fsx_engine *engine) {
    for (struct fsx_read *read; (read = fsx_read_cancel(engine->settings.broker, is_of_engine, (uintptr_t)engine)) != NULL;)
        answer_read(read, NULL, EIO);
}

static void read_content(struct worker *worker, uint64_t unique, const struct fsx_reply *wanted, uint64_t start_ns) {
    struct fsx_engine *engine = worker->engine;
    struct fsx_broker *broker = engine->settings.broker;
    fsx_ahead_note_read(engine->ahead, wanted->entry);
    if (wanted->length == 0 || fsx_broker_read_plain(broker, &worker->reads, wanted->entry, wanted->offset, wanted->length, worker->answer)) {
        fsx_device_reply(worker->device, unique, worker->answer, wanted->length, 0);
        count_operation(worker, FUSE_READ, 0, start_ns);
        return;
    }
    struct waiting_read *waiting = malloc(sizeof *waiting);
    if (waiting == NULL) {
        fsx_device_reply(worker->device, unique, NULL, 0, ENOMEM);
        return;
    }
    *waiting = (struct waiting_read){.read = {.entry = wanted->entry, .length = wanted->length, .offset = wanted->offset,
                                              .done = answer_read},
                                     .engine = engine, .worker = worker->number, .unique = unique, .start_ns = start_ns};
    atomic_fetch_add(&engine->waiting_reads, 1);
    fsx_read_start(&waiting->read, broker, &worker->reads);
}

/* ---- upcalls ------------------------------------------------------------------------------------------------------ */

static void wake_python(struct fsx_engine *engine) {
    const uint64_t one = 1;
    while (write(engine->settings.wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Put a request in the line for Python. One that does not get there is answered here, and what it has parked is freed. */
static void ask_python(struct worker *worker, const struct fsx_asked *asked) {
    const int error = fsx_upcalls_put(worker->engine->upcalls, asked);
    if (error == 0) {
        FSX_COUNT(worker->upcalls, 1);
        return;
    }
    if (error == EINTR)
        FSX_COUNT(worker->interrupted, 1);
    free(asked->parked);
    fsx_device_reply(worker->engine->workers[asked->worker].device, asked->unique, NULL, 0, error);
}

/* The content of an output is not on this node: Python reads it, or brings it here before it is changed. Or there is no room
 * for what is written (`error`): Python removes what it still has to. */
static void ask_python_about(struct worker *worker, const struct fsx_request *request, const struct fsx_task *task, int error) {
    struct fsx_asked asked = {.kind = FSX_UPCALL_OUTPUT_READ, .worker = worker->number, .unique = request->unique,
                              .number = task->inode, .offset = task->offset, .length = task->length};
    if (task->opcode == FUSE_LSEEK) { /* the kernel then takes all of a file for data, which is always right */
        fsx_device_reply(worker->device, request->unique, NULL, 0, ENOSYS);
        return;
    }
    if (task->opcode != FUSE_READ) {
        asked.kind = error == ENOENT ? FSX_UPCALL_MAKE_LOCAL : FSX_UPCALL_NO_ROOM;
        asked.parked = fsx_task_copy(task);
        if (asked.parked == NULL) {
            fsx_device_reply(worker->device, request->unique, NULL, 0, ENOMEM);
            return;
        }
    }
    ask_python(worker, &asked);
}

size_t fsx_engine_take(struct fsx_engine *engine, struct fsx_upcall *upcalls, size_t most) {
    return fsx_upcalls_take(engine->upcalls, upcalls, most);
}

void fsx_engine_answer(struct fsx_engine *engine, uint64_t token, const void *data, size_t bytes, int error) {
    struct fsx_asked asked;
    if (!fsx_upcalls_finish(engine->upcalls, token, &asked))
        return;
    if (error == 0 && (asked.parked != NULL || bytes > asked.length))
        error = EIO; /* not what was asked for */
    free(asked.parked);
    fsx_device_reply(engine->workers[asked.worker].device, asked.unique, data, error == 0 ? bytes : 0, error);
}

void fsx_engine_resume(struct fsx_engine *engine, uint64_t token) {
    struct fsx_asked asked;
    if (!fsx_upcalls_finish(engine->upcalls, token, &asked))
        return;
    _Alignas(8) uint8_t answer[16];
    size_t bytes = 0;
    int error = EIO;
    if (asked.parked != NULL)
        error = fsx_outputs_do(engine->tree.outputs, asked.parked, answer, &bytes);
    if (error == ENOENT)
        error = EIO; /* Python was wrong, or somebody has taken it away again */
    free(asked.parked);
    fsx_device_reply(engine->workers[asked.worker].device, asked.unique, answer, error == 0 ? bytes : 0, error);
}

/* The process that waits for an answer was interrupted: it need not wait for Python. */
static void interrupt(struct worker *worker, const struct fsx_request *request) {
    const struct fuse_interrupt_in *in = fsx_request_fixed(request, sizeof *in);
    struct fsx_engine *engine = worker->engine;
    uint32_t number;
    if (in == NULL)
        return;
    struct waiting_read *waiting = (struct waiting_read *)fsx_read_cancel(engine->settings.broker, is_unique, in->unique);
    const bool waited = waiting != NULL;
    if (waited)
        number = waiting->worker;
    if (waited || fsx_upcalls_interrupt(engine->upcalls, in->unique, &number)) {
        FSX_COUNT(worker->interrupted, 1);
        fsx_device_reply(engine->workers[number].device, in->unique, NULL, 0, EINTR);
    }
    free(waiting);
    atomic_fetch_sub(&engine->waiting_reads, waited);
}

/* ---- forwarding --------------------------------------------------------------------------------------------------- */

/* INIT: pyfuse3 answers it, the pump completes the answer. */
static void observe_init(struct fsx_engine *engine, const struct fsx_request *request, uint64_t unique) {
    pthread_mutex_lock(&engine->lock);
    engine->kernel = fsx_pass_offer(request);
    pthread_mutex_unlock(&engine->lock);
    atomic_store(&engine->init_unique, unique);
}

/* Pass a message on to pyfuse3. */
static void forward(struct worker *worker, const struct fsx_request *request, size_t bytes) {
    struct fsx_engine *engine = worker->engine;
    struct fuse_in_header *head = (struct fuse_in_header *)worker->request;
    head->unique = (head->unique & UNIQUE_MASK) | (uint64_t)worker->number << WORKER_SHIFT;
    if (request->opcode == FUSE_INIT)
        observe_init(engine, request, head->unique);
    fsx_pass_handle(worker->request + sizeof *head, request);
    FSX_COUNT(worker->forwarded, 1);
    fsx_sender_send(engine->sender, worker->request, bytes);
}

/* A BATCH_FORGET that is too long for a packet. It is put together where answers are: it gets none. */
static void forward_forgets(struct worker *worker, const struct fsx_request *request) {
    uint32_t next = 0;
    for (size_t bytes; (bytes = fsx_pass_forgets(&worker->engine->tree, request, &next, worker->answer)) > 0;) {
        FSX_COUNT(worker->forwarded, 1);
        fsx_sender_send(worker->engine->sender, worker->answer, bytes);
    }
}

/* A message that did not reach pyfuse3, which has ended. */
static void not_forwarded(void *context, const void *packet, size_t bytes) {
    const struct fsx_engine *engine = context;
    struct fsx_request request;
    if (!fsx_request_parse(packet, bytes, &request) || request.opcode == FUSE_FORGET ||
        request.opcode == FUSE_BATCH_FORGET)
        return;
    const struct worker *worker = &engine->workers[request.unique >> WORKER_SHIFT];
    fsx_device_reply(worker->device, request.unique & UNIQUE_MASK, NULL, 0, EIO);
}

static void complete_init(struct fsx_engine *engine, size_t bytes) {
    const uint64_t offered = fsx_engine_kernel(engine).flags;
    atomic_store(&engine->tree.no_open, (offered & FUSE_NO_OPEN_SUPPORT) != 0);
    atomic_store(&engine->tree.no_opendir, (offered & FUSE_NO_OPENDIR_SUPPORT) != 0);
    fsx_pass_init(&engine->tree, engine->packet, bytes, offered, engine->settings.max_background);
}

/* Replies of pyfuse3, on their way to the kernel. */
static void *pump_main(void *argument) {
    struct fsx_engine *engine = argument;
    for (;;) {
        const ssize_t got = recv(engine->settings.socket, engine->packet, PACKET_BYTES, MSG_TRUNC);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break; /* pyfuse3 has closed its end, or ours was shut down */
        struct fuse_out_header head;
        if ((size_t)got < sizeof head)
            continue;
        memcpy(&head, engine->packet, sizeof head);
        const uint64_t init = atomic_load(&engine->init_unique);
        if (init != 0 && head.unique == init) {
            complete_init(engine, (size_t)got);
            atomic_store(&engine->init_unique, 0);
        }
        const uint32_t number = (uint32_t)(head.unique >> WORKER_SHIFT);
        if (head.unique != 0) /* 0 is a notification of ours to the kernel */
            head.unique &= UNIQUE_MASK;
        memcpy(engine->packet, &head, sizeof head);
        if (number < engine->settings.workers)
            fsx_device_pass_on(engine->workers[number].device, engine->packet, (size_t)got, PACKET_BYTES, head.unique);
    }
    atomic_store(&engine->pump_ended, true);
    return NULL;
}

/* The file of the dataset that this answer to a LOOKUP tells of; 0, which is none, if it does not. */
static uint32_t file_in(const struct fsx_engine *engine, const struct fuse_entry_out *answer) {
    const bool file = S_ISREG(answer->attr.mode) && fsx_is_dataset(&engine->tree, answer->nodeid);
    return file ? (uint32_t)(answer->nodeid - 1) : 0;
}

/* A file of this directory was looked up. Python answers for the listing of one that has outputs. */
static void note_name(const struct fsx_engine *engine, uint64_t parent) {
    const struct fsx_outputs *outputs = engine->tree.outputs;
    if (engine->settings.names != NULL && fsx_is_dataset(&engine->tree, parent) &&
        (outputs == NULL || !fsx_outputs_is_mixed(outputs, (uint32_t)(parent - 1))))
        fsx_names_ahead_note(engine->settings.names, (uint32_t)(parent - 1));
}

/* ---- workers ------------------------------------------------------------------------------------------------------ */

/* Python is told of the first output that is created, closed or synced, and takes the others with it. */
static bool told(struct fsx_engine *engine, bool done, bool first) {
    if (done && first)
        wake_python(engine);
    return done;
}

static void handle(struct worker *worker, size_t bytes) {
    struct fsx_engine *engine = worker->engine;
    const uint64_t start_ns = fsx_now_ns();
    struct fsx_request request;
    if (!fsx_request_parse(worker->request, bytes, &request)) {
        FSX_COUNT(worker->malformed, 1);
        return;
    }
    if (request.opcode == FUSE_INTERRUPT) {
        fsx_busy_poll_slow(engine->polling);
        interrupt(worker, &request);
        return;
    }
    struct fsx_reply reply = {.data = worker->answer, .room = FSX_READ_BYTES};
    bool done, first = false;
    const enum fsx_verdict verdict = fsx_answer(&engine->tree, &request, &reply);
    if (fsx_is_quick(verdict, &reply))
        fsx_busy_poll_quick(engine->polling, request.thread, start_ns);
    else
        fsx_busy_poll_slow(engine->polling);
    switch (verdict) {
    case FSX_SILENCE:
        return;
    case FSX_FORWARD:
        if (request.opcode == FUSE_BATCH_FORGET && bytes > FSX_PASS_BYTES)
            forward_forgets(worker, &request);
        else
            forward(worker, &request, bytes);
        return;
    case FSX_READ:
        if (!fsx_pages_ahead_note_read(engine->pages, reply.entry, reply.offset, reply.length, request.thread) &&
            reply.offset == 0 && engine->settings.begun != NULL)
            fsx_begun_note(engine->settings.begun, reply.entry, request.thread);
        read_content(worker, request.unique, &reply, start_ns);
        return;
    case FSX_OUTPUT:
        reply.error = fsx_writers_do(&engine->writers, &reply.task, reply.data, &reply.bytes);
        if (reply.error == ENOENT || reply.error == ENOSPC || reply.error == EDQUOT) {
            ask_python_about(worker, &request, &reply.task, reply.error);
            return;
        }
        break;
    case FSX_CREATE:
    case FSX_SYNC:
    case FSX_CLOSE:
        if (verdict == FSX_CREATE)
            done = fsx_writers_create(&engine->writers, &reply.wanted, reply.data, &reply.bytes, &first);
        else if (verdict == FSX_SYNC)
            done = fsx_writers_sync(&engine->writers, &reply.task, &first, &reply.error);
        else
            done = fsx_outputs_close(engine->tree.outputs, request.nodeid, &first);
        if (!told(engine, done, first)) {
            forward(worker, &request, bytes);
            return;
        }
        break;
    case FSX_REPLY:
        break;
    }
    const bool found = request.opcode == FUSE_LOOKUP && reply.error == 0;
    const uint32_t file = found ? file_in(engine, (const struct fuse_entry_out *)reply.data) : 0;
    const bool expected = file != 0 && fsx_ahead_expects(engine->ahead, file);
    fsx_device_reply(worker->device, request.unique, reply.data, reply.error == 0 ? reply.bytes : 0, reply.error);
    count_operation(worker, request.opcode, reply.error, start_ns);
    if (expected)
        fsx_busy_poll_slow(engine->polling);
    /* Where a disk is to be waited for, it begins with the LOOKUP, and the round trip costs nothing. */
    if (file != 0 && !(expected && fsx_ahead_fetch(engine->ahead, file, &worker->reads)))
        note_name(engine, request.nodeid);
}

static void *worker_main(void *argument) {
    struct worker *worker = argument;
    struct fsx_engine *engine = worker->engine;
    while (!atomic_load(&engine->stopping)) {
        const ssize_t got = fsx_busy_poll_read(engine->polling, &worker->poller, worker->request, worker->request_bytes);
        if (got > 0) {
            handle(worker, (size_t)got);
            continue;
        }
        /* ENOENT: the request was taken back while it was read. ENODEV: the end. */
        if (got < 0 && (errno == EINTR || errno == ENOENT || errno == EAGAIN))
            continue;
        if (got < 0 && errno != ENODEV && errno != ECONNABORTED) {
            int none = 0;
            atomic_compare_exchange_strong(&engine->error, &none, errno);
        }
        break;
    }
    fsx_busy_poll_end(engine->polling);
    atomic_store(&worker->ended, true);
    atomic_store(&engine->ended, true);
    wake_python(engine);
    return NULL;
}

/* ---- life --------------------------------------------------------------------------------------------------------- */

static void wake_handler(int number) { (void)number; /* that a read was interrupted is all that is needed */ }

static void free_engine(struct fsx_engine *engine) {
    for (uint32_t i = 0; engine->workers != NULL && i < engine->settings.workers; i++) {
        struct worker *worker = &engine->workers[i];
        if (worker->device >= 0)
            close(worker->device);
        free(worker->block);
    }
    free(engine->answers);
    free(engine->workers);
    fsx_busy_poll_free(engine->polling);
    fsx_ahead_free(engine->ahead);
    fsx_upcalls_free(engine->upcalls);
    free(engine->packet);
    fsx_sender_free(engine->sender);
    if (engine->settings.socket >= 0)
        close(engine->settings.socket);
    if (engine->settings.wake >= 0)
        close(engine->settings.wake);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

static uint8_t *make_answers(uint32_t workers) {
    const size_t bytes = ((size_t)workers * ANSWER_ROOM / HUGE_BYTES + 1) * HUGE_BYTES;
    uint8_t *answers = aligned_alloc(HUGE_BYTES, bytes);
    if (answers != NULL)
        madvise(answers, bytes, MADV_HUGEPAGE);
    return answers;
}

static bool make_workers(struct fsx_engine *engine) {
    for (uint32_t i = 0; i < engine->settings.workers; i++) {
        struct worker *worker = &engine->workers[i];
        worker->engine = engine;
        worker->number = i;
        worker->device = i == 0 ? fcntl(engine->settings.device, F_DUPFD_CLOEXEC, 0)
                                : fsx_device_clone(engine->settings.device);
        worker->poller.device = worker->device;
        const bool writes = engine->tree.outputs != NULL;
        worker->request_bytes = writes ? OUTPUT_REQUEST_BYTES : FSX_PASS_BYTES;
        worker->block = aligned_alloc(PAGE, writes ? FSX_OUTPUT_WRITE_BYTES + 2 * PAGE : FSX_PASS_BYTES);
        worker->request = writes && worker->block != NULL ? worker->block + PAGE - WRITE_HEAD : worker->block;
        worker->answer = engine->answers + (size_t)i * ANSWER_ROOM;
        if (worker->device < 0 || worker->block == NULL)
            return false;
    }
    return true;
}

static struct fsx_engine *make_engine(const struct fsx_engine_settings *settings) {
    struct fsx_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return NULL;
    engine->settings = *settings;
    engine->tree = settings->tree;
    fsx_writers_init(&engine->writers, settings->tree.outputs, settings->workers);
    pthread_mutex_init(&engine->lock, NULL);
    engine->settings.socket = fcntl(settings->socket, F_DUPFD_CLOEXEC, 0);
    engine->settings.wake = fcntl(settings->wake, F_DUPFD_CLOEXEC, 0);
    engine->workers = calloc(settings->workers, sizeof *engine->workers);
    engine->answers = make_answers(settings->workers);
    engine->polling = fsx_busy_poll_new(settings->workers);
    engine->ahead = fsx_ahead_new(settings->broker, settings->workers);
    engine->pages = fsx_prefetch_pages(fsx_broker_prefetch(settings->broker));
    engine->upcalls = fsx_upcalls_new(engine->settings.wake);
    engine->packet = aligned_alloc(4096, PACKET_BYTES);
    engine->sender = fsx_sender_new(engine->settings.socket, not_forwarded, engine);
    for (uint32_t i = 0; engine->workers != NULL && i < settings->workers; i++)
        engine->workers[i].device = -1;
    if (engine->workers == NULL || engine->answers == NULL || engine->polling == NULL || engine->ahead == NULL ||
        engine->upcalls == NULL || engine->packet == NULL || engine->sender == NULL || engine->settings.socket < 0 || engine->settings.wake < 0 || !make_workers(engine)) {
        const int error = errno;
        free_engine(engine);
        errno = error;
        return NULL;
    }
    return engine;
}

struct fsx_engine *fsx_engine_start(const struct fsx_engine_settings *settings) {
    if (settings->workers < 1 || settings->workers > FSX_ENGINE_WORKERS_MAX) {
        errno = EINVAL;
        return NULL;
    }
    struct fsx_engine *engine = make_engine(settings);
    if (engine == NULL)
        return NULL;
    const struct sigaction action = {.sa_handler = wake_handler};
    sigaction(WAKE_SIGNAL, &action, NULL);
    /* Python's signals are for its main thread; ours is for the workers. Those of a crash stay with whoever crashes: a
     * handler that says where (faulthandler) would not run if they were blocked. */
    const int own[] = {WAKE_SIGNAL, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS};
    sigset_t all, before;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        sigdelset(&all, own[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&engine->pump, NULL, pump_main, engine);
    engine->pump_started = error == 0;
    for (uint32_t i = 0; error == 0 && i < settings->workers; i++) {
        error = pthread_create(&engine->workers[i].thread, NULL, worker_main, &engine->workers[i]);
        engine->workers[i].started = error == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        fsx_engine_stop(engine, 1000);
        errno = error;
        return NULL;
    }
    return engine;
}

void fsx_engine_enter(struct fsx_engine *engine) { atomic_fetch_add(&engine->visitors, 1); }
void fsx_engine_leave(struct fsx_engine *engine) { atomic_fetch_sub(&engine->visitors, 1); }

bool fsx_engine_ended(struct fsx_engine *engine, int *error) {
    *error = atomic_load(&engine->error);
    return atomic_load(&engine->ended);
}

void fsx_engine_forward_missing(struct fsx_engine *engine, bool wanted) {
    atomic_store_explicit(&engine->tree.forward_missing, wanted, memory_order_relaxed);
}

struct fsx_kernel fsx_engine_kernel(struct fsx_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    const struct fsx_kernel kernel = engine->kernel;
    pthread_mutex_unlock(&engine->lock);
    return kernel;
}

void fsx_engine_count(struct fsx_engine *engine, struct fsx_engine_counts *counts) {
    memset(counts, 0, sizeof *counts);
    for (uint32_t i = 0; i < engine->settings.workers; i++) {
        const struct worker *worker = &engine->workers[i];
        for (int op = 0; op < FSX_OPERATIONS; op++)
            fsx_latency_add(&counts->operations[op], &worker->operations[op]);
        fsx_read_counts_add(&counts->reads, &worker->reads);
        counts->forwarded += FSX_COUNTED(worker->forwarded);
        counts->upcalls += FSX_COUNTED(worker->upcalls);
        counts->interrupted += FSX_COUNTED(worker->interrupted);
        counts->malformed += FSX_COUNTED(worker->malformed);
    }
    if (engine->tree.outputs != NULL)
        fsx_outputs_count(engine->tree.outputs, &counts->outputs);
    pthread_mutex_lock(&engine->lock);
    fsx_latency_add(&counts->operations[FSX_OP_READ], &engine->late_reads);
    pthread_mutex_unlock(&engine->lock);
    if (engine->settings.names != NULL)
        counts->names = fsx_names_ahead_count(engine->settings.names);
    counts->polling = fsx_busy_poll_count(engine->polling);
}

/* Threads that hang keep the engine, but not the mount: with its last descriptor the kernel ends the connection, and
 * whoever waits is told. The numbers stay taken, because those threads will write to them. */
static void drop_devices(struct fsx_engine *engine) {
    for (uint32_t i = 0; i < engine->settings.workers; i++)
        fsx_device_drop(engine->workers[i].device);
}

bool fsx_engine_stop(struct fsx_engine *engine, uint32_t limit_ms) {
    atomic_store(&engine->stopping, true);
    fsx_busy_poll_end(engine->polling);
    fsx_upcalls_end(engine->upcalls);
    shutdown(engine->settings.socket, SHUT_RDWR);
    /* A signal that comes between a worker's look at `stopping` and its read is lost: so again and again. */
    uint32_t running;
    for (uint32_t waited_ms = 0;; waited_ms++) {
        end_reads(engine);
        running = atomic_load(&engine->visitors) + (engine->pump_started && !atomic_load(&engine->pump_ended)) +
                  atomic_load(&engine->waiting_reads);
        for (uint32_t i = 0; i < engine->settings.workers; i++)
            if (engine->workers[i].started && !atomic_load(&engine->workers[i].ended)) {
                pthread_kill(engine->workers[i].thread, WAKE_SIGNAL);
                running++;
            }
        if (running == 0 || waited_ms >= limit_ms)
            break;
        poll(NULL, 0, 1);
    }
    if (running > 0) {
        drop_devices(engine);
        return false;
    }
    for (uint32_t i = 0; i < engine->settings.workers; i++)
        if (engine->workers[i].started)
            pthread_join(engine->workers[i].thread, NULL);
    if (engine->pump_started)
        pthread_join(engine->pump, NULL);
    free_engine(engine);
    return true;
}
