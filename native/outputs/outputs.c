/* outputs.c: see outputs.h. */
#include "outputs/outputs.h"
#include "outputs/files.h"
#include "outputs/names.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* A signal interrupts fallocate(2), which then has done nothing; one that is interrupted again and again gives up. */
#define INTERRUPTED_MOST 20

#ifndef FOPEN_NOFLUSH
#define FOPEN_NOFLUSH (1u << 5)
#endif

/* What a disk is given at once while a file is written in order. */
#define WINDOW_BYTES (UINT64_C(8) << 20)

struct fsx_outputs {
    bool alone, waits, local;
    uint32_t entries;
    _Atomic(uint64_t) *mixed; /* a bit for each entry */
    struct fsx_output_names *names;
    struct fsx_output_files *files;
    struct fsx_output_opens *opens;
    struct fsx_creates *creates;
    atomic_uint_least64_t reads, read_bytes, writes, written_bytes;
};

_Static_assert(sizeof(struct fuse_write_out) <= 16 && sizeof(struct fuse_lseek_out) <= 16, "the room for an answer");

struct fsx_outputs *fsx_outputs_new(int directory, uint32_t entries, bool alone, bool waits, bool local, int journal,
                                    uint32_t rank) {
    struct fsx_outputs *outputs = calloc(1, sizeof *outputs);
    if (outputs == NULL)
        return NULL;
    outputs->alone = alone;
    outputs->waits = waits;
    outputs->local = local;
    outputs->entries = entries;
    outputs->files = fsx_output_files_new(directory);
    outputs->creates = outputs->files != NULL ? fsx_creates_new(journal, rank) : NULL;
    const int error = errno;
    outputs->mixed = calloc((size_t)entries / 64 + 1, sizeof *outputs->mixed);
    outputs->names = fsx_output_names_new();
    outputs->opens = fsx_output_opens_new();
    const bool opened = outputs->files != NULL && outputs->creates != NULL;
    if (!opened || outputs->mixed == NULL || outputs->names == NULL || outputs->opens == NULL) {
        fsx_outputs_free(outputs);
        errno = opened ? ENOMEM : error;
        return NULL;
    }
    return outputs;
}

void fsx_outputs_free(struct fsx_outputs *outputs) {
    if (outputs == NULL)
        return;
    fsx_output_files_free(outputs->files);
    fsx_output_names_free(outputs->names);
    fsx_output_opens_free(outputs->opens);
    fsx_creates_free(outputs->creates);
    free(outputs->mixed);
    free(outputs);
}

bool fsx_outputs_alone(const struct fsx_outputs *outputs) { return outputs->alone; }
bool fsx_outputs_waits(const struct fsx_outputs *outputs) { return outputs->waits; }
bool fsx_outputs_local(const struct fsx_outputs *outputs) { return outputs->local; }

bool fsx_outputs_add_name(struct fsx_outputs *outputs, uint64_t parent, const void *name, size_t name_bytes,
                          uint64_t directory) {
    return fsx_output_names_add(outputs->names, parent, name, name_bytes, directory);
}

bool fsx_outputs_remove_name(struct fsx_outputs *outputs, uint64_t parent, const void *name, size_t name_bytes) {
    return fsx_output_names_remove(outputs->names, parent, name, name_bytes);
}

bool fsx_outputs_tell(struct fsx_outputs *outputs, uint64_t parent, const void *name, size_t name_bytes,
                      struct fuse_entry_out *entry) {
    struct fuse_attr_out out;
    if (!fsx_output_names_tell(outputs->names, parent, name, name_bytes, &out))
        return false;
    *entry = (struct fuse_entry_out){.nodeid = out.attr.ino, .entry_valid = outputs->alone ? out.attr_valid : 0,
                                     .attr_valid = out.attr_valid, .attr = out.attr};
    return true;
}

bool fsx_outputs_has_name(struct fsx_outputs *outputs, uint64_t parent, const void *name, size_t name_bytes) {
    return fsx_output_names_has(outputs->names, parent, name, name_bytes);
}

bool fsx_outputs_mix(struct fsx_outputs *outputs, uint32_t entry) {
    if (entry >= outputs->entries)
        return false;
    atomic_fetch_or(&outputs->mixed[entry / 64], UINT64_C(1) << entry % 64);
    return true;
}

