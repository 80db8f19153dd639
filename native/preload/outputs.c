/* outputs.c: see outputs.h. Requests are those of fanstore/fuse/unmountedoutputs.py. */
#include "preload/outputs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "preload/ask.h"

#define CONTENTS "/outputs/"
#define DELETED " (deleted)"
/* Above the number of the inode: what kind it is, and its permissions. */
#define KIND_SHIFT 48
#define MODE_SHIFT 50
#define PERMISSIONS 07777u

static char contents[FSX_STATE_PATH]; /* the path of the directory of contents, with a slash; empty: there are none */
static size_t contents_bytes;
static dev_t contents_device;

bool fsx_outputs_start(const char *job) {
    struct stat about;
    const int bytes = snprintf(contents, sizeof contents, "%s" CONTENTS, job);
    if (bytes < 0 || bytes >= (int)sizeof contents || syscall(SYS_newfstatat, AT_FDCWD, contents, &about, 0) != 0) {
        contents[0] = '\0';
        return false;
    }
    contents_bytes = (size_t)bytes;
    contents_device = about.st_dev;
    return true;
}

bool fsx_outputs_on(void) { return contents_bytes != 0; }

bool fsx_is_content_device(dev_t device) { return contents_bytes != 0 && device == contents_device; }

/* ---- entries -------------------------------------------------------------------------------------------------------------- */

static const uint32_t kinds[] = {0, S_IFDIR, S_IFREG, S_IFLNK};

int64_t fsx_output_entry(uint64_t inode, uint32_t mode) {
    int64_t kind = 0;
    while (kind < 3 && kinds[kind] != (mode & S_IFMT))
        kind++;
    return (int64_t)inode | kind << KIND_SHIFT | (int64_t)(mode & PERMISSIONS) << MODE_SHIFT;
}

uint64_t fsx_output_inode(int64_t entry) {
    return fsx_is_output(entry) ? (uint64_t)entry & (uint64_t)(FSX_OUTPUT_END - 1) : (uint64_t)entry + 1;
}

uint32_t fsx_output_mode(int64_t entry) {
    return kinds[entry >> KIND_SHIFT & 3] | ((uint32_t)(entry >> MODE_SHIFT) & PERMISSIONS);
}

int64_t fsx_content_entry(const char *path) {
    if (contents_bytes == 0 || strncmp(path, contents, contents_bytes) != 0)
        return -1;
    char *end;
    const unsigned long long inode = strtoull(path + contents_bytes, &end, 16);
    if (end == path + contents_bytes || (*end != '\0' && strcmp(end, DELETED) != 0) ||
        inode < (unsigned long long)FSX_OUTPUT_FIRST || inode >= (unsigned long long)FSX_OUTPUT_END)
        return -1;
    return fsx_output_entry(inode, S_IFREG | 0600);
}

/* ---- requests ------------------------------------------------------------------------------------------------------------- */

/* 0 or an errno; the answer is to be closed by whoever keeps it. */
static int ask(const struct fsx_request *request, struct fsx_answer *answer) { return fsx_ask(request, answer); }

/* The same where nothing is answered. */
static int ask_done(const struct fsx_request *request) {
    struct fsx_answer answer;
    const int error = ask(request, &answer);
    if (error == 0)
        fsx_answer_close(&answer);
    return error;
}

/* About an output or a directory. */
static void start_about(struct fsx_request *request, const char *name, unsigned arguments, int64_t entry) {
    fsx_request_start(request, name, arguments);
    fsx_request_number(request, "inode", fsx_output_inode(entry));
}

/* About a name. */
static void start_at(struct fsx_request *request, const char *name, unsigned arguments, const struct fsx_way *way) {
    fsx_request_start(request, name, arguments);
    fsx_request_number(request, "parent", fsx_output_inode(way->parent));
    fsx_request_bytes(request, "name", way->last, strlen(way->last));
}

