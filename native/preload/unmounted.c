/* unmounted.c: what stands for a mount where there is none: directories and files that the kernel knows; see preload.h.
 *
 * A directory of the dataset that is opened, or becomes the working directory, is an empty directory of the job, tree/ENTRY
 * beside the state. It is a real one: it survives exec, can be duplicated, passed on and changed to, and its path says which
 * directory of the dataset it stands for. So it is with content: a sealed memfd, whose name has the entry. Neither needs a note in
 * the table.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "preload/ask.h"
#include "preload/next.h"
#include "preload/outputs.h"
#include "preload/preload.h"

#define REPLACED_MOST 100 /* times that a file is replaced while it is being opened */
#define ALL_SEALS 15
/* Of a memfd, as the kernel shows it: the name, and the number of the mount that is not there. */
#define SHOWN "/memfd:fanstore-"
/* What open takes that has a meaning for a file that is open. */
#define STATUS_FLAGS (O_ACCMODE | O_CLOEXEC | O_NOATIME | O_NONBLOCK | O_APPEND | O_PATH | O_NOCTTY | O_SYNC | O_DSYNC)

bool fsx_unmounted;

static char tree[FSX_STATE_PATH]; /* the path of the directories, without symbolic links; with a slash */
static size_t tree_bytes;
static dev_t tree_device, memfd_device;
static char order_file[FSX_STATE_PATH];

static size_t shown(int fd, char *target, size_t room) {
    char name[32];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    const ssize_t bytes = syscall(SYS_readlinkat, AT_FDCWD, name, target, room - 1);
    target[bytes < 0 ? 0 : bytes] = '\0';
    return bytes < 0 ? 0 : (size_t)bytes;
}

bool fsx_unmounted_start(const char *state) {
    char path[FSX_STATE_PATH + 16];
    snprintf(path, sizeof path, "%s/tree", state);
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
    struct stat about;
    if (fd < 0)
        return false;
    const bool looked = syscall(SYS_fstat, fd, &about) == 0;
    tree_device = about.st_dev;
    tree_bytes = shown(fd, tree, sizeof tree - 1);
    syscall(SYS_close, fd);
    if (!looked || tree_bytes == 0) {
        errno = looked ? ENOENT : errno; /* no /proc */
        return false;
    }
    const int job_bytes = (int)(tree_bytes - strlen("/preload/tree"));
    snprintf(order_file, sizeof order_file, "%.*s/order", job_bytes, tree);
    tree[tree_bytes] = '\0';
    snprintf(path, sizeof path, "%.*s", job_bytes, tree);
    if (fsx_at.state->writable != 0 && !fsx_outputs_start(path))
        return false;
    tree[tree_bytes++] = '/';
    const int content = (int)syscall(SYS_memfd_create, "fanstore", FSX_MEMFD_CLOEXEC);
    if (content < 0 || syscall(SYS_fstat, content, &about) != 0)
        return false;
    memfd_device = about.st_dev;
    syscall(SYS_close, content);
    fsx_unmounted = true;
    return true;
}

const char *fsx_order_file(void) {
    const int kept = errno;
    const bool there = syscall(SYS_faccessat, AT_FDCWD, order_file, F_OK) == 0;
    errno = kept;
    return there ? order_file : NULL;
}

/* ---- directories ------------------------------------------------------------------------------------------------------- */

/* The number at the start of a text; -1 for none, or none of ours: those of outputs are large. */
static int64_t number_in(const char *text, char end) {
    int64_t number = 0;
    const char *behind = text;
    for (; *behind >= '0' && *behind <= '9' && number < FSX_OUTPUT_END; behind++)
        number = number * 10 + (*behind - '0');
    const bool ours = number <= (int64_t)fsx_at.index.entries || (fsx_is_output(number) && number < FSX_OUTPUT_END);
    return behind > text && *behind == end && ours ? number : -1;
}

int64_t fsx_tree_entry(const char *path) {
    const int64_t number = strncmp(path, tree, tree_bytes) == 0 ? number_in(path + tree_bytes, '\0') : -1;
    return fsx_is_output(number) ? fsx_output_entry((uint64_t)number, S_IFDIR | 0777) : number;
}

static int64_t working_entry(void) {
    char path[FSX_STATE_PATH];
    return syscall(SYS_getcwd, path, sizeof path) > 0 ? fsx_tree_entry(path) : -1;
}

