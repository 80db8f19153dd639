/* pagesahead.c: see pagesahead.h. */
#include "chunks/pagesahead.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "chunks/counts.h"
#include "chunks/pageorder.h"

/* Files of a window of 64 MiB, down to 16 KiB each; what has no place is read when it is wanted. */
#define LINE 4096u
/* What the socket holds, in bytes as the kernel counts them: some ten orders. More would be too late to be taken back. */
#define SOCKET_BYTES 4096
/* Of a file, as FILE_BYTES of fanstore/order/window.py. */
#define AHEAD_BYTES FSX_CHUNK_BYTES

struct fsx_pages_ahead {
    const struct fsx_index *index;
    atomic_int socket; /* -1: before use */
    atomic_bool ended;
    atomic_uint process;
    atomic_uint waiting;        /* what stands in line, to be seen without the lock */
    uint64_t files, bytes;      /* counted by several */
    atomic_uint recent[LINE];   /* what programs have read by themselves, each at its number modulo LINE; 0: none */
    pthread_mutex_t lock;       /* guards what follows */
    uint32_t line[LINE];        /* a ring */
    uint32_t first, count;
    bool sending; /* a thread sends orders; it looks again when another one would */
    bool again;
};

struct fsx_pages_ahead *fsx_pages_ahead_new(const struct fsx_index *index) {
    struct fsx_pages_ahead *pages = calloc(1, sizeof *pages);
    if (pages == NULL)
        return NULL;
    pages->index = index;
    atomic_init(&pages->socket, -1);
    pthread_mutex_init(&pages->lock, NULL);
    return pages;
}

void fsx_pages_ahead_free(struct fsx_pages_ahead *pages) {
    if (pages == NULL)
        return;
    if (atomic_load(&pages->socket) >= 0)
        close(atomic_load(&pages->socket));
    pthread_mutex_destroy(&pages->lock);
    free(pages);
}

/* ---- orders ------------------------------------------------------------------------------------------------------- */

/* False if the socket is full. */
static bool send_order(struct fsx_pages_ahead *pages, uint32_t entry) {
    if (atomic_load_explicit(&pages->recent[entry % LINE], memory_order_relaxed) == entry)
        return true; /* somebody was faster */
    struct fsx_page_order order;
    const uint64_t size = pages->index->size[entry];
    order.bytes = size < AHEAD_BYTES ? size : AHEAD_BYTES;
    const size_t path_bytes = fsx_index_path(pages->index, entry, order.path, sizeof order.path);
    if (path_bytes == 0 || size == 0)
        return true;
    const size_t bytes = FSX_PAGE_ORDER_HEAD + path_bytes;
    if (send(atomic_load(&pages->socket), &order, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)bytes)
        return true;
    if (errno != EAGAIN && errno != EINTR && errno != ENOBUFS)
        atomic_store(&pages->ended, true); /* the process has */
    return false;
}

static bool is_usable(struct fsx_pages_ahead *pages) {
    return atomic_load(&pages->socket) >= 0 && !atomic_load(&pages->ended);
}

static void go_on(struct fsx_pages_ahead *pages) {
    pthread_mutex_lock(&pages->lock);
    pages->again = true;
    if (pages->sending) {
        pthread_mutex_unlock(&pages->lock);
        return;
    }
    pages->sending = true;
    while (pages->again) {
        pages->again = false;
        while (pages->count > 0 && is_usable(pages)) {
            const uint32_t entry = pages->line[pages->first];
            pthread_mutex_unlock(&pages->lock);
            const bool sent = send_order(pages, entry);
            pthread_mutex_lock(&pages->lock);
            if (!sent)
                break;
            pages->first = (pages->first + 1) % LINE;
            atomic_store_explicit(&pages->waiting, --pages->count, memory_order_relaxed);
        }
    }
    pages->sending = false;
    pthread_mutex_unlock(&pages->lock);
}

int fsx_pages_ahead_use(struct fsx_pages_ahead *pages, int socket, uint32_t process) {
    if (atomic_load(&pages->socket) >= 0)
        return EBUSY;
    const int own = fcntl(socket, F_DUPFD_CLOEXEC, 0), most = SOCKET_BYTES;
    if (own < 0)
        return errno;
    setsockopt(own, SOL_SOCKET, SO_SNDBUF, &most, sizeof most);
    atomic_store(&pages->process, process);
    atomic_store(&pages->socket, own);
    go_on(pages);
    return 0;
}

void fsx_pages_ahead_end(struct fsx_pages_ahead *pages) {
    atomic_store(&pages->ended, true);
    if (atomic_load(&pages->socket) >= 0)
        shutdown(atomic_load(&pages->socket), SHUT_RDWR);
}

void fsx_pages_ahead_add(struct fsx_pages_ahead *pages, uint32_t entry) {
    if (atomic_load(&pages->ended))
        return;
    uint32_t read = entry; /* before: it may be read again */
    atomic_compare_exchange_strong(&pages->recent[entry % LINE], &read, 0);
    pthread_mutex_lock(&pages->lock);
    if (pages->count < LINE) {
        pages->line[(pages->first + pages->count) % LINE] = entry;
        atomic_store_explicit(&pages->waiting, ++pages->count, memory_order_relaxed);
    }
    pthread_mutex_unlock(&pages->lock);
    go_on(pages);
}

/* ---- for the engine ----------------------------------------------------------------------------------------------- */

bool fsx_pages_ahead_note_read(struct fsx_pages_ahead *pages, uint32_t entry, uint64_t offset, uint32_t length,
                               uint32_t thread) {
    if (atomic_load_explicit(&pages->process, memory_order_relaxed) != thread || thread == 0) {
        if (offset == 0)
            atomic_store_explicit(&pages->recent[entry % LINE], entry, memory_order_relaxed);
        return false;
    }
    FSX_ADD(pages->files, offset == 0);
    FSX_ADD(pages->bytes, length);
    if (atomic_load_explicit(&pages->waiting, memory_order_relaxed) > 0)
        go_on(pages);
    return true;
}

struct fsx_pages_ahead_counts fsx_pages_ahead_count(struct fsx_pages_ahead *pages) {
    const uint32_t waiting = atomic_load_explicit(&pages->waiting, memory_order_relaxed);
    if (waiting > 0)
        go_on(pages);
    return (struct fsx_pages_ahead_counts){.files = FSX_COUNTED(pages->files), .bytes = FSX_COUNTED(pages->bytes),
                                           .in_line = waiting};
}
