/* operations.h: the kinds of requests that are counted. */
#ifndef FANSTORE_FUSE_OPERATIONS_H
#define FANSTORE_FUSE_OPERATIONS_H

#include <stdint.h>

enum fsx_operation {
    FSX_OP_LOOKUP, FSX_OP_GETATTR, FSX_OP_READLINK, FSX_OP_STATFS, FSX_OP_READDIR, FSX_OP_GETXATTR, FSX_OP_OPEN,
    FSX_OP_OPENDIR, FSX_OP_READ, FSX_OP_WRITE, FSX_OP_CREATE, FSX_OP_OTHER, FSX_OPERATIONS
};

/* The kind of a request with this opcode of <linux/fuse.h>. */
enum fsx_operation fsx_operation_of(uint32_t opcode);
/* What it is called in stats.json. */
const char *fsx_operation_name(enum fsx_operation operation);

#endif
