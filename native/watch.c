/* watch.c: see watch.h. */
#include "watch.h"
#include "nanoseconds.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Requests in a row before a watch, how far they may be apart on average (a round trip of a sleeping thread is 40 to 50 µs
 * here), and how many it takes until a watch has paid for the parking and waking of all others: about as many as microseconds
 * that takes, divided by the ten or twenty that each saves. Each watch that did not pay doubles the number, each that did
 * halves it. */
#define NEEDED_LEAST 64u
#define NEEDED_MOST 8192u
#define GAP_NS UINT64_C(80000)
#define PAYS 128u
/* Without a request for so long, a watch ends. Programs that write small files ask every 5 to 30 µs; 50, 100 and 200 µs made no
 * difference to them. */
#define LIMIT_NS UINT64_C(100000)
/* In which the guard wants to see a question or a request. */
#define GUARD_NS 1000000

struct fsx_watch {
    bool possible;
    atomic_bool over;             /* there will be no more watches */
    atomic_uint phase;            /* odd: a watch; changed under the lock */
    atomic_uint free;             /* threads in read(2), asking, or about to */
    atomic_uint thread;           /* of the program that asked last */
    atomic_uint row;              /* its quick requests in a row, outside of a watch */
    atomic_uint_least64_t row_ns; /* when the first of them came */
    atomic_uint needed;           /* of them; changed under the lock */
    atomic_uint_least64_t pulse;  /* questions and requests in watches */
    atomic_uint_least64_t taken;  /* requests in watches */
    pthread_mutex_t lock;         /* guards what follows */
    pthread_cond_t ended;         /* a watch has */
    unsigned guarded;             /* the phase of which one that is parked is the guard */
    uint64_t began_ns, began_taken; /* of this watch */
    uint64_t times, time_ns;        /* of all, but for this one's time */
};

static bool has_processors(void) {
    cpu_set_t ours;
    return sched_getaffinity(0, sizeof ours, &ours) != 0 || CPU_COUNT(&ours) > 1; /* it fails if there are very many */
}

struct fsx_watch *fsx_watch_new(uint32_t threads) {
    struct fsx_watch *watch = calloc(1, sizeof *watch);
    if (watch == NULL)
        return NULL;
    watch->possible = threads > 1 && has_processors();
    atomic_init(&watch->needed, NEEDED_LEAST);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&watch->ended, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&watch->lock, NULL);
    return watch;
}

void fsx_watch_free(struct fsx_watch *watch) {
    if (watch == NULL)
        return;
    pthread_cond_destroy(&watch->ended);
    pthread_mutex_destroy(&watch->lock);
    free(watch);
}

static bool is_watch(unsigned phase) { return phase % 2 == 1; }

/* ---- beginning and end -------------------------------------------------------------------------------------------- */

static void begin(struct fsx_watch *watch) {
    pthread_mutex_lock(&watch->lock);
    const unsigned phase = atomic_load(&watch->phase);
    if (!is_watch(phase) && !atomic_load(&watch->over)) {
        watch->began_ns = fsx_now_ns();
        watch->began_taken = atomic_load(&watch->taken);
        watch->times++;
        atomic_store(&watch->phase, phase + 1);
    }
    pthread_mutex_unlock(&watch->lock);
}

/* With the lock held: this watch ends, unless it has already. */
static void end_locked(struct fsx_watch *watch, unsigned phase) {
    if (atomic_load(&watch->phase) != phase)
        return;
    const unsigned needed = atomic_load(&watch->needed);
    const bool paid = atomic_load(&watch->taken) - watch->began_taken >= PAYS;
    if (paid && needed > NEEDED_LEAST)
        atomic_store(&watch->needed, needed / 2);
    else if (!paid && needed < NEEDED_MOST)
        atomic_store(&watch->needed, needed * 2);
    watch->time_ns += fsx_now_ns() - watch->began_ns;
    atomic_store(&watch->row, 0);
    atomic_store(&watch->phase, phase + 1);
    pthread_cond_broadcast(&watch->ended);
}

static void end(struct fsx_watch *watch, unsigned phase) {
    pthread_mutex_lock(&watch->lock);
    end_locked(watch, phase);
    pthread_mutex_unlock(&watch->lock);
}

void fsx_watch_end(struct fsx_watch *watch) {
    atomic_store(&watch->over, true);
    pthread_mutex_lock(&watch->lock);
    const unsigned phase = atomic_load(&watch->phase);
    if (is_watch(phase))
        end_locked(watch, phase);
    pthread_mutex_unlock(&watch->lock);
}

