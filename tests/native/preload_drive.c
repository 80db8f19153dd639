/* preload_drive.c: what programs do with files, as text: run through the mount alone and with libfanstore-io.so, it must say
 * the same. And races, which check what they read by themselves. Used by test_preload.py, also built with sanitizers.
 *
 *   preload_drive say ROOT FILE          FILE is relative to ROOT, at least 200,000 bytes
 *   preload_drive race ROOT SOURCE SECONDS FILE...
 *   preload_drive limit ROOT FILE...     opens as many as it may (ulimit -n 64), and reads all of them
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

extern char **environ;
static char buffer[1 << 20];
/* Of ROOT: device numbers differ between runs, and are right if they are this one. */
static dev_t device;

static uint64_t hash(const void *data, size_t bytes) {
    uint64_t value = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++)
        value = (value ^ ((const uint8_t *)data)[i]) * 1099511628211u;
    return value;
}

/* A result, and errno if it is an error. */
static void say(const char *what, long result) {
    if (result < 0)
        printf("%s: %ld %s\n", what, result, strerrorname_np(errno));
    else
        printf("%s: %ld\n", what, result);
    errno = 0;
}

static void say_bytes(const char *what, ssize_t got) {
    if (got < 0)
        say(what, got);
    else
        printf("%s: %zd bytes %016" PRIx64 "\n", what, got, hash(buffer, (size_t)got));
    errno = 0;
}

static void say_stat(const char *what, int result, const struct stat *about) {
    if (result != 0) {
        say(what, result);
        return;
    }
    printf("%s: %d %lu %o %lu %u %u %lu %ld %ld %ld %ld.%ld %ld.%ld %ld.%ld\n", what, about->st_dev == device, about->st_ino,
           about->st_mode, about->st_nlink, about->st_uid, about->st_gid, about->st_rdev, about->st_size,
           about->st_blksize, about->st_blocks, about->st_atim.tv_sec, about->st_atim.tv_nsec, about->st_mtim.tv_sec,
           about->st_mtim.tv_nsec, about->st_ctim.tv_sec, about->st_ctim.tv_nsec);
}

static void say_statx(const char *what, int directory, const char *path, int flags) {
    struct statx a;
    memset(&a, 0, sizeof a);
    if (statx(directory, path, flags, STATX_BASIC_STATS | STATX_BTIME, &a) != 0) {
        say(what, -1);
        return;
    }
    printf("%s: %x %llx %llx %u %u %u %u %o %llu %llu %llu %lld.%u %lld.%u %d %u:%u\n", what, a.stx_mask & STATX_BASIC_STATS,
           a.stx_attributes, a.stx_attributes_mask, a.stx_blksize, a.stx_nlink, a.stx_uid, a.stx_gid, a.stx_mode, a.stx_ino,
           a.stx_size, a.stx_blocks, a.stx_mtime.tv_sec, a.stx_mtime.tv_nsec, a.stx_atime.tv_sec, a.stx_atime.tv_nsec,
           makedev(a.stx_dev_major, a.stx_dev_minor) == device, a.stx_rdev_major, a.stx_rdev_minor);
}

static int must_open(const char *path, int flags) {
    const int fd = open(path, flags);
    if (fd < 0) {
        perror(path);
        exit(1);
    }
    return fd;
}

/* ---- saying ------------------------------------------------------------------------------------------------------------ */

static void say_opens(const char *path) {
    static const struct {
        const char *name;
        int flags;
    } ways[] = {{"rdonly", O_RDONLY}, {"cloexec", O_RDONLY | O_CLOEXEC}, {"nofollow", O_RDONLY | O_NOFOLLOW},
                {"nonblock", O_RDONLY | O_NONBLOCK}, {"noatime", O_RDONLY | O_NOATIME}, {"wronly", O_WRONLY},
                {"rdwr", O_RDWR}, {"directory", O_RDONLY | O_DIRECTORY}, {"trunc", O_RDONLY | O_TRUNC},
                {"creat", O_RDONLY | O_CREAT}, {"excl", O_RDONLY | O_CREAT | O_EXCL}, {"path", O_PATH}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        const int fd = open(path, ways[i].flags, 0644);
        printf("open %s ", ways[i].name);
        say("is", fd);
        if (fd < 0)
            continue;
        say(" flags", fcntl(fd, F_GETFL));
        say(" descriptor flags", fcntl(fd, F_GETFD));
        say_bytes(" read", read(fd, buffer, 100));
        say(" close", close(fd));
        say(" close again", close(fd));
    }
}

