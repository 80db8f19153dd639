/* request_fuzz.c: throws messages at native/request.c and native/answers.c; built with sanitizers by
 * test_native_sanitized.py.
 *
 *   request_fuzz SEED ROUNDS INDEX...
 *
 * ROUNDS messages per index: of all opcodes, most of them well formed with odd numbers in them, others cut short, with a
 * wrong length, without the NUL of a name, or with bytes changed at random. Message and answer lie in blocks of memory of
 * exactly their size, so that the address sanitizer sees any access outside. Each answer is compared with what the index
 * says. Half of the messages come to a tree with outputs: some names, and directories that are mixed. Prints "replies R
 * silent S reads D outputs O forwarded F refused X"; anything odd ends the program with a message and a code that
 * is not zero.
 */
#include "../../native/answers.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static uint64_t state;

/* xorshift64*: the same numbers on every machine. */
static uint64_t next_random(void) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * UINT64_C(2685821657736338717);
}

static uint64_t below(uint64_t limit) { return limit == 0 ? 0 : next_random() % limit; }

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
                                     FUSE_FALLOCATE, FUSE_LSEEK, FUSE_FLUSH};
    return below(8) == 0 ? (uint32_t)(below(4) == 0 ? next_random() : below(60)) : known[below(LENGTH(known))];
}

/* The name of the outputs, in the directories that have one. */
#define OUTPUT_NAME "an output"
static bool has_output(uint64_t node) { return node % 3 == 1; }

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

/* ---- answers -------------------------------------------------------------------------------------------------- */

/* `ino`: of an entry the number of its first name; of an inode the one that was asked for. */
static void check_attributes(const struct fsx_tree *tree, const struct fuse_attr *attr, uint32_t entry, uint64_t ino) {
    const struct fsx_index *x = tree->index;
    const __int128 ns = (__int128)(int64_t)attr->mtime * 1000000000 + attr->mtimensec;
    check(attr->ino == ino && attr->size == x->size[entry] && attr->mode == x->mode[entry] &&
              attr->nlink == x->nlink[entry] && attr->uid == tree->uid && attr->gid == tree->gid,
          "wrong attributes");
    check(attr->mtimensec < 1000000000 && ns == x->mtime[entry] && attr->atime == attr->mtime, "wrong time");
}

static bool is_mixed(const struct fsx_tree *tree, uint32_t entry) {
    return tree->outputs != NULL && fsx_outputs_is_mixed(tree->outputs, entry);
}

static void check_entry(const struct fsx_tree *tree, const struct fuse_entry_out *out, uint32_t entry) {
    check(out->nodeid == (uint64_t)tree->index->inode[entry] + 1, "wrong node");
    check(out->entry_valid == FSX_CACHE_S && out->attr_valid == FSX_CACHE_S, "not to be remembered");
    check_attributes(tree, &out->attr, entry, out->nodeid);
}

static void check_lookup(const struct fsx_tree *tree, const struct fsx_request *request, const struct fsx_reply *reply) {
    struct fuse_entry_out out;
    check(reply->bytes == sizeof out, "wrong length of an entry");
    memcpy(&out, reply->data, sizeof out);
    const size_t name_bytes = strnlen((const char *)request->arg, request->arg_bytes);
    check(name_bytes < request->arg_bytes, "a name without end was looked up");
    const bool output = tree->outputs != NULL && fsx_is_output(request->nodeid);
    const int64_t child =
        output ? -1 : (int64_t)fsx_index_lookup(tree->index, request->nodeid - 1, request->arg, name_bytes);
    if (child >= 0) {
        check(!is_mixed(tree, (uint32_t)child), "a directory of Python's");
        check_entry(tree, &out, (uint32_t)child);
        return;
    }
    const bool lasting = tree->outputs == NULL || fsx_outputs_alone(tree->outputs);
    check(out.nodeid == 0 && out.entry_valid == (lasting ? FSX_CACHE_S : 0), "a name that is not there");
    check(tree->outputs == NULL || !has_output(request->nodeid) || strcmp((const char *)request->arg, OUTPUT_NAME) != 0,
          "an output is denied");
}