bool fsx_outputs_is_mixed(const struct fsx_outputs *outputs, uint32_t entry) {
    return entry < outputs->entries && (atomic_load(&outputs->mixed[entry / 64]) >> entry % 64 & 1) != 0;
}

bool fsx_outputs_describe(struct fsx_outputs *outputs, const struct fuse_attr_out *out) {
    return fsx_output_names_describe(outputs->names, out);
}

uint64_t fsx_outputs_undescribe(struct fsx_outputs *outputs, uint64_t inode) {
    return fsx_output_names_undescribe(outputs->names, inode);
}

uint64_t fsx_outputs_take_told(struct fsx_outputs *outputs, uint64_t inode) {
    return fsx_output_names_take_told(outputs->names, inode);
}

bool fsx_outputs_described(struct fsx_outputs *outputs, uint64_t inode, struct fuse_attr_out *out) {
    return fsx_output_names_described(outputs->names, inode, out);
}

void fsx_outputs_allow_direct(struct fsx_outputs *outputs) { fsx_output_opens_allow(outputs->opens); }

struct fsx_opened fsx_outputs_open(struct fsx_outputs *outputs, uint64_t inode, uint32_t flags) {
    return fsx_output_opens_open(outputs->opens, inode, flags);
}

uint32_t fsx_outputs_open_flags(const struct fsx_outputs *outputs, bool direct) {
    if (!direct)
        return 0;
    return FOPEN_DIRECT_IO | (outputs->waits ? 0u : FOPEN_NOFLUSH);
}

void fsx_outputs_release(struct fsx_outputs *outputs, uint64_t handle) {
    fsx_output_opens_release(outputs->opens, handle);
}

void fsx_outputs_finish(struct fsx_outputs *outputs) { fsx_output_files_finish(outputs->files); }

void fsx_outputs_drop(struct fsx_outputs *outputs, uint64_t inode) { fsx_output_files_drop(outputs->files, inode); }

void fsx_outputs_count(const struct fsx_outputs *outputs, struct fsx_output_counts *counts) {
    *counts = (struct fsx_output_counts){.reads = atomic_load(&outputs->reads),
                                         .read_bytes = atomic_load(&outputs->read_bytes),
                                         .writes = atomic_load(&outputs->writes),
                                         .written_bytes = atomic_load(&outputs->written_bytes)};
}

struct fsx_creates *fsx_outputs_creates(struct fsx_outputs *outputs) { return outputs->creates; }

void fsx_outputs_end_turn(struct fsx_outputs *outputs, uint64_t next_inode, int64_t journal_end) {
    fsx_output_files_skip(outputs->files, next_inode);
    fsx_creates_set(outputs->creates, next_inode, journal_end);
}

/* ---- new files ---------------------------------------------------------------------------------------------------- */

static int64_t nanoseconds(const struct timespec *time) { return (int64_t)time->tv_sec * 1000000000 + time->tv_nsec; }

/* A directory of which C knows that it is there, and that Python has noted where it is. */
static bool takes_names(struct fsx_outputs *outputs, uint64_t inode) {
    struct fuse_attr_out out;
    return (fsx_is_output(inode) || (inode > 0 && fsx_outputs_is_mixed(outputs, (uint32_t)(inode - 1)))) &&
           fsx_output_names_described(outputs->names, inode, &out);
}

static void describe_new(const struct fsx_create *file, const struct fsx_wanted *wanted, const struct stat *facts,
                         struct fuse_entry_out *entry) {
    *entry = (struct fuse_entry_out){.nodeid = file->inode, .entry_valid = wanted->valid_s,
                                     .attr_valid = wanted->valid_s};
    struct fuse_attr *attr = &entry->attr;
    *attr = (struct fuse_attr){.ino = file->inode, .mode = file->mode, .nlink = 1, .uid = wanted->uid, .gid = wanted->gid,
                              .blocks = (uint64_t)facts->st_blocks, .blksize = 4096};
    attr->atime = attr->mtime = attr->ctime = (uint64_t)facts->st_mtim.tv_sec;
    attr->atimensec = attr->mtimensec = attr->ctimensec = (uint32_t)facts->st_mtim.tv_nsec;
}

