/* drive_fetch.c: many threads on native/fetching.c and native/exchange.c, over an MPI library that is made up here.
 *
 * Two peers have all partitions. What they do with a question is set while readers read: answer it, with the right bytes
 * or with a wrong one, refuse it, keep it for later, or die. One thread makes all calls of the library, as in the daemon;
 * this one plays Python. Every reader must be answered exactly once, with the right bytes, or cross over.
 */
#include "drive_world.h"

#include <endian.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define READERS 24u
#define RANKS 3
#define LIMIT_NS UINT64_C(3000000000) /* an honest peer needs less, however busy the machine */
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
    struct fsx_content *content;
    struct fsx_fetcher *fetcher;
    atomic_bool ending;   /* the MPI thread ends when nothing is under way */
    atomic_bool stopping; /* readers end */
    _Atomic(uint64_t) told, failures[4], refused, interrupted, from_cache;
    _Atomic(uint64_t) answered, answered_long, crossed, crossed_long; /* long: those that need two chunks */
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

struct ticket {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    uint64_t unique; /* 0: nobody waits */
    enum { WAITS, RIGHT, CROSSES, TAKEN_BACK, ERROR } state;
};

struct reader_job {
    struct stage *stage;
    uint32_t number;
    uint64_t seed;
};

static struct ticket tickets[READERS];

static void end_ticket(uint64_t unique, int state) {
    struct ticket *ticket = &tickets[unique % READERS];
    pthread_mutex_lock(&ticket->lock);
    check(ticket->unique == unique && ticket->state == WAITS, "a reader is answered twice");
    ticket->state = state;
    pthread_cond_signal(&ticket->ended);
    pthread_mutex_unlock(&ticket->lock);
}

static void answer(void *context, const struct fsx_reader *reader, const void *data, int error) {
    struct stage *stage = context;
    check(error == 0 || error == EIO, "another error");
    if (error == 0) {
        check(memcmp(data, world.truth[reader->entry] + reader->offset, reader->length) == 0, "other bytes");
        atomic_fetch_add(&stage->answered, 1);
        if (reader->offset % FSX_CHUNK_BYTES + reader->length > FSX_CHUNK_BYTES)
            atomic_fetch_add(&stage->answered_long, 1);
    }
    end_ticket(reader->unique, error == 0 ? RIGHT : ERROR);
}

static void cross(void *context, const struct fsx_reader *reader) {
    struct stage *stage = context;
    /* One that needs two chunks may find that the cache has no room for both. */
    const bool spans = reader->offset % FSX_CHUNK_BYTES + reader->length > FSX_CHUNK_BYTES;
    atomic_fetch_add(spans ? &stage->crossed_long : &stage->crossed, 1);
    end_ticket(reader->unique, CROSSES);
}

static void tell(void *context) { atomic_fetch_add(&((struct stage *)context)->told, 1); }

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void *read_main(void *argument) {
    struct reader_job *job = argument;
    struct stage *stage = job->stage;
    struct ticket *ticket = &tickets[job->number];
    struct fsx_hands hands;
    check(fsx_hands_make(&hands), "no memory");
    for (uint64_t turn = 1; !atomic_load(&stage->stopping); turn++) {
        struct piece piece = some_piece(&job->seed, MOST_BYTES);
        if (below(&job->seed, 2) == 0 && world.index.size[piece.entry] <= MOST_BYTES)
            piece = (struct piece){piece.entry, 0, (uint32_t)world.index.size[piece.entry]};
        if (fsx_content_read(stage->content, &hands, piece.entry, piece.offset, piece.length)) {
            check(memcmp(hands.answer, world.truth[piece.entry] + piece.offset, piece.length) == 0, "the cache is wrong");
            atomic_fetch_add(&stage->from_cache, 1);
            continue;
        }
        const uint64_t unique = turn * READERS + job->number;
        pthread_mutex_lock(&ticket->lock);
        ticket->unique = unique;
        ticket->state = WAITS;
        pthread_mutex_unlock(&ticket->lock);
        const struct fsx_reader reader = {.worker = job->number, .entry = piece.entry, .unique = unique,
                                          .offset = piece.offset, .length = piece.length, .start_ns = now_ns()};
        if (!fsx_fetcher_fetch(stage->fetcher, &reader)) {
            atomic_fetch_add(&stage->refused, 1);
            continue;
        }
        uint32_t worker;
        if (below(&job->seed, 16) == 0 && fsx_fetcher_interrupt(stage->fetcher, unique, &worker)) {
            check(worker == job->number, "another reader was interrupted");
            atomic_fetch_add(&stage->interrupted, 1);
            end_ticket(unique, TAKEN_BACK);
        }
        pthread_mutex_lock(&ticket->lock);
        while (ticket->state == WAITS)
            pthread_cond_wait(&ticket->ended, &ticket->lock);
        ticket->unique = 0;
        pthread_mutex_unlock(&ticket->lock);
    }
    fsx_hands_free(&hands);
    return NULL;
}

/* ---- Python: this thread ------------------------------------------------------------------------------------------ */

static void take_failures(struct stage *stage) {
    struct fsx_failure failures[5];
    for (size_t count; (count = fsx_fetcher_take_failures(stage->fetcher, failures, 5)) > 0;)
        for (size_t i = 0; i < count; i++) {
            check(failures[i].peer > 0 && failures[i].peer < RANKS && failures[i].partition < world.parts, "no such peer");
            atomic_fetch_add(&stage->failures[failures[i].kind], 1);
        }
}

static void route_all(struct stage *stage, const int *ranks, uint32_t count) {
    for (uint32_t p = 0; p < world.parts; p++)
        check(fsx_fetcher_route(stage->fetcher, p, ranks, count), "no memory");
}

