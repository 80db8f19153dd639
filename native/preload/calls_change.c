/* calls_change.c: what programs call to change names and what they lead to; see preload.h.
 *
 * With a mount, all of it is the mount's affair. Without one, the dataset cannot be changed: what is said is what the kernel says of a
 * file system that is mounted read-only, in its order (first that a name is not there, or is there already). Where there may be
 * outputs, it is what the kernel checks before it asks the file system, and then what the daemon says, which makes the change.
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
#include <time.h>
#include <unistd.h>
#include <utime.h>

#include "preload/next.h"
#include "preload/outputs.h"
#include "preload/preload.h"

/* What is to be said of a name: an errno, 0 to ask the kernel about way->path, or DONE. */
#define DONE (-1)

static int done_or(int error) { return error == 0 ? DONE : error; }

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

/* It is to be made, which is possible if this is EROFS; `directory_too`: a directory, of which the name may end with a slash. */
static int refuse_new(int directory, const char *path, bool directory_too, struct fsx_way *way) {
    struct bare bare;
    const int64_t entry = look_up_bare(directory, path, &bare, way);
    if (entry == FSX_ELSEWHERE)
        return 0;
    if (entry >= 0)
        return EEXIST;
    return way->error == ENOENT && way->parent >= 0 && (directory_too || !bare.slash) ? EROFS : way->error;
}

/* May names in a directory be changed, as far as its permissions say? */
static bool may_change_in(int64_t directory) { return fsx_may(directory, S_IWUSR) && fsx_may(directory, S_IXUSR); }

/* The same, and it is made if there may be outputs: what the mode says. */
static int make_new(int directory, const char *path, mode_t mode, const char *target, struct fsx_way *way) {
    const int error = refuse_new(directory, path, S_ISDIR(mode), way);
    if (error != EROFS || !fsx_outputs_on())
        return error;
    if (!may_change_in(way->parent))
        return EACCES;
    if (target[0] == '\0' && S_ISLNK(mode))
        return ENOENT;
    return done_or(fsx_output_make(way, mode, target));
}

static mode_t file_mode(mode_t mode) { return (mode & S_IFMT) != 0 ? mode : mode | S_IFREG; }

/* What it leads to is to be changed. */
static int change(int directory, const char *path, bool follow, const struct fsx_changes *changes, struct fsx_way *way) {
    way->path = path;
    const int64_t entry = fsx_unmounted ? fsx_look_up(directory, path, follow, way) : FSX_ELSEWHERE;
    if (entry < 0)
        return entry == FSX_ELSEWHERE ? 0 : way->error;
    if (!fsx_is_output(entry))
        return EROFS;
    if (S_ISLNK(fsx_mode_of(entry)) && (changes->what & FSX_SET_MODE) != 0)
        return EOPNOTSUPP;
    return changes->what == 0 ? DONE : done_or(fsx_output_set(entry, changes));
}

static struct fsx_changes to_mode(mode_t mode) { return (struct fsx_changes){.what = FSX_SET_MODE, .mode = mode & 07777}; }
static struct fsx_changes to_owner(uid_t uid, gid_t gid) {
    return (struct fsx_changes){
        .what = (uid != (uid_t)-1 ? FSX_SET_UID : 0u) | (gid != (gid_t)-1 ? FSX_SET_GID : 0u), .uid = uid, .gid = gid};
}
#define NS_PER_S INT64_C(1000000000)
/* The second of these is that of the content; NULL: now. */
static struct fsx_changes to_time(const struct timespec *times) {
    struct timespec now = {0};
    if (times != NULL && times[1].tv_nsec == UTIME_OMIT)
        return (struct fsx_changes){0};
    if (times == NULL || times[1].tv_nsec == UTIME_NOW)
        clock_gettime(CLOCK_REALTIME, &now);
    else
        now = times[1];
    return (struct fsx_changes){.what = FSX_SET_MTIME, .mtime_ns = now.tv_sec * NS_PER_S + now.tv_nsec};
}
static struct fsx_changes to_second(const struct utimbuf *times) {
    const struct timespec both[2] = {{0}, {.tv_sec = times != NULL ? times->modtime : 0}};
    return to_time(times != NULL ? both : NULL);
}
static struct fsx_changes to_microsecond(const struct timeval *times) {
    const struct timespec both[2] = {
        {0}, {.tv_sec = times != NULL ? times[1].tv_sec : 0, .tv_nsec = times != NULL ? times[1].tv_usec * 1000 : 0}};
    return to_time(times != NULL ? both : NULL);
}

