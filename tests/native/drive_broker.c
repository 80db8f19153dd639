/* drive_broker.c: many threads on native/chunks/broker.c, without an engine and without peers, and programs that fetch chunks.
 *
 * One thread plays Python: it brings the stored bytes of chunks that are asked for, and now and then says that it cannot.
 */
#include "drive_fetchers.h"
#include "drive_rig.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define THREADS 6u
#define FETCHING 3u

struct stage {
    struct fsx_broker *broker;
    int wake;
    atomic_bool published, ending;
    bool fails; /* Python cannot bring some */
    _Atomic(uint64_t) brought, refused;
};

struct job {
    struct stage *stage;
    uint64_t seed;
    uint32_t rounds; /* at least; until all files are published */
    struct fsx_read_counts counts;
    uint8_t *answer;
    uint64_t served, failed, cancelled, plain;
};

/* A read, and a thread that waits for it. */
struct wait {
    struct fsx_read read;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool over;
    int error;
};

static void done(struct fsx_read *read, const void *data, int error) {
    struct wait *wait = (struct wait *)read;
    if (error == 0)
        check(memcmp(data, world.truth[read->entry] + read->offset, read->length) == 0, "wrong bytes");
    pthread_mutex_lock(&wait->lock);
    check(!wait->over, "a read is done twice");
    wait->over = true;
    wait->error = error;
    pthread_cond_signal(&wait->ended);
    pthread_mutex_unlock(&wait->lock);
}

static bool is_it(const struct fsx_read *read, uint64_t key) { return (uintptr_t)read == key; }

static void read_piece(struct job *job, const struct piece *piece, bool block) {
    struct wait wait = {.read = {.entry = piece->entry, .length = piece->length, .offset = piece->offset, .done = done},
                        .lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};
    fsx_read_start(&wait.read, job->stage->broker, block ? &job->counts : NULL);
    if (below(&job->seed, 16) == 0 && fsx_read_cancel(job->stage->broker, is_it, (uintptr_t)&wait) != NULL) {
        job->cancelled++;
        return;
    }
    pthread_mutex_lock(&wait.lock);
    while (!wait.over)
        pthread_cond_wait(&wait.ended, &wait.lock);
    pthread_mutex_unlock(&wait.lock);
    job->served += wait.error == 0;
    job->failed += wait.error != 0;
    check(wait.error == 0 || wait.error == EIO, "another error");
}

static void *use_broker(void *argument) {
    struct job *job = argument;
    struct fsx_broker *broker = job->stage->broker;
    for (uint32_t round = 0; round < job->rounds || !atomic_load(&job->stage->published); round++) {
        const struct piece piece = some_piece(&job->seed, FSX_READ_BYTES);
        const uint32_t chunk = (uint32_t)(piece.offset / FSX_CHUNK_BYTES);
        const bool block = below(&job->seed, 2) == 0;
        switch (below(&job->seed, 8)) {
        case 0:
            if (block)
                fsx_broker_want(broker, &job->counts, piece.entry, chunk, NULL, FSX_KEEP);
            else
                fsx_prefetch_add(fsx_broker_prefetch(broker), piece.entry, chunk, below(&job->seed, 2) == 0,
                                 below(&job->seed, 4) == 0);
            break;
        case 1:
            if (below(&job->seed, 2) == 0)
                fsx_broker_want(broker, NULL, piece.entry, chunk, NULL, FSX_PASS);
            else
                fsx_broker_want(broker, &job->counts, piece.entry, chunk, NULL, FSX_KEEP_ONCE);
            break;
        case 2:
        case 3:
            if (fsx_broker_read_cached(broker, &job->counts, piece.entry, piece.offset, piece.length, job->answer) ||
                fsx_broker_read_plain(broker, &job->counts, piece.entry, piece.offset, piece.length, job->answer)) {
                check(memcmp(job->answer, world.truth[piece.entry] + piece.offset, piece.length) == 0, "wrong bytes");
                job->plain++;
            }
            break;
        case 4:
            if (below(&job->seed, 20) == 0) {
                fsx_broker_set_capacity(broker, below(&job->seed, 2) == 0 ? 0 : 20 << 20);
                break;
            }
            /* fall through */
        default:
            read_piece(job, &piece, block);
        }
    }
    return NULL;
}

static void *play_python(void *argument) {
    struct stage *stage = argument;
    uint64_t turn = 0;
    while (!atomic_load(&stage->ending)) {
        struct pollfd ready = {.fd = stage->wake, .events = POLLIN};
        poll(&ready, 1, 2);
        uint64_t count;
        if ((ready.revents & POLLIN) != 0)
            check_call(read(stage->wake, &count, sizeof count) == sizeof count, "the eventfd cannot be read");
        struct fsx_chunk_upcall upcalls[7];
        for (size_t found; (found = fsx_broker_take_upcalls(stage->broker, upcalls, 7)) > 0;)
            for (size_t i = 0; i < found; i++) {
                if (stage->fails && turn++ % 5 == 0) {
                    fsx_broker_give(stage->broker, upcalls[i], NULL, 0, FSX_SHARED, EIO);
                    atomic_fetch_add(&stage->refused, 1);
                } else {
                    bring(stage->broker, upcalls[i]);
                    atomic_fetch_add(&stage->brought, 1);
                }
            }
    }
    return NULL;
}

struct publisher {
    struct fsx_broker *broker;
    bool damage;
};

