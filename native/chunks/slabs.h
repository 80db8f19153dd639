/* slabs.h: the memory of chunks: blocks out of slabs, bounded as a whole.
 *
 * Memory fresh from the kernel is cleared and mapped page by page, which takes longer than reading or receiving into it,
 * and malloc keeps what was freed per thread: so chunks have an allocator of their own. A slab is 2 MiB of blocks of one
 * size, or a single larger block; it is aligned and asked for in huge pages, so that direct I/O into a block is one
 * segment for the disk instead of one per page. Blocks are page-aligned (a misaligned kernel copy was four times slower on
 * AMD Zen) and have room for a page more than was asked for, because direct I/O rounds up.
 *
 * Owns all slabs. The bound is on what is mapped: what is handed out, what is free in slabs that are in use, and whole
 * free slabs, of which FSX_SLABS_KEPT_BYTES are kept for the next blocks. Any thread; one lock, a leaf in the lock order.
 */
#ifndef FANSTORE_CHUNKS_SLABS_H
#define FANSTORE_CHUNKS_SLABS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Free slabs beyond this go back to the kernel at once. */
#define FSX_SLABS_KEPT_BYTES ((size_t)16 << 20)
/* What a block has room for beyond what was asked for. */
#define FSX_BLOCK_SLACK 4096u

struct fsx_shared;
struct fsx_slab;
struct fsx_slabs;

/* Memory of the caller until it gives it back. */
struct fsx_block {
    uint8_t *data; /* NULL for none */
    size_t bytes;  /* that count: the size of its class, with the slack */
    struct fsx_slab *slab;
};

/* NULL without memory. */
struct fsx_slabs *fsx_slabs_new(uint64_t limit_bytes);
/* All blocks were given back, or are never used again. NULL is allowed. */
void fsx_slabs_free(struct fsx_slabs *slabs);

/* A block with room for `bytes` and the slack; false, and an empty block, if the bound or the kernel does not allow it. */
bool fsx_slabs_take(struct fsx_slabs *slabs, size_t bytes, struct fsx_block *block);
/* Nobody may use the memory any more; an empty block is allowed, and the block is empty afterwards. */
void fsx_slabs_give(struct fsx_slabs *slabs, struct fsx_block *block);

/* From now on, slabs are made of this memory, which must outlive them, as long as it has any. What lies in others stays there
 * until it is given back. Once. */
void fsx_slabs_share(struct fsx_slabs *slabs, struct fsx_shared *shared);

/* What a block for `bytes` counts. */
size_t fsx_slabs_size(size_t bytes);

void fsx_slabs_set_limit(struct fsx_slabs *slabs, uint64_t limit_bytes);

/* A block is in the hands of somebody who may never give it back, or (not `lost`) it is no longer: it does not count for the
 * bound meanwhile, or readers would wait for it. */
void fsx_slabs_set_lost(struct fsx_slabs *slabs, const struct fsx_block *block, bool lost);

struct fsx_slabs_counts {
    uint64_t limit_bytes, mapped_bytes;
    uint64_t used_bytes; /* without what is lost */
};
struct fsx_slabs_counts fsx_slabs_count(struct fsx_slabs *slabs);

#endif
