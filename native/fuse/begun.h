/* begun.h: which files are begun to be read, and by which threads of programs: what tells where each reader is in an order.
 *
 * A ring that engine threads write to without a lock and that Python takes from; what it does not take in time is
 * overwritten. Python is woken for the first file after it has said that it waits, so that a busy mount costs it a look
 * now and then and an idle one nothing. Owns the ring; the eventfd is the caller's. Any thread notes; one at a time takes.
 */
#ifndef FANSTORE_FUSE_BEGUN_H
#define FANSTORE_FUSE_BEGUN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Python looks every 10 ms while an order is followed: 400,000 files a second. */
#define FSX_BEGUN_RING 4096u

struct fsx_begun;

/* `wake`: an eventfd. NULL without memory. */
struct fsx_begun *fsx_begun_new(int wake);
/* When no thread uses it. NULL is allowed. */
void fsx_begun_free(struct fsx_begun *begun);

/* A thread begins to read a file. */
void fsx_begun_note(struct fsx_begun *begun, uint32_t entry, uint32_t thread);

/* The oldest that are left, at most FSX_BEGUN_RING, each once: entry in the upper half, thread in the lower. Adds to
 * `lost` how many were overwritten. */
size_t fsx_begun_take(struct fsx_begun *begun, uint64_t *files, uint64_t *lost);
/* Wake Python for the next one; false if there is one already. */
bool fsx_begun_wait(struct fsx_begun *begun);

#endif
