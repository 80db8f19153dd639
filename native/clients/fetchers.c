/* fetchers.c: see fetchers.h. */
#include "clients/fetchers.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/nanoseconds.h"
#include "format/sharedcache.h"

#define LEASE_NS UINT64_C(1000000000)
/* How often leases are looked at, if nobody asks for anything. */
#define LOOK_MS 500

struct fetcher {
    struct fsx_fetchers *owner;
    int fd;
    _Atomic bool passed_on; /* to the thread that the poller tells next: whoever did has nothing to do with it any more */
    struct fsx_client_request request; /* that is being answered */
    struct fsx_waiter waiter;
    struct fsx_lease lease; /* guarded by the lock, as what follows */
    bool held;              /* until the end */
    uint64_t since_ns;
    struct fetcher *next, **link;
};

struct fsx_fetchers {
    struct fsx_broker *broker;
    uint32_t most;
    uint64_t held_most;
    int poller, bell; /* bell: an eventfd, rung at the end */
    pthread_t *threads;
    uint32_t thread_count;
    _Atomic uint32_t running;
    _Atomic bool ending;
    pthread_mutex_t lock; /* guards what follows */
    struct fetcher *all;
    struct fsx_fetcher_counts counts;
};

/* ---- leases ------------------------------------------------------------------------------------------------------------- */

/* With the lock held: what it had is the caller's to end, without the lock. */
static struct fsx_lease take_lease(struct fetcher *fetcher) {
    struct fsx_fetchers *f = fetcher->owner;
    const struct fsx_lease lease = fetcher->lease;
    fetcher->lease = (struct fsx_lease){0};
    f->counts.leases -= lease.node != NULL;
    if (lease.node != NULL && fetcher->held)
        f->counts.held_bytes -= lease.bytes;
    return lease;
}

static void drop_lease(struct fetcher *fetcher) {
    struct fsx_fetchers *f = fetcher->owner;
    pthread_mutex_lock(&f->lock);
    struct fsx_lease lease = take_lease(fetcher);
    pthread_mutex_unlock(&f->lock);
    fsx_broker_end_lease(f->broker, &lease);
}

/* Of programs that have had time enough, unless they hold theirs. */
static void end_old_leases(struct fsx_fetchers *f) {
    const uint64_t now = fsx_now_ns();
    for (;;) {
        struct fsx_lease lease = {0};
        pthread_mutex_lock(&f->lock);
        for (struct fetcher *each = f->all; each != NULL && lease.node == NULL; each = each->next)
            if (each->lease.node != NULL && !each->held && now - each->since_ns > LEASE_NS)
                lease = take_lease(each);
        pthread_mutex_unlock(&f->lock);
        if (lease.node == NULL)
            return;
        fsx_broker_end_lease(f->broker, &lease);
    }
}

/* ---- requests ----------------------------------------------------------------------------------------------------------- */

/* From then on, another thread may have the fetcher. */
static void watch(struct fetcher *fetcher, int operation) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.ptr = fetcher};
    atomic_store_explicit(&fetcher->passed_on, false, memory_order_relaxed);
    epoll_ctl(fetcher->owner->poller, operation, fetcher->fd, &event);
    atomic_store_explicit(&fetcher->passed_on, true, memory_order_release);
}

/* The last that is done for a request. */
static void answer(struct fetcher *fetcher, const struct fsx_client_answer *said) {
    /* Who does not take answers has sent more than one request at a time, and is cut off: its end is seen by a thread. */
    if (send(fetcher->fd, said, sizeof *said, MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)sizeof *said)
        shutdown(fetcher->fd, SHUT_RDWR);
    watch(fetcher, EPOLL_CTL_MOD);
}

