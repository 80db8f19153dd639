/* nanoseconds.h: a file's time in the one unit of the index, and the clock by which things are timed. */
#ifndef FANSTORE_BASE_NANOSECONDS_H
#define FANSTORE_BASE_NANOSECONDS_H

#include <stdint.h>
#include <time.h>

/* Nanoseconds since 1970, kept within the years 1677 to 2262 that 64 bits can say (tarshard.py does the same). */
static inline int64_t fsx_nanoseconds(struct timespec time) {
    int64_t result;
    if (__builtin_mul_overflow((int64_t)time.tv_sec, 1000000000, &result) ||
        __builtin_add_overflow(result, (int64_t)time.tv_nsec, &result))
        return time.tv_sec < 0 ? INT64_MIN : INT64_MAX;
    return result;
}

/* Nanoseconds since some moment; never goes back. */
static inline uint64_t fsx_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#endif
