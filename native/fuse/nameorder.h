/* nameorder.h: what namesahead.c says to the program that lists directories (programs/names.c), and what that answers.
 *
 * Each message is a packet of a SOCK_SEQPACKET socket pair. Both sides are built together and run on one machine, so the
 * structures are the format. At most FSX_NAME_ORDERS orders are without their answer at a time.
 */
#ifndef FANSTORE_FUSE_NAMEORDER_H
#define FANSTORE_FUSE_NAMEORDER_H

#include <limits.h>
#include <stdint.h>

#define FSX_NAME_ORDERS 4u

/* List names of a directory. */
struct fsx_name_order {
    uint64_t directory; /* goes back with the answer */
    uint64_t cookie;    /* where to begin: an offset of lseek(2) */
    uint32_t names;     /* how many */
    uint32_t bytes;     /* what they take in the kernel's message, which is as large as the buffer of getdents64(2) */
    char path[PATH_MAX]; /* below the mount point, ended by a NUL, with which the packet ends; "" is the root */
};
#define FSX_NAME_ORDER_HEAD offsetof(struct fsx_name_order, path)

struct fsx_name_answer {
    uint64_t directory;
    uint64_t cookie; /* where the next listing begins */
    uint32_t names;  /* that were listed */
    uint32_t over;   /* 1: there are no more, or they cannot be listed */
};
_Static_assert(sizeof(struct fsx_name_answer) == 24, "no padding on the wire");

#endif
