/* pool.h: memory for chunks and for answers of peers, kept for the next ones.
 *
 * Memory fresh from the kernel is cleared and mapped page by page, which takes longer than receiving into it; what was
 * used last is still in the processor's caches. Blocks are page-aligned: a kernel copies into them, which on AMD Zen was
 * up to twice as fast as into memory that is not aligned to a cache line. Not thread-safe: used under the GIL, or under a
 * lock of its owner.
 */
#ifndef FANSTORE_BASE_POOL_H
#define FANSTORE_BASE_POOL_H

#include <stddef.h>

/* Sizes that are kept apart: multiples of 4 KiB up to 32 KiB, then eight steps for each doubling, up to 8 MiB. */
#define FSX_POOL_CLASSES 72

struct fsx_block;

struct fsx_pool {
    struct fsx_block *free[FSX_POOL_CLASSES]; /* last in, first out */
    size_t kept_bytes;                        /* in all of them: at most keep_bytes */
    size_t keep_bytes;
    int victim; /* the class that gives up a block next when there are too many */
};

/* A block of at least `bytes`; `*capacity` is its real size. NULL if there is no memory. */
void *fsx_pool_take(struct fsx_pool *pool, size_t bytes, size_t *capacity);

/* Give a block back. Nobody may write to it any more. */
void fsx_pool_give(struct fsx_pool *pool, void *block, size_t capacity);

/* Keep at most so much from now on; the rest is returned to the kernel at once. */
void fsx_pool_keep(struct fsx_pool *pool, size_t keep_bytes);

#endif
