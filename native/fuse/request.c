/* request.c: see request.h. */
#include "fuse/request.h"

#include <string.h>

bool fsx_request_parse(const void *message, size_t bytes, struct fsx_request *request) {
    struct fuse_in_header head;
    if (bytes < sizeof head)
        return false;
    memcpy(&head, message, sizeof head);
    if (head.len != bytes)
        return false;
    *request = (struct fsx_request){
        .unique = head.unique,
        .nodeid = head.nodeid,
        .opcode = head.opcode,
        .thread = head.pid,
        .arg = (const uint8_t *)message + sizeof head,
        .arg_bytes = bytes - sizeof head,
    };
    return true;
}

const void *fsx_request_fixed(const struct fsx_request *request, size_t bytes) {
    return request->arg_bytes >= bytes ? request->arg : NULL;
}

const uint8_t *fsx_request_name(const struct fsx_request *request, size_t skip, size_t *name_bytes) {
    if (request->arg_bytes <= skip)
        return NULL;
    const uint8_t *name = request->arg + skip;
    const uint8_t *end = memchr(name, 0, request->arg_bytes - skip);
    if (end == NULL)
        return NULL;
    *name_bytes = (size_t)(end - name);
    return name;
}
