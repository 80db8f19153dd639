/* engine.c: see engine.h.
 *
 * Locks: `lock` guards the crossings and what the kernel offered; it is never held during a system call. What a worker
 * counts is its own, written without a lock and read by others as it happens to be: single 64-bit numbers.
 */
#include "engine.h"
#include "device.h"
#include "sending.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* Largest request: what pyfuse3 is told that the kernel may write at once, and some. A packet of the socket must be well
 * below 2 * net.core.wmem_max, which an ordinary user cannot raise (425,984 bytes by default). */
#define MAX_WRITE (128u << 10)
#define REQUEST_BYTES (MAX_WRITE + (16u << 10))
/* Largest reply of pyfuse3, for the same reason. READ is cut to fit; only control files are read that way. */
#define PACKET_BYTES (256u << 10)
#define FORWARDED_READ (128u << 10)

/* The upper bits of a unique number tell pyfuse3's replies to the workers apart; the kernel counts up from 2. */
#define WORKER_SHIFT 56
#define UNIQUE_MASK (((uint64_t)1 << WORKER_SHIFT) - 1)
_Static_assert(FSX_ENGINE_WORKERS_MAX < 1u << (64 - WORKER_SHIFT), "a worker's number fits above");

/* Crossings under way. The kernel sends no more background reads than max_background; readers in the foreground add one
 * per process. When all are taken, workers wait: readers are slowed down, nothing is lost. */
#define SLOTS 4096u
#define NO_SLOT UINT32_MAX

/* Interrupts that came before their request was in the line; those of requests that never get there are overwritten. */
#define EARLY_INTERRUPTS 64u

/* Wakes a worker from its read of the device, so that it sees that it must end. */
#define WAKE_SIGNAL (SIGRTMIN + 5)

enum slot_state { SLOT_FREE, SLOT_WAITING, SLOT_TAKEN, SLOT_ABANDONED };

struct slot {
    uint64_t unique;
    uint64_t offset;
    uint32_t entry;
    uint32_t length;
    uint32_t worker;
    uint32_t turn; /* counts uses, so that an old token means nothing */
    uint32_t next; /* in the list that it is in */
    enum slot_state state;
};

struct worker {
    struct fsx_engine *engine;
    pthread_t thread;
    uint32_t number;
    int device;
    bool started;
    atomic_bool ended;
    uint8_t *request; /* page-aligned, REQUEST_BYTES */
    struct fsx_hands hands;
    struct fsx_latency operations[FSX_OPERATIONS];
    uint64_t forwarded, crossings, interrupted, malformed;
};

struct fsx_engine {
    struct fsx_engine_settings settings;
    struct fsx_tree tree; /* its flags are set by the pump before the kernel goes on */
    struct worker *workers;
    pthread_t pump;
    bool pump_started;
    atomic_bool pump_ended;
    uint8_t *packet; /* of the pump */
    struct fsx_sender *sender;
    atomic_bool stopping;
    atomic_bool ended;
    atomic_int error;
    atomic_uint_least64_t init_unique; /* the INIT that pyfuse3 is to answer; 0 for none */

