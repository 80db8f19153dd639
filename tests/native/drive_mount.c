/* drive_mount.c: an engine with several workers behind a real mount, and processes that read it and are killed. */
#include "drive_rig.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define WORKERS 5u
#define READERS 6u
#define WAITERS 300u
#define BUFFER (1u << 20)
/* A reader ends with this code when the mount has ended under it. */
#define MOUNT_ENDED 7

extern char **environ;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- reader --------------------------------------------------------------------------------------------------- */

/* Ends the process if the call failed because there is no daemon any more. */
static void check_mount(bool right, const char *text) {
    if (right)
        return;
    if (errno == ENOTCONN || errno == ECONNABORTED || errno == EIO || errno == ENODEV)
        _exit(MOUNT_ENDED);
    die(text, errno);
}

static void read_one(uint64_t *seed, uint8_t *buffer, const char *point) {
    const struct piece piece = some_piece(seed, BUFFER);
    char *path = path_of(point, piece.entry);
    const bool direct = below(seed, 8) > 0; /* so that the kernel asks each time */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
    check_mount(fd >= 0, "open");
    if (below(seed, 4) == 0)
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    struct stat facts;
    check_mount(fstat(fd, &facts) == 0, "fstat");
    check((uint64_t)facts.st_size == world.index.size[piece.entry], "a wrong size");
    for (uint32_t done = 0; done < piece.length;) {
        const ssize_t got = pread(fd, buffer, piece.length - done, (off_t)(piece.offset + done));
        check_mount(got > 0 || (got == 0 && (errno = EINVAL)), "pread");
        check(got > 0 && memcmp(buffer, world.truth[piece.entry] + piece.offset + done, (size_t)got) == 0, "wrong bytes");
        done += (uint32_t)got;
    }
    close(fd);
    free(path);
}

static void list_one(uint64_t *seed, const char *point) {
    const uint32_t entry = world.index.parent[world.files[below(seed, world.file_count)]];
    char *path = path_of(point, entry);
    DIR *directory = opendir(path);
    check_mount(directory != NULL, "opendir");
    uint32_t names = 0;
    errno = 0;
    while (readdir(directory) != NULL)
        names++;
    check_mount(errno == 0, "readdir");
    check(names == world.index.count[entry] + 2, "a wrong number of names");
    closedir(directory);
    struct stat facts;
    char *missing;
    check(asprintf(&missing, "%s/no-%" PRIu64, path, below(seed, 1000)) > 0, "no memory");
    check_mount(stat(missing, &facts) == -1 && (errno == ENOENT || (errno == ENOTCONN)), "stat of nothing");
    free(missing);
    free(path);
}

int drive_reader(double seconds, uint64_t seed, const char *point) {
    uint8_t *buffer = aligned_alloc(4096, BUFFER);
    check(buffer != NULL, "no memory");
    seed = seed * 2 + 1;
    for (const double end = now_s() + seconds; now_s() < end;) {
        for (int i = 0; i < 8; i++)
            read_one(&seed, buffer, point);
        list_one(&seed, point);
        listxattr(point, NULL, 0); /* pyfuse3's */
    }
    for (int i = 0; seconds < 0 && i < 20; i++) /* some reads, whatever the time */
        read_one(&seed, buffer, point);
    free(buffer);
    return 0;
}

/* ---- parent --------------------------------------------------------------------------------------------------- */

static pid_t start_reader(double seconds, uint32_t seed, const char *point) {
    char time[64], folder[4096];
    snprintf(time, sizeof time, "%.2f:%" PRIu32, seconds, seed);
    snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(point, '/') - point), point);
    char *arguments[] = {(char *)(uintptr_t)world.program, "reader", time, (char *)(uintptr_t)world.index_path,
                         (char *)(uintptr_t)world.source, folder, NULL};
    posix_spawn_file_actions_t actions; /* its word at the end is not ours */
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    pid_t reader;
    check(posix_spawn(&reader, world.program, &actions, NULL, arguments, environ) == 0, "no reader");
    posix_spawn_file_actions_destroy(&actions);
    return reader;
}

static int mount_device(const char *point) {
    char options[200];
    const int device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    check_call(device >= 0, "/dev/fuse");
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=%u,group_id=%u,default_permissions", device,
             geteuid(), getegid());
    check_call(mount("engine_drive", point, "fuse.engine_drive", MS_RDONLY | MS_NOSUID | MS_NODEV, options) == 0,
               "mount");
    return device;
}