static void say_names(const char *root, const char *file) {
    char path[4096], directory[4096];
    struct stat about;
    static const char *const ends[] = {"", "/", "/x", "x", "/.", "/.."};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        snprintf(path, sizeof path, "%s/%s%s", root, file, ends[i]);
        printf("name with '%s' ", ends[i]);
        say_stat("stat", stat(path, &about), &about);
        const int fd = open(path, O_RDONLY);
        say("open", fd);
        if (fd >= 0)
            close(fd);
        say("access r", access(path, R_OK));
        say("access w", access(path, W_OK));
        say("access x", access(path, X_OK));
        say("access f", faccessat(AT_FDCWD, path, F_OK, AT_EACCESS));
    }
    snprintf(path, sizeof path, "%s//./%s", root, file);
    say_stat("lstat odd", lstat(path, &about), &about);
    snprintf(path, sizeof path, "%s/%s", root, file);
    say_statx("statx", AT_FDCWD, path, 0);
    say_statx("statx of root", AT_FDCWD, root, AT_SYMLINK_NOFOLLOW);
    snprintf(directory, sizeof directory, "%s/%s", root, file);
    *strrchr(directory, '/') = '\0';
    const char *last = strrchr(path, '/') + 1;
    const int at = must_open(directory, O_RDONLY | O_DIRECTORY);
    say_stat("fstatat", fstatat(at, last, &about, 0), &about);
    say_stat("fstatat of itself", fstatat(at, ".", &about, 0), &about);
    int fd = openat(at, last, O_RDONLY);
    say("openat", fd);
    say_bytes("read", read(fd, buffer, 1000));
    say("openat below a file", openat(fd, "x", O_RDONLY));
    close(fd);
    close(at);
    say("chdir", chdir(directory));
    say_stat("stat here", stat(last, &about), &about);
    fd = open(last, O_RDONLY);
    say_bytes("read here", read(fd, buffer, 1000));
    close(fd);
    say("chdir away", chdir("/"));
    say("not here", open(last, O_RDONLY));
    say("chdir above", chdir(root));
    say_stat("stat from above", stat(file, &about), &about);
    snprintf(path, sizeof path, "../%s/%s", strrchr(root, '/') + 1, file);
    say_stat("stat with dots", stat(path, &about), &about);
    chdir("/");
    say_stat("stat from the root", stat(root + 1, &about), &about);
}

/* The generation of stat that old programs call; not to be linked with any more. */
static void say_old_stats(const char *path) {
    static const char *const names[] = {"__xstat", "__xstat64", "__lxstat", "__lxstat64"};
    struct stat about;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int (*call)(int, const char *, struct stat *);
        *(void **)&call = dlsym(RTLD_DEFAULT, names[i]);
        if (call != NULL)
            say_stat(names[i], call(1, path, &about), &about);
    }
    int (*call)(int, int, struct stat *);
    *(void **)&call = dlsym(RTLD_DEFAULT, "__fxstat64");
    const int fd = must_open(path, O_RDONLY);
    if (call != NULL)
        say_stat("__fxstat64", call(1, fd, &about), &about);
    close(fd);
}

