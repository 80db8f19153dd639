/* prefetch.h: chunks that will be wanted, brought one after the other without a waiter, behind whoever waits.
 *
 *   the prefetcher (Python) -- add --> line -- a place is free --> fsx_broker_want without a waiter --> the cache, for one use
 *                                       ^------------- the broker: a chunk has been loaded ------------'        |
 *                                                                                pagesahead.h, if it shall go on <-+
 *
 * Owns the line, and how much of it is in flight: little enough that a reader who wants something else does not wait long
 * behind it; and the line of what goes on to the page cache of the mount. Whatever is wanted by a reader meanwhile, or lies in
 * the page cache below the mount, is not fetched. `lock` guards everything, for a few assignments; it is not held when the
 * broker is called, whose lock comes before it. Any thread; nothing blocks.
 */
#ifndef FANSTORE_CHUNKS_PREFETCH_H
#define FANSTORE_CHUNKS_PREFETCH_H

#include <stdbool.h>
#include <stdint.h>

#include "chunks/pagesahead.h"

struct fsx_broker;
struct fsx_prefetch;

/* What was loaded, or cannot be. */
struct fsx_loaded {
    uint32_t entry;
    bool right;
    uint64_t bytes; /* if it was begun from the line; otherwise 0 */
};

/* NULL without memory. */
struct fsx_prefetch *fsx_prefetch_new(struct fsx_broker *broker);
/* When the broker has ended. NULL is allowed. */
void fsx_prefetch_free(struct fsx_prefetch *prefetch);

/* Put a chunk, which exists, at the end of the line; false if the line is full. `into_kernel`: the beginning of the file shall go
 * on to the page cache of the mount. `stay`: it is kept for as long as there is room, instead of for one use. */
bool fsx_prefetch_add(struct fsx_prefetch *prefetch, uint32_t entry, uint32_t number, bool into_kernel, bool stay);
/* How many stand in line or are in flight, and how many were begun so far. */
uint32_t fsx_prefetch_count(struct fsx_prefetch *prefetch, uint64_t *begun);

/* For the broker: a chunk was loaded, or cannot be. Begins what may be begun. */
void fsx_prefetch_go_on(struct fsx_prefetch *prefetch, const struct fsx_loaded *loaded);

/* What goes on to the page cache of the mount. */
struct fsx_pages_ahead *fsx_prefetch_pages(struct fsx_prefetch *prefetch);

#endif
