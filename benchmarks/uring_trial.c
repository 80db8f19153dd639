/* A small file system that takes its requests in two ways: FUSE's usual one, and FUSE over io_uring.
 *
 * Usage: uring_trial serve WAY COUNT memory|disk BLOB FILES FILE_BYTES MOUNTPOINT
 *   threads     COUNT threads, each with a clone of /dev/fuse: read a request, writev its answer; as native/fuse/engine.c
 *   ring        a thread and a ring for each processor, bound to it, with COUNT entries; Linux 6.14, and enable_uring=Y
 *               of the fuse module when it starts. FORGET, which the kernel sends through no ring, comes by /dev/fuse
 *   ring-plain  the same without SINGLE_ISSUER and DEFER_TASKRUN
 *   Files have the names 00000000 and so on, in one directory that cannot be listed; file N is FILE_BYTES from byte N
 *   times FILE_BYTES, rounded up to whole pages, of BLOB. Both ways ask one function, `answer`. The bytes of a READ
 *   are copied from memory, or read from the disk past the page cache, into a buffer: that of the thread, from which
 *   writev takes them, or that of the ring's entry. So there is as much copying either way. A ring's thread does not
 *   wait for the disk: it puts the read into its ring.
 * Prints "ready", stays in the foreground, and ends when it is unmounted by somebody else with one line of JSON:
 * requests by kind and by the way they came, and what they cost the processors. If the kernel does not take a way: 1.
 *
 * Usage: uring_trial stat DIRECTORY COUNT
 *   stat of so many names that do not exist, one after the other: each is one LOOKUP. Prints a line of JSON.
 *
 * Used by uring_trial.py, which compiles it. Needs root. Raw system calls: liburing would be one more package for two
 * of them. Workers share nothing that is written but for `ended`; their counters are read when they have ended.
 */
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fuse.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* From protocol 7.42 on (Linux 6.14); Debian 12 has the header of 7.38. */
#define OVER_IO_URING (UINT64_C(1) << 41)
enum { COMMAND_REGISTER = 1, COMMAND_COMMIT_AND_FETCH = 2 };
struct ring_header {
    union {
        struct fuse_in_header in;
        struct fuse_out_header out;
        char room[128];
    } head;
    char arguments[128]; /* the first part of a request's arguments; all others, such as names, are in the payload */
    struct {
        uint64_t flags, commit_id;
        uint32_t payload_bytes, padding;
        uint64_t reserved;
    } about;
};
struct ring_command {
    uint64_t flags, commit_id;
    uint16_t queue;
    uint8_t padding[6];
};
static_assert(sizeof(struct ring_header) == 288, "struct fuse_uring_req_header");
static_assert(sizeof(struct ring_command) == 24, "struct fuse_uring_cmd_req");

enum {
    PAGE = 4096,
    PAGES_MAX = 256, /* of one READ, as the engine has it */
    ANSWER_BYTES = PAGES_MAX * PAGE,
    REQUEST_BYTES = 64 << 10,
    HUGE_BYTES = 2 << 20,
    ENTRIES_MAX = 64,
    SQE_BYTES = 128,
    BACKGROUND = 128, /* MAX_BACKGROUND of fanstore/fuse/native.py */
    FIRST_FILE = 2,   /* inode number of file 0 */
    VALID_S = 3600,
};
enum kind { LOOKUP, READ, FORGET, OTHER, KINDS };
static const char *const kind_names[KINDS] = {"lookup", "read", "forget", "other"};

/* Set before the workers start. */
static struct {
    const uint8_t *blob; /* NULL: on the disk */
    int disk;            /* O_DIRECT; -1: in memory */
    uint64_t files, file_bytes, stride;
    int device;
    uint32_t entries; /* of each ring */
    bool plain;       /* rings */
} store = {.disk = -1};
static atomic_bool ended;

struct worker {
    _Alignas(64) pthread_t thread;
    bool is_ring;
    uint16_t number;
    int device;
    uint8_t *buffer; /* huge pages: of a ring, one part for each entry */
    uint64_t counts[KINDS];
};

struct request {
    uint32_t opcode;
    uint64_t inode;
    const void *arguments;
    const char *name;
};

/* What is to be said: `bytes` that are in the buffer already, or, if `is_content`, come from `place` of the blob. */
struct said {
    int error;
    uint32_t bytes;
    bool is_content;
    uint64_t place;
};

static _Noreturn void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "uring_trial: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    exit(1);
}

