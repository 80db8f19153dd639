/* drive_ahead.c: native/ahead.c on partitions of a file system that is as slow as the scenario wants.
 *
 * The program is linked with --wrap for the calls that read a partition, and for the one that says where it lies: they do
 * what they are asked to, but a scenario can have them wait, or fail. Partitions lie then on a file system that is neither
 * memory nor a disk, of which nobody can say what the page cache has.
 */
#include "drive_world.h"

#include <pthread.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#define WORKERS 4u
#define PLACES WORKERS
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

static struct fsx_content *content;
static struct fsx_ahead *ahead;
static uint32_t small[1000], small_count; /* files that one answer holds */

/* How each READ ended, by its number. */
static _Atomic(uint32_t) *answered, *elsewhere;
static _Atomic(uint64_t) uniques;

struct job {
    struct fsx_hands hands;
    uint64_t seed;
    uint32_t rounds;
    uint64_t answers; /* given by this thread */
    uint32_t entry;
    struct fsx_reader reader;
    pthread_t thread;
};

static void answer(void *context, const struct fsx_reader *reader, const uint8_t *data) {
    struct job *job = context;
    check(memcmp(data, world.truth[reader->entry] + reader->offset, reader->length) == 0, "wrong bytes");
    atomic_fetch_add(&answered[reader->unique], 1);
    job->answers++;
}

static void leave_to_others(void *context, const struct fsx_reader *reader) {
    (void)context;
    atomic_fetch_add(&elsewhere[reader->unique], 1);
}

static struct fsx_ahead_ends ends_of(struct job *job) { return (struct fsx_ahead_ends){job, answer, leave_to_others}; }

static void look_up(struct job *job, uint32_t entry) {
    const struct fsx_ahead_ends ends = ends_of(job);
    if (fsx_ahead_expects(ahead, entry))
        fsx_ahead_fetch(ahead, entry, &job->hands, &ends);
}

static uint64_t read_piece(struct job *job, uint32_t entry, uint64_t offset, uint32_t length) {
    const struct fsx_ahead_ends ends = ends_of(job);
    const struct fsx_reader reader = {.entry = entry, .offset = offset, .length = length,
                                      .unique = atomic_fetch_add(&uniques, 1)};
    fsx_ahead_read(ahead, &reader, &job->hands, &ends);
    return reader.unique;
}

static uint64_t read_whole(struct job *job, uint32_t entry) {
    return read_piece(job, entry, 0, (uint32_t)world.index.size[entry]);
}

static void *look_up_there(void *argument) {
    struct job *job = argument;
    look_up(job, job->entry);
    return NULL;
}

static void *read_there(void *argument) {
    struct job *job = argument;
    read_whole(job, job->entry);
    return NULL;
}

static void start(struct job *job, void *(*what)(void *), uint32_t entry) {
    job->entry = entry;
    check(pthread_create(&job->thread, NULL, what, job) == 0, "no thread");
}

static void check_ended(uint64_t unique, uint32_t answers, uint32_t others) {
    check(atomic_load(&answered[unique]) == answers && atomic_load(&elsewhere[unique]) == others,
          "a READ did not end as it should");
}

/* Files read ahead, and those of them that were wanted, since the last call. */
static void check_counts(uint64_t files, uint64_t wanted, const char *text) {
    static struct fsx_ahead_counts before;
    const struct fsx_ahead_counts now = fsx_ahead_count(ahead);
    if (now.files - before.files != files || now.wanted - before.wanted != wanted)
        fprintf(stderr, "read ahead %" PRIu64 ", wanted %" PRIu64 "\n", now.files - before.files,
                now.wanted - before.wanted);
    check(now.files - before.files == files && now.wanted - before.wanted == wanted, text);
    before = now;
}

static uint64_t fetches(const struct job *job) { return job->hands.counts.origin[FSX_SHARED].fetches; }
static uint64_t reads(const struct job *job) {
    return job->hands.counts.origin[FSX_SHARED].reads + job->hands.counts.origin[FSX_CACHE].reads;
}

/* ---- scenarios ------------------------------------------------------------------------------------------------ */

static void learn(struct job *job) {
    for (uint32_t i = 0; i < ENOUGH; i++) {
        const uint32_t entry = small[i % small_count];
        look_up(job, entry);
        check_ended(read_whole(job, entry), 1, 0);
    }
}

