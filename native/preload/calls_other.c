/* calls_other.c: what is done with descriptors and not answered here: they become real files first; see preload.h.
 *
 * Also maps, some of which need none, and programs that are started, which inherit descriptors.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <termios.h>
#include <unistd.h>

#include "preload/next.h"
#include "preload/outputs.h"
#include "preload/preload.h"

/* A call with one descriptor: promote it, or fail with why not. */
#define PROMOTE_OR(fd, failure)                                  \
    do {                                                         \
        const int error = fsx_is_ours(fd) ? fsx_promote(fd) : 0; \
        if (error != 0) {                                        \
            errno = error;                                       \
            return failure;                                      \
        }                                                        \
    } while (0)

#define WITH_FD(result, failure, name, parameters, arguments) \
    FSX_CALL result name parameters {                         \
        PROMOTE_OR(fd, failure);                              \
        return NEXT(name) arguments;                          \
    }

/* A file that begins at a page of its partition needs no real file to be mapped. */
static void *map_partition(int fd, void *at, size_t bytes, int protection, int flags, off_t offset) {
    struct fsx_file file;
    if (!fsx_is_ours(fd) || fsx_in_vfork() || !fsx_find(fd, &file))
        return NULL;
    void *map = fsx_bytes_map(file.entry, at, bytes, protection, flags, offset);
    if (map != NULL)
        FSX_LOG("mmap", NULL, fd, "mapped the partition");
    return map;
}
#define MMAP(name)                                                                                    \
    FSX_CALL void *name(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {    \
        void *map = map_partition(fd, at, bytes, protection, flags, offset);                          \
        if (map != NULL)                                                                              \
            return map;                                                                               \
        PROMOTE_OR(fd, MAP_FAILED);                                                                   \
        return NEXT(name)(at, bytes, protection, flags, fd, offset);                                  \
    }
MMAP(mmap)
MMAP(mmap64)
WITH_FD(FILE *, NULL, fdopen, (int fd, const char *mode), (fd, mode))
WITH_FD(ssize_t, -1, readahead, (int fd, off_t offset, size_t bytes), (fd, offset, bytes))
/* Of an output it is the daemon that knows when it is safe. */
#define SYNC(name)                                                      \
    FSX_CALL int name(int fd) {                                         \
        PROMOTE_OR(fd, -1);                                             \
        const int64_t entry = fsx_outputs_on() ? fsx_real_entry(fd) : -1; \
        const bool whole = entry >= 0 && (fsx_is_output(entry) || S_ISDIR(fsx_mode_of(entry))); \
        const int error = whole ? fsx_output_sync(entry) : 0;           \
        /* One that has no name any more is on the local disk only. */  \
        if (!whole || error == ENOENT)                                  \
            return NEXT(name)(fd);                                      \
        errno = error != 0 ? error : errno;                             \
        return error != 0 ? -1 : 0;                                     \
    }
SYNC(fsync)
SYNC(fdatasync)
WITH_FD(int, -1, syncfs, (int fd), (fd))
WITH_FD(int, -1, ftruncate, (int fd, off_t bytes), (fd, bytes))
WITH_FD(int, -1, ftruncate64, (int fd, off_t bytes), (fd, bytes))
WITH_FD(int, -1, flock, (int fd, int operation), (fd, operation))
WITH_FD(int, -1, lockf, (int fd, int command, off_t bytes), (fd, command, bytes))
WITH_FD(int, -1, lockf64, (int fd, int command, off_t bytes), (fd, command, bytes))
WITH_FD(long, -1, fpathconf, (int fd, int name), (fd, name))
WITH_FD(ssize_t, -1, write, (int fd, const void *source, size_t bytes), (fd, source, bytes))
WITH_FD(ssize_t, -1, pwrite, (int fd, const void *source, size_t bytes, off_t offset), (fd, source, bytes, offset))
WITH_FD(ssize_t, -1, pwrite64, (int fd, const void *source, size_t bytes, off_t offset), (fd, source, bytes, offset))
WITH_FD(ssize_t, -1, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))

/* Of two descriptors, each may be ours. */
#define WITH_TWO(name, parameters, one, two, arguments) \
    FSX_CALL ssize_t name parameters {                  \
        PROMOTE_OR(one, -1);                            \
        PROMOTE_OR(two, -1);                            \
        return NEXT(name) arguments;                    \
    }