static void *memory(size_t bytes) {
    const size_t whole = (bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    void *found = aligned_alloc(HUGE_BYTES, whole);
    if (found == NULL)
        fail("no memory");
    madvise(found, whole, MADV_HUGEPAGE);
    for (size_t i = 0; i < whole; i += PAGE) /* page faults now, not while somebody measures */
        ((volatile uint8_t *)found)[i] = 0;
    return found;
}

/* --- Answers ------------------------------------------------------------------------------------------------------ */

static struct fuse_attr attributes(uint64_t inode) {
    const bool is_file = inode != FUSE_ROOT_ID;
    return (struct fuse_attr){.ino = inode,
                              .size = is_file ? store.file_bytes : 0,
                              .blocks = is_file ? (store.file_bytes + 511) / 512 : 0,
                              .mode = is_file ? S_IFREG | 0444 : S_IFDIR | 0555,
                              .nlink = 1,
                              .blksize = PAGE};
}

/* The number of a file, or store.files if there is none of this name. */
static uint64_t file_named(const char *name) {
    uint64_t number = 0;
    size_t length = 0;
    for (; name[length] >= '0' && name[length] <= '9' && length < 8; length++)
        number = number * 10 + (uint64_t)(name[length] - '0');
    return length == 8 && name[8] == '\0' && number < store.files ? number : store.files;
}

/* Whatever is short goes into `data`. */
static struct said answer(struct worker *worker, const struct request *request, uint8_t *data) {
    switch (request->opcode) {
    case FUSE_LOOKUP: {
        worker->counts[LOOKUP]++;
        const uint64_t file = file_named(request->name);
        if (file == store.files)
            return (struct said){.error = ENOENT};
        const struct fuse_entry_out entry = {.nodeid = FIRST_FILE + file,
                                             .entry_valid = VALID_S,
                                             .attr_valid = VALID_S,
                                             .attr = attributes(FIRST_FILE + file)};
        memcpy(data, &entry, sizeof entry);
        return (struct said){.bytes = sizeof entry};
    }
    case FUSE_READ: {
        worker->counts[READ]++;
        struct fuse_read_in in;
        memcpy(&in, request->arguments, sizeof in);
        const uint64_t file = request->inode - FIRST_FILE;
        if (file >= store.files || in.size > ANSWER_BYTES || in.offset % PAGE != 0)
            return (struct said){.error = EIO};
        if (in.offset >= store.file_bytes)
            return (struct said){.bytes = 0};
        const uint64_t left = store.file_bytes - in.offset;
        return (struct said){.bytes = left < in.size ? (uint32_t)left : in.size,
                             .is_content = true,
                             .place = file * store.stride + in.offset};
    }
    case FUSE_GETATTR: {
        worker->counts[OTHER]++;
        const struct fuse_attr_out out = {.attr_valid = VALID_S, .attr = attributes(request->inode)};
        memcpy(data, &out, sizeof out);
        return (struct said){.bytes = sizeof out};
    }
    default:
        worker->counts[OTHER]++;
        return (struct said){.error = ENOSYS};
    }
}

/* O_DIRECT wants whole pages. Buffers have room, and the blob is padded to them. */
static uint32_t whole_pages(uint32_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

/* --- /dev/fuse ---------------------------------------------------------------------------------------------------- */

static void reply(int device, uint64_t unique, void *data, const struct said *said) {
    const size_t bytes = said->error == 0 ? said->bytes : 0;
    struct fuse_out_header head = {.len = (uint32_t)(sizeof head + bytes), .error = -said->error, .unique = unique};
    const struct iovec parts[2] = {{&head, sizeof head}, {data, bytes}};
    while (writev(device, parts, bytes > 0 ? 2 : 1) < 0 && errno == EINTR)
        ;
}

/* The length of a request; 0 when the mount has ended. */
static size_t next_request(int device, uint8_t *buffer) {
    for (;;) {
        const ssize_t got = read(device, buffer, REQUEST_BYTES);
        if (got >= (ssize_t)sizeof(struct fuse_in_header))
            return (size_t)got;
        if (got < 0 && (errno == EINTR || errno == ENOENT || errno == EAGAIN))
            continue;
        if (got < 0 && errno == ENODEV)
            return 0;
        fail("read of /dev/fuse: %s", strerror(errno));
    }
}

static void *thread_main(void *argument) {
    struct worker *worker = argument;
    _Alignas(8) uint8_t packet[REQUEST_BYTES];
    struct fuse_in_header head;
    while (next_request(worker->device, packet) > 0) {
        memcpy(&head, packet, sizeof head);
        if (head.opcode == FUSE_FORGET || head.opcode == FUSE_BATCH_FORGET) {
            worker->counts[FORGET]++;
            continue;
        }
        if (head.opcode == FUSE_INTERRUPT)
            continue;
        const char *arguments = (char *)packet + sizeof head;
        const struct request request = {head.opcode, head.nodeid, arguments, arguments};
        struct said said = answer(worker, &request, worker->buffer);
        if (said.is_content && store.disk < 0)
            memcpy(worker->buffer, store.blob + said.place, said.bytes);
        else if (said.is_content &&
                 pread(store.disk, worker->buffer, whole_pages(said.bytes), (off_t)said.place) < (ssize_t)said.bytes)
            said.error = EIO;
        reply(worker->device, head.unique, worker->buffer, &said);
    }
    atomic_store(&ended, true);
    return NULL;
}

static int clone_device(void) {
    const int clone = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    uint32_t source = (uint32_t)store.device;
    if (clone < 0 || ioctl(clone, FUSE_DEV_IOC_CLONE, &source) != 0)
        fail("no clone of /dev/fuse: %s", strerror(errno));
    return clone;
}

/* --- io_uring ----------------------------------------------------------------------------------------------------- */

/* In user_data, beside the number of an entry: this is no request, but the end of a read. */
#define FROM_DISK (UINT64_C(1) << 32)

struct ring {
    int fd;
    _Atomic uint32_t *sq_tail, *cq_head, *cq_tail;
    uint32_t sq_mask, cq_mask, unsent;
    uint8_t *sqes; /* SQE_BYTES each */
    struct io_uring_cqe *cqes;
};

static void open_ring(struct ring *ring, uint32_t entries) {
    /* Only this thread enters the ring, and it wants its completions when it asks for them. libfuse does not say so; it
     * makes little difference. */
    struct io_uring_params parameters = {.flags = IORING_SETUP_SQE128 | IORING_SETUP_SUBMIT_ALL};
    if (!store.plain)
        parameters.flags |= IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    ring->fd = (int)syscall(SYS_io_uring_setup, entries, &parameters);
    if (ring->fd < 0)
        fail("io_uring_setup: %s", strerror(errno));
    if ((parameters.features & IORING_FEAT_SINGLE_MMAP) == 0)
        fail("the kernel is too old");
    const size_t sq_bytes = parameters.sq_off.array + parameters.sq_entries * sizeof(uint32_t);
    const size_t cq_bytes = parameters.cq_off.cqes + parameters.cq_entries * sizeof(struct io_uring_cqe);
    const int shared = MAP_SHARED | MAP_POPULATE;
    uint8_t *rings = mmap(NULL, sq_bytes > cq_bytes ? sq_bytes : cq_bytes, PROT_READ | PROT_WRITE, shared, ring->fd,
                          IORING_OFF_SQ_RING);
    ring->sqes = mmap(NULL, (size_t)parameters.sq_entries * SQE_BYTES, PROT_READ | PROT_WRITE, shared, ring->fd,
                      IORING_OFF_SQES);
    if (rings == MAP_FAILED || ring->sqes == MAP_FAILED)
        fail("mmap of a ring: %s", strerror(errno));
    ring->sq_tail = (_Atomic uint32_t *)(rings + parameters.sq_off.tail);
    ring->cq_head = (_Atomic uint32_t *)(rings + parameters.cq_off.head);
    ring->cq_tail = (_Atomic uint32_t *)(rings + parameters.cq_off.tail);
    ring->sq_mask = parameters.sq_entries - 1;
    ring->cq_mask = parameters.cq_entries - 1;
    ring->cqes = (struct io_uring_cqe *)(rings + parameters.cq_off.cqes);
    uint32_t *array = (uint32_t *)(rings + parameters.sq_off.array);
    for (uint32_t i = 0; i < parameters.sq_entries; i++)
        array[i] = i;
    ring->unsent = 0;
}

/* To be sent with the next wait_completion. There is always room: an entry has one command under way, and the kernel
 * has taken all commands before it returns from io_uring_enter. */
static struct io_uring_sqe *push(struct ring *ring, uint8_t opcode, int fd, uint64_t user_data) {
    const uint32_t tail = atomic_load_explicit(ring->sq_tail, memory_order_relaxed);
    struct io_uring_sqe *sqe = (struct io_uring_sqe *)(ring->sqes + (size_t)(tail & ring->sq_mask) * SQE_BYTES);
    memset(sqe, 0, SQE_BYTES);
    sqe->opcode = opcode;
    sqe->fd = fd;
    sqe->user_data = user_data;
    atomic_store_explicit(ring->sq_tail, tail + 1, memory_order_release); /* looked at in io_uring_enter, not before */
    ring->unsent++;
    return sqe;
}

static void wait_completion(struct ring *ring) {
    const long sent = syscall(SYS_io_uring_enter, ring->fd, ring->unsent, 1, IORING_ENTER_GETEVENTS, NULL, 0);
    if (sent >= 0)
        ring->unsent -= (uint32_t)sent;
    else if (errno != EINTR)
        fail("io_uring_enter: %s", strerror(errno));
}

struct entry {
    struct ring_header *header;
    uint8_t *payload;
    struct iovec parts[2];
    struct said said; /* kept while the disk reads */
    uint64_t unique, commit_id;
};

static void push_command(struct worker *worker, struct ring *ring, uint32_t command, struct entry *entry,
                         uint64_t number) {
    struct io_uring_sqe *sqe = push(ring, IORING_OP_URING_CMD, store.device, number);
    const bool registers = command == COMMAND_REGISTER;
    sqe->cmd_op = command;
    sqe->addr = registers ? (uint64_t)(uintptr_t)entry->parts : 0;
    sqe->len = registers ? 2 : 0;
    const struct ring_command about = {.commit_id = registers ? 0 : entry->commit_id, .queue = worker->number};
    memcpy((uint8_t *)sqe + offsetof(struct io_uring_sqe, cmd), &about, sizeof about);
}

static void commit(struct worker *worker, struct ring *ring, struct entry *entry, uint64_t number) {
    const uint32_t bytes = entry->said.error == 0 ? entry->said.bytes : 0;
    entry->header->head.out = (struct fuse_out_header){.len = (uint32_t)sizeof(struct fuse_out_header) + bytes,
                                                       .error = -entry->said.error,
                                                       .unique = entry->unique};
    entry->header->about.payload_bytes = bytes;
    push_command(worker, ring, COMMAND_COMMIT_AND_FETCH, entry, number);
}

/* A request has come. */
static void begin(struct worker *worker, struct ring *ring, struct entry *entry, uint64_t number) {
    const struct ring_header *header = entry->header;
    const struct fuse_in_header head = header->head.in;
    const struct request request = {head.opcode, head.nodeid, header->arguments, (char *)entry->payload};
    entry->unique = head.unique;
    entry->commit_id = header->about.commit_id;
    entry->said = answer(worker, &request, entry->payload);
    if (entry->said.is_content && store.disk >= 0) {
        struct io_uring_sqe *sqe = push(ring, IORING_OP_READ, store.disk, number | FROM_DISK);
        sqe->addr = (uint64_t)(uintptr_t)entry->payload;
        sqe->len = whole_pages(entry->said.bytes);
        sqe->off = entry->said.place;
        return;
    }
    if (entry->said.is_content)
        memcpy(entry->payload, store.blob + entry->said.place, entry->said.bytes);
    commit(worker, ring, entry, number);
}

static void *ring_main(void *argument) {
    struct worker *worker = argument;
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(worker->number, &only);
    const int bound = pthread_setaffinity_np(pthread_self(), sizeof only, &only);
    if (bound != 0)
        fail("processor %u: %s", worker->number, strerror(bound));
    struct ring ring;
    open_ring(&ring, store.entries);
    struct entry entries[ENTRIES_MAX];
    for (uint32_t i = 0; i < store.entries; i++) {
        uint8_t *part = worker->buffer + (size_t)i * (ANSWER_BYTES + PAGE);
        entries[i].payload = part;
        entries[i].header = (struct ring_header *)(part + ANSWER_BYTES);
        entries[i].parts[0] = (struct iovec){entries[i].header, sizeof(struct ring_header)};
        entries[i].parts[1] = (struct iovec){entries[i].payload, ANSWER_BYTES};
        push_command(worker, &ring, COMMAND_REGISTER, &entries[i], i);
    }
    while (!atomic_load_explicit(&ended, memory_order_relaxed)) {
        wait_completion(&ring);
        uint32_t head = atomic_load_explicit(ring.cq_head, memory_order_relaxed);
        const uint32_t tail = atomic_load_explicit(ring.cq_tail, memory_order_acquire);
        for (; head != tail; head++) {
            const struct io_uring_cqe completion = ring.cqes[head & ring.cq_mask];
            const uint64_t place = completion.user_data & ~FROM_DISK;
            if ((completion.user_data & FROM_DISK) != 0) {
                if (completion.res < (int32_t)entries[place].said.bytes)
                    entries[place].said.error = EIO;
                commit(worker, &ring, &entries[place], place);
                continue;
            }
            if (completion.res == -ENOTCONN || completion.res == -ECONNABORTED)
                return NULL; /* unmounted */
            if (completion.res != 0)
                fail("a request of queue %u: %s", worker->number, strerror(-completion.res));
            begin(worker, &ring, &entries[place], place);
        }
        atomic_store_explicit(ring.cq_head, head, memory_order_release);
    }
    return NULL;
}

/* --- Life --------------------------------------------------------------------------------------------------------- */

static void greet(bool wants_ring) {
    _Alignas(8) uint8_t packet[REQUEST_BYTES];
    struct fuse_in_header head;
    struct fuse_init_in in = {0};
    const size_t bytes = next_request(store.device, packet);
    memcpy(&head, packet, sizeof head);
    if (bytes < sizeof head + 16 || head.opcode != FUSE_INIT)
        fail("the kernel does not begin with INIT");
    memcpy(&in, packet + sizeof head, bytes - sizeof head < sizeof in ? bytes - sizeof head : sizeof in);
    const uint64_t offered = in.flags | ((in.flags & FUSE_INIT_EXT) != 0 ? (uint64_t)in.flags2 << 32 : 0);
    uint64_t wanted = FUSE_ASYNC_READ | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES | FUSE_NO_OPEN_SUPPORT | FUSE_INIT_EXT;
    wanted |= wants_ring ? OVER_IO_URING : 0;
    if ((offered & wanted) != wanted)
        fail("the kernel offers %#" PRIx64 ", wanted is %#" PRIx64 "%s", offered, wanted,
             wants_ring && (offered & OVER_IO_URING) == 0 ? ": FUSE over io_uring is off (enable_uring)" : "");
    struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION,
                                .minor = FUSE_KERNEL_MINOR_VERSION,
                                .max_readahead = in.max_readahead,
                                .flags = (uint32_t)wanted,
                                .flags2 = (uint32_t)(wanted >> 32),
                                .max_background = BACKGROUND,
                                .congestion_threshold = BACKGROUND / 4 * 3,
                                .max_write = PAGE,
                                .time_gran = 1,
                                .max_pages = PAGES_MAX};
    reply(store.device, head.unique, &out, &(struct said){.bytes = sizeof out});
}

static double seconds_of(struct timeval time) { return (double)time.tv_sec + (double)time.tv_usec / 1e6; }

static void print_counts(const struct worker *workers, uint32_t count, const struct rusage *before) {
    uint64_t sums[2][KINDS] = {{0}};
    for (uint32_t i = 0; i < count; i++)
        for (int kind = 0; kind < KINDS; kind++)
            sums[workers[i].is_ring][kind] += workers[i].counts[kind];
    struct rusage now;
    getrusage(RUSAGE_SELF, &now);
    for (int way = 0; way < 2; way++) {
        printf("%s\": {", way == 0 ? "{\"device" : ", \"ring");
        for (int kind = 0; kind < KINDS; kind++)
            printf("%s\"%s\": %" PRIu64, kind > 0 ? ", " : "", kind_names[kind], sums[way][kind]);
        printf("}");
    }
    printf(", \"user_s\": %.4f, \"system_s\": %.4f, \"voluntary_switches\": %ld, \"involuntary_switches\": %ld}\n",
           seconds_of(now.ru_utime) - seconds_of(before->ru_utime),
           seconds_of(now.ru_stime) - seconds_of(before->ru_stime), now.ru_nvcsw - before->ru_nvcsw,
           now.ru_nivcsw - before->ru_nivcsw);
    fflush(stdout);
}

static void start(struct worker *worker, void *(*body)(void *)) {
    const int error = pthread_create(&worker->thread, NULL, body, worker);
    if (error != 0)
        fail("no thread: %s", strerror(error));
}

static void load(const char *path, bool in_memory) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC | (in_memory ? 0 : O_DIRECT));
    const size_t bytes = (size_t)(store.files * store.stride);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0 || (uint64_t)status.st_size < bytes)
        fail("%s is not there, or too short", path);
    if (!in_memory) {
        store.disk = fd;
        return;
    }
    uint8_t *blob = memory(bytes);
    for (size_t done = 0; done < bytes;) {
        const ssize_t got = read(fd, blob + done, bytes - done);
        if (got <= 0)
            fail("read of %s: %s", path, strerror(errno));
        done += (size_t)got;
    }
    close(fd);
    store.blob = blob;
}

