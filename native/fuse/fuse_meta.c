/* fuse_meta.c: see fuse_meta.h. */
#include "fuse/fuse_meta.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/codec.h"

#define CONTROL_NAME ".fanstore"
#define XATTR_PREFIX "user.fanstore."
#define BLOCK_BYTES 4096u
#define NANOSECONDS 1000000000
/* Of a WRITE that is quick; copying as much takes some 15 µs. */
#define QUICK_WRITE_BYTES (64u << 10)
#ifndef FOPEN_NOFLUSH
#define FOPEN_NOFLUSH (1 << 5)
#endif

_Static_assert(sizeof(struct fuse_entry_out) == 128 && sizeof(struct fuse_attr_out) == 104 &&
                   sizeof(struct fuse_attr) == 88 && sizeof(struct fuse_dirent) == 24 &&
                   sizeof(struct fuse_direntplus) == 152 && sizeof(struct fuse_read_in) == 40,
               "layouts of the kernel's protocol, 7.23 and later");

static uint64_t inode_of(const struct fsx_index *x, uint32_t entry) { return (uint64_t)x->inode[entry] + 1; }

void fsx_fill_times(struct fuse_attr *attr, int64_t mtime_ns) {
    int64_t seconds = mtime_ns / NANOSECONDS;
    int64_t rest = mtime_ns % NANOSECONDS;
    if (rest < 0) {
        rest += NANOSECONDS;
        seconds--;
    }
    attr->atime = attr->mtime = attr->ctime = (uint64_t)seconds;
    attr->atimensec = attr->mtimensec = attr->ctimensec = (uint32_t)rest;
}

static void fill_attributes(const struct fsx_tree *tree, uint32_t entry, struct fuse_attr *attr) {
    const struct fsx_index *x = tree->index;
    memset(attr, 0, sizeof *attr);
    fsx_fill_times(attr, x->mtime[entry]);
    attr->ino = inode_of(x, entry);
    attr->size = x->size[entry];
    attr->blocks = (x->size[entry] + 511) / 512;
    attr->mode = x->mode[entry];
    attr->nlink = x->nlink[entry];
    attr->uid = tree->uid;
    attr->gid = tree->gid;
    attr->blksize = BLOCK_BYTES;
}

static void fill_entry(const struct fsx_tree *tree, uint32_t entry, struct fuse_entry_out *out) {
    memset(out, 0, sizeof *out);
    out->nodeid = inode_of(tree->index, entry);
    out->entry_valid = out->attr_valid = FSX_CACHE_S;
    fill_attributes(tree, entry, &out->attr);
}

static enum fsx_verdict fail(struct fsx_reply *reply, int error) {
    reply->error = error;
    reply->bytes = 0;
    return FSX_REPLY;
}

static enum fsx_verdict succeed(struct fsx_reply *reply, const void *data, size_t bytes) {
    if (bytes > reply->room)
        return fail(reply, EIO); /* cannot happen: every caller's room is larger */
    memcpy(reply->data, data, bytes);
    reply->error = 0;
    reply->bytes = bytes;
    return FSX_REPLY;
}

static bool is_mixed(const struct fsx_tree *tree, uint32_t entry) {
    return tree->outputs != NULL && fsx_outputs_is_mixed(tree->outputs, entry);
}

/* Names that Python answers for, whatever the index or the outputs have. */
static bool is_special(const struct fsx_request *request, const uint8_t *name, size_t name_bytes) {
    const bool dots = name[0] == '.' && (name_bytes == 1 || (name_bytes == 2 && name[1] == '.'));
    return dots || (request->nodeid == FUSE_ROOT_ID && name_bytes == sizeof CONTROL_NAME - 1 &&
                    memcmp(name, CONTROL_NAME, name_bytes) == 0);
}

/* A name that the index does not have, or that cannot be there. */
static enum fsx_verdict look_elsewhere(const struct fsx_tree *tree, uint64_t parent, const uint8_t *name,
                                       size_t name_bytes, struct fsx_reply *reply) {
    struct fuse_entry_out out = {0};
    if (tree->outputs != NULL && fsx_outputs_has_name(tree->outputs, parent, name, name_bytes))
        return fsx_outputs_tell(tree->outputs, parent, name, name_bytes, &out) ? succeed(reply, &out, sizeof out)
                                                                               : FSX_FORWARD;
    if (tree->outputs == NULL && atomic_load_explicit(&tree->forward_missing, memory_order_relaxed))
        return FSX_FORWARD;
    /* Node 0: there is no such name, and the kernel may remember it, unless another node could make it. */
    out.entry_valid = tree->outputs == NULL || fsx_outputs_alone(tree->outputs) ? FSX_CACHE_S : 0;
    return succeed(reply, &out, sizeof out);
}

