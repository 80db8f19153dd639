/* files.c: see files.h. */
#include "chunks/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <linux/magic.h>
#include "base/pages.h"

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x80
#endif
#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x2000u
#endif

#define PAGE_BYTES 4096u

/* Window of a local copy that is forgotten as a whole once so much of it has been read: the rest is tar headers, and at
 * most a file or two that come from the disk then. (With 5 of 8 MiB, every third file of the first epoch did.) Windows of
 * very small files, whose headers are a larger part, are left to the kernel. */
#define WINDOW_BYTES (8u << 20)
#define WINDOW_ENOUGH (WINDOW_BYTES / 16u * 15u)

/* Who reads file after file in the order of the partition, perhaps with several threads, gets it read ahead: reads that
 * begin so near to the end of the last one, so many of them in a row, so far ahead. */
#define IN_ORDER_GAP (256u << 10)
#define IN_ORDER_ENOUGH 8u
#define AHEAD_BYTES (8u << 20)

/* What a file is inside. Never changes once it is published, but for what is atomic. */
struct file {
    struct fsx_file public; /* first: a struct fsx_file * is a struct file * */
    int fd;
    int direct_fd; /* the same file for direct I/O; -1 if that is not possible */
    uint32_t direct_align;
    uint8_t *map; /* of a file that can be read directly, only to ask what the page cache has; NULL if there is none */
    size_t map_bytes;
    _Atomic(uint32_t) *consumed; /* with a map: per window, bytes that were taken from the page cache */
    _Atomic(uint64_t) last_end;  /* with a map: where the last read ended, */
    _Atomic(uint32_t) in_order;  /* how many reads in a row went on nearly there, */
    _Atomic(uint64_t) ahead_end; /* and up to where the page cache was asked to read ahead */
    bool memory;               /* it lies in memory anyway (tmpfs) */
    atomic_bool can_dontcache; /* its file system knows RWF_DONTCACHE, as far as is known */
    struct file *replaced;     /* what served the partition before */
};

struct fsx_files {
    uint32_t partitions;
    uint32_t shared_readers;
    _Atomic(uint32_t) reading_shared;
    _Atomic(struct file *) serving[]; /* by partition; NULL: no file here */
};

/* ---- life ------------------------------------------------------------------------------------------------------- */

struct fsx_files *fsx_files_new(uint32_t partitions, uint32_t shared_readers) {
    struct fsx_files *files = calloc(1, sizeof *files + partitions * sizeof files->serving[0]);
    if (files == NULL)
        return NULL;
    files->partitions = partitions;
    files->shared_readers = shared_readers;
    return files;
}

static void close_file(struct file *file) {
    close(file->fd);
    if (file->direct_fd >= 0)
        close(file->direct_fd);
    if (file->map != NULL)
        munmap(file->map, file->map_bytes);
    free((void *)file->consumed);
    free(file);
}

void fsx_files_free(struct fsx_files *files) {
    if (files == NULL)
        return;
    for (uint32_t p = 0; p < files->partitions; p++)
        for (struct file *file = atomic_load(&files->serving[p]), *next; file != NULL; file = next) {
            next = file->replaced;
            close_file(file);
        }
    free(files);
}

/* A second descriptor for direct I/O of a local copy, and its alignment; -1 if its file system cannot. */
static int open_direct(int fd, uint32_t *align) {
    struct statx facts = {0};
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) != 0 || (facts.stx_mask & STATX_DIOALIGN) == 0)
        return -1; /* an old kernel, or no direct I/O: the page cache serves as well */
    /* stx_dio_mem_align and stx_dio_offset_align, which older headers call spare. */
    uint32_t alignment[2];
    memcpy(alignment, (const char *)&facts + 0x98, sizeof alignment);
    if (alignment[1] == 0 || alignment[1] > PAGE_BYTES || alignment[0] > PAGE_BYTES)
        return -1;
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    *align = alignment[1] > alignment[0] ? alignment[1] : alignment[0];
    return open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
}

/* Is this one of the file systems that lie on a disk of this machine? */
static bool is_on_disk(const struct statfs *system) {
    static const long TYPES[] = {0xEF53 /* ext4 */, 0x58465342 /* xfs */, 0x9123683E /* btrfs */, 0xF2F52010 /* f2fs */};
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (system->f_type == TYPES[i])
            return true;
    return false;
}