static bool take_about(const struct fsx_answer *answer, struct fsx_about *about) {
    uint64_t mode, nlink, mtime_ns;
    if (!fsx_answer_number(answer, "inode", &about->inode) || !fsx_answer_number(answer, "mode", &mode) ||
        !fsx_answer_number(answer, "nlink", &nlink) || !fsx_answer_number(answer, "size", &about->size) ||
        !fsx_answer_number(answer, "blocks", &about->blocks))
        return false;
    /* A time before 1970 is a negative number, which answers of the daemon do not have as such. */
    about->mtime_ns = fsx_answer_number(answer, "mtime_ns", &mtime_ns) ? (int64_t)mtime_ns : 0;
    about->mode = (uint32_t)mode;
    about->nlink = (uint32_t)nlink;
    return true;
}

/* ---- names ---------------------------------------------------------------------------------------------------------------- */

int64_t fsx_output_child(int64_t directory, const char *name, size_t bytes, struct fsx_way *way) {
    struct fsx_request request;
    struct fsx_answer answer;
    fsx_request_start(&request, "output-lookup", 2);
    fsx_request_number(&request, "parent", fsx_output_inode(directory));
    fsx_request_bytes(&request, "name", name, bytes);
    way->error = ask(&request, &answer);
    if (way->error != 0)
        return FSX_NOTHING;
    const bool there = take_about(&answer, &way->about);
    fsx_answer_close(&answer);
    if (!there)
        return -1;
    if (way->about.inode >= (uint64_t)FSX_OUTPUT_FIRST)
        return fsx_output_entry(way->about.inode, way->about.mode);
    return way->about.inode > 0 && way->about.inode <= fsx_at.index.entries ? (int64_t)way->about.inode - 1 : -1;
}

int fsx_output_about(int64_t entry, struct fsx_about *about) {
    struct fsx_request request;
    struct fsx_answer answer;
    start_about(&request, "output-attributes", 1, entry);
    int error = ask(&request, &answer);
    if (error == 0) {
        error = take_about(&answer, about) ? 0 : EIO;
        fsx_answer_close(&answer);
    }
    return error;
}

/* Text of an answer into `room` bytes: its length, or -1 with errno. */
static ssize_t ask_text(const struct fsx_request *request, const char *key, char *target, size_t room) {
    struct fsx_answer answer;
    const char *found;
    size_t bytes = 0;
    int error = ask(request, &answer);
    if (error == 0) {
        if (!fsx_answer_text(&answer, key, &found, &bytes))
            error = EIO;
        else if (bytes > room && room != 0)
            error = ERANGE;
        else if (room != 0)
            memcpy(target, found, bytes);
        fsx_answer_close(&answer);
    }
    if (error == 0)
        return (ssize_t)bytes;
    errno = error;
    return -1;
}

bool fsx_output_path(int64_t entry, char *path, size_t room) {
    struct fsx_request request;
    start_about(&request, "output-path", 1, entry);
    path[0] = '/';
    const ssize_t bytes = room < 3 ? -1 : ask_text(&request, "path", path + 1, room - 2);
    if (bytes < 0)
        return false;
    path[1 + bytes] = '\0';
    return true;
}

ssize_t fsx_output_link(int64_t entry, char *target, size_t room) {
    struct fsx_request request;
    start_about(&request, "output-readlink", 1, entry);
    return ask_text(&request, "target", target, room);
}

struct fsx_listed *fsx_output_list(int64_t directory, size_t *bytes) {
    struct fsx_request request;
    struct fsx_answer answer;
    start_about(&request, "output-list", 1, directory);
    int error = ask(&request, &answer);
    void *listed = NULL;
    *bytes = 0;
    if (error == 0 && answer.descriptors == 1) {
        const off_t end = (off_t)syscall(SYS_lseek, answer.descriptor[0], 0, SEEK_END);
        listed = end > 0 ? malloc((size_t)end) : NULL;
        error = listed == NULL ? ENOMEM : 0;
        while (error == 0 && *bytes < (size_t)end) {
            const ssize_t got = syscall(SYS_pread64, answer.descriptor[0], (char *)listed + *bytes, (size_t)end - *bytes, *bytes);
            if (got <= 0)
                error = EIO;
            else
                *bytes += (size_t)got;
        }
    }
    if (answer.descriptors > 0)
        fsx_answer_close(&answer);
    if (error == 0)
        return listed;
    free(listed);
    *bytes = 0;
    errno = error;
    return NULL;
}

