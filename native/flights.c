/* flights.c: see flights.h. */
#include "flights.h"

#include <stdlib.h>

static struct fsx_flight **bucket_of(struct fsx_fetcher *f, uint32_t entry, uint32_t number) {
    return &f->buckets[((((uint64_t)entry << 32 | number) * 0x9E3779B97F4A7C15u) >> 56) % FSX_FLIGHT_BUCKETS];
}

struct fsx_flight *fsx_flight_find(struct fsx_fetcher *f, uint32_t entry, uint32_t number) {
    struct fsx_flight *flight = *bucket_of(f, entry, number);
    while (flight != NULL && (flight->entry != entry || flight->number != number))
        flight = flight->chain;
    return flight;
}

void fsx_flight_enter_table(struct fsx_fetcher *f, struct fsx_flight *flight) {
    struct fsx_flight **bucket = bucket_of(f, flight->entry, flight->number);
    flight->chain = *bucket;
    *bucket = flight;
}

void fsx_flight_leave_table(struct fsx_fetcher *f, struct fsx_flight *flight) {
    struct fsx_flight **link = bucket_of(f, flight->entry, flight->number);
    while (*link != NULL && *link != flight)
        link = &(*link)->chain;
    if (*link == flight)
        *link = flight->chain;
}

void fsx_flight_enter_time(struct fsx_fetcher *f, struct fsx_flight *flight) {
    flight->older = f->newest;
    *(f->newest != NULL ? &f->newest->newer : &f->oldest) = flight;
    f->newest = flight;
    flight->timed = true;
}

void fsx_flight_leave_time(struct fsx_fetcher *f, struct fsx_flight *flight) {
    if (!flight->timed)
        return;
    *(flight->older != NULL ? &flight->older->newer : &f->oldest) = flight->newer;
    *(flight->newer != NULL ? &flight->newer->older : &f->newest) = flight->older;
    flight->older = flight->newer = NULL;
    flight->timed = false;
}

void fsx_flight_append(struct fsx_flight_queue *queue, struct fsx_flight *flight) {
    flight->next = NULL;
    *queue->last = flight;
    queue->last = &flight->next;
}

struct fsx_flight *fsx_flight_unlink(struct fsx_flight_queue *queue, struct fsx_flight **link) {
    struct fsx_flight *flight = *link;
    *link = flight->next;
    if (queue->last == &flight->next)
        queue->last = link;
    flight->next = NULL;
    return flight;
}

struct fsx_waiting *fsx_flight_take_readers(struct fsx_flight *flight) {
    struct fsx_waiting *readers = flight->readers;
    flight->readers = NULL;
    flight->last_reader = &flight->readers;
    return readers;
}

void fsx_flight_leave_window(struct fsx_fetcher *f, struct fsx_flight *flight) { f->taken[flight->peer]--; }

void fsx_flight_leave_large(struct fsx_fetcher *f, struct fsx_flight *flight) {
    f->large -= flight->large;
    flight->large = false;
}

void fsx_flight_note(struct fsx_fetcher *f, enum fsx_failure_kind kind, const struct fsx_flight *flight) {
    if (f->failure_count == f->failure_room) {
        const size_t room = 2 * f->failure_room + 16;
        struct fsx_failure *larger = reallocarray(f->failures, room, sizeof *larger);
        if (larger == NULL)
            return; /* Python asks the peer once more, and finds out */
        f->failures = larger;
        f->failure_room = room;
    }
    f->failures[f->failure_count++] = (struct fsx_failure){kind, flight->peer, flight->partition};
}

/* ---- without the lock ------------------------------------------------------------------------------------------ */

void fsx_flight_give_memory(void *fetcher, void *memory, size_t capacity) {
    struct fsx_fetcher *f = fetcher;
    pthread_mutex_lock(&f->pool_lock);
    fsx_pool_give(&f->pool, memory, capacity);
    pthread_mutex_unlock(&f->pool_lock);
}

void fsx_flight_free(struct fsx_flight *flight) {
    if (flight->memory != NULL)
        fsx_flight_give_memory(flight->fetcher, flight->memory, flight->capacity);
    free(flight);
}

void fsx_flight_finish_readers(struct fsx_fetcher *f, struct fsx_waiting *readers, int error) {
    for (struct fsx_waiting *waiting = readers, *next; waiting != NULL; waiting = next) {
        next = waiting->next;
        if (error != 0)
            f->ends.answer(f->ends.context, &waiting->reader, NULL, error);
        else
            f->ends.cross(f->ends.context, &waiting->reader);
        free(waiting);
    }
}
