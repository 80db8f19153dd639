/* peers.h: stored bytes of partitions that other nodes have, asked for over MPI without Python.
 *
 *   fsx_peers_ask --> line -- a place in the peer's window --> exchange.c, on the MPI thread -----> arrived
 *                                                              clock thread: time is up ----------> arrived
 *
 * A peer that should have the partition is asked once. What came, or why nothing did, is said to whoever asked; failures
 * are noted for Python, which decides whom to ask from then on (fsx_peers_route).
 *
 * Owns the questions under way, the window of each peer and the clock thread. A block into which an answer is to come stays
 * with MPI until its receive has ended, whether somebody waits or not (docs/concurrency.md, invariants 1 and 2); if that is
 * never, it is never given back. `lock` guards everything, for a few assignments; it is not held during a call of the
 * exchange, of the slabs or of `arrived`.
 */
#ifndef FANSTORE_CHUNKS_PEERS_H
#define FANSTORE_CHUNKS_PEERS_H

#include "chunks/slabs.h"
#include "mpi/exchange.h"
#include "base/latency.h"

/* Numbers as fanstore/dataset/remote.py has them. */
enum fsx_failure_kind { FSX_PEER_LOST, FSX_PEER_SILENT, FSX_PEER_REFUSED, FSX_PEER_DAMAGED };

struct fsx_failure {
    enum fsx_failure_kind kind;
    int peer;
    uint32_t partition;
};

/* What has become of a question. */
struct fsx_arrival {
    int peer;
    bool complete;          /* all bytes are in the block */
    bool alone;             /* nothing else is under way */
    struct fsx_block block; /* the callee's; empty if MPI may still write to it */
};

/* Where questions end: exactly once each, on the MPI thread, the clock's or the asker's, without a lock; must not block. */
typedef void fsx_arrived(void *context, void *owner, struct fsx_arrival *arrival);

struct fsx_peers;

/* For `partitions` partitions; `rank` is our own; an answer may take `limit_ns`. Exchange and slabs must outlive it. NULL
 * without memory. */
struct fsx_peers *fsx_peers_new(struct fsx_exchange *exchange, struct fsx_slabs *slabs, uint32_t partitions, uint32_t rank,
                                uint64_t limit_ns, fsx_arrived *arrived, void *context);
/* 0 or an errno. */
int fsx_peers_start(struct fsx_peers *peers);
/* From now on nothing is asked, and `arrived` is not called for what is under way. The thread ends soon. */
void fsx_peers_end(struct fsx_peers *peers);
/* Threads that have not ended, that of the exchange while it is in here. */
uint32_t fsx_peers_running(struct fsx_peers *peers);
/* After the end. False if MPI may still write to blocks: then they are left behind, and so must the slabs be. */
bool fsx_peers_free(struct fsx_peers *peers);

/* Ask these for a partition from now on, those of them that are neither gone nor silent. False without memory. */
bool fsx_peers_route(struct fsx_peers *peers, uint32_t partition, const int *ranks, uint32_t count);

/* Ask for `bytes` bytes at `position`, into the block, which is taken over. False, and the block stays the caller's, if
 * there is nobody to ask. */
bool fsx_peers_ask(struct fsx_peers *peers, uint32_t partition, uint64_t position, uint32_t bytes, struct fsx_block *block,
                   void *owner);

/* What came was right; or it was not. */
void fsx_peers_note_right(struct fsx_peers *peers, int peer, uint64_t bytes);
void fsx_peers_note_damage(struct fsx_peers *peers, int peer, uint32_t partition);

/* Up to `most` failures, oldest first, each once. */
size_t fsx_peers_take_failures(struct fsx_peers *peers, struct fsx_failure *failures, size_t most);

struct fsx_peer_counts {
    uint64_t fetches, fetched_bytes; /* chunks that were right, and their stored bytes */
};
struct fsx_peer_counts fsx_peers_count(struct fsx_peers *peers, int peer);
/* Add the times from a question to its answer. */
void fsx_peers_count_answers(struct fsx_peers *peers, struct fsx_latency *answers);

#endif
