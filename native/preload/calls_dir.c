/* calls_dir.c: what programs call to list directories of the dataset; see preload.h.
 *
 * A stream of ours has no descriptor until somebody asks for it. It is told from one of the C library by its first bytes, where
 * that has a descriptor, which is never negative. Where there may be outputs, the mount lists. So it does for scandir, glob, nftw
 * and fdopendir, which use streams inside the C library; without a mount these are in calls_walk.c.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "preload/next.h"
#include "preload/outputs.h"
#include "preload/preload.h"

_Static_assert(sizeof(struct dirent) == sizeof(struct dirent64), "one layout on 64 bits");

struct stream {
    int32_t negative; /* NOT_A_DESCRIPTOR */
    uint32_t tag;     /* TAG */
    int64_t entry;     /* that of entries: the control directory */
    int fd;            /* of the directory on the mount or what stands for it, -1 as long as nobody has asked for it */
    uint64_t position; /* 0 ".", 1 "..", then the children: as the mount counts; outputs come last */
    struct fsx_listed *outputs; /* as they were when the listing began; NULL for none */
    size_t outputs_bytes;
    uint64_t reached; /* number of the output that begins at `reached_at` */
    size_t reached_at;
    struct dirent found;
};
#define NOT_A_DESCRIPTOR (-2)
#define TAG 0x44585346u

static struct stream *ours(DIR *directory) {
    struct stream *stream = (struct stream *)(void *)directory;
    return stream != NULL && stream->negative == NOT_A_DESCRIPTOR && stream->tag == TAG ? stream : NULL;
}

/* Those that are there now; false with errno. */
static bool list_outputs(struct stream *stream) {
    free(stream->outputs);
    stream->outputs = NULL;
    stream->reached = stream->reached_at = 0;
    if (!fsx_outputs_on() || fsx_is_control(stream->entry))
        return true;
    const int kept = errno;
    errno = 0;
    stream->outputs = fsx_output_list(stream->entry, &stream->outputs_bytes);
    if (stream->outputs == NULL && errno != 0)
        return false;
    errno = kept;
    return true;
}

static DIR *make_stream(int64_t entry, int fd) {
    struct stream *stream = malloc(sizeof *stream);
    if (stream == NULL)
        return NULL;
    *stream = (struct stream){.negative = NOT_A_DESCRIPTOR, .tag = TAG, .entry = entry, .fd = fd};
    if (!list_outputs(stream)) {
        free(stream);
        return NULL;
    }
    fsx_count(FSX_LISTINGS, 1);
    return (DIR *)(void *)stream;
}

static DIR *open_unmounted(const char *path) {
    struct fsx_way way;
    const int64_t entry = fsx_look_up(AT_FDCWD, path, true, &way);
    if (entry == FSX_ELSEWHERE)
        return NEXT(opendir)(way.path);
    const int error = entry < 0 ? way.error : !S_ISDIR(fsx_mode_of(entry)) ? ENOTDIR : fsx_may(entry, S_IRUSR) ? 0 : EACCES;
    FSX_LOG("opendir", path, entry, error == 0 ? "answered" : strerror(error));
    if (error == 0)
        return make_stream(entry, -1);
    errno = error;
    return NULL;
}

FSX_CALL DIR *opendir(const char *path) {
    if (fsx_unmounted)
        return open_unmounted(path);
    const int64_t entry = fsx_resolve(AT_FDCWD, path);
    if (entry == FSX_ELSEWHERE)
        return NEXT(opendir)(path);
    const uint32_t mode = entry >= 0 ? fsx_at.index.mode[entry] : 0;
    DIR *stream = NULL;
    if (S_ISDIR(mode) && (mode & S_IRUSR) != 0 && fsx_at.state->writable == 0 && !fsx_in_vfork())
        stream = make_stream(entry, -1);
    if (stream == NULL) {
        fsx_count(FSX_PASSED, 1);
        FSX_LOG("opendir", path, 0, "passed to the mount");
        return NEXT(opendir)(path);
    }
    FSX_LOG("opendir", path, entry, "answered");
    return stream;
}

FSX_CALL DIR *fdopendir(int fd) {
    const int error = fsx_is_ours(fd) ? fsx_promote(fd) : 0;
    if (error != 0) {
        errno = error;
        return NULL;
    }
    const int64_t entry = fsx_unmounted ? fsx_directory_entry(fd) : -1;
    if (entry < 0 || (syscall(SYS_fcntl, fd, F_GETFL) & O_PATH) != 0)
        return NEXT(fdopendir)(fd);
    DIR *stream = make_stream(entry, fd);
    FSX_LOG("fdopendir", NULL, fd, stream != NULL ? "answered" : "no memory");
    return stream;
}

/* Of the control directory, without a mount. */
static struct dirent *next_of_control(struct stream *stream) {
    struct dirent *found = &stream->found;
    const uint32_t first = fsx_at.index.entries;
    const uint64_t position = stream->position;
    const int64_t entry = position == 0 ? first : position == 1 ? 0 : (int64_t)(first + position - 1);
    const char *name = position == 0 ? "." : position == 1 ? ".." : fsx_control_name(entry);
    if (name == NULL || (position >= 2 && S_ISLNK(fsx_mode_of(entry)) && fsx_order_file() == NULL))
        return NULL;
    found->d_ino = (ino_t)entry + 1;
    found->d_off = (off_t)++stream->position;
    found->d_type = (uint8_t)((fsx_mode_of(entry) & S_IFMT) >> 12);
    strcpy(found->d_name, name);
    found->d_reclen = (uint16_t)((offsetof(struct dirent, d_name) + strlen(name) + 1 + 7) / 8 * 8);
    return found;
}

