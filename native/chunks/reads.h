/* reads.h: a piece of a file, put together from the chunks that it lies in: what most of those who want chunks want.
 *
 * No state of its own: a read is the caller's memory, and the broker's until it is done. Any thread.
 */
#ifndef FANSTORE_CHUNKS_READS_H
#define FANSTORE_CHUNKS_READS_H

#include "chunks/broker.h"

/* The most that the kernel asks for (256 pages). */
#define FSX_READ_BYTES (1u << 20)

struct fsx_read {
    uint32_t entry;
    uint32_t length; /* 1 to FSX_CHUNK_BYTES, all of it in the file: it lies in two chunks at most */
    uint64_t offset;
    /* Its bytes, for the time of the call, or an errno. Exactly once, on any thread; must not block on a disk. */
    void (*done)(struct fsx_read *read, const void *data, int error);
    /* --- set here --- */
    struct fsx_broker *broker;
    struct fsx_waiter waiter;
    uint8_t *whole; /* of one in two chunks, once the first has come */
    uint32_t got;
};

/* The first four fields are set. `mine` as fsx_broker_want has it. */
void fsx_read_start(struct fsx_read *read, struct fsx_broker *broker, struct fsx_read_counts *mine);

/* Take back a read that waits for a chunk and `matches`: it is the caller's again, and not done. NULL if there is none. */
struct fsx_read *fsx_read_cancel(struct fsx_broker *broker, bool (*matches)(const struct fsx_read *read, uint64_t key),
                                 uint64_t key);

#endif
