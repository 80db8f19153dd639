/* reads.c: see reads.h. */
#include "chunks/reads.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct fsx_read *read_of(struct fsx_waiter *waiter) {
    return (struct fsx_read *)((char *)waiter - offsetof(struct fsx_read, waiter));
}

/* Want the chunk in which the next byte is. */
static void want_next(struct fsx_read *read, struct fsx_read_counts *mine) {
    const uint64_t position = read->offset + read->got;
    const uint32_t number = (uint32_t)(position / FSX_CHUNK_BYTES);
    const uint64_t start = (uint64_t)number * FSX_CHUNK_BYTES, size = fsx_broker_index(read->broker)->size[read->entry];
    const uint64_t chunk_end = start + FSX_CHUNK_BYTES < size ? start + FSX_CHUNK_BYTES : size;
    read->waiter.takes_end = read->offset + read->length >= chunk_end;
    /* Of a part, the rest will be wanted soon. */
    const bool whole = read->offset <= start && read->waiter.takes_end;
    fsx_broker_want(read->broker, mine, read->entry, number, &read->waiter, whole ? FSX_PASS : FSX_KEEP);
}

static void end(struct fsx_read *read, const void *data, int error) {
    uint8_t *whole = read->whole; /* the read may be gone after the call */
    read->done(read, data, error);
    free(whole);
}

static void chunk_came(struct fsx_waiter *waiter, const struct fsx_delivery *delivery) {
    struct fsx_read *read = read_of(waiter);
    if (delivery->error != 0) {
        end(read, NULL, delivery->error == ENOMEM ? ENOMEM : EIO);
        return;
    }
    const size_t start = (size_t)((read->offset + read->got) % FSX_CHUNK_BYTES);
    const uint32_t left = read->length - read->got;
    const uint32_t part = delivery->bytes - start < left ? (uint32_t)(delivery->bytes - start) : left;
    fsx_count_read(delivery->counts, delivery->source, part);
    if (part == read->length) {
        end(read, delivery->data + start, 0);
        return;
    }
    if (read->whole == NULL && (read->whole = malloc(read->length)) == NULL) {
        end(read, NULL, ENOMEM);
        return;
    }
    memcpy(read->whole + read->got, delivery->data + start, part);
    read->got += part;
    if (read->got == read->length)
        end(read, read->whole, 0);
    else
        want_next(read, NULL);
}

void fsx_read_start(struct fsx_read *read, struct fsx_broker *broker, struct fsx_read_counts *mine) {
    read->broker = broker;
    read->waiter = (struct fsx_waiter){.done = chunk_came};
    read->whole = NULL;
    read->got = 0;
    want_next(read, mine);
}

struct search {
    bool (*matches)(const struct fsx_read *read, uint64_t key);
    uint64_t key;
};

static bool is_sought(const struct fsx_waiter *waiter, uint64_t key) {
    const struct search *search = (const struct search *)(uintptr_t)key;
    return waiter->done == chunk_came && search->matches(read_of((struct fsx_waiter *)waiter), search->key);
}

struct fsx_read *fsx_read_cancel(struct fsx_broker *broker, bool (*matches)(const struct fsx_read *read, uint64_t key),
                                 uint64_t key) {
    const struct search search = {matches, key};
    struct fsx_waiter *waiter = fsx_broker_cancel(broker, is_sought, (uintptr_t)&search);
    if (waiter == NULL)
        return NULL;
    struct fsx_read *read = read_of(waiter);
    free(read->whole);
    read->whole = NULL;
    return read;
}
