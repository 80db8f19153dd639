/* calls_open.c: what programs call to open, close and duplicate files, and to change what paths mean; see preload.h. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "preload/next.h"
#include "preload/outputs.h"
#include "preload/preload.h"

/* Flags with which a regular file is opened here; with others the mount is asked. */
#define KNOWN_FLAGS (O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW | O_NOATIME | FSX_LARGEFILE)
/* What the kernel shows of every open file on 64 bits; the headers have 0 for it. */
#if defined __aarch64__
#define FSX_LARGEFILE 0400000
#else
#define FSX_LARGEFILE 0100000
#endif

/* Whether the last argument of open is there. */
#define NEEDS_MODE(flags) (((flags) & O_CREAT) != 0 || ((flags) & O_TMPFILE) == O_TMPFILE)

/* Opened here: the descriptor, or -1 with errno; -2: pass it on. */
static int open_here(int directory, const char *path, int flags, mode_t mode, struct fsx_way *way) {
    way->path = path;
    if (directory != AT_FDCWD && directory >= 0 && path != NULL && path[0] != '/')
        fsx_promote(directory); /* not a directory, which the kernel is to say */
    if (fsx_unmounted)
        return fsx_open_unmounted(directory, path, flags, mode, false, way);
    const int64_t entry = fsx_resolve(directory, path);
    if (entry == FSX_ELSEWHERE) {
        fsx_promote_named(path);
        return -2;
    }
    if (entry >= 0 && (flags & ~KNOWN_FLAGS) == 0) {
        const uint32_t its = fsx_at.index.mode[entry];
        if (S_ISREG(its) && (its & S_IRUSR) != 0 && fsx_bytes_here((uint32_t)entry)) {
            const int fd = fsx_open_entry((uint32_t)entry, flags);
            if (fd != -2) {
                if (fd >= 0)
                    fsx_count(FSX_OPENS, 1);
                FSX_LOG("open", path, fd, "answered");
                return fd;
            }
        }
    }
    fsx_count(FSX_PASSED, 1);
    FSX_LOG("open", path, flags, "passed to the mount");
    return -2;
}

/* The last argument, if it is there. */
#define MODE_IN(mode, flags)                   \
    mode_t mode = 0;                           \
    if (NEEDS_MODE(flags)) {                   \
        va_list arguments;                     \
        va_start(arguments, flags);            \
        mode = va_arg(arguments, mode_t);      \
        va_end(arguments);                     \
    }

