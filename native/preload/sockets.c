/* sockets.c: see sockets.h. */
#include "preload/sockets.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/nanoseconds.h"
#include "preload/next.h"
#include "preload/preload.h"

#define MOST 16
#define NS_PER_S INT64_C(1000000000)
#define ALL_SIGNALS (~(UINT64_C(3) << 31)) /* but 32 and 33, which are the C library's */
#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

/* How many of each kind: so many threads of a process have something under way at a time. */
static const int counts[FSX_SOCKET_KINDS] = {[FSX_ASKING] = 4, [FSX_FETCHING] = MOST};

struct pool {
    struct fsx_socket each[MOST];
    _Atomic uint32_t given_back; /* counts; who waits for a connection waits for a change */
    _Atomic uint32_t waiting;
};
static struct pool *pools; /* by kind; empty in the child of a fork */
/* What is open, for the child, which closes it, and for those who want a number. */
static struct {
    _Atomic int fd; /* + 1 */
    _Atomic uint64_t inode;
} opened[FSX_SOCKET_KINDS][MOST];

bool fsx_sockets_start(void) {
    const size_t bytes = (FSX_SOCKET_KINDS * sizeof *pools + 4095) / 4096 * 4096;
    void *got = fsx_map(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (got == MAP_FAILED)
        return false;
    syscall(SYS_madvise, got, bytes, MADV_WIPEONFORK); /* before Linux 4.14, fsx_sockets_forked does it */
    pools = got;
    return true;
}

/* ---- waiting ------------------------------------------------------------------------------------------------------------ */

bool fsx_wait_for(int fd, short events, int64_t end_ns) {
    for (;;) {
        const int64_t left = end_ns - (int64_t)fsx_now_ns();
        if (left <= 0)
            return false;
        struct pollfd polled = {.fd = fd, .events = events};
        struct timespec rest = {.tv_sec = left / NS_PER_S, .tv_nsec = left % NS_PER_S};
        const long ready = syscall(SYS_ppoll, &polled, 1, &rest, NULL, 0);
        if (ready > 0)
            return true;
        if (ready < 0 && errno != EINTR)
            return false;
    }
}

/* ---- who has which ------------------------------------------------------------------------------------------------------ */

struct fsx_socket *fsx_socket_claim(enum fsx_socket_kind kind, int64_t end_ns, uint64_t *signals) {
    const uint64_t all = ALL_SIGNALS;
    if (pools == NULL || fsx_in_vfork())
        return NULL;
    struct pool *pool = &pools[kind];
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, signals, sizeof all);
    for (;;) {
        const uint32_t before = atomic_load(&pool->given_back);
        struct fsx_socket *found = NULL;
        for (int i = 0; i < counts[kind]; i++) { /* an open one first */
            struct fsx_socket *each = &pool->each[i];
            if (atomic_load_explicit(&each->busy, memory_order_relaxed) != 0 || atomic_exchange(&each->busy, 1) != 0)
                continue;
            if (found != NULL)
                atomic_store(&found->busy, 0);
            found = each;
            if (each->open != 0)
                break;
        }
        const int64_t left = found != NULL ? 1 : end_ns - (int64_t)fsx_now_ns();
        if (left <= 0)
            syscall(SYS_rt_sigprocmask, SIG_SETMASK, signals, NULL, sizeof all);
        if (found != NULL || left <= 0)
            return found;
        struct timespec rest = {.tv_sec = left / NS_PER_S, .tv_nsec = left % NS_PER_S};
        atomic_fetch_add(&pool->waiting, 1);
        syscall(SYS_futex, &pool->given_back, FUTEX_WAIT_PRIVATE, before, &rest, NULL, 0);
        atomic_fetch_sub(&pool->waiting, 1);
    }
}

static void release(struct pool *pool, struct fsx_socket *socket) {
    atomic_store(&socket->busy, 0);
    atomic_fetch_add(&pool->given_back, 1);
    if (atomic_load(&pool->waiting) != 0)
        syscall(SYS_futex, &pool->given_back, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

void fsx_socket_give_back(enum fsx_socket_kind kind, struct fsx_socket *socket, uint64_t signals) {
    release(&pools[kind], socket);
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &signals, NULL, sizeof signals);
}

/* ---- open and closed ---------------------------------------------------------------------------------------------------- */

static bool is_socket(int fd, uint64_t inode) {
    struct stat about;
    return syscall(SYS_fstat, fd, &about) == 0 && S_ISSOCK(about.st_mode) && about.st_ino == inode;
}

bool fsx_socket_is_open(enum fsx_socket_kind kind, struct fsx_socket *socket) {
    if (socket->open != 0 && is_socket(socket->open - 1, socket->inode))
        return true;
    atomic_store(&opened[kind][socket - pools[kind].each].fd, 0);
    socket->open = 0; /* not ours to close */
    return false;
}

bool fsx_socket_open(enum fsx_socket_kind kind, struct fsx_socket *socket, int fd) {
    struct stat about;
    fd = fsx_keep_descriptor(fd);
    if (fd < 0)
        return false;
    if (syscall(SYS_fstat, fd, &about) != 0 || !S_ISSOCK(about.st_mode))
        return false; /* somebody else has it by now */
    const int64_t i = socket - pools[kind].each;
    socket->inode = about.st_ino;
    socket->open = fd + 1;
    atomic_store(&opened[kind][i].inode, about.st_ino);
    atomic_store(&opened[kind][i].fd, fd + 1);
    return true;
}

void fsx_socket_close(enum fsx_socket_kind kind, struct fsx_socket *socket) {
    const int fd = socket->open - 1;
    socket->open = 0;
    atomic_store(&opened[kind][socket - pools[kind].each].fd, 0);
    if (fd >= 0)
        fsx_drop_descriptor(fd);
}

void fsx_sockets_forked(void) {
    for (int kind = 0; kind < FSX_SOCKET_KINDS; kind++)
        for (int i = 0; i < counts[kind]; i++) {
            const int fd = atomic_exchange(&opened[kind][i].fd, 0) - 1;
            if (fd >= 0 && is_socket(fd, atomic_load(&opened[kind][i].inode)))
                fsx_drop_descriptor(fd);
        }
    if (pools != NULL)
        memset(pools, 0, FSX_SOCKET_KINDS * sizeof *pools);
}

bool fsx_sockets_move(int fd) {
    for (int kind = 0; kind < FSX_SOCKET_KINDS; kind++)
        for (int i = 0; i < counts[kind]; i++) {
            if (atomic_load(&opened[kind][i].fd) != fd + 1)
                continue;
            struct fsx_socket *socket = &pools[kind].each[i];
            while (atomic_exchange(&socket->busy, 1) != 0)
                sched_yield(); /* until its answer has come */
            if (socket->open == fd + 1)
                fsx_socket_close((enum fsx_socket_kind)kind, socket);
            release(&pools[kind], socket);
            return true;
        }
    return false;
}
