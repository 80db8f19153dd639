/* passing.c: see passing.h. */
#include "fuse/passing.h"

#include <string.h>
#include <unistd.h>

#ifndef FUSE_DIRECT_IO_ALLOW_MMAP
#define FUSE_DIRECT_IO_ALLOW_MMAP (UINT64_C(1) << 36) /* since Linux 6.6 */
#endif

/* Only control files are read that way. */
#define FORWARDED_READ (128u << 10)
/* Inodes in one part of a BATCH_FORGET. */
#define FORGETS_MOST 8000u

_Static_assert(sizeof(struct fuse_in_header) + sizeof(struct fuse_batch_forget_in) +
                       FORGETS_MOST * sizeof(struct fuse_forget_one) <= FSX_PASS_BYTES,
               "a part fits into a packet");

void fsx_pass_handle(uint8_t *arg, const struct fsx_request *request) {
    size_t place = 0; /* where most structures have it */
    switch (request->opcode) {
    case FUSE_READ:
    case FUSE_READDIR:
    case FUSE_READDIRPLUS: {
        struct fuse_read_in *in = (struct fuse_read_in *)arg;
        if (request->arg_bytes < sizeof *in)
            return;
        if (in->size > FORWARDED_READ)
            in->size = FORWARDED_READ;
        break;
    }
    case FUSE_FLUSH:
    case FUSE_FSYNC:
    case FUSE_FSYNCDIR:
        break;
    case FUSE_SETATTR: {
        const struct fuse_setattr_in *in = (const struct fuse_setattr_in *)arg;
        if (request->arg_bytes < sizeof *in || (in->valid & FATTR_FH) == 0)
            return;
        place = offsetof(struct fuse_setattr_in, fh);
        break;
    }
    default:
        return;
    }
    if (request->arg_bytes >= place + sizeof request->nodeid)
        memcpy(arg + place, &request->nodeid, sizeof request->nodeid);
}

size_t fsx_pass_forgets(const struct fsx_tree *tree, const struct fsx_request *request, uint32_t *next, uint8_t *part) {
    const struct fuse_batch_forget_in *in = fsx_request_fixed(request, sizeof *in);
    struct fuse_forget_one one;
    if (in == NULL || in->count > (request->arg_bytes - sizeof *in) / sizeof one)
        return 0;
    const size_t begin = sizeof(struct fuse_in_header) + sizeof *in;
    uint32_t used = 0;
    for (; *next < in->count && used < FORGETS_MOST; ++*next) {
        memcpy(&one, request->arg + sizeof *in + *next * sizeof one, sizeof one);
        if (fsx_is_dataset(tree, one.nodeid))
            continue;
        memcpy(part + begin + used * sizeof one, &one, sizeof one);
        used++;
    }
    if (used == 0)
        return 0;
    const size_t bytes = begin + used * sizeof one;
    const struct fuse_in_header head = {.len = (uint32_t)bytes, .opcode = FUSE_BATCH_FORGET, .unique = request->unique};
    const struct fuse_batch_forget_in said = {.count = used};
    memcpy(part, &head, sizeof head);
    memcpy(part + sizeof head, &said, sizeof said);
    return bytes;
}

struct fsx_kernel fsx_pass_offer(const struct fsx_request *request) {
    struct fuse_init_in in = {0};
    const size_t known = request->arg_bytes < sizeof in ? request->arg_bytes : sizeof in;
    memcpy(&in, request->arg, known);
    const uint64_t more_flags = (in.flags & FUSE_INIT_EXT) != 0 ? (uint64_t)in.flags2 << 32 : 0;
    return (struct fsx_kernel){.major = in.major, .minor = in.minor, .flags = in.flags | more_flags};
}

void fsx_pass_init(const struct fsx_tree *tree, uint8_t *packet, size_t bytes, uint64_t offered,
                   uint16_t max_background) {
    struct fuse_out_header head;
    struct fuse_init_out out = {0};
    memcpy(&head, packet, sizeof head);
    if (head.error != 0 || bytes < sizeof head + 24)
        return;
    const size_t known = bytes - sizeof head < sizeof out ? bytes - sizeof head : sizeof out;
    memcpy(&out, packet + sizeof head, known);
    uint32_t wanted = FUSE_CACHE_SYMLINKS | FUSE_PARALLEL_DIROPS | FUSE_ASYNC_READ | FUSE_DO_READDIRPLUS;
    /* The dataset never changes, so the kernel need not look; READDIRPLUS not only when it guesses that it is of use. And
     * no truncation by OPEN: where the kernel opens by itself, it would believe that it has happened. Outputs are written
     * through: an error of a disk is told to the one who writes. */
    out.flags &= ~(uint32_t)(FUSE_AUTO_INVAL_DATA | FUSE_READDIRPLUS_AUTO | FUSE_ATOMIC_O_TRUNC | FUSE_WRITEBACK_CACHE);
    if (tree->outputs == NULL) {
        if (out.max_write > FSX_PASS_WRITE_BYTES)
            out.max_write = FSX_PASS_WRITE_BYTES;
    } else {
        /* Nothing here has set-user-ID (outputs/outputs.py refuses it), so the kernel need not ask before each write
         * whether there is something to take away. */
        wanted |= FUSE_MAX_PAGES | FUSE_BIG_WRITES | FUSE_HANDLE_KILLPRIV_V2;
        if (!fsx_outputs_alone(tree->outputs))
            wanted |= FUSE_AUTO_INVAL_DATA; /* other nodes write as well */
        out.max_write = FSX_OUTPUT_WRITE_BYTES;
        out.max_pages = (uint16_t)(FSX_OUTPUT_WRITE_BYTES / (uint32_t)sysconf(_SC_PAGESIZE));
        /* A kernel that has this also drops pages before a direct write. */
        if ((offered & FUSE_DIRECT_IO_ALLOW_MMAP) != 0 && known >= offsetof(struct fuse_init_out, unused)) {
            out.flags |= FUSE_INIT_EXT;
            out.flags2 |= (uint32_t)(FUSE_DIRECT_IO_ALLOW_MMAP >> 32);
            fsx_outputs_allow_direct(tree->outputs);
        }
    }
    out.flags |= wanted & (uint32_t)offered;
    out.max_background = max_background;
    out.congestion_threshold = (uint16_t)(max_background / 4 * 3);
    memcpy(packet + sizeof head, &out, known);
}