/* In a turn. */
static bool create(struct fsx_outputs *outputs, const struct fsx_wanted *wanted, struct fsx_created *created) {
    if (wanted->name_bytes > FSX_CREATE_NAME_MOST || !takes_names(outputs, wanted->parent) ||
        fsx_output_names_has(outputs->names, wanted->parent, wanted->name, wanted->name_bytes))
        return false;
    struct fsx_create *file = fsx_creates_next(outputs->creates);
    struct stat facts;
    if (file == NULL || fsx_output_files_make(outputs->files, file->inode, &facts) != 0)
        return false;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    file->parent = wanted->parent;
    file->mode = S_IFREG | wanted->mode;
    file->mtime_ns = nanoseconds(&now);
    file->name_bytes = wanted->name_bytes;
    memcpy(file->name, wanted->name, wanted->name_bytes);
    const struct fsx_opened opened = fsx_output_opens_open(outputs->opens, file->inode, wanted->flags);
    const bool named = opened.handle != 0 && fsx_output_names_add(outputs->names, wanted->parent, wanted->name,
                                                                  wanted->name_bytes, 0);
    created->first = !fsx_creates_any(outputs->creates);
    if (!named || !fsx_creates_add(outputs->creates, file)) {
        if (named)
            fsx_output_names_remove(outputs->names, wanted->parent, wanted->name, wanted->name_bytes);
        if (opened.handle != 0)
            fsx_output_opens_release(outputs->opens, opened.handle);
        fsx_output_files_unmake(outputs->files, file->inode);
        return false;
    }
    fsx_output_names_touch(outputs->names, wanted->parent, (uint64_t)now.tv_sec, (uint32_t)now.tv_nsec);
    describe_new(file, wanted, &facts, &created->entry);
    const bool direct = (opened.handle & FSX_DIRECT_HANDLE) != 0;
    created->open = (struct fuse_open_out){.fh = opened.handle, .open_flags = fsx_outputs_open_flags(outputs, direct)};
    return true;
}

bool fsx_outputs_create(struct fsx_outputs *outputs, const struct fsx_wanted *wanted, struct fsx_created *created) {
    fsx_creates_begin(outputs->creates);
    const bool done = create(outputs, wanted, created);
    fsx_creates_end(outputs->creates);
    return done;
}

/* In a turn: note what the file is like now. */
static bool note(struct fsx_outputs *outputs, uint64_t inode, int fd) {
    struct stat facts;
    return fstat(fd, &facts) == 0 && fsx_creates_note(outputs->creates, inode, (uint64_t)facts.st_size,
                                                      nanoseconds(&facts.st_mtim), nanoseconds(&facts.st_ctim));
}

static bool close_new(struct fsx_outputs *outputs, uint64_t inode) {
    struct fsx_output_use use;
    if (fsx_output_files_use(outputs->files, inode, &use) != 0)
        return false;
    const bool done = note(outputs, inode, use.fd);
    fsx_output_files_release(outputs->files, &use);
    return done;
}

bool fsx_outputs_close(struct fsx_outputs *outputs, uint64_t inode, bool *first) {
    fsx_creates_begin(outputs->creates);
    *first = !fsx_creates_any(outputs->creates);
    const bool done = fsx_creates_is_new(outputs->creates, inode) && close_new(outputs, inode);
    fsx_creates_end(outputs->creates);
    return done;
}

static int fsync_(int fd, const struct fsx_task *task) {
    const int result = (task->mode & FUSE_FSYNC_FDATASYNC) != 0 ? fdatasync(fd) : fsync(fd);
    return result == 0 ? 0 : errno;
}

static bool is_own(struct fsx_outputs *outputs, uint64_t inode) {
    fsx_creates_begin(outputs->creates);
    const bool own = fsx_creates_is_own(outputs->creates, inode);
    fsx_creates_end(outputs->creates);
    return own;
}

bool fsx_outputs_sync(struct fsx_outputs *outputs, const struct fsx_task *task, bool *first, int *error) {
    struct fsx_output_use use;
    if (!is_own(outputs, task->inode) || fsx_output_files_use(outputs->files, task->inode, &use) != 0)
        return false;
    *error = fsync_(use.fd, task);
    bool done = *error != 0;
    *first = false;
    if (!done) {
        fsx_creates_begin(outputs->creates);
        *first = !fsx_creates_any(outputs->creates);
        done = fsx_creates_is_own(outputs->creates, task->inode) && note(outputs, task->inode, use.fd);
        fsx_creates_end(outputs->creates);
    }
    fsx_output_files_release(outputs->files, &use);
    return done;
}

/* ---- operations --------------------------------------------------------------------------------------------------- */

