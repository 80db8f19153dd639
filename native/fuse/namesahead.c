/* namesahead.c: see namesahead.h. */
#include "fuse/namesahead.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuse/nameorder.h"

/* In `listed`: an order is under way. */
#define BUSY (UINT32_C(1) << 31)
/* Listed to its end, a directory is listed again when a quarter of its names, and some that were on their way, were looked
 * up since: the kernel has dropped them, for want of memory or because a day has passed. If that does not help, it costs
 * less than 4 names for each LOOKUP. */
#define AGAIN 4u
#define AGAIN_LEAST 16u
/* Cookies of fuse_meta.c: "." and "..", which the kernel knows, come before the names. The kernel keeps a listing that was
 * read from its very beginning, and gives it to who lists next, without names for itself: this one is not to be kept. */
#define FIRST_COOKIE 2u

struct directory {
    atomic_uint looked_up; /* files, since its listing began, or, when it is listed to its end, since then */
    atomic_uint listed;    /* names, from the first; BUSY may be set */
};

struct fsx_names_ahead {
    const struct fsx_index *index;
    uint64_t most;
    struct directory *directories; /* by entry; only pages of those that matter take memory */
    atomic_int socket;             /* -1: before use. What is above is set before it, and does not change */
    atomic_bool ended;
    atomic_uint under_way;      /* orders */
    atomic_uint_least64_t held; /* names that the kernel may hold because of this: the sum of all `listed` */
    atomic_uint_least64_t listings, names, complete;
};

struct fsx_names_ahead *fsx_names_ahead_new(const struct fsx_index *index) {
    struct fsx_names_ahead *names = calloc(1, sizeof *names);
    if (names == NULL)
        return NULL;
    names->index = index;
    atomic_init(&names->socket, -1);
    return names;
}

void fsx_names_ahead_free(struct fsx_names_ahead *names) {
    if (names == NULL)
        return;
    if (atomic_load(&names->socket) >= 0)
        close(atomic_load(&names->socket));
    free(names->directories);
    free(names);
}

int fsx_names_ahead_use(struct fsx_names_ahead *names, int socket, uint64_t most) {
    if (names->directories != NULL)
        return EBUSY;
    names->directories = calloc(names->index->entries, sizeof *names->directories);
    if (names->directories == NULL)
        return ENOMEM;
    names->most = most;
    const int own = fcntl(socket, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return errno;
    atomic_store(&names->socket, own);
    return 0;
}

void fsx_names_ahead_end(struct fsx_names_ahead *names) {
    atomic_store(&names->ended, true);
    if (atomic_load(&names->socket) >= 0)
        shutdown(atomic_load(&names->socket), SHUT_RDWR);
}

/* ---- answers ------------------------------------------------------------------------------------------------------ */

/* What is BUSY belongs to the caller, and is given back. */
static void settle(struct fsx_names_ahead *names, const struct fsx_name_answer *answer) {
    if (answer->directory >= names->index->entries)
        return;
    struct directory *directory = &names->directories[answer->directory];
    const uint32_t count = names->index->count[answer->directory];
    const uint32_t before = atomic_load(&directory->listed);
    if ((before & BUSY) == 0)
        return;
    const uint32_t old = before & ~BUSY;
    const bool further = answer->over == 0 && answer->cookie > old + FIRST_COOKIE;
    const uint64_t next = further ? answer->cookie - FIRST_COOKIE : count;
    const uint32_t now = next < count ? (uint32_t)next : count;
    atomic_fetch_add(&names->listings, 1);
    atomic_fetch_add(&names->names, answer->names);
    atomic_fetch_add(&names->held, now - old);
    if (now == count) {
        atomic_store(&directory->looked_up, 0);
        atomic_fetch_add(&names->complete, answer->names > 0 ? 1 : 0);
    }
    atomic_store(&directory->listed, now);
    atomic_fetch_sub(&names->under_way, 1);
}

static void take_answers(struct fsx_names_ahead *names) {
    while (atomic_load(&names->under_way) > 0) {
        struct fsx_name_answer answer;
        const ssize_t got = recv(atomic_load(&names->socket), &answer, sizeof answer, MSG_DONTWAIT);
        if (got == (ssize_t)sizeof answer) {
            settle(names, &answer);
            continue;
        }
        if (got >= 0 || (errno != EAGAIN && errno != EINTR))
            atomic_store(&names->ended, true); /* the process has */
        return;
    }
}

struct fsx_names_ahead_counts fsx_names_ahead_count(struct fsx_names_ahead *names) {
    if (atomic_load(&names->socket) >= 0)
        take_answers(names);
    return (struct fsx_names_ahead_counts){.listings = atomic_load(&names->listings),
                                           .names = atomic_load(&names->names),
                                           .directories = atomic_load(&names->complete)};
}

/* ---- orders ------------------------------------------------------------------------------------------------------- */

/* What so many names take in an answer to READDIRPLUS. A byte more could be a name more. */
static uint32_t message_bytes(const struct fsx_index *x, uint32_t directory, uint32_t begin, uint32_t count) {
    size_t bytes = 0;
    for (uint32_t k = x->first[directory] + begin; count > 0; k++, count--)
        bytes += FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET_DIRENTPLUS + (size_t)(x->nameoff[k + 1] - x->nameoff[k]));
    return (uint32_t)bytes;
}

