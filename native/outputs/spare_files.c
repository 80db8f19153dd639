/* outputs/spare_files.c: see outputs/spare_files.h. */
#include "outputs/spare_files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

/* Files that are made ahead at most: some hundredths of a second of creating. Each holds a descriptor. */
#define ROOM 128u
/* With fewer left the thread is woken. */
#define FEW (ROOM / 2)
/* Creations in a row, none of them IDLE_S after the last, before anything is made ahead. */
#define ENOUGH 16u
#define IDLE_S 1
/* Of all descriptors, the part that these may be. */
#define DESCRIPTORS_PART 8u
/* Seconds for the thread to end. */
#define END_S 3

struct fsx_spare_files {
    int directory;
    pthread_mutex_t lock; /* guards what follows; not held during calls of the disk */
    pthread_cond_t wanted, changed;
    pthread_t thread;
    bool runs, stopping;
    bool wants;          /* the thread is to make more */
    uint32_t asked;      /* creations in a row */
    uint64_t first, end; /* files from `first` up to below `end` are made; `first` is the lowest that may be asked for */
    uint64_t busy;       /* the number of the file that the thread is making or removing; 0 for none */
    int fds[ROOM];       /* by number */
};

/* ---- files -------------------------------------------------------------------------------------------------------- */

static void name_of(uint64_t inode, char name[20]) { snprintf(name, 20, "%" PRIx64, inode); }

/* -1 if it cannot be made; whoever creates the output is told why. */
static int make(const struct fsx_spare_files *spare, uint64_t inode) {
    char name[20];
    name_of(inode, name);
    int fd;
    do
        fd = openat(spare->directory, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_CREAT | O_EXCL, 0600);
    while (fd < 0 && errno == EINTR);
    return fd;
}

static void discard(const struct fsx_spare_files *spare, uint64_t inode, int fd) {
    char name[20];
    name_of(inode, name);
    close(fd);
    unlinkat(spare->directory, name, 0);
}

/* ---- the thread: with the lock held, which is let go of for calls of the disk ------------------------------------- */

static bool is_full(const struct fsx_spare_files *spare) {
    return spare->end - spare->first >= ROOM;
}

static void finish(struct fsx_spare_files *spare) {
    spare->busy = 0;
    pthread_cond_broadcast(&spare->changed);
}

/* Until there are enough, or the disk has no room. */
static void make_more(struct fsx_spare_files *spare) {
    while (!spare->stopping && !is_full(spare)) {
        const uint64_t inode = spare->busy = spare->end;
        pthread_mutex_unlock(&spare->lock);
        const int fd = make(spare, inode);
        pthread_mutex_lock(&spare->lock);
        if (fd >= 0) {
            spare->fds[inode % ROOM] = fd;
            spare->end = inode + 1;
        }
        finish(spare);
        if (fd < 0)
            return;
    }
}

/* All that are left, the last first: whoever wants the first meanwhile finds it. */
static void remove_all(struct fsx_spare_files *spare) {
    while (spare->end > spare->first && (!spare->wants || spare->stopping)) {
        const uint64_t inode = spare->busy = --spare->end;
        const int fd = spare->fds[inode % ROOM];
        pthread_mutex_unlock(&spare->lock);
        discard(spare, inode, fd);
        pthread_mutex_lock(&spare->lock);
        finish(spare);
    }
}

static void *spare_main(void *argument) {
    struct fsx_spare_files *spare = argument;
    pthread_mutex_lock(&spare->lock);
    while (!spare->stopping) {
        if (spare->wants) {
            spare->wants = false;
            make_more(spare);
        } else if (spare->end == spare->first) {
            pthread_cond_wait(&spare->wanted, &spare->lock);
        } else {
            const uint64_t first = spare->first;
            struct timespec until;
            clock_gettime(CLOCK_MONOTONIC, &until);
            until.tv_sec += IDLE_S;
            const int ended = pthread_cond_timedwait(&spare->wanted, &spare->lock, &until);
            if (ended == ETIMEDOUT && first == spare->first) {
                spare->asked = 0;
                remove_all(spare);
            }
        }
    }
    remove_all(spare);
    pthread_mutex_unlock(&spare->lock);
    return NULL;
}

