/* drive_fetch.c: many threads on native/chunks/ and native/mpi/exchange.c, over an MPI library that is made up here.
 *
 * Two peers have all partitions. What they do with a question is set while readers read: answer it, with the right bytes
 * or with a wrong one, refuse it, keep it for later, or die. One thread makes all calls of the library, as in the daemon;
 * this one plays Python, which brings what the peers do not. Every reader must be answered exactly once, with the right bytes.
 */
#include "drive_rig.h"

#include <endian.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define READERS 24u
#define RANKS 3
#define LIMIT_NS UINT64_C(10000000000) /* an honest peer needs less, however busy the machine */
#define MOST_BYTES (1u << 20)

/* ---- the library: on the MPI thread, but for what the peers are to do --------------------------------------------- */

enum manner { HONEST, DAMAGES, REFUSES, SILENT, DEAD };

struct request {
    uint8_t *buffer;
    int count, peer, tag;
    bool receives, asked, done;
    int wait; /* polls until it is done, once it was asked for */
    int bytes, cancelled, error;
    uint32_t partition, length;
    uint64_t offset;
    struct request *next;
};

struct status {
    int bytes, cancelled, error;
};

static _Atomic(enum manner) manners[RANKS];
static struct request *requests; /* receives that are not complete */
static uint64_t polls;

static int fake_irecv(void *buffer, int count, uintptr_t type, int source, int tag, uintptr_t world_, void *handle) {
    (void)type, (void)world_;
    struct request *request = calloc(1, sizeof *request);
    check(request != NULL, "no memory");
    *request = (struct request){.buffer = buffer, .count = count, .peer = source, .tag = tag, .receives = true,
                                .next = requests};
    for (const struct request *other = requests; other != NULL; other = other->next)
        check(other->peer != source || other->tag != tag, "a tag is used twice");
    requests = request;
    memcpy(handle, &request, sizeof request);
    return 0;
}

static int fake_isend(const void *buffer, int count, uintptr_t type, int target, int tag, uintptr_t world_,
                      void *handle) {
    (void)type, (void)world_;
    struct request *sent = calloc(1, sizeof *sent);
    check(sent != NULL && count == FSX_HEADER_BYTES && tag == FSX_TAG_MESSAGE, "another message");
    sent->done = true;
    memcpy(handle, &sent, sizeof sent);
    uint32_t fields[4];
    memcpy(fields, buffer, sizeof fields);
    struct request *request = requests;
    while (request != NULL && (request->peer != target || request->tag != (int)le32toh(fields[1])))
        request = request->next;
    check(request != NULL && le32toh(fields[0]) == FSX_KIND_FETCH, "a question without a receive");
    request->asked = true;
    request->wait = (int)(polls % 7);
    request->partition = le32toh(fields[2]);
    request->length = le32toh(fields[3]);
    memcpy(&request->offset, (const char *)buffer + 16, sizeof request->offset);
    request->offset = le64toh(request->offset);
    check(request->partition < world.parts && (int)request->length == request->count, "a question for something else");
    return 0;
}

static void take_out(struct request *request) {
    for (struct request **link = &requests; *link != NULL; link = &(*link)->next)
        if (*link == request) {
            *link = request->next;
            return;
        }
}

/* Answer what can be answered now. */
static void work(struct request *request) {
    const enum manner manner = atomic_load(&manners[request->peer]);
    if (request->cancelled && request->wait-- <= 0) {
        request->done = true;
    } else if (request->asked && !request->cancelled && manner != SILENT && manner != DEAD && request->wait-- <= 0) {
        request->done = true;
        if (manner == REFUSES)
            return;
        request->bytes = (int)request->length;
        check_call(pread(world.part[request->partition], request->buffer, request->length, (off_t)request->offset) ==
                       (ssize_t)request->length, "a partition is too short");
        if (manner == DAMAGES)
            request->buffer[request->length / 2] ^= 1;
    }
}

static void finish(struct request *request, void *handle, struct status *status) {
    *status = (struct status){request->bytes, request->cancelled, 0};
    take_out(request);
    free(request);
    memset(handle, 0, sizeof(void *));
}