WITH_TWO(sendfile, (int to, int from, off_t *offset, size_t bytes), to, from, (to, from, offset, bytes))
WITH_TWO(sendfile64, (int to, int from, off_t *offset, size_t bytes), to, from, (to, from, offset, bytes))
WITH_TWO(splice, (int from, off_t *from_offset, int to, off_t *to_offset, size_t bytes, unsigned flags), from, to,
         (from, from_offset, to, to_offset, bytes, flags))
WITH_TWO(tee, (int from, int to, size_t bytes, unsigned flags), from, to, (from, to, bytes, flags))
WITH_TWO(copy_file_range, (int from, off_t *from_offset, int to, off_t *to_offset, size_t bytes, unsigned flags), from, to,
         (from, from_offset, to, to_offset, bytes, flags))

/* Advice that the page cache of the mount would take: there is nothing to do. */
static bool is_advice(int advice) { return advice >= POSIX_FADV_NORMAL && advice <= POSIX_FADV_NOREUSE; }

FSX_CALL int posix_fadvise(int fd, off_t offset, off_t bytes, int advice) {
    if (fsx_is_ours(fd))
        return is_advice(advice) && bytes >= 0 ? 0 : EINVAL;
    return NEXT(posix_fadvise)(fd, offset, bytes, advice);
}
FSX_CALL int posix_fadvise64(int fd, off_t offset, off_t bytes, int advice) {
    if (fsx_is_ours(fd))
        return is_advice(advice) && bytes >= 0 ? 0 : EINVAL;
    return NEXT(posix_fadvise64)(fd, offset, bytes, advice);
}

FSX_CALL int isatty(int fd) {
    if (!fsx_is_ours(fd))
        return NEXT(isatty)(fd);
    errno = ENOTTY;
    return 0;
}
FSX_CALL int tcgetattr(int fd, struct termios *about) {
    if (!fsx_is_ours(fd))
        return NEXT(tcgetattr)(fd, about);
    errno = ENOTTY;
    return -1;
}

/* ---- streams ------------------------------------------------------------------------------------------------------------ */

/* The flags of open that a mode of fopen means; -1 for nonsense. */
static int flags_of(const char *mode) {
    int flags = mode[0] == 'r' ? O_RDONLY : mode[0] == 'w' ? O_WRONLY | O_CREAT | O_TRUNC : O_WRONLY | O_CREAT | O_APPEND;
    if (mode[0] != 'r' && mode[0] != 'w' && mode[0] != 'a')
        return -1;
    for (const char *more = mode + 1; *more != '\0' && *more != ','; more++)
        if (*more == '+')
            flags = (flags & ~O_ACCMODE) | O_RDWR;
        else if (*more == 'e')
            flags |= O_CLOEXEC;
        else if (*more == 'x')
            flags |= O_EXCL;
    return flags;
}

/* The C library opens files by itself: through the mount, where a name may stand for a descriptor. Without a mount it gets a
 * real descriptor: that, -1 with errno, or -2 to open way->path. */
static int open_for_stream(const char *path, const char *mode, struct fsx_way *way) {
    way->path = path;
    const int flags = mode == NULL ? -1 : flags_of(mode);
    if (fsx_unmounted && path != NULL && flags >= 0)
        return fsx_open_unmounted(AT_FDCWD, path, flags, 0666, true, way);
    fsx_promote_named(path);
    return -2;
}

