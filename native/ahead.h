/* ahead.h: files that are read ahead of the READ that will ask for them.
 *
 * A program that opens a file makes the kernel ask for its name (LOOKUP), and some 50 µs later for its bytes (READ). The
 * thread that has answered the first goes on to read the file from the disk; the one that gets the second finds it read,
 * or leaves it with the thread that reads. Only files that one answer holds, that are on a disk of this node, and only
 * while programs do read what they look up: a walk over all names must not read all files.
 *
 * Owns the places for what was read ahead, with their memory, and the record of what was looked up. Reads through
 * content.h, and says to engine.c, which uses it on its threads, what to answer. Each READ ends exactly once, on the thread
 * that brought it or on the one that reads its file. A read ahead that fails is no error of anybody: a READ that waits
 * for it goes the way of all that cannot be read here.
 *
 * `lock` guards places and record, for a few assignments and a look through them; never during a system call.
 */
#ifndef FANSTORE_AHEAD_H
#define FANSTORE_AHEAD_H

#include "fetching.h"

struct fsx_ahead;

/* Where READs end; called without the lock, on the thread that gave it, which knows itself by the context. */
struct fsx_ahead_ends {
    void *context;
    /* `length` bytes of data. */
    void (*answer)(void *context, const struct fsx_reader *reader, const uint8_t *data);
    /* It cannot be read here. */
    void (*elsewhere)(void *context, const struct fsx_reader *reader);
};

/* For so many threads; at most half of them read ahead at a time, so that a disk that hangs leaves the others. With one
 * thread, nothing is read ahead. The content must outlive it. NULL without memory. */
struct fsx_ahead *fsx_ahead_new(struct fsx_content *content, uint32_t workers);
/* When no thread uses it. NULL is allowed. */
void fsx_ahead_free(struct fsx_ahead *ahead);

/* The kernel is about to be told of this regular file, which it has looked up by name. Is it likely to ask for its bytes?
 * Then fsx_ahead_fetch, when it has been told. (Noted before, because its READ may come at once.) */
bool fsx_ahead_expects(struct fsx_ahead *ahead, uint32_t entry);

/* Read a file that is expected to be asked for, unless it was meanwhile, lies in memory, or there is no place. May exchange
 * the hands' answer for another. Blocks on a disk. Whether it is on a disk: if not, the LOOKUP was of no use. */
bool fsx_ahead_fetch(struct fsx_ahead *ahead, uint32_t entry, struct fsx_hands *hands, const struct fsx_ahead_ends *ends);

/* A READ, as fsx_content_read has it. It has ended when this returns, or is left with a thread that reads the file. */
void fsx_ahead_read(struct fsx_ahead *ahead, const struct fsx_reader *reader, struct fsx_hands *hands,
                    const struct fsx_ahead_ends *ends);

struct fsx_ahead_counts {
    uint64_t files;  /* read ahead */
    uint64_t wanted; /* of these, by a READ */
};
struct fsx_ahead_counts fsx_ahead_count(struct fsx_ahead *ahead);

#endif
