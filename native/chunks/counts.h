/* counts.h: what was counted of chunks and bytes that were brought here and given out. Threads that do much of it have one
 * of their own, the others share one; read by others as it happens to be. */
#ifndef FANSTORE_CHUNKS_COUNTS_H
#define FANSTORE_CHUNKS_COUNTS_H

#include <stddef.h>

#include "base/latency.h"

/* Where bytes come from; order and meaning of Source in fanstore/telemetry/statistics.py. */
enum fsx_source { FSX_LOCAL, FSX_REMOTE, FSX_SHARED, FSX_CACHE, FSX_SOURCES };

/* A counter that several threads may write. */
#define FSX_ADD(counter, more) ((void)__atomic_fetch_add(&(counter), (more), __ATOMIC_RELAXED))

struct fsx_read_counts {
    struct {
        uint64_t reads, bytes, fetches, fetched_bytes;
    } source[FSX_SOURCES];
    uint64_t checked_chunks, checked_bytes;
    uint64_t direct; /* reads of a disk with direct I/O */
};
_Static_assert(sizeof(struct fsx_read_counts) % sizeof(uint64_t) == 0, "it is an array of 64-bit numbers");

/* Somebody was given so many bytes. */
static inline void fsx_count_read(struct fsx_read_counts *counts, enum fsx_source source, uint64_t bytes) {
    FSX_ADD(counts->source[source].reads, 1);
    FSX_ADD(counts->source[source].bytes, bytes);
}

/* So many stored bytes were brought here. */
static inline void fsx_count_fetch(struct fsx_read_counts *counts, enum fsx_source source, uint64_t bytes) {
    FSX_ADD(counts->source[source].fetches, 1);
    FSX_ADD(counts->source[source].fetched_bytes, bytes);
}

/* So many stored bytes were compared with their checksum. */
static inline void fsx_count_check(struct fsx_read_counts *counts, uint64_t bytes) {
    FSX_ADD(counts->checked_chunks, 1);
    FSX_ADD(counts->checked_bytes, bytes);
}

/* Add what another thread has counted so far. */
static inline void fsx_read_counts_add(struct fsx_read_counts *sum, const struct fsx_read_counts *part) {
    uint64_t *sums = (uint64_t *)sum;
    const uint64_t *parts = (const uint64_t *)part;
    for (size_t i = 0; i < sizeof *sum / sizeof *sums; i++)
        sums[i] += FSX_COUNTED(parts[i]);
}

#endif