static int fake_test(void *handle, int *flag, void *status) {
    struct request *request;
    memcpy(&request, handle, sizeof request);
    *flag = request->done;
    if (request->done)
        finish(request, handle, status);
    return 0;
}

static int fake_testsome(int count, void *handles, int *completed, int *indices, void *statuses) {
    polls++;
    *completed = 0;
    for (int i = 0; i < count; i++) {
        struct request *request;
        memcpy(&request, (char *)handles + (size_t)i * sizeof request, sizeof request);
        if (request == NULL)
            continue;
        if (request->receives)
            work(request);
        if (request->done) {
            finish(request, (char *)handles + (size_t)i * sizeof request, (struct status *)statuses + *completed);
            indices[(*completed)++] = i;
        }
    }
    return 0;
}

static int fake_cancel(void *handle) {
    struct request *request;
    memcpy(&request, handle, sizeof request);
    request->cancelled = 1;
    request->wait = (int)(polls % 50);
    return 0;
}

static int fake_get_count(const void *status, uintptr_t type, int *count) {
    (void)type;
    *count = ((const struct status *)status)->bytes;
    return 0;
}

static int fake_test_cancelled(const void *status, int *flag) {
    *flag = ((const struct status *)status)->cancelled;
    return 0;
}

/* A peer that dies while nobody asks it is not missed. */
static bool is_asked(int peer) {
    const struct request *request = requests;
    while (request != NULL && (request->peer != peer || !request->asked || request->cancelled))
        request = request->next;
    return request != NULL;
}

/* ---- the MPI thread ----------------------------------------------------------------------------------------------- */

struct stage {
    struct fsx_exchange exchange;
    struct fsx_broker *broker;
    int wake;
    atomic_bool ending;   /* the MPI thread ends when nothing is under way */
    atomic_bool stopping; /* readers end */
    _Atomic(uint64_t) failures[4], upcalls, cancelled, answered, answered_long, prefetched; /* long: in two chunks */
};

static void *mpi_main(void *argument) {
    struct stage *stage = argument;
    struct fsx_exchange *x = &stage->exchange;
    bool lost[RANKS] = {false};
    while (!atomic_load(&stage->ending) || !fsx_exchange_is_idle(x)) {
        fsx_exchange_clear_interrupt(x);
        for (int peer = 1; peer < RANKS; peer++)
            if (atomic_load(&manners[peer]) == DEAD && !lost[peer] && is_asked(peer)) {
                lost[peer] = true;
                fsx_exchange_lose(x, peer);
            }
        if (fsx_exchange_run(x, 200000))
            fsx_exchange_sleep(x, 1000000);
        check(x->event_count == 0 && x->released_count == 0, "something for Python that is not Python's");
    }
    return NULL;
}

/* ---- readers ------------------------------------------------------------------------------------------------------ */

struct reader_job {
    struct stage *stage;
    uint32_t number;
    uint64_t seed;
};

/* A read, and the thread that waits for it. */
struct ticket {
    struct fsx_read read;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    uint32_t ends;
    int error;
};

static void answer(struct fsx_read *read, const void *data, int error) {
    struct ticket *ticket = (struct ticket *)read;
    if (error == 0)
        check(memcmp(data, world.truth[read->entry] + read->offset, read->length) == 0, "other bytes");
    pthread_mutex_lock(&ticket->lock);
    ticket->ends++;
    ticket->error = error;
    pthread_cond_signal(&ticket->ended);
    pthread_mutex_unlock(&ticket->lock);
}

static bool is_it(const struct fsx_read *read, uint64_t key) { return (uintptr_t)read == key; }