static enum fsx_verdict lookup(const struct fsx_tree *tree, const struct fsx_request *request, struct fsx_reply *reply) {
    size_t name_bytes;
    const uint8_t *name = fsx_request_name(request, 0, &name_bytes);
    if (name == NULL || name_bytes == 0)
        return FSX_FORWARD;
    if (is_special(request, name, name_bytes))
        return FSX_FORWARD;
    if (fsx_is_output(request->nodeid))
        return name_bytes > FSX_NAME_MAX ? FSX_FORWARD : look_elsewhere(tree, request->nodeid, name, name_bytes, reply);
    const uint32_t parent = (uint32_t)(request->nodeid - 1);
    const int64_t child = fsx_index_lookup(tree->index, parent, name, name_bytes);
    if (child >= 0 && is_mixed(tree, (uint32_t)child))
        return FSX_FORWARD; /* its times are those of its outputs */
    if (child >= 0) {
        struct fuse_entry_out out;
        fill_entry(tree, tree->index->inode[child], &out);
        return succeed(reply, &out, sizeof out);
    }
    if (!S_ISDIR(tree->index->mode[parent]))
        return fail(reply, ENOTDIR);
    if (name_bytes > FSX_NAME_MAX)
        return fail(reply, ENAMETOOLONG);
    return look_elsewhere(tree, request->nodeid, name, name_bytes, reply);
}

static enum fsx_verdict getattr(const struct fsx_tree *tree, uint32_t entry, struct fsx_reply *reply) {
    struct fuse_attr_out out = {.attr_valid = FSX_CACHE_S};
    fill_attributes(tree, entry, &out.attr);
    out.attr.ino = (uint64_t)entry + 1; /* what was asked for, whatever it is */
    return succeed(reply, &out, sizeof out);
}

static enum fsx_verdict readlink_(const struct fsx_tree *tree, uint32_t entry, struct fsx_reply *reply) {
    const struct fsx_index *x = tree->index;
    if (!S_ISLNK(x->mode[entry]))
        return fail(reply, EINVAL);
    return succeed(reply, x->links + x->offset[entry], (size_t)x->size[entry]);
}

static enum fsx_verdict statfs_(const struct fsx_tree *tree, struct fsx_reply *reply) {
    const struct fuse_statfs_out out = {
        .st = {.blocks = tree->blocks, .files = tree->files, .bsize = BLOCK_BYTES, .frsize = BLOCK_BYTES,
               .namelen = FSX_NAME_MAX}};
    return succeed(reply, &out, sizeof out);
}

/* ---- listings ------------------------------------------------------------------------------------------------- */

/* Where a listing stands: `used` bytes of at most `room`. */
struct listing {
    const struct fsx_tree *tree;
    uint8_t *data;
    size_t used;
    size_t room;
    bool plus;
};

/* One name; false if there is no room for it. `entry` gives the attributes, `cookie` is where the listing goes on. */
static bool list_one(struct listing *list, const void *name, size_t name_bytes, uint32_t entry, uint64_t cookie,
                     bool link) {
    const size_t head = list->plus ? FUSE_NAME_OFFSET_DIRENTPLUS : FUSE_NAME_OFFSET;
    const size_t bytes = FUSE_DIRENT_ALIGN(head + name_bytes);
    if (bytes > list->room - list->used)
        return false;
    uint8_t *out = list->data + list->used;
    const uint32_t mode = list->tree->index->mode[entry];
    const struct fuse_dirent dirent = {.ino = inode_of(list->tree->index, entry),
                                       .off = cookie,
                                       .namelen = (uint32_t)name_bytes,
                                       .type = (mode & S_IFMT) >> 12};
    if (list->plus) {
        struct fuse_entry_out attributes;
        fill_entry(list->tree, entry, &attributes);
        if (!link || is_mixed(list->tree, entry))
            attributes.nodeid = 0; /* "." and "..": the kernel knows them; a mixed one it looks up */
        memcpy(out, &attributes, sizeof attributes);
        memcpy(out + sizeof attributes, &dirent, sizeof dirent);
    } else {
        memcpy(out, &dirent, sizeof dirent);
    }
    memcpy(out + head, name, name_bytes);
    memset(out + head + name_bytes, 0, bytes - head - name_bytes);
    list->used += bytes;
    return true;
}