/* The entry that a real descriptor stands for, of which fstat has said this; -1 for none. */
static int64_t entry_behind(int fd, const struct stat *about) {
    char name[FSX_STATE_PATH + 32];
    if (S_ISDIR(about->st_mode) && about->st_dev == tree_device && shown(fd, name, sizeof name) > 0)
        return fsx_tree_entry(name);
    if (S_ISREG(about->st_mode) && about->st_nlink == 0 && about->st_dev == memfd_device && shown(fd, name, sizeof name) > 0)
        return fsx_memfd_entry(name);
    if (S_ISREG(about->st_mode) && fsx_is_content_device(about->st_dev) && shown(fd, name, sizeof name) > 0)
        return fsx_content_entry(name);
    return -1;
}

int64_t fsx_memfd_entry(const char *shown_name) {
    char rest[48];
    if (strncmp(shown_name, SHOWN, sizeof SHOWN - 1) != 0)
        return -1;
    const int64_t entry = number_in(shown_name + sizeof SHOWN - 1, '-');
    snprintf(rest, sizeof rest, "%lld-%llx (deleted)", (long long)entry, (unsigned long long)fsx_at.state->device);
    return entry >= 0 && entry < fsx_at.index.entries && strcmp(shown_name + sizeof SHOWN - 1, rest) == 0 ? entry : -1;
}

int64_t fsx_real_entry(int fd) {
    if (!fsx_unmounted || fd < 0)
        return -1;
    struct stat about;
    const int kept = errno;
    const int64_t entry = syscall(SYS_fstat, fd, &about) == 0 ? entry_behind(fd, &about) : -1;
    errno = kept;
    return entry;
}

int64_t fsx_directory_entry(int fd) {
    const int kept = errno;
    int64_t entry = -1;
    if (fd == AT_FDCWD)
        entry = working_entry();
    else if (fd >= 0)
        entry = fsx_real_entry(fd);
    errno = kept;
    return entry >= 0 && S_ISDIR(fsx_mode_of(entry)) ? entry : -1;
}

bool fsx_tree_path(int64_t entry, char path[FSX_STATE_PATH]) {
    const long long number = fsx_is_output(entry) ? (long long)fsx_output_inode(entry) : (long long)entry;
    const int bytes = snprintf(path, FSX_STATE_PATH, "%s%lld", tree, number);
    if (bytes < 0 || bytes >= (int)FSX_STATE_PATH) {
        errno = ENAMETOOLONG;
        return false;
    }
    const int kept = errno;
    if (syscall(SYS_mkdirat, AT_FDCWD, path, 0500) != 0 && errno != EEXIST)
        return false;
    errno = kept;
    return true;
}

int fsx_open_directory(int64_t entry, int flags) {
    char path[FSX_STATE_PATH];
    if (!fsx_tree_path(entry, path))
        return -1;
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags & ~(O_CREAT | O_NOFOLLOW), 0);
}

/* ---- content ----------------------------------------------------------------------------------------------------------- */

/* With other flags: a descriptor of its own, with its own offset. `fd` is closed. */
static int reopened(int fd, int flags) {
    char name[32];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    const int own = (int)syscall(SYS_openat, AT_FDCWD, name, flags & STATUS_FLAGS, 0);
    const int kept = errno;
    if (own < 0 && kept == EMFILE && (flags & O_PATH) == 0) { /* the last one that there is; nothing can be written to it */
        if ((flags & O_CLOEXEC) == 0)
            syscall(SYS_fcntl, fd, F_SETFD, 0);
        return fd;
    }
    syscall(SYS_close, fd);
    /* The lowest number that is free, as open gives it. */
    const int low = own < 0 ? -1 : (int)syscall(SYS_fcntl, own, (flags & O_CLOEXEC) != 0 ? F_DUPFD_CLOEXEC : F_DUPFD, 0);
    const bool lower = low >= 0 && low < own;
    if (low >= 0)
        syscall(SYS_close, lower ? own : low);
    errno = kept;
    return lower ? low : own;
}

/* Files from here on are copied to memory only if that is there twice: otherwise the kernel would end programs to make room. */
#define LARGE_BYTES (UINT64_C(256) << 20)

