/* landing.c: answers of peers are checked, decompressed, and given to those who wait; see fetching.h and flights.h.
 *
 * On the landing threads, which are these functions' alone; of a light answer, on the exchange's.
 */
#include "flights.h"

#include <stdlib.h>

/* How often a read that needs two chunks waits for one of them: if the cache is so small that each pushes out the other,
 * Python reads it. */
#define ATTEMPTS 4u

/* What a landed flight has become. */
struct content {
    const uint8_t *data; /* all of the chunk; NULL if it is not to be had like this */
    struct fsx_cached *cached;
    bool damaged;
};

/* The content of a compressed chunk: in the lander's hands if nobody wants it a second time. */
static struct content decode(struct fsx_lander *lander, const struct fsx_flight *flight, bool keep) {
    struct fsx_cache *cache = fsx_content_cache(lander->fetcher->content);
    const struct fsx_stored *chunk = &flight->chunk;
    if (!keep && chunk->content_bytes <= FSX_ANSWER_BYTES) {
        const bool right = fsx_chunk_decode(chunk, flight->memory, lander->hands.answer);
        return (struct content){.data = right ? lander->hands.answer : NULL, .damaged = !right};
    }
    bool claimed;
    struct fsx_cached *cached = fsx_cache_claim(cache, flight->entry, flight->number, chunk->content_bytes, &claimed);
    if (claimed && !fsx_chunk_decode(chunk, flight->memory, cached->data)) {
        fsx_cache_abandon(cache, cached);
        return (struct content){.damaged = true};
    }
    if (claimed)
        fsx_cache_publish(cache, cached, true);
    return (struct content){.data = cached == NULL ? NULL : cached->data, .cached = cached};
}

bool fsx_lander_check(struct fsx_lander *lander, struct fsx_flight *flight) {
    if (flight->intact || !fsx_content_checks(lander->fetcher->content))
        return true;
    flight->intact = fsx_chunk_is_intact(&flight->chunk, flight->memory);
    if (flight->intact) {
        FSX_COUNT(lander->hands.counts.checked_chunks, 1);
        FSX_COUNT(lander->hands.counts.checked_bytes, flight->chunk.stored_bytes);
    }
    return flight->intact;
}

/* Check and decompress; `keep`: put it into the cache. */
static struct content examine(struct fsx_lander *lander, struct fsx_flight *flight, bool keep) {
    struct fsx_fetcher *f = lander->fetcher;
    const struct fsx_stored *chunk = &flight->chunk;
    if (flight->got == FSX_IN_CACHE)
        return (struct content){.data = flight->cached->data, .cached = flight->cached};
    if (flight->got < 0 || (size_t)flight->got != chunk->stored_bytes)
        return (struct content){0};
    if (!fsx_lander_check(lander, flight))
        return (struct content){.damaged = true};
    if (chunk->lz4)
        return decode(lander, flight, keep);
    if (!keep)
        return (struct content){.data = flight->memory};
    const struct fsx_lent lent = {flight->memory, flight->capacity, fsx_flight_give_memory, f};
    struct fsx_cached *cached = fsx_cache_adopt(fsx_content_cache(f->content), flight->entry, flight->number,
                                                chunk->content_bytes, &lent);
    if (cached != NULL)
        flight->memory = NULL; /* the cache has it, without a copy */
    return (struct content){.data = lent.data, .cached = cached};
}

/* With the lock held: count, and tell Python of a failure. Is there one? */
static bool judge(struct fsx_fetcher *f, const struct fsx_flight *flight, const struct content *content) {
    const int got = flight->got;
    if (got == FSX_NO_MEMORY || got == FSX_IN_CACHE)
        return false;
    const bool came = got >= 0 && (size_t)got == flight->chunk.stored_bytes;
    fsx_latency_record(&f->answers, flight->landed_ns - flight->asked_ns, !came);
    if (came && !content->damaged) {
        f->counts[flight->peer].fetches++;
        f->counts[flight->peer].fetched_bytes += (uint64_t)got;
        return false;
    }
    fsx_flight_note(f, came ? FSX_PEER_DAMAGED : got >= 0 ? FSX_PEER_REFUSED : FSX_PEER_LOST, flight);
    return true;
}

/* One that needs two chunks: perhaps both are in the cache now. */
static void try_again(struct fsx_lander *lander, struct fsx_reader *reader) {
    struct fsx_fetcher *f = lander->fetcher;
    if (fsx_content_read(f->content, &lander->hands, reader->entry, reader->offset, reader->length)) {
        f->ends.answer(f->ends.context, reader, lander->hands.answer, 0);
        fsx_latency_record(&lander->reads, fsx_now_ns() - reader->start_ns, false);
        return;
    }
    reader->attempt++;
    if (reader->attempt >= ATTEMPTS || !fsx_fetcher_fetch(f, reader))
        f->ends.cross(f->ends.context, reader);
}