    pthread_mutex_t lock;
    struct fsx_kernel kernel; /* what INIT said; before that, zeros */
    pthread_cond_t slot_free;
    struct slot *slots;
    uint32_t free_slots;             /* a list */
    uint32_t first_waiting, last_waiting; /* a line */
    uint64_t early[EARLY_INTERRUPTS];     /* unique numbers, which are never used again; 0 for none */
    uint32_t next_early;
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- counting ----------------------------------------------------------------------------------------------------- */

static enum fsx_operation operation_of(uint32_t opcode) {
    switch (opcode) {
    case FUSE_LOOKUP: return FSX_OP_LOOKUP;
    case FUSE_GETATTR: return FSX_OP_GETATTR;
    case FUSE_READLINK: return FSX_OP_READLINK;
    case FUSE_STATFS: return FSX_OP_STATFS;
    case FUSE_READDIR:
    case FUSE_READDIRPLUS: return FSX_OP_READDIR;
    case FUSE_GETXATTR: return FSX_OP_GETXATTR;
    case FUSE_OPEN: return FSX_OP_OPEN;
    case FUSE_OPENDIR: return FSX_OP_OPENDIR;
    case FUSE_READ: return FSX_OP_READ;
    default: return FSX_OP_OTHER;
    }
}

static void count_operation(struct worker *worker, uint32_t opcode, int error, uint64_t start_ns) {
    /* As in operations.py: that there is no such thing, or no need for a message, is an ordinary answer. */
    const bool failed = error != 0 && error != ENOENT && error != ENODATA && error != ENOSYS;
    fsx_latency_record(&worker->operations[operation_of(opcode)], now_ns() - start_ns, failed);
}

/* ---- crossings ---------------------------------------------------------------------------------------------------- */

static void wake_python(struct fsx_engine *engine) {
    const uint64_t one = 1;
    while (write(engine->settings.wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* With the lock held: was this request interrupted before it got here? */
static bool interrupted_early(struct fsx_engine *engine, uint64_t unique) {
    for (uint32_t i = 0; i < EARLY_INTERRUPTS; i++)
        if (engine->early[i] == unique && unique != 0) {
            engine->early[i] = 0;
            return true;
        }
    return false;
}

/* Put a read in the line for Python. 0, or the errno to answer it with: EINTR if nobody waits for it any more, EIO if the
 * engine is ending and nobody is left to ask. */
static int cross(struct worker *worker, const struct fsx_request *request, const struct fsx_reply *wanted) {
    struct fsx_engine *engine = worker->engine;
    pthread_mutex_lock(&engine->lock);
    while (engine->free_slots == NO_SLOT && !atomic_load(&engine->stopping))
        pthread_cond_wait(&engine->slot_free, &engine->lock);
    const uint32_t number = engine->free_slots;
    const bool first = engine->first_waiting == NO_SLOT;
    const bool gone = interrupted_early(engine, request->unique);
    if (number != NO_SLOT && !gone) {
        struct slot *slot = &engine->slots[number];
        engine->free_slots = slot->next;
        *slot = (struct slot){.unique = request->unique, .offset = wanted->offset, .entry = wanted->entry,
                              .length = wanted->length, .worker = worker->number, .turn = slot->turn + 1,
                              .next = NO_SLOT, .state = SLOT_WAITING};
        if (first)
            engine->first_waiting = number;
        else
            engine->slots[engine->last_waiting].next = number;
        engine->last_waiting = number;
    }
    pthread_mutex_unlock(&engine->lock);
    if (gone)
        FSX_COUNT(worker->interrupted, 1);
    if (gone || number == NO_SLOT)
        return gone ? EINTR : EIO;
    FSX_COUNT(worker->crossings, 1);
    if (first)
        wake_python(engine);
    return 0;
}

size_t fsx_engine_take(struct fsx_engine *engine, struct fsx_crossing *crossings, size_t most) {
    size_t count = 0;
    pthread_mutex_lock(&engine->lock);
    while (count < most && engine->first_waiting != NO_SLOT) {
        const uint32_t number = engine->first_waiting;
        struct slot *slot = &engine->slots[number];
        engine->first_waiting = slot->next;
        if (slot->state == SLOT_WAITING)
            slot->state = SLOT_TAKEN; /* one that was abandoned is answered all the same, to be free again */
        crossings[count++] = (struct fsx_crossing){.token = (uint64_t)slot->turn << 32 | number, .entry = slot->entry,
                                                   .offset = slot->offset, .length = slot->length};
    }
    pthread_mutex_unlock(&engine->lock);
    return count;
}

void fsx_engine_answer(struct fsx_engine *engine, uint64_t token, const void *data, size_t bytes, int error) {
    const uint32_t number = (uint32_t)token;
    if (number >= SLOTS)
        return;
    pthread_mutex_lock(&engine->lock);
    struct slot *slot = &engine->slots[number];
    const struct slot asked = *slot;
    const bool valid = asked.turn == (uint32_t)(token >> 32) && asked.state >= SLOT_TAKEN;
    if (valid) {
        slot->state = SLOT_FREE;
        slot->next = engine->free_slots;
        engine->free_slots = number;
        pthread_cond_signal(&engine->slot_free);
    }
    pthread_mutex_unlock(&engine->lock);
    if (valid && asked.state == SLOT_TAKEN)
        fsx_device_reply(engine->workers[asked.worker].device, asked.unique, data, error == 0 ? bytes : 0, error);
}

/* The process that waits for a read was interrupted: it need not wait for Python. Another worker may have the request in
 * its hands and is about to put it in the line: it finds a note. */
static void interrupt(struct worker *worker, const struct fsx_request *request) {
    const struct fuse_interrupt_in *in = fsx_request_fixed(request, sizeof *in);
    if (in == NULL)
        return;
    struct fsx_engine *engine = worker->engine;
    uint32_t found = NO_SLOT;
    pthread_mutex_lock(&engine->lock);
    for (uint32_t i = 0; i < SLOTS && found == NO_SLOT; i++) {
        struct slot *slot = &engine->slots[i];
        if (slot->unique == in->unique && (slot->state == SLOT_WAITING || slot->state == SLOT_TAKEN)) {
            slot->state = SLOT_ABANDONED;
            found = slot->worker;
        }
    }
    if (found == NO_SLOT)
        engine->early[engine->next_early++ % EARLY_INTERRUPTS] = in->unique;
    pthread_mutex_unlock(&engine->lock);
    if (found != NO_SLOT) {
        FSX_COUNT(worker->interrupted, 1);
        fsx_device_reply(engine->workers[found].device, in->unique, NULL, 0, EINTR);
    }
}

/* ---- forwarding --------------------------------------------------------------------------------------------------- */

/* INIT: pyfuse3 answers it, the pump completes the answer. */
static void observe_init(struct fsx_engine *engine, const struct fsx_request *request, uint64_t unique) {
    struct fuse_init_in in = {0};
    const size_t known = request->arg_bytes < sizeof in ? request->arg_bytes : sizeof in;
    memcpy(&in, request->arg, known);
    const uint64_t more_flags = (in.flags & FUSE_INIT_EXT) != 0 ? (uint64_t)in.flags2 << 32 : 0;
    pthread_mutex_lock(&engine->lock);
    engine->kernel = (struct fsx_kernel){.major = in.major, .minor = in.minor, .flags = in.flags | more_flags};
    pthread_mutex_unlock(&engine->lock);
    atomic_store(&engine->init_unique, unique);
}

/* Pass a message on to pyfuse3. Its handlers know a file by its handle, which the kernel does not have when it opens by
 * itself: then the handle is the inode number. */
static void forward(struct worker *worker, const struct fsx_request *request, size_t bytes) {
    struct fsx_engine *engine = worker->engine;
    struct fuse_in_header *head = (struct fuse_in_header *)worker->request;
    head->unique = (head->unique & UNIQUE_MASK) | (uint64_t)worker->number << WORKER_SHIFT;
    if (request->opcode == FUSE_INIT)
        observe_init(engine, request, head->unique);
    struct fuse_read_in *in = (struct fuse_read_in *)(worker->request + sizeof *head);
    const bool file = request->opcode == FUSE_READ && request->arg_bytes >= sizeof *in;
    const bool directory = (request->opcode == FUSE_READDIR || request->opcode == FUSE_READDIRPLUS) &&
                           request->arg_bytes >= sizeof *in;
    if (file || directory) {
        in->fh = request->nodeid;
        if (in->size > FORWARDED_READ)
            in->size = FORWARDED_READ;
    }
    FSX_COUNT(worker->forwarded, 1);
    fsx_sender_send(engine->sender, worker->request, bytes);
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

/* What pyfuse3 said to INIT, completed by what it has no words for. */
static void complete_init(struct fsx_engine *engine, uint8_t *packet, size_t bytes) {
    struct fuse_out_header head;
    struct fuse_init_out out = {0};
    memcpy(&head, packet, sizeof head);
    if (head.error != 0 || bytes < sizeof head + 24)
        return;
    const size_t known = bytes - sizeof head < sizeof out ? bytes - sizeof head : sizeof out;
    memcpy(&out, packet + sizeof head, known);
    const uint64_t offered = fsx_engine_kernel(engine).flags;
    atomic_store(&engine->tree.no_open, (offered & FUSE_NO_OPEN_SUPPORT) != 0);
    atomic_store(&engine->tree.no_opendir, (offered & FUSE_NO_OPENDIR_SUPPORT) != 0);
    const uint32_t wanted = FUSE_CACHE_SYMLINKS | FUSE_PARALLEL_DIROPS | FUSE_ASYNC_READ | FUSE_DO_READDIRPLUS;
    out.flags |= wanted & (uint32_t)offered;
    /* Nothing ever changes, so the kernel need not look; READDIRPLUS not only when it guesses that it is of use. And no
     * truncation by OPEN: where the kernel opens by itself, it would believe that it has happened. */
    out.flags &= ~(uint32_t)(FUSE_AUTO_INVAL_DATA | FUSE_READDIRPLUS_AUTO | FUSE_ATOMIC_O_TRUNC);
    out.max_background = engine->settings.max_background;
    out.congestion_threshold = (uint16_t)(engine->settings.max_background / 4 * 3);
    if (out.max_write > MAX_WRITE)
        out.max_write = MAX_WRITE;
    memcpy(packet + sizeof head, &out, known);
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
            complete_init(engine, engine->packet, (size_t)got);
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

/* ---- workers ------------------------------------------------------------------------------------------------------ */

static void handle(struct worker *worker, size_t bytes) {
    struct fsx_engine *engine = worker->engine;
    const uint64_t start_ns = now_ns();
    struct fsx_request request;
    if (!fsx_request_parse(worker->request, bytes, &request)) {
        FSX_COUNT(worker->malformed, 1);
        return;
    }
    if (request.opcode == FUSE_INTERRUPT) {
        interrupt(worker, &request);
        return;
    }
    struct fsx_reply reply = {.data = worker->hands.answer, .room = FSX_ANSWER_BYTES};
    switch (fsx_answer(&engine->tree, &request, &reply)) {
    case FSX_SILENCE:
        return;
    case FSX_FORWARD:
        forward(worker, &request, bytes);
        return;
    case FSX_READ:
        if (!fsx_content_read(engine->settings.content, &worker->hands, reply.entry, reply.offset, reply.length)) {
            const int error = cross(worker, &request, &reply);
            if (error != 0)
                fsx_device_reply(worker->device, request.unique, NULL, 0, error);
            return;
        }
        reply.bytes = reply.length;
        break;
    case FSX_REPLY:
        break;
    }
    fsx_device_reply(worker->device, request.unique, reply.data, reply.error == 0 ? reply.bytes : 0, reply.error);
    count_operation(worker, request.opcode, reply.error, start_ns);
}

static void *worker_main(void *argument) {
    struct worker *worker = argument;
    struct fsx_engine *engine = worker->engine;
    while (!atomic_load(&engine->stopping)) {
        const ssize_t got = read(worker->device, worker->request, REQUEST_BYTES);
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
        free(worker->request);
        fsx_hands_free(&worker->hands);
    }
    free(engine->workers);
    free(engine->slots);
    free(engine->packet);
    fsx_sender_free(engine->sender);
    if (engine->settings.socket >= 0)
        close(engine->settings.socket);
    if (engine->settings.wake >= 0)
        close(engine->settings.wake);
    pthread_cond_destroy(&engine->slot_free);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

static bool make_workers(struct fsx_engine *engine) {
    for (uint32_t i = 0; i < engine->settings.workers; i++) {
        struct worker *worker = &engine->workers[i];
        worker->engine = engine;
        worker->number = i;
        worker->device = i == 0 ? fcntl(engine->settings.device, F_DUPFD_CLOEXEC, 0)
                                : fsx_device_clone(engine->settings.device);
        worker->request = aligned_alloc(4096, REQUEST_BYTES);
        if (worker->device < 0 || worker->request == NULL || !fsx_hands_make(&worker->hands))
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
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->slot_free, NULL);
    engine->settings.socket = fcntl(settings->socket, F_DUPFD_CLOEXEC, 0);
    engine->settings.wake = fcntl(settings->wake, F_DUPFD_CLOEXEC, 0);
    engine->workers = calloc(settings->workers, sizeof *engine->workers);
    engine->slots = calloc(SLOTS, sizeof *engine->slots);
    engine->packet = aligned_alloc(4096, PACKET_BYTES);
    engine->sender = fsx_sender_new(engine->settings.socket, not_forwarded, engine);
    for (uint32_t i = 0; engine->workers != NULL && i < settings->workers; i++)
        engine->workers[i].device = -1;
    if (engine->workers == NULL || engine->slots == NULL || engine->packet == NULL || engine->sender == NULL ||
        engine->settings.socket < 0 || engine->settings.wake < 0 || !make_workers(engine)) {
        const int error = errno;
        free_engine(engine);
        errno = error;
        return NULL;
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        engine->slots[i].next = i + 1 < SLOTS ? i + 1 : NO_SLOT;
    engine->first_waiting = engine->last_waiting = NO_SLOT;
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

bool fsx_engine_ended(struct fsx_engine *engine, int *error) {
    *error = atomic_load(&engine->error);
    return atomic_load(&engine->ended);
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
        const uint64_t *part = (const uint64_t *)&worker->hands.counts;
        uint64_t *sum = (uint64_t *)&counts->reads;
        for (size_t k = 0; k < sizeof counts->reads / sizeof *sum; k++)
            sum[k] += FSX_COUNTED(part[k]);
        counts->forwarded += FSX_COUNTED(worker->forwarded);
        counts->crossings += FSX_COUNTED(worker->crossings);
        counts->interrupted += FSX_COUNTED(worker->interrupted);
        counts->malformed += FSX_COUNTED(worker->malformed);
    }
}
_Static_assert(sizeof(struct fsx_read_counts) % sizeof(uint64_t) == 0, "it is an array of 64-bit numbers");

/* Threads that hang keep the engine, but not the mount: with its last descriptor the kernel ends the connection, and
 * whoever waits is told. The numbers stay taken, because those threads will write to them. */
static void drop_devices(struct fsx_engine *engine) {
    const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (uint32_t i = 0; nothing >= 0 && i < engine->settings.workers; i++)
        dup3(nothing, engine->workers[i].device, O_CLOEXEC);
    if (nothing >= 0)
        close(nothing);
}

bool fsx_engine_stop(struct fsx_engine *engine, uint32_t limit_ms) {
    atomic_store(&engine->stopping, true);
    pthread_mutex_lock(&engine->lock);
    pthread_cond_broadcast(&engine->slot_free);
    pthread_mutex_unlock(&engine->lock);
    shutdown(engine->settings.socket, SHUT_RDWR);
    /* A signal that comes between a worker's look at `stopping` and its read is lost: so again and again. */
    uint32_t running;
    for (uint32_t waited_ms = 0;; waited_ms++) {
        running = engine->pump_started && !atomic_load(&engine->pump_ended);
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
