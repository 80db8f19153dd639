/* passing.h: what is changed in messages on their way between the kernel and pyfuse3.
 *
 * Functions of their arguments alone: no state, no allocation, no I/O. Used by engine.c, on any thread.
 */
#ifndef FANSTORE_FUSE_PASSING_H
#define FANSTORE_FUSE_PASSING_H

#include "fuse/fuse_meta.h"

/* Largest request that is passed on, and the largest of all where nothing is written: what the kernel may write at once,
 * and some. A packet of the socket must be well below 2 * net.core.wmem_max, which an ordinary user cannot raise (425,984
 * bytes by default). */
#define FSX_PASS_WRITE_BYTES (128u << 10)
#define FSX_PASS_BYTES (FSX_PASS_WRITE_BYTES + (16u << 10))

/* pyfuse3's handlers know a file by its handle, which the kernel does not have when it opens by itself: then the handle is
 * the inode number. READ is cut to what fits into a packet. `arg` is that of the request, writable. */
void fsx_pass_handle(uint8_t *arg, const struct fsx_request *request);

/* BATCH_FORGET may be as long as what is read at once, too long for a packet. What is not of the dataset, from the inode
 * with number `*next` on, as a message of its own in `part`, aligned to 8, of FSX_PASS_BYTES; its length. 0 at the end, or
 * if the message says more than it has. */
size_t fsx_pass_forgets(const struct fsx_tree *tree, const struct fsx_request *request, uint32_t *next, uint8_t *part);

/* What the kernel offers when the connection begins. */
struct fsx_kernel {
    uint32_t major, minor;
    uint64_t flags;
};
/* As INIT says it. */
struct fsx_kernel fsx_pass_offer(const struct fsx_request *request);

/* What pyfuse3 said to INIT, completed by what it has no words for. `offered`: flags of the kernel. */
void fsx_pass_init(const struct fsx_tree *tree, uint8_t *packet, size_t bytes, uint64_t offered, uint16_t max_background);

#endif