static int set_attribute(const char *path, bool follow, const char *name, const void *value, size_t bytes, int flags,
                         struct fsx_way *way) {
    way->path = path;
    const int64_t entry = fsx_unmounted ? fsx_look_up(AT_FDCWD, path, follow, way) : FSX_ELSEWHERE;
    if (entry < 0)
        return entry == FSX_ELSEWHERE ? 0 : way->error;
    return fsx_is_output(entry) ? done_or(fsx_output_set_attribute(entry, name, value, bytes, flags)) : EROFS;
}
static int remove_attribute(const char *path, bool follow, const char *name, struct fsx_way *way) {
    way->path = path;
    const int64_t entry = fsx_unmounted ? fsx_look_up(AT_FDCWD, path, follow, way) : FSX_ELSEWHERE;
    if (entry < 0)
        return entry == FSX_ELSEWHERE ? 0 : way->error;
    return fsx_is_output(entry) ? done_or(fsx_output_remove_attribute(entry, name)) : EROFS;
}

/* Its directory; of what was found in the index without a walk, too. */
static int64_t directory_of(int64_t entry, const struct fsx_way *way) {
    return way->parent >= 0 || fsx_is_output(entry) || fsx_is_control(entry) ? way->parent : fsx_at.index.parent[entry];
}

enum removal { A_NAME, A_DIRECTORY, EITHER };
/* It is taken away: what the kernel says before, and then the daemon. */
static int take_away(int directory, const char *path, enum removal kind, struct fsx_way *way) {
    struct bare bare;
    const int64_t entry = look_up_bare(directory, path, &bare, way);
    if (entry == FSX_ELSEWHERE)
        return 0;
    if (entry < 0)
        return way->error;
    const bool is_directory = S_ISDIR(fsx_mode_of(entry));
    const bool wanted = kind == A_DIRECTORY || (kind == EITHER && is_directory);
    if (bare.last != NAME)
        return !wanted ? EISDIR : bare.last == DOT ? EINVAL : ENOTEMPTY;
    if (entry == 0)
        return wanted ? EBUSY : EISDIR;
    if (!wanted && bare.slash)
        return is_directory ? EISDIR : ENOTDIR;
    if (!may_change_in(directory_of(entry, way)))
        return EACCES;
    if (wanted != is_directory)
        return wanted ? ENOTDIR : EISDIR;
    return fsx_is_output(entry) ? done_or(fsx_output_remove(way, wanted)) : EROFS;
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
        return error == DONE ? 0 : error != 0 ? fail(error) : NEXT(name) arguments; \
    }
#define NEW(name, parameters, directory, mode, target, arguments) \
    NAMED(make_new(directory, path, mode, target, &way), name, parameters, arguments)
#define CHANGE(name, parameters, directory, follow, changes, arguments) \
    NAMED(change(directory, path, follow, &(const struct fsx_changes[]){changes}[0], &way), name, parameters, arguments)
#define REMOVAL(name, parameters, directory, kind, arguments) \
    NAMED(remove_name(directory, path, kind, &way), name, parameters, arguments)

/* Of a file system that is mounted read-only, or one that is not. */
static int remove_name(int directory, const char *path, enum removal kind, struct fsx_way *way) {
    if (fsx_outputs_on())
        return take_away(directory, path, kind, way);
    return kind == A_NAME ? refuse_removal(directory, path, EISDIR, EISDIR, EISDIR, way)
                          : refuse_removal(directory, path, EBUSY, EINVAL, ENOTEMPTY, way);
}

NEW(mkdir, (const char *path, mode_t mode), AT_FDCWD, S_IFDIR | (mode & 07777), "", (way.path, mode))
NEW(mkdirat, (int directory, const char *path, mode_t mode), directory, S_IFDIR | (mode & 07777), "",
    (directory, way.path, mode))