static bool has_memory(uint64_t bytes) {
    char text[1024];
    if (bytes < LARGE_BYTES)
        return true;
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/meminfo", O_RDONLY | O_CLOEXEC, 0);
    const ssize_t got = fd < 0 ? -1 : syscall(SYS_read, fd, text, sizeof text - 1);
    if (fd >= 0)
        syscall(SYS_close, fd);
    text[got < 0 ? 0 : got] = '\0';
    const char *line = strstr(text, "MemAvailable:");
    uint64_t available = 0;
    for (line = line == NULL ? "" : line + strcspn(line, "0123456789\n"); *line >= '0' && *line <= '9'; line++)
        available = available * 10 + (uint64_t)(*line - '0');
    return available == 0 || bytes / 1024 < available / 2;
}

static bool fill_with(int fd, uint32_t entry) {
    const uint64_t size = fsx_at.index.size[entry];
    if (syscall(SYS_ftruncate, fd, size) != 0)
        return false;
    if (size == 0)
        return true;
    void *map = fsx_map((size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
    if (map == MAP_FAILED)
        return false;
    bool done = true;
    for (uint64_t from = 0; from < size && done; from += FSX_CHUNK_BYTES) {
        const size_t bytes = size - from < FSX_CHUNK_BYTES ? (size_t)(size - from) : FSX_CHUNK_BYTES;
        /* Before it is written to, so that a lack of memory is an error and not a SIGBUS. */
        done = syscall(SYS_fallocate, fd, 0, from, bytes) == 0 && fsx_bytes_read(entry, from, (char *)map + from, bytes);
    }
    syscall(SYS_munmap, map, (size_t)size);
    return done;
}

int fsx_open_content(uint32_t entry, int flags) {
    char name[64];
    int fd = -1;
    if (!has_memory(fsx_at.index.size[entry])) {
        errno = ENOMEM;
        return -1;
    }
    if (fsx_bytes_here(entry)) {
        snprintf(name, sizeof name, "fanstore-%u-%llx", entry, (unsigned long long)fsx_at.state->device);
        fd = (int)syscall(SYS_memfd_create, name, FSX_MEMFD_CLOEXEC | FSX_MEMFD_SEALING);
        if (fd < 0)
            return -1;
        if (!fill_with(fd, entry)) {
            syscall(SYS_close, fd);
            fd = -1;
        } else {
            syscall(SYS_fcntl, fd, FSX_ADD_SEALS, ALL_SEALS);
        }
    }
    if (fd < 0) { /* it is elsewhere, or damaged here: the daemon knows other copies, and counts */
        fsx_count(FSX_PASSED, 1);
        fd = fsx_ask_content(entry);
    }
    return fd < 0 ? -1 : reopened(fd, flags);
}

int fsx_open_control(int64_t entry, int flags) {
    struct fsx_request request;
    struct fsx_answer answer;
    fsx_request_start(&request, "control", 1);
    fsx_request_text(&request, "name", fsx_control_name(entry));
    const int error = fsx_ask(&request, &answer);
    if (error != 0 || answer.descriptors != 1) {
        fsx_answer_close(&answer);
        errno = error != 0 ? error : EIO;
        return -1;
    }
    return reopened(answer.descriptor[0], flags);
}

ssize_t fsx_ask_attribute(uint32_t entry, const char *name, char *value, size_t room) {
    struct fsx_request request;
    struct fsx_answer answer;
    fsx_request_start(&request, "attribute", 2);
    fsx_request_number(&request, "entry", entry);
    fsx_request_text(&request, "name", name);
    int error = fsx_ask(&request, &answer);
    const char *found;
    size_t bytes = 0;
    if (error == 0) {
        if (fsx_answer_text(&answer, "value", &found, &bytes) && bytes <= room)
            memcpy(value, found, bytes);
        else
            error = EIO;
        fsx_answer_close(&answer);
    }
    if (error == 0)
        return (ssize_t)bytes;
    errno = error;
    return -1;
}

/* What does not go together. */
static bool is_nonsense(int flags) {
    const int temporary = O_TMPFILE & ~O_DIRECTORY;
    if ((flags & O_PATH) != 0)
        return false;
    if ((flags & (O_CREAT | O_DIRECTORY)) == (O_CREAT | O_DIRECTORY))
        return true;
    return (flags & temporary) != 0 && ((flags & O_DIRECTORY) == 0 || (flags & O_ACCMODE) == O_RDONLY);
}

/* What opening says of an entry before there is a descriptor: 0 or an errno, in the order in which the kernel finds it. */
static int refusal(int64_t entry, int flags) {
    const uint32_t mode = fsx_mode_of(entry);
    const bool writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0;
    if ((flags & O_PATH) != 0)
        return (flags & O_DIRECTORY) != 0 && !S_ISDIR(mode) ? ENOTDIR : 0;
    if ((flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL))
        return EEXIST;
    if (S_ISLNK(mode))
        return (flags & O_DIRECTORY) != 0 ? ENOTDIR : ELOOP;
    if (S_ISDIR(mode) && (flags & O_TMPFILE) == O_TMPFILE)
        return fsx_outputs_on() ? EOPNOTSUPP : EROFS;
    if (S_ISDIR(mode) && ((flags & O_CREAT) != 0 || writes))
        return EISDIR;
    if (!S_ISDIR(mode) && (flags & O_DIRECTORY) != 0)
        return ENOTDIR;
    const bool reads = (flags & O_ACCMODE) != O_WRONLY;
    if (writes && !fsx_outputs_on())
        return EROFS;
    if ((writes && !fsx_may(entry, S_IWUSR)) || (reads && !fsx_may(entry, S_IRUSR)))
        return EACCES;
    return writes && !fsx_is_output(entry) ? EROFS : 0;
}

/* `gone`: the output that the name led to is not there any more. */
static int open_once(int directory, const char *path, int flags, mode_t mode, bool real, struct fsx_way *way, bool *gone) {
    *gone = false;
    const bool created = (flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL);
    const int64_t entry = fsx_look_up(directory, path, (flags & O_NOFOLLOW) == 0 && !created, way);
    if (entry == FSX_ELSEWHERE) {
        fsx_promote_named(way->path);
        return -2;
    }
    int error = is_nonsense(flags) ? EINVAL : entry >= 0 ? refusal(entry, flags) : way->error;
    const bool slash = path[strlen(path) - 1] == '/'; /* what is made by opening is no directory */
    if ((flags & O_CREAT) != 0 && slash && (entry >= 0 || error == ENOTDIR || way->parent >= 0))
        error = EISDIR;
    const bool makes = error == ENOENT && (flags & O_CREAT) != 0 && way->parent >= 0;
    if (makes)
        error = !fsx_outputs_on() ? EROFS : fsx_may(way->parent, S_IWUSR) ? 0 : EACCES;
    int fd = -1;
    if (error != 0)
        errno = error;
    else if (makes)
        fd = fsx_foreign(fsx_output_create(way, flags, mode));
    else if (S_ISDIR(fsx_mode_of(entry)))
        fd = fsx_foreign(fsx_open_directory(entry, flags));
    else if (fsx_is_output(entry) && S_ISREG(fsx_mode_of(entry))) {
        fd = fsx_foreign(fsx_output_open(entry, flags));
        *gone = fd < 0 && errno == ENOENT;
    } else if (fsx_is_control(entry))
        fd = fsx_foreign(fsx_open_control(entry, flags));
    else if (S_ISREG(fsx_mode_of(entry))) {
        fsx_bytes_here((uint32_t)entry); /* opens the partition, as long as there are descriptors */
        fd = real || (flags & O_PATH) != 0 ? -2 : fsx_open_entry((uint32_t)entry, flags & ~(O_CREAT | O_EXCL));
        if (fd == -2)
            fd = fsx_foreign(fsx_open_content((uint32_t)entry, flags));
        if (fd >= 0)
            fsx_count(FSX_OPENS, 1);
    } else {
        errno = ENXIO;
    }
    return fd;
}

int fsx_open_unmounted(int directory, const char *path, int flags, mode_t mode, bool real, struct fsx_way *way) {
    bool gone = true;
    int fd = -1;
    /* Another one may have got its name since it was looked up, and a name that is replaced is there at any time. */
    for (int tries = 0; gone && tries < REPLACED_MOST; tries++)
        fd = open_once(directory, path, flags, mode, real, way, &gone);
    if (fd != -2)
        FSX_LOG("open", path, fd, fd >= 0 ? "answered" : strerror(errno));
    return fd;
}
