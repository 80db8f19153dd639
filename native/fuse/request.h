/* request.h: one message of the kernel, looked at before anything in it is believed.
 *
 * The layout is that of <linux/fuse.h>. Nothing here keeps state, allocates or blocks; the pointers of a parsed request
 * point into the caller's message. Used by fuse_meta.c and engine.c, on any thread; fuzzed by tests/native/request_fuzz.c.
 */
#ifndef FANSTORE_FUSE_REQUEST_H
#define FANSTORE_FUSE_REQUEST_H

#include <linux/fuse.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct fsx_request {
    uint64_t unique; /* 0 for none; the kernel's numbers are even, bit 0 marks an INTERRUPT of the same request */
    uint64_t nodeid;
    uint32_t opcode;
    uint32_t thread; /* of the program that asks; 0 if it is the kernel itself, or one that it does not name */
    const uint8_t *arg; /* what follows the header */
    size_t arg_bytes;
};

/* Take the `bytes` bytes at `message` (aligned to 8) apart. False if they are not a message: shorter than a header, or
 * not as long as the header says. */
bool fsx_request_parse(const void *message, size_t bytes, struct fsx_request *request);

/* The fixed part of the arguments, of at least `bytes` bytes; NULL if the message is shorter. */
const void *fsx_request_fixed(const struct fsx_request *request, size_t bytes);

/* The name that begins `skip` bytes into the arguments and ends with NUL; NULL if there is none. `name_bytes` is its
 * length without the NUL. */
const uint8_t *fsx_request_name(const struct fsx_request *request, size_t skip, size_t *name_bytes);

#endif