static void say_reads(const char *path) {
    struct stat about;
    const int fd = must_open(path, O_RDONLY);
    say_stat("fstat", fstat(fd, &about), &about);
    say_stat("fstatat empty", fstatat(fd, "", &about, AT_EMPTY_PATH), &about);
    say_statx("statx empty", fd, "", AT_EMPTY_PATH);
    say_bytes("read 0", read(fd, buffer, 0));
    say_bytes("read 10", read(fd, buffer, 10));
    say("where", lseek(fd, 0, SEEK_CUR));
    say("seek end", lseek(fd, -5, SEEK_END));
    say_bytes("read over the end", read(fd, buffer, 100));
    say_bytes("read at the end", read(fd, buffer, 100));
    say("seek beyond", lseek(fd, 1 << 30, SEEK_SET));
    say_bytes("read beyond", read(fd, buffer, 100));
    say("seek before", lseek(fd, -1, SEEK_SET));
    say("seek overflow", lseek(fd, INT64_MAX, SEEK_CUR));
    say("seek nonsense", lseek(fd, 0, 77));
    say("where", lseek(fd, 0, SEEK_CUR));
    say_bytes("pread", pread(fd, buffer, 70000, 4095));
    say_bytes("pread before", pread(fd, buffer, 10, -1));
    struct iovec parts[] = {{buffer, 7}, {buffer + 7, 0}, {buffer + 7, 5000}, {buffer + 5007, 60000}};
    say("seek", lseek(fd, 100, SEEK_SET));
    say_bytes("readv", readv(fd, parts, 4));
    say_bytes("preadv", preadv(fd, parts, 4, about.st_size - 6000));
    say("readv of none", readv(fd, parts, strcmp(path, "") == 0 ? 1 : -1));
    say("where", lseek(fd, 0, SEEK_CUR));
    const int again = must_open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got;
    size_t done = 0;
    while ((got = read(again, buffer + done, 8191)) > 0 && done < sizeof buffer - 8191)
        done += (size_t)got;
    say_bytes("all of it", (ssize_t)done);
    close(again);
    close(fd);
    say("read closed", read(fd, buffer, 1));
    say("seek closed", lseek(fd, 0, SEEK_CUR));
    say_stat("fstat closed", fstat(fd, &about), &about);
}

static void say_listing(const char *root, const char *file) {
    char path[4096];
    struct stat about;
    DIR *directory = opendir(root);
    if (directory == NULL) {
        say("opendir", -1);
        return;
    }
    struct dirent *found;
    long third = 0;
    for (int i = 0; (found = readdir(directory)) != NULL; i++) {
        if (i == 2)
            third = telldir(directory);
        printf("%s: %lu %d %ld, then %ld\n", found->d_name, found->d_ino, found->d_type, found->d_off, telldir(directory));
    }
    say("end", errno);
    seekdir(directory, third);
    found = readdir(directory);
    printf("fourth: %s\n", found == NULL ? "none" : found->d_name);
    rewinddir(directory);
    found = readdir(directory);
    printf("first: %s\n", found == NULL ? "none" : found->d_name);
    say_stat("dirfd", fstat(dirfd(directory), &about), &about);
    say_stat("from it", fstatat(dirfd(directory), file, &about, 0), &about);
    struct dirent here, *result;
    say("readdir_r", readdir_r(directory, &here, &result));
    printf("second: %s\n", result == NULL ? "none" : here.d_name);
    say("closedir", closedir(directory));
    snprintf(path, sizeof path, "%s/%s", root, file);
    say("opendir of a file", opendir(path) == NULL ? -1 : 0);
    snprintf(path, sizeof path, "%s/nothing", root);
    say("opendir of nothing", opendir(path) == NULL ? -1 : 0);
    snprintf(path, sizeof path, "%s/.fanstore", root);
    directory = opendir(path); /* not listed: who does that gets the statistics of that moment for a while */
    say("control", directory == NULL ? -1 : closedir(directory));
    struct dirent **list;
    const int count = scandir(root, &list, NULL, alphasort);
    say("scandir", count);
    for (int i = 0; i < count; i++)
        free(list[i]);
    free(list);
}

