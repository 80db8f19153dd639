/* flights.h: what fetching.c and landing.c share: the fetcher as it is inside, and its lists of chunks under way.
 *
 * A chunk under way is a flight: in the table by its key until it is settled or given up, so that all who want it join
 * it; in the list by time while it waits for a place or for its answer; in the line for a place, or among the landed.
 * All functions here are called with the fetcher's lock held, unless they say otherwise.
 */
#ifndef FANSTORE_FLIGHTS_H
#define FANSTORE_FLIGHTS_H

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "chunk.h"
#include "nanoseconds.h"
#include "fetching.h"
#include "pool.h"

#define FSX_FLIGHT_BUCKETS 256u

/* Instead of a number of bytes, beside FSX_FAILED. */
#define FSX_NO_MEMORY (-2)
#define FSX_IN_CACHE (-3)

enum fsx_flight_state {
    FSX_CLAIMED,  /* somebody is about to ask */
    FSX_IN_LINE,  /* waits for a place in the window */
    FSX_FLYING,   /* with the exchange */
    FSX_GIVEN_UP, /* with the exchange, and nobody waits */
    FSX_LANDED,   /* the answer is here, or there will be none */
    FSX_KEPT      /* done with, but MPI may still write to the memory */
};

struct fsx_waiting {
    struct fsx_reader reader;
    struct fsx_waiting *next;
};

struct fsx_flight {
    struct fsx_fetcher *fetcher;
    enum fsx_flight_state state;
    uint32_t entry, number, partition;
    struct fsx_stored chunk;
    int peer, got;
    bool returned; /* MPI is done with the memory */
    bool large;    /* it has one of the places for large ones */
    bool timed;    /* it is in the list by time */
    bool intact;   /* the answer was compared with its checksum */
    uint64_t start_ns, asked_ns, landed_ns;
    void *memory;
    size_t capacity;
    struct fsx_cached *cached; /* FSX_IN_CACHE: where it is */
    struct fsx_waiting *readers, **last_reader;
    struct fsx_flight *chain;         /* in its bucket */
    struct fsx_flight *older, *newer; /* by time */
    struct fsx_flight *next;          /* in the line, or among the landed */
};

struct fsx_flight_queue {
    struct fsx_flight *first, **last;
};

struct fsx_route {
    uint32_t count;
    int *ranks;
};

/* A thread that answers. That of the exchange is one of them, and has no hands but to count with. */
struct fsx_lander {
    struct fsx_fetcher *fetcher;
    pthread_t thread;
    struct fsx_hands hands;
    struct fsx_latency reads;
};

struct fsx_fetcher {
    struct fsx_exchange *exchange;
    struct fsx_content *content;
    const struct fsx_index *index;
    struct fsx_fetch_ends ends;
    uint32_t rank;
    uint32_t large_most; /* large ones under way */
    uint64_t limit_ns;
    bool few_cores;         /* the exchange's thread settles all that it can: no core is free to do it meanwhile */
    struct fsx_lander landers[FSX_LANDERS], here; /* `here`: the exchange's thread */
    pthread_t clock;
    uint32_t started;       /* threads: first the landers, then the clock */
    _Atomic(uint32_t) done; /* of these */
    _Atomic(uint32_t) settling; /* by the exchange's thread, right now: 0 or 1 */

    pthread_mutex_t pool_lock;
    struct fsx_pool pool;

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t arrived, sooner;
    bool ending;
    bool clock_sleeps;        /* for as long as nothing is under way */
    bool place_free;          /* since the line was last looked at */
    struct fsx_route *routes; /* by partition */
    uint32_t *taken;          /* by rank: places in its window */
    struct fsx_peer_counts *counts;
    struct fsx_latency answers;
    uint32_t large;
    uint32_t owned; /* flights of which the exchange will speak */
    struct fsx_flight *buckets[FSX_FLIGHT_BUCKETS];
    struct fsx_flight *oldest, *newest;
    struct fsx_flight_queue line, landed;
    struct fsx_failure *failures;
    size_t failure_count, failure_room;
};

/* The table. To leave it twice does no harm. */
struct fsx_flight *fsx_flight_find(struct fsx_fetcher *f, uint32_t entry, uint32_t number);
void fsx_flight_enter_table(struct fsx_fetcher *f, struct fsx_flight *flight);
void fsx_flight_leave_table(struct fsx_fetcher *f, struct fsx_flight *flight);

/* The list by time, likewise. */
void fsx_flight_enter_time(struct fsx_fetcher *f, struct fsx_flight *flight);
void fsx_flight_leave_time(struct fsx_fetcher *f, struct fsx_flight *flight);

void fsx_flight_append(struct fsx_flight_queue *queue, struct fsx_flight *flight);
/* Take out the one to which `*link` points. */
struct fsx_flight *fsx_flight_unlink(struct fsx_flight_queue *queue, struct fsx_flight **link);

/* Does a reader need a second chunk? */
static inline bool fsx_reader_spans(const struct fsx_reader *reader) {
    return reader->offset % FSX_CHUNK_BYTES + reader->length > FSX_CHUNK_BYTES;
}

/* All who wait for it are the caller's. */
struct fsx_waiting *fsx_flight_take_readers(struct fsx_flight *flight);

/* Places in the window of its peer, and among the large ones. */
void fsx_flight_leave_window(struct fsx_fetcher *f, struct fsx_flight *flight);
void fsx_flight_leave_large(struct fsx_fetcher *f, struct fsx_flight *flight);

/* Something for Python to know. */
void fsx_flight_note(struct fsx_fetcher *f, enum fsx_failure_kind kind, const struct fsx_flight *flight);

/* --- without the lock --- */

/* Memory of an answer goes back to the pool; a leaf: it may be called with the cache's lock held. */
void fsx_flight_give_memory(void *fetcher, void *memory, size_t capacity);
/* Nobody refers to it, and MPI does not write to its memory. */
void fsx_flight_free(struct fsx_flight *flight);
/* With an error: answered; without: Python shall do it. Frees them. */
void fsx_flight_finish_readers(struct fsx_fetcher *f, struct fsx_waiting *readers, int error);

/* --- fetching.c, for landing.c --- */

/* With the lock held: those in line for which there is a place now, as a list; they have it. */
struct fsx_flight *fsx_fetcher_take_ready(struct fsx_fetcher *f);
/* Without it: ask for these. */
void fsx_fetcher_launch(struct fsx_fetcher *f, struct fsx_flight *ready);

/* --- landing.c, for fetching.c --- */

/* What a lander does until the end; its argument is a struct fsx_lander. */
void *fsx_lander_main(void *argument);
/* With the lock held: is this answer settled in a moment, without waiting for anybody, and is it better done at once? */
bool fsx_flight_is_light(const struct fsx_fetcher *f, const struct fsx_flight *flight, int got);
/* With the lock held: does anybody want only a part of it? The rest will be wanted soon. */
bool fsx_flight_wants_part(const struct fsx_flight *flight);
/* Without it: compare an answer that is all here with its checksum, if that is wanted. Are these the bytes? */
bool fsx_lander_check(struct fsx_lander *lander, struct fsx_flight *flight);
/* Without it: answer all who wait for a flight that has landed, or let them cross over; it is gone then. `keep`: put it into
 * the cache. */
void fsx_lander_settle(struct fsx_lander *lander, struct fsx_flight *flight, bool keep);

#endif
