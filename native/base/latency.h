/* latency.h: how long something took, as a histogram.
 *
 * One thread records, any thread reads at any time: single 64-bit numbers, without a lock.
 */
#ifndef FANSTORE_BASE_LATENCY_H
#define FANSTORE_BASE_LATENCY_H

#include <stdbool.h>
#include <stdint.h>

/* A counter that one thread writes and others read at any time: no lock, no locked instruction. */
#define FSX_COUNT(counter, more) __atomic_store_n(&(counter), (counter) + (more), __ATOMIC_RELAXED)
#define FSX_COUNTED(counter) __atomic_load_n(&(counter), __ATOMIC_RELAXED)

/* Eight buckets per power of two; _bucket of fanstore/telemetry/statistics.py. */
#define FSX_BUCKETS 304u

struct fsx_latency {
    uint64_t count, errors, total_ns, max_ns;
    uint64_t buckets[FSX_BUCKETS];
};

/* On the thread that owns it. */
void fsx_latency_record(struct fsx_latency *latency, uint64_t elapsed_ns, bool error);

/* Add what was recorded so far. */
void fsx_latency_add(struct fsx_latency *sum, const struct fsx_latency *part);

#endif