/* Everything that needs a real file, each on a descriptor of its own. */
static void say_promotions(const char *path) {
    struct stat about;
    struct statfs file_system;
    char name[64], text[64];
    int fd = must_open(path, O_RDONLY);
    lseek(fd, 5, SEEK_SET);
    fstat(fd, &about);
    void *map = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_SHARED, fd, 0);
    printf("mmap: %016" PRIx64 "\n", map == MAP_FAILED ? 0 : hash(map, (size_t)about.st_size));
    say("where after mmap", lseek(fd, 0, SEEK_CUR));
    say_bytes("read after mmap", read(fd, buffer, 1000));
    close(fd);
    fd = must_open(path, O_RDONLY);
    say("flags after mmap", fcntl(fd, F_GETFL));
    FILE *stream = fdopen(fd, "rb");
    say("fdopen", stream == NULL ? -1 : (long)fread(buffer, 1, 5000, stream));
    say("fclose", stream == NULL ? -1 : fclose(stream));
    stream = fopen(path, "rb");
    say_bytes("fopen", stream == NULL ? -1 : (ssize_t)fread(buffer, 1, 5000, stream));
    if (stream != NULL)
        fclose(stream);
    fd = must_open(path, O_RDONLY);
    int ends[2];
    say("pipe", pipe(ends));
    off_t from = 10;
    say("sendfile", sendfile(ends[1], fd, &from, 4000));
    say_bytes("sent", read(ends[0], buffer, 4000));
    close(ends[0]);
    close(ends[1]);
    say("flock", flock(fd, LOCK_SH | LOCK_NB));
    say("where", lseek(fd, 0, SEEK_CUR));
    close(fd);
    fd = must_open(path, O_RDONLY);
    say("isatty", isatty(fd));
    struct termios terminal;
    say("tcgetattr", tcgetattr(fd, &terminal));
    say("TCGETS", ioctl(fd, TCGETS, &terminal));
    say("FIOCLEX", ioctl(fd, FIOCLEX));
    say("close on exec", fcntl(fd, F_GETFD));
    say("fadvise", posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL));
    say("fadvise nonsense", posix_fadvise(fd, 0, 0, 99));
    int readable = -1;
    say("FIONREAD", ioctl(fd, FIONREAD, &readable));
    say("write", write(fd, "x", 1));
    say("ftruncate", ftruncate(fd, 0));
    say("fchmod", fchmod(fd, 0600));
    say("fgetxattr", fgetxattr(fd, "user.fanstore.codec", text, sizeof text));
    say("fstatfs", fstatfs(fd, &file_system));
    printf("type: %lx\n", (unsigned long)file_system.f_type);
    say("fchdir", fchdir(fd));
    say("fsync", fsync(fd));
    close(fd);
    fd = must_open(path, O_RDONLY);
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    say("poll", poll(&polled, 1, 0));
    say("events", polled.revents);
    close(fd);
    fd = must_open(path, O_RDONLY);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    say("select", select(fd + 1, &set, NULL, NULL, &(struct timeval){0, 0}));
    close(fd);
    fd = must_open(path, O_RDONLY);
    lseek(fd, 77, SEEK_SET);
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    const int same = must_open(name, O_RDONLY);
    say_bytes("by /proc", read(same, buffer, 100));
    say_bytes("and itself", read(fd, buffer, 100));
    close(same);
    const ssize_t length = readlink(name, buffer, 4096);
    printf("link: %.*s\n", (int)length, buffer);
    say("data", lseek(fd, 0, SEEK_DATA));
    close(fd);
}

static void say_duplicates(const char *path) {
    const int fd = must_open(path, O_RDONLY);
    const int other = dup(fd);
    say("dup", other);
    read(fd, buffer, 1000);
    say("where is the other", lseek(other, 0, SEEK_CUR));
    say("dup2", dup2(fd, 40));
    say("dup2 on itself", dup2(fd, fd));
    say("dup3 on itself", dup3(fd, fd, 0));
    say("dup2 of nothing", dup2(99, 40));
    say("still", lseek(40, 0, SEEK_CUR));
    say("dup from 50 on", fcntl(fd, F_DUPFD_CLOEXEC, 50));
    say("its flags", fcntl(50, F_GETFD));
    close(fd);
    say_bytes("the other reads", read(other, buffer, 500));
    void *map = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, 40, 0); /* promotes all of them */
    printf("mmap: %016" PRIx64 "\n", map == MAP_FAILED ? 0 : hash(map, 4096));
    say("where", lseek(50, 0, SEEK_CUR));
    say_bytes("read", read(50, buffer, 100));
    say("where are all", lseek(40, 0, SEEK_CUR));
    say("flags are kept", fcntl(50, F_GETFD));
    const int again = must_open(path, O_RDONLY);
    printf("number %d\n", again);
    lseek(again, 3, SEEK_SET);
    say("on a standard stream", dup2(again, 0));
    say_bytes("stdin", read(0, buffer, 50));
    say("shared", lseek(again, 0, SEEK_CUR));
    say("over a file", dup2(again, other));
    close(again);
    say("close range", close_range(3, 60, 0));
    say("closed", lseek(40, 0, SEEK_CUR));
    say("closed", fcntl(50, F_GETFD));
    const int last = must_open(path, O_RDONLY);
    printf("number %d\n", last);
    for (int i = 3; i < 1024; i++)
        close(i);
    const int reopened = open(path, O_RDONLY);
    printf("number %d\n", reopened);
    say_bytes("after a closing loop", read(reopened, buffer, 100000));
    close(reopened);
}

