/* chunkcache.h: chunks of files in memory, so that many small reads of one load it once.
 *
 * Holds what was decompressed here, what had to be checked as a whole, and what was fetched from another node. Owns
 * the memory of the chunks; a caller that was given one keeps it with a reference until it gives it back, and never
 * changes it. Any thread; one lock, held for a few assignments only, never while a chunk is loaded or copied.
 */
#ifndef FANSTORE_CHUNKCACHE_H
#define FANSTORE_CHUNKCACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct fsx_cache;

/* A chunk. `data` is page-aligned, has room for a page more than `bytes` (direct I/O rounds up), and may be written only by the one who has claimed it, until it publishes it. */
struct fsx_cached {
    uint8_t *data;
    size_t bytes;
};

struct fsx_cache_counts {
    uint64_t capacity_bytes, used_bytes, chunks, hits, misses, waits, evictions, failed;
};

/* NULL without memory. `capacity_bytes` bounds what is kept; what is in use comes on top. */
struct fsx_cache *fsx_cache_new(uint64_t capacity_bytes);
/* Nobody may use it any more. NULL is allowed. */
void fsx_cache_free(struct fsx_cache *cache);

/* The chunk if it is here, waiting for it if somebody is loading it; otherwise NULL. Give it back with release. */
struct fsx_cached *fsx_cache_find(struct fsx_cache *cache, uint32_t entry, uint32_t chunk);

/* As find; but if it is not here, memory for `bytes` bytes, `*claimed` set: the caller loads it and then calls publish or
 * abandon, and meanwhile others wait. NULL without memory. */
struct fsx_cached *fsx_cache_claim(struct fsx_cache *cache, uint32_t entry, uint32_t chunk, size_t bytes, bool *claimed);

/* Page-aligned memory of somebody else. `give` takes it back, with the cache's lock held; its owner outlives the cache. */
struct fsx_lent {
    uint8_t *data;
    size_t capacity;
    void (*give)(void *owner, void *data, size_t capacity);
    void *owner;
};
/* A chunk of `bytes` bytes that was loaded into such memory, which is the cache's from now on; give the chunk back with
 * release. NULL if it is here already, or without memory: then all remains the caller's. */
struct fsx_cached *fsx_cache_adopt(struct fsx_cache *cache, uint32_t entry, uint32_t chunk, size_t bytes,
                                   const struct fsx_lent *lent);

/* A claimed chunk is loaded; the caller still holds it. Without `keep` it goes when the last one gives it back: it was
 * loaded once for all who wanted it together, and from now on there is a cheaper way. */
void fsx_cache_publish(struct fsx_cache *cache, struct fsx_cached *cached, bool keep);
/* A claimed chunk could not be loaded; the caller holds it no more. The first who waits may claim it. */
void fsx_cache_abandon(struct fsx_cache *cache, struct fsx_cached *cached);
/* Give back what find or claim (and publish) gave. */
void fsx_cache_release(struct fsx_cache *cache, struct fsx_cached *cached);

void fsx_cache_count(struct fsx_cache *cache, struct fsx_cache_counts *counts);

#endif
