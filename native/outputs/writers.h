/* writers.h: what engine threads do to outputs, and how many of them at a time.
 *
 * If a disk cannot follow, threads that write to it wait, and none would be left for whoever reads: so only some of them may
 * write at once, and what is more goes to Python's worker threads. Owns the number of those; the outputs are the caller's.
 * Any thread.
 */
#ifndef FANSTORE_OUTPUTS_WRITERS_H
#define FANSTORE_OUTPUTS_WRITERS_H

#include <stdatomic.h>

#include "outputs/outputs.h"

struct fsx_writers {
    struct fsx_outputs *outputs; /* NULL: nothing can be written, and nothing below may be called */
    uint32_t most;
    atomic_uint count; /* threads that write, or are about to see that there are enough */
};

/* For an engine of so many threads. */
void fsx_writers_init(struct fsx_writers *writers, struct fsx_outputs *outputs, uint32_t workers);

/* As fsx_outputs_do; ENOENT also if too many write. */
int fsx_writers_do(struct fsx_writers *writers, const struct fsx_task *task, uint8_t *answer, size_t *bytes);

/* As fsx_outputs_sync; false also if too many write. */
bool fsx_writers_sync(struct fsx_writers *writers, const struct fsx_task *task, bool *first, int *error);

/* As fsx_outputs_create, with the answer for the kernel in `answer`, which has room for it; false also if too many write. */
bool fsx_writers_create(struct fsx_writers *writers, const struct fsx_wanted *wanted, uint8_t *answer, size_t *bytes,
                        bool *first);

#endif
