/* drive_ahead.c: native/fuse/ahead.c on partitions of a file system that is as slow as the scenario wants.
 *
 * The program is linked with --wrap for the calls that read a partition, and for the one that says where it lies: they do
 * what they are asked to, but a scenario can have them wait, or fail. Partitions lie then on a file system that is neither
 * memory nor a disk, of which nobody can say what the page cache has.
 */
#include "drive_world.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#define WORKERS 4u
#define THREADS 6u
/* Enough look-ups and reads for ahead.c to see a job, also after a walk. */
#define ENOUGH 48u

/* ---- the disk ------------------------------------------------------------------------------------------------- */

atomic_bool far_away;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool closed;
    uint32_t blocked; /* reads that wait, or have waited, since it was closed */
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
static atomic_bool broken;
static atomic_bool shaky;

int __real_fstatfs(int fd, struct statfs *facts);
int __wrap_fstatfs(int fd, struct statfs *facts);
ssize_t __real_pread(int fd, void *target, size_t bytes, off_t position);
ssize_t __wrap_pread(int fd, void *target, size_t bytes, off_t position);
ssize_t __real_preadv2(int fd, const struct iovec *parts, int count, off_t position, int flags);
ssize_t __wrap_preadv2(int fd, const struct iovec *parts, int count, off_t position, int flags);

int __wrap_fstatfs(int fd, struct statfs *facts) {
    const int result = __real_fstatfs(fd, facts);
    if (atomic_load(&far_away))
        facts->f_type = 0x6969; /* NFS */
    return result;
}

/* Wait as long as the disk takes; false if it cannot read. */
static bool reach_disk(void) {
    pthread_mutex_lock(&gate.lock);
    gate.blocked++;
    pthread_cond_broadcast(&gate.changed);
    while (gate.closed)
        pthread_cond_wait(&gate.changed, &gate.lock);
    pthread_mutex_unlock(&gate.lock);
    if (atomic_load(&shaky)) {
        static _Atomic(uint64_t) reads;
        uint64_t seed = atomic_fetch_add(&reads, 1) + 77;
        (void)next_random(&seed);
        if (below(&seed, 2) == 0)
            usleep((useconds_t)below(&seed, 300));
        if (below(&seed, 8) == 0) {
            errno = EIO;
            return false;
        }
    }
    errno = EIO;
    return !atomic_load(&broken);
}

ssize_t __wrap_pread(int fd, void *target, size_t bytes, off_t position) {
    return reach_disk() ? __real_pread(fd, target, bytes, position) : -1;
}

ssize_t __wrap_preadv2(int fd, const struct iovec *parts, int count, off_t position, int flags) {
    return reach_disk() ? __real_preadv2(fd, parts, count, position, flags) : -1;
}

static void close_gate(void) {
    pthread_mutex_lock(&gate.lock);
    gate.closed = true;
    gate.blocked = 0;
    pthread_mutex_unlock(&gate.lock);
}

static void wait_for_blocked(uint32_t count) {
    waits_for = "reads at the disk";
    pthread_mutex_lock(&gate.lock);
    while (gate.blocked < count)
        pthread_cond_wait(&gate.changed, &gate.lock);
    pthread_mutex_unlock(&gate.lock);
}

static void open_gate(void) {
    pthread_mutex_lock(&gate.lock);
    gate.closed = false;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
}

/* ---- threads that read ---------------------------------------------------------------------------------------- */

static struct fsx_broker *broker;
static struct fsx_ahead *ahead;
static uint32_t small[1000], small_count; /* files that one answer holds */
static _Atomic(uint64_t) wrong; /* reads that were answered with an error */

struct job {
    struct fsx_read_counts counts;
    uint64_t seed;
    uint32_t rounds;
    uint32_t entry;
    uint8_t *answer;
    pthread_t thread;
};

/* A READ, and who waits for it. */
struct asked {
    struct fsx_read read;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    uint32_t ends;
    int error;
};

static void end_read(struct fsx_read *read, const void *data, int error) {
    struct asked *asked = (struct asked *)read;
    if (error == 0)
        check(memcmp(data, world.truth[read->entry] + read->offset, read->length) == 0, "wrong bytes");
    pthread_mutex_lock(&asked->lock);
    asked->ends++;
    asked->error = error;
    pthread_cond_signal(&asked->ended);
    pthread_mutex_unlock(&asked->lock);
}