static void came(struct fsx_waiter *waiter, const struct fsx_delivery *delivery) {
    struct fetcher *fetcher = (struct fetcher *)((char *)waiter - offsetof(struct fetcher, waiter));
    struct fsx_fetchers *f = fetcher->owner;
    struct fsx_client_answer said = {.token = fetcher->request.token,
                                     .error = delivery->error == 0 || delivery->error == ENOMEM ? delivery->error : EIO};
    struct fsx_lease lease = {0};
    if (said.error == 0) {
        fsx_count_read(delivery->counts, delivery->source, delivery->bytes);
        if (!fsx_broker_lease(f->broker, delivery, &lease))
            said.error = EAGAIN;
    }
    pthread_mutex_lock(&f->lock);
    fetcher->held = fetcher->request.kind == FSX_CLIENT_HOLD;
    if (lease.node != NULL && fetcher->held && f->counts.held_bytes + lease.bytes > f->held_most)
        said.error = ENOMEM;
    if (lease.node != NULL && said.error == 0) {
        said.offset = lease.offset;
        said.bytes = lease.bytes;
        said.stamp = lease.stamp;
        fetcher->lease = lease;
        fetcher->since_ns = fsx_now_ns();
        f->counts.leases++;
        f->counts.held_bytes += fetcher->held ? lease.bytes : 0;
        lease.node = NULL;
    }
    pthread_mutex_unlock(&f->lock);
    fsx_broker_end_lease(f->broker, &lease); /* if it is too much to be held */
    answer(fetcher, &said);
}

static bool is_right(const struct fsx_index *x, const struct fsx_client_request *request) {
    return (request->kind == FSX_CLIENT_WANT || request->kind == FSX_CLIENT_HOLD) && request->entry < x->entries &&
           S_ISREG(x->mode[request->entry]) && x->size[request->entry] > 0 && x->inode[request->entry] == request->entry &&
           request->number < (x->count[request->entry] > 0 ? x->count[request->entry] : 1);
}

static void end_fetcher(struct fetcher *fetcher) {
    struct fsx_fetchers *f = fetcher->owner;
    drop_lease(fetcher);
    pthread_mutex_lock(&f->lock);
    *fetcher->link = fetcher->next;
    if (fetcher->next != NULL)
        fetcher->next->link = fetcher->link;
    f->counts.fetchers--;
    pthread_mutex_unlock(&f->lock);
    close(fetcher->fd);
    free(fetcher);
}

/* There is something to be read from it, or it has ended. */
static void serve(struct fetcher *fetcher) {
    while (!atomic_load_explicit(&fetcher->passed_on, memory_order_acquire))
        sched_yield(); /* who has just passed it on has not come back from the kernel */
    struct fsx_fetchers *f = fetcher->owner;
    struct fsx_client_request request[2]; /* of one that is too long, more is seen */
    const ssize_t got = recv(fetcher->fd, request, sizeof request, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        watch(fetcher, EPOLL_CTL_MOD);
        return;
    }
    if (got == (ssize_t)sizeof request[0] && request[0].kind == FSX_CLIENT_FREE) {
        drop_lease(fetcher);
        watch(fetcher, EPOLL_CTL_MOD);
        return;
    }
    const bool right = got == (ssize_t)sizeof request[0] && is_right(fsx_broker_index(f->broker), request);
    pthread_mutex_lock(&f->lock);
    f->counts.requests += right;
    f->counts.refused += got > 0 && !right;
    pthread_mutex_unlock(&f->lock);
    if (!right) {
        end_fetcher(fetcher);
        return;
    }
    drop_lease(fetcher);
    fetcher->request = request[0];
    fetcher->waiter = (struct fsx_waiter){.done = came};
    fsx_broker_want(f->broker, fsx_broker_counts(f->broker), request[0].entry, request[0].number, &fetcher->waiter,
                    FSX_KEEP);
}