static enum fsx_verdict readdir_(const struct fsx_tree *tree, const struct fsx_request *request, uint32_t entry,
                                 struct fsx_reply *reply, bool plus) {
    const struct fsx_index *x = tree->index;
    const struct fuse_read_in *in = fsx_request_fixed(request, sizeof *in);
    if (in == NULL)
        return FSX_FORWARD;
    if (!S_ISDIR(x->mode[entry]))
        return fail(reply, ENOTDIR);
    const uint64_t cookie = in->offset > INT64_MAX ? 0 : in->offset;
    struct listing list = {.tree = tree, .data = reply->data, .plus = plus,
                           .room = in->size < reply->room ? in->size : reply->room};
    bool room = true;
    if (cookie == 0)
        room = list_one(&list, ".", 1, entry, 1, false);
    if (cookie <= 1 && room)
        room = list_one(&list, "..", 2, x->parent[entry], 2, false);
    const uint64_t skip = cookie > 2 ? cookie - 2 : 0;
    for (uint64_t k = skip; room && k < x->count[entry]; k++) {
        const uint32_t child = x->first[entry] + (uint32_t)k;
        if ((int64_t)child != tree->hidden)
            room = list_one(&list, x->names + x->nameoff[child], (size_t)(x->nameoff[child + 1] - x->nameoff[child]),
                            child, k + 3, true);
    }
    reply->error = 0;
    reply->bytes = list.used;
    return FSX_REPLY;
}

/* ---- extended attributes ---------------------------------------------------------------------------------------- */