static void map_file(struct file *file) {
    struct stat facts;
    if (fstat(file->fd, &facts) != 0 || facts.st_size <= 0)
        return;
    file->consumed = calloc((size_t)facts.st_size / WINDOW_BYTES + 1, sizeof *file->consumed);
    void *map = file->consumed == NULL ? MAP_FAILED
                                       : mmap(NULL, (size_t)facts.st_size, PROT_READ, MAP_SHARED, file->fd, 0);
    if (map != MAP_FAILED) {
        file->map = map;
        file->map_bytes = (size_t)facts.st_size;
    }
}

int fsx_files_use(struct fsx_files *files, uint32_t partition, int fd, uint8_t number, bool verified) {
    if (partition >= files->partitions)
        return EINVAL;
    struct file *file = calloc(1, sizeof *file);
    if (file == NULL)
        return ENOMEM;
    file->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (file->fd < 0) {
        const int error = errno;
        free(file);
        return error;
    }
    file->public = (struct fsx_file){.source = number == FSX_FILE_LOCAL ? FSX_LOCAL : FSX_SHARED, .number = number, .verified = verified};
    struct statfs system = {0};
    file->memory = fstatfs(file->fd, &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC);
    atomic_init(&file->can_dontcache, true);
    /* Not for a shared file system: its own caches and read-ahead are what makes it bearable. */
    const bool direct = !file->memory && (file->public.source == FSX_LOCAL || is_on_disk(&system));
    file->direct_fd = direct ? open_direct(file->fd, &file->direct_align) : -1;
    if (file->direct_fd >= 0)
        map_file(file);
    file->replaced = atomic_load(&files->serving[partition]);
    do
        if (file->replaced != NULL && file->replaced->public.number >= number) {
            close_file(file);
            return EEXIST;
        }
    while (!atomic_compare_exchange_weak(&files->serving[partition], &file->replaced, file));
    return 0;
}

const struct fsx_file *fsx_files_find(const struct fsx_files *files, uint32_t partition) {
    return (const struct fsx_file *)atomic_load_explicit(&files->serving[partition], memory_order_acquire);
}

bool fsx_files_begin(struct fsx_files *files, const struct fsx_file *file) {
    if (file->source == FSX_LOCAL || atomic_fetch_add(&files->reading_shared, 1) < files->shared_readers)
        return true;
    atomic_fetch_sub(&files->reading_shared, 1);
    return false;
}

void fsx_files_end(struct fsx_files *files, const struct fsx_file *file) {
    if (file->source != FSX_LOCAL)
        atomic_fetch_sub(&files->reading_shared, 1);
}

/* ---- bytes of a file -------------------------------------------------------------------------------------------- */

static bool pread_exactly(int fd, uint8_t *target, size_t length, uint64_t position) {
    while (length > 0) {
        const ssize_t got = pread(fd, target, length, (off_t)position);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        target += got;
        position += (uint64_t)got;
        length -= (size_t)got;
    }
    return true;
}

/* Direct I/O: the bytes go up to the kernel's cache of the mount and are not wanted twice in memory. True if
 * it was done; `target` has room for the rounding. */
