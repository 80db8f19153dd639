/* tarhead.h: headers of tar members: POSIX ustar, with a pax extended header where ustar cannot say it.
 *
 * Pure functions on the caller's memory; no allocation that outlives a call, no state, any thread.
 */
#ifndef FANSTORE_PREP_TARHEAD_H
#define FANSTORE_PREP_TARHEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FSX_TAR_BLOCK 512u
/* Files of so many bytes and more begin at a multiple of a page in their partition, so that they can be mapped. */
#define FSX_TAR_PAGE 4096u
#define FSX_TAR_ALIGNED_BYTES (1u << 20)

enum fsx_tar_type { FSX_TAR_FILE = '0', FSX_TAR_HARDLINK = '1', FSX_TAR_SYMLINK = '2', FSX_TAR_DIRECTORY = '5' };

/* What a header says. Paths are bytes without NUL, not terminated; a directory's path ends with '/'. */
struct fsx_tar_member {
    const uint8_t *path;
    size_t path_bytes;
    const uint8_t *link; /* target of a hard or symbolic link */
    size_t link_bytes;
    uint64_t size;         /* bytes of data that follow; 0 for all but files */
    uint64_t size_largest; /* headers for all sizes up to this have the same length; 0: only `size` counts */
    int64_t mtime_ns;
    uint32_t mode; /* permissions only are used */
    uint32_t uid;
    uint32_t gid;
    enum fsx_tar_type type;
    uint64_t position; /* where the header begins, for align */
    bool align;        /* make the header longer (a comment in its pax header), so that it ends at a multiple of a page */
};

/* Upper bound of what fsx_tar_header writes for this member, in bytes; FSX_TAR_FILL_MAX more if it is to be aligned. */
size_t fsx_tar_header_bound(size_t path_bytes, size_t link_bytes);

/* Write the header(s) of `member` to `out`; returns the number of bytes written, a multiple of 512, or 0 if `capacity`
 * is less than that bound. */
size_t fsx_tar_header(const struct fsx_tar_member *member, uint8_t *out, size_t capacity);

/* Write a header that says nothing, for the members behind it to begin at a multiple of a page: a global pax header with
 * a comment, which every tar skips. `position` is where it begins, a multiple of 512. Returns its length, 0 where there is
 * nothing to do; at most FSX_TAR_FILL_MAX. */
#define FSX_TAR_FILL_MAX (FSX_TAR_PAGE + FSX_TAR_BLOCK)
size_t fsx_tar_fill(uint64_t position, uint8_t *out);

/* `bytes` rounded up to whole tar blocks. */
static inline uint64_t fsx_tar_padded(uint64_t bytes) { return (bytes + FSX_TAR_BLOCK - 1) / FSX_TAR_BLOCK * FSX_TAR_BLOCK; }

#endif
