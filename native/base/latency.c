/* latency.c: see latency.h. */
#include "base/latency.h"

static uint32_t bucket_of(uint64_t elapsed_ns) {
    if (elapsed_ns < 8)
        return (uint32_t)elapsed_ns;
    const uint64_t longest = ((uint64_t)1 << 40) - 1;
    const uint64_t value = elapsed_ns < longest ? elapsed_ns : longest;
    const uint32_t shift = 63u - (uint32_t)__builtin_clzll(value) - 3u;
    return (shift << 3) + (uint32_t)(value >> shift);
}

void fsx_latency_record(struct fsx_latency *latency, uint64_t elapsed_ns, bool error) {
    FSX_COUNT(latency->count, 1);
    if (error)
        FSX_COUNT(latency->errors, 1);
    FSX_COUNT(latency->total_ns, elapsed_ns);
    if (elapsed_ns > latency->max_ns)
        __atomic_store_n(&latency->max_ns, elapsed_ns, __ATOMIC_RELAXED);
    FSX_COUNT(latency->buckets[bucket_of(elapsed_ns)], 1);
}

void fsx_latency_add(struct fsx_latency *sum, const struct fsx_latency *part) {
    const uint64_t max_ns = FSX_COUNTED(part->max_ns);
    sum->errors += FSX_COUNTED(part->errors);
    sum->total_ns += FSX_COUNTED(part->total_ns);
    sum->max_ns = max_ns > sum->max_ns ? max_ns : sum->max_ns;
    for (uint32_t b = 0; b < FSX_BUCKETS; b++) {
        const uint64_t count = FSX_COUNTED(part->buckets[b]);
        sum->buckets[b] += count;
        sum->count += count; /* not part->count, which may be ahead by one at this moment */
    }
}