/* The alarm of the program ends a wait that has no end, and says which. */
#define wait_for(stage, counter, more) wait_more(stage, counter, more, #counter)

static void wait_more(struct stage *stage, _Atomic(uint64_t) *counter, uint64_t more, const char *what) {
    const uint64_t wanted = atomic_load(counter) + more;
    waits_for = what;
    while (atomic_load(counter) < wanted) {
        take_failures(stage);
        usleep(200);
    }
}

static uint64_t fetches_of(struct stage *stage, int peer) {
    return fsx_fetcher_count_peer(stage->fetcher, peer).fetches;
}

/* All that can happen to peers, one after the other, while readers read. */
static void play(struct stage *stage, uint32_t rounds) {
    const int both[] = {1, 2};
    wait_for(stage, &stage->answered, rounds);
    wait_for(stage, &stage->answered_long, 1);
    wait_for(stage, &stage->interrupted, 1);
    wait_for(stage, &stage->from_cache, 1);
    take_failures(stage);
    for (int kind = 0; kind < 4; kind++)
        check(atomic_load(&stage->failures[kind]) == 0, "a failure of an honest peer");
    check(fetches_of(stage, 1) > 0 && fetches_of(stage, 2) > 0, "not both are asked");
    check(atomic_load(&stage->crossed) == 0, "somebody crosses over without need");

    atomic_store(&manners[1], REFUSES);
    wait_for(stage, &stage->failures[FSX_PEER_REFUSED], 3);
    check(atomic_load(&stage->crossed) > 0 && atomic_load(&stage->told) > 0, "Python does not know");
    route_all(stage, both + 1, 1); /* as Python does */
    wait_for(stage, &stage->answered, rounds / 4);

    atomic_store(&manners[1], HONEST);
    route_all(stage, both, 2);
    atomic_store(&manners[2], DAMAGES);
    wait_for(stage, &stage->failures[FSX_PEER_DAMAGED], 3);
    atomic_store(&manners[2], HONEST);
    route_all(stage, both, 0);
    wait_for(stage, &stage->refused, 3); /* nobody may be asked */
    route_all(stage, both, 2);

    atomic_store(&manners[1], SILENT);
    wait_for(stage, &stage->failures[FSX_PEER_SILENT], 1);
    wait_for(stage, &stage->answered, rounds / 4);
    check(!fsx_exchange_is_alive(&stage->exchange, 1), "a silent peer is asked");
    atomic_store(&manners[1], HONEST);
    waits_for = "a sign of life";
    while (!fsx_exchange_is_alive(&stage->exchange, 1))
        usleep(200);
    wait_for(stage, &stage->answered, rounds / 4);

    atomic_store(&manners[2], DEAD);
    wait_for(stage, &stage->failures[FSX_PEER_LOST], 1);
    const uint64_t before = fetches_of(stage, 1);
    wait_for(stage, &stage->answered, rounds / 4);
    check(fetches_of(stage, 1) > before, "the other one is not asked");
}

void drive_fetch(uint32_t rounds, uint32_t cores) {
    struct stage stage = {0};
    uint8_t *marks = calloc((size_t)(world.index.entries + world.index.chunk_records), 1);
    stage.content = fsx_content_new(&world.index, marks, FSX_VERIFY_FIRST, 9 << 20, 2);
    struct fsx_exchange *x = &stage.exchange;
    x->mpi = (struct fsx_mpi){.irecv = fake_irecv, .isend = fake_isend, .test = fake_test, .testsome = fake_testsome,
                              .cancel = fake_cancel, .get_count = fake_get_count, .test_cancelled = fake_test_cancelled,
                              .handle_bytes = sizeof(void *), .status_bytes = sizeof(struct status),
                              .error_offset = offsetof(struct status, error)};
    x->size = RANKS;
    x->buffer_bytes = FSX_HEADER_BYTES;
    x->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    x->landing = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    check(marks != NULL && stage.content != NULL && fsx_exchange_open(x) && x->wake >= 0 && x->landing >= 0, "no memory");
    stage.fetcher = fsx_fetcher_new(x, stage.content, 0, LIMIT_NS, cores);
    check(stage.fetcher != NULL, "no memory");
    route_all(&stage, (const int[]){1, 2}, 2);
    check(fsx_fetcher_start(stage.fetcher, &(struct fsx_fetch_ends){&stage, answer, cross, tell}) == 0, "no thread");
    pthread_t mpi, threads[READERS];
    struct reader_job jobs[READERS];
    check(pthread_create(&mpi, NULL, mpi_main, &stage) == 0, "no thread");
    for (uint32_t i = 0; i < READERS; i++) {
        pthread_mutex_init(&tickets[i].lock, NULL);
        pthread_cond_init(&tickets[i].ended, NULL);
        jobs[i] = (struct reader_job){&stage, i, 99 + i};
        check(pthread_create(&threads[i], NULL, read_main, &jobs[i]) == 0, "no thread");
    }
    play(&stage, rounds);
    waits_for = "the end";
    fsx_fetcher_end(stage.fetcher); /* in the middle of it all: whoever waits is told */
    atomic_store(&stage.stopping, true);
    for (uint32_t i = 0; i < READERS; i++)
        pthread_join(threads[i], NULL);
    while (fsx_fetcher_running(stage.fetcher) > 0)
        usleep(200);
    fsx_fetcher_join(stage.fetcher);
    check(fsx_fetcher_running(stage.fetcher) == 0, "a thread is left");
    atomic_store(&stage.ending, true);
    pthread_join(mpi, NULL);
    check(x->counters.late_answers > 0, "what was given up was never answered");
    fsx_content_free(stage.content);
    fsx_fetcher_free(stage.fetcher);
    fsx_exchange_free(x);
    free(marks);
    close(x->wake);
    close(x->landing);
}
