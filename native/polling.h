/* polling.h: waiting for MPI requests without the GIL.
 *
 * MPI has no descriptor to wait on, so somebody must call MPI_Testsome again and again; from Python each call would
 * take and release the GIL, and keep it from the thread that has work to do. No MPI header is needed, and no library is
 * linked: the function is found at run time in the library that mpi4py has loaded; handles are copied and never looked
 * into. Used by fanstore/transport/pending.py, on the MPI thread.
 */
#ifndef FANSTORE_POLLING_H
#define FANSTORE_POLLING_H

#include <stdint.h>

/* The functions of the C binding, which is the same in every MPI library but for the size of handles and statuses. */
struct fsx_mpi {
    int (*testsome)(int incount, void *requests, int *outcount, int *indices, void *statuses);
    int (*get_count)(const void *status, uintptr_t datatype, int *count);
    int (*test_cancelled)(const void *status, int *flag);
    uintptr_t byte;        /* the handle MPI_BYTE: a pointer, or an int in the lower half of a register */
    uint32_t status_bytes; /* sizeof(MPI_Status) */
};

/* Call testsome until a request has completed, `*interrupt` is not 0, or `spin_ns` have passed; once at least. Returns
 * what it returned; `*completed` is the number of indices and statuses that it has filled, and of `bytes`, which get the
 * bytes received, or -1 for a request that was cancelled. `interrupt` may be set by another thread at any time. */
int fsx_poll_requests(const struct fsx_mpi *mpi, int count, void *requests, int *completed, int *indices, int *bytes,
                      void *statuses, const unsigned char *interrupt, uint64_t spin_ns);

#endif
