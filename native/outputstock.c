/* outputstock.c: see outputstock.h. */
#include "outputstock.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
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
/* The thread gives way to whoever waits for an answer. */
#define NICENESS 10
/* Seconds for the thread to end. */
#define END_S 3

struct fsx_output_stock {
    int directory;
    pthread_mutex_t lock; /* guards what follows; not held during calls of the disk */
    pthread_cond_t wanted, changed;
    pthread_t thread;
    bool runs, stopping;
    bool wants;          /* the thread is to make more */
    uint32_t asked;      /* creations in a row */
    uint64_t first, end; /* files from `first` up to below `end` are made; `first` is the lowest that may be asked for */
    uint64_t limit;      /* and none with this number or a higher one; `end` may be above it if none are made */
    uint64_t busy;       /* the number of the file that the thread is making or removing; 0 for none */
    int fds[ROOM];       /* by number */
};

/* ---- files -------------------------------------------------------------------------------------------------------- */

static void name_of(uint64_t inode, char name[20]) { snprintf(name, 20, "%" PRIx64, inode); }

/* -1 if it cannot be made; whoever creates the output is told why. */
static int make(const struct fsx_output_stock *stock, uint64_t inode) {
    char name[20];
    name_of(inode, name);
    int fd;
    do
        fd = openat(stock->directory, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_CREAT | O_EXCL, 0600);
    while (fd < 0 && errno == EINTR);
    return fd;
}

static void discard(const struct fsx_output_stock *stock, uint64_t inode, int fd) {
    char name[20];
    name_of(inode, name);
    close(fd);
    unlinkat(stock->directory, name, 0);
}

/* ---- the thread: with the lock held, which is let go of for calls of the disk ------------------------------------- */

static bool is_full(const struct fsx_output_stock *stock) {
    return stock->end - stock->first >= ROOM || stock->end >= stock->limit;
}

static void finish(struct fsx_output_stock *stock) {
    stock->busy = 0;
    pthread_cond_broadcast(&stock->changed);
}

/* Until there are enough, or the disk has no room. */
static void make_more(struct fsx_output_stock *stock) {
    while (!stock->stopping && !is_full(stock)) {
        const uint64_t inode = stock->busy = stock->end;
        pthread_mutex_unlock(&stock->lock);
        const int fd = make(stock, inode);
        pthread_mutex_lock(&stock->lock);
        if (fd >= 0) {
            stock->fds[inode % ROOM] = fd;
            stock->end = inode + 1;
        }
        finish(stock);
        if (fd < 0)
            return;
    }
}

/* All that are left, the last first: whoever wants the first meanwhile finds it. */
static void remove_all(struct fsx_output_stock *stock) {
    while (stock->end > stock->first && (!stock->wants || stock->stopping)) {
        const uint64_t inode = stock->busy = --stock->end;
        const int fd = stock->fds[inode % ROOM];
        pthread_mutex_unlock(&stock->lock);
        discard(stock, inode, fd);
        pthread_mutex_lock(&stock->lock);
        finish(stock);
    }
}

static void *stock_main(void *argument) {
    struct fsx_output_stock *stock = argument;
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), NICENESS); /* on Linux, of this thread alone */
    pthread_mutex_lock(&stock->lock);
    while (!stock->stopping) {
        if (stock->wants) {
            stock->wants = false;
            make_more(stock);
        } else if (stock->end == stock->first) {
            pthread_cond_wait(&stock->wanted, &stock->lock);
        } else {
            const uint64_t first = stock->first;
            struct timespec until;
            clock_gettime(CLOCK_MONOTONIC, &until);
            until.tv_sec += IDLE_S;
            const int ended = pthread_cond_timedwait(&stock->wanted, &stock->lock, &until);
            if (ended == ETIMEDOUT && first == stock->first) {
                stock->asked = 0;
                remove_all(stock);
            }
        }
    }
    remove_all(stock);
    pthread_mutex_unlock(&stock->lock);
    return NULL;
}

/* ---- whoever takes ------------------------------------------------------------------------------------------------ */