/* ---- changes -------------------------------------------------------------------------------------------------------------- */

/* Asked of the kernel each time: it can be changed by clone and others in ways that are not seen here. */
static mode_t current_umask(void) {
    char text[512];
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/thread-self/status", O_RDONLY | O_CLOEXEC, 0);
    const ssize_t got = fd < 0 ? -1 : syscall(SYS_read, fd, text, sizeof text - 1);
    if (fd >= 0)
        syscall(SYS_close, fd);
    text[got < 0 ? 0 : got] = '\0';
    const char *line = strstr(text, "Umask:");
    if (line != NULL)
        return (mode_t)strtoul(line + strlen("Umask:"), NULL, 8) & 0777;
    const mode_t mask = (mode_t)syscall(SYS_umask, 077); /* Linux before 4.7 */
    syscall(SYS_umask, mask);
    return mask;
}

static mode_t masked(mode_t mode) { return mode & ~current_umask(); }

int fsx_output_make(const struct fsx_way *way, mode_t mode, const char *target) {
    struct fsx_request request;
    start_at(&request, "output-make", 4, way);
    fsx_request_number(&request, "mode", masked(mode));
    fsx_request_bytes(&request, "target", target, strlen(target));
    return ask_done(&request);
}

int fsx_output_remove(const struct fsx_way *way, bool directory) {
    struct fsx_request request;
    start_at(&request, "output-remove", 3, way);
    fsx_request_flag(&request, "directory", directory);
    return ask_done(&request);
}

int fsx_output_rename(const struct fsx_way *from, const struct fsx_way *to, unsigned flags) {
    struct fsx_request request;
    start_at(&request, "output-rename", 5, from);
    fsx_request_number(&request, "to", fsx_output_inode(to->parent));
    fsx_request_bytes(&request, "to_name", to->last, strlen(to->last));
    fsx_request_number(&request, "flags", flags);
    return ask_done(&request);
}

int fsx_output_set(int64_t entry, const struct fsx_changes *changes) {
    struct fsx_request request;
    if (changes->mtime_ns < 0)
        return EINVAL;
    start_about(&request, "output-set", 7, entry);
    fsx_request_number(&request, "what", changes->what);
    fsx_request_number(&request, "mode", changes->mode);
    fsx_request_number(&request, "uid", changes->uid);
    fsx_request_number(&request, "gid", changes->gid);
    fsx_request_number(&request, "size", changes->size);
    fsx_request_number(&request, "mtime_ns", (uint64_t)changes->mtime_ns);
    return ask_done(&request);
}

int fsx_output_set_attribute(int64_t entry, const char *name, const void *value, size_t bytes, int flags) {
    struct fsx_request request;
    if (strncmp(name, "trusted.", 8) == 0 && fsx_at.state->uid != 0)
        return EPERM;
    if (bytes > FSX_ANSWER_BYTES - 256)
        return E2BIG;
    start_about(&request, "output-setxattr", 4, entry);
    fsx_request_bytes(&request, "name", name, strlen(name));
    fsx_request_bytes(&request, "value", value, bytes);
    fsx_request_number(&request, "flags", (uint64_t)flags);
    return ask_done(&request);
}

int fsx_output_remove_attribute(int64_t entry, const char *name) {
    struct fsx_request request;
    start_about(&request, "output-removexattr", 2, entry);
    fsx_request_bytes(&request, "name", name, strlen(name));
    return ask_done(&request);
}

ssize_t fsx_output_attribute(int64_t entry, const char *name, void *value, size_t room) {
    struct fsx_request request;
    start_about(&request, name != NULL ? "output-getxattr" : "output-listxattr", name != NULL ? 2 : 1, entry);
    if (name != NULL)
        fsx_request_bytes(&request, "name", name, strlen(name));
    return ask_text(&request, "value", value, room);
}

