/* outputs/opens.h: who has outputs open, and whether with direct I/O.
 *
 * Who only writes a file does so with direct I/O (FOPEN_DIRECT_IO): a write is copied twice instead of three times. The
 * kernel drops pages of the file before such a write, but not after it, and who reads meanwhile would leave an old page
 * there. So a file is never open both ways at once: as long as somebody writes with direct I/O, whoever opens it does
 * likewise, and as long as somebody uses pages, everybody does. Pages that were mapped by one who had it open directly may
 * be old: they are dropped when it is next opened. Any thread.
 */
#ifndef FANSTORE_OUTPUTS_OPENS_H
#define FANSTORE_OUTPUTS_OPENS_H

#include <stdbool.h>
#include <stdint.h>

/* Set in the handle of whoever has an output open with direct I/O; the rest of a handle is the inode. */
#define FSX_DIRECT_HANDLE (UINT64_C(1) << 63)

struct fsx_output_opens;

/* How an output was opened. */
struct fsx_opened {
    uint64_t handle; /* 0 without memory: then it is not open */
    bool old_pages; /* what the kernel has of it must go */
};

/* NULL without memory. */
struct fsx_output_opens *fsx_output_opens_new(void);
/* Nobody may use it any more. NULL is allowed. */
void fsx_output_opens_free(struct fsx_output_opens *opens);

/* From now on, and not before: the kernel can map a file that is open past its pages. */
void fsx_output_opens_allow(struct fsx_output_opens *opens);

/* `flags` as of open(2). */
struct fsx_opened fsx_output_opens_open(struct fsx_output_opens *opens, uint64_t inode, uint32_t flags);
/* One who had it open has it no more. */
void fsx_output_opens_release(struct fsx_output_opens *opens, uint64_t handle);

#endif