static void *thread_main(void *argument) {
    struct fsx_fetchers *f = argument;
    uint64_t looked_ns = fsx_now_ns();
    while (!atomic_load(&f->ending)) {
        struct epoll_event event;
        const int count = epoll_wait(f->poller, &event, 1, LOOK_MS);
        if (count > 0 && event.data.ptr != NULL)
            serve(event.data.ptr);
        if (fsx_now_ns() - looked_ns > LEASE_NS / 2) {
            end_old_leases(f);
            looked_ns = fsx_now_ns();
        }
    }
    atomic_fetch_sub(&f->running, 1);
    return NULL;
}

/* ---- life --------------------------------------------------------------------------------------------------------------- */

int fsx_fetchers_add(struct fsx_fetchers *f) {
    int pair[2];
    struct fetcher *fetcher = calloc(1, sizeof *fetcher);
    if (fetcher == NULL || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
        free(fetcher);
        return -1;
    }
    fetcher->owner = f;
    fetcher->fd = pair[0];
    pthread_mutex_lock(&f->lock);
    const bool full = f->counts.fetchers >= f->most;
    if (!full) {
        f->counts.fetchers++;
        fetcher->next = f->all;
        fetcher->link = &f->all;
        if (fetcher->next != NULL)
            fetcher->next->link = &fetcher->next;
        f->all = fetcher;
    }
    pthread_mutex_unlock(&f->lock);
    if (full) {
        close(pair[0]);
        close(pair[1]);
        free(fetcher);
        errno = EUSERS;
        return -1;
    }
    watch(fetcher, EPOLL_CTL_ADD);
    return pair[1];
}

struct fsx_fetchers *fsx_fetchers_new(struct fsx_broker *broker, uint32_t threads, uint32_t most, uint64_t cache_bytes) {
    int error = fsx_broker_share(broker);
    struct fsx_fetchers *f = error == 0 ? calloc(1, sizeof *f) : NULL;
    if (f == NULL) {
        errno = error != 0 ? error : ENOMEM;
        return NULL;
    }
    f->broker = broker;
    f->most = most;
    f->held_most = cache_bytes / FSX_HELD_PART;
    pthread_mutex_init(&f->lock, NULL);
    f->poller = epoll_create1(EPOLL_CLOEXEC);
    f->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    f->threads = calloc(threads, sizeof *f->threads);
    struct epoll_event rung = {.events = EPOLLIN};
    if (f->poller < 0 || f->bell < 0 || epoll_ctl(f->poller, EPOLL_CTL_ADD, f->bell, &rung) != 0)
        error = errno;
    else if (f->threads == NULL)
        error = ENOMEM;
    for (; error == 0 && f->thread_count < threads; f->thread_count += error == 0) {
        atomic_fetch_add(&f->running, 1);
        error = pthread_create(&f->threads[f->thread_count], NULL, thread_main, f);
        if (error != 0)
            atomic_fetch_sub(&f->running, 1);
    }
    if (error == 0)
        return f;
    fsx_fetchers_end(f);
    fsx_fetchers_free(f);
    errno = error;
    return NULL;
}

uint32_t fsx_fetchers_end(struct fsx_fetchers *f) {
    const uint64_t one = 1;
    atomic_store(&f->ending, true);
    while (f->bell >= 0 && write(f->bell, &one, sizeof one) < 0 && errno == EINTR)
        ;
    return atomic_load(&f->running);
}

void fsx_fetchers_free(struct fsx_fetchers *f) {
    for (uint32_t i = 0; i < f->thread_count; i++)
        pthread_join(f->threads[i], NULL);
    while (f->all != NULL)
        end_fetcher(f->all);
    if (f->poller >= 0)
        close(f->poller);
    if (f->bell >= 0)
        close(f->bell);
    pthread_mutex_destroy(&f->lock);
    free(f->threads);
    free(f);
}

struct fsx_fetcher_counts fsx_fetchers_count(struct fsx_fetchers *f) {
    pthread_mutex_lock(&f->lock);
    const struct fsx_fetcher_counts counts = f->counts;
    pthread_mutex_unlock(&f->lock);
    return counts;
}
