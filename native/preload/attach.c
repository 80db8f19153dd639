/* attach.c: the start of the library in a program, its counters and its log; see preload.h.
 *
 * FANSTORE_PRELOAD_STATE names the directory that the daemon has made for programs (state.h). Whatever is odd there is said
 * in one line, and then everything is passed on.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "preload/ask.h"
#include "preload/next.h"
#include "preload/preload.h"
#include "preload/sockets.h"

#define OFF_VARIABLE "FANSTORE_PRELOAD"
#define STATE_VARIABLE "FANSTORE_PRELOAD_STATE"
#define LOG_VARIABLE "FANSTORE_PRELOAD_LOG"
#define LINE_BYTES (FSX_STATE_PATH + 256)

struct fsx_attached fsx_at;
_Atomic bool fsx_on;
bool fsx_logs;

static char log_path[FSX_STATE_PATH];
static struct fsx_counters *counters; /* all slots */
static _Atomic(struct fsx_counters *) own_counters;

/* ---- counters and log ------------------------------------------------------------------------------------------------ */

static void choose_counters(void) {
    atomic_store(&own_counters, counters + (unsigned)syscall(SYS_getpid) % FSX_COUNTER_SLOTS);
}

void fsx_count(enum fsx_count what, uint64_t more) {
    struct fsx_counters *own = atomic_load_explicit(&own_counters, memory_order_relaxed);
    __atomic_fetch_add((uint64_t *)own + what, more, __ATOMIC_RELAXED);
}

void fsx_log_line(const char *call, const char *path, int64_t number, const char *what) {
    const int kept = errno;
    char line[LINE_BYTES];
    const int bytes = path == NULL ? snprintf(line, sizeof line, "%ld %s %ld: %s\n", syscall(SYS_getpid), call, number, what)
                                   : snprintf(line, sizeof line, "%ld %s %s %ld: %s\n", syscall(SYS_getpid), call, path,
                                              number, what);
    /* Opened for each line: a descriptor that stays could be closed by the program, and its number used again. */
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd >= 0 && bytes > 0) {
        (void)!syscall(SYS_write, fd, line, (size_t)bytes < sizeof line ? (size_t)bytes : sizeof line - 1);
        syscall(SYS_close, fd);
    }
    errno = kept;
}

void fsx_retire(void) {
    if (atomic_exchange(&fsx_on, false))
        FSX_LOG("retire", NULL, 0, "the program changes who it is or what paths mean: nothing more is opened here");
}

/* ---- start ------------------------------------------------------------------------------------------------------------ */

/* One line, and everything is passed on. */
static void refuse(const char *directory, const char *reason) {
    char line[LINE_BYTES];
    const int bytes = snprintf(line, sizeof line, "libfanstore-io: %s: %s; this program is not intercepted\n", directory,
                               reason);
    if (bytes > 0)
        (void)!syscall(SYS_write, 2, line, (size_t)bytes < sizeof line ? (size_t)bytes : sizeof line - 1);
}

/* A file of the directory in memory; NULL with errno. `least`: it must have so many bytes. */
static void *map(const char *directory, const char *name, int protection, size_t least, size_t *bytes) {
    char path[FSX_STATE_PATH + 16];
    const int length = snprintf(path, sizeof path, "%s/%s", directory, name);
    if (length < 0 || (size_t)length >= sizeof path) {
        errno = ENAMETOOLONG;
        return NULL;
    }
    const int flags = (protection & PROT_WRITE) != 0 ? O_RDWR : O_RDONLY;
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC | O_NOFOLLOW, 0);
    if (fd < 0)
        return NULL;
    void *memory = NULL;
    const off_t end = (off_t)syscall(SYS_lseek, fd, 0, SEEK_END);
    if (end < 0 || (size_t)end < least || end == 0) {
        errno = EINVAL;
    } else {
        memory = fsx_map((size_t)end, protection, MAP_SHARED, fd);
        if (memory == MAP_FAILED)
            memory = NULL;
        *bytes = (size_t)end;
    }
    const int kept = errno;
    syscall(SYS_close, fd);
    errno = kept;
    return memory;
}

/* NULL, or why not. */
static const char *attach(const char *directory) {
    size_t bytes;
    const struct fsx_state *state = map(directory, "state", PROT_READ, sizeof *state, &bytes);
    if (state == NULL)
        return errno == ENOENT ? "there is no such directory, so the mount has ended or is on another machine"
                               : strerror(errno);
    if (memcmp(state->magic, FSX_STATE_MAGIC, sizeof state->magic) != 0)
        return "this is not the state of a mount";
    if (state->version != FSX_STATE_VERSION)
        return "the daemon of the mount has another version of FanStore";
    if ((uid_t)syscall(SYS_geteuid) != state->uid || (uid_t)syscall(SYS_getuid) != state->uid)
        return "the mount belongs to another user";
    if (state->points < 1 || state->points > 2 || bytes < sizeof *state + state->partitions * sizeof(struct fsx_state_part))
        return "the state is too short";
    void *index = map(directory, "index", PROT_READ, state->index_bytes, &bytes);
    if (index == NULL)
        return strerror(errno);
    struct fsx_problem problem;
    if (fsx_index_columns(index, bytes, false, &fsx_at.index, &problem) != 0 || fsx_at.index.entries != state->entries ||
        fsx_at.index.partitions != state->partitions ||
        state->marks_bytes < (uint64_t)fsx_at.index.entries + fsx_at.index.chunk_records)
        return "its index does not fit its state";
    fsx_at.marks = map(directory, "marks", PROT_READ | PROT_WRITE, state->marks_bytes, &bytes);
    counters = map(directory, "counters", PROT_READ | PROT_WRITE, FSX_COUNTER_SLOTS * sizeof *counters, &bytes);
    if (fsx_at.marks == NULL || counters == NULL)
        return strerror(errno);
    char placeholder[FSX_STATE_PATH + 16];
    snprintf(placeholder, sizeof placeholder, "%s/placeholder", directory);
    if (!fsx_table_start(placeholder))
        return strerror(errno);
    fsx_at.state = state;
    fsx_at.parts = (const struct fsx_state_part *)(state + 1);
    if (state->unmounted != 0 && !fsx_unmounted_start(directory))
        return strerror(errno);
    choose_counters();
    fsx_next(FSX_NEXT__exit);
    return fsx_sockets_start() && fsx_ask_start(directory) && fsx_bytes_start() ? NULL : strerror(errno);
}

static void forked(void) { choose_counters(); }

__attribute__((constructor)) static void start(void) {
    const char *off = getenv(OFF_VARIABLE);
    const char *directory = getenv(STATE_VARIABLE);
    if (directory == NULL || directory[0] == '\0' || (off != NULL && strcmp(off, "0") == 0))
        return;
    const int kept = errno;
    const char *log = getenv(LOG_VARIABLE);
    if (log != NULL && log[0] != '\0' && strlen(log) < sizeof log_path) {
        strcpy(log_path, log);
        fsx_logs = true;
    }
    const char *reason = strlen(directory) < FSX_STATE_PATH ? attach(directory) : "the name is too long";
    if (reason == NULL && fsx_at_fork(NULL, NULL, forked) == 0)
        atomic_store(&fsx_on, true);
    else
        refuse(directory, reason == NULL ? "there is not enough memory" : reason);
    FSX_LOG("start", directory, (int64_t)fsx_on, fsx_on ? "attached" : "everything is passed on");
    errno = kept;
}