void fsx_watch_slow(struct fsx_watch *watch) {
    if (atomic_load(&watch->row) != 0)
        atomic_store(&watch->row, 0);
    const unsigned phase = atomic_load(&watch->phase);
    if (is_watch(phase))
        end(watch, phase);
}

void fsx_watch_quick(struct fsx_watch *watch, uint32_t thread, uint64_t now_ns) {
    if (!watch->possible)
        return;
    if (thread != 0 && thread != atomic_load(&watch->thread)) {
        atomic_store(&watch->thread, thread);
        fsx_watch_slow(watch);
    }
    if (is_watch(atomic_load(&watch->phase)))
        return;
    const unsigned row = atomic_fetch_add(&watch->row, 1) + 1;
    if (row == 1) {
        atomic_store(&watch->row_ns, now_ns);
    } else if (row >= atomic_load(&watch->needed)) {
        atomic_store(&watch->row, 0);
        if (now_ns - atomic_load(&watch->row_ns) <= row * GAP_NS)
            begin(watch);
    }
}

/* ---- waiting ------------------------------------------------------------------------------------------------------ */

/* With the lock held: as the guard, until the watch has ended. */
static void guard(struct fsx_watch *watch, unsigned phase) {
    watch->guarded = phase;
    while (atomic_load(&watch->phase) == phase) {
        const uint64_t pulse = atomic_load(&watch->pulse);
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += GUARD_NS;
        if (until.tv_nsec >= 1000000000) {
            until.tv_nsec -= 1000000000;
            until.tv_sec++;
        }
        if (pthread_cond_timedwait(&watch->ended, &watch->lock, &until) == ETIMEDOUT &&
            atomic_load(&watch->pulse) == pulse)
            end_locked(watch, phase);
    }
}

static void park(struct fsx_watch *watch, unsigned phase) {
    pthread_mutex_lock(&watch->lock);
    if (watch->guarded != phase) /* that of an earlier watch may still be on its way out */
        guard(watch, phase);
    while (atomic_load(&watch->phase) == phase)
        pthread_cond_wait(&watch->ended, &watch->lock);
    pthread_mutex_unlock(&watch->lock);
}

static void set_asking(struct fsx_watcher *watcher, bool asks) {
    if (watcher->asks == asks)
        return;
    const int flags = fcntl(watcher->device, F_GETFL);
    fcntl(watcher->device, F_SETFL, asks ? flags | O_NONBLOCK : flags & ~O_NONBLOCK);
    watcher->asks = asks;
}

/* Until there is a request, or the watch has ended. */
static ssize_t ask(struct fsx_watch *watch, struct fsx_watcher *watcher, unsigned phase, void *request, size_t bytes) {
    set_asking(watcher, true);
    for (const uint64_t start_ns = fsx_now_ns();;) {
        const ssize_t got = read(watcher->device, request, bytes);
        atomic_fetch_add(&watch->pulse, 1);
        if (got >= 0 || errno != EAGAIN || atomic_load(&watch->phase) != phase)
            return got;
        if (fsx_now_ns() - start_ns > LIMIT_NS) {
            end(watch, phase);
            errno = EAGAIN;
            return -1;
        }
        /* Whoever was answered is often to run on this core, and would have to wait for us: 140 µs per small file that is
         * written with pauses here, 120 when the core is yielded. */
        sched_yield();
    }
}

ssize_t fsx_watch_read(struct fsx_watch *watch, struct fsx_watcher *watcher, void *request, size_t bytes) {
    const unsigned phase = atomic_load(&watch->phase);
    unsigned nobody = 0;
    ssize_t got;
    if (!is_watch(phase)) {
        atomic_fetch_add(&watch->free, 1);
        set_asking(watcher, false);
        got = read(watcher->device, request, bytes);
    } else if (atomic_compare_exchange_strong(&watch->free, &nobody, 1)) {
        got = ask(watch, watcher, phase, request, bytes);
    } else {
        park(watch, phase);
        errno = EAGAIN;
        return -1;
    }
    const int error = errno;
    atomic_fetch_sub(&watch->free, 1);
    if (got > 0 && is_watch(atomic_load(&watch->phase))) {
        atomic_fetch_add(&watch->pulse, 1);
        atomic_fetch_add(&watch->taken, 1);
    }
    errno = error;
    return got;
}

struct fsx_watch_counts fsx_watch_count(struct fsx_watch *watch) {
    pthread_mutex_lock(&watch->lock);
    struct fsx_watch_counts counts = {.times = watch->times, .time_ns = watch->time_ns,
                                      .requests = atomic_load(&watch->taken)};
    if (is_watch(atomic_load(&watch->phase)))
        counts.time_ns += fsx_now_ns() - watch->began_ns;
    pthread_mutex_unlock(&watch->lock);
    return counts;
}
