/* calls_change.c: what programs call to change names and what they lead to; see preload.h.
 *
 * With a mount, all of it is the mount's affair. Without one, the dataset cannot be changed: what is said is what the kernel says of a
 * file system that is mounted read-only, in its order (first that a name is not there, or is there already).
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#include "preload/next.h"
#include "preload/preload.h"

/* What is to be said of a name: an errno, or 0 to ask the kernel about way->path. */

/* The last part of a name, in which the kernel does not look at what stands there. */
enum last { NAME, DOT, DOTS };

/* A name without slashes at its end. */
struct bare {
    enum last last;
    bool slash;
    char path[FSX_STATE_PATH];
};

static const char *strip(const char *path, struct bare *bare) {
    size_t length = path == NULL ? 0 : strlen(path);
    *bare->path = '\0';
    bare->last = NAME;
    bare->slash = false;
    if (length == 0 || length >= sizeof bare->path)
        return path;
    memcpy(bare->path, path, length + 1);
    for (; length > 1 && bare->path[length - 1] == '/'; bare->slash = true)
        bare->path[--length] = '\0';
    const char *slash = strrchr(bare->path, '/');
    const char *name = slash == NULL ? bare->path : slash + 1;
    bare->last = strcmp(name, ".") == 0 ? DOT : strcmp(name, "..") == 0 ? DOTS : NAME;
    return bare->path;
}

static int64_t look_up_bare(int directory, const char *path, struct bare *bare, struct fsx_way *way) {
    way->path = path;
    if (!fsx_unmounted)
        return FSX_ELSEWHERE;
    const char *stripped = strip(path, bare);
    const int64_t entry = fsx_look_up(directory, stripped, false, way);
    if (way->path == stripped)
        way->path = path;
    return entry;
}

/* It is to be made; `directory_too`: a directory, of which the name may end with a slash. */
static int refuse_new(int directory, const char *path, bool directory_too, struct fsx_way *way) {
    struct bare bare;
    const int64_t entry = look_up_bare(directory, path, &bare, way);
    if (entry == FSX_ELSEWHERE)
        return 0;
    if (entry >= 0)
        return EEXIST;
    return way->error == ENOENT && way->parent >= 0 && (directory_too || !bare.slash) ? EROFS : way->error;
}

/* What it leads to is to be changed. */
static int refuse_change(int directory, const char *path, bool follow, struct fsx_way *way) {
    way->path = path;
    const int64_t entry = fsx_unmounted ? fsx_look_up(directory, path, follow, way) : FSX_ELSEWHERE;
    return entry == FSX_ELSEWHERE ? 0 : entry >= 0 ? EROFS : way->error;
}

/* It is to be taken away, or to get another name. What is said of the mount point, of "." and of "..". */
static int refuse_removal(int directory, const char *path, int point, int dot, int dots, struct fsx_way *way) {
    struct bare bare;
    const int64_t entry = look_up_bare(directory, path, &bare, way);
    if (entry == FSX_ELSEWHERE)
        return 0;
    if (entry >= 0 && bare.last != NAME)
        return bare.last == DOT ? dot : dots;
    if (entry == 0)
        return point;
    return entry > 0 || (way->error == ENOENT && way->parent >= 0) ? EROFS : way->error;
}

static int fail(int error) {
    errno = error;
    return -1;
}

#define NAMED(refusal, name, parameters, arguments)   \
    FSX_CALL int name parameters {                    \
        struct fsx_way way;                           \
        const int error = refusal;                    \
        return error != 0 ? fail(error) : NEXT(name) arguments; \
    }
#define NEW(name, parameters, directory, directory_too, arguments) \
    NAMED(refuse_new(directory, path, directory_too, &way), name, parameters, arguments)
#define CHANGE(name, parameters, directory, follow, arguments) \
    NAMED(refuse_change(directory, path, follow, &way), name, parameters, arguments)
#define REMOVAL(name, parameters, directory, point, dot, dots, arguments) \
    NAMED(refuse_removal(directory, path, point, dot, dots, &way), name, parameters, arguments)

NEW(mkdir, (const char *path, mode_t mode), AT_FDCWD, true, (way.path, mode))
NEW(mkdirat, (int directory, const char *path, mode_t mode), directory, true, (directory, way.path, mode))
NEW(mkfifo, (const char *path, mode_t mode), AT_FDCWD, false, (way.path, mode))
NEW(mkfifoat, (int directory, const char *path, mode_t mode), directory, false, (directory, way.path, mode))
NEW(mknod, (const char *path, mode_t mode, dev_t device), AT_FDCWD, false, (way.path, mode, device))
NEW(mknodat, (int directory, const char *path, mode_t mode, dev_t device), directory, false, (directory, way.path, mode, device))
NEW(symlink, (const char *target, const char *path), AT_FDCWD, false, (target, way.path))
NEW(symlinkat, (const char *target, int directory, const char *path), directory, false, (target, directory, way.path))