/* First nothing is there, then the prepared files, then local copies, which may be damaged; each told of twice. */
static void *publish(void *argument) {
    const struct publisher *job = argument;
    for (uint8_t number = 1; number <= 2; number++)
        for (uint32_t p = 0; p < world.parts; p++) {
            usleep(3000);
            const int fd = number == 2 && job->damage && p % 2 == 0 ? world.damaged[p] : world.part[p];
            const int result = fsx_files_use(fsx_broker_files(job->broker), p, fd, number, false);
            check(result == 0 || result == EEXIST, "a file is not used");
        }
    return NULL;
}

static void drive_one(enum fsx_verify verify, uint64_t capacity, bool damage, bool fails, bool end_early, uint32_t rounds) {
    uint8_t *marks = calloc((size_t)(world.index.entries + world.index.chunk_records), 1);
    struct stage stage = {.wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), .fails = fails};
    stage.broker = fsx_broker_new(&(struct fsx_broker_settings){
        .index = &world.index, .marks = marks, .verify = verify, .capacity_bytes = capacity, .shared_readers = 3,
        .loaders = 3, .cores = 2, .wake = stage.wake});
    check(marks != NULL && stage.wake >= 0 && stage.broker != NULL && fsx_broker_start(stage.broker) == 0, "no broker");
    struct job jobs[THREADS];
    pthread_t threads[THREADS], fetching[FETCHING], publishers[2], python;
    struct publisher publisher = {.broker = stage.broker, .damage = damage};
    check(pthread_create(&python, NULL, play_python, &stage) == 0, "no thread");
    for (uint32_t i = 0; i < THREADS; i++) {
        jobs[i] = (struct job){.stage = &stage, .seed = 5 + i, .rounds = rounds, .answer = aligned_alloc(4096, 2 << 20)};
        check(jobs[i].answer != NULL && pthread_create(&threads[i], NULL, use_broker, &jobs[i]) == 0, "no thread");
    }
    struct fsx_fetchers *fetchers = fsx_fetchers_new(stage.broker, 2, FETCHING + 2, capacity);
    check(fetchers != NULL, "no fetchers");
    struct drive_fetching programs[FETCHING];
    for (uint32_t i = 0; i < FETCHING; i++) {
        programs[i] = (struct drive_fetching){.broker = stage.broker, .fetchers = fetchers, .seed = 50 + i, .rounds = rounds,
                                              .over = &stage.published};
        check(pthread_create(&fetching[i], NULL, drive_fetching, &programs[i]) == 0, "no thread");
    }
    for (uint32_t i = 0; i < 2; i++)
        check(pthread_create(&publishers[i], NULL, publish, &publisher) == 0, "no thread");
    for (uint32_t i = 0; i < 2; i++)
        pthread_join(publishers[i], NULL);
    if (end_early)
        fsx_broker_end(stage.broker); /* in the middle of it all: whoever waits is told */
    atomic_store(&stage.published, true);
    uint64_t served = 0, failed = 0, cancelled = 0, plain = 0;
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        served += jobs[i].served;
        failed += jobs[i].failed;
        cancelled += jobs[i].cancelled;
        plain += jobs[i].plain;
        free(jobs[i].answer);
    }
    uint64_t fetched = 0;
    for (uint32_t i = 0; i < FETCHING; i++) {
        pthread_join(fetching[i], NULL);
        fetched += programs[i].asked;
        failed += programs[i].failed;
    }
    check(fetched > 0 || fails || end_early, "nothing was fetched");
    waits_for = "the end of those who fetch";
    while (fsx_fetchers_count(fetchers).fetchers > 0)
        usleep(200);
    check(fsx_fetchers_count(fetchers).leases == 0 && fsx_fetchers_count(fetchers).held_bytes == 0, "leases are left");
    check(served > 0 && (failed == 0 || fails || end_early || damage), "a read fails without a reason");
    check(atomic_load(&stage.brought) > 0, "Python was never asked");
    struct fsx_cache_counts counts;
    struct fsx_read_counts reads = {0};
    waits_for = "what is in flight";
    do
        fsx_broker_count(stage.broker, &counts, &reads);
    while (!end_early && counts.in_flight_bytes > 0);
    if (!end_early) {
        fsx_broker_set_capacity(stage.broker, capacity);
        waits_for = "the capacity";
        do
            fsx_broker_count(stage.broker, &counts, &reads);
        while (counts.used_bytes > capacity);
        check(counts.misses > 0 && counts.prefetched > 0, "wrong counts");
    }
    check(counts.mapped_bytes <= counts.capacity_bytes + FSX_IN_FLIGHT_BYTES + FSX_SLAB_ROOM_BYTES, "too much memory");
    (void)cancelled, (void)plain;
    fsx_broker_end(stage.broker);
    waits_for = "the end";
    while (fsx_broker_running(stage.broker) + fsx_fetchers_end(fetchers) > 0)
        usleep(200);
    atomic_store(&stage.ending, true);
    pthread_join(python, NULL);
    fsx_fetchers_free(fetchers);
    fsx_broker_free(stage.broker);
    close(stage.wake);
    free(marks);
}

void drive_broker(uint32_t rounds) {
    drive_one(FSX_VERIFY_FIRST, 64 << 20, false, false, false, rounds);
    drive_one(FSX_VERIFY_FIRST, 5 << 20, true, false, false, rounds);
    drive_one(FSX_VERIFY_ALWAYS, 0, true, true, false, rounds);
    drive_one(FSX_VERIFY_NEVER, 5 << 20, false, false, false, rounds);
    drive_one(FSX_VERIFY_FIRST, 9 << 20, true, true, true, rounds);
}
