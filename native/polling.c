/* polling.c: see polling.h. */
#include "polling.h"

#include <sched.h>
#include <stddef.h>
#include <time.h>

/* Polls between two looks at the clock, and between two offers of the core to others: some 5 µs. */
#define POLLS_PER_LOOK 16

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int poll(const struct fsx_mpi *mpi, int count, void *requests, int *completed, int *indices, void *statuses,
                const unsigned char *interrupt, uint64_t spin_ns) {
    const uint64_t end_ns = now_ns() + spin_ns;
    for (;;) {
        for (int turn = 0; turn < POLLS_PER_LOOK; turn++) {
            *completed = 0;
            const int code = mpi->testsome(count, requests, completed, indices, statuses);
            if (*completed < 0)
                *completed = 0; /* MPI_UNDEFINED: there was nothing to test */
            if (code != 0 || *completed > 0 || __atomic_load_n(interrupt, __ATOMIC_RELAXED) != 0 || spin_ns == 0)
                return code;
        }
        if (now_ns() >= end_ns)
            return 0;
        /* There may be fewer cores than processes that poll: the one that has the answer must get its turn. */
        sched_yield();
    }
}

int fsx_poll_requests(const struct fsx_mpi *mpi, int count, void *requests, int *completed, int *indices, int *bytes,
                      void *statuses, const unsigned char *interrupt, uint64_t spin_ns) {
    const int code = poll(mpi, count, requests, completed, indices, statuses, interrupt, spin_ns);
    for (int i = 0; i < *completed; i++) {
        const void *status = (const char *)statuses + (size_t)i * mpi->status_bytes;
        int cancelled = 0;
        if (mpi->test_cancelled(status, &cancelled) != 0 || cancelled ||
            mpi->get_count(status, mpi->byte, &bytes[i]) != 0)
            bytes[i] = -1;
    }
    return code;
}
