/* pagesahead.h: files that shall be in the kernel's page cache of the mount before a program reads them.
 *
 *   prefetch.c: the bytes are at hand -- add --> line --> socket --> programs/pages.c, which asks the kernel to read ahead
 *                                                                         |
 *                     kernel <-- answer -- engine thread <-- READ <-------+
 *
 * The kernel asks for such a file as for any other, and so no thread of the daemon ever waits for a page that is locked.
 * (FUSE_NOTIFY_STORE does: a thread that stores into a file which a program reads at that moment waits, and cannot be killed,
 * until the READ is answered. If the daemon is killed meanwhile, nobody answers, the thread keeps the connection alive, and
 * reader, daemon and mount hang for good. It was not faster either: a reader that computes 100 us for each file of 107 KB,
 * from memory, at 0.88 of ext4, and at 0.91 with this; two readers without computing 83 us per file each, with this 65,
 * and 85 without either.)
 *
 * Owns the line, and one end of the socket to that process, which Python starts and ends. Any thread; nothing blocks. `lock`
 * guards the line, for a few assignments; it is not held during a system call.
 */
#ifndef FANSTORE_CHUNKS_PAGESAHEAD_H
#define FANSTORE_CHUNKS_PAGESAHEAD_H

#include <stdbool.h>
#include <stdint.h>

#include "format/index.h"

struct fsx_pages_ahead;

struct fsx_pages_ahead_counts {
    uint64_t files, bytes; /* that the kernel has asked for because of this */
    uint64_t in_line;
};

/* The index must outlive it. NULL without memory. */
struct fsx_pages_ahead *fsx_pages_ahead_new(const struct fsx_index *index);
/* When no thread uses it. NULL is allowed. */
void fsx_pages_ahead_free(struct fsx_pages_ahead *pages);

/* From now on, order at the other end of this socket, which is duplicated; `process` reads it. Once. 0 or an errno. */
int fsx_pages_ahead_use(struct fsx_pages_ahead *pages, int socket, uint32_t process);
/* From now on, order nothing. The process at the other end sees the end of its socket. */
void fsx_pages_ahead_end(struct fsx_pages_ahead *pages);

/* Put a regular file, its first name, at the end of the line. What is added before there is a process waits for it. */
void fsx_pages_ahead_add(struct fsx_pages_ahead *pages, uint32_t entry);

/* The kernel asks for bytes of a file, for this thread of a program: whether that is our process. If not, the file need not
 * be ordered any more. */
bool fsx_pages_ahead_note_read(struct fsx_pages_ahead *pages, uint32_t entry, uint64_t offset, uint32_t length,
                               uint32_t thread);

/* Also goes on with the line, for which the process may have room again. */
struct fsx_pages_ahead_counts fsx_pages_ahead_count(struct fsx_pages_ahead *pages);

#endif
