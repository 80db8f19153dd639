/* sharedcache.h: what a daemon shows preloaded programs of its chunk cache, and the packets with which they ask for more.
 *
 * One memory file, which only the daemon writes and programs map for reading: a page with this header, the table, and the
 * memory of chunks. A chunk that is kept there stands in one of the FSX_SHARED_WAYS slots of its bucket, with a stamp that is
 * given once: who finds the same stamp after having copied has copied that chunk. The daemon takes the stamp away before the
 * memory is used for something else.
 *
 *   reader: stamp, key, place; copy; fence; stamp still the same?
 *   daemon: key, place; stamp -- and later: stamp 0; fence; other bytes
 *
 * Programs ask over a SEQPACKET socket, one request under way on each; docs/interception.md describes both.
 */
#ifndef FANSTORE_FORMAT_SHAREDCACHE_H
#define FANSTORE_FORMAT_SHAREDCACHE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define FSX_SHARED_MAGIC "FSXCACHE"
#define FSX_SHARED_VERSION 1u
#define FSX_SHARED_WAYS 8u
#define FSX_SHARED_HEADER_BYTES 4096u

struct fsx_shared_header {
    char magic[8];
    uint32_t version;
    uint32_t buckets; /* a power of two */
    uint64_t start;   /* where the memory of chunks begins, in the file */
    uint64_t bytes;   /* of the whole file */
};

/* stamp 0: empty. Of one that changes meanwhile, a reader may see parts of both; the stamp tells. */
struct fsx_shared_slot {
    _Atomic uint64_t stamp;
    _Atomic uint64_t key; /* entry << 32 | number of the chunk */
    _Atomic uint64_t offset; /* in the file */
    _Atomic uint64_t bytes;
};
_Static_assert(sizeof(struct fsx_shared_slot) == 32, "eight of them are four cache lines");

static inline uint64_t fsx_shared_key(uint32_t entry, uint32_t number) { return (uint64_t)entry << 32 | number; }

static inline uint32_t fsx_shared_bucket(uint64_t key, uint32_t buckets) {
    return (uint32_t)((key * 0x9E3779B97F4A7C15u) >> 32) & (buckets - 1);
}

/* Does the slot still hold what was copied? After the copy. */
static inline bool fsx_shared_still(const struct fsx_shared_slot *slot, uint64_t stamp) {
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&slot->stamp, memory_order_relaxed) == stamp;
}

/* ---- packets ------------------------------------------------------------------------------------------------------------ */

/* A chunk is wanted. It stays where the answer says until the next request on this socket, at least for a second. */
#define FSX_CLIENT_WANT 1u
/* The same, but until the socket is closed: for what is shown without a copy. */
#define FSX_CLIENT_HOLD 2u
/* What was held is not needed any more: the only request without an answer. */
#define FSX_CLIENT_FREE 3u

struct fsx_client_request {
    uint32_t kind, token; /* the answer has the same */
    uint32_t entry, number;
};
struct fsx_client_answer {
    uint32_t token;
    int32_t error;           /* an errno: EAGAIN if it is not in memory that is shared, EIO if there is no intact copy */
    uint64_t offset, bytes;  /* in the file */
    uint64_t stamp;          /* by which it stands in the table; 0: it does not, and is there only until the next request */
};
_Static_assert(sizeof(struct fsx_client_request) == 16 && sizeof(struct fsx_client_answer) == 32, "no padding");

#endif
