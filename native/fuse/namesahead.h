/* namesahead.h: directories that are listed ahead of the LOOKUPs that would ask for their names one by one.
 *
 * A program that opens files from a list costs a LOOKUP and a READ for each. Names that the kernel has from a READDIRPLUS
 * cost no LOOKUP, whoever has asked for it. So while the names of a directory are looked up, another process lists it, in
 * slices (programs/names.c; why a process: there).
 *
 * Owns what is known of each directory (how many files were looked up in it, how much of it is listed), and one end of the
 * socket to that process, which Python starts and ends. Any thread, without a lock: the state of a directory is two
 * numbers, and a bit in one of them belongs to the thread that orders, until the answer is there. Python has no part in it:
 * a slice would wake its thread twice.
 *
 * All of it is an accelerator. An order that cannot be sent is not sent; a process that has died, or does not answer,
 * gets no more orders.
 */
#ifndef FANSTORE_FUSE_NAMESAHEAD_H
#define FANSTORE_FUSE_NAMESAHEAD_H

#include <stdbool.h>
#include <stdint.h>

#include "format/index.h"

/* Of a directory no more names are listed than this for each LOOKUP in it. A new name takes 2.5 µs in a listing, a LOOKUP
 * 45 to 75: so what is listed in vain for a program that looks up a few names of a large directory takes another core about
 * as long as the program's own LOOKUPs and READs, and one that wants all has them after 3 % of its LOOKUPs. */
#define FSX_NAMES_PER_LOOKUP 32u
/* A directory is not listed before so many: to list some costs about as much as a LOOKUP or two, in vain for a program that
 * takes a few files of each directory. Measured, 2,000 directories of 20 files, of each of which one or two are read (from
 * memory, by 2 readers): 1.26 and 1.35 times as long if each is listed after the first LOOKUP. */
#define FSX_NAMES_FIRST_LOOKUPS 4u
/* Names in a slice, at least, unless there are no more. */
#define FSX_NAMES_SLICE_LEAST 64u
/* And at most: 3 ms, for which an unmount is busy. */
#define FSX_NAMES_SLICE_MOST 1024u
/* A directory with fewer names is not listed: there is nothing to gain. */
#define FSX_NAMES_WORTH 8u

struct fsx_names_ahead;

struct fsx_names_ahead_counts {
    uint64_t listings;    /* slices */
    uint64_t names;       /* in them */
    uint64_t directories; /* listed to their end */
};

/* The index must outlive it. NULL without memory. */
struct fsx_names_ahead *fsx_names_ahead_new(const struct fsx_index *index);
/* When no thread uses it. NULL is allowed. */
void fsx_names_ahead_free(struct fsx_names_ahead *names);

/* From now on, order what is worth it at the other end of this socket, which is duplicated; not more than `most` names in
 * all. Once. 0 or an errno. */
int fsx_names_ahead_use(struct fsx_names_ahead *names, int socket, uint64_t most);
/* From now on, order nothing. The process at the other end sees the end of its socket. */
void fsx_names_ahead_end(struct fsx_names_ahead *names);

/* A regular file of this directory of the dataset was looked up, and not read from a disk meanwhile (ahead.h); the
 * directory has no outputs. To be called after the kernel was answered. Never blocks. */
void fsx_names_ahead_note(struct fsx_names_ahead *names, uint32_t directory);

struct fsx_names_ahead_counts fsx_names_ahead_count(struct fsx_names_ahead *names);

#endif