/* What a listing must say from a cookie on; false at its end. */
static bool expect_name(const struct fsx_tree *tree, uint32_t directory, uint64_t cookie, const void **name, size_t *bytes,
                        uint32_t *entry, uint64_t *next) {
    const struct fsx_index *x = tree->index;
    if (cookie < 2) {
        *name = "..";
        *bytes = (size_t)cookie + 1;
        *entry = cookie == 0 ? directory : x->parent[directory];
        *next = cookie + 1;
        return true;
    }
    uint64_t k = cookie - 2;
    if (k < x->count[directory] && (int64_t)(x->first[directory] + k) == tree->hidden)
        k++;
    if (k >= x->count[directory])
        return false;
    *entry = x->first[directory] + (uint32_t)k;
    *name = x->names + x->nameoff[*entry];
    *bytes = (size_t)(x->nameoff[*entry + 1] - x->nameoff[*entry]);
    *next = k + 3;
    return true;
}

static void check_listing(const struct fsx_tree *tree, const struct fsx_request *request, const struct fsx_reply *reply) {
    const bool plus = request->opcode == FUSE_READDIRPLUS;
    const size_t head = plus ? FUSE_NAME_OFFSET_DIRENTPLUS : FUSE_NAME_OFFSET;
    struct fuse_read_in in;
    memcpy(&in, request->arg, sizeof in);
    check(reply->bytes <= in.size && reply->bytes % 8 == 0, "wrong length of a listing");
    const uint32_t directory = (uint32_t)(request->nodeid - 1);
    uint64_t cookie = in.offset > INT64_MAX ? 0 : in.offset, next = 0;
    size_t used = 0, bytes = 0;
    uint32_t entry = 0;
    const void *name = NULL;
    bool more;
    while ((more = expect_name(tree, directory, cookie, &name, &bytes, &entry, &next)) && used < reply->bytes) {
        struct fuse_dirent dirent;
        check(reply->bytes - used >= FUSE_DIRENT_ALIGN(head + bytes), "half a name");
        memcpy(&dirent, reply->data + used + head - sizeof dirent, sizeof dirent);
        check(dirent.namelen == bytes && memcmp(reply->data + used + head, name, bytes) == 0, "wrong name");
        check(dirent.off == next && dirent.ino == (uint64_t)tree->index->inode[entry] + 1 &&
                  dirent.type == (tree->index->mode[entry] & S_IFMT) >> 12,
              "wrong name entry");
        for (size_t i = head + bytes; i < FUSE_DIRENT_ALIGN(head + bytes); i++)
            check(reply->data[used + i] == 0, "padding that says something");
        if (plus) {
            struct fuse_entry_out out;
            memcpy(&out, reply->data + used, sizeof out);
            if (cookie < 2 || is_mixed(tree, entry))
                check(out.nodeid == 0, "a look-up of a dot, or of a directory of Python's");
            else
                check_entry(tree, &out, entry);
        }
        used += FUSE_DIRENT_ALIGN(head + bytes);
        cookie = next;
    }
    check(used == reply->bytes, "a listing longer than its directory");
    const size_t room = in.size < reply->room ? in.size : reply->room;
    check(!more || FUSE_DIRENT_ALIGN(head + bytes) > room - used, "a listing that stops early");
}

