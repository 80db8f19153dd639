/* request_making.h: messages of the kernel, well formed and not, for request_fuzz.c, of which this is a part. */
#ifndef FANSTORE_REQUEST_MAKING_H
#define FANSTORE_REQUEST_MAKING_H

#include "fuse/fuse_meta.h"
#include "chance.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LENGTH(array) (sizeof(array) / sizeof *(array))

/* ---- what is going on, for a message when something is wrong --------------------------------------------------- */

static struct fuse_in_header current;

_Noreturn static void die(const char *text) {
    fprintf(stderr, "request_fuzz: %s (opcode %" PRIu32 ", node %" PRIu64 ", length %" PRIu32 ")\n", text,
            current.opcode, current.nodeid, current.len);
    exit(3);
}

static void check(bool right, const char *text) {
    if (!right)
        die(text);
}

static uint8_t *exact(size_t length) {
    uint8_t *data = malloc(length == 0 ? 1 : length);
    check(data != NULL, "out of memory");
    return data;
}

/* ---- messages ------------------------------------------------------------------------------------------------- */

static uint64_t nasty(uint64_t size) {
    static const uint64_t fixed[] = {0, 1, 2, 3, 511, 4095, 4096, 4194304, INT32_MAX, UINT32_MAX,
                                     (uint64_t)UINT32_MAX + 1, INT64_MAX, (uint64_t)INT64_MAX + 1, UINT64_MAX};
    switch (below(4)) {
    case 0: return fixed[below(LENGTH(fixed))];
    case 1: return size + below(3) - 1;
    default: return below(size + 1);
    }
}

static uint64_t some_node(const struct fsx_index *x) {
    const uint64_t odd[] = {0, 1, x->entries, (uint64_t)x->entries + 1, (uint64_t)x->entries + 2, UINT32_MAX,
                            (uint64_t)UINT32_MAX + 1, (uint64_t)UINT32_MAX + 2, UINT64_MAX, INT64_MAX,
                            FSX_OUTPUT_FIRST - 1, FSX_OUTPUT_END};
    if (below(4) == 0)
        return below(2) == 0 ? FSX_OUTPUT_FIRST + below(3) : FSX_OUTPUT_END - 1;
    return below(5) == 0 ? odd[below(LENGTH(odd))] : 1 + below(x->entries);
}

static uint32_t some_opcode(void) {
    static const uint32_t known[] = {FUSE_LOOKUP, FUSE_FORGET, FUSE_GETATTR, FUSE_READLINK, FUSE_OPEN, FUSE_READ,
                                     FUSE_STATFS, FUSE_RELEASE, FUSE_GETXATTR, FUSE_FLUSH, FUSE_OPENDIR, FUSE_READDIR,
                                     FUSE_RELEASEDIR, FUSE_ACCESS, FUSE_BATCH_FORGET, FUSE_READDIRPLUS, FUSE_WRITE,
                                     FUSE_FALLOCATE, FUSE_LSEEK, FUSE_FLUSH, FUSE_CREATE};
    return below(8) == 0 ? (uint32_t)(below(4) == 0 ? next_random() : below(60)) : known[below(LENGTH(known))];
}

/* The name of the outputs, in the directories that have one. */
#define OUTPUT_NAME "an output"
static bool has_output(uint64_t node) { return node % 3 == 1 && node < FSX_OUTPUT_FIRST + 3; }

struct message {
    uint8_t bytes[1 << 16];
    size_t used;
};

static void put(struct message *message, const void *data, size_t bytes) {
    memcpy(message->bytes + message->used, data, bytes);
    message->used += bytes;
}

/* A name of a directory, or nearly one, or nonsense; with its NUL, as a rule. */
static void put_name(struct message *message, const struct fsx_index *x, uint64_t node) {
    uint8_t name[600];
    size_t bytes = 0;
    const uint32_t entry = (uint32_t)(node - 1);
    const bool directory = node >= 1 && node <= x->entries && S_ISDIR(x->mode[entry]) && x->count[entry] > 0;
    static const char *const special[] = {"", ".", "..", ".fanstore", ".fanstor", "a/b", OUTPUT_NAME};
    if (directory && below(4) != 0) {
        const uint32_t child = x->first[entry] + (uint32_t)below(x->count[entry]);
        bytes = (size_t)(x->nameoff[child + 1] - x->nameoff[child]);
        memcpy(name, x->names + x->nameoff[child], bytes);
        if (below(4) == 0)
            name[below(bytes)] ^= (uint8_t)(1u << below(8));
        else if (below(6) == 0)
            name[bytes++] = 'x';
    } else if (below(2) == 0) {
        const char *const chosen = special[below(LENGTH(special))];
        bytes = strlen(chosen);
        memcpy(name, chosen, bytes);
    } else {
        bytes = below(4) == 0 ? 250 + below(300) : below(20);
        memset(name, 'n', bytes);
    }
    put(message, name, bytes);
    if (below(10) != 0)
        put(message, "", 1);
}

