/* calls_stat.c: what programs call to look at files: both generations of stat, statx, access; see preload.h. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "preload/next.h"
#include "preload/outputs.h"
#include "preload/preload.h"

#define BLOCK_BYTES 4096 /* as native/fuse/fuse_meta.c has it */
#define NANOSECONDS 1000000000

_Static_assert(sizeof(struct stat) == sizeof(struct stat64), "one layout on 64 bits");

/* Of the control directory and what is in it, without a mount. 0 or an errno. */
static int fill_control(int64_t entry, struct stat *about) {
    memset(about, 0, sizeof *about);
    about->st_dev = fsx_at.state->device;
    about->st_ino = (ino_t)entry + 1;
    about->st_mode = fsx_mode_of(entry);
    about->st_nlink = S_ISDIR(about->st_mode) ? 2 : 1;
    about->st_uid = fsx_at.state->uid;
    about->st_gid = fsx_at.state->gid;
    about->st_blksize = BLOCK_BYTES;
    clock_gettime(CLOCK_REALTIME_COARSE, &about->st_mtim);
    about->st_atim = about->st_ctim = about->st_mtim;
    const char *target;
    char room[FSX_STATE_PATH];
    if (S_ISLNK(about->st_mode))
        about->st_size = (off_t)fsx_link_target(entry, room, &target);
    if (!S_ISREG(about->st_mode))
        return 0;
    const int fd = fsx_open_control(entry, O_RDONLY | O_CLOEXEC); /* it is made when it is asked for */
    if (fd < 0)
        return errno;
    about->st_size = (off_t)syscall(SYS_lseek, fd, 0, SEEK_END);
    syscall(SYS_close, fd);
    about->st_blocks = (about->st_size + 511) / 512;
    return 0;
}

static void fill(const struct fsx_about *said, struct stat *about) {
    int64_t seconds = said->mtime_ns / NANOSECONDS, rest = said->mtime_ns % NANOSECONDS;
    if (rest < 0) {
        rest += NANOSECONDS;
        seconds--;
    }
    memset(about, 0, sizeof *about);
    about->st_dev = fsx_at.state->device;
    about->st_ino = said->inode;
    about->st_mode = said->mode;
    about->st_nlink = said->nlink;
    about->st_uid = fsx_at.state->uid;
    about->st_gid = fsx_at.state->gid;
    about->st_size = (off_t)said->size;
    about->st_blksize = BLOCK_BYTES;
    about->st_blocks = (blkcnt_t)said->blocks;
    about->st_atim = about->st_mtim = about->st_ctim = (struct timespec){.tv_sec = seconds, .tv_nsec = rest};
}

/* What the index says of an entry. */
static struct fsx_about indexed(uint32_t entry) {
    const struct fsx_index *x = &fsx_at.index;
    return (struct fsx_about){.inode = (uint64_t)x->inode[entry] + 1,
                              .size = x->size[entry],
                              .blocks = (x->size[entry] + 511) / 512,
                              .mtime_ns = x->mtime[entry],
                              .mode = x->mode[entry],
                              .nlink = x->nlink[entry]};
}

/* What is to be done with a call that looks at a name: answered with 0; with an error; or passed on, for way->path. */
enum { ANSWERED, FAILED, PASSED };

static int failed(int error) {
    errno = error;
    return FAILED;
}

/* The entry that is looked at, without a mount. `flags` as of fstatat. */
static int look_unmounted(int directory, const char *path, int flags, struct fsx_way *way, int64_t *entry) {
    if ((flags & AT_EMPTY_PATH) != 0 && path != NULL && path[0] == '\0') {
        struct fsx_file file;
        way->about.inode = 0;
        *entry = fsx_find(directory, &file) ? (int64_t)file.entry
                 : directory == AT_FDCWD    ? fsx_directory_entry(directory)
                                            : fsx_real_entry(directory);
        return *entry < 0 ? PASSED : ANSWERED;
    }
    *entry = fsx_look_up(directory, path, (flags & AT_SYMLINK_NOFOLLOW) == 0, way);
    if (*entry == FSX_ELSEWHERE) {
        fsx_promote_named(way->path);
        return PASSED;
    }
    fsx_count(FSX_STATS, 1);
    FSX_LOG("stat", path, *entry, "answered");
    return *entry < 0 ? failed(way->error) : ANSWERED;
}