static void look_up(struct job *job, uint32_t entry) {
    if (fsx_ahead_expects(ahead, entry))
        fsx_ahead_fetch(ahead, entry, &job->counts);
}

/* As engine.c does it. Python has nothing: what cannot be read here is an error. */
static int read_piece(struct job *job, uint32_t entry, uint64_t offset, uint32_t length) {
    fsx_ahead_note_read(ahead, entry);
    if (fsx_broker_read_plain(broker, &job->counts, entry, offset, length, job->answer)) {
        check(memcmp(job->answer, world.truth[entry] + offset, length) == 0, "wrong bytes");
        return 0;
    }
    struct asked asked = {.read = {.entry = entry, .length = length, .offset = offset, .done = end_read},
                          .lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};
    fsx_read_start(&asked.read, broker, &job->counts);
    pthread_mutex_lock(&asked.lock);
    while (asked.ends == 0)
        pthread_cond_wait(&asked.ended, &asked.lock);
    check(asked.ends == 1, "a READ ends twice");
    pthread_mutex_unlock(&asked.lock);
    return asked.error;
}

static int read_whole(struct job *job, uint32_t entry) {
    return read_piece(job, entry, 0, (uint32_t)world.index.size[entry]);
}

static void *look_up_there(void *argument) {
    struct job *job = argument;
    look_up(job, job->entry);
    return NULL;
}

static void *read_there(void *argument) {
    struct job *job = argument;
    if (read_whole(job, job->entry) != 0)
        atomic_fetch_add(&wrong, 1);
    return NULL;
}

static void start(struct job *job, void *(*what)(void *), uint32_t entry) {
    job->entry = entry;
    check(pthread_create(&job->thread, NULL, what, job) == 0, "no thread");
}

/* Files read ahead, and those of them that were wanted, since the last call. */
static void check_counts(uint64_t files, uint64_t wanted, const char *text) {
    static uint64_t files_before, wanted_before;
    struct fsx_cache_counts now;
    struct fsx_read_counts reads;
    fsx_broker_count(broker, &now, &reads);
    const bool right = now.prefetched - files_before == files && now.prefetched_taken - wanted_before == wanted;
    if (!right && text != NULL)
        fprintf(stderr, "read ahead %" PRIu64 ", wanted %" PRIu64 "\n", now.prefetched - files_before,
                now.prefetched_taken - wanted_before);
    check(right || text == NULL, text);
    files_before = now.prefetched;
    wanted_before = now.prefetched_taken;
}

static uint64_t fetches(const struct job *job) { return job->counts.source[FSX_SHARED].fetches; }
static uint64_t reads(const struct job *job) {
    return job->counts.source[FSX_SHARED].reads + job->counts.source[FSX_CACHE].reads;
}

/* ---- scenarios ------------------------------------------------------------------------------------------------ */

static void learn(struct job *job) {
    for (uint32_t i = 0; i < ENOUGH; i++) {
        const uint32_t entry = small[i % small_count];
        look_up(job, entry);
        check(read_whole(job, entry) == 0, "a file is not read");
    }
}

static void walks_and_jobs(struct job *job) {
    for (uint32_t round = 0; round < 5; round++)
        for (uint32_t i = 0; i < small_count; i++)
            look_up(job, small[i]);
    check_counts(0, 0, "a walk reads files");
    check(fetches(job) == 0, "a walk reaches the disk");
    learn(job);
    check(reads(job) == ENOUGH && fetches(job) == ENOUGH, "reads are not counted once each");
    check_counts(0, 0, NULL);
    learn(job);
    check_counts(ENOUGH, ENOUGH, "a job is not recognised");
    for (uint32_t round = 0; round < 5; round++)
        for (uint32_t i = 0; i < small_count; i++)
            look_up(job, small[i]);
    const uint64_t fetched = fetches(job);
    check(fetched > 2 * ENOUGH && fetched - 2 * ENOUGH <= 20, "a walk after a job reads more than 20 files");
    learn(job);
    check_counts(0, 0, NULL);
}