/* ---- whoever takes ------------------------------------------------------------------------------------------------ */

struct fsx_spare_files *fsx_spare_files_new(int directory) {
    struct fsx_spare_files *spare = calloc(1, sizeof *spare);
    if (spare == NULL)
        return NULL;
    spare->directory = fcntl(directory, F_DUPFD_CLOEXEC, 0);
    if (spare->directory < 0) {
        const int error = errno;
        free(spare);
        errno = error;
        return NULL;
    }
    pthread_mutex_init(&spare->lock, NULL);
    pthread_cond_init(&spare->changed, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&spare->wanted, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return spare;
}

bool fsx_spare_files_stop(struct fsx_spare_files *spare) {
    pthread_mutex_lock(&spare->lock);
    spare->stopping = true;
    const bool runs = spare->runs;
    pthread_cond_signal(&spare->wanted);
    pthread_mutex_unlock(&spare->lock);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += END_S;
    if (runs && pthread_timedjoin_np(spare->thread, NULL, &until) != 0)
        return false;
    spare->runs = false;
    return true;
}

void fsx_spare_files_free(struct fsx_spare_files *spare) {
    if (spare == NULL)
        return;
    if (!fsx_spare_files_stop(spare)) {
        pthread_detach(spare->thread);
        return;
    }
    pthread_cond_destroy(&spare->wanted);
    pthread_cond_destroy(&spare->changed);
    pthread_mutex_destroy(&spare->lock);
    close(spare->directory);
    free(spare);
}

/* With the lock held: all below this number are not ours any more. */
static void leave_below(struct fsx_spare_files *spare, uint64_t inode) {
    while (spare->first < inode) {
        while (spare->busy != 0 && spare->busy < inode)
            pthread_cond_wait(&spare->changed, &spare->lock);
        if (spare->first >= spare->end)
            break;
        const uint64_t left = spare->first++;
        const int fd = spare->fds[left % ROOM];
        pthread_mutex_unlock(&spare->lock);
        discard(spare, left, fd);
        pthread_mutex_lock(&spare->lock);
    }
    if (spare->first < inode)
        spare->first = spare->end = inode;
}

void fsx_spare_files_skip(struct fsx_spare_files *spare, uint64_t inode) {
    pthread_mutex_lock(&spare->lock);
    leave_below(spare, inode);
    pthread_mutex_unlock(&spare->lock);
}

/* With the lock held: may there be a thread, and is there one? */
static bool is_running(struct fsx_spare_files *spare) {
    struct rlimit limit;
    if (spare->runs || spare->stopping)
        return spare->runs;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur / DESCRIPTORS_PART < ROOM)
        return false;
    spare->runs = pthread_create(&spare->thread, NULL, spare_main, spare) == 0;
    return spare->runs;
}

int fsx_spare_files_take(struct fsx_spare_files *spare, uint64_t inode) {
    pthread_mutex_lock(&spare->lock);
    leave_below(spare, inode);
    while (spare->busy == inode)
        pthread_cond_wait(&spare->changed, &spare->lock);
    int fd = -1;
    if (spare->first == inode && spare->end > inode)
        fd = spare->fds[inode % ROOM];
    spare->first = inode + 1;
    if (spare->end < spare->first)
        spare->end = spare->first;
    spare->asked += spare->asked < ENOUGH;
    if (spare->asked == ENOUGH && spare->end - spare->first < FEW && is_running(spare) && !spare->wants) {
        spare->wants = true;
        pthread_cond_signal(&spare->wanted);
    }
    pthread_mutex_unlock(&spare->lock);
    return fd;
}
