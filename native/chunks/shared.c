/* shared.c: see shared.h. */
#include "chunks/shared.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/sharedcache.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif
#define PIECE_BYTES ((uint64_t)2 << 20)
/* A slot for so many bytes of cache: for files of a page each it is an eighth too few, and those are asked for. */
#define BYTES_PER_SLOT 4096u
#define BUCKETS_MOST (1u << 20)

struct fsx_shared {
    int fd;
    uint8_t *map;
    uint64_t bytes, start; /* of the file; where pieces begin */
    struct fsx_shared_slot *slots;
    uint32_t buckets;
    uint64_t stamps;  /* the last one */
    uint64_t pieces;
    uint64_t hint;    /* from here on a free piece is looked for first */
    bool taken[];     /* by piece */
};

struct fsx_shared *fsx_shared_new(uint64_t most_bytes) {
    /* Blocks of more than a piece take several in a row: room for holes between them. */
    const uint64_t pieces = most_bytes / PIECE_BYTES * 2 + 16;
    uint32_t buckets = 64;
    while (buckets < BUCKETS_MOST && (uint64_t)buckets * FSX_SHARED_WAYS * BYTES_PER_SLOT < most_bytes)
        buckets *= 2;
    const uint64_t table = (uint64_t)buckets * FSX_SHARED_WAYS * sizeof(struct fsx_shared_slot);
    struct fsx_shared *shared = calloc(1, sizeof *shared + pieces);
    if (shared == NULL)
        return NULL;
    shared->start = (FSX_SHARED_HEADER_BYTES + table + PIECE_BYTES - 1) / PIECE_BYTES * PIECE_BYTES;
    shared->bytes = shared->start + pieces * PIECE_BYTES;
    shared->pieces = pieces;
    shared->buckets = buckets;
    shared->fd = memfd_create("fanstore-cache", MFD_CLOEXEC | MFD_NOEXEC_SEAL);
    if (shared->fd < 0 && errno == EINVAL) /* before Linux 6.3 */
        shared->fd = memfd_create("fanstore-cache", MFD_CLOEXEC);
    /* Who has a descriptor for reading cannot open it anew for writing. */
    if (shared->fd < 0 || ftruncate(shared->fd, (off_t)shared->bytes) != 0 || fchmod(shared->fd, 0400) != 0)
        goto fail;
    /* At a multiple of 2 MiB, as blocks begin there. */
    uint8_t *reserved = mmap(NULL, shared->bytes + PIECE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED)
        goto fail;
    const size_t before = -(uintptr_t)reserved % PIECE_BYTES;
    shared->map = mmap(reserved + before, shared->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
                       shared->fd, 0);
    if (shared->map == MAP_FAILED) {
        const int error = errno;
        munmap(reserved, shared->bytes + PIECE_BYTES);
        shared->map = NULL;
        errno = error;
        goto fail;
    }
    if (before > 0)
        munmap(reserved, before);
    munmap(shared->map + shared->bytes, PIECE_BYTES - before);
    /* Some systems give huge pages where they are asked for. */
    madvise(shared->map + shared->start, pieces * PIECE_BYTES, MADV_HUGEPAGE);
    shared->slots = (struct fsx_shared_slot *)(void *)(shared->map + FSX_SHARED_HEADER_BYTES);
    struct fsx_shared_header header = {.version = FSX_SHARED_VERSION, .buckets = buckets, .start = shared->start,
                                       .bytes = shared->bytes};
    memcpy(header.magic, FSX_SHARED_MAGIC, sizeof header.magic);
    memcpy(shared->map, &header, sizeof header);
    return shared;
fail:;
    const int error = errno;
    fsx_shared_free(shared);
    errno = error;
    return NULL;
}

void fsx_shared_free(struct fsx_shared *shared) {
    if (shared == NULL)
        return;
    if (shared->map != NULL)
        munmap(shared->map, shared->bytes);
    if (shared->fd >= 0)
        close(shared->fd);
    free(shared);
}

int fsx_shared_open(const struct fsx_shared *shared) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", shared->fd);
    return open(path, O_RDONLY | O_CLOEXEC);
}

/* ---- pieces ------------------------------------------------------------------------------------------------------------- */

static uint64_t count_of(size_t bytes) { return (bytes + PIECE_BYTES - 1) / PIECE_BYTES; }

uint8_t *fsx_shared_take(struct fsx_shared *shared, size_t bytes) {
    const uint64_t count = count_of(bytes);
    uint64_t run = 0;
    for (uint64_t step = 0; step < shared->pieces + count; step++) {
        const uint64_t i = (shared->hint + step) % shared->pieces;
        run = shared->taken[i] ? 0 : i == 0 ? 1 : run + 1;
        if (run < count)
            continue;
        const uint64_t first = i + 1 - count;
        memset(shared->taken + first, true, count);
        shared->hint = (i + 1) % shared->pieces;
        return shared->map + shared->start + first * PIECE_BYTES;
    }
    return NULL;
}

void fsx_shared_give(struct fsx_shared *shared, uint8_t *start, size_t bytes) {
    const uint64_t first = ((uint64_t)(start - shared->map) - shared->start) / PIECE_BYTES, count = count_of(bytes);
    madvise(start, count * PIECE_BYTES, MADV_REMOVE);
    memset(shared->taken + first, false, count);
    shared->hint = first;
}

bool fsx_shared_has(const struct fsx_shared *shared, const uint8_t *data, uint64_t *offset) {
    if (data < shared->map || data >= shared->map + shared->bytes)
        return false;
    *offset = (uint64_t)(data - shared->map);
    return true;
}

/* ---- table -------------------------------------------------------------------------------------------------------------- */

static struct fsx_shared_slot *bucket_of(const struct fsx_shared *shared, uint64_t key) {
    return shared->slots + (size_t)fsx_shared_bucket(key, shared->buckets) * FSX_SHARED_WAYS;
}

uint64_t fsx_shared_publish(struct fsx_shared *shared, uint64_t key, uint64_t offset, uint64_t bytes) {
    struct fsx_shared_slot *slot = bucket_of(shared, key);
    for (uint32_t way = 0; way < FSX_SHARED_WAYS; way++, slot++) {
        if (atomic_load_explicit(&slot->stamp, memory_order_relaxed) != 0)
            continue;
        atomic_store_explicit(&slot->key, key, memory_order_relaxed);
        atomic_store_explicit(&slot->offset, offset, memory_order_relaxed);
        atomic_store_explicit(&slot->bytes, bytes, memory_order_relaxed);
        atomic_store_explicit(&slot->stamp, ++shared->stamps, memory_order_release);
        return shared->stamps;
    }
    return 0;
}

void fsx_shared_withdraw(struct fsx_shared *shared, uint64_t key, uint64_t stamp) {
    struct fsx_shared_slot *slot = bucket_of(shared, key);
    for (uint32_t way = 0; way < FSX_SHARED_WAYS; way++, slot++)
        if (atomic_load_explicit(&slot->stamp, memory_order_relaxed) == stamp)
            atomic_store_explicit(&slot->stamp, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* before what is written to its memory next */
}
