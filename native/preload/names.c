/* names.c: paths to entries of the index, and back; see preload.h. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "preload/outputs.h"
#include "preload/preload.h"

/* The working directory, as far as names that begin there are concerned. */
/* WITHOUT: in one that has nothing of the dataset in it, the control directory or an output. */
enum { UNKNOWN, OUTSIDE, ABOVE, INSIDE, WITHOUT };
/* Kind << 32 | value. ABOVE: where in the mount point's name the part begins that a path must begin with; INSIDE: entry. */
static _Atomic uint64_t working_directory;

void fsx_forget_directory(void) { atomic_store(&working_directory, (uint64_t)UNKNOWN << 32); }

/* From a directory of the dataset on. */
static int64_t walk(uint32_t entry, const char *path) {
    const struct fsx_index *x = &fsx_at.index;
    for (;;) {
        while (*path == '/')
            path++;
        if (*path == '\0')
            return entry;
        if (!S_ISDIR(x->mode[entry]) || (x->mode[entry] & S_IXUSR) == 0)
            return FSX_PASS;
        const char *end = strchrnul(path, '/');
        const size_t bytes = (size_t)(end - path);
        if (path[0] == '.' && bytes == 1) {
            path = end;
            continue;
        }
        const int64_t child = fsx_index_lookup(x, entry, (const uint8_t *)path, bytes); /* -1 of "..", too */
        if (child < 0 || child == fsx_at.state->hidden)
            return FSX_PASS;
        entry = (uint32_t)child;
        path = end;
        if (*path == '/' && !S_ISDIR(x->mode[entry]))
            return FSX_PASS;
    }
}

/* `name`: an end of the mount point's name. */
static int64_t from_point(const char *name, const char *path) {
    const size_t bytes = strlen(name);
    if (strncmp(path, name, bytes) != 0 || (path[bytes] != '/' && path[bytes] != '\0'))
        return FSX_ELSEWHERE;
    return walk(0, path + bytes);
}

static uint64_t look_where_we_are(void) {
    char path[FSX_STATE_PATH];
    const char *point = fsx_at.state->point[0];
    const int kept = errno;
    const long length = syscall(SYS_getcwd, path, sizeof path); /* with its NUL */
    errno = kept;
    if (length < 2 || path[0] != '/')
        return (uint64_t)OUTSIDE << 32;
    if (fsx_unmounted) {
        const int64_t here = fsx_tree_entry(path);
        if (here >= 0)
            return here >= fsx_at.index.entries ? (uint64_t)WITHOUT << 32 : (uint64_t)INSIDE << 32 | (uint64_t)here;
    }
    const size_t bytes = length == 2 ? 0 : (size_t)length - 1; /* "/" alone counts as nothing before a slash */
    if (strncmp(point, path, bytes) == 0 && point[bytes] == '/')
        return (uint64_t)ABOVE << 32 | (bytes + 1);
    const int64_t entry = from_point(point, path);
    return entry >= 0 ? (uint64_t)INSIDE << 32 | (uint64_t)entry : (uint64_t)OUTSIDE << 32;
}

/* From a directory of the mount that the program has opened. */
static int64_t from_descriptor(int directory, const char *path) {
    if (fsx_unmounted) {
        const int64_t entry = fsx_directory_entry(directory);
        return entry < 0 ? FSX_ELSEWHERE : entry >= fsx_at.index.entries ? FSX_PASS : walk((uint32_t)entry, path);
    }
    struct stat about;
    const int kept = errno;
    const bool mine = directory >= 0 && syscall(SYS_fstat, directory, &about) == 0 && S_ISDIR(about.st_mode) &&
                      about.st_dev == fsx_at.state->device;
    errno = kept;
    if (!mine)
        return FSX_ELSEWHERE;
    const uint64_t entry = about.st_ino - 1; /* larger ones are outputs and control files */
    return entry < fsx_at.index.entries && S_ISDIR(fsx_at.index.mode[entry]) ? walk((uint32_t)entry, path) : FSX_PASS;
}

bool fsx_is_open(void) {
    return atomic_load_explicit(&fsx_on, memory_order_acquire) && __atomic_load_n(&fsx_at.state->ended, __ATOMIC_RELAXED) == 0;
}

int64_t fsx_resolve(int directory, const char *path) {
    if (!fsx_is_open() || path == NULL || path[0] == '\0')
        return FSX_ELSEWHERE;
    const struct fsx_state *state = fsx_at.state;
    if (path[0] == '/') {
        int64_t entry = from_point(state->point[0], path);
        if (entry == FSX_ELSEWHERE && state->points > 1)
            entry = from_point(state->point[1], path);
        return entry;
    }
    if (directory != AT_FDCWD)
        return from_descriptor(directory, path);
    uint64_t here = atomic_load_explicit(&working_directory, memory_order_relaxed);
    if (here >> 32 == UNKNOWN) {
        const uint64_t found = look_where_we_are();
        /* Not if a chdir came between: the next one looks again. Nor what the child of a vfork sees, in whose memory it is. */
        if (!fsx_in_vfork())
            atomic_compare_exchange_strong(&working_directory, &here, found);
        here = found;
    }
    const uint32_t value = (uint32_t)here;
    switch (here >> 32) {
    case ABOVE:
        return from_point(state->point[0] + value, path);
    case INSIDE:
        return walk(value, path);
    case WITHOUT:
        return FSX_PASS;
    default:
        return FSX_ELSEWHERE;
    }
}

bool fsx_path_of(int64_t entry, char path[FSX_STATE_PATH]) {
    const struct fsx_index *x = &fsx_at.index;
    char *start = path + FSX_STATE_PATH;
    *--start = '\0';
    if (fsx_is_output(entry)) {
        const size_t above = strlen(fsx_at.state->point[0]);
        memcpy(path, fsx_at.state->point[0], above);
        return fsx_output_path(entry, path + above, FSX_STATE_PATH - above);
    }
    if (fsx_is_control(entry)) { /* the directory, which can be a working directory */
        start -= strlen("/.fanstore");
        memcpy(start, "/.fanstore", strlen("/.fanstore"));
        entry = 0;
    }
    for (; entry != 0; entry = x->parent[entry]) {
        const size_t bytes = (size_t)(x->nameoff[entry + 1] - x->nameoff[entry]);
        if ((size_t)(start - path) < bytes + 1)
            return false;
        start -= bytes;
        memcpy(start, x->names + x->nameoff[entry], bytes);
        *--start = '/';
    }
    const char *point = fsx_at.state->point[0];
    const size_t bytes = strlen(point);
    if ((size_t)(start - path) < bytes)
        return false;
    start -= bytes;
    memcpy(start, point, bytes);
    memmove(path, start, (size_t)(path + FSX_STATE_PATH - start));
    return true;
}

void fsx_promote_named(const char *path) {
    if (path == NULL || (strncmp(path, "/proc/", 6) != 0 && strncmp(path, "/dev/fd/", 8) != 0))
        return;
    const char *number = strstr(path, "/fd/");
    if (number == NULL || number[4] < '0' || number[4] > '9')
        return;
    const int kept = errno;
    fsx_promote(atoi(number + 4));
    errno = kept;
}