static void put_arguments(struct message *message, const struct fsx_index *x, uint32_t opcode, uint64_t node) {
    const uint32_t entry = (uint32_t)(node - 1);
    const bool dataset = node >= 1 && node <= x->entries;
    switch (opcode) {
    case FUSE_LOOKUP:
        put_name(message, x, node);
        return;
    case FUSE_CREATE:
        put(message, &(struct fuse_create_in){.flags = (uint32_t)nasty(O_RDWR), .mode = (uint32_t)next_random(),
                                              .umask = (uint32_t)nasty(0777)},
            sizeof(struct fuse_create_in));
        put_name(message, x, node);
        return;
    case FUSE_READ:
        put(message, &(struct fuse_read_in){.offset = nasty(dataset ? x->size[entry] : 100),
                                            .size = (uint32_t)nasty(dataset ? x->size[entry] : 100)},
            sizeof(struct fuse_read_in));
        return;
    case FUSE_READDIR:
    case FUSE_READDIRPLUS: {
        static const uint32_t sizes[] = {0, 1, 7, 8, 24, 31, 32, 33, 151, 160, 168, 4096, 32768, UINT32_MAX};
        const uint32_t size = below(2) == 0 ? sizes[below(LENGTH(sizes))] : (uint32_t)below(5000);
        put(message, &(struct fuse_read_in){.offset = below(3) == 0 ? 0 : nasty(dataset ? x->count[entry] + 3 : 5),
                                            .size = size},
            sizeof(struct fuse_read_in));
        return;
    }
    case FUSE_GETXATTR: {
        static const char *const names[] = {"user.fanstore.codec", "user.fanstore.stored_size",
                                            "user.fanstore.checksum", "user.fanstore.partition", "user.fanstore.",
                                            "user.fanstore", "security.selinux", ""};
        static const uint32_t sizes[] = {0, 1, 3, 4, 16, 24, 65536};
        const char *const name = names[below(LENGTH(names))];
        put(message, &(struct fuse_getxattr_in){.size = sizes[below(LENGTH(sizes))]}, sizeof(struct fuse_getxattr_in));
        put(message, name, strlen(name) + (below(10) != 0));
        return;
    }
    case FUSE_WRITE: {
        uint8_t data[300] = {1};
        const uint32_t bytes = (uint32_t)below(sizeof data);
        put(message, &(struct fuse_write_in){.offset = nasty(100),
                                             .size = below(4) == 0 ? (uint32_t)nasty(bytes) : bytes},
            sizeof(struct fuse_write_in));
        put(message, data, bytes);
        return;
    }
    case FUSE_FALLOCATE:
        put(message, &(struct fuse_fallocate_in){.offset = nasty(100), .length = nasty(100), .mode = (uint32_t)nasty(3)},
            sizeof(struct fuse_fallocate_in));
        return;
    case FUSE_LSEEK:
        put(message, &(struct fuse_lseek_in){.offset = nasty(dataset ? x->size[entry] : 100),
                                             .whence = (uint32_t)(below(2) == 0 ? SEEK_DATA + below(2) : nasty(5))},
            sizeof(struct fuse_lseek_in));
        return;
    case FUSE_OPEN:
    case FUSE_OPENDIR: {
        static const uint32_t flags[] = {O_RDONLY, O_WRONLY, O_RDWR, O_RDONLY | O_TRUNC, UINT32_MAX};
        put(message, &(struct fuse_open_in){.flags = flags[below(LENGTH(flags))]}, sizeof(struct fuse_open_in));
        return;
    }
    case FUSE_BATCH_FORGET: {
        const uint32_t there = (uint32_t)below(20);
        const uint32_t said = below(3) == 0 ? (uint32_t)nasty(there) : there;
        const bool all_ours = below(2) == 0;
        put(message, &(struct fuse_batch_forget_in){.count = said}, sizeof(struct fuse_batch_forget_in));
        for (uint32_t i = 0; i < there; i++)
            put(message, &(struct fuse_forget_one){.nodeid = all_ours ? 1 + below(x->entries) : some_node(x), .nlookup = 1},
                sizeof(struct fuse_forget_one));
        return;
    }
    default: { /* of a length that may be right */
        uint8_t noise[128];
        for (size_t i = 0; i < sizeof noise; i++)
            noise[i] = (uint8_t)next_random();
        put(message, noise, below(sizeof noise));
    }
    }
}

/* Make a message, as a block of its own; `*bytes` is its length. */
static uint8_t *make_message(const struct fsx_index *x, size_t *bytes) {
    static struct message message;
    message.used = 0;
    struct fuse_in_header head = {.opcode = some_opcode(), .unique = next_random(), .nodeid = some_node(x)};
    put(&message, &head, sizeof head);
    put_arguments(&message, x, head.opcode, head.nodeid);
    if (below(8) == 0) /* cut short; the header knows, or not */
        message.used = below(message.used + 1);
    head.len = (uint32_t)message.used;
    if (below(25) == 0)
        head.len = below(2) == 0 ? head.len + (uint32_t)below(3) - 1 : (uint32_t)nasty(head.len);
    memcpy(message.bytes, &head, message.used < sizeof head ? message.used : sizeof head);
    if (below(10) == 0 && message.used > 4)
        for (uint64_t times = 1 + below(4); times > 0; times--)
            message.bytes[4 + below(message.used - 4)] = (uint8_t)next_random();
    uint8_t *copy = exact(message.used);
    memcpy(copy, message.bytes, message.used);
    *bytes = message.used;
    return copy;
}

#endif
