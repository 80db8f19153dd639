/* content.c: see content.h. */
#include "content.h"

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
#include "chunk.h"
#include "pages.h"

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x80
#endif
#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x2000u
#endif

#define PAGE_BYTES 4096u
#define HUGE_BYTES (2u << 20)
/* Room for an answer, and for the longest stored chunk (docs/format.md), with the rounding of direct I/O. */
#define ANSWER_ROOM HUGE_BYTES
#define STORED_ROOM (3u * HUGE_BYTES)
_Static_assert(FSX_ANSWER_BYTES + PAGE_BYTES <= ANSWER_ROOM && FSX_CHUNK_BYTES + 2 * PAGE_BYTES <= STORED_ROOM,
               "an answer and a stored chunk fit");

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

/* One file that holds a partition. Never changes once it is published, but for what is atomic. */
struct file {
    int fd;
    int direct_fd; /* the same file for I/O round the page cache; -1 if that is not possible */
    uint32_t direct_align;
    uint8_t *map; /* of a file that can be read directly, only to ask what the page cache has; NULL if there is none */
    size_t map_bytes;
    _Atomic(uint32_t) *consumed; /* with a map: per window, bytes that were taken from the page cache */
    _Atomic(uint64_t) last_end;  /* with a map: where the last read ended, */
    _Atomic(uint32_t) in_order;  /* how many reads in a row went on nearly there, */
    _Atomic(uint64_t) ahead_end; /* and up to where the page cache was asked to read ahead */
    uint8_t number;
    bool verified;
    bool memory;               /* it lies in memory anyway (tmpfs) */
    atomic_bool can_dontcache; /* its file system knows RWF_DONTCACHE, as far as is known */
    enum fsx_origin origin;
    struct file *replaced; /* what served the partition before */
};

struct fsx_content {
    const struct fsx_index *index;
    _Atomic(uint8_t) *marks;
    enum fsx_verify verify;
    struct fsx_cache *cache;
    _Atomic(struct file *) *files; /* by partition; NULL: Python's */
    uint32_t shared_readers;
    _Atomic(uint32_t) reading_shared;
};

_Static_assert(sizeof(_Atomic(uint8_t)) == 1, "marks are shared with Python");

/* ---- life ------------------------------------------------------------------------------------------------------- */

/* Memory in huge pages where the kernel has them: contiguous, so that direct I/O is one request to the disk instead of
 * one per page (some virtual disks take no more than one segment per request). */
