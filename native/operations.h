/* operations.h: kinds of requests, by the names that stats.json has for them. No state. */
#ifndef FANSTORE_OPERATIONS_H
#define FANSTORE_OPERATIONS_H

#include <linux/fuse.h>
#include <stdint.h>

enum fsx_operation {
    FSX_OP_LOOKUP, FSX_OP_GETATTR, FSX_OP_READLINK, FSX_OP_STATFS, FSX_OP_READDIR, FSX_OP_GETXATTR, FSX_OP_OPEN,
    FSX_OP_OPENDIR, FSX_OP_READ, FSX_OP_WRITE, FSX_OP_OTHER, FSX_OPERATIONS
};

static inline enum fsx_operation fsx_operation_of(uint32_t opcode) {
    switch (opcode) {
    case FUSE_LOOKUP: return FSX_OP_LOOKUP;
    case FUSE_GETATTR: return FSX_OP_GETATTR;
    case FUSE_READLINK: return FSX_OP_READLINK;
    case FUSE_STATFS: return FSX_OP_STATFS;
    case FUSE_READDIR:
    case FUSE_READDIRPLUS: return FSX_OP_READDIR;
    case FUSE_GETXATTR: return FSX_OP_GETXATTR;
    case FUSE_OPEN: return FSX_OP_OPEN;
    case FUSE_OPENDIR: return FSX_OP_OPENDIR;
    case FUSE_READ: return FSX_OP_READ;
    case FUSE_WRITE: return FSX_OP_WRITE;
    default: return FSX_OP_OTHER;
    }
}

#endif