static bool pread_direct(struct file *file, uint8_t *target, size_t length, uint64_t position) {
    const size_t mask = file->direct_align - 1;
    if (file->direct_fd < 0 || (position & mask) != 0 || ((uintptr_t)target & mask) != 0)
        return false;
    const size_t rounded = (length + mask) & ~mask;
    size_t done = 0;
    while (done < length) {
        const ssize_t got = pread(file->direct_fd, target + done, rounded - done, (off_t)(position + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0 || ((size_t)got & mask) != 0)
            return got > 0 && done + (size_t)got >= length; /* the end of the file, or an error: pread tells */
        done += (size_t)got;
    }
    return true;
}

/* Let the page cache forget what was read through it: it is in the cache of the mount now. */
static void drop_behind(const struct file *file, size_t length, uint64_t position) {
    if (!file->memory)
        posix_fadvise(file->fd, (off_t)position, (off_t)length, POSIX_FADV_DONTNEED);
}

/* What staging left in the page cache is forgotten window by window, when most of one has gone up. File by file would
 * cost a call each, and the kernel drops whole folios, with bytes of the neighbours that nobody has read yet. */
static void count_consumed(struct file *file, size_t length, uint64_t position) {
    const uint64_t window = position / WINDOW_BYTES;
    const uint32_t before = atomic_fetch_add_explicit(&file->consumed[window], (uint32_t)length, memory_order_relaxed);
    if (before < WINDOW_ENOUGH && before + length >= WINDOW_ENOUGH)
        drop_behind(file, WINDOW_BYTES, window * WINDOW_BYTES);
}

/* Through the page cache, which forgets it at once where it can be told so beforehand (Linux 6.14; measured: 212 µs for
 * 107 KB from a disk, 250 µs with a call of fadvise afterwards). */
static bool pread_once(struct file *file, uint8_t *target, size_t length, uint64_t position) {
    if (atomic_load_explicit(&file->can_dontcache, memory_order_relaxed)) {
        const struct iovec part = {.iov_base = target, .iov_len = length};
        const ssize_t got = preadv2(file->fd, &part, 1, (off_t)position, RWF_DONTCACHE);
        if (got == (ssize_t)length)
            return true;
        if (got < 0 && (errno == EOPNOTSUPP || errno == EINVAL || errno == ENOSYS))
            atomic_store_explicit(&file->can_dontcache, false, memory_order_relaxed);
    }
    if (!pread_exactly(file->fd, target, length, position))
        return false;
    drop_behind(file, length, position);
    return true;
}

/* Have the page cache read ahead of somebody who reads in order. Nothing depends on it: the numbers need not be exact. */
static void look_ahead(struct file *file, size_t length, uint64_t position) {
    const uint64_t end = position + length;
    const uint64_t last = atomic_exchange_explicit(&file->last_end, end, memory_order_relaxed);
    if ((position > last ? position - last : last - position) > IN_ORDER_GAP) {
        atomic_store_explicit(&file->in_order, 0, memory_order_relaxed);
        return;
    }
    if (atomic_fetch_add_explicit(&file->in_order, 1, memory_order_relaxed) < IN_ORDER_ENOUGH)
        return;
    uint64_t ahead = atomic_load_explicit(&file->ahead_end, memory_order_relaxed);
    const bool useful = ahead > end && ahead - end <= AHEAD_BYTES;
    if (useful && ahead - end > AHEAD_BYTES / 2)
        return;
    const uint64_t start = useful ? ahead : end;
    if (atomic_compare_exchange_strong(&file->ahead_end, &ahead, start + AHEAD_BYTES))
        posix_fadvise(file->fd, (off_t)start, AHEAD_BYTES, POSIX_FADV_WILLNEED);
}

bool fsx_file_read(const struct fsx_file *public, struct fsx_read_counts *counts, uint8_t *target, size_t length,
                   uint64_t position, bool again) {
    struct file *file = (struct file *)public; /* what changes in it is atomic */
    fsx_count_fetch(counts, public->source, length);
    if (again || file->memory)
        return pread_exactly(file->fd, target, length, position);
    if (file->map == NULL)
        return pread_once(file, target, length, position);
    look_ahead(file, length, position);
    /* What staging has left in the page cache is taken from there, and forgotten. (Copied, not sent out of the map: the
     * page faults cost more than the copy, 7,000 against 9,000 files/s, and mapped pages cannot be forgotten. Not asked with
     * RWF_NOWAIT: that starts to read what is missing, and direct I/O then waits for it: 306 µs instead of 163.) */
    if (position + length <= file->map_bytes && fsx_pages_resident(file->map + position, length)) {
        if (!pread_exactly(file->fd, target, length, position))
            return false;
        count_consumed(file, length, position);
        return true;
    }
    if (pread_direct(file, target, length, position)) {
        FSX_ADD(counts->direct, 1);
        return true;
    }
    return pread_once(file, target, length, position);
}

bool fsx_file_waits(const struct fsx_file *public, uint64_t position, size_t length) {
    const struct file *file = (const struct file *)public;
    if (file->memory)
        return false;
    return file->map == NULL || position + length > file->map_bytes || !fsx_pages_resident(file->map + position, length);
}