static void check_xattr(const struct fsx_tree *tree, const struct fsx_request *request, const struct fsx_reply *reply) {
    struct fuse_getxattr_in in;
    memcpy(&in, request->arg, sizeof in);
    const char *name = (const char *)request->arg + sizeof in;
    const uint32_t entry = (uint32_t)(request->nodeid - 1);
    char value[32];
    if (strcmp(name, "user.fanstore.codec") == 0)
        strcpy(value, tree->index->codec[entry] == FSX_CODEC_LZ4 ? "lz4" : "none");
    else if (strcmp(name, "user.fanstore.stored_size") == 0)
        snprintf(value, sizeof value, "%" PRIu64, tree->index->stored[entry]);
    else
        snprintf(value, sizeof value, "%016" PRIx64, tree->index->checksum[entry]);
    struct fuse_getxattr_out out = {0};
    if (in.size == 0) {
        check(reply->bytes == sizeof out, "wrong length of a size");
        memcpy(&out, reply->data, sizeof out);
        check(out.size == strlen(value), "wrong size of a value");
    } else {
        check(reply->bytes == strlen(value) && reply->bytes <= in.size && memcmp(reply->data, value, reply->bytes) == 0,
              "wrong value");
    }
}

static void check_seek(const struct fsx_tree *tree, const struct fsx_request *request, const struct fsx_reply *reply) {
    struct fuse_lseek_in in;
    struct fuse_lseek_out out;
    check(reply->bytes == sizeof out && request->arg_bytes >= sizeof in, "wrong length of a seek");
    memcpy(&in, request->arg, sizeof in);
    memcpy(&out, reply->data, sizeof out);
    const uint64_t size = tree->index->size[request->nodeid - 1];
    check(in.offset < size && out.offset == (in.whence == SEEK_DATA ? in.offset : size), "a hole in the dataset");
}

static void check_reply(const struct fsx_tree *tree, const struct fsx_request *request, const struct fsx_reply *reply) {
    check(reply->bytes <= reply->room, "an answer longer than its room");
    check(reply->error >= 0 && reply->error < 512, "an error that the kernel does not take");
    const bool dataset = request->nodeid >= 1 && request->nodeid <= tree->index->entries;
    if (reply->error != 0) {
        check(reply->bytes == 0, "an error with data");
        check(reply->error != EIO || reply->room < 256 || request->opcode == FUSE_READLINK ||
                  (tree->outputs != NULL && fsx_is_output(request->nodeid)),
              "an answer without room");
        return;
    }
    switch (request->opcode) {
    case FUSE_OPEN:
    case FUSE_OPENDIR:
        check(reply->bytes == sizeof(struct fuse_open_out), "wrong length of an open");
        return;
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
        check(reply->bytes == 0, "a release with data");
        return;
    case FUSE_FLUSH:
        check(reply->bytes == 0 && tree->outputs != NULL, "a flush where nothing is written");
        check(!fsx_is_output(request->nodeid) || !fsx_outputs_waits(tree->outputs), "a flush of an output");
        return;
    default:
        break;
    }
    const bool in_outputs = tree->outputs != NULL && request->opcode == FUSE_LOOKUP && fsx_is_output(request->nodeid);
    check(dataset || in_outputs, "a node that does not exist was answered");
    const uint32_t entry = (uint32_t)(request->nodeid - 1);
    const bool of_directory = request->opcode == FUSE_GETATTR || request->opcode == FUSE_READDIR ||
                              request->opcode == FUSE_READDIRPLUS;
    check(!of_directory || !is_mixed(tree, entry), "a directory of Python's");
    switch (request->opcode) {
    case FUSE_LOOKUP:
        check_lookup(tree, request, reply);
        return;
    case FUSE_LSEEK:
        check_seek(tree, request, reply);
        return;
    case FUSE_GETATTR: {
        struct fuse_attr_out out;
        check(reply->bytes == sizeof out, "wrong length of attributes");
        memcpy(&out, reply->data, sizeof out);
        check_attributes(tree, &out.attr, entry, (uint64_t)entry + 1);
        return;
    }
    case FUSE_READLINK:
        check(reply->bytes == tree->index->size[entry] &&
                  memcmp(reply->data, tree->index->links + tree->index->offset[entry], reply->bytes) == 0,
              "wrong target");
        return;
    case FUSE_STATFS:
        check(reply->bytes == sizeof(struct fuse_statfs_out), "wrong length of statfs");
        return;
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
        check_listing(tree, request, reply);
        return;
    case FUSE_GETXATTR:
        check_xattr(tree, request, reply);
        return;
    default:
        die("a request that is not ours was answered");
    }
}

