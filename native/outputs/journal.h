/* outputs/journal.h: records that C adds to the journal of outputs, in the format of fanstore/outputs/journal.py.
 *
 * The file is Python's, which writes to it as well; who writes when is outputs/engine_creates.h's to order, and the position goes
 * from one to the other. Owns a duplicate of the descriptor. One thread at a time.
 */
#ifndef FANSTORE_OUTPUTS_JOURNAL_H
#define FANSTORE_OUTPUTS_JOURNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct fsx_output_journal {
    int fd;           /* -1: nothing is noted */
    uint32_t rank;    /* of this node */
    int64_t position; /* where the next record goes; -1: nothing can be noted at the moment */
};

/* Duplicates `fd`; with -1 nothing is noted, successfully. False with errno set. */
bool fsx_output_journal_open(struct fsx_output_journal *journal, int fd, uint32_t rank);
void fsx_output_journal_close(struct fsx_output_journal *journal);

/* The operations `create`, of a new file, and `commit` of fanstore/outputs/tree.py, by this node. False if it could not be
 * written: then nothing was. */
bool fsx_output_journal_create(struct fsx_output_journal *journal, uint64_t parent, const void *name, size_t name_bytes,
                               uint32_t mode, int64_t mtime_ns);
bool fsx_output_journal_commit(struct fsx_output_journal *journal, uint64_t inode, uint64_t size, int64_t mtime_ns);

#endif
