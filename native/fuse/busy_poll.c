/* busy_poll.c: see busy_poll.h. */
#include "fuse/busy_poll.h"
#include "base/nanoseconds.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Requests in a row before a polling phase, how far they may be apart on average (a round trip of a sleeping thread is 40 to 50 µs
 * here), and how many it takes until a polling phase has paid for the parking and waking of all others: about as many as microseconds
 * that takes, divided by the ten or twenty that each saves. Each polling phase that did not pay doubles the number, each that did
 * halves it. */
#define NEEDED_LEAST 64u
#define NEEDED_MOST 8192u
#define GAP_NS UINT64_C(80000)
#define PAYS 128u
/* Without a request for so long, a polling phase ends. Programs that write small files ask every 5 to 30 µs; 50, 100 and 200 µs made no
 * difference to them. */
#define LIMIT_NS UINT64_C(100000)
/* In which the guard wants to see a question or a request. */
#define GUARD_NS 1000000

struct fsx_busy_poll {
    bool possible;
    atomic_bool over;             /* there will be no more polling phases */
    atomic_uint phase;            /* odd: a polling phase; changed under the lock */
    atomic_uint free;             /* threads in read(2), asking, or about to */
    atomic_uint thread;           /* of the program that asked last */
    atomic_uint row;              /* its quick requests in a row, outside of a polling phase */
    atomic_uint_least64_t row_ns; /* when the first of them came */
    atomic_uint needed;           /* of them; changed under the lock */
    atomic_uint_least64_t pulse;  /* questions and requests in polling phases */
    atomic_uint_least64_t taken;  /* requests in polling phases */
    pthread_mutex_t lock;         /* guards what follows */
    pthread_cond_t ended;         /* a polling phase has */
    unsigned guarded;             /* the phase of which one that is parked is the guard */
    uint64_t began_ns, began_taken; /* of this polling phase */
    uint64_t times, time_ns;        /* of all, but for this one's time */
};

static bool has_processors(void) {
    cpu_set_t ours;
    return sched_getaffinity(0, sizeof ours, &ours) != 0 || CPU_COUNT(&ours) > 1; /* it fails if there are very many */
}

struct fsx_busy_poll *fsx_busy_poll_new(uint32_t threads) {
    struct fsx_busy_poll *polling = calloc(1, sizeof *polling);
    if (polling == NULL)
        return NULL;
    polling->possible = threads > 1 && has_processors();
    atomic_init(&polling->needed, NEEDED_LEAST);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&polling->ended, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&polling->lock, NULL);
    return polling;
}

void fsx_busy_poll_free(struct fsx_busy_poll *polling) {
    if (polling == NULL)
        return;
    pthread_cond_destroy(&polling->ended);
    pthread_mutex_destroy(&polling->lock);
    free(polling);
}

static bool is_polling(unsigned phase) { return phase % 2 == 1; }

/* ---- beginning and end -------------------------------------------------------------------------------------------- */

static void begin(struct fsx_busy_poll *polling) {
    pthread_mutex_lock(&polling->lock);
    const unsigned phase = atomic_load(&polling->phase);
    if (!is_polling(phase) && !atomic_load(&polling->over)) {
        polling->began_ns = fsx_now_ns();
        polling->began_taken = atomic_load(&polling->taken);
        polling->times++;
        atomic_store(&polling->phase, phase + 1);
    }
    pthread_mutex_unlock(&polling->lock);
}

/* With the lock held: this polling phase ends, unless it has already. */
static void end_locked(struct fsx_busy_poll *polling, unsigned phase) {
    if (atomic_load(&polling->phase) != phase)
        return;
    const unsigned needed = atomic_load(&polling->needed);
    const bool paid = atomic_load(&polling->taken) - polling->began_taken >= PAYS;
    if (paid && needed > NEEDED_LEAST)
        atomic_store(&polling->needed, needed / 2);
    else if (!paid && needed < NEEDED_MOST)
        atomic_store(&polling->needed, needed * 2);
    polling->time_ns += fsx_now_ns() - polling->began_ns;
    atomic_store(&polling->row, 0);
    atomic_store(&polling->phase, phase + 1);
    pthread_cond_broadcast(&polling->ended);
}

static void end(struct fsx_busy_poll *polling, unsigned phase) {
    pthread_mutex_lock(&polling->lock);
    end_locked(polling, phase);
    pthread_mutex_unlock(&polling->lock);
}

void fsx_busy_poll_end(struct fsx_busy_poll *polling) {
    atomic_store(&polling->over, true);
    pthread_mutex_lock(&polling->lock);
    const unsigned phase = atomic_load(&polling->phase);
    if (is_polling(phase))
        end_locked(polling, phase);
    pthread_mutex_unlock(&polling->lock);
}