static void *read_main(void *argument) {
    struct reader_job *job = argument;
    struct stage *stage = job->stage;
    struct fsx_read_counts counts = {0};
    while (!atomic_load(&stage->stopping)) {
        struct piece piece = some_piece(&job->seed, MOST_BYTES);
        if (below(&job->seed, 2) == 0 && world.index.size[piece.entry] <= MOST_BYTES)
            piece = (struct piece){piece.entry, 0, (uint32_t)world.index.size[piece.entry]};
        if (below(&job->seed, 20) == 0) { /* on nobody's behalf */
            fsx_broker_want(stage->broker, NULL, piece.entry, (uint32_t)(piece.offset / FSX_CHUNK_BYTES), NULL, FSX_KEEP);
            atomic_fetch_add(&stage->prefetched, 1);
        }
        struct ticket ticket = {
            .read = {.entry = piece.entry, .length = piece.length, .offset = piece.offset, .done = answer},
            .lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};
        fsx_read_start(&ticket.read, stage->broker, &counts);
        if (below(&job->seed, 16) == 0 && fsx_read_cancel(stage->broker, is_it, (uintptr_t)&ticket) != NULL) {
            atomic_fetch_add(&stage->cancelled, 1);
            continue;
        }
        pthread_mutex_lock(&ticket.lock);
        while (ticket.ends == 0)
            pthread_cond_wait(&ticket.ended, &ticket.lock);
        pthread_mutex_unlock(&ticket.lock);
        if (ticket.error != 0 && !atomic_load(&stage->stopping))
            fprintf(stderr, "while %s is awaited: %s\n", waits_for, strerror(ticket.error));
        check(ticket.ends == 1 && (ticket.error == 0 || atomic_load(&stage->stopping)), "a reader is not answered as it should");
        atomic_fetch_add(&stage->answered, ticket.error == 0);
        if (piece.offset % FSX_CHUNK_BYTES + piece.length > FSX_CHUNK_BYTES)
            atomic_fetch_add(&stage->answered_long, 1);
    }
    return NULL;
}

/* ---- Python: this thread ------------------------------------------------------------------------------------------ */

static void play_python(struct stage *stage) {
    /* Not until there are none: where all is asked of Python, there are always some. */
    struct fsx_chunk_upcall upcalls[5];
    const size_t asked = fsx_broker_take_upcalls(stage->broker, upcalls, 5);
    for (size_t i = 0; i < asked; i++) {
        atomic_fetch_add(&stage->upcalls, 1);
        bring(stage->broker, upcalls[i]);
    }
    struct fsx_failure failures[5];
    struct fsx_peers *peers = fsx_broker_peers(stage->broker);
    for (size_t count; (count = fsx_peers_take_failures(peers, failures, 5)) > 0;)
        for (size_t i = 0; i < count; i++) {
            check(failures[i].peer > 0 && failures[i].peer < RANKS && failures[i].partition < world.parts, "no such peer");
            atomic_fetch_add(&stage->failures[failures[i].kind], 1);
        }
}

static void route_all(struct stage *stage, const int *ranks, uint32_t count) {
    for (uint32_t p = 0; p < world.parts; p++)
        check(fsx_peers_route(fsx_broker_peers(stage->broker), p, ranks, count), "no memory");
}

/* The alarm of the program ends a wait that has no end, and says which. */
#define wait_for(stage, counter, more) wait_more(stage, counter, more, #counter)

static void wait_more(struct stage *stage, _Atomic(uint64_t) *counter, uint64_t more, const char *what) {
    const uint64_t wanted = atomic_load(counter) + more;
    waits_for = what;
    while (atomic_load(counter) < wanted) {
        play_python(stage);
        usleep(50);
    }
}

static uint64_t fetches_of(struct stage *stage, int peer) {
    return fsx_peers_count(fsx_broker_peers(stage->broker), peer).fetches;
}