REMOVAL(unlink, (const char *path), AT_FDCWD, EISDIR, EISDIR, EISDIR, (way.path))
REMOVAL(rmdir, (const char *path), AT_FDCWD, EBUSY, EINVAL, ENOTEMPTY, (way.path))
REMOVAL(remove, (const char *path), AT_FDCWD, EBUSY, EINVAL, ENOTEMPTY, (way.path))
REMOVAL(unlinkat, (int directory, const char *path, int flags), directory, (flags & AT_REMOVEDIR) != 0 ? EBUSY : EISDIR,
        (flags & AT_REMOVEDIR) != 0 ? EINVAL : EISDIR, (flags & AT_REMOVEDIR) != 0 ? ENOTEMPTY : EISDIR,
        (directory, way.path, flags))

CHANGE(chmod, (const char *path, mode_t mode), AT_FDCWD, true, (way.path, mode))
CHANGE(lchmod, (const char *path, mode_t mode), AT_FDCWD, false, (way.path, mode))
CHANGE(fchmodat, (int directory, const char *path, mode_t mode, int flags), directory, (flags & AT_SYMLINK_NOFOLLOW) == 0,
       (directory, way.path, mode, flags))
CHANGE(chown, (const char *path, uid_t uid, gid_t gid), AT_FDCWD, true, (way.path, uid, gid))
CHANGE(lchown, (const char *path, uid_t uid, gid_t gid), AT_FDCWD, false, (way.path, uid, gid))
CHANGE(fchownat, (int directory, const char *path, uid_t uid, gid_t gid, int flags), directory,
       (flags & AT_SYMLINK_NOFOLLOW) == 0, (directory, way.path, uid, gid, flags))
CHANGE(utime, (const char *path, const struct utimbuf *times), AT_FDCWD, true, (way.path, times))
CHANGE(utimes, (const char *path, const struct timeval times[2]), AT_FDCWD, true, (way.path, times))
CHANGE(lutimes, (const char *path, const struct timeval times[2]), AT_FDCWD, false, (way.path, times))
CHANGE(setxattr, (const char *path, const char *name, const void *value, size_t bytes, int flags), AT_FDCWD, true,
       (way.path, name, value, bytes, flags))
CHANGE(lsetxattr, (const char *path, const char *name, const void *value, size_t bytes, int flags), AT_FDCWD, false,
       (way.path, name, value, bytes, flags))
CHANGE(removexattr, (const char *path, const char *name), AT_FDCWD, true, (way.path, name))
CHANGE(lremovexattr, (const char *path, const char *name), AT_FDCWD, false, (way.path, name))

/* Without a name, these are about the descriptor. */
static int refuse_times(int directory, const char *path, int flags, struct fsx_way *way) {
    if (path != NULL)
        return refuse_change(directory, path, (flags & AT_SYMLINK_NOFOLLOW) == 0, way);
    way->path = path;
    fsx_promote(directory);
    return fsx_real_entry(directory) >= 0 ? EROFS : 0;
}
NAMED(refuse_times(directory, path, flags, &way), utimensat,
      (int directory, const char *path, const struct timespec times[2], int flags), (directory, way.path, times, flags))
NAMED(refuse_times(directory, path, 0, &way), futimesat, (int directory, const char *path, const struct timeval times[2]),
      (directory, way.path, times))

/* Only regular files have a length to be changed. */
static int refuse_truncation(const char *path, struct fsx_way *way) {
    way->path = path;
    const int64_t entry = fsx_unmounted ? fsx_look_up(AT_FDCWD, path, true, way) : FSX_ELSEWHERE;
    if (entry < 0)
        return entry == FSX_ELSEWHERE ? 0 : way->error;
    return S_ISDIR(fsx_mode_of(entry)) ? EISDIR : EROFS;
}
NAMED(refuse_truncation(path, &way), truncate, (const char *path, off_t bytes), (way.path, bytes))
NAMED(refuse_truncation(path, &way), truncate64, (const char *path, off_t bytes), (way.path, bytes))

/* ---- temporary names ---------------------------------------------------------------------------------------------------- */

/* The C library makes these by itself, and would do it where the kernel believes to be. */
static int refuse_temporary(const char *pattern) {
    struct fsx_way way;
    const int error = refuse_new(AT_FDCWD, pattern, true, &way);
    return error == EEXIST ? 0 : error;
}
#define TEMPORARY(result, failure, name, parameters, arguments) \
    FSX_CALL result name parameters {                           \
        const int error = refuse_temporary(pattern);            \
        if (error == 0)                                         \
            return NEXT(name) arguments;                        \
        errno = error;                                          \
        return failure;                                         \
    }