static void serve(bool is_ring, uint32_t count, const char *mountpoint) {
    store.device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    char options[128];
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", store.device);
    if (store.device < 0 || mount("uring_trial", mountpoint, "fuse", MS_RDONLY | MS_NOSUID | MS_NODEV, options) != 0)
        fail("mount at %s: %s", mountpoint, strerror(errno));
    greet(is_ring);
    const uint32_t rings = is_ring ? (uint32_t)get_nprocs_conf() : 0;
    const uint32_t workers_count = rings + (is_ring ? 1 : count);
    struct worker *workers = memory(workers_count * sizeof *workers);
    store.entries = count;
    struct rusage before;
    for (uint32_t i = 0; i < workers_count; i++) {
        workers[i].is_ring = i < rings;
        workers[i].number = (uint16_t)i;
        workers[i].buffer = memory(i < rings ? (size_t)count * (ANSWER_BYTES + PAGE) : ANSWER_BYTES);
        workers[i].device = i == rings ? store.device : i > rings ? clone_device() : -1;
    }
    getrusage(RUSAGE_SELF, &before);
    for (uint32_t i = 0; i < workers_count; i++)
        start(&workers[i], i < rings ? ring_main : thread_main);
    printf("ready\n");
    fflush(stdout);
    for (uint32_t i = 0; i < workers_count; i++)
        pthread_join(workers[i].thread, NULL);
    print_counts(workers, workers_count, &before);
}