/* The same with or without one. */
static int look_at(int directory, const char *path, int flags, struct fsx_way *way, int64_t *found) {
    way->path = path;
    const bool empty = (flags & AT_EMPTY_PATH) != 0 && path != NULL && path[0] == '\0';
    if (!empty && directory != AT_FDCWD && directory >= 0 && path != NULL && path[0] != '/')
        fsx_promote(directory);
    if (fsx_unmounted)
        return look_unmounted(directory, path, flags, way, found);
    if (empty) {
        struct fsx_file file;
        *found = fsx_find(directory, &file) ? (int64_t)file.entry : -1;
        return *found < 0 ? PASSED : ANSWERED;
    }
    const int64_t entry = *found = fsx_resolve(directory, path);
    if (entry == FSX_ELSEWHERE) {
        fsx_promote_named(path);
        return PASSED;
    }
    const uint32_t mode = entry >= 0 ? fsx_at.index.mode[entry] : 0;
    const bool followed = S_ISLNK(mode) && (flags & AT_SYMLINK_NOFOLLOW) == 0;
    const bool mixed = S_ISDIR(mode) && fsx_at.state->writable != 0; /* its times change with outputs in it */
    if (entry >= 0 && !followed && !mixed) {
        fsx_count(FSX_STATS, 1);
        FSX_LOG("stat", path, entry, "answered");
        return ANSWERED;
    }
    fsx_count(FSX_PASSED, 1);
    FSX_LOG("stat", path, flags, "passed to the mount");
    return PASSED;
}

/* `known`: what was said of an output when it was looked up; NULL for nothing. */
static int fill_any(int64_t entry, const struct fsx_about *known, void *about) {
    if (fsx_is_control(entry)) {
        const int error = fill_control(entry, about);
        return error == 0 ? ANSWERED : failed(error);
    }
    struct fsx_about said;
    /* Directories of the dataset change with outputs in them. */
    if (fsx_outputs_on() && (fsx_is_output(entry) || S_ISDIR(fsx_mode_of(entry)))) {
        const bool is_known = known != NULL && known->inode == fsx_output_inode(entry);
        const int error = is_known ? 0 : fsx_output_about(entry, &said);
        if (error != 0)
            return failed(error);
        if (is_known)
            said = *known;
    } else {
        said = indexed((uint32_t)entry);
    }
    fill(&said, about);
    return ANSWERED;
}

/* The same of something that is open. What an output is like that has lost its name, or whose daemon has ended, the kernel knows
 * alone; and how long it is, in any case: another node may have made a newer content known, which is another file. */
static int fill_open(int fd, int64_t entry, struct stat *about) {
    const int done = fill_any(entry, NULL, about);
    const int kept = errno;
    struct stat content;
    if (!fsx_is_output(entry) || !S_ISREG(fsx_output_mode(entry)) || syscall(SYS_fstat, fd, &content) != 0)
        return done;
    errno = kept;
    if (done == ANSWERED) {
        about->st_size = content.st_size;
        about->st_blocks = content.st_blocks;
        return done;
    }
    *about = content;
    about->st_dev = fsx_at.state->device;
    about->st_ino = fsx_output_inode(entry);
    about->st_nlink = 0;
    about->st_blksize = BLOCK_BYTES;
    return ANSWERED;
}

static int stat_here(int directory, const char *path, int flags, void *about, struct fsx_way *way) {
    int64_t entry;
    const int done = look_at(directory, path, flags, way, &entry);
    if (done == ANSWERED && path != NULL && path[0] == '\0' && fsx_unmounted)
        return fill_open(directory, entry, about);
    return done == ANSWERED ? fill_any(entry, &way->about, about) : done;
}

/* 1: not ours. */
static int fstat_here(int fd, void *about) {
    struct fsx_file file;
    const int64_t entry = fsx_is_ours(fd) && fsx_find(fd, &file) ? (int64_t)file.entry : fsx_real_entry(fd);
    if (entry < 0)
        return 1;
    return -fill_open(fd, entry, about);
}

/* The result of a call; `next` passes it on. */
#define RESULT(done, next) ((done) == PASSED ? (next) : -(done))

