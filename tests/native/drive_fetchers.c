/* drive_fetchers.c: programs that fetch chunks from a broker (native/clients/fetchers.c), as threads: what they copy is right,
 * whatever is evicted meanwhile, and some of them are rude. Used by drive_broker.c.
 */
#include "drive_fetchers.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "chunks/shared.h"
#include "format/sharedcache.h"

struct client {
    struct drive_fetching *job;
    const uint8_t *map;
    const struct fsx_shared_header *header;
    int fd;
    uint32_t token;
};

static bool is_shown(const struct client *client, uint64_t offset, const struct piece *chunk) {
    check(offset >= client->header->start && offset + chunk->length <= client->header->bytes, "a place outside the file");
    return memcmp(client->map + offset, world.truth[chunk->entry] + chunk->offset, chunk->length) == 0;
}

/* In the table: whether it was there, and still is when its bytes were compared. */
static bool look_up(struct client *client, const struct piece *chunk, uint64_t stamp_wanted) {
    const uint64_t key = fsx_shared_key(chunk->entry, (uint32_t)(chunk->offset / FSX_CHUNK_BYTES));
    const struct fsx_shared_slot *slot = (const struct fsx_shared_slot *)(const void *)(client->map + FSX_SHARED_HEADER_BYTES) +
                                         (size_t)fsx_shared_bucket(key, client->header->buckets) * FSX_SHARED_WAYS;
    for (uint32_t way = 0; way < FSX_SHARED_WAYS; way++, slot++) {
        const uint64_t stamp = atomic_load_explicit(&slot->stamp, memory_order_acquire);
        if (stamp == 0 || (stamp_wanted != 0 && stamp != stamp_wanted) || atomic_load(&slot->key) != key)
            continue;
        const uint64_t offset = atomic_load(&slot->offset);
        if (!fsx_shared_still(slot, stamp))
            continue;
        const bool right = is_shown(client, offset, chunk);
        if (!fsx_shared_still(slot, stamp))
            return false;
        check(right, "a chunk of the table is another");
        return true;
    }
    return false;
}

static bool reconnect(struct client *client) {
    if (client->fd >= 0)
        close(client->fd);
    client->fd = fsx_fetchers_add(client->job->fetchers);
    check(client->fd >= 0 || errno == EUSERS, "no socket");
    return client->fd >= 0;
}

/* Nonsense, of which the end is the end of the socket. */
static void be_rude(struct client *client) {
    struct fsx_client_request request[2] = {{.kind = (uint32_t)below(&client->job->seed, 4),
                                             .entry = (uint32_t)next_random(&client->job->seed),
                                             .number = (uint32_t)below(&client->job->seed, 3)}};
    const size_t bytes = below(&client->job->seed, 3) == 0 ? sizeof request[0] : below(&client->job->seed, sizeof request);
    for (uint64_t i = below(&client->job->seed, 4); i < 4; i++)
        (void)!send(client->fd, request, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (below(&client->job->seed, 2) == 0)
        shutdown(client->fd, SHUT_WR);
    reconnect(client);
}

static void ask(struct client *client, const struct piece *chunk) {
    const bool hold = below(&client->job->seed, 8) == 0;
    const struct fsx_client_request request = {.kind = hold ? FSX_CLIENT_HOLD : FSX_CLIENT_WANT, .token = ++client->token,
                                               .entry = chunk->entry,
                                               .number = (uint32_t)(chunk->offset / FSX_CHUNK_BYTES)};
    struct fsx_client_answer answer;
    check_call(send(client->fd, &request, sizeof request, MSG_NOSIGNAL) == (ssize_t)sizeof request, "cannot ask");
    if (below(&client->job->seed, 30) == 0) { /* killed before the answer */
        reconnect(client);
        return;
    }
    const ssize_t got = recv(client->fd, &answer, sizeof answer, 0);
    check_call(got == (ssize_t)sizeof answer, "no answer");
    check(answer.token == request.token, "another answer");
    check(answer.error == 0 || answer.error == EIO || answer.error == EAGAIN || (hold && answer.error == ENOMEM), "another error");
    client->job->failed += answer.error == EIO;
    if (answer.error != 0)
        return;
    check(answer.bytes == chunk->length, "another length");
    /* It is leased, for a second at least; held ones for longer than that. */
    const bool right = is_shown(client, answer.offset, chunk);
    check(right || (!hold && answer.stamp != 0 && !look_up(client, chunk, answer.stamp)), "a leased chunk is another");
    client->job->asked++;
}

void *drive_fetching(void *argument) {
    struct drive_fetching *job = argument;
    struct client client = {.job = job, .fd = -1};
    const int fd = fsx_shared_open(fsx_broker_shared(job->broker));
    const off_t bytes = lseek(fd, 0, SEEK_END);
    check_call(fd >= 0 && bytes > 0, "no shared file");
    check(mmap(NULL, 4096, PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED, "a program could write there");
    client.map = mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
    check_call(client.map != MAP_FAILED, "it cannot be mapped");
    client.header = (const struct fsx_shared_header *)(const void *)client.map;
    check(client.header->bytes == (uint64_t)bytes, "wrong header");
    for (uint32_t round = 0; round < job->rounds || !atomic_load(job->over); round++) {
        struct piece chunk = some_piece(&job->seed, FSX_READ_BYTES);
        chunk.entry = world.index.inode[chunk.entry];
        chunk.offset = chunk.offset / FSX_CHUNK_BYTES * FSX_CHUNK_BYTES;
        const uint64_t left = world.index.size[chunk.entry] - chunk.offset;
        chunk.length = left < FSX_CHUNK_BYTES ? (uint32_t)left : FSX_CHUNK_BYTES;
        if (client.fd < 0 && !reconnect(&client))
            continue;
        if (below(&job->seed, 10) == 0)
            be_rude(&client);
        else if (look_up(&client, &chunk, 0))
            job->found++;
        else
            ask(&client, &chunk);
    }
    if (client.fd >= 0)
        close(client.fd);
    munmap((void *)(uintptr_t)client.map, (size_t)bytes);
    close(fd);
    return NULL;
}