static void walks_and_jobs(struct job *job) {
    for (uint32_t round = 0; round < 5; round++)
        for (uint32_t i = 0; i < small_count; i++)
            look_up(job, small[i]);
    check_counts(0, 0, "a walk reads files");
    check(fetches(job) == 0, "a walk reaches the disk");
    learn(job);
    const struct fsx_ahead_counts counts = fsx_ahead_count(ahead);
    check(counts.files == counts.wanted && counts.files >= ENOUGH - 33, "a job is not recognised");
    check(reads(job) == ENOUGH && fetches(job) == ENOUGH, "reads are not counted once each");
    for (uint32_t round = 0; round < 5; round++)
        for (uint32_t i = 0; i < small_count; i++)
            look_up(job, small[i]);
    const struct fsx_ahead_counts after = fsx_ahead_count(ahead);
    check(after.files > counts.files && after.files - counts.files <= 20, "a walk after a job reads more than 20 files");
    learn(job);
}

static void finds_it_ready(struct job *job) {
    const uint32_t entry = small[3], bytes = (uint32_t)world.index.size[entry];
    const uint64_t fetched = fetches(job), counted = reads(job);
    look_up(job, entry);
    look_up(job, entry);
    check(fetches(job) == fetched + 1 && reads(job) == counted, "it is not read once, or counted before it is wanted");
    check_ended(read_piece(job, entry, 0, bytes / 2), 1, 0);
    check_ended(read_piece(job, entry, 100, bytes / 3), 1, 0);
    check_ended(read_piece(job, entry, bytes / 2, bytes - bytes / 2), 1, 0);
    check(fetches(job) == fetched + 1 && reads(job) == counted + 3, "parts are not taken from what was read");
    check_counts(1, 1, "one file, and it was wanted");
    read_whole(job, entry);
    check(fetches(job) == fetched + 2, "what was read to its end is kept");
    const uint64_t empty = read_piece(job, entry, bytes, 0);
    check_ended(empty, 1, 0);
    check_counts(0, 0, "nothing is read ahead without a look-up");
}

static void comes_too_late(struct job *job) {
    const struct fsx_ahead_ends ends = ends_of(job);
    check(fsx_ahead_expects(ahead, small[2]), "what is looked up is not expected to be read");
    check_ended(read_whole(job, small[2]), 1, 0);
    fsx_ahead_fetch(ahead, small[2], &job->hands, &ends);
    check_counts(0, 0, "a file is read ahead after its READ");
}

static void is_replaced(struct job *job) {
    for (uint32_t i = 0; i < PLACES + 1; i++)
        look_up(job, small[i]);
    check_counts(PLACES + 1, 0, "not all are read ahead");
    check_ended(read_whole(job, small[0]), 1, 0);
    check_counts(0, 0, "it is not the oldest that is replaced");
    for (uint32_t i = 1; i < PLACES + 1; i++)
        check_ended(read_whole(job, small[i]), 1, 0);
    check_counts(0, PLACES, "what was read last is not there");
    for (uint32_t i = 0; i < world.file_count; i++)
        if (world.index.size[world.files[i]] > FSX_ANSWER_BYTES)
            look_up(job, world.files[i]);
    check_counts(0, 0, "a file is read ahead that no answer holds");
}

/* READs that come while the file is read: of all of it, or of a part. */
static void waits(struct job *jobs, bool part) {
    const uint32_t entry = small[5], bytes = (uint32_t)world.index.size[entry];
    const uint64_t given = jobs[1].answers;
    close_gate();
    start(&jobs[1], look_up_there, entry);
    wait_for_blocked(1);
    const uint64_t first = read_piece(&jobs[0], entry, 0, part ? bytes / 2 : bytes);
    check_ended(first, 0, 0);
    start(&jobs[2], read_there, entry); /* a second one reads by itself */
    wait_for_blocked(2);
    look_up(&jobs[0], entry); /* and this has nothing to do */
    open_gate();
    pthread_join(jobs[1].thread, NULL);
    pthread_join(jobs[2].thread, NULL);
    check_ended(first, 1, 0);
    check_ended(first + 1, 1, 0);
    check(jobs[1].answers == given + 1, "another thread has answered");
    check_counts(1, 1, "one file, and it was wanted");
    const uint64_t fetched = fetches(&jobs[0]);
    check_ended(read_piece(&jobs[0], entry, bytes / 2, bytes - bytes / 2), 1, 0);
    check(fetches(&jobs[0]) == fetched + (part ? 0 : 1), "what comes after a part is not kept, or the whole is");
    check_counts(0, 0, "the same file counts twice");
}

