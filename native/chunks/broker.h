/* broker.h: whoever wants bytes of the dataset asks here for a chunk.
 *
 *   FUSE requests, programs, the prefetcher, Python -- want(chunk, waiter or none) --> in the cache: delivered at once
 *                                                                                      in flight: joined
 *                                                                                      else fetched, from the first of
 *     a partition file of this node (files.h), on a thread that may block
 *     a peer (peers.h), asked once over MPI
 *     Python: stored bytes of the chunk, from whatever source has them intact (fanstore/dataset/sources.py, where the
 *             preference of sources is written)
 *
 * and then checked, decoded, delivered to all who wait, and kept if somebody will want it again. A chunk that nobody waits
 * for lands in the cache. What cannot be had is delivered as an error.
 *
 * Owns the cache, what is in flight, the memory of both (slabs.h, one bound for all), which chunks were found intact
 * (`marks`), and the threads that check, decode and load for those who may not block.
 *
 * Memory: what is kept never exceeds the capacity; what is in flight comes on top, up to FSX_IN_FLIGHT_BYTES. Where there is
 * no memory, a want with a waiter waits for what is in flight; one without is forgotten.
 *
 * `lock` guards table, lists and counters, for a few assignments; it is not held while anything is read, checked, decoded,
 * delivered or freed. It comes before the locks of peers and slabs, none of which is held when one of them is called.
 */
#ifndef FANSTORE_CHUNKS_BROKER_H
#define FANSTORE_CHUNKS_BROKER_H

#include "format/chunk.h"
#include "chunks/counts.h"
#include "chunks/files.h"
#include "chunks/peers.h"
#include "chunks/prefetch.h"

/* Beyond the capacity: for chunks in flight, and for what slabs have free in them. */
#define FSX_IN_FLIGHT_BYTES ((uint64_t)24 << 20)
#define FSX_SLAB_ROOM_BYTES ((uint64_t)16 << 20)

/* When bytes are compared with their checksum; Verify of fanstore/dataset/sources.py. */
enum fsx_verify { FSX_VERIFY_FIRST, FSX_VERIFY_ALWAYS, FSX_VERIFY_NEVER };

/* How long a chunk is kept once it was delivered to those who wait. */
enum fsx_keep {
    FSX_PASS,      /* not at all: whoever asked has all of it */
    FSX_KEEP_ONCE, /* until somebody has taken its end */
    FSX_KEEP       /* for as long as there is room */
};

struct fsx_node; /* a chunk, as the broker has it */
struct fsx_shared;

/* A chunk, or why there is none. */
struct fsx_delivery {
    struct fsx_node *node;
    const uint8_t *data; /* all of the chunk, for the time of the call; NULL with an error */
    size_t bytes;
    enum fsx_source source; /* FSX_CACHE for all but the one for whom it was fetched */
    int error;
    struct fsx_read_counts *counts; /* where to count what is done with it */
};

/* Who wants a chunk. Its memory is the caller's, and stays where it is until `done` was called: exactly once, on any thread,
 * without a lock; it must not block on a disk or on the network. */
struct fsx_waiter {
    void (*done)(struct fsx_waiter *waiter, const struct fsx_delivery *delivery);
    bool takes_end;          /* it will not want more of this chunk */
    struct fsx_waiter *next; /* the broker's, as what follows */
    uint64_t since_ns;
};

struct fsx_broker_settings {
    const struct fsx_index *index; /* must outlive it, as what follows */
    uint8_t *marks; /* one byte per entry and per chunk record: number of the file in which it was found intact, 0 for none */
    enum fsx_verify verify;
    uint64_t capacity_bytes;
    uint32_t shared_readers; /* as fsx_files_new has it */
    uint32_t loaders;        /* threads that load for those who may not block, at least 1 */
    uint32_t cores;          /* that this process may use */
    int wake;                /* an eventfd: written when there is something for Python to take */
};

struct fsx_broker;

/* NULL without memory. */
struct fsx_broker *fsx_broker_new(const struct fsx_broker_settings *settings);
/* Before the start: ask other nodes, too. 0 or an errno. */
int fsx_broker_ask_peers(struct fsx_broker *broker, struct fsx_exchange *exchange, uint32_t rank, uint64_t limit_ns);
/* Start the threads. 0 or an errno. */
int fsx_broker_start(struct fsx_broker *broker);
/* From now on nothing is fetched; who waits, and who comes later, gets EIO. The threads end soon. */
void fsx_broker_end(struct fsx_broker *broker);
/* Threads that have not ended, and those of others that are in a call that may block. */
uint32_t fsx_broker_running(struct fsx_broker *broker);
/* After the end of all threads, or if they were never started. Memory that MPI may still write to is left behind. NULL is
 * allowed. */
void fsx_broker_free(struct fsx_broker *broker);