static bool send_order(struct fsx_names_ahead *names, uint32_t entry, uint32_t begin, uint32_t count) {
    struct fsx_name_order order;
    memset(&order, 0, FSX_NAME_ORDER_HEAD);
    order.directory = entry;
    order.cookie = (uint64_t)begin + FIRST_COOKIE;
    order.names = count;
    order.bytes = message_bytes(names->index, entry, begin, count);
    const size_t path_bytes = fsx_index_path(names->index, entry, order.path, sizeof order.path);
    if (path_bytes == 0)
        return false;
    const size_t bytes = FSX_NAME_ORDER_HEAD + path_bytes;
    const bool sent = send(atomic_load(&names->socket), &order, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)bytes;
    if (!sent && errno == EPIPE)
        atomic_store(&names->ended, true); /* the process has */
    return sent;
}

/* How many names to list after the first `listed`; 0 for not now. */
static uint32_t slice_of(uint32_t count, uint32_t listed, uint32_t looked_up) {
    const uint64_t allowed = (uint64_t)looked_up * FSX_NAMES_PER_LOOKUP;
    const uint32_t left = count - listed;
    uint64_t slice = allowed > listed ? allowed - listed : 0;
    slice = slice < FSX_NAMES_SLICE_MOST ? slice : FSX_NAMES_SLICE_MOST;
    if (looked_up < FSX_NAMES_FIRST_LOOKUPS)
        return 0;
    if (slice >= left)
        return left;
    return slice >= FSX_NAMES_SLICE_LEAST ? (uint32_t)slice : 0;
}

static void order_slice(struct fsx_names_ahead *names, uint32_t entry, uint32_t listed, uint32_t slice) {
    struct directory *directory = &names->directories[entry];
    if (atomic_load(&names->held) + slice > names->most)
        return;
    if (atomic_fetch_add(&names->under_way, 1) < FSX_NAME_ORDERS) {
        uint32_t expected = listed;
        if (atomic_compare_exchange_strong(&directory->listed, &expected, listed | BUSY)) {
            if (send_order(names, entry, listed, slice))
                return;
            atomic_store(&directory->listed, listed);
        }
    }
    atomic_fetch_sub(&names->under_way, 1);
}

void fsx_names_ahead_note(struct fsx_names_ahead *names, uint32_t entry) {
    if (atomic_load(&names->socket) < 0 || atomic_load(&names->ended) || entry >= names->index->entries)
        return;
    if (atomic_load(&names->under_way) > 0)
        take_answers(names);
    const uint32_t count = names->index->count[entry];
    if (count < FSX_NAMES_WORTH || count >= BUSY)
        return;
    struct directory *directory = &names->directories[entry];
    const uint32_t looked_up = atomic_fetch_add(&directory->looked_up, 1) + 1;
    uint32_t listed = atomic_load(&directory->listed);
    if ((listed & BUSY) != 0)
        return;
    if (listed < count) {
        const uint32_t slice = slice_of(count, listed, looked_up);
        if (slice > 0)
            order_slice(names, entry, listed, slice);
    } else if (looked_up >= count / AGAIN + AGAIN_LEAST) {
        atomic_store(&directory->looked_up, 0); /* before it can be ordered: that is what it has paid for */
        if (atomic_compare_exchange_strong(&directory->listed, &listed, 0))
            atomic_fetch_sub(&names->held, count);
    }
}