struct fsx_output_stock *fsx_output_stock_new(int directory) {
    struct fsx_output_stock *stock = calloc(1, sizeof *stock);
    if (stock == NULL)
        return NULL;
    stock->directory = fcntl(directory, F_DUPFD_CLOEXEC, 0);
    if (stock->directory < 0) {
        const int error = errno;
        free(stock);
        errno = error;
        return NULL;
    }
    pthread_mutex_init(&stock->lock, NULL);
    pthread_cond_init(&stock->changed, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&stock->wanted, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return stock;
}

bool fsx_output_stock_stop(struct fsx_output_stock *stock) {
    pthread_mutex_lock(&stock->lock);
    stock->stopping = true;
    const bool runs = stock->runs;
    pthread_cond_signal(&stock->wanted);
    pthread_mutex_unlock(&stock->lock);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += END_S;
    if (runs && pthread_timedjoin_np(stock->thread, NULL, &until) != 0)
        return false;
    stock->runs = false;
    return true;
}

void fsx_output_stock_free(struct fsx_output_stock *stock) {
    if (stock == NULL)
        return;
    if (!fsx_output_stock_stop(stock)) {
        pthread_detach(stock->thread);
        return;
    }
    pthread_cond_destroy(&stock->wanted);
    pthread_cond_destroy(&stock->changed);
    pthread_mutex_destroy(&stock->lock);
    close(stock->directory);
    free(stock);
}

/* With the lock held: all below this number are not ours any more. */
static void leave_below(struct fsx_output_stock *stock, uint64_t inode) {
    while (stock->first < inode) {
        while (stock->busy != 0 && stock->busy < inode)
            pthread_cond_wait(&stock->changed, &stock->lock);
        if (stock->first >= stock->end)
            break;
        const uint64_t left = stock->first++;
        const int fd = stock->fds[left % ROOM];
        pthread_mutex_unlock(&stock->lock);
        discard(stock, left, fd);
        pthread_mutex_lock(&stock->lock);
    }
    if (stock->first < inode)
        stock->first = stock->end = inode;
}

/* With the lock held: nor are those from the limit on, which are few, if any. */
static void leave_above(struct fsx_output_stock *stock) {
    while (stock->end > stock->first && stock->end > stock->limit) {
        while (stock->busy != 0 && stock->busy >= stock->limit)
            pthread_cond_wait(&stock->changed, &stock->lock);
        if (stock->end == stock->first || stock->end <= stock->limit)
            break;
        const uint64_t left = --stock->end;
        const int fd = stock->fds[left % ROOM];
        pthread_mutex_unlock(&stock->lock);
        discard(stock, left, fd);
        pthread_mutex_lock(&stock->lock);
    }
}

void fsx_output_stock_skip(struct fsx_output_stock *stock, uint64_t inode, uint64_t end) {
    pthread_mutex_lock(&stock->lock);
    stock->limit = end;
    leave_below(stock, inode);
    leave_above(stock);
    pthread_mutex_unlock(&stock->lock);
}

/* With the lock held: may there be a thread, and is there one? */
static bool is_running(struct fsx_output_stock *stock) {
    struct rlimit limit;
    if (stock->runs || stock->stopping)
        return stock->runs;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur / DESCRIPTORS_PART < ROOM)
        return false;
    stock->runs = pthread_create(&stock->thread, NULL, stock_main, stock) == 0;
    return stock->runs;
}

int fsx_output_stock_take(struct fsx_output_stock *stock, uint64_t inode) {
    pthread_mutex_lock(&stock->lock);
    leave_below(stock, inode);
    while (stock->busy == inode)
        pthread_cond_wait(&stock->changed, &stock->lock);
    int fd = -1;
    if (stock->first == inode && stock->end > inode)
        fd = stock->fds[inode % ROOM];
    stock->first = inode + 1;
    if (stock->end < stock->first)
        stock->end = stock->first;
    stock->asked += stock->asked < ENOUGH;
    if (stock->asked == ENOUGH && stock->end - stock->first < FEW && is_running(stock) && !stock->wants) {
        stock->wants = true;
        pthread_cond_signal(&stock->wanted);
    }
    pthread_mutex_unlock(&stock->lock);
    return fd;
}