static struct dirent *found_one(struct stream *stream, ino_t inode, uint32_t mode, const char *name, size_t bytes) {
    struct dirent *found = &stream->found;
    found->d_ino = inode;
    found->d_off = (off_t)++stream->position;
    found->d_type = (uint8_t)((mode & S_IFMT) >> 12);
    memcpy(found->d_name, name, bytes);
    found->d_name[bytes] = '\0';
    found->d_reclen = (uint16_t)((offsetof(struct dirent, d_name) + bytes + 1 + 7) / 8 * 8);
    return found;
}

/* The output of this number, from the first one on. */
static struct dirent *next_output(struct stream *stream, uint64_t number) {
    if (number < stream->reached)
        stream->reached = stream->reached_at = 0;
    for (;;) {
        if (stream->outputs == NULL || stream->reached_at >= stream->outputs_bytes)
            return NULL;
        if (stream->reached == number)
            break;
        const struct fsx_listed *passed = (const void *)((const char *)stream->outputs + stream->reached_at);
        stream->reached_at += sizeof *passed + passed->bytes;
        stream->reached++;
    }
    const struct fsx_listed *each = (const void *)((const char *)stream->outputs + stream->reached_at);
    return found_one(stream, each->inode, each->mode, each->name, each->bytes);
}

/* Of a directory that is an output. */
static struct dirent *next_in_output(struct stream *stream) {
    if (stream->position >= 2)
        return next_output(stream, stream->position - 2);
    struct fsx_way way;
    int64_t entry = stream->position == 0 ? stream->entry : fsx_output_child(stream->entry, "..", 2, &way);
    if (entry < 0) /* it was removed */
        entry = stream->entry;
    return found_one(stream, fsx_output_inode(entry), S_IFDIR, "..", (size_t)stream->position + 1);
}

/* The next name; NULL at the end. */
static struct dirent *next_of(struct stream *stream) {
    const struct fsx_index *x = &fsx_at.index;
    const char *name = stream->position == 0 ? "." : "..";
    size_t bytes = stream->position + 1;
    if (fsx_is_control(stream->entry))
        return next_of_control(stream);
    if (fsx_is_output(stream->entry))
        return next_in_output(stream);
    const uint32_t directory = (uint32_t)stream->entry;
    uint32_t entry = stream->position == 0 ? directory : x->parent[directory];
    if (stream->position >= 2) {
        while (stream->position - 2 < x->count[directory] &&
               x->first[directory] + (stream->position - 2) == fsx_at.state->hidden)
            stream->position++;
        if (stream->position - 2 >= x->count[directory])
            return next_output(stream, stream->position - 2 - x->count[directory]);
        entry = x->first[directory] + (uint32_t)(stream->position - 2);
        name = (const char *)x->names + x->nameoff[entry];
        bytes = (size_t)(x->nameoff[entry + 1] - x->nameoff[entry]);
    }
    return found_one(stream, (ino_t)x->inode[entry] + 1, x->mode[entry], name, bytes);
}

FSX_CALL struct dirent *readdir(DIR *directory) {
    struct stream *stream = ours(directory);
    return stream != NULL ? next_of(stream) : NEXT(readdir)(directory);
}
FSX_CALL struct dirent64 *readdir64(DIR *directory) {
    struct stream *stream = ours(directory);
    return stream != NULL ? (struct dirent64 *)(void *)next_of(stream) : NEXT(readdir64)(directory);
}

/* The same into memory of the caller, which old programs use. */
#define READDIR_R(name, type)                                                                            \
    FSX_CALL int name(DIR *directory, struct type *target, struct type **result);                        \
    FSX_CALL int name(DIR *directory, struct type *target, struct type **result) {                       \
        struct stream *stream = ours(directory);                                                         \
        if (stream == NULL)                                                                              \
            return NEXT_AS(int (*)(DIR *, struct type *, struct type **), name)(directory, target, result); \
        const struct dirent *found = next_of(stream);                                                    \
        if (found != NULL)                                                                               \
            memcpy(target, found, found->d_reclen);                                                      \
        *result = found != NULL ? target : NULL;                                                         \
        return 0;                                                                                        \
    }
READDIR_R(readdir_r, dirent)
READDIR_R(readdir64_r, dirent64)

FSX_CALL void rewinddir(DIR *directory) {
    struct stream *stream = ours(directory);
    if (stream == NULL) {
        NEXT(rewinddir)(directory);
        return;
    }
    stream->position = 0;
    list_outputs(stream); /* without them, if the daemon has gone */
}
FSX_CALL void seekdir(DIR *directory, long position) {
    struct stream *stream = ours(directory);
    if (stream != NULL)
        stream->position = position < 0 ? 0 : (uint64_t)position;
    else
        NEXT(seekdir)(directory, position);
}
FSX_CALL long telldir(DIR *directory) {
    struct stream *stream = ours(directory);
    return stream != NULL ? (long)stream->position : NEXT(telldir)(directory);
}

FSX_CALL int dirfd(DIR *directory) {
    struct stream *stream = ours(directory);
    if (stream == NULL)
        return NEXT(dirfd)(directory);
    if (stream->fd < 0 && fsx_unmounted)
        stream->fd = fsx_foreign(fsx_open_directory(stream->entry, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (stream->fd < 0 && !fsx_unmounted) {
        char path[FSX_STATE_PATH];
        if (!fsx_path_of(stream->entry, path)) {
            errno = ENAMETOOLONG;
            return -1;
        }
        stream->fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    }
    return stream->fd;
}

FSX_CALL int closedir(DIR *directory) {
    struct stream *stream = ours(directory);
    if (stream == NULL)
        return NEXT(closedir)(directory);
    if (stream->fd >= 0)
        close(stream->fd);
    free(stream->outputs);
    free(stream);
    return 0;
}
