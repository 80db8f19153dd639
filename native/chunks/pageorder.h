/* pageorder.h: what pagesahead.c says to the program that has files read into the page cache (programs/pages.c).
 *
 * Each message is a packet of a SOCK_SEQPACKET socket pair; there is no answer. Both sides are built together and run on
 * one machine, so the structure is the format.
 */
#ifndef FANSTORE_CHUNKS_PAGEORDER_H
#define FANSTORE_CHUNKS_PAGEORDER_H

#include <limits.h>
#include <stdint.h>

/* Have a file read, from its beginning. */
struct fsx_page_order {
    uint64_t bytes;      /* how much of it, at least 1 */
    char path[PATH_MAX]; /* below the mount point, ended by a NUL, with which the packet ends */
};
#define FSX_PAGE_ORDER_HEAD offsetof(struct fsx_page_order, path)

#endif
