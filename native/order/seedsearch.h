/* seedsearch.h: which seed shuffles like this? All 2^32 seeds of torch.randperm, tried one after the other.
 *
 * The items at a few places of the shuffled order are known. An MT19937 is begun with each seed as far as its output for
 * the first of these places needs; that output says which item stands there. Only where it is the right one are the other
 * places looked at. With AVX-512 9 ns per seed, with AVX2 14 ns, with SSE2 70 ns (2^32 seeds: 40 s, 60 s, 5 min).
 * Pure functions on memory of the caller.
 */
#ifndef FANSTORE_ORDER_SEEDSEARCH_H
#define FANSTORE_ORDER_SEEDSEARCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The first place plus `skipped` must be below this: outputs up to there follow from the seed without the recurrence. */
#define FSX_SEARCH_FIRST 227u
/* All places must be below this. */
#define FSX_SEARCH_PLACES 4096u

struct fsx_sighting {
    uint32_t place; /* in the shuffled order */
    uint32_t item;  /* that stands there */
};

struct fsx_search {
    uint32_t count;                       /* items that are shuffled */
    uint32_t skipped;                     /* outputs of the generator that are drawn before the shuffle */
    const struct fsx_sighting *sightings; /* `hypotheses` times `depth`; ascending by place within a hypothesis */
    size_t hypotheses;                    /* each may be true; the first place is the same in all */
    size_t depth;
};

/* Whether the search can be done: limits above, items below `count`, places ascending. */
bool fsx_search_valid(const struct fsx_search *search);

/* The first seed in [begin, end) of which a hypothesis is true, and which hypothesis; `end` if there is none. A seed is
 * missed if the item at the first place was moved there by an earlier swap: never for place 0. The search is valid. */
uint64_t fsx_search_seed(const struct fsx_search *search, uint64_t begin, uint64_t end, size_t *hypothesis);

#endif