int fsx_output_statfs(uint64_t numbers[6]) {
    static const char *const names[] = {"f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail"};
    struct fsx_request request;
    struct fsx_answer answer;
    fsx_request_start(&request, "output-statfs", 0);
    int error = ask(&request, &answer);
    if (error != 0)
        return error;
    for (int i = 0; i < 6; i++)
        if (!fsx_answer_number(&answer, names[i], &numbers[i]))
            error = EIO;
    fsx_answer_close(&answer);
    return error;
}

/* ---- content -------------------------------------------------------------------------------------------------------------- */

/* The descriptor of an answer, with or without FD_CLOEXEC. */
static int ask_descriptor(const struct fsx_request *request, int flags) {
    struct fsx_answer answer;
    int error = ask(request, &answer);
    if (error == 0 && answer.descriptors != 1) {
        fsx_answer_close(&answer);
        error = EIO;
    }
    if (error != 0) {
        errno = error;
        return -1;
    }
    if ((flags & O_CLOEXEC) == 0)
        syscall(SYS_fcntl, answer.descriptor[0], F_SETFD, 0);
    return answer.descriptor[0];
}

int fsx_output_open(int64_t entry, int flags) {
    struct fsx_request request;
    start_about(&request, "output-open", 2, entry);
    fsx_request_number(&request, "flags", (uint64_t)(unsigned)flags);
    return ask_descriptor(&request, flags);
}

int fsx_output_create(const struct fsx_way *way, int flags, mode_t mode) {
    struct fsx_request request;
    start_at(&request, "output-create", 4, way);
    fsx_request_number(&request, "mode", S_IFREG | masked(mode & PERMISSIONS));
    fsx_request_number(&request, "flags", (uint64_t)(unsigned)flags);
    return ask_descriptor(&request, flags);
}

int fsx_output_program(int64_t entry) {
    const int from = fsx_output_open(entry, O_RDONLY | O_CLOEXEC);
    const int to = from < 0 ? -1 : (int)syscall(SYS_memfd_create, "fanstore-program", 0);
    long more = to < 0 ? -1 : 1;
    while (more > 0)
        more = syscall(SYS_sendfile, to, from, NULL, 1 << 20);
    const int kept = errno;
    if (from >= 0)
        syscall(SYS_close, from);
    /* It must not be open for writing when it is run. */
    char name[32];
    snprintf(name, sizeof name, "/proc/self/fd/%d", to);
    const int program = more < 0 ? -1 : (int)syscall(SYS_openat, AT_FDCWD, name, O_RDONLY, 0);
    if (to >= 0)
        syscall(SYS_close, to);
    if (more < 0)
        errno = kept;
    return program;
}

int fsx_output_sync(int64_t entry) {
    struct fsx_request request;
    start_about(&request, "output-sync", 1, entry);
    request.limits = 2; /* the daemon itself gives up after as long as that */
    return ask_done(&request);
}

int fsx_output_closing(int fd) {
    if (contents_bytes == 0 || (fsx_at.state->writable & FSX_STATE_WAITS) == 0 || !fsx_is_open() || fsx_in_vfork())
        return 0;
    const int kept = errno;
    int error = 0;
    const int64_t entry = fsx_real_entry(fd);
    if (fsx_is_output(entry) && S_ISREG(fsx_output_mode(entry)) && (syscall(SYS_fcntl, fd, F_GETFL) & O_ACCMODE) != O_RDONLY) {
        struct fsx_request request;
        start_about(&request, "output-close", 1, entry);
        error = ask_done(&request);
        FSX_LOG("close", NULL, fd, error == 0 ? "told" : strerror(error));
    }
    errno = kept;
    return error;
}

void fsx_outputs_end(void) {
    if (contents_bytes == 0 || fsx_in_vfork())
        return;
    char names[2048];
    const int folder = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    long got = 0;
    while (folder >= 0 && (got = syscall(SYS_getdents64, folder, names, sizeof names)) > 0)
        for (long at = 0; at < got;) {
            const struct dirent64 *found = (const struct dirent64 *)(const void *)(names + at);
            if (found->d_name[0] >= '0' && found->d_name[0] <= '9')
                fsx_output_closing(atoi(found->d_name));
            at += found->d_reclen;
        }
    if (folder >= 0)
        syscall(SYS_close, folder);
}