/* What is there; less than was asked for only at the end of the file. */
static int read_(struct fsx_outputs *outputs, int fd, const struct fsx_task *task, uint8_t *answer, size_t *bytes) {
    size_t done = 0;
    while (done < task->length) {
        const ssize_t got = pread(fd, answer + done, (size_t)task->length - done, (off_t)(task->offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return errno;
        if (got == 0)
            break;
        done += (size_t)got;
    }
    *bytes = done;
    atomic_fetch_add(&outputs->reads, 1);
    atomic_fetch_add(&outputs->read_bytes, done);
    return 0;
}

/* Whoever writes a large file in order will want it on the disk: have the disk begin with each window that is full. The
 * kernel would wait for seconds, and whoever syncs the file then waits for all of it. */
static void start_writing(int fd, uint64_t offset, uint64_t bytes) {
    const uint64_t first = offset / WINDOW_BYTES, next = (offset + bytes) / WINDOW_BYTES;
    if (next > first)
        sync_file_range(fd, (off_t)(first * WINDOW_BYTES), (off_t)((next - first) * WINDOW_BYTES),
                        SYNC_FILE_RANGE_WRITE);
}

/* All of it; or as much as there was room for, and the next write is told why. */
static int write_(struct fsx_outputs *outputs, int fd, const struct fsx_task *task, uint8_t *answer, size_t *bytes) {
    size_t done = 0;
    int error = 0;
    while (done < task->length && error == 0) {
        const ssize_t put = pwrite(fd, task->data + done, (size_t)task->length - done, (off_t)(task->offset + done));
        if (put > 0)
            done += (size_t)put;
        else if (put == 0)
            error = EIO; /* cannot happen: it would go on for ever */
        else if (errno != EINTR)
            error = errno;
    }
    if (error != 0 && done == 0)
        return error;
    start_writing(fd, task->offset, done);
    const struct fuse_write_out out = {.size = (uint32_t)done};
    memcpy(answer, &out, sizeof out);
    *bytes = sizeof out;
    atomic_fetch_add(&outputs->writes, 1);
    atomic_fetch_add(&outputs->written_bytes, done);
    return 0;
}

static int fallocate_(int fd, const struct fsx_task *task) {
    for (int tries = 1;; tries++) {
        if (fallocate(fd, (int)task->mode, (off_t)task->offset, (off_t)task->length) == 0)
            return 0;
        if (errno != EINTR || tries == INTERRUPTED_MOST)
            return errno;
    }
}

static int lseek_(int fd, const struct fsx_task *task, uint8_t *answer, size_t *bytes) {
    const off_t found = lseek(fd, (off_t)task->offset, (int)task->mode); /* nobody uses the position that this sets */
    if (found < 0)
        return errno;
    const struct fuse_lseek_out out = {.offset = (uint64_t)found};
    memcpy(answer, &out, sizeof out);
    *bytes = sizeof out;
    return 0;
}

int fsx_outputs_do(struct fsx_outputs *outputs, const struct fsx_task *task, uint8_t *answer, size_t *bytes) {
    struct fsx_output_use use;
    *bytes = 0;
    int error = fsx_output_files_use(outputs->files, task->inode, &use);
    if (error != 0)
        return error;
    switch (task->opcode) {
    case FUSE_READ:
        error = read_(outputs, use.fd, task, answer, bytes);
        break;
    case FUSE_WRITE:
        error = write_(outputs, use.fd, task, answer, bytes);
        break;
    case FUSE_FALLOCATE:
        error = fallocate_(use.fd, task);
        break;
    case FUSE_FSYNC:
        error = fsync_(use.fd, task);
        break;
    case FUSE_LSEEK:
        error = lseek_(use.fd, task, answer, bytes);
        break;
    default:
        error = ENOSYS;
    }
    fsx_output_files_release(outputs->files, &use);
    return error == ENOENT ? EIO : error; /* of an open file no file system says it; but it has a meaning here */
}

struct fsx_task *fsx_task_copy(const struct fsx_task *task) {
    const size_t data_bytes = task->data != NULL ? (size_t)task->length : 0;
    struct fsx_task *copy = malloc(sizeof *copy + data_bytes);
    if (copy == NULL)
        return NULL;
    *copy = *task;
    if (task->data != NULL) {
        copy->data = (uint8_t *)(copy + 1);
        memcpy(copy + 1, task->data, data_bytes);
    }
    return copy;
}