static void fails(struct job *jobs) {
    const uint32_t entry = small[7];
    atomic_store(&broken, true);
    look_up(&jobs[0], entry);
    close_gate();
    start(&jobs[1], look_up_there, entry);
    wait_for_blocked(1);
    const uint64_t waiting = read_whole(&jobs[0], entry);
    open_gate();
    pthread_join(jobs[1].thread, NULL);
    check_ended(waiting, 0, 1);
    check_ended(read_whole(&jobs[0], entry), 0, 1);
    atomic_store(&broken, false);
    check_ended(read_whole(&jobs[0], entry), 1, 0);
    check_counts(0, 0, "what failed counts");
}

/* Half of the threads, and no more, read ahead. */
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
        check_ended(read_whole(&jobs[0], small[10 + i]), 1, 0);
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
        if (below(&job->seed, 10) > 0)
            read_piece(job, entry, offset, below(&job->seed, 3) > 0 ? left : 1 + (uint32_t)below(&job->seed, left));
    }
    return NULL;
}

static void all_at_once(struct job *jobs, uint32_t rounds) {
    const uint64_t first = atomic_load(&uniques);
    atomic_store(&shaky, true);
    for (uint32_t i = 0; i < THREADS; i++) {
        jobs[i].seed = 900 + i;
        jobs[i].rounds = rounds;
        start(&jobs[i], do_anything, 0);
    }
    for (uint32_t i = 0; i < THREADS; i++)
        pthread_join(jobs[i].thread, NULL);
    atomic_store(&shaky, false);
    uint64_t left = 0;
    for (uint64_t i = first; i < atomic_load(&uniques); i++) {
        check(atomic_load(&answered[i]) + atomic_load(&elsewhere[i]) == 1, "a READ did not end exactly once");
        left += atomic_load(&elsewhere[i]);
    }
    check(rounds < 100 || left > 0, "the disk never failed");
}

void drive_ahead(uint32_t rounds) {
    atomic_store(&far_away, true);
    uint8_t *marks = calloc((size_t)(world.index.entries + world.index.chunk_records), 1);
    content = fsx_content_new(&world.index, marks, FSX_VERIFY_ALWAYS, 0, THREADS);
    ahead = fsx_ahead_new(content, WORKERS);
    answered = calloc((size_t)rounds * THREADS + 10000, sizeof *answered);
    elsewhere = calloc((size_t)rounds * THREADS + 10000, sizeof *elsewhere);
    check(marks != NULL && content != NULL && ahead != NULL && answered != NULL && elsewhere != NULL, "no memory");
    for (uint32_t i = 0; i < world.file_count && small_count < sizeof small / sizeof *small; i++)
        if (world.index.size[world.files[i]] <= FSX_ANSWER_BYTES)
            small[small_count++] = world.files[i];
    check(small_count > 20, "too few files");
    struct job jobs[THREADS] = {0};
    for (uint32_t i = 0; i < THREADS; i++)
        check(fsx_hands_make(&jobs[i].hands), "no memory");
    look_up(&jobs[0], small[0]);
    check_ended(read_whole(&jobs[0], small[0]), 0, 1); /* there is no file yet */
    for (uint32_t p = 0; p < world.parts; p++)
        check(fsx_content_use(content, p, world.part[p], 1, false) == 0, "a file is not used");
    walks_and_jobs(&jobs[0]);
    const struct fsx_ahead_counts counts = fsx_ahead_count(ahead);
    check_counts(counts.files, counts.wanted, "");
    finds_it_ready(&jobs[0]);
    comes_too_late(&jobs[0]);
    is_replaced(&jobs[0]);
    waits(jobs, false);
    waits(jobs, true);
    fails(jobs);
    is_bounded(jobs);
    all_at_once(jobs, rounds);
    for (uint32_t i = 0; i < THREADS; i++)
        fsx_hands_free(&jobs[i].hands);
    fsx_ahead_free(ahead);
    fsx_content_free(content);
    free(marks);
    free(answered);
    free(elsewhere);
}