static enum fsx_verdict getxattr_(const struct fsx_tree *tree, const struct fsx_request *request, uint32_t entry,
                                  struct fsx_reply *reply) {
    const struct fsx_index *x = tree->index;
    const struct fuse_getxattr_in *in = fsx_request_fixed(request, sizeof *in);
    size_t name_bytes;
    const uint8_t *name = in == NULL ? NULL : fsx_request_name(request, sizeof *in, &name_bytes);
    if (name == NULL)
        return FSX_FORWARD;
    const size_t prefix = sizeof XATTR_PREFIX - 1;
    if (!S_ISREG(x->mode[entry]) || name_bytes <= prefix || memcmp(name, XATTR_PREFIX, prefix) != 0)
        return fail(reply, ENODATA);
    const char *which = (const char *)name + prefix;
    char value[24];
    int bytes;
    if (strcmp(which, "codec") == 0)
        bytes = snprintf(value, sizeof value, "%s", fsx_codec_find(x->codec[entry])->name);
    else if (strcmp(which, "stored_size") == 0)
        bytes = snprintf(value, sizeof value, "%" PRIu64, x->stored[entry]);
    else if (strcmp(which, "checksum") == 0)
        bytes = snprintf(value, sizeof value, "%016" PRIx64, x->checksum[entry]);
    else
        return FSX_FORWARD; /* the partition's name is in the manifest */
    if (in->size == 0) {
        const struct fuse_getxattr_out out = {.size = (uint32_t)bytes};
        return succeed(reply, &out, sizeof out);
    }
    return (uint32_t)bytes > in->size ? fail(reply, ERANGE) : succeed(reply, value, (size_t)bytes);
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

static enum fsx_verdict open_output(struct fsx_outputs *outputs, uint64_t inode, uint32_t flags,
                                    struct fsx_reply *reply) {
    const struct fsx_opened opened = fsx_outputs_open(outputs, inode, flags);
    if (opened.handle == 0)
        return fail(reply, ENOMEM);
    const bool keep = fsx_outputs_alone(outputs) && !opened.old_pages;
    const bool direct = (opened.handle & FSX_DIRECT_HANDLE) != 0;
    const struct fuse_open_out out = {
        .fh = opened.handle,
        .open_flags = (keep ? FOPEN_KEEP_CACHE : 0u) | fsx_outputs_open_flags(outputs, direct)};
    return succeed(reply, &out, sizeof out);
}

static enum fsx_verdict release_output(struct fsx_outputs *outputs, const struct fsx_request *request,
                                       struct fsx_reply *reply) {
    const struct fuse_release_in *in = fsx_request_fixed(request, sizeof *in);
    if (in != NULL)
        fsx_outputs_release(outputs, in->fh);
    return succeed(reply, "", 0);
}

static enum fsx_verdict open_(const struct fsx_tree *tree, const struct fsx_request *request, struct fsx_reply *reply) {
    const struct fuse_open_in *in = fsx_request_fixed(request, sizeof *in);
    if (in == NULL)
        return FSX_FORWARD;
    const bool output = tree->outputs != NULL && fsx_is_output(request->nodeid);
    const bool writes = (in->flags & O_ACCMODE) != O_RDONLY || (in->flags & O_TRUNC) != 0;
    if (writes && !output)
        return fail(reply, EROFS);
    /* From then on the kernel opens by itself, and keeps what it has read. Not if there are outputs: it would open a file
     * of the dataset for writing as well, and a map of it could be written to. */
    if (tree->outputs == NULL && atomic_load_explicit(&tree->no_open, memory_order_relaxed))
        return fail(reply, ENOSYS);
    if (output)
        return open_output(tree->outputs, request->nodeid, in->flags, reply);
    const struct fuse_open_out out = {.fh = request->nodeid, /* there is nothing to be told when it is closed */
                                      .open_flags = FOPEN_KEEP_CACHE | FOPEN_NOFLUSH};
    return succeed(reply, &out, sizeof out);
}

static enum fsx_verdict opendir_(const struct fsx_tree *tree, const struct fsx_request *request,
                                 struct fsx_reply *reply) {
    if (atomic_load_explicit(&tree->no_opendir, memory_order_relaxed))
        return fail(reply, ENOSYS);
    const struct fuse_open_out out = {.fh = request->nodeid, .open_flags = FOPEN_KEEP_CACHE | FOPEN_CACHE_DIR};
    return succeed(reply, &out, sizeof out);
}

static enum fsx_verdict read_(const struct fsx_tree *tree, const struct fsx_request *request, uint32_t entry,
                              struct fsx_reply *reply) {
    const struct fsx_index *x = tree->index;
    const struct fuse_read_in *in = fsx_request_fixed(request, sizeof *in);
    if (in == NULL || !S_ISREG(x->mode[entry]))
        return FSX_FORWARD;
    const uint64_t left = in->offset < x->size[entry] ? x->size[entry] - in->offset : 0;
    reply->entry = x->inode[entry];
    reply->offset = in->offset;
    reply->length = in->size < left ? in->size : (uint32_t)left;
    return FSX_READ;
}

static enum fsx_verdict forget(const struct fsx_tree *tree, const struct fsx_request *request) {
    /* Look-up counts of the dataset are not kept: an inode number means the same as long as the mount lives. */
    if (request->opcode == FUSE_FORGET)
        return fsx_is_dataset(tree, request->nodeid) ? FSX_SILENCE : FSX_FORWARD;
    const struct fuse_batch_forget_in *in = fsx_request_fixed(request, sizeof *in);
    if (in == NULL || in->count > (request->arg_bytes - sizeof *in) / sizeof(struct fuse_forget_one))
        return FSX_FORWARD;
    for (uint32_t i = 0; i < in->count; i++) {
        struct fuse_forget_one one;
        memcpy(&one, request->arg + sizeof *in + i * sizeof one, sizeof one);
        if (!fsx_is_dataset(tree, one.nodeid))
            return FSX_FORWARD; /* Python passes over those of the dataset */
    }
    return FSX_SILENCE;
}

/* ---- outputs ---------------------------------------------------------------------------------------------------- */

/* READ, WRITE, FALLOCATE, FSYNC and LSEEK of an output. */
static enum fsx_verdict output_content(const struct fsx_request *request, struct fsx_reply *reply) {
    struct fsx_task *task = &reply->task;
    *task = (struct fsx_task){.opcode = request->opcode, .inode = request->nodeid};
    if (request->opcode == FUSE_READ) {
        const struct fuse_read_in *in = fsx_request_fixed(request, sizeof *in);
        if (in == NULL || in->size > reply->room)
            return fail(reply, EIO); /* less than was asked for would be the end of the file */
        task->offset = in->offset;
        task->length = in->size;
    } else if (request->opcode == FUSE_WRITE) {
        const struct fuse_write_in *in = fsx_request_fixed(request, sizeof *in);
        if (in == NULL || in->size > request->arg_bytes - sizeof *in)
            return fail(reply, EIO);
        task->offset = in->offset;
        task->length = in->size;
        task->data = request->arg + sizeof *in;
    } else if (request->opcode == FUSE_FALLOCATE) {
        const struct fuse_fallocate_in *in = fsx_request_fixed(request, sizeof *in);
        if (in == NULL)
            return fail(reply, EIO);
        task->offset = in->offset;
        task->length = in->length;
        task->mode = in->mode;
    } else if (request->opcode == FUSE_FSYNC) {
        const struct fuse_fsync_in *in = fsx_request_fixed(request, sizeof *in);
        if (in == NULL)
            return fail(reply, EIO);
        task->mode = in->fsync_flags;
    } else {
        const struct fuse_lseek_in *in = fsx_request_fixed(request, sizeof *in);
        if (in == NULL)
            return fail(reply, EIO);
        if (in->whence != SEEK_DATA && in->whence != SEEK_HOLE)
            return fail(reply, EINVAL);
        task->offset = in->offset;
        task->mode = in->whence;
    }
    if (task->opcode != FUSE_READ && reply->room < 16)
        return fail(reply, EIO); /* cannot happen: every caller's room is larger */
    return FSX_OUTPUT;
}

/* A file of the dataset has no holes. It is said here, because where ENOSYS is said once the kernel never asks again. */
static enum fsx_verdict lseek_(const struct fsx_tree *tree, const struct fsx_request *request, uint32_t entry,
                               struct fsx_reply *reply) {
    const struct fuse_lseek_in *in = fsx_request_fixed(request, sizeof *in);
    if (in == NULL || !S_ISREG(tree->index->mode[entry]) || (in->whence != SEEK_DATA && in->whence != SEEK_HOLE))
        return fail(reply, EINVAL);
    const uint64_t size = tree->index->size[entry];
    if (in->offset >= size)
        return fail(reply, ENXIO);
    const struct fuse_lseek_out out = {.offset = in->whence == SEEK_DATA ? in->offset : size};
    return succeed(reply, &out, sizeof out);
}

/* The kernel asks before every write whether the file has capabilities that the write must take away. It has none: Python
 * refuses to set them. Passed on, there were 10,000 small writes a second instead of 51,000 (2 cores). */
static bool asks_for_capabilities(const struct fsx_request *request) {
    size_t name_bytes;
    const uint8_t *name = fsx_request_name(request, sizeof(struct fuse_getxattr_in), &name_bytes);
    return name != NULL && strcmp((const char *)name, "security.capability") == 0;
}

/* A new file, in a job of one node; several decide together. What is strange in any way is for Python to refuse. */
static enum fsx_verdict create_(const struct fsx_tree *tree, const struct fsx_request *request, struct fsx_reply *reply) {
    const struct fuse_create_in *in = fsx_request_fixed(request, sizeof *in);
    size_t name_bytes;
    const uint8_t *name = in == NULL ? NULL : fsx_request_name(request, sizeof *in, &name_bytes);
    if (name == NULL || name_bytes == 0 || name_bytes > FSX_NAME_MAX || is_special(request, name, name_bytes) ||
        (in->mode & (S_ISUID | S_ISGID)) != 0 || !fsx_outputs_alone(tree->outputs))
        return FSX_FORWARD;
    if (fsx_is_dataset(tree, request->nodeid) &&
        fsx_index_lookup(tree->index, (uint32_t)(request->nodeid - 1), name, name_bytes) >= 0)
        return FSX_FORWARD;
    reply->wanted = (struct fsx_wanted){.parent = request->nodeid, .name = name, .name_bytes = name_bytes,
                                        .mode = in->mode & ~in->umask & 07777u, .flags = in->flags, .uid = tree->uid,
                                        .gid = tree->gid, .valid_s = FSX_CACHE_S};
    return FSX_CREATE;
}

/* What is not as it is without outputs. False if nothing is: then the request is answered as ever. */
static bool answer_with_outputs(const struct fsx_tree *tree, const struct fsx_request *request, struct fsx_reply *reply,
                                enum fsx_verdict *verdict) {
    const bool output = fsx_is_output(request->nodeid);
    const bool dataset = fsx_is_dataset(tree, request->nodeid);
    const uint32_t entry = (uint32_t)(request->nodeid - 1);
    switch (request->opcode) {
    case FUSE_WRITE:
    case FUSE_FALLOCATE:
        *verdict = output ? output_content(request, reply) : fail(reply, EROFS);
        return true;
    case FUSE_READ:
        if (output)
            *verdict = output_content(request, reply);
        return output;
    case FUSE_LSEEK:
        if (output)
            *verdict = output_content(request, reply);
        else if (dataset)
            *verdict = lseek_(tree, request, entry, reply);
        return output || dataset;
    case FUSE_FLUSH: /* never ENOSYS, or the kernel would not tell of those that matter */
        *verdict = output && fsx_outputs_waits(tree->outputs) ? FSX_CLOSE : succeed(reply, "", 0);
        return true;
    case FUSE_FSYNC: /* if nobody else wants to know of it, the local disk is all there is */
        if (!output || (fsx_outputs_waits(tree->outputs) && !fsx_outputs_local(tree->outputs)))
            return false;
        *verdict = output_content(request, reply);
        if (*verdict == FSX_OUTPUT && fsx_outputs_waits(tree->outputs))
            *verdict = FSX_SYNC;
        return true;
    case FUSE_CREATE:
        *verdict = output || dataset ? create_(tree, request, reply) : FSX_FORWARD;
        return true;
    case FUSE_RELEASE:
        if (output)
            *verdict = release_output(tree->outputs, request, reply);
        return output;
    case FUSE_LOOKUP:
        if (output)
            *verdict = lookup(tree, request, reply);
        return output;
    case FUSE_GETXATTR:
        *verdict = fail(reply, ENODATA);
        return output && asks_for_capabilities(request);
    case FUSE_STATFS: /* what is free changes */
        *verdict = FSX_FORWARD;
        return true;
    case FUSE_GETATTR:
        *verdict = FSX_FORWARD;
        if (output || (dataset && is_mixed(tree, entry))) {
            struct fuse_attr_out out;
            if (fsx_outputs_described(tree->outputs, request->nodeid, &out))
                *verdict = succeed(reply, &out, sizeof out);
            return true;
        }
        return false;
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
        *verdict = FSX_FORWARD;
        return dataset && is_mixed(tree, entry);
    default:
        return false;
    }
}

enum fsx_verdict fsx_answer(const struct fsx_tree *tree, const struct fsx_request *request, struct fsx_reply *reply) {
    enum fsx_verdict verdict = FSX_FORWARD;
    if (tree->outputs != NULL && answer_with_outputs(tree, request, reply, &verdict))
        return verdict;
    switch (request->opcode) {
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
        return forget(tree, request);
    case FUSE_OPEN:
        return open_(tree, request, reply);
    case FUSE_OPENDIR:
        return opendir_(tree, request, reply);
    case FUSE_FLUSH:  /* nothing is ever written: told once, the kernel does not ask again */
    case FUSE_ACCESS: /* likewise: it checks modes itself (default_permissions) */
    case FUSE_IOCTL:  /* Python's open() asks every file whether it is a terminal */
        return fail(reply, ENOSYS);
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
        return succeed(reply, "", 0);
    default:
        break;
    }
    if (!fsx_is_dataset(tree, request->nodeid))
        return FSX_FORWARD;
    const uint32_t entry = (uint32_t)(request->nodeid - 1);
    switch (request->opcode) {
    case FUSE_LOOKUP:
        return lookup(tree, request, reply);
    case FUSE_GETATTR:
        return getattr(tree, entry, reply);
    case FUSE_READLINK:
        return readlink_(tree, entry, reply);
    case FUSE_STATFS:
        return statfs_(tree, reply);
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
        return readdir_(tree, request, entry, reply, request->opcode == FUSE_READDIRPLUS);
    case FUSE_GETXATTR:
        return getxattr_(tree, request, entry, reply);
    case FUSE_READ:
        return read_(tree, request, entry, reply);
    default:
        return FSX_FORWARD;
    }
}

bool fsx_is_quick(enum fsx_verdict verdict, const struct fsx_reply *reply) {
    if (verdict == FSX_OUTPUT)
        return reply->task.opcode == FUSE_WRITE && reply->task.length <= QUICK_WRITE_BYTES;
    return verdict != FSX_READ && verdict != FSX_SYNC && verdict != FSX_FORWARD;
}