NEW(mkfifo, (const char *path, mode_t mode), AT_FDCWD, S_IFIFO | (mode & 07777), "", (way.path, mode))
NEW(mkfifoat, (int directory, const char *path, mode_t mode), directory, S_IFIFO | (mode & 07777), "",
    (directory, way.path, mode))
NEW(mknod, (const char *path, mode_t mode, dev_t device), AT_FDCWD, file_mode(mode), "", (way.path, mode, device))
NEW(mknodat, (int directory, const char *path, mode_t mode, dev_t device), directory, file_mode(mode), "",
    (directory, way.path, mode, device))
NEW(symlink, (const char *target, const char *path), AT_FDCWD, S_IFLNK | 0777, target, (target, way.path))
NEW(symlinkat, (const char *target, int directory, const char *path), directory, S_IFLNK | 0777, target,
    (target, directory, way.path))

REMOVAL(unlink, (const char *path), AT_FDCWD, A_NAME, (way.path))
REMOVAL(rmdir, (const char *path), AT_FDCWD, A_DIRECTORY, (way.path))
REMOVAL(remove, (const char *path), AT_FDCWD, EITHER, (way.path))
REMOVAL(unlinkat, (int directory, const char *path, int flags), directory,
        (flags & AT_REMOVEDIR) != 0 ? A_DIRECTORY : A_NAME, (directory, way.path, flags))

CHANGE(chmod, (const char *path, mode_t mode), AT_FDCWD, true, to_mode(mode), (way.path, mode))
CHANGE(lchmod, (const char *path, mode_t mode), AT_FDCWD, false, to_mode(mode), (way.path, mode))
CHANGE(fchmodat, (int directory, const char *path, mode_t mode, int flags), directory, (flags & AT_SYMLINK_NOFOLLOW) == 0,
       to_mode(mode), (directory, way.path, mode, flags))
CHANGE(chown, (const char *path, uid_t uid, gid_t gid), AT_FDCWD, true, to_owner(uid, gid), (way.path, uid, gid))
CHANGE(lchown, (const char *path, uid_t uid, gid_t gid), AT_FDCWD, false, to_owner(uid, gid), (way.path, uid, gid))
CHANGE(fchownat, (int directory, const char *path, uid_t uid, gid_t gid, int flags), directory,
       (flags & AT_SYMLINK_NOFOLLOW) == 0, to_owner(uid, gid), (directory, way.path, uid, gid, flags))
CHANGE(utime, (const char *path, const struct utimbuf *times), AT_FDCWD, true, to_second(times), (way.path, times))
CHANGE(utimes, (const char *path, const struct timeval times[2]), AT_FDCWD, true, to_microsecond(times), (way.path, times))
CHANGE(lutimes, (const char *path, const struct timeval times[2]), AT_FDCWD, false, to_microsecond(times),
       (way.path, times))
NAMED(set_attribute(path, true, name, value, bytes, flags, &way), setxattr,
      (const char *path, const char *name, const void *value, size_t bytes, int flags), (way.path, name, value, bytes, flags))
NAMED(set_attribute(path, false, name, value, bytes, flags, &way), lsetxattr,
      (const char *path, const char *name, const void *value, size_t bytes, int flags), (way.path, name, value, bytes, flags))
NAMED(remove_attribute(path, true, name, &way), removexattr, (const char *path, const char *name), (way.path, name))
NAMED(remove_attribute(path, false, name, &way), lremovexattr, (const char *path, const char *name), (way.path, name))

/* The same of a descriptor: 0 to ask the kernel. */
static int change_open(int fd, const struct fsx_changes *changes) {
    const int64_t entry = fsx_real_entry(fd);
    if (!fsx_is_output(entry))
        return entry >= 0 ? EROFS : 0;
    const int error = changes->what == 0 ? 0 : fsx_output_set(entry, changes);
    return error == ENOENT && S_ISREG(fsx_mode_of(entry)) ? 0 : done_or(error); /* it has no name: a local file by now */
}