static void answer_readers(struct fsx_lander *lander, const struct fsx_flight *flight, const uint8_t *data,
                           struct fsx_waiting *readers) {
    struct fsx_fetcher *f = lander->fetcher;
    const uint64_t begin = (uint64_t)flight->number * FSX_CHUNK_BYTES;
    enum fsx_origin origin = flight->got == FSX_IN_CACHE ? FSX_CACHE : FSX_REMOTE;
    struct fsx_waiting *spanning = NULL;
    for (struct fsx_waiting *waiting = readers, *next; waiting != NULL; waiting = next) {
        const struct fsx_reader *reader = &waiting->reader;
        next = waiting->next;
        if (fsx_reader_spans(reader)) { /* later: what the others want may be in the hands with which this is done */
            waiting->next = spanning;
            spanning = waiting;
            continue;
        }
        f->ends.answer(f->ends.context, reader, data + (reader->offset - begin), 0);
        FSX_COUNT(lander->hands.counts.origin[origin].reads, 1);
        FSX_COUNT(lander->hands.counts.origin[origin].bytes, reader->length);
        fsx_latency_record(&lander->reads, fsx_now_ns() - reader->start_ns, false);
        origin = FSX_CACHE; /* it was fetched once */
        free(waiting);
    }
    for (struct fsx_waiting *waiting = spanning, *next; waiting != NULL; waiting = next) {
        next = waiting->next;
        try_again(lander, &waiting->reader);
        free(waiting);
    }
}

void fsx_lander_settle(struct fsx_lander *lander, struct fsx_flight *flight, bool keep) {
    struct fsx_fetcher *f = lander->fetcher;
    const struct content content = examine(lander, flight, keep);
    pthread_mutex_lock(&f->lock);
    fsx_flight_leave_table(f, flight); /* after it was put into the cache: who comes later finds it there */
    struct fsx_waiting *readers = fsx_flight_take_readers(flight);
    const bool failed = judge(f, flight, &content);
    pthread_mutex_unlock(&f->lock);
    if (content.data != NULL && flight->got >= 0) {
        FSX_COUNT(lander->hands.counts.origin[FSX_REMOTE].fetches, 1);
        FSX_COUNT(lander->hands.counts.origin[FSX_REMOTE].fetched_bytes, flight->chunk.stored_bytes);
    }
    if (content.data != NULL)
        answer_readers(lander, flight, content.data, readers);
    else
        fsx_flight_finish_readers(f, readers, 0);
    if (failed)
        f->ends.tell(f->ends.context);
    if (content.cached != NULL)
        fsx_cache_release(fsx_content_cache(f->content), content.cached);
    pthread_mutex_lock(&f->lock);
    const bool over = flight->returned;
    flight->state = FSX_KEPT;
    pthread_mutex_unlock(&f->lock);
    if (over)
        fsx_flight_free(flight);
}

bool fsx_flight_wants_part(const struct fsx_flight *flight) {
    for (const struct fsx_waiting *waiting = flight->readers; waiting != NULL; waiting = waiting->next)
        if (waiting->reader.length < flight->chunk.content_bytes || fsx_reader_spans(&waiting->reader))
            return true;
    return false;
}

/* Small, not compressed, and the only chunk of its file, so that no reader needs another one. (Those who come while it is
 * settled, and want a part of it, are answered, too.) Where cores are many, the landers do it while the next answers
 * arrive, unless there are none: then waking one would only cost time. */
bool fsx_flight_is_light(const struct fsx_fetcher *f, const struct fsx_flight *flight, int got) {
    return got >= 0 && (size_t)got == flight->chunk.stored_bytes && flight->returned && !flight->large &&
           !flight->chunk.lz4 && f->index->count[flight->entry] <= 1 && (f->few_cores || f->owned == 1);
}

void *fsx_lander_main(void *argument) {
    struct fsx_lander *lander = argument;
    struct fsx_fetcher *f = lander->fetcher;
    pthread_mutex_lock(&f->lock);
    for (;;) {
        while (f->landed.first == NULL && !f->ending && !(f->place_free && f->line.first != NULL))
            pthread_cond_wait(&f->arrived, &f->lock);
        struct fsx_flight *flight = f->landed.first;
        if (flight != NULL)
            fsx_flight_unlink(&f->landed, &f->landed.first);
        if (flight == NULL && f->ending)
            break;
        if (flight != NULL && flight->got != FSX_IN_CACHE) {
            fsx_flight_leave_window(f, flight);
            fsx_flight_leave_large(f, flight);
        }
        const bool keep = flight != NULL && fsx_flight_wants_part(flight);
        struct fsx_flight *ready = fsx_fetcher_take_ready(f);
        pthread_mutex_unlock(&f->lock);
        fsx_fetcher_launch(f, ready);
        if (flight != NULL)
            fsx_lander_settle(lander, flight, keep);
        pthread_mutex_lock(&f->lock);
    }
    pthread_mutex_unlock(&f->lock);
    atomic_fetch_add(&f->done, 1);
    return NULL;
}
