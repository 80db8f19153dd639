/* cache.c: content that this process cannot read in a file: compressed, on another node, in an object store; see preload.h.
 *
 * The daemon shows its chunk cache as a memory file (format/sharedcache.h). A chunk that stands in its table is copied without
 * asking; any other is asked for, over a socket of its own per thread, and copied from where the daemon then has it. All that
 * the daemon says is checked against the size of the file before it is used.
 *
 * What a process reads for the first time it reads with pread, and copies from the map when it comes again, for the same
 * reason as in bytes.c.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/nanoseconds.h"
#include "format/chunk.h"
#include "format/sharedcache.h"
#include "preload/ask.h"
#include "preload/next.h"
#include "preload/preload.h"
#include "preload/sockets.h"

/* How often a chunk is asked for that is gone again before it was copied. */
#define ATTEMPTS 8

enum { UNTRIED, ATTACHING, ATTACHED, UNUSABLE };
static _Atomic int how;
/* What ATTACHED has found. */
static const uint8_t *map;
static uint64_t map_bytes;
static const struct fsx_shared_slot *slots;
static uint32_t buckets;
static _Atomic int cache_fd = -1; /* -1 for none: then everything is copied from the map */
static ino_t inode;

/* A chunk, as the table or the daemon has it. */
struct found {
    const struct fsx_shared_slot *slot; /* NULL: the daemon keeps it, but it is not in the table */
    uint64_t offset, stamp;
};

/* ---- the memory file ---------------------------------------------------------------------------------------------------- */

static const char *attach(void) {
    struct fsx_request request;
    struct fsx_answer answer;
    fsx_request_start(&request, "cache", 0);
    if (fsx_ask(&request, &answer) != 0)
        return "the daemon does not show its cache";
    const int fd = answer.descriptors == 1 ? answer.descriptor[0] : -1;
    struct stat about;
    struct fsx_shared_header header;
    if (fd < 0 || syscall(SYS_fstat, fd, &about) != 0 ||
        syscall(SYS_pread64, fd, &header, sizeof header, (off_t)0) != (long)sizeof header ||
        memcmp(header.magic, FSX_SHARED_MAGIC, sizeof header.magic) != 0 || header.version != FSX_SHARED_VERSION ||
        header.buckets == 0 || (header.buckets & (header.buckets - 1)) != 0 || header.bytes != (uint64_t)about.st_size ||
        header.start > header.bytes ||
        header.start < FSX_SHARED_HEADER_BYTES + (uint64_t)header.buckets * FSX_SHARED_WAYS * sizeof *slots) {
        fsx_answer_close(&answer);
        return "what the daemon shows is not understood";
    }
    const uint8_t *got = fsx_map(header.bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd);
    if (got == MAP_FAILED) {
        fsx_answer_close(&answer);
        return "the daemon's cache cannot be mapped";
    }
    map = got;
    map_bytes = header.bytes;
    slots = (const struct fsx_shared_slot *)(const void *)(got + FSX_SHARED_HEADER_BYTES);
    buckets = header.buckets;
    inode = about.st_ino;
    atomic_store(&cache_fd, fsx_keep_descriptor(fd));
    return NULL;
}

/* False: not now, or never in this process. */
static bool is_attached(void) {
    const int now = atomic_load_explicit(&how, memory_order_acquire);
    if (now == ATTACHED || now == UNUSABLE)
        return now == ATTACHED;
    int untried = UNTRIED;
    if (fsx_in_vfork())
        return false;
    /* One thread does it; the others wait, which takes them no longer than asking for a chunk. */
    if (!atomic_compare_exchange_strong(&how, &untried, ATTACHING)) {
        const uint64_t end_ns = fsx_now_ns() + (uint64_t)fsx_limit_ns;
        while (atomic_load(&how) == ATTACHING && fsx_now_ns() < end_ns)
            syscall(SYS_sched_yield);
        return atomic_load(&how) == ATTACHED;
    }
    const char *reason = attach();
    FSX_LOG("cache", NULL, 0, reason == NULL ? "attached" : reason);
    atomic_store_explicit(&how, reason == NULL ? ATTACHED : UNUSABLE, memory_order_release);
    return reason == NULL;
}

bool fsx_cache_here(void) { return fsx_at.state->shares != 0 && atomic_load_explicit(&how, memory_order_relaxed) != UNUSABLE; }

void fsx_cache_forked(void) {
    int attaching = ATTACHING; /* whoever did is not here */
    atomic_compare_exchange_strong(&how, &attaching, UNTRIED);
}

bool fsx_cache_move(int fd) {
    if (atomic_load(&cache_fd) != fd)
        return false;
    atomic_store(&cache_fd, fsx_keep_descriptor((int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 3)));
    return true;
}

/* With pread; false if that is not possible. */
static bool read_file(uint64_t position, uint8_t *target, size_t length) {
    const int fd = atomic_load_explicit(&cache_fd, memory_order_relaxed);
    struct stat about; /* a program can close it with a system call that is not seen here */
    if (fd < 0 || syscall(SYS_fstat, fd, &about) != 0 || about.st_ino != inode || !S_ISREG(about.st_mode))
        return false;
    for (size_t done = 0; done < length;) {
        const ssize_t got = syscall(SYS_pread64, fd, target + done, length - done, position + done);
        if (got == 0 || (got < 0 && errno != EINTR))
            return false;
        done += got > 0 ? (size_t)got : 0;
    }
    return atomic_load(&cache_fd) == fd;
}