/* Without a name, these are about the descriptor. */
static int change_times(int directory, const char *path, int flags, struct fsx_changes changes, struct fsx_way *way) {
    if (path != NULL)
        return change(directory, path, (flags & AT_SYMLINK_NOFOLLOW) == 0, &changes, way);
    way->path = path;
    fsx_promote(directory);
    return change_open(directory, &changes);
}
NAMED(change_times(directory, path, flags, to_time(times), &way), utimensat,
      (int directory, const char *path, const struct timespec times[2], int flags), (directory, way.path, times, flags))
NAMED(change_times(directory, path, 0, to_microsecond(times), &way), futimesat,
      (int directory, const char *path, const struct timeval times[2]), (directory, way.path, times))

/* Only regular files have a length to be changed. */
static int change_length(const char *path, off_t bytes, struct fsx_way *way) {
    way->path = path;
    const int64_t entry = fsx_unmounted ? fsx_look_up(AT_FDCWD, path, true, way) : FSX_ELSEWHERE;
    if (entry < 0)
        return entry == FSX_ELSEWHERE ? 0 : way->error;
    if (bytes < 0)
        return EINVAL;
    if (S_ISDIR(fsx_mode_of(entry)))
        return EISDIR;
    if (!fsx_is_output(entry))
        return EROFS;
    const struct fsx_changes changes = {.what = FSX_SET_SIZE, .size = (uint64_t)bytes};
    return fsx_may(entry, S_IWUSR) ? done_or(fsx_output_set(entry, &changes)) : EACCES;
}
NAMED(change_length(path, bytes, &way), truncate, (const char *path, off_t bytes), (way.path, bytes))
NAMED(change_length(path, bytes, &way), truncate64, (const char *path, off_t bytes), (way.path, bytes))

/* ---- temporary names ---------------------------------------------------------------------------------------------------- */

#define TEMPORARY_TRIES 10000

/* The C library makes these by itself, and would do it where the kernel believes to be: so here it is done with open and mkdir, for
 * names that may be outputs. -2: pass it on. `end`: bytes behind the six that are replaced; `flags` of open, or -1 for a directory. */
static int make_temporary(char *pattern, int end, int flags) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    struct fsx_way way;
    const int error = refuse_new(AT_FDCWD, pattern, true, &way);
    if (error == 0 || (error == EEXIST && !fsx_outputs_on()))
        return -2;
    const size_t length = strlen(pattern);
    char *place = pattern + length - 6 - (size_t)end;
    if (end < 0 || length < 6 + (size_t)end || strspn(place, "X") < 6)
        return fail(EINVAL);
    if (error != EROFS && error != EEXIST)
        return fail(error);
    if (!fsx_outputs_on())
        return fail(EROFS);
    for (int tries = 0; tries < TEMPORARY_TRIES; tries++) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        uint64_t number = ((uint64_t)now.tv_nsec << 20 ^ (uint64_t)now.tv_sec ^ (uint64_t)getpid() << 40 ^ (uintptr_t)&now) *
                          UINT64_C(0x9e3779b97f4a7c15);
        number ^= number >> 29;
        for (int i = 0; i < 6; i++, number /= sizeof letters - 1)
            place[i] = letters[number % (sizeof letters - 1)];
        const int made = flags < 0 ? mkdir(pattern, 0700)
                                   : open(pattern, (flags & ~O_ACCMODE) | O_RDWR | O_CREAT | O_EXCL, 0600);
        if (made >= 0 || errno != EEXIST)
            return made;
    }
    return fail(EEXIST);
}
#define TEMPORARY(name, parameters, end, flags, arguments)             \
    FSX_CALL int name parameters {                                     \
        const int made = make_temporary(pattern, end, flags);          \
        return made != -2 ? made : NEXT(name) arguments;               \
    }
TEMPORARY(mkstemp, (char *pattern), 0, 0, (pattern))
TEMPORARY(mkstemp64, (char *pattern), 0, 0, (pattern))
TEMPORARY(mkostemp, (char *pattern, int flags), 0, flags, (pattern, flags))
TEMPORARY(mkostemp64, (char *pattern, int flags), 0, flags, (pattern, flags))
TEMPORARY(mkstemps, (char *pattern, int end), end, 0, (pattern, end))
TEMPORARY(mkstemps64, (char *pattern, int end), end, 0, (pattern, end))
TEMPORARY(mkostemps, (char *pattern, int end, int flags), end, flags, (pattern, end, flags))
TEMPORARY(mkostemps64, (char *pattern, int end, int flags), end, flags, (pattern, end, flags))
FSX_CALL char *mkdtemp(char *pattern) {
    const int made = make_temporary(pattern, 0, -1);
    return made == -2 ? NEXT(mkdtemp)(pattern) : made < 0 ? NULL : pattern;
}

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

