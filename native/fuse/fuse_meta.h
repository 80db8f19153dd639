/* fuse_meta.h: what follows from the index alone: names, attributes, listings, links, extended attributes.
 *
 * The same meaning as fanstore/dataset/namespace.py, which is the reference that tests compare with, in the bytes of
 * <linux/fuse.h>; and what of a request is for outputs (outputs.h). No I/O, no allocation, no lock but that of the names of
 * outputs. A struct fsx_tree never changes once it is in use, but for the two flags that are set before the kernel sends
 * its second request; any number of threads may use it.
 */
#ifndef FANSTORE_FUSE_FUSE_META_H
#define FANSTORE_FUSE_FUSE_META_H

#include <stdatomic.h>

#include "format/index.h"
#include "outputs/outputs.h"
#include "fuse/request.h"

/* How long the kernel may believe what it was told, in seconds: CACHE_S of fanstore/fuse/operations.py. */
#define FSX_CACHE_S 86400u

struct fsx_tree {
    const struct fsx_index *index;
    uint32_t uid; /* to whom everything belongs */
    uint32_t gid;
    int64_t hidden;  /* entry of the root that the control directory hides; -1 for none */
    uint64_t blocks; /* for STATFS, in units of 4096 bytes */
    uint64_t files;
    struct fsx_outputs *outputs; /* NULL: nothing can be written */
    atomic_bool no_open;    /* the kernel can be told that OPEN is not needed */
    atomic_bool no_opendir; /* likewise for OPENDIR; it may then keep listings */
    atomic_bool forward_missing; /* a name that is not there is forwarded: somebody may want to create it */
};

/* What is to be done with a request. */
enum fsx_verdict {
    FSX_REPLY,    /* send the reply */
    FSX_SILENCE,  /* done, the kernel expects no reply */
    FSX_READ,     /* read content: entry, offset and length are in the reply */
    FSX_OUTPUT,   /* do the task in the reply, on the content of an output */
    FSX_CREATE,   /* create what is wanted in the reply, or forward it */
    FSX_SYNC,     /* do the task in the reply, which syncs an output, and note it, or forward it */
    FSX_CLOSE,    /* an output is closed by one who waits for that to be known: note it, or forward it */
    FSX_FORWARD,  /* it is not for us: Python has the meaning */
};

struct fsx_reply {
    uint8_t *data; /* where the answer goes, aligned to 8; not touched beyond `room` */
    size_t room;
    size_t bytes; /* length of the answer */
    int error;    /* errno, or 0 */
    uint32_t entry; /* FSX_READ: which file, its first name */
    uint64_t offset;
    uint32_t length; /* FSX_READ: bytes up to the end of the file at most; may be 0 */
    union {
        struct fsx_task task;     /* FSX_OUTPUT, FSX_SYNC; its data points into the request */
        struct fsx_wanted wanted; /* FSX_CREATE; its name likewise */
    };
};

/* An inode number of the dataset is the entry of its first name plus one. */
static inline bool fsx_is_dataset(const struct fsx_tree *tree, uint64_t nodeid) {
    return nodeid >= 1 && nodeid <= tree->index->entries;
}

/* All three times of an inode are one. */
void fsx_fill_times(struct fuse_attr *attr, int64_t mtime_ns);

/* Answer a request. `reply` has `data` and `room` set. The message is not trusted: what is cut short or makes no sense is
 * forwarded, and Python refuses it; but a request for the content of an output fails with EIO. */
enum fsx_verdict fsx_answer(const struct fsx_tree *tree, const struct fsx_request *request, struct fsx_reply *reply);

/* Is this done at once and by the engine alone, unless something goes wrong: from memory, or by a short call of the local
 * page cache? */
bool fsx_is_quick(enum fsx_verdict verdict, const struct fsx_reply *reply);

#endif