static void check_read(const struct fsx_tree *tree, const struct fsx_request *request, const struct fsx_reply *reply) {
    const struct fsx_index *x = tree->index;
    struct fuse_read_in in;
    check(request->opcode == FUSE_READ && request->arg_bytes >= sizeof in, "a read that is none");
    memcpy(&in, request->arg, sizeof in);
    check(reply->entry < x->entries && S_ISREG(x->mode[reply->entry]) && x->inode[reply->entry] == reply->entry &&
              x->inode[request->nodeid - 1] == reply->entry,
          "a read of something else");
    const uint64_t left = in.offset < x->size[reply->entry] ? x->size[reply->entry] - in.offset : 0;
    check(reply->offset == in.offset && reply->length == (in.size < left ? in.size : left), "a read outside its file");
}

static void check_task(const struct fsx_tree *tree, const struct fsx_request *request, const struct fsx_reply *reply) {
    const struct fsx_task *task = &reply->task;
    check(tree->outputs != NULL && fsx_is_output(request->nodeid) && task->inode == request->nodeid &&
              task->opcode == request->opcode,
          "a task of something else");
    switch (task->opcode) {
    case FUSE_READ:
        check(task->length <= reply->room, "a read without room");
        return;
    case FUSE_WRITE: {
        struct fsx_task *copy = fsx_task_copy(task); /* touches all bytes of the message, and no others */
        check(copy != NULL && memcmp(copy->data, task->data, (size_t)task->length) == 0, "another task");
        free(copy);
        return;
    }
    case FUSE_FALLOCATE:
        return;
    default:
        check(task->opcode == FUSE_LSEEK && (task->mode == SEEK_DATA || task->mode == SEEK_HOLE), "no such task");
    }
}

static void check_silence(const struct fsx_tree *tree, const struct fsx_request *request) {
    struct fuse_batch_forget_in in = {0};
    if (request->opcode == FUSE_FORGET) {
        check(request->nodeid >= 1 && request->nodeid <= tree->index->entries, "a node that is not ours was forgotten");
        return;
    }
    check(request->opcode == FUSE_BATCH_FORGET && request->arg_bytes >= sizeof in, "silence where an answer is due");
    memcpy(&in, request->arg, sizeof in);
    check(sizeof in + in.count * sizeof(struct fuse_forget_one) <= request->arg_bytes, "more forgotten than was said");
    for (uint32_t i = 0; i < in.count; i++) {
        struct fuse_forget_one one;
        memcpy(&one, request->arg + sizeof in + i * sizeof one, sizeof one);
        check(one.nodeid >= 1 && one.nodeid <= tree->index->entries, "a node that is not ours was forgotten");
    }
}

/* ---- rounds --------------------------------------------------------------------------------------------------- */

struct counts {
    uint64_t replies, silent, reads, outputs, forwarded, refused;
};

static void one_round(const struct fsx_tree *tree, struct counts *counts) {
    size_t bytes;
    uint8_t *message = make_message(tree->index, &bytes);
    memset(&current, 0, sizeof current);
    memcpy(&current, message, bytes < sizeof current ? bytes : sizeof current);
    struct fsx_request request;
    const bool parsed = fsx_request_parse(message, bytes, &request);
    check(parsed == (bytes >= sizeof current && current.len == bytes), "a message of another length");
    if (!parsed) {
        counts->refused++;
        free(message);
        return;
    }
    static const size_t rooms[] = {0, 8, 103, 127, 128, 256, 4096, 8192, 40000};
    const size_t room = rooms[below(4) == 0 ? below(LENGTH(rooms)) : LENGTH(rooms) - 1 - below(3)];
    struct fsx_reply reply = {.data = exact(room), .room = room, .error = -1, .entry = UINT32_MAX};
    switch (fsx_answer(tree, &request, &reply)) {
    case FSX_REPLY:
        check_reply(tree, &request, &reply);
        counts->replies++;
        break;
    case FSX_SILENCE:
        check_silence(tree, &request);
        counts->silent++;
        break;
    case FSX_READ:
        check_read(tree, &request, &reply);
        counts->reads++;
        break;
    case FSX_OUTPUT:
        check_task(tree, &request, &reply);
        counts->outputs++;
        break;
    case FSX_FORWARD:
        counts->forwarded++;
        break;
    default:
        die("no verdict");
    }
    free(reply.data);
    free(message);
}

