/* operations.c: see operations.h. */
#include "fuse/operations.h"

#include <linux/fuse.h>

enum fsx_operation fsx_operation_of(uint32_t opcode) {
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
    case FUSE_CREATE: return FSX_OP_CREATE;
    default: return FSX_OP_OTHER;
    }
}

const char *fsx_operation_name(enum fsx_operation operation) {
    static const char *const NAMES[FSX_OPERATIONS] = {"lookup", "getattr", "readlink", "statfs", "readdir", "getxattr",
                                                      "open", "opendir", "read", "write", "create", "other"};
    return NAMES[operation];
}