static void say_child(const char *what, pid_t pid) {
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        status = -1;
    printf("%s: %x\n", what, (unsigned)status);
}

static void say_processes(const char *path) {
    int fd = must_open(path, O_RDONLY);
    lseek(fd, 10, SEEK_SET);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        say_bytes("the child reads", read(fd, buffer, 1000));
        const int own = open(path, O_RDONLY);
        say_bytes("and opens", read(own, buffer, 1000));
        fflush(stdout);
        _exit(own > 0 ? 3 : 4);
    }
    say_child("fork", pid);
    say("the offset is shared", lseek(fd, 0, SEEK_CUR));
    close(fd);
    /* As subprocess does it: in the child of a vfork, close and duplicate, then exec. */
    fd = must_open(path, O_RDONLY | O_CLOEXEC);
    lseek(fd, 199990, SEEK_SET);
    char *const count[] = {(char *)"wc", (char *)"-c", NULL};
    fflush(stdout);
    pid = vfork();
    if (pid == 0) {
        dup2(fd, 0);
        for (int i = 3; i < 64; i++)
            close(i);
        execvp(count[0], count);
        _exit(127);
    }
    say_child("vfork", pid);
    say_bytes("the parent still reads", read(fd, buffer, 5));
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, 0);
    lseek(fd, 100000, SEEK_SET);
    fflush(stdout);
    if (posix_spawnp(&pid, count[0], &actions, NULL, count, environ) != 0)
        pid = -1;
    say_child("spawn", pid);
    posix_spawn_file_actions_destroy(&actions);
    close(fd);
    /* A descriptor that an exec passes on, whose number the program knows. */
    fd = must_open(path, O_RDONLY);
    lseek(fd, 150000, SEEK_SET);
    char script[64];
    snprintf(script, sizeof script, "wc -c <&%d", fd);
    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        execlp("sh", "sh", "-c", script, (char *)NULL);
        _exit(127);
    }
    say_child("exec", pid);
    fflush(stdout);
    say("system", system(script));
    close(fd);
}

/* Descriptors that are closed past the library, its own as well: what is opened after that is right all the same. */
static void say_unseen(const char *path) {
    for (int i = 0; i < 3; i++)
        must_open(path, O_RDONLY);
    say("closed by the kernel", syscall(SYS_close_range, 3, ~0u, 0));
    const int other = must_open("/dev/zero", O_RDONLY);
    printf("number %d\n", other);
    say_bytes("zeros", read(other, buffer, 100));
    for (int i = 0; i < 600; i++)
        must_open("/dev/zero", O_RDONLY);
    const int fd = must_open(path, O_RDONLY);
    say_bytes("and this", read(fd, buffer, 100000));
    say_bytes("zeros", read(600, buffer, 100));
    say("close", close(512)); /* one of the library's own, before */
    say("close", close(fd));
}

/* ---- races --------------------------------------------------------------------------------------------------------------- */

static struct {
    char **files;
    int count;
    const char *root, *source;
    _Atomic int over, wrong;
    _Atomic long done;
} race;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void blame(const char *what, const char *file) {
    if (race.wrong++ < 10)
        fprintf(stderr, "%s of %s: %s\n", what, file, strerror(errno));
}