static uint8_t *take_memory(size_t bytes) {
    uint8_t *memory = aligned_alloc(HUGE_BYTES, bytes);
    if (memory != NULL)
        madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

uint8_t *fsx_answer_room(void) { return take_memory(ANSWER_ROOM); }

bool fsx_hands_make(struct fsx_hands *hands) {
    memset(hands, 0, sizeof *hands);
    hands->answer = fsx_answer_room();
    hands->stored = take_memory(STORED_ROOM);
    return hands->answer != NULL && hands->stored != NULL;
}

void fsx_hands_free(struct fsx_hands *hands) {
    free(hands->answer);
    free(hands->stored);
    hands->answer = hands->stored = NULL;
}

struct fsx_content *fsx_content_new(const struct fsx_index *index, uint8_t *marks, enum fsx_verify verify,
                                    uint64_t cache_bytes, uint32_t shared_readers) {
    struct fsx_content *content = calloc(1, sizeof *content);
    if (content == NULL)
        return NULL;
    content->index = index;
    content->marks = (_Atomic(uint8_t) *)marks;
    content->verify = verify;
    content->shared_readers = shared_readers;
    content->files = calloc((size_t)index->partitions + 1, sizeof *content->files);
    content->cache = fsx_cache_new(cache_bytes);
    if (content->files == NULL || content->cache == NULL) {
        fsx_content_free(content);
        return NULL;
    }
    return content;
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

void fsx_content_free(struct fsx_content *content) {
    if (content == NULL)
        return;
    for (uint32_t p = 0; content->files != NULL && p < content->index->partitions; p++)
        for (struct file *file = atomic_load(&content->files[p]), *next; file != NULL; file = next) {
            next = file->replaced;
            close_file(file);
        }
    free(content->files);
    fsx_cache_free(content->cache);
    free(content);
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

int fsx_content_use(struct fsx_content *content, uint32_t partition, int fd, uint8_t number, bool verified) {
    if (partition >= content->index->partitions)
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
    file->number = number;
    file->verified = verified;
    file->origin = number == 2 ? FSX_LOCAL : FSX_SHARED;
    struct statfs system = {0};
    file->memory = fstatfs(file->fd, &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC);
    atomic_init(&file->can_dontcache, true);
    /* Not for a shared file system: its own caches and read-ahead are what makes it bearable. */
    const bool direct = !file->memory && (file->origin == FSX_LOCAL || is_on_disk(&system));
    file->direct_fd = direct ? open_direct(file->fd, &file->direct_align) : -1;
    if (file->direct_fd >= 0)
        map_file(file);
    file->replaced = atomic_load(&content->files[partition]);
    do
        if (file->replaced != NULL && file->replaced->number >= number) {
            close_file(file);
            return EEXIST;
        }
    while (!atomic_compare_exchange_weak(&content->files[partition], &file->replaced, file));
    return 0;
}

struct fsx_cache *fsx_content_cache(struct fsx_content *content) { return content->cache; }

const struct fsx_index *fsx_content_index(const struct fsx_content *content) { return content->index; }

bool fsx_content_has_file(const struct fsx_content *content, uint32_t partition) {
    return atomic_load_explicit(&content->files[partition], memory_order_acquire) != NULL;
}

bool fsx_content_checks(const struct fsx_content *content) { return content->verify != FSX_VERIFY_NEVER; }

void fsx_read_counts_add(struct fsx_read_counts *sum, const struct fsx_read_counts *part) {
    uint64_t *sums = (uint64_t *)sum;
    const uint64_t *parts = (const uint64_t *)part;
    for (size_t i = 0; i < sizeof *sum / sizeof *sums; i++)
        sums[i] += FSX_COUNTED(parts[i]);
}
_Static_assert(sizeof(struct fsx_read_counts) % sizeof(uint64_t) == 0, "it is an array of 64-bit numbers");

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

/* Round the page cache: the bytes go up to the kernel's cache of the mount and are not wanted twice in memory. True if
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

/* `length` bytes at `position` into `target`, which has room for a page more. `again`: they will be read once more soon,
 * so the page cache should have them. */
static bool read_stored(struct fsx_hands *hands, struct file *file, uint8_t *target, size_t length, uint64_t position,
                        bool again) {
    struct fsx_read_counts *counts = &hands->counts;
    FSX_COUNT(counts->origin[file->origin].fetches, 1);
    FSX_COUNT(counts->origin[file->origin].fetched_bytes, length);
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
        FSX_COUNT(counts->direct, 1);
        return true;
    }
    return pread_once(file, target, length, position);
}

/* ---- chunks ----------------------------------------------------------------------------------------------------- */

int fsx_content_keep(struct fsx_content *content, uint32_t entry, uint32_t number, const void *data, size_t bytes) {
    const struct fsx_index *x = content->index;
    if (entry >= x->entries || !S_ISREG(x->mode[entry]) || number >= (x->count[entry] > 0 ? x->count[entry] : 1) ||
        fsx_chunk_of(x, entry, number).content_bytes != bytes)
        return EINVAL;
    bool claimed;
    struct fsx_cached *cached = fsx_cache_claim(content->cache, entry, number, bytes, &claimed);
    if (cached == NULL)
        return ENOMEM;
    if (claimed) {
        memcpy(cached->data, data, bytes);
        fsx_cache_publish(content->cache, cached, true);
    }
    fsx_cache_release(content->cache, cached);
    return 0;
}

static bool must_check(const struct fsx_content *content, const struct file *file, const struct fsx_stored *chunk) {
    if (content->verify == FSX_VERIFY_NEVER)
        return false;
    if (content->verify == FSX_VERIFY_ALWAYS)
        return true;
    return !file->verified && atomic_load_explicit(&content->marks[chunk->mark], memory_order_relaxed) != file->number;
}

/* The whole content of a chunk into `target`, which has room for it and a page more. */
static bool load(struct fsx_content *content, struct fsx_hands *hands, struct file *file, const struct fsx_stored *chunk,
                 uint8_t *target, bool again) {
    uint8_t *stored = chunk->lz4 ? hands->stored : target;
    if (!read_stored(hands, file, stored, chunk->stored_bytes, chunk->position, again))
        return false;
    if (must_check(content, file, chunk)) {
        if (!fsx_chunk_is_intact(chunk, stored))
            return false;
        atomic_store_explicit(&content->marks[chunk->mark], file->number, memory_order_relaxed);
        FSX_COUNT(hands->counts.checked_chunks, 1);
        FSX_COUNT(hands->counts.checked_bytes, chunk->stored_bytes);
    }
    return !chunk->lz4 || fsx_chunk_decode(chunk, stored, target);
}

void fsx_content_count_read(struct fsx_hands *hands, enum fsx_origin origin, size_t bytes) {
    FSX_COUNT(hands->counts.origin[origin].reads, 1);
    FSX_COUNT(hands->counts.origin[origin].bytes, bytes);
}

/* A part of a chunk through the cache; others that want the same chunk wait for it. */
static bool read_through_cache(struct fsx_content *content, struct fsx_hands *hands, struct file *file, uint32_t entry,
                               uint32_t number, const struct fsx_stored *chunk, size_t start, size_t length,
                               uint8_t *target, enum fsx_origin *origin) {
    bool claimed;
    struct fsx_cached *cached = fsx_cache_claim(content->cache, entry, number, chunk->content_bytes, &claimed);
    if (cached == NULL)
        return false;
    if (claimed) {
        /* Plain bytes that are known to be right are read piece by piece from now on, from the page cache. */
        const bool keep = chunk->lz4 || content->verify == FSX_VERIFY_ALWAYS;
        if (!load(content, hands, file, chunk, cached->data, !keep)) {
            fsx_cache_abandon(content->cache, cached);
            return false;
        }
        fsx_cache_publish(content->cache, cached, keep);
    }
    memcpy(target, cached->data + start, length);
    fsx_cache_release(content->cache, cached);
    *origin = claimed ? file->origin : FSX_CACHE;
    return true;
}

/* A part of what is in the cache already; what Python fetched from other nodes is found like this. */
static bool read_cached(struct fsx_content *content, uint32_t entry, uint32_t number, size_t start, size_t length,
                        uint8_t *target) {
    struct fsx_cached *cached = fsx_cache_find(content->cache, entry, number);
    if (cached == NULL)
        return false;
    const bool fits = start + length <= cached->bytes;
    if (fits)
        memcpy(target, cached->data + start, length);
    fsx_cache_release(content->cache, cached);
    return fits;
}

/* A part of a chunk into `target`, which has room for a page more; `*origin` is where it was. */
static bool read_part(struct fsx_content *content, struct fsx_hands *hands, uint32_t entry, uint32_t number,
                      size_t start, size_t length, uint8_t *target, enum fsx_origin *origin) {
    const struct fsx_index *x = content->index;
    struct file *file = atomic_load_explicit(&content->files[x->part[entry]], memory_order_acquire);
    *origin = FSX_CACHE;
    if (file == NULL)
        return read_cached(content, entry, number, start, length, target);
    const struct fsx_stored chunk = fsx_chunk_of(x, entry, number);
    const bool whole = start == 0 && length == chunk.content_bytes;
    const bool plain = !chunk.lz4 && !must_check(content, file, &chunk);
    if (!plain && !whole)
        return read_through_cache(content, hands, file, entry, number, &chunk, start, length, target, origin);
    if (!plain && read_cached(content, entry, number, start, length, target))
        return true;
    *origin = file->origin;
    return plain ? read_stored(hands, file, target, length, chunk.position + start, false)
                 : load(content, hands, file, &chunk, target, false);
}

static bool read_parts(struct fsx_content *content, struct fsx_hands *hands, uint32_t entry, uint64_t offset,
                       uint32_t length) {
    uint32_t done = 0;
    while (done < length) {
        const uint64_t position = offset + done;
        const uint32_t number = (uint32_t)(position / FSX_CHUNK_BYTES);
        const size_t start = (size_t)(position % FSX_CHUNK_BYTES);
        const size_t part = FSX_CHUNK_BYTES - start < length - done ? FSX_CHUNK_BYTES - start : length - done;
        enum fsx_origin origin;
        if (!read_part(content, hands, entry, number, start, part, hands->answer + done, &origin))
            return false;
        fsx_content_count_read(hands, origin, part);
        done += (uint32_t)part;
    }
    return true;
}

/* A file server that does not answer must not take all threads: names are served by the others. */
static bool may_read(struct fsx_content *content, const struct file *file) {
    if (file == NULL || file->origin == FSX_LOCAL)
        return true;
    if (atomic_fetch_add(&content->reading_shared, 1) < content->shared_readers)
        return true;
    atomic_fetch_sub(&content->reading_shared, 1);
    return false;
}

static void has_read(struct fsx_content *content, const struct file *file) {
    if (file != NULL && file->origin != FSX_LOCAL)
        atomic_fetch_sub(&content->reading_shared, 1);
}

bool fsx_content_read(struct fsx_content *content, struct fsx_hands *hands, uint32_t entry, uint64_t offset,
                      uint32_t length) {
    if (length > FSX_ANSWER_BYTES)
        return false;
    const struct file *file = atomic_load_explicit(&content->files[content->index->part[entry]], memory_order_acquire);
    if (!may_read(content, file))
        return false;
    const bool done = read_parts(content, hands, entry, offset, length);
    has_read(content, file);
    return done;
}

bool fsx_content_waits(const struct fsx_content *content, uint32_t entry) {
    const struct file *file = atomic_load_explicit(&content->files[content->index->part[entry]], memory_order_acquire);
    if (file == NULL || file->memory)
        return false;
    const struct fsx_stored chunk = fsx_chunk_of(content->index, entry, 0);
    return file->map == NULL || chunk.position + chunk.stored_bytes > file->map_bytes ||
           !fsx_pages_resident(file->map + chunk.position, chunk.stored_bytes);
}

bool fsx_content_read_ahead(struct fsx_content *content, struct fsx_hands *hands, uint32_t entry, uint32_t length,
                            enum fsx_origin *origin) {
    const struct file *file = atomic_load_explicit(&content->files[content->index->part[entry]], memory_order_acquire);
    *origin = FSX_CACHE;
    if (length > FSX_ANSWER_BYTES || !may_read(content, file))
        return false;
    const bool done = read_part(content, hands, entry, 0, 0, length, hands->answer, origin);
    has_read(content, file);
    return done;
}