static void finds_it_ready(struct job *job) {
    const uint32_t entry = small[3], bytes = (uint32_t)world.index.size[entry];
    const uint64_t fetched = fetches(job), counted = reads(job);
    look_up(job, entry);
    look_up(job, entry);
    check(fetches(job) == fetched + 1 && reads(job) == counted, "it is not read once, or counted before it is wanted");
    check(read_piece(job, entry, 0, bytes / 2) == 0 && read_piece(job, entry, 100, bytes / 3) == 0 &&
              read_piece(job, entry, bytes / 2, bytes - bytes / 2) == 0,
          "parts are not read");
    check(fetches(job) == fetched + 1 && reads(job) == counted + 3, "parts are not taken from what was read");
    check_counts(1, 1, "one file, and it was wanted");
}

static void goes_with_its_end(struct job *job) {
    const uint32_t entry = small[4];
    struct fsx_cache_counts counts;
    struct fsx_read_counts unused;
    look_up(job, entry);
    fsx_broker_count(broker, &counts, &unused);
    const uint64_t chunks = counts.chunks;
    check(read_whole(job, entry) == 0, "a file is not read");
    fsx_broker_count(broker, &counts, &unused);
    check(counts.chunks == chunks - 1, "what was read to its end is kept");
    check_counts(1, 1, "one file, and it was wanted");
}

static void comes_too_late(struct job *job) {
    check(fsx_ahead_expects(ahead, small[2]), "what is looked up is not expected to be read");
    check(read_whole(job, small[2]) == 0, "a file is not read");
    fsx_ahead_fetch(ahead, small[2], &job->counts);
    check_counts(0, 0, "a file is read ahead after its READ");
    for (uint32_t i = 0; i < world.file_count; i++)
        if (world.index.size[world.files[i]] > FSX_READ_BYTES)
            look_up(job, world.files[i]);
    check_counts(0, 0, "a file is read ahead that no answer holds");
}

/* READs that come while the file is read wait for it, all of them. */
static void waits(struct job *jobs) {
    const uint32_t entry = small[5];
    const uint64_t fetched = fetches(&jobs[1]);
    close_gate();
    start(&jobs[1], look_up_there, entry);
    wait_for_blocked(1);
    start(&jobs[2], read_there, entry);
    start(&jobs[3], read_there, entry);
    waits_for = "readers that join";
    struct fsx_cache_counts counts, before;
    struct fsx_read_counts unused;
    fsx_broker_count(broker, &before, &unused);
    do
        fsx_broker_count(broker, &counts, &unused);
    while (counts.joined < 2 && counts.joined < before.joined + 2);
    open_gate();
    for (uint32_t i = 1; i < 4; i++)
        pthread_join(jobs[i].thread, NULL);
    check(atomic_load(&wrong) == 0 && fetches(&jobs[1]) == fetched + 1, "it is not read once for all");
    check_counts(1, 1, "one file, and it was wanted");
}

static void fails(struct job *jobs) {
    atomic_store(&broken, true);
    look_up(&jobs[0], small[6]);
    check(read_whole(&jobs[0], small[6]) == EIO, "bytes from a disk that cannot read");
    atomic_store(&broken, false);
    check(read_whole(&jobs[0], small[6]) == 0, "it is not tried again");
    check_counts(0, 0, NULL);
}

static void is_bounded(struct job *jobs) {
    close_gate();
    for (uint32_t i = 0; i < WORKERS / 2; i++)
        start(&jobs[1 + i], look_up_there, small[10 + i]);
    wait_for_blocked(WORKERS / 2);
    look_up(&jobs[0], small[9]);
    open_gate();
    for (uint32_t i = 0; i < WORKERS / 2; i++)
        pthread_join(jobs[1 + i].thread, NULL);
    check_counts(WORKERS / 2, 0, "more read ahead than may");
    for (uint32_t i = 0; i < WORKERS / 2; i++)
        check(read_whole(&jobs[0], small[10 + i]) == 0, "a file is not read");
    check_counts(0, WORKERS / 2, "what was read is not there");
}

