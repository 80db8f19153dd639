/* calls_read.c: what programs call to read and to seek; see preload.h. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <sys/uio.h>
#include <unistd.h>

#include "preload/next.h"
#include "preload/preload.h"

/* What the kernel reads at most in one call. */
#define READ_MOST 0x7ffff000u

/* Result of a call when the descriptor is a real one by now, or may be: look again. */
#define REAL_NOW (-2)

/* The mount is to answer, because these bytes are not here or not right. */
static ssize_t give_up(int fd) {
    const int error = fsx_promote(fd);
    if (error == 0)
        return REAL_NOW;
    errno = error;
    return -1;
}

static ssize_t counted(ssize_t bytes) {
    fsx_count(FSX_READS, 1);
    fsx_count(FSX_BYTES, (uint64_t)bytes);
    return bytes;
}

/* From the offset of the descriptor on. */
static ssize_t read_on(int fd, const struct fsx_file *file, const struct iovec *parts, int count) {
    uint64_t wanted = 0;
    for (int i = 0; i < count; i++)
        wanted += parts[i].iov_len;
    uint64_t from;
    const int64_t taken =
        fsx_take(fd, file, wanted < READ_MOST ? wanted : READ_MOST, fsx_at.index.size[file->entry], &from);
    if (taken < 0)
        return REAL_NOW;
    uint64_t done = 0;
    for (int i = 0; i < count && done < (uint64_t)taken; i++) {
        const uint64_t left = (uint64_t)taken - done;
        const size_t part = parts[i].iov_len < left ? parts[i].iov_len : (size_t)left;
        if (part > 0 && !fsx_bytes_read(file->entry, from + done, parts[i].iov_base, part)) {
            fsx_untake(fd, file, from, (uint64_t)taken);
            return give_up(fd);
        }
        done += part;
    }
    return counted(taken);
}

/* From a given offset on. */
static ssize_t read_at(int fd, const struct fsx_file *file, const struct iovec *parts, int count, off_t offset) {
    if (offset < 0) {
        errno = EINVAL;
        return -1;
    }
    const uint64_t size = fsx_at.index.size[file->entry];
    uint64_t left = (uint64_t)offset < size ? size - (uint64_t)offset : 0;
    if (left > READ_MOST)
        left = READ_MOST;
    uint64_t done = 0;
    for (int i = 0; i < count && left > 0; i++) {
        const size_t part = parts[i].iov_len < left ? parts[i].iov_len : (size_t)left;
        if (part > 0 && !fsx_bytes_read(file->entry, (uint64_t)offset + done, parts[i].iov_base, part))
            return give_up(fd);
        done += part;
        left -= part;
    }
    return counted((ssize_t)done);
}

FSX_CALL ssize_t read(int fd, void *target, size_t bytes) {
    struct fsx_file file;
    while (fsx_is_ours(fd) && fsx_find(fd, &file)) {
        const ssize_t got = read_on(fd, &file, &(struct iovec){target, bytes}, 1);
        if (got != REAL_NOW)
            return got;
    }
    return NEXT(read)(fd, target, bytes);
}

FSX_CALL ssize_t __read_chk(int fd, void *target, size_t bytes, size_t room);
FSX_CALL ssize_t __read_chk(int fd, void *target, size_t bytes, size_t room) {
    struct fsx_file file;
    while (bytes <= room && fsx_is_ours(fd) && fsx_find(fd, &file)) {
        const ssize_t got = read_on(fd, &file, &(struct iovec){target, bytes}, 1);
        if (got != REAL_NOW)
            return got;
    }
    return NEXT_AS(ssize_t (*)(int, void *, size_t, size_t), __read_chk)(fd, target, bytes, room);
}

#define PREAD(name)                                                                            \
    FSX_CALL ssize_t name(int fd, void *target, size_t bytes, off_t offset) {                  \
        struct fsx_file file;                                                                  \
        while (fsx_is_ours(fd) && fsx_find(fd, &file)) {                                       \
            const ssize_t got = read_at(fd, &file, &(struct iovec){target, bytes}, 1, offset); \
            if (got != REAL_NOW)                                                               \
                return got;                                                                    \
        }                                                                                      \
        return NEXT(name)(fd, target, bytes, offset);                                          \
    }