/* --- Round trips -------------------------------------------------------------------------------------------------- */

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int compare_u64(const void *left, const void *right) {
    const uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

static void time_stats(const char *directory, size_t count) {
    const int root = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
    uint64_t *times_ns = calloc(count + 1, sizeof *times_ns);
    if (root < 0 || times_ns == NULL || count == 0)
        fail("%s: %s", directory, strerror(errno));
    const uint64_t begin_ns = now_ns();
    for (size_t i = 0; i < count; i++) {
        char name[32];
        struct stat status;
        snprintf(name, sizeof name, "missing-%zu", i);
        const uint64_t one_ns = now_ns();
        if (fstatat(root, name, &status, 0) == 0 || errno != ENOENT)
            fail("%s: not ENOENT", name);
        times_ns[i] = now_ns() - one_ns;
    }
    const uint64_t all_ns = now_ns() - begin_ns;
    qsort(times_ns, count, sizeof *times_ns, compare_u64);
    printf("{\"stats\": %zu, \"seconds\": %.6f, \"latency_us\": {\"p50\": %.2f, \"p90\": %.2f, \"p99\": %.2f}}\n",
           count, (double)all_ns / 1e9, (double)times_ns[count / 2] / 1e3, (double)times_ns[count * 9 / 10] / 1e3,
           (double)times_ns[count * 99 / 100] / 1e3);
}

static uint64_t number(const char *text, uint64_t most) {
    char *end;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0' || value < 1 || value > most)
        fail("%s is not a number from 1 to %" PRIu64, text, most);
    return value;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "stat") == 0) {
        time_stats(argv[2], (size_t)number(argv[3], 100000000));
        return 0;
    }
    const bool is_ring = argc > 2 && strncmp(argv[2], "ring", 4) == 0;
    if (argc != 9 || strcmp(argv[1], "serve") != 0 || (!is_ring && strcmp(argv[2], "threads") != 0)) {
        fprintf(stderr, "usage: uring_trial serve threads|ring|ring-plain COUNT memory|disk BLOB FILES FILE_BYTES "
                        "MOUNTPOINT\n"
                        "       uring_trial stat DIRECTORY COUNT\n");
        return 2;
    }
    const uint32_t count = (uint32_t)number(argv[3], ENTRIES_MAX);
    store.plain = strcmp(argv[2], "ring-plain") == 0;
    store.files = number(argv[6], 10000000);
    store.file_bytes = number(argv[7], 1u << 30);
    store.stride = (store.file_bytes + PAGE - 1) / PAGE * PAGE;
    load(argv[5], strcmp(argv[4], "memory") == 0);
    serve(is_ring, count, argv[8]);
    return 0;
}