#define FOPEN(name)                                                     \
    FSX_CALL FILE *name(const char *path, const char *mode) {           \
        struct fsx_way way;                                             \
        const int fd = open_for_stream(path, mode, &way);               \
        if (fd == -2)                                                   \
            return NEXT(name)(way.path, mode);                          \
        FILE *stream = fd < 0 ? NULL : NEXT(fdopen)(fd, mode);          \
        if (stream == NULL && fd >= 0)                                  \
            close(fd);                                                  \
        return stream;                                                  \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* The C library closes the descriptor by itself. */
FSX_CALL int fclose(FILE *stream) {
    const int fd = fsx_outputs_on() ? fileno(stream) : -1;
    int error = 0;
    if (fd >= 0 && fsx_is_output(fsx_real_entry(fd))) {
        fflush(stream);
        error = fsx_output_closing(fd);
    }
    const int result = NEXT(fclose)(stream);
    if (error == 0 || result != 0)
        return result;
    errno = error;
    return EOF;
}

static void close_before(FILE *stream) {
    const int fd = fsx_outputs_on() ? fileno(stream) : -1;
    if (fd >= 0 && fsx_is_output(fsx_real_entry(fd))) {
        fflush(stream);
        fsx_output_closing(fd);
    }
}

/* By the name of the descriptor, since the stream is to be the same. */
static FILE *reopen(int fd, const char *mode, FILE *stream, FILE *(*next)(const char *, const char *, FILE *)) {
    if (fd < 0) {
        const int error = errno;
        fclose(stream);
        errno = error;
        return NULL;
    }
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    FILE *again = next(path, mode, stream);
    close(fd);
    return again;
}
#define FREOPEN(name)                                                       \
    FSX_CALL FILE *name(const char *path, const char *mode, FILE *stream) { \
        struct fsx_way way;                                                 \
        close_before(stream);                                               \
        const int fd = open_for_stream(path, mode, &way);                   \
        if (fd == -2)                                                       \
            return NEXT(name)(way.path, mode, stream);                      \
        return reopen(fd, mode, stream, NEXT(name));                        \
    }
FREOPEN(freopen)
FREOPEN(freopen64)

/* ---- waiting and sending ------------------------------------------------------------------------------------------------ */

static void promote_polled(const struct pollfd *polled, nfds_t count) {
    for (nfds_t i = 0; polled != NULL && i < count; i++)
        fsx_promote(polled[i].fd);
}
FSX_CALL int poll(struct pollfd *polled, nfds_t count, int limit_ms) {
    promote_polled(polled, count);
    return NEXT(poll)(polled, count, limit_ms);
}
FSX_CALL int ppoll(struct pollfd *polled, nfds_t count, const struct timespec *limit, const sigset_t *signals) {
    promote_polled(polled, count);
    return NEXT(ppoll)(polled, count, limit, signals);
}

static void promote_selected(int count, const fd_set *set) {
    for (int fd = 3; set != NULL && fd < count && fd < FD_SETSIZE; fd++)
        if (FD_ISSET(fd, set))
            fsx_promote(fd);
}
FSX_CALL int select(int count, fd_set *reads, fd_set *writes, fd_set *others, struct timeval *limit) {
    promote_selected(count, reads);
    promote_selected(count, writes);
    promote_selected(count, others);
    return NEXT(select)(count, reads, writes, others, limit);
}
FSX_CALL int pselect(int count, fd_set *reads, fd_set *writes, fd_set *others, const struct timespec *limit,
                     const sigset_t *signals) {
    promote_selected(count, reads);
    promote_selected(count, writes);
    promote_selected(count, others);
    return NEXT(pselect)(count, reads, writes, others, limit, signals);
}
FSX_CALL int epoll_ctl(int poller, int operation, int fd, struct epoll_event *event) {
    fsx_promote(fd);
    return NEXT(epoll_ctl)(poller, operation, fd, event);
}

/* Descriptors can be sent to other processes. */
FSX_CALL ssize_t sendmsg(int to, const struct msghdr *message, int flags) {
    if (message != NULL && message->msg_control != NULL && message->msg_controllen >= sizeof(struct cmsghdr)) {
        struct msghdr copy = *message;
        for (struct cmsghdr *part = CMSG_FIRSTHDR(&copy); part != NULL; part = CMSG_NXTHDR(&copy, part)) {
            if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS || part->cmsg_len < CMSG_LEN(0))
                continue;
            const int *fds = (const int *)(const void *)CMSG_DATA(part);
            for (size_t i = 0; i < (part->cmsg_len - CMSG_LEN(0)) / sizeof *fds; i++)
                fsx_promote(fds[i]);
        }
    }
    return NEXT(sendmsg)(to, message, flags);
}

/* ---- programs ----------------------------------------------------------------------------------------------------------- */

extern char **environ;

/* A program of the dataset, without a mount: the path of a descriptor with its content, which stays open for an interpreter;
 * otherwise the path to run. NULL with errno. */
static const char *program_of(int directory, const char *path, char name[32], struct fsx_way *way) {
    way->path = path;
    const int64_t entry = fsx_unmounted ? fsx_look_up(directory, path, true, way) : FSX_ELSEWHERE;
    if (entry == FSX_ELSEWHERE)
        return way->path;
    if (entry < 0 || !S_ISREG(fsx_mode_of(entry)) || !fsx_may(entry, S_IXUSR)) {
        errno = entry < 0 ? way->error : EACCES;
        return NULL;
    }
    const int fd = fsx_is_output(entry) ? fsx_output_program(entry) : fsx_open_content((uint32_t)entry, O_RDONLY);
    if (fd < 0)
        return NULL;
    snprintf(name, 32, "/proc/self/fd/%d", fd);
    return name;
}