void fsx_busy_poll_slow(struct fsx_busy_poll *polling) {
    if (atomic_load(&polling->row) != 0)
        atomic_store(&polling->row, 0);
    const unsigned phase = atomic_load(&polling->phase);
    if (is_polling(phase))
        end(polling, phase);
}

void fsx_busy_poll_quick(struct fsx_busy_poll *polling, uint32_t thread, uint64_t now_ns) {
    if (!polling->possible)
        return;
    if (thread != 0 && thread != atomic_load(&polling->thread)) {
        atomic_store(&polling->thread, thread);
        fsx_busy_poll_slow(polling);
    }
    if (is_polling(atomic_load(&polling->phase)))
        return;
    const unsigned row = atomic_fetch_add(&polling->row, 1) + 1;
    if (row == 1) {
        atomic_store(&polling->row_ns, now_ns);
    } else if (row >= atomic_load(&polling->needed)) {
        atomic_store(&polling->row, 0);
        if (now_ns - atomic_load(&polling->row_ns) <= row * GAP_NS)
            begin(polling);
    }
}

/* ---- waiting ------------------------------------------------------------------------------------------------------ */

/* With the lock held: as the guard, until the polling phase has ended. */
static void guard(struct fsx_busy_poll *polling, unsigned phase) {
    polling->guarded = phase;
    while (atomic_load(&polling->phase) == phase) {
        const uint64_t pulse = atomic_load(&polling->pulse);
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += GUARD_NS;
        if (until.tv_nsec >= 1000000000) {
            until.tv_nsec -= 1000000000;
            until.tv_sec++;
        }
        if (pthread_cond_timedwait(&polling->ended, &polling->lock, &until) == ETIMEDOUT &&
            atomic_load(&polling->pulse) == pulse)
            end_locked(polling, phase);
    }
}

static void park(struct fsx_busy_poll *polling, unsigned phase) {
    pthread_mutex_lock(&polling->lock);
    if (polling->guarded != phase) /* that of an earlier polling phase may still be on its way out */
        guard(polling, phase);
    while (atomic_load(&polling->phase) == phase)
        pthread_cond_wait(&polling->ended, &polling->lock);
    pthread_mutex_unlock(&polling->lock);
}

static void set_asking(struct fsx_poller *poller, bool asks) {
    if (poller->asks == asks)
        return;
    const int flags = fcntl(poller->device, F_GETFL);
    fcntl(poller->device, F_SETFL, asks ? flags | O_NONBLOCK : flags & ~O_NONBLOCK);
    poller->asks = asks;
}

/* Until there is a request, or the polling phase has ended. */
static ssize_t ask(struct fsx_busy_poll *polling, struct fsx_poller *poller, unsigned phase, void *request, size_t bytes) {
    set_asking(poller, true);
    for (const uint64_t start_ns = fsx_now_ns();;) {
        const ssize_t got = read(poller->device, request, bytes);
        atomic_fetch_add(&polling->pulse, 1);
        if (got >= 0 || errno != EAGAIN || atomic_load(&polling->phase) != phase)
            return got;
        if (fsx_now_ns() - start_ns > LIMIT_NS) {
            end(polling, phase);
            errno = EAGAIN;
            return -1;
        }
        /* Whoever was answered is often to run on this core, and would have to wait for us: 140 µs per small file that is
         * written with pauses here, 120 when the core is yielded. */
        sched_yield();
    }
}

ssize_t fsx_busy_poll_read(struct fsx_busy_poll *polling, struct fsx_poller *poller, void *request, size_t bytes) {
    const unsigned phase = atomic_load(&polling->phase);
    unsigned nobody = 0;
    ssize_t got;
    if (!is_polling(phase)) {
        atomic_fetch_add(&polling->free, 1);
        set_asking(poller, false);
        got = read(poller->device, request, bytes);
    } else if (atomic_compare_exchange_strong(&polling->free, &nobody, 1)) {
        got = ask(polling, poller, phase, request, bytes);
    } else {
        park(polling, phase);
        errno = EAGAIN;
        return -1;
    }
    const int error = errno;
    atomic_fetch_sub(&polling->free, 1);
    if (got > 0 && is_polling(atomic_load(&polling->phase))) {
        atomic_fetch_add(&polling->pulse, 1);
        atomic_fetch_add(&polling->taken, 1);
    }
    errno = error;
    return got;
}

struct fsx_busy_poll_counts fsx_busy_poll_count(struct fsx_busy_poll *polling) {
    pthread_mutex_lock(&polling->lock);
    struct fsx_busy_poll_counts counts = {.times = polling->times, .time_ns = polling->time_ns,
                                      .requests = atomic_load(&polling->taken)};
    if (is_polling(atomic_load(&polling->phase)))
        counts.time_ns += fsx_now_ns() - polling->began_ns;
    pthread_mutex_unlock(&polling->lock);
    return counts;
}