/* A file, some of it read in one of several ways, compared with the original. */
static void try_one(unsigned *seed, char *got, char *right, size_t room) {
    const char *file = race.files[rand_r(seed) % (unsigned)race.count];
    char path[4096], original[4096];
    snprintf(path, sizeof path, "%s/%s", race.root, file);
    snprintf(original, sizeof original, "%s/%s", race.source, file);
    const int fd = open(path, O_RDONLY | O_CLOEXEC), model = open(original, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || model < 0) {
        blame("open", file);
        return;
    }
    struct stat about;
    fstat(fd, &about);
    const off_t offset = rand_r(seed) % (unsigned)(about.st_size + 1);
    const size_t bytes = rand_r(seed) % room;
    int other = fd;
    switch (rand_r(seed) % 6) {
    case 0: other = dup(fd); break;
    case 1: other = fcntl(fd, F_DUPFD_CLOEXEC, 3); break;
    case 2: {
        void *map = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0); /* promotes most of them */
        if (map != MAP_FAILED)
            munmap(map, 4096);
        break;
    }
    default: break;
    }
    if (lseek(fd, offset, SEEK_SET) != offset)
        blame("lseek", file);
    const ssize_t expected = pread(model, right, bytes, offset);
    const ssize_t first = read(other, got, bytes / 2);
    ssize_t second = 0;
    if (first >= 0)
        second = read(fd, got + first, bytes - (size_t)first);
    if (first < 0 || second < 0 || first + second != expected || memcmp(got, right, (size_t)expected) != 0) {
        fprintf(stderr, "%zd and %zd bytes from %ld, expected %zd\n", first, second, (long)offset, expected);
        blame("read", file);
    }
    if (other != fd && close(other) != 0)
        blame("close", file);
    if (close(fd) != 0)
        blame("close", file);
    close(model);
    race.done++;
}

static void *run_race(void *argument) {
    unsigned seed = (unsigned)(uintptr_t)argument;
    const size_t room = 64 << 10;
    char *got = malloc(room), *right = malloc(room);
    while (race.over == 0 && race.wrong == 0)
        try_one(&seed, got, right, room);
    free(got);
    free(right);
    return NULL;
}

static int run_races(double seconds) {
    const double end_s = now_s() + seconds;
    pthread_t threads[8];
    for (uintptr_t i = 0; i < 8; i++)
        if (pthread_create(&threads[i], NULL, run_race, (void *)(i + 1)) != 0)
            return 1;
    /* Beside them: forks of a program with threads, and children of vfork that close everything. The threads end after the
     * last fork: in a child, a thread sanitizer would call those that have ended, and nobody has joined, a leak. */
    while (now_s() < end_s && race.wrong == 0) {
        pid_t pid = fork();
        if (pid == 0) {
            unsigned seed = 99;
            static char got[4096], right[4096];
            for (int i = 0; i < 5; i++)
                try_one(&seed, got, right, sizeof got);
            _exit(race.wrong != 0);
        }
        int status = 1;
        if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
            blame("fork", "a child");
        pid = vfork();
        if (pid == 0) {
            for (int i = 3; i < 100; i++)
                close(i);
            execlp("true", "true", (char *)NULL);
            _exit(127);
        }
        if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
            blame("vfork", "a child");
    }
    race.over = 1;
    for (int i = 0; i < 8; i++)
        pthread_join(threads[i], NULL);
    printf("done %ld, wrong %d\n", (long)race.done, (int)race.wrong);
    return race.wrong != 0;
}

/* As many descriptors as there are, all readable, and then one of them made real. */
static int reach_limit(int count, char **files) {
    int opened = 0, fds[64];
    for (; opened < 64; opened++) {
        fds[opened] = open(files[opened % count], O_RDONLY);
        if (fds[opened] < 0)
            break;
    }
    printf("error %s\n", strerrorname_np(errno));
    for (int i = 0; i < opened; i++)
        if (read(fds[i], buffer, 10) != 10)
            return 1;
    if (mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fds[0], 0) == MAP_FAILED)
        return 2;
    printf("opened %s\n", opened > 50 ? "enough" : "too few");
    return 0;
}

int main(int argc, char **argv) {
    char path[4096];
    struct stat about;
    device = argc > 2 && stat(argv[2], &about) == 0 ? about.st_dev : 0;
    if (argc == 4 && strcmp(argv[1], "say") == 0) {
        snprintf(path, sizeof path, "%s/%s", argv[2], argv[3]);
        say_opens(path);
        say_names(argv[2], argv[3]);
        say_listing(argv[2], argv[3]);
        say_old_stats(path);
        say_reads(path);
        say_promotions(path);
        say_duplicates(path);
        say_processes(path);
        say_unseen(path);
        return 0;
    }
    if (argc > 5 && strcmp(argv[1], "race") == 0) {
        race.root = argv[2];
        race.source = argv[3];
        race.files = argv + 5;
        race.count = argc - 5;
        return run_races(atof(argv[4]));
    }
    if (argc > 2 && strcmp(argv[1], "limit") == 0)
        return reach_limit(argc - 2, argv + 2);
    return 2;
}