/* It was not run: the descriptor is not needed any more. */
static void forget_program(const char *path, const char *name) {
    const int kept = errno;
    if (path == name)
        close(atoi(name + strlen("/proc/self/fd/")));
    errno = kept;
}

FSX_CALL int execve(const char *path, char *const argv[], char *const env[]) {
    struct fsx_way way;
    char name[32];
    fsx_promote_all(true);
    const char *program = program_of(AT_FDCWD, path, name, &way);
    if (program == NULL)
        return -1;
    const int result = NEXT(execve)(program, argv, env);
    forget_program(program, name);
    return result;
}
FSX_CALL int execv(const char *path, char *const argv[]) { return execve(path, argv, environ); }
FSX_CALL int execvp(const char *file, char *const argv[]) {
    if (fsx_unmounted && strchr(file, '/') != NULL)
        return execve(file, argv, environ);
    fsx_promote_all(true);
    return NEXT(execvp)(file, argv);
}
FSX_CALL int execvpe(const char *file, char *const argv[], char *const env[]) {
    if (fsx_unmounted && strchr(file, '/') != NULL)
        return execve(file, argv, env);
    fsx_promote_all(true);
    return NEXT(execvpe)(file, argv, env);
}
FSX_CALL int fexecve(int fd, char *const argv[], char *const env[]) {
    fsx_promote(fd);
    fsx_promote_all(true);
    return NEXT(fexecve)(fd, argv, env);
}
FSX_CALL int execveat(int fd, const char *path, char *const argv[], char *const env[], int flags) {
    fsx_promote(fd);
    fsx_promote_all(true);
    return NEXT_AS(int (*)(int, const char *, char *const[], char *const[], int), execveat)(fd, path, argv, env, flags);
}

/* The arguments of execl and its like as a list; on the stack, because nothing may be allocated after a vfork. */
#define COLLECT(list, first, arguments)                          \
    size_t count = 1;                                            \
    va_list counting;                                            \
    va_copy(counting, arguments);                                \
    while (count < 1u << 16 && va_arg(counting, char *) != NULL) \
        count++;                                                 \
    va_end(counting);                                            \
    char *list[count + 1];                                       \
    list[0] = (char *)(uintptr_t)(first);                        \
    for (size_t i = 1; i <= count; i++)                          \
        list[i] = va_arg(arguments, char *);                     \
    list[count] = NULL;

FSX_CALL int execl(const char *path, const char *first, ...) {
    va_list arguments;
    va_start(arguments, first);
    COLLECT(list, first, arguments)
    va_end(arguments);
    return execv(path, list);
}
FSX_CALL int execlp(const char *file, const char *first, ...) {
    va_list arguments;
    va_start(arguments, first);
    COLLECT(list, first, arguments)
    va_end(arguments);
    return execvp(file, list);
}
FSX_CALL int execle(const char *path, const char *first, ...) {
    va_list arguments;
    va_start(arguments, first);
    COLLECT(list, first, arguments)
    char *const *env = va_arg(arguments, char *const *);
    va_end(arguments);
    return execve(path, list, env);
}

/* What the child does with descriptors is done inside the C library: all that it may duplicate must be real. */
FSX_CALL int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                         const posix_spawnattr_t *attributes, char *const argv[], char *const env[]) {
    struct fsx_way way;
    char name[32];
    fsx_promote_all(actions == NULL);
    const char *program = program_of(AT_FDCWD, path, name, &way);
    if (program == NULL)
        return errno;
    const int error = NEXT(posix_spawn)(pid, program, actions, attributes, argv, env);
    forget_program(program, name);
    return error;
}
FSX_CALL int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                          const posix_spawnattr_t *attributes, char *const argv[], char *const env[]) {
    if (fsx_unmounted && strchr(file, '/') != NULL)
        return posix_spawn(pid, file, actions, attributes, argv, env);
    fsx_promote_all(actions == NULL);
    return NEXT(posix_spawnp)(pid, file, actions, attributes, argv, env);
}
FSX_CALL int system(const char *command) {
    fsx_promote_all(true);
    return NEXT(system)(command);
}
FSX_CALL FILE *popen(const char *command, const char *mode) {
    fsx_promote_all(true);
    return NEXT(popen)(command, mode);
}