PREAD(pread)
PREAD(pread64)

#define PREAD_CHK(name)                                                                                         \
    FSX_CALL ssize_t name(int fd, void *target, size_t bytes, off_t offset, size_t room);                       \
    FSX_CALL ssize_t name(int fd, void *target, size_t bytes, off_t offset, size_t room) {                      \
        struct fsx_file file;                                                                                   \
        while (bytes <= room && fsx_is_ours(fd) && fsx_find(fd, &file)) {                                       \
            const ssize_t got = read_at(fd, &file, &(struct iovec){target, bytes}, 1, offset);                  \
            if (got != REAL_NOW)                                                                                \
                return got;                                                                                     \
        }                                                                                                       \
        return NEXT_AS(ssize_t (*)(int, void *, size_t, off_t, size_t), name)(fd, target, bytes, offset, room); \
    }
PREAD_CHK(__pread_chk)
PREAD_CHK(__pread64_chk)

static bool is_list(const struct iovec *parts, int count) { return parts != NULL && count >= 0 && count <= IOV_MAX; }

FSX_CALL ssize_t readv(int fd, const struct iovec *parts, int count) {
    struct fsx_file file;
    while (fsx_is_ours(fd) && fsx_find(fd, &file)) {
        const ssize_t got = is_list(parts, count) ? read_on(fd, &file, parts, count) : give_up(fd);
        if (got != REAL_NOW)
            return got;
    }
    return NEXT(readv)(fd, parts, count);
}

#define PREADV(name)                                                                                            \
    FSX_CALL ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) {                         \
        struct fsx_file file;                                                                                   \
        while (fsx_is_ours(fd) && fsx_find(fd, &file)) {                                                        \
            const ssize_t got = is_list(parts, count) ? read_at(fd, &file, parts, count, offset) : give_up(fd); \
            if (got != REAL_NOW)                                                                                \
                return got;                                                                                     \
        }                                                                                                       \
        return NEXT(name)(fd, parts, count, offset);                                                            \
    }
PREADV(preadv)
PREADV(preadv64)

#define PREADV2(name)                                                                              \
    FSX_CALL ssize_t name(int fd, const struct iovec *parts, int count, off_t offset, int flags) { \
        struct fsx_file file;                                                                      \
        while (fsx_is_ours(fd) && fsx_find(fd, &file)) {                                           \
            const bool plain = flags == 0 && offset >= 0 && is_list(parts, count);                 \
            const ssize_t got = plain ? read_at(fd, &file, parts, count, offset) : give_up(fd);    \
            if (got != REAL_NOW)                                                                   \
                return got;                                                                        \
        }                                                                                          \
        return NEXT(name)(fd, parts, count, offset, flags);                                        \
    }
PREADV2(preadv2)
PREADV2(preadv64v2)

/* The new offset, -1 with errno, or REAL_NOW. */
static off_t seek(int fd, const struct fsx_file *file, off_t offset, int whence) {
    for (;;) {
        const int64_t now = fsx_tell(fd, file);
        if (now < 0)
            return REAL_NOW;
        int64_t base;
        switch (whence) {
        case SEEK_SET: base = 0; break;
        case SEEK_CUR: base = now; break;
        case SEEK_END: base = (int64_t)fsx_at.index.size[file->entry]; break;
        default: return give_up(fd); /* holes, and what there is not */
        }
        int64_t to;
        if (__builtin_add_overflow(base, (int64_t)offset, &to)) {
            errno = EINVAL;
            return -1;
        }
        if (to < 0) {
            errno = EINVAL;
            return -1;
        }
        if (to == now || fsx_seek(fd, file, now, to))
            return to;
    }
}

#define LSEEK(name)                                           \
    FSX_CALL off_t name(int fd, off_t offset, int whence) {   \
        struct fsx_file file;                                 \
        while (fsx_is_ours(fd) && fsx_find(fd, &file)) {      \
            const off_t at = seek(fd, &file, offset, whence); \
            if (at != REAL_NOW)                               \
                return at;                                    \
        }                                                     \
        return NEXT(name)(fd, offset, whence);                \
    }
LSEEK(lseek)
LSEEK(lseek64)