/* Is a directory this one, or somewhere below it? */
static bool is_within(int64_t directory, int64_t above) {
    struct fsx_way way;
    if (!S_ISDIR(fsx_mode_of(above)))
        return false;
    while (directory > 0 && !fsx_is_control(directory)) {
        if (fsx_output_inode(directory) == fsx_output_inode(above))
            return true;
        directory = fsx_is_output(directory) ? fsx_output_child(directory, "..", 2, &way) : fsx_at.index.parent[directory];
    }
    return directory == above;
}

/* One end of a renaming: an entry, FSX_ELSEWHERE, or an errno below 0. Where the name is, is known if it can be. */
static int64_t end_of_rename(int directory, const char *path, struct bare *bare, struct fsx_way *way) {
    const int64_t entry = look_up_bare(directory, path, bare, way);
    if (entry >= 0 && way->parent < 0 && entry > 0)
        way->parent = directory_of(entry, way);
    return entry == FSX_NOTHING && (way->error != ENOENT || way->parent < 0) ? -1000 - way->error : entry;
}

/* The same where there may be outputs, and with the daemon's word at the end: what the kernel says before, in its order. */
static int rename_here(int from_directory, const char *from, int to_directory, const char *to, unsigned flags,
                       struct fsx_way *from_way, struct fsx_way *to_way) {
    if (!fsx_outputs_on())
        return refuse_rename(from_directory, from, to_directory, to, from_way, to_way);
    struct bare one, other;
    const int64_t source = end_of_rename(from_directory, from, &one, from_way);
    const int64_t target = end_of_rename(to_directory, to, &other, to_way);
    if (source == FSX_ELSEWHERE && target == FSX_ELSEWHERE)
        return 0;
    if ((flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE | 4u)) != 0 ||
        ((flags & RENAME_EXCHANGE) != 0 && (flags & ~(unsigned)RENAME_EXCHANGE) != 0))
        return EINVAL;
    if (source <= -1000 || target <= -1000)
        return (int)(-1000 - (source <= -1000 ? source : target));
    if (source == FSX_ELSEWHERE || target == FSX_ELSEWHERE)
        return EXDEV;
    if (one.last != NAME || other.last != NAME || source == 0 || target == 0)
        return target >= 0 && (flags & RENAME_NOREPLACE) != 0 && (one.last == NAME && source != 0) ? EEXIST : EBUSY;
    if (source < 0)
        return ENOENT;
    if ((flags & RENAME_NOREPLACE) != 0 && target >= 0)
        return EEXIST;
    if ((flags & RENAME_EXCHANGE) != 0 && target < 0)
        return ENOENT;
    const bool is_directory = S_ISDIR(fsx_mode_of(source));
    if (!is_directory && (one.slash || other.slash))
        return ENOTDIR;
    if (is_within(to_way->parent, source))
        return EINVAL;
    if (target >= 0 && (flags & RENAME_EXCHANGE) == 0 && is_within(from_way->parent, target))
        return ENOTEMPTY;
    if (target >= 0 && fsx_output_inode(source) == fsx_output_inode(target))
        return DONE;
    if (!may_change_in(from_way->parent) || !may_change_in(to_way->parent))
        return EACCES;
    if (target >= 0 && (flags & RENAME_EXCHANGE) == 0 && S_ISDIR(fsx_mode_of(target)) != is_directory)
        return is_directory ? ENOTDIR : EISDIR;
    if ((flags & ~(unsigned)RENAME_NOREPLACE) != 0)
        return EINVAL;
    if (!fsx_is_output(source) || (target >= 0 && !fsx_is_output(target)))
        return EROFS;
    return done_or(fsx_output_rename(from_way, to_way, flags));
}