static void *read_file(const char *path, size_t *length) {
    FILE *file = fopen(path, "rb");
    check(file != NULL && fseek(file, 0, SEEK_END) == 0, "cannot open an index");
    const long bytes = ftell(file);
    rewind(file);
    check(bytes >= 0, "cannot read an index");
    uint8_t *data = exact((size_t)bytes);
    check(fread(data, 1, (size_t)bytes, file) == (size_t)bytes, "cannot read an index");
    fclose(file);
    *length = (size_t)bytes;
    return data;
}

/* With outputs in a third of all directories, of which some of the dataset are mixed. Nothing is opened. */
static struct fsx_outputs *make_outputs(const struct fsx_index *x, bool alone) {
    const int directory = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct fsx_outputs *outputs = fsx_outputs_new(directory, x->entries, alone, !alone);
    check(directory >= 0 && outputs != NULL, "no outputs");
    close(directory);
    for (uint32_t i = 0; i < x->entries; i++) {
        if (has_output((uint64_t)i + 1))
            fsx_outputs_add_name(outputs, (uint64_t)i + 1, OUTPUT_NAME, strlen(OUTPUT_NAME));
        if (i > 0 && i % 4 == 1 && S_ISDIR(x->mode[i]))
            fsx_outputs_mix(outputs, i);
    }
    for (uint64_t node = FSX_OUTPUT_FIRST; node < FSX_OUTPUT_FIRST + 3; node++)
        if (has_output(node))
            fsx_outputs_add_name(outputs, node, OUTPUT_NAME, strlen(OUTPUT_NAME));
    return outputs;
}

int main(int argc, char **argv) {
    check(argc >= 4, "usage: request_fuzz SEED ROUNDS INDEX...");
    state = strtoull(argv[1], NULL, 10) * 2 + 1;
    const long rounds = strtol(argv[2], NULL, 10);
    struct counts counts = {0};
    for (int f = 3; f < argc; f++) {
        size_t length;
        void *data = read_file(argv[f], &length);
        struct fsx_index index;
        struct fsx_problem problem;
        if (fsx_index_open(data, length, &index, &problem) != 0)
            die(problem.text);
        struct fsx_outputs *outputs[] = {make_outputs(&index, true), make_outputs(&index, false)};
        for (long round = 0; round < rounds; round++) {
            struct fsx_tree tree = {.index = &index, .uid = 1000, .gid = 100, .hidden = -1, .blocks = 7, .files = 3};
            if (index.count[0] > 0 && below(2) == 0)
                tree.hidden = (int64_t)(index.first[0] + below(index.count[0]));
            if (below(2) == 0)
                tree.outputs = outputs[below(2)];
            atomic_init(&tree.no_open, below(2) == 0);
            atomic_init(&tree.no_opendir, below(2) == 0);
            one_round(&tree, &counts);
        }
        fsx_outputs_free(outputs[0]);
        fsx_outputs_free(outputs[1]);
        free(data);
    }
    printf("replies %" PRIu64 " silent %" PRIu64 " reads %" PRIu64 " outputs %" PRIu64
           " forwarded %" PRIu64 " refused %" PRIu64 "\n",
           counts.replies, counts.silent, counts.reads, counts.outputs, counts.forwarded, counts.refused);
    return 0;
}