#define STAT(name, type, flags)                                                \
    FSX_CALL int name(const char *path, struct type *about) {                  \
        struct fsx_way way;                                                    \
        const int done = stat_here(AT_FDCWD, path, flags, about, &way);        \
        return RESULT(done, NEXT(name)(way.path, about));                      \
    }
STAT(stat, stat, 0)
STAT(stat64, stat64, 0)
STAT(lstat, stat, AT_SYMLINK_NOFOLLOW)
STAT(lstat64, stat64, AT_SYMLINK_NOFOLLOW)
FSX_CALL int fstat(int fd, struct stat *about) {
    const int done = fstat_here(fd, about);
    return done <= 0 ? done : NEXT(fstat)(fd, about);
}
FSX_CALL int fstat64(int fd, struct stat64 *about) {
    const int done = fstat_here(fd, about);
    return done <= 0 ? done : NEXT(fstat64)(fd, about);
}

#define FSTATAT(name, type)                                                                 \
    FSX_CALL int name(int directory, const char *path, struct type *about, int flags) {     \
        struct fsx_way way;                                                                 \
        const int done = stat_here(directory, path, flags, about, &way);                    \
        return RESULT(done, NEXT(name)(directory, way.path, about, flags));                 \
    }
FSTATAT(fstatat, stat)
FSTATAT(fstatat64, stat64)

/* The generation before glibc 2.33, which wheels are still built for. */
#define XSTAT(name, follow)                                                             \
    FSX_CALL int name(int version, const char *path, void *about);                      \
    FSX_CALL int name(int version, const char *path, void *about) {                     \
        struct fsx_way way;                                                             \
        const int done = stat_here(AT_FDCWD, path, follow, about, &way);                \
        return RESULT(done, NEXT_AS(int (*)(int, const char *, void *), name)(version, way.path, about)); \
    }
XSTAT(__xstat, 0)
XSTAT(__xstat64, 0)
XSTAT(__lxstat, AT_SYMLINK_NOFOLLOW)
XSTAT(__lxstat64, AT_SYMLINK_NOFOLLOW)

#define FXSTAT(name)                                                                                     \
    FSX_CALL int name(int version, int fd, void *about);                                                 \
    FSX_CALL int name(int version, int fd, void *about) {                                                \
        const int done = fstat_here(fd, about);                                                          \
        return done <= 0 ? done : NEXT_AS(int (*)(int, int, void *), name)(version, fd, about);          \
    }
FXSTAT(__fxstat)
FXSTAT(__fxstat64)

#define FXSTATAT(name)                                                                                              \
    FSX_CALL int name(int version, int directory, const char *path, void *about, int flags);                        \
    FSX_CALL int name(int version, int directory, const char *path, void *about, int flags) {                       \
        struct fsx_way way;                                                                                         \
        const int done = stat_here(directory, path, flags, about, &way);                                            \
        return RESULT(done, NEXT_AS(int (*)(int, int, const char *, void *, int), name)(version, directory, way.path, about, flags)); \
    }
FXSTATAT(__fxstatat)
FXSTATAT(__fxstatat64)

/* What the kernel says of the mount itself, for fields that the index does not have; asked once. */
static const struct statx *of_mount(void) {
    static struct statx about;
    static _Atomic int known; /* 0 no, 1 being asked, 2 yes */
    if (atomic_load_explicit(&known, memory_order_acquire) == 2)
        return &about;
    int unknown = 0;
    if (!atomic_compare_exchange_strong(&known, &unknown, 1))
        return NULL;
    const int kept = errno;
    const bool got =
        syscall(SYS_statx, AT_FDCWD, fsx_at.state->point[0], AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &about) == 0;
    errno = kept;
    atomic_store_explicit(&known, got ? 2 : 0, memory_order_release);
    return got ? &about : NULL;
}

static struct statx_timestamp timestamp(struct timespec time) {
    return (struct statx_timestamp){.tv_sec = time.tv_sec, .tv_nsec = (uint32_t)time.tv_nsec};
}

/* The same without one: what a mount of FUSE says of itself. */
static const struct statx *of_nothing(void) {
    static const struct statx about = {
        .stx_mask = STATX_BASIC_STATS, .stx_attributes = 0x2000, .stx_attributes_mask = 0x203000};
    return &about;
}

