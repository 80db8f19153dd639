/* ahead.h: files that are read ahead of the READ that will ask for them.
 *
 * A program that opens a file makes the kernel ask for its name (LOOKUP), and some 50 µs later for its bytes (READ). The
 * thread that has answered the first goes on and wants the file of the broker, on nobody's behalf; the READ finds it in the
 * cache, or in flight. Only files that one answer holds, that are on a disk of this node, and only while programs do read
 * what they look up: a walk over all names must not read all files.
 *
 * Owns the record of what was looked up and what of it was read. Used by engine.c, on its threads. `lock` guards all of it,
 * for a few assignments.
 */
#ifndef FANSTORE_FUSE_AHEAD_H
#define FANSTORE_FUSE_AHEAD_H

#include "chunks/broker.h"

struct fsx_ahead;

/* For so many threads; at most half of them read ahead at a time, so that a disk that hangs leaves the others. With one
 * thread, nothing is read ahead. The broker must outlive it. NULL without memory. */
struct fsx_ahead *fsx_ahead_new(struct fsx_broker *broker, uint32_t workers);
/* When no thread uses it. NULL is allowed. */
void fsx_ahead_free(struct fsx_ahead *ahead);

/* The kernel is about to be told of this regular file, which it has looked up by name. Is it likely to ask for its bytes?
 * Then fsx_ahead_fetch, when it has been told. (Noted before, because its READ may come at once.) */
bool fsx_ahead_expects(struct fsx_ahead *ahead, uint32_t entry);

/* Read a file that is expected to be asked for, unless it was meanwhile, or lies in memory. Blocks on a disk. Whether it is on
 * a disk: if not, the LOOKUP was of no use. */
bool fsx_ahead_fetch(struct fsx_ahead *ahead, uint32_t entry, struct fsx_read_counts *mine);

/* A READ of this file has come. */
void fsx_ahead_note_read(struct fsx_ahead *ahead, uint32_t entry);

#endif