TEMPORARY(int, -1, mkstemp, (char *pattern), (pattern))
TEMPORARY(int, -1, mkstemp64, (char *pattern), (pattern))
TEMPORARY(int, -1, mkostemp, (char *pattern, int flags), (pattern, flags))
TEMPORARY(int, -1, mkostemp64, (char *pattern, int flags), (pattern, flags))
TEMPORARY(int, -1, mkstemps, (char *pattern, int end), (pattern, end))
TEMPORARY(int, -1, mkstemps64, (char *pattern, int end), (pattern, end))
TEMPORARY(int, -1, mkostemps, (char *pattern, int end, int flags), (pattern, end, flags))
TEMPORARY(int, -1, mkostemps64, (char *pattern, int end, int flags), (pattern, end, flags))
TEMPORARY(char *, NULL, mkdtemp, (char *pattern), (pattern))

/* ---- two names ----------------------------------------------------------------------------------------------------------- */

/* `from` is to be called `to` instead: neither is in the dataset, or both are, or one. */
static int refuse_rename(int from_directory, const char *from, int to_directory, const char *to, struct fsx_way *from_way,
                         struct fsx_way *to_way) {
    const int one = refuse_removal(from_directory, from, EBUSY, EBUSY, EBUSY, from_way);
    const int other = refuse_removal(to_directory, to, EBUSY, EBUSY, EBUSY, to_way);
    const bool one_is_there = one == 0 || one == EROFS || one == EBUSY;
    if (!one_is_there || !(other == 0 || other == EROFS || other == EBUSY))
        return one_is_there ? other : one; /* a directory on the way is missing */
    if (one == 0 && other == 0)
        return 0;
    if (one == 0 || other == 0)
        return EXDEV;
    return one == EBUSY || other == EBUSY ? EBUSY : EROFS;
}

#define TWO(refusal, name, parameters, arguments) \
    FSX_CALL int name parameters {                \
        struct fsx_way one, two;                  \
        const int error = refusal;                \
        return error != 0 ? fail(error) : NEXT(name) arguments; \
    }
TWO(refuse_rename(AT_FDCWD, from, AT_FDCWD, to, &one, &two), rename, (const char *from, const char *to), (one.path, two.path))
TWO(refuse_rename(from_directory, from, to_directory, to, &one, &two), renameat,
    (int from_directory, const char *from, int to_directory, const char *to),
    (from_directory, one.path, to_directory, two.path))
TWO(refuse_rename(from_directory, from, to_directory, to, &one, &two), renameat2,
    (int from_directory, const char *from, int to_directory, const char *to, unsigned flags),
    (from_directory, one.path, to_directory, two.path, flags))

/* `to` is to be one more name for `from`. */
static int refuse_link(int from_directory, const char *from, bool follow, int to_directory, const char *to,
                       struct fsx_way *from_way, struct fsx_way *to_way) {
    const int one = refuse_change(from_directory, from, follow, from_way);
    const int other = refuse_new(to_directory, to, false, to_way);
    if (one != 0 && one != EROFS)
        return one;
    return other != 0 ? other : one == EROFS ? EXDEV : 0;
}
TWO(refuse_link(AT_FDCWD, from, false, AT_FDCWD, to, &one, &two), link, (const char *from, const char *to),
    (one.path, two.path))
TWO(refuse_link(from_directory, from, (flags & AT_SYMLINK_FOLLOW) != 0, to_directory, to, &one, &two), linkat,
    (int from_directory, const char *from, int to_directory, const char *to, int flags),
    (from_directory, one.path, to_directory, two.path, flags))

/* ---- descriptors --------------------------------------------------------------------------------------------------------- */

/* Of a descriptor that stands for the dataset the kernel would change what stands there. */
#define DESCRIBED(name, parameters, arguments)                                \
    FSX_CALL int name parameters {                                            \
        const int error = fsx_is_ours(fd) && !fsx_unmounted ? fsx_promote(fd) : 0; \
        if (error != 0)                                                       \
            return fail(error);                                               \
        if (fsx_is_ours(fd) || fsx_real_entry(fd) >= 0)                       \
            return fail(EROFS);                                               \
        return NEXT(name) arguments;                                          \
    }
DESCRIBED(fchmod, (int fd, mode_t mode), (fd, mode))
DESCRIBED(fchown, (int fd, uid_t uid, gid_t gid), (fd, uid, gid))
DESCRIBED(futimens, (int fd, const struct timespec times[2]), (fd, times))
DESCRIBED(futimes, (int fd, const struct timeval times[2]), (fd, times))
DESCRIBED(fsetxattr, (int fd, const char *name, const void *value, size_t bytes, int flags), (fd, name, value, bytes, flags))
DESCRIBED(fremovexattr, (int fd, const char *name), (fd, name))
