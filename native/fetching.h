/* fetching.h: reads of chunks that another node has, without Python.
 *
 * The common case of fanstore/core/remote.py: a chunk that is not on this node and not in the cache is asked for at a
 * peer that should have it, and when it is here it is checked, decompressed, put into the cache if more of it will be
 * wanted, and all who wait for it are answered. Whatever does not work out (the peer dies, does not answer in time, has
 * not got the chunk, gives damaged bytes) goes over to Python as if nobody had tried, and Python is told what happened:
 * it decides whom to ask from then on (fsx_fetcher_route), and is the only one that tries a second source.
 *
 *   worker threads -- fetch --> line -- a place in the peer's window --> exchange.c, on the MPI thread
 *                                                                          | landed
 *   readers <-- answer ----------------------------------------- light ones +
 *   readers <-- answer, or cross -- landing threads <----------------------+
 *                       ^---------- clock thread: those whose time is up
 *
 * Owns what is under way, the memory into which it arrives, and the threads. Memory stays with MPI until its receive has
 * ended, whether somebody waits or not: invariants 1 and 2 of docs/concurrency.md hold here as well.
 *
 * `lock` guards all but the pool, for a few assignments; the pool has its own. Neither is held while the other is taken,
 * nor during a call of the exchange or of the engine. (The cache gives memory back with its own lock held: the pool's is
 * the last in the order.)
 */
#ifndef FANSTORE_FETCHING_H
#define FANSTORE_FETCHING_H

#include "content.h"
#include "exchange.h"

/* Threads that check, decompress and answer. Two, so that a large compressed chunk does not hold up all others. Not tuned:
 * on the busy machine of the trial, one, two, and answering on the MPI thread could not be told apart. */
#define FSX_LANDERS 2u

/* A READ that waits for a chunk. */
struct fsx_reader {
    uint32_t worker;
    uint32_t entry;
    uint64_t unique;
    uint64_t offset;
    uint32_t length;  /* at least 1; all of it in the file, and in two chunks at most */
    uint32_t attempt; /* of one that needs two chunks: which of them is fetched next. 0 at first */
    uint64_t start_ns;
};

/* Where readers end; called on any of the threads, without a lock. */
struct fsx_fetch_ends {
    void *context;
    /* `length` bytes of data, or an errno. */
    void (*answer)(void *context, const struct fsx_reader *reader, const void *data, int error);
    /* Python shall do it. */
    void (*cross)(void *context, const struct fsx_reader *reader);
    /* There is a failure for Python to take. */
    void (*tell)(void *context);
};

/* Numbers as fanstore/core/remote.py has them. */
enum fsx_failure_kind { FSX_PEER_LOST, FSX_PEER_SILENT, FSX_PEER_REFUSED, FSX_PEER_DAMAGED };

struct fsx_failure {
    enum fsx_failure_kind kind;
    int peer;
    uint32_t partition;
};

struct fsx_peer_counts {
    uint64_t fetches, fetched_bytes; /* chunks that were right, and their stored bytes */
};

struct fsx_fetcher;

/* For chunks that `content` does not have. `rank` is our own; an answer may take `limit_ns`; the process may use so many
 * `cores`: with few, the exchange's thread answers by itself what needs no more than a copy. The exchange must outlive it.
 * The content need not, once the threads have ended, and must be freed first: its cache may hold memory of ours. NULL
 * without memory. */
struct fsx_fetcher *fsx_fetcher_new(struct fsx_exchange *exchange, struct fsx_content *content, uint32_t rank,
                                    uint64_t limit_ns, uint32_t cores);
/* After its threads have ended, or were never started. Memory that MPI may still write to is left behind, and the fetcher
 * with it. NULL is allowed. */
void fsx_fetcher_free(struct fsx_fetcher *fetcher);

/* 0 or an errno. */
int fsx_fetcher_start(struct fsx_fetcher *fetcher, const struct fsx_fetch_ends *ends);
/* From now on nothing is fetched; who waits is answered with EIO. The threads end soon. */
void fsx_fetcher_end(struct fsx_fetcher *fetcher);
/* Threads that have not ended, that of the exchange while it is in here. */
uint32_t fsx_fetcher_running(struct fsx_fetcher *fetcher);
void fsx_fetcher_join(struct fsx_fetcher *fetcher);

/* Ask these peers for a partition from now on, those of them that are neither gone nor silent; none: Python does. False
 * without memory. Any thread. */
bool fsx_fetcher_route(struct fsx_fetcher *fetcher, uint32_t partition, const int *ranks, uint32_t count);

/* Fetch what a reader wants. True: it will be answered, or cross over; false: Python must do it. Any thread. */
bool fsx_fetcher_fetch(struct fsx_fetcher *fetcher, const struct fsx_reader *reader);
/* The request need not be answered any more. True if it waited here: the caller answers it on the device of `*worker`. */
bool fsx_fetcher_interrupt(struct fsx_fetcher *fetcher, uint64_t unique, uint32_t *worker);

/* Up to `most` failures, oldest first, each once. Whoever crosses over because of one does so after it can be taken. */
size_t fsx_fetcher_take_failures(struct fsx_fetcher *fetcher, struct fsx_failure *failures, size_t most);

/* Add what was counted so far: READs that were answered, and where their bytes were from. */
void fsx_fetcher_count(struct fsx_fetcher *fetcher, struct fsx_latency *operations, struct fsx_read_counts *reads);
/* Add the times from a question to its answer. */
void fsx_fetcher_count_answers(struct fsx_fetcher *fetcher, struct fsx_latency *answers);
struct fsx_peer_counts fsx_fetcher_count_peer(struct fsx_fetcher *fetcher, int peer);

#endif