static void *do_anything(void *argument) {
    struct job *job = argument;
    for (uint32_t round = 0; round < job->rounds; round++) {
        const uint32_t entry = small[below(&job->seed, 8)], bytes = (uint32_t)world.index.size[entry];
        if (below(&job->seed, 10) > 0)
            look_up(job, entry);
        const uint64_t offset = below(&job->seed, 4) > 0 ? 0 : below(&job->seed, bytes);
        const uint32_t left = bytes - (uint32_t)offset;
        if (below(&job->seed, 10) > 0 &&
            read_piece(job, entry, offset, below(&job->seed, 3) > 0 ? left : 1 + (uint32_t)below(&job->seed, left)) != 0)
            atomic_fetch_add(&wrong, 1);
    }
    return NULL;
}

static void all_at_once(struct job *jobs, uint32_t rounds) {
    fsx_broker_set_capacity(broker, 0);
    atomic_store(&wrong, 0);
    atomic_store(&shaky, true);
    for (uint32_t i = 0; i < THREADS; i++) {
        jobs[i].seed = 900 + i;
        jobs[i].rounds = rounds;
        start(&jobs[i], do_anything, 0);
    }
    for (uint32_t i = 0; i < THREADS; i++)
        pthread_join(jobs[i].thread, NULL);
    atomic_store(&shaky, false);
    check(rounds < 100 || atomic_load(&wrong) > 0, "the disk never failed");
}

/* Python, which has no other source. */
static atomic_bool ending;
static void *refuse_all(void *argument) {
    (void)argument;
    while (!atomic_load(&ending)) {
        struct fsx_chunk_upcall upcall;
        if (fsx_broker_take_upcalls(broker, &upcall, 1) == 1)
            fsx_broker_give(broker, upcall, NULL, 0, FSX_SHARED, EIO);
        else
            usleep(100);
    }
    return NULL;
}

void drive_ahead(uint32_t rounds) {
    atomic_store(&far_away, true);
    uint8_t *marks = calloc((size_t)(world.index.entries + world.index.chunk_records), 1);
    const int wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    broker = fsx_broker_new(&(struct fsx_broker_settings){
        .index = &world.index, .marks = marks, .verify = FSX_VERIFY_ALWAYS, .capacity_bytes = 64 << 20,
        .shared_readers = THREADS, .loaders = 1, .cores = 2, .wake = wake});
    ahead = fsx_ahead_new(broker, WORKERS);
    check(marks != NULL && wake >= 0 && broker != NULL && ahead != NULL && fsx_broker_start(broker) == 0, "no memory");
    pthread_t python;
    check(pthread_create(&python, NULL, refuse_all, NULL) == 0, "no thread");
    for (uint32_t i = 0; i < world.file_count && small_count < sizeof small / sizeof *small; i++)
        if (world.index.size[world.files[i]] <= FSX_READ_BYTES)
            small[small_count++] = world.files[i];
    check(small_count > 20, "too few files");
    struct job jobs[THREADS] = {0};
    for (uint32_t i = 0; i < THREADS; i++)
        check((jobs[i].answer = aligned_alloc(4096, 2 << 20)) != NULL, "no memory");
    look_up(&jobs[0], small[0]);
    check(read_whole(&jobs[0], small[0]) == EIO, "there is no file yet");
    for (uint32_t p = 0; p < world.parts; p++)
        check(fsx_files_use(fsx_broker_files(broker), p, world.part[p], 1, false) == 0, "a file is not used");
    walks_and_jobs(&jobs[0]);
    finds_it_ready(&jobs[0]);
    goes_with_its_end(&jobs[0]);
    comes_too_late(&jobs[0]);
    waits(jobs);
    fails(jobs);
    is_bounded(jobs);
    all_at_once(jobs, rounds);
    fsx_broker_end(broker);
    waits_for = "the end";
    while (fsx_broker_running(broker) > 0)
        usleep(200);
    atomic_store(&ending, true);
    pthread_join(python, NULL);
    for (uint32_t i = 0; i < THREADS; i++)
        free(jobs[i].answer);
    fsx_ahead_free(ahead);
    fsx_broker_free(broker);
    close(wake);
    free(marks);
}