/* A piece of a chunk; false if the chunk is not there any more. */
static bool copy(const struct found *found, uint64_t offset, uint8_t *target, size_t length, bool again) {
    const uint64_t position = found->offset + offset;
    if (again || !read_file(position, target, length))
        memcpy(target, map + position, length);
    return found->slot == NULL || fsx_shared_still(found->slot, found->stamp);
}

/* In the table, with `bytes` of content. */
static bool look_up(uint64_t key, uint64_t bytes, struct found *found) {
    const struct fsx_shared_slot *slot = slots + (size_t)fsx_shared_bucket(key, buckets) * FSX_SHARED_WAYS;
    for (uint32_t way = 0; way < FSX_SHARED_WAYS; way++, slot++) {
        const uint64_t stamp = atomic_load_explicit(&slot->stamp, memory_order_acquire);
        if (stamp == 0 || atomic_load_explicit(&slot->key, memory_order_relaxed) != key)
            continue;
        *found = (struct found){slot, atomic_load_explicit(&slot->offset, memory_order_relaxed), stamp};
        return atomic_load_explicit(&slot->bytes, memory_order_relaxed) == bytes && bytes <= map_bytes &&
               found->offset <= map_bytes - bytes;
    }
    return false;
}

/* ---- asking ------------------------------------------------------------------------------------------------------------- */

static bool connect_to_daemon(struct fsx_socket *socket) {
    struct fsx_request request;
    struct fsx_answer answer;
    if (fsx_socket_is_open(FSX_FETCHING, socket))
        return true;
    fsx_request_start(&request, "fetcher", 0);
    if (fsx_ask(&request, &answer) != 0)
        return false;
    if (answer.descriptors != 1) {
        fsx_answer_close(&answer);
        return false;
    }
    /* To wait in recvfrom alone takes a call less than to poll before it. */
    const struct timeval limit = {.tv_sec = fsx_limit_ns / 1000000000};
    syscall(SYS_setsockopt, answer.descriptor[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return fsx_socket_open(FSX_FETCHING, socket, answer.descriptor[0]);
}

/* All of one packet; false if there is none in time. */
static bool exchange(int fd, const struct fsx_client_request *request, struct fsx_client_answer *answer, int64_t end_ns) {
    while (syscall(SYS_sendto, fd, request, sizeof *request, MSG_NOSIGNAL | MSG_DONTWAIT, NULL, 0) != (long)sizeof *request)
        if (errno != EINTR && (errno != EAGAIN || !fsx_wait_for(fd, POLLOUT, end_ns)))
            return false;
    long got;
    while ((got = syscall(SYS_recvfrom, fd, answer, sizeof *answer, 0, NULL, NULL)) < 0) /* with the limit of the socket */
        if (errno != EINTR)
            return false;
    return got == (long)sizeof *answer && answer->token == request->token;
}

/* Have the daemon bring the chunk, and copy it before it may go. 0, EAGAIN if it had gone, or another errno. */
static int fetch(uint32_t entry, uint32_t number, uint64_t bytes, uint64_t offset, uint8_t *target, size_t length, bool again) {
    uint64_t signals;
    const int64_t end_ns = (int64_t)fsx_now_ns() + fsx_limit_ns;
    struct fsx_socket *socket = fsx_socket_claim(FSX_FETCHING, end_ns, &signals);
    if (socket == NULL)
        return EIO;
    int error = EIO;
    struct fsx_client_answer answer;
    if (connect_to_daemon(socket)) {
        const struct fsx_client_request request = {
            .kind = FSX_CLIENT_WANT, .token = ++socket->number, .entry = entry, .number = number};
        if (exchange(socket->open - 1, &request, &answer, end_ns))
            error = answer.error == 0 || answer.error == EIO || answer.error == ENOMEM ? answer.error : EIO;
        else
            fsx_socket_close(FSX_FETCHING, socket);
    }
    if (error == 0) {
        struct found found = {.offset = answer.offset};
        const bool right = answer.bytes == bytes && bytes <= map_bytes && answer.offset <= map_bytes - bytes;
        if (answer.stamp != 0 && !(look_up(fsx_shared_key(entry, number), bytes, &found) && found.stamp == answer.stamp))
            error = EAGAIN;
        else
            error = !right ? EIO : copy(&found, offset, target, length, again) ? 0 : EAGAIN;
    }
    fsx_socket_give_back(FSX_FETCHING, socket, signals);
    return error;
}

bool fsx_cache_read(uint32_t entry, uint64_t offset, void *target, size_t length, bool again) {
    const struct fsx_index *x = &fsx_at.index;
    if (!fsx_cache_here() || !is_attached())
        return false;
    for (size_t done = 0; done < length;) {
        const uint64_t start = (offset + done) / FSX_CHUNK_BYTES * FSX_CHUNK_BYTES;
        const uint32_t number = (uint32_t)(start / FSX_CHUNK_BYTES);
        const uint64_t bytes = x->size[entry] - start < FSX_CHUNK_BYTES ? x->size[entry] - start : FSX_CHUNK_BYTES;
        const uint64_t from = offset + done - start;
        const size_t part = bytes - from < length - done ? (size_t)(bytes - from) : length - done;
        struct found found;
        uint8_t *to = (uint8_t *)target + done;
        if (!look_up(fsx_shared_key(x->inode[entry], number), bytes, &found) || !copy(&found, from, to, part, again)) {
            int error = EAGAIN;
            for (int attempt = 0; error == EAGAIN && attempt < ATTEMPTS; attempt++)
                error = fetch(x->inode[entry], number, bytes, from, to, part, again);
            if (error != 0)
                return false;
        }
        done += part;
    }
    return true;
}