FSX_CALL int statx(int directory, const char *restrict path, int flags, unsigned mask, struct statx *restrict target) {
    /* More than these fields, and fields that are to be fresh from a server, are the mount's affair. */
    const bool plain = (mask & ~(STATX_BASIC_STATS | STATX_BTIME | 0x1000u /* STATX_MNT_ID */)) == 0;
    struct fsx_way way = {.path = path};
    const struct statx *mount = NULL;
    if (fsx_unmounted)
        mount = of_nothing();
    else if (plain && atomic_load(&fsx_on))
        mount = of_mount();
    int64_t entry = -1;
    struct stat about;
    int done = mount == NULL ? PASSED : look_at(directory, path, flags, &way, &entry);
    if (done == ANSWERED && path[0] == '\0')
        done = fill_open(directory, entry, &about);
    else if (done == ANSWERED)
        done = fill_any(entry, &way.about, &about);
    if (done == FAILED)
        return -1;
    if (done == PASSED) {
        if ((flags & AT_EMPTY_PATH) != 0)
            fsx_promote(directory);
        return NEXT(statx)(directory, way.path, flags, mask, target);
    }
    *target = *mount; /* device, what attributes there are, number of the mount */
    target->stx_attributes &= ~(uint64_t)0x2000; /* STATX_ATTR_MOUNT_ROOT */
    if (fsx_unmounted) {
        target->stx_dev_major = major(about.st_dev);
        target->stx_dev_minor = minor(about.st_dev);
    }
    target->stx_mode = (uint16_t)about.st_mode;
    target->stx_nlink = (uint32_t)about.st_nlink;
    target->stx_ino = about.st_ino;
    target->stx_size = (uint64_t)about.st_size;
    target->stx_blocks = (uint64_t)about.st_blocks;
    target->stx_blksize = BLOCK_BYTES;
    target->stx_uid = about.st_uid;
    target->stx_gid = about.st_gid;
    target->stx_atime = target->stx_mtime = target->stx_ctime = timestamp(about.st_mtim);
    if (entry == 0)
        target->stx_attributes |= 0x2000;
    return 0;
}

/* ---- access ------------------------------------------------------------------------------------------------------------- */

/* With a mount: is it sure that a file is there and, if that is asked, can be read? Otherwise the mount says. */
static int check_access(int directory, const char *path, int mode, int flags, struct fsx_way *way) {
    way->path = path;
    if (!fsx_unmounted && (mode & ~(R_OK | F_OK)) != 0)
        return PASSED;
    if ((mode & ~(R_OK | W_OK | X_OK)) != 0)
        return PASSED; /* nonsense, which the kernel says */
    int64_t entry;
    const int done = look_at(directory, path, flags & (fsx_unmounted ? ~0 : ~AT_EMPTY_PATH), way, &entry);
    if (done != ANSWERED)
        return done;
    if (!fsx_unmounted)
        return (mode & R_OK) == 0 || (fsx_at.index.mode[entry] & S_IRUSR) != 0 ? ANSWERED : PASSED;
    if ((mode & W_OK) != 0 && !fsx_outputs_on())
        return failed(EROFS);
    const bool may = ((mode & R_OK) == 0 || fsx_may(entry, S_IRUSR)) && ((mode & W_OK) == 0 || fsx_may(entry, S_IWUSR)) &&
                     ((mode & X_OK) == 0 || fsx_may(entry, S_IXUSR));
    return may ? ANSWERED : failed(EACCES);
}

#define ACCESS(name)                                                        \
    FSX_CALL int name(const char *path, int mode) {                         \
        struct fsx_way way;                                                 \
        const int done = check_access(AT_FDCWD, path, mode, 0, &way);       \
        return RESULT(done, NEXT(name)(way.path, mode));                    \
    }
ACCESS(access)
ACCESS(euidaccess)
ACCESS(eaccess)
FSX_CALL int faccessat(int directory, const char *path, int mode, int flags) {
    struct fsx_way way;
    const int done = check_access(directory, path, mode, flags, &way);
    return RESULT(done, NEXT(faccessat)(directory, way.path, mode, flags));
}