/* All that can happen to peers, one after the other, while readers read. */
static void play(struct stage *stage, uint32_t rounds) {
    const int both[] = {1, 2};
    wait_for(stage, &stage->answered, rounds);
    wait_for(stage, &stage->answered_long, 1);
    wait_for(stage, &stage->cancelled, 1);
    wait_for(stage, &stage->prefetched, 1);
    play_python(stage);
    for (int kind = 0; kind < 4; kind++)
        check(atomic_load(&stage->failures[kind]) == 0, "a failure of an honest peer");
    check(fetches_of(stage, 1) > 0 && fetches_of(stage, 2) > 0, "not both are asked");
    check(atomic_load(&stage->upcalls) == 0, "Python is asked without need");

    atomic_store(&manners[1], REFUSES);
    wait_for(stage, &stage->failures[FSX_PEER_REFUSED], 3);
    wait_for(stage, &stage->upcalls, 3); /* it brings what the peer does not */
    route_all(stage, both + 1, 1);       /* and says whom to ask */
    wait_for(stage, &stage->answered, rounds / 4);

    atomic_store(&manners[1], HONEST);
    route_all(stage, both, 2);
    atomic_store(&manners[2], DAMAGES);
    wait_for(stage, &stage->failures[FSX_PEER_DAMAGED], 3);
    atomic_store(&manners[2], HONEST);
    route_all(stage, both, 0);
    wait_for(stage, &stage->upcalls, 3); /* nobody may be asked */
    route_all(stage, both, 2);

    atomic_store(&manners[1], SILENT);
    wait_for(stage, &stage->failures[FSX_PEER_SILENT], 1);
    wait_for(stage, &stage->answered, rounds / 4);
    check(!fsx_exchange_is_alive(&stage->exchange, 1), "a silent peer is asked");
    atomic_store(&manners[1], HONEST);
    waits_for = "a sign of life";
    while (!fsx_exchange_is_alive(&stage->exchange, 1)) {
        play_python(stage);
        usleep(200);
    }
    wait_for(stage, &stage->answered, rounds / 4);

    atomic_store(&manners[2], DEAD);
    wait_for(stage, &stage->failures[FSX_PEER_LOST], 1);
    const uint64_t before = fetches_of(stage, 1);
    wait_for(stage, &stage->answered, rounds / 4);
    check(fetches_of(stage, 1) > before, "the other one is not asked");
}

void drive_fetch(uint32_t rounds, uint32_t cores) {
    struct stage stage = {.wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    uint8_t *marks = calloc((size_t)(world.index.entries + world.index.chunk_records), 1);
    stage.broker = fsx_broker_new(&(struct fsx_broker_settings){
        .index = &world.index, .marks = marks, .verify = FSX_VERIFY_FIRST, .capacity_bytes = 9 << 20, .shared_readers = 2,
        .loaders = 2, .cores = cores, .wake = stage.wake});
    struct fsx_exchange *x = &stage.exchange;
    x->mpi = (struct fsx_mpi){.irecv = fake_irecv, .isend = fake_isend, .test = fake_test, .testsome = fake_testsome,
                              .cancel = fake_cancel, .get_count = fake_get_count, .test_cancelled = fake_test_cancelled,
                              .handle_bytes = sizeof(void *), .status_bytes = sizeof(struct status),
                              .error_offset = offsetof(struct status, error)};
    x->size = RANKS;
    x->buffer_bytes = FSX_HEADER_BYTES;
    x->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    x->notify = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    check(marks != NULL && stage.broker != NULL && fsx_exchange_open(x) && x->wake >= 0 && x->notify >= 0, "no memory");
    check(fsx_broker_ask_peers(stage.broker, x, 0, LIMIT_NS) == 0, "no memory");
    route_all(&stage, (const int[]){1, 2}, 2);
    check(fsx_broker_start(stage.broker) == 0, "no thread");
    pthread_t mpi, threads[READERS];
    struct reader_job jobs[READERS];
    check(pthread_create(&mpi, NULL, mpi_main, &stage) == 0, "no thread");
    for (uint32_t i = 0; i < READERS; i++) {
        jobs[i] = (struct reader_job){&stage, i, 99 + i};
        check(pthread_create(&threads[i], NULL, read_main, &jobs[i]) == 0, "no thread");
    }
    play(&stage, rounds);
    waits_for = "the end";
    atomic_store(&stage.stopping, true);
    fsx_broker_end(stage.broker); /* in the middle of it all: whoever waits is told */
    for (uint32_t i = 0; i < READERS; i++)
        pthread_join(threads[i], NULL);
    while (fsx_broker_running(stage.broker) > 0)
        usleep(200);
    atomic_store(&stage.ending, true);
    pthread_join(mpi, NULL);
    check(x->counters.late_answers > 0, "what was given up was never answered");
    fsx_broker_free(stage.broker);
    fsx_exchange_free(x);
    free(marks);
    close(x->wake);
    close(x->notify);
    close(stage.wake);
}
