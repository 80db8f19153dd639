/* request_fuzz.c: throws messages at native/fuse/request.c and native/fuse/fuse_meta.c; built with sanitizers by
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
#include "fuse/fuse_meta.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "request_making.h"

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
        strcpy(value, (const char *const[]){"none", "lz4", "zstd"}[tree->index->codec[entry]]);
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
    case FUSE_FSYNC:
        return;
    default:
        check(task->opcode == FUSE_LSEEK && (task->mode == SEEK_DATA || task->mode == SEEK_HOLE), "no such task");
    }
}

/* The name is in the message, is not the dataset's, and is one that can be. */
static void check_wanted(const struct fsx_tree *tree, const struct fsx_request *request, const struct fsx_reply *reply) {
    const struct fsx_wanted *wanted = &reply->wanted;
    const uint8_t *end = request->arg + request->arg_bytes;
    const bool dataset = fsx_is_dataset(tree, request->nodeid);
    check(request->opcode == FUSE_CREATE && tree->outputs != NULL && wanted->parent == request->nodeid &&
              (dataset || fsx_is_output(request->nodeid)),
          "something else is created");
    check(wanted->name >= request->arg + sizeof(struct fuse_create_in) && wanted->name + wanted->name_bytes < end &&
              strlen((const char *)wanted->name) == wanted->name_bytes && wanted->name_bytes >= 1 &&
              wanted->name_bytes <= FSX_NAME_MAX,
          "a name that cannot be");
    check((wanted->mode & ~(uint32_t)01777) == 0, "more than permissions");
    check(!dataset || fsx_index_lookup(tree->index, (uint32_t)(request->nodeid - 1), wanted->name, wanted->name_bytes) < 0,
          "a name of the dataset");
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
    case FSX_SYNC:
        check_task(tree, &request, &reply);
        counts->outputs++;
        break;
    case FSX_CREATE:
        check_wanted(tree, &request, &reply);
        counts->outputs++;
        break;
    case FSX_CLOSE:
        check(request.opcode == FUSE_FLUSH && tree->outputs != NULL && fsx_is_output(request.nodeid) &&
                  fsx_outputs_waits(tree->outputs),
              "something else is closed");
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
    struct fsx_outputs *outputs = fsx_outputs_new(directory, x->entries, alone, !alone, !alone, -1, 0);
    check(directory >= 0 && outputs != NULL, "no outputs");
    close(directory);
    for (uint32_t i = 0; i < x->entries; i++) {
        if (has_output((uint64_t)i + 1))
            fsx_outputs_add_name(outputs, (uint64_t)i + 1, OUTPUT_NAME, strlen(OUTPUT_NAME), 0);
        if (i > 0 && i % 4 == 1 && S_ISDIR(x->mode[i]))
            fsx_outputs_mix(outputs, i);
    }
    for (uint64_t node = FSX_OUTPUT_FIRST; node < FSX_OUTPUT_FIRST + 3; node++)
        if (has_output(node))
            fsx_outputs_add_name(outputs, node, OUTPUT_NAME, strlen(OUTPUT_NAME), 0);
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