#define TWO(refusal, name, parameters, arguments) \
    FSX_CALL int name parameters {                \
        struct fsx_way one, two;                  \
        const int error = refusal;                \
        return error == DONE ? 0 : error != 0 ? fail(error) : NEXT(name) arguments; \
    }
TWO(rename_here(AT_FDCWD, from, AT_FDCWD, to, 0, &one, &two), rename, (const char *from, const char *to),
    (one.path, two.path))
TWO(rename_here(from_directory, from, to_directory, to, 0, &one, &two), renameat,
    (int from_directory, const char *from, int to_directory, const char *to),
    (from_directory, one.path, to_directory, two.path))
TWO(rename_here(from_directory, from, to_directory, to, flags, &one, &two), renameat2,
    (int from_directory, const char *from, int to_directory, const char *to, unsigned flags),
    (from_directory, one.path, to_directory, two.path, flags))

/* `to` is to be one more name for `from`, which nothing can have here. */
static int refuse_link(int from_directory, const char *from, bool follow, int to_directory, const char *to,
                       struct fsx_way *from_way, struct fsx_way *to_way) {
    from_way->path = from;
    const int64_t entry = fsx_unmounted ? fsx_look_up(from_directory, from, follow, from_way) : FSX_ELSEWHERE;
    if (entry == FSX_NOTHING)
        return from_way->error;
    const int other = refuse_new(to_directory, to, false, to_way);
    if (other == EROFS && fsx_outputs_on()) {
        const bool may = may_change_in(to_way->parent);
        return entry == FSX_ELSEWHERE ? EXDEV : may ? EPERM : EACCES;
    }
    return other != 0 ? other : entry >= 0 ? EXDEV : 0;
}
TWO(refuse_link(AT_FDCWD, from, false, AT_FDCWD, to, &one, &two), link, (const char *from, const char *to),
    (one.path, two.path))
TWO(refuse_link(from_directory, from, (flags & AT_SYMLINK_FOLLOW) != 0, to_directory, to, &one, &two), linkat,
    (int from_directory, const char *from, int to_directory, const char *to, int flags),
    (from_directory, one.path, to_directory, two.path, flags))

/* ---- descriptors --------------------------------------------------------------------------------------------------------- */

/* Of a descriptor that stands for the dataset or an output the kernel would change what stands there: 0 to have it do that. */
static int change_described(int fd, struct fsx_changes changes) {
    const int error = fsx_is_ours(fd) && !fsx_unmounted ? fsx_promote(fd) : 0;
    return error != 0 ? error : fsx_is_ours(fd) ? EROFS : change_open(fd, &changes);
}
static int set_described(int fd, const char *name, const void *value, size_t bytes, int flags) {
    const int64_t entry = fsx_real_entry(fd);
    if (fsx_is_output(entry))
        return done_or(fsx_output_set_attribute(entry, name, value, bytes, flags));
    return change_described(fd, (struct fsx_changes){0});
}
static int remove_described(int fd, const char *name) {
    const int64_t entry = fsx_real_entry(fd);
    return fsx_is_output(entry) ? done_or(fsx_output_remove_attribute(entry, name))
                                : change_described(fd, (struct fsx_changes){0});
}

#define DESCRIBED(change, name, parameters, arguments)                              \
    FSX_CALL int name parameters {                                                  \
        const int error = change;                                                   \
        return error == DONE ? 0 : error != 0 ? fail(error) : NEXT(name) arguments; \
    }
DESCRIBED(change_described(fd, to_mode(mode)), fchmod, (int fd, mode_t mode), (fd, mode))
DESCRIBED(change_described(fd, to_owner(uid, gid)), fchown, (int fd, uid_t uid, gid_t gid), (fd, uid, gid))
DESCRIBED(change_described(fd, to_time(times)), futimens, (int fd, const struct timespec times[2]), (fd, times))
DESCRIBED(change_described(fd, to_microsecond(times)), futimes, (int fd, const struct timeval times[2]), (fd, times))
DESCRIBED(set_described(fd, name, value, bytes, flags), fsetxattr,
          (int fd, const char *name, const void *value, size_t bytes, int flags), (fd, name, value, bytes, flags))
DESCRIBED(remove_described(fd, name), fremovexattr, (int fd, const char *name), (fd, name))