/* Wait for a reader; its exit code. */
static int wait_for(pid_t reader) {
    int status;
    check_call(waitpid(reader, &status, 0) == reader, "waitpid");
    check(WIFEXITED(status) || WTERMSIG(status) == SIGKILL, "a reader was killed by something else");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Readers come and go by SIGKILL for a while; the last ones end by themselves. */
static void read_and_kill(double seconds, const char *point, pid_t *readers) {
    uint64_t seed = 31;
    uint32_t started = 0;
    const double end = now_s() + seconds;
    for (uint32_t i = 0; i < READERS; i++)
        readers[i] = start_reader(seconds, ++started, point);
    while (now_s() < end - 0.2) {
        poll(NULL, 0, 20 + (int)below(&seed, 60));
        const uint32_t victim = (uint32_t)below(&seed, READERS - 1); /* one is left alone */
        kill(readers[victim], SIGKILL);
        const int code = wait_for(readers[victim]);
        check(code == -1 || code == 0, "a reader found something wrong");
        readers[victim] = start_reader(end - now_s() > 0.1 ? end - now_s() : 0.1, ++started, point);
    }
}

static void *ask_pyfuse3(void *point) {
    check(listxattr(point, NULL, 0) == -1 && (errno == EACCES || errno == EIO), "not the answer of pyfuse3");
    return NULL;
}

/* pyfuse3 reads nothing for a while: more messages than its socket holds wait for it, and files are served meanwhile. */
static void do_not_listen(struct rig *rig, const char *point) {
    pthread_t threads[WAITERS];
    atomic_store(&rig->deaf, true);
    for (uint32_t i = 0; i < WAITERS; i++)
        check(pthread_create(&threads[i], NULL, ask_pyfuse3, (char *)(uintptr_t)point) == 0, "no thread");
    struct fsx_engine_counts counts;
    do {
        poll(NULL, 0, 1);
        fsx_engine_count(rig->engine, &counts);
    } while (counts.forwarded < WAITERS);
    check(wait_for(start_reader(-1, 99, point)) == 0, "nothing is served");
    atomic_store(&rig->deaf, false);
    for (uint32_t i = 0; i < WAITERS; i++)
        pthread_join(threads[i], NULL);
}

/* However slow all is: until files were read ahead of somebody who wanted them. */
static void read_until_ahead(struct rig *rig, const char *point) {
    waits_for = "a file that is read ahead";
    struct fsx_cache_counts counts;
    struct fsx_read_counts reads;
    uint32_t seed = 5000;
    do {
        check(wait_for(start_reader(-1, seed++, point)) == 0, "a reader found something wrong");
        fsx_broker_count(rig->broker, &counts, &reads);
    } while (counts.prefetched_taken == 0);
}

static void *read_for_ever(void *argument) {
    const struct rig *rig = argument;
    uint8_t packet[4096];
    check(recv(rig->kernel, packet, sizeof packet, 0) <= 0, "an answer from a partition that hangs");
    return NULL;
}

/* A partition on a file system that does not answer (the mount, of which nobody takes upcalls): the engine cannot end,
 * but its mount does. Leaves threads behind. */
void drive_hang(const char *point) {
    struct rig below_it, rig;
    rig_start(&below_it, mount_device(point), 2, NO_FILES, FSX_VERIFY_FIRST, 0, 0);
    char *path = path_of(point, world.files[0]);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    check_call(fd >= 0, path);
    atomic_store(&below_it.idle, true);
    rig_start(&rig, -1, 1, NO_FILES, FSX_VERIFY_NEVER, 0, 0);
    for (uint32_t p = 0; p < world.parts; p++)
        check(fsx_files_use(fsx_broker_files(rig.broker), p, fd, 1, true) == 0, "a file is not used");
    const struct {
        struct fuse_in_header head;
        struct fuse_read_in in;
    } request = {.head = {.len = sizeof request, .opcode = FUSE_READ, .unique = 2, .nodeid = world.files[0] + 1},
                 .in = {.size = 100}};
    check_call(send(rig.kernel, &request, sizeof request, 0) == sizeof request, "it takes no message");
    struct fsx_cache_counts counts;
    struct fsx_read_counts reads;
    do {
        poll(NULL, 0, 1);
        fsx_broker_count(below_it.broker, &counts, &reads);
    } while (counts.upcalls == 0);
    pthread_t client;
    check(pthread_create(&client, NULL, read_for_ever, &rig) == 0, "no thread");
    atomic_store(&rig.ending, true);
    pthread_join(rig.answering, NULL);
    check(!fsx_engine_stop(rig.engine, 200), "a thread that hangs has ended");
    pthread_join(client, NULL);
    pthread_join(rig.pyfuse3, NULL);
    rig_stop(&below_it);
    close(fd);
    free(path);
    check_call(umount2(point, MNT_DETACH) == 0, "umount"); /* what is left behind has files open there */
}

void drive_mount(double seconds, const char *point) {
    pid_t readers[READERS];
    struct rig rig;
    for (int stopped = 0; stopped < 2; stopped++) {
        atomic_store(&far_away, stopped == 0); /* what lies in memory, or in the page cache, is not read ahead */
        rig_start(&rig, mount_device(point), WORKERS, MIXED_FILES, stopped ? FSX_VERIFY_ALWAYS : FSX_VERIFY_FIRST,
                  9 << 20, 700);
        read_and_kill(seconds, point, readers);
        if (!stopped)
            do_not_listen(&rig, point);
        if (stopped) { /* the engine ends first, under fresh load */
            for (uint32_t i = 0; i < READERS; i++)
                check(wait_for(readers[i]) == 0, "a reader found something wrong");
            for (uint32_t i = 0; i < READERS; i++)
                readers[i] = start_reader(60, 1000 + i, point);
            poll(NULL, 0, 300);
            rig_stop(&rig);
            for (uint32_t i = 0; i < READERS; i++)
                check(wait_for(readers[i]) == MOUNT_ENDED, "a reader is not told of the end");
            check_call(umount2(point, 0) == 0, "umount");
        } else { /* the mount ends first */
            for (uint32_t i = 0; i < READERS; i++)
                check(wait_for(readers[i]) == 0, "a reader found something wrong");
            read_until_ahead(&rig, point);
            check_call(umount2(point, 0) == 0, "umount");
            int error = 0;
            while (!fsx_engine_ended(rig.engine, &error))
                poll(NULL, 0, 1);
            check(error == 0, "an unmount is taken for a failure");
            struct fsx_engine_counts counts;
            fsx_engine_count(rig.engine, &counts);
            check(counts.operations[FSX_OP_READ].count > 0 && atomic_load(&rig.upcalls) > 0 && counts.forwarded > 0 &&
                      counts.malformed == 0,
                  "somebody had nothing to do");
            rig_stop(&rig);
        }
    }
}