#define OPEN(name)                                                   \
    FSX_CALL int name(const char *path, int flags, ...) {            \
        struct fsx_way way;                                          \
        MODE_IN(mode, flags)                                         \
        const int fd = open_here(AT_FDCWD, path, flags, mode, &way); \
        if (fd != -2)                                                \
            return fd;                                               \
        return fsx_foreign(NEXT(name)(way.path, flags, mode));       \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                      \
    FSX_CALL int name(int directory, const char *path, int flags, ...) {  \
        struct fsx_way way;                                               \
        MODE_IN(mode, flags)                                              \
        const int fd = open_here(directory, path, flags, mode, &way);     \
        if (fd != -2)                                                     \
            return fd;                                                    \
        return fsx_foreign(NEXT(name)(directory, way.path, flags, mode)); \
    }
OPENAT(openat)
OPENAT(openat64)

#define CREAT(name)                                                                         \
    FSX_CALL int name(const char *path, mode_t mode) {                                      \
        struct fsx_way way;                                                                 \
        const int fd = open_here(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode, &way); \
        return fd != -2 ? fd : fsx_foreign(NEXT(name)(way.path, mode));                     \
    }
CREAT(creat)
CREAT(creat64)

/* Of programs that were compiled with _FORTIFY_SOURCE. */
#define OPEN_2(name)                                                                                    \
    FSX_CALL int name(const char *path, int flags);                                                     \
    FSX_CALL int name(const char *path, int flags) {                                                    \
        struct fsx_way way;                                                                             \
        const int fd = open_here(AT_FDCWD, path, flags, 0, &way);                                          \
        return fd != -2 ? fd : fsx_foreign(NEXT_AS(int (*)(const char *, int), name)(way.path, flags)); \
    }
OPEN_2(__open_2)
OPEN_2(__open64_2)

#define OPENAT_2(name)                                                                                  \
    FSX_CALL int name(int directory, const char *path, int flags);                                      \
    FSX_CALL int name(int directory, const char *path, int flags) {                                     \
        struct fsx_way way;                                                                             \
        const int fd = open_here(directory, path, flags, 0, &way);                                         \
        if (fd != -2)                                                                                   \
            return fd;                                                                                  \
        return fsx_foreign(NEXT_AS(int (*)(int, const char *, int), name)(directory, way.path, flags)); \
    }
OPENAT_2(__openat_2)
OPENAT_2(__openat64_2)

/* ---- closing and duplicating ------------------------------------------------------------------------------------------- */

FSX_CALL int close(int fd) { return fsx_close(fd); }

FSX_CALL int close_range(unsigned first, unsigned last, int flags) {
    if (!atomic_load(&fsx_on))
        return NEXT_AS(int (*)(unsigned, unsigned, int), close_range)(first, last, flags);
    return fsx_close_range(first, last, flags);
}

FSX_CALL void closefrom(int lowest) {
    if (!atomic_load(&fsx_on) || fsx_close_range(lowest < 0 ? 0 : (unsigned)lowest, ~0u, 0) != 0)
        NEXT_AS(void (*)(int), closefrom)(lowest);
}

FSX_CALL int dup(int fd) { return fsx_is_ours(fd) ? fsx_duplicate(fd, 0, false) : fsx_foreign(NEXT(dup)(fd)); }

/* What `target` is now is about to be closed, and dup2 does not fail for anything that is wrong with that. */
static void let_go(int fd, int target) {
    if (fd != target)
        fsx_output_closing(target);
}

FSX_CALL int dup2(int fd, int target) {
    if (!fsx_is_ours(fd) && !fsx_is_known(target))
        return let_go(fd, target), NEXT(dup2)(fd, target);
    return fsx_duplicate_to(fd, target, 0, true);
}

FSX_CALL int dup3(int fd, int target, int flags) {
    if (!fsx_is_ours(fd) && !fsx_is_known(target))
        return let_go(fd, target), NEXT(dup3)(fd, target, flags);
    return fsx_duplicate_to(fd, target, flags, false);
}

/* fcntl of a placeholder; false: the kernel is to answer, for what is in its place by now if need be. */
static bool control(int fd, int command, long argument, int *result) {
    struct fsx_file file;
    if (!fsx_find(fd, &file))
        return false;
    switch (command) {
    case F_DUPFD:
    case F_DUPFD_CLOEXEC:
        *result = fsx_duplicate(fd, (int)argument, command == F_DUPFD_CLOEXEC);
        return true;
    case F_GETFD:
    case F_SETFD:
        return false; /* which works with a placeholder */
    case F_GETFL:
        *result = (file.flags & ~(O_CLOEXEC | O_NOCTTY)) | FSX_LARGEFILE;
        return true;
    default:
        break;
    }
    const int error = fsx_promote(fd);
    if (error == 0)
        return false;
    errno = error;
    *result = -1;
    return true;
}

#define FCNTL(name)                                                     \
    FSX_CALL int name(int fd, int command, ...) {                       \
        va_list arguments;                                              \
        va_start(arguments, command);                                   \
        const long argument = va_arg(arguments, long);                  \
        va_end(arguments);                                              \
        int result;                                                     \
        if (fsx_is_ours(fd) && control(fd, command, argument, &result)) \
            return result;                                              \
        return NEXT(name)(fd, command, argument);                       \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

FSX_CALL int ioctl(int fd, unsigned long request, ...) {
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (!fsx_is_ours(fd))
        return NEXT(ioctl)(fd, request, argument);
    switch (request) {
    case TCGETS:
    case 0x802c542a: /* TCGETS2 of x86_64 and aarch64 */
        errno = ENOTTY;
        return -1;
    case FIOCLEX:
        return NEXT(fcntl)(fd, F_SETFD, FD_CLOEXEC);
    case FIONCLEX:
        return NEXT(fcntl)(fd, F_SETFD, 0);
    default:
        break;
    }
    const int error = fsx_promote(fd);
    if (error == 0)
        return NEXT(ioctl)(fd, request, argument);
    errno = error;
    return -1;
}

/* ---- the end of a program ----------------------------------------------------------------------------------------------- */

__attribute__((destructor)) static void end(void) {
    if (fsx_is_open())
        fsx_outputs_end();
}

FSX_CALL void _exit(int code) {
    if (fsx_is_open())
        fsx_outputs_end();
    /* In the child of a fork nothing may be looked for by name: it was when this library was attached. */
    if (atomic_load(&fsx_next_table[FSX_NEXT__exit]) != NULL)
        NEXT(_exit)(code);
    for (;;)
        syscall(SYS_exit_group, code);
}
FSX_CALL void _Exit(int code) { _exit(code); }

/* ---- what paths mean --------------------------------------------------------------------------------------------------- */

/* Without a mount: the directory that stands for one of the dataset; NULL with errno. */
static const char *stand_in(const char *path, char room[FSX_STATE_PATH], struct fsx_way *way) {
    const int64_t entry = fsx_look_up(AT_FDCWD, path, true, way);
    if (entry == FSX_ELSEWHERE)
        return way->path;
    const int error = entry < 0 ? way->error : !S_ISDIR(fsx_mode_of(entry)) ? ENOTDIR : fsx_may(entry, S_IXUSR) ? 0 : EACCES;
    if (error != 0) {
        errno = error;
        return NULL;
    }
    return fsx_tree_path(entry, room) ? room : NULL;
}

FSX_CALL int chdir(const char *path) {
    fsx_promote_named(path);
    struct fsx_way way;
    char room[FSX_STATE_PATH];
    const char *there = fsx_unmounted ? stand_in(path, room, &way) : path;
    const int result = there == NULL ? -1 : NEXT(chdir)(there);
    fsx_forget_directory();
    return result;
}

FSX_CALL int fchdir(int fd) {
    fsx_promote(fd);
    const int result = NEXT(fchdir)(fd);
    fsx_forget_directory();
    return result;
}

FSX_CALL int chroot(const char *path) {
    fsx_retire();
    return NEXT(chroot)(path);
}

FSX_CALL int unshare(int flags) {
    if ((flags & (CLONE_NEWNS | CLONE_FS | CLONE_NEWUSER)) != 0)
        fsx_retire();
    return NEXT(unshare)(flags);
}

FSX_CALL int setns(int fd, int type) {
    fsx_retire();
    return NEXT(setns)(fd, type);
}

FSX_CALL int setuid(uid_t uid) {
    fsx_retire();
    return NEXT(setuid)(uid);
}

FSX_CALL int seteuid(uid_t uid) {
    fsx_retire();
    return NEXT(seteuid)(uid);
}

FSX_CALL int setreuid(uid_t real, uid_t effective) {
    fsx_retire();
    return NEXT(setreuid)(real, effective);
}

FSX_CALL int setresuid(uid_t real, uid_t effective, uid_t saved) {
    fsx_retire();
    return NEXT(setresuid)(real, effective, saved);
}
