/* state.h: what the daemon tells preloaded programs of a mount: files of the directory `preload` in the job's directory.
 *
 * Written by fanstore/client/preload.py, which has the same layouts; docs/interception.md describes them. The directory is
 * the user's alone (mode 0700). All numbers are little-endian.
 *
 *   index        index.fsx, checked by the daemon; never changes
 *   state        struct fsx_state, then a struct fsx_state_part per partition; only the daemon writes, with pwrite
 *   marks        a byte per entry and per record of a chunk: number of the file in which a program found it intact
 *   counters     FSX_COUNTER_SLOTS lines of struct fsx_counters; programs add, the daemon believes nothing else of them
 *   placeholder  a socket that nobody listens on, so that it can never be opened for reading
 *   tree         without a mount: an empty directory per directory of the dataset that a program has opened or made its working
 *                directory, named by its entry number; programs make them
 */
#ifndef FANSTORE_PRELOAD_STATE_H
#define FANSTORE_PRELOAD_STATE_H

#include <stdint.h>

#define FSX_STATE_MAGIC "FSXSTATE"
#define FSX_STATE_VERSION 3u
#define FSX_STATE_PATH 4096u
#define FSX_NOTHING_HIDDEN UINT32_MAX

/* FSX_STATE_WAITS: without a mount, who closes an output says so and waits, because others are to see what it has written. */
#define FSX_STATE_WRITABLE 1u
#define FSX_STATE_WAITS 2u

enum fsx_state_verify { FSX_STATE_FIRST, FSX_STATE_ALWAYS, FSX_STATE_NEVER };

struct fsx_state {
    char magic[8];
    uint32_t version;
    uint32_t ended; /* the mount is no more: everything is passed on */
    uint32_t uid, gid;
    uint64_t device; /* st_dev of the mount; without one, a number that no file system has */
    uint32_t verify;
    uint32_t writable; /* FSX_STATE_WRITABLE: there may be outputs: what is said of directories is the mount's affair, or the daemon's */
    uint32_t entries, partitions;
    uint64_t marks_bytes, index_bytes;
    uint32_t hidden; /* the dataset's own ".fanstore", which the control directory hides */
    uint32_t points; /* how many names of the mount point follow: the real path, and the one that was given */
    uint64_t unmounted;     /* there is no mount: all is answered by the library and by the control socket */
    uint64_t blocks, files; /* of all of the dataset, as statfs has it */
    uint32_t shares;        /* the daemon shows its chunk cache, and answers for chunks (cache.c) */
    uint32_t zero[7];
    char point[2][FSX_STATE_PATH];
};
_Static_assert(sizeof(struct fsx_state) == 128 + 2 * FSX_STATE_PATH, "layout is shared with Python");

/* Values of `file`: none, so that the mount is asked; the prepared file; the copy on this node. */
#define FSX_STATE_FILE 0xffu
#define FSX_STATE_VERIFIED 0x100u /* all of its bytes were compared with their checksum */

struct fsx_state_part {
    uint32_t file; /* 0, 1 or 2, with FSX_STATE_VERIFIED; path[file - 1] is written before */
    uint32_t zero[3];
    char path[2][FSX_STATE_PATH];
};
_Static_assert(sizeof(struct fsx_state_part) == 16 + 2 * FSX_STATE_PATH, "layout is shared with Python");

#define FSX_COUNTER_SLOTS 64u

struct fsx_counters {
    uint64_t opens, reads, bytes, stats, promotions, passed, listings;
    uint64_t zero;
};
_Static_assert(sizeof(struct fsx_counters) == 64, "a cache line; layout is shared with Python");

#endif