struct fsx_files *fsx_broker_files(struct fsx_broker *broker);
struct fsx_peers *fsx_broker_peers(struct fsx_broker *broker); /* NULL if it asks none */
struct fsx_prefetch *fsx_broker_prefetch(struct fsx_broker *broker);
/* Chunks in flight that somebody waits for. */
uint32_t fsx_broker_awaited(struct fsx_broker *broker);
const struct fsx_index *fsx_broker_index(const struct fsx_broker *broker);

/* Deliver chunk `number` of a regular file, which has it. `mine`: this thread may block, and counts there; NULL if it must
 * not. Without a waiter it lands in the cache, if there is room; a thread that must not block leaves that to the line of
 * prefetch.h. Without a waiter and with FSX_PASS it is not fetched, and no longer kept if it was to be for as long as there is
 * room. Whether it is fetched because of this call; it may have come by then. */
bool fsx_broker_want(struct fsx_broker *broker, struct fsx_read_counts *mine, uint32_t entry, uint32_t number,
                     struct fsx_waiter *waiter, enum fsx_keep keep);

/* Take back the first waiter of chunks in flight that `matches`: it is not called any more. NULL if there is none. */
struct fsx_waiter *fsx_broker_cancel(struct fsx_broker *broker, bool (*matches)(const struct fsx_waiter *waiter, uint64_t key),
                                     uint64_t key);

/* `length` bytes of a file from `offset`, all inside it, straight from a partition file of this node into `target`, which
 * has room for a page more: possible for bytes that are stored as they are and known to be right. False: want the chunks. */
bool fsx_broker_read_plain(struct fsx_broker *broker, struct fsx_read_counts *mine, uint32_t entry, uint64_t offset,
                           uint32_t length, uint8_t *target);

/* The same from the cache, if it has all of it. Never blocks. */
bool fsx_broker_read_cached(struct fsx_broker *broker, struct fsx_read_counts *mine, uint32_t entry, uint64_t offset,
                            uint32_t length, uint8_t *target);

/* Would fsx_broker_read_plain have to wait for a disk, as far as can be told? Also true if there is no file here. */
bool fsx_broker_waits_for(struct fsx_broker *broker, uint32_t entry, uint64_t offset, uint32_t length);
/* Would the first chunk of this file have to be waited for at a disk of this node? */
bool fsx_broker_waits(struct fsx_broker *broker, uint32_t entry);

/* ---- shared memory -------------------------------------------------------------------------------------------------- */

/* From now on chunks lie where programs on this node can read them (shared.h), and those that are kept stand in its table.
 * What is idle in other memory is let go. 0 or an errno; more than once is allowed. */
int fsx_broker_share(struct fsx_broker *broker);
/* NULL as long as nothing is shared. */
const struct fsx_shared *fsx_broker_shared(struct fsx_broker *broker);

/* A chunk that stays where it is. */
struct fsx_lease {
    struct fsx_node *node; /* NULL for none */
    uint64_t offset, bytes; /* in the shared file */
    uint64_t stamp;         /* 0: it does not stand in the table */
};
/* In `done` of a waiter, with what was delivered. False if it is not in shared memory. */
bool fsx_broker_lease(struct fsx_broker *broker, const struct fsx_delivery *delivery, struct fsx_lease *lease);
/* None is allowed, and it is none afterwards. */
void fsx_broker_end_lease(struct fsx_broker *broker, struct fsx_lease *lease);

/* Where threads count that have no place of their own for it. */
struct fsx_read_counts *fsx_broker_counts(struct fsx_broker *broker);

/* ---- Python ------------------------------------------------------------------------------------------------------- */

struct fsx_chunk_upcall {
    uint32_t entry, number;
};
/* Chunks whose stored bytes Python shall bring, oldest first, each once; how many there were. */
size_t fsx_broker_take_upcalls(struct fsx_broker *broker, struct fsx_chunk_upcall *upcalls, size_t most);
/* Its stored bytes, or an errno. How many waiters were told of an error; -1 if the bytes are not awaited, or too many or too
 * few. */
int fsx_broker_give(struct fsx_broker *broker, struct fsx_chunk_upcall upcall, const void *stored, size_t bytes,
                     enum fsx_source source, int error);

/* Keep no more than this from now on. */
void fsx_broker_set_capacity(struct fsx_broker *broker, uint64_t capacity_bytes);

struct fsx_cache_counts {
    uint64_t capacity_bytes, used_bytes, chunks; /* used: by what is kept or delivered, in memory of slabs */
    uint64_t in_flight_bytes, mapped_bytes;      /* mapped: all memory of chunks */
    uint64_t hits, misses, joined, evictions, failed, upcalls;
    uint64_t prefetched, prefetched_taken, forgotten; /* without a waiter; of these, wanted since; no memory for them */
    uint64_t late, waited_ns; /* prefetched, and wanted while in flight; that waiters have waited for chunks, in all */
};
void fsx_broker_count(struct fsx_broker *broker, struct fsx_cache_counts *cache, struct fsx_read_counts *reads);

#endif
