/* fetching.c: see fetching.h. */
#include "flights.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Larger chunks are under way at most so many at a time, to all peers together: that bounds the memory of what is under
 * way (LARGE_FETCHES of fanstore/core/remote.py, which has its own). */
#define LARGE_BYTES (256u << 10)
#define LARGE_FETCHES 16u
#define LARGE_FETCHES_LEAST 2u
/* With so many or fewer, what the exchange's thread hands over waits for a core. Measured with two, files of 107 KiB
 * through the mount: one under way 9,100 instead of 7,000 files/s, 16 under way 14,200 instead of 11,200 (medians of three
 * runs in turns, others at work). More could not be tried. */
#define FEW_CORES 4
/* Memory of answers that is kept for the next ones: a window of the longest. */
#define KEEP_BYTES (64u << 20)

/* ---- what the exchange says ------------------------------------------------------------------------------------- */

/* With the lock held, from now on in the hands of a lander. */
static void arrive(struct fsx_fetcher *f, struct fsx_flight *flight, int got) {
    fsx_flight_leave_time(f, flight);
    flight->state = FSX_LANDED;
    flight->got = got;
    fsx_flight_append(&f->landed, flight);
    pthread_cond_signal(&f->arrived);
}

/* With the lock held: a place is free. */
static void look_at_line(struct fsx_fetcher *f) {
    f->place_free = true;
    if (f->line.first != NULL)
        pthread_cond_signal(&f->arrived);
}

/* The lock is held, and let go of: the answer is given on this thread, that of the exchange. */
static void settle_here(struct fsx_fetcher *f, struct fsx_flight *flight, int got) {
    fsx_flight_leave_time(f, flight);
    flight->state = FSX_LANDED;
    flight->got = got;
    fsx_flight_leave_window(f, flight);
    struct fsx_flight *ready = fsx_fetcher_take_ready(f);
    pthread_mutex_unlock(&f->lock);
    fsx_fetcher_launch(f, ready);
    fsx_lander_settle(&f->here, flight, false);
    pthread_mutex_lock(&f->lock);
    f->owned--;
    pthread_mutex_unlock(&f->lock);
}

/* The lock is held, and let go of: all others, for a lander, or for nobody. */
static void hand_over(struct fsx_fetcher *f, struct fsx_flight *flight, int got) {
    const bool unwanted = flight->state == FSX_GIVEN_UP || f->ending, returned = flight->returned;
    if (!unwanted) {
        f->owned -= returned;
        arrive(f, flight, got);
    } else { /* nobody waits: those who did were answered at the end, or when it was given up */
        if (flight->state == FSX_GIVEN_UP && got >= 0)
            f->exchange->counters.late_answers++; /* on its own thread */
        fsx_flight_leave_time(f, flight);
        fsx_flight_leave_table(f, flight);
        fsx_flight_leave_large(f, flight);
        if (returned)
            fsx_flight_leave_window(f, flight);
        flight->state = FSX_KEPT;
        look_at_line(f);
    }
    pthread_mutex_unlock(&f->lock);
    if (!unwanted || !returned)
        return;
    fsx_flight_free(flight);
    pthread_mutex_lock(&f->lock);
    f->owned--; /* last: who sees none owned may free the fetcher */
    pthread_mutex_unlock(&f->lock);
}

static void landed(void *owner, int got, bool returned) {
    struct fsx_flight *flight = owner;
    struct fsx_fetcher *f = flight->fetcher;
    pthread_mutex_lock(&f->lock);
    flight->returned = returned;
    flight->landed_ns = fsx_now_ns();
    const bool wanted = flight->state == FSX_FLYING && !f->ending;
    if (!wanted || !fsx_flight_is_light(f, flight, got)) {
        hand_over(f, flight, got);
        return;
    }
    /* Only the exchange's thread gets here: others bring no bytes. Until the end of this, engine and content stay. */
    atomic_store(&f->settling, 1);
    pthread_mutex_unlock(&f->lock);
    const bool right = fsx_lander_check(&f->here, flight);
    pthread_mutex_lock(&f->lock);
    /* Damage is for a lander to report: to cross over may take time. */
    if (right && flight->state == FSX_FLYING && !f->ending && !fsx_flight_wants_part(flight))
        settle_here(f, flight, got);
    else
        hand_over(f, flight, got);
    atomic_store(&f->settling, 0); /* last: who sees that may free the fetcher */
}

static void memory_returned(void *owner) {
    struct fsx_flight *flight = owner;
    struct fsx_fetcher *f = flight->fetcher;
    pthread_mutex_lock(&f->lock);
    const bool over = flight->state == FSX_KEPT;
    flight->returned = true;
    if (!over)
        f->owned--; /* a lander has it in hand, and frees it */
    pthread_mutex_unlock(&f->lock);
    if (!over)
        return;
    fsx_flight_free(flight);
    pthread_mutex_lock(&f->lock);
    f->owned--;
    pthread_mutex_unlock(&f->lock);
}

static const struct fsx_asker ASKER = {.landed = landed, .returned = memory_returned};

/* ---- asking ----------------------------------------------------------------------------------------------------- */

struct fsx_flight *fsx_fetcher_take_ready(struct fsx_fetcher *f) {
    struct fsx_flight *ready = NULL, **last = &ready;
    const uint64_t now_ns = f->line.first != NULL ? fsx_now_ns() : 0;
    f->place_free = false;
    if (f->ending)
        return NULL;
    for (struct fsx_flight **link = &f->line.first; *link != NULL;) {
        struct fsx_flight *flight = *link;
        const bool large = flight->chunk.stored_bytes > LARGE_BYTES;
        if (f->taken[flight->peer] >= FSX_WINDOW || (large && f->large >= f->large_most)) {
            link = &flight->next;
            continue;
        }
        fsx_flight_unlink(&f->line, link); /* *link is the next one now */
        f->taken[flight->peer]++;
        f->large += large;
        f->owned++;
        flight->large = large;
        flight->state = FSX_FLYING;
        fsx_flight_leave_time(f, flight); /* its peer has the whole time, however long it stood in line */
        flight->start_ns = now_ns;
        fsx_flight_enter_time(f, flight);
        *last = flight;
        last = &flight->next;
    }
    return ready;
}

void fsx_fetcher_launch(struct fsx_fetcher *f, struct fsx_flight *ready) {
    for (struct fsx_flight *flight = ready, *next; flight != NULL; flight = next) {
        next = flight->next;
        const struct fsx_stored *chunk = &flight->chunk;
        pthread_mutex_lock(&f->pool_lock);
        void *memory = fsx_pool_take(&f->pool, chunk->stored_bytes, &flight->capacity);
        pthread_mutex_unlock(&f->pool_lock);
        flight->memory = memory;
        void *message = fsx_exchange_fetch_message(flight->partition, chunk->position, (uint32_t)chunk->stored_bytes);
        if (memory == NULL || message == NULL) {
            free(message);
            landed(flight, FSX_NO_MEMORY, true);
            continue;
        }
        flight->asked_ns = fsx_now_ns();
        fsx_exchange_submit(f->exchange, &(struct fsx_question){
            .asker = &ASKER, .owner = flight, .answer = memory, .message = message, .message_bytes = FSX_HEADER_BYTES,
            .answer_bytes = (int)chunk->stored_bytes, .peer = flight->peer});
    }
}

/* With the lock held: whom to ask, as Remote._candidates does; -1 for Python's to decide. */
static int choose(const struct fsx_fetcher *f, uint32_t partition, uint64_t position) {
    const struct fsx_route *route = &f->routes[partition];
    uint32_t alive = 0;
    for (uint32_t i = 0; i < route->count; i++)
        alive += fsx_exchange_is_alive(f->exchange, route->ranks[i]);
    if (alive == 0)
        return -1;
    uint64_t turn = (((position >> 9) * 0x9E3779B1u >> 16) + partition + f->rank) % alive;
    for (uint32_t i = 0; i < route->count; i++)
        if (fsx_exchange_is_alive(f->exchange, route->ranks[i]) && turn-- == 0)
            return route->ranks[i];
    return -1; /* one has died in between */
}

/* With the lock held: a new flight in the table, with its first reader; NULL without memory or a peer to ask. */
static struct fsx_flight *claim(struct fsx_fetcher *f, uint32_t entry, uint32_t number, struct fsx_waiting *waiting) {
    const uint32_t partition = f->index->part[entry];
    const struct fsx_stored chunk = fsx_chunk_of(f->index, entry, number);
    const int peer = choose(f, partition, chunk.position);
    struct fsx_flight *flight = peer < 0 ? NULL : malloc(sizeof *flight);
    if (flight == NULL)
        return NULL;
    *flight = (struct fsx_flight){.fetcher = f, .state = FSX_CLAIMED, .entry = entry, .number = number, .partition = partition,
                              .chunk = chunk, .peer = peer, .readers = waiting, .last_reader = &waiting->next,
                              .start_ns = fsx_now_ns()};
    fsx_flight_enter_table(f, flight);
    return flight;
}

bool fsx_fetcher_fetch(struct fsx_fetcher *f, const struct fsx_reader *reader) {
    const bool second = fsx_reader_spans(reader) && reader->attempt % 2 != 0;
    const uint32_t number = (uint32_t)(reader->offset / FSX_CHUNK_BYTES) + second;
    if (fsx_content_has_file(f->content, f->index->part[reader->entry]))
        return false; /* it is here, but not as it should be */
    struct fsx_waiting *waiting = malloc(sizeof *waiting);
    if (waiting == NULL)
        return false;
    *waiting = (struct fsx_waiting){.reader = *reader};
    pthread_mutex_lock(&f->lock);
    struct fsx_flight *flight = f->ending ? NULL : fsx_flight_find(f, reader->entry, number);
    const bool joined = flight != NULL;
    if (joined) {
        *flight->last_reader = waiting;
        flight->last_reader = &waiting->next;
    } else if (!f->ending) {
        flight = claim(f, reader->entry, number, waiting);
    }
    pthread_mutex_unlock(&f->lock);
    if (joined)
        return true;
    if (flight == NULL) {
        free(waiting);
        return false;
    }
    /* One that was settled since our reader looked into the cache has left it there. */
    struct fsx_cached *cached = fsx_cache_find(fsx_content_cache(f->content), reader->entry, number);
    struct fsx_flight *ready = NULL;
    pthread_mutex_lock(&f->lock);
    struct fsx_waiting *left = NULL;
    if (f->ending) {
        fsx_flight_leave_table(f, flight);
        left = fsx_flight_take_readers(flight);
    } else if (cached != NULL) {
        flight->returned = true;
        flight->cached = cached;
        arrive(f, flight, FSX_IN_CACHE);
    } else {
        flight->state = FSX_IN_LINE;
        fsx_flight_append(&f->line, flight);
        fsx_flight_enter_time(f, flight);
        if (f->clock_sleeps)
            pthread_cond_signal(&f->sooner);
        ready = fsx_fetcher_take_ready(f);
    }
    pthread_mutex_unlock(&f->lock);
    fsx_fetcher_launch(f, ready);
    if (left != NULL) { /* with our own among them */
        if (cached != NULL)
            fsx_cache_release(fsx_content_cache(f->content), cached);
        fsx_flight_finish_readers(f, left, EIO);
        fsx_flight_free(flight);
    }
    return true;
}

/* ---- time ------------------------------------------------------------------------------------------------------- */

/* With the lock held, which is given up meanwhile: the time of a flight is up. If it still stands in line, that is not the
 * fault of its peer: others have the places. */
static void give_up(struct fsx_fetcher *f, struct fsx_flight *flight) {
    const int peer = flight->peer;
    const bool flying = flight->state == FSX_FLYING;
    fsx_flight_leave_time(f, flight);
    fsx_flight_leave_table(f, flight);
    struct fsx_waiting *readers = fsx_flight_take_readers(flight);
    if (flying) {
        fsx_flight_leave_large(f, flight); /* but not its place in the window, before it is answered */
        flight->state = FSX_GIVEN_UP;
        fsx_latency_record(&f->answers, fsx_now_ns() - flight->start_ns, true);
        fsx_flight_note(f, FSX_PEER_SILENT, flight);
        look_at_line(f);
    } else {
        struct fsx_flight **link = &f->line.first;
        while (*link != flight)
            link = &(*link)->next;
        fsx_flight_unlink(&f->line, link);
    }
    pthread_mutex_unlock(&f->lock);
    if (flying)
        fsx_exchange_time_out(f->exchange, peer);
    fsx_flight_finish_readers(f, readers, 0);
    if (flying)
        f->ends.tell(f->ends.context);
    else
        fsx_flight_free(flight);
    pthread_mutex_lock(&f->lock);
}

static void *clock_main(void *argument) {
    struct fsx_fetcher *f = argument;
    pthread_mutex_lock(&f->lock);
    while (!f->ending) {
        struct fsx_flight *oldest = f->oldest;
        if (oldest == NULL) {
            f->clock_sleeps = true;
            pthread_cond_wait(&f->sooner, &f->lock);
            f->clock_sleeps = false;
            continue;
        }
        const uint64_t due_ns = oldest->start_ns + f->limit_ns;
        if (due_ns <= fsx_now_ns()) {
            give_up(f, oldest);
            continue;
        }
        /* Most are answered long before: then it looks once per limit, however many there were. */
        const struct timespec until = {(time_t)(due_ns / 1000000000u), (long)(due_ns % 1000000000u)};
        pthread_cond_timedwait(&f->sooner, &f->lock, &until);
    }
    pthread_mutex_unlock(&f->lock);
    atomic_fetch_add(&f->done, 1);
    return NULL;
}

bool fsx_fetcher_interrupt(struct fsx_fetcher *f, uint64_t unique, uint32_t *worker) {
    struct fsx_waiting *found = NULL;
    pthread_mutex_lock(&f->lock);
    for (struct fsx_flight *flight = f->oldest; flight != NULL && found == NULL; flight = flight->newer)
        for (struct fsx_waiting **link = &flight->readers; *link != NULL && found == NULL; link = &(*link)->next)
            if ((*link)->reader.unique == unique) {
                found = *link;
                *link = found->next;
                if (flight->last_reader == &found->next)
                    flight->last_reader = link;
                break;
            }
    pthread_mutex_unlock(&f->lock);
    if (found == NULL)
        return false;
    *worker = found->reader.worker;
    free(found);
    return true;
}

/* ---- Python ----------------------------------------------------------------------------------------------------- */

bool fsx_fetcher_route(struct fsx_fetcher *f, uint32_t partition, const int *ranks, uint32_t count) {
    int *copy = NULL;
    if (count > 0) {
        copy = malloc(count * sizeof *copy);
        if (copy == NULL)
            return false;
        memcpy(copy, ranks, count * sizeof *copy);
    }
    pthread_mutex_lock(&f->lock);
    int *before = f->routes[partition].ranks;
    f->routes[partition] = (struct fsx_route){count, copy};
    pthread_mutex_unlock(&f->lock);
    free(before);
    return true;
}

size_t fsx_fetcher_take_failures(struct fsx_fetcher *f, struct fsx_failure *failures, size_t most) {
    pthread_mutex_lock(&f->lock);
    const size_t count = f->failure_count < most ? f->failure_count : most;
    if (count > 0) {
        memcpy(failures, f->failures, count * sizeof *failures);
        f->failure_count -= count;
        memmove(f->failures, f->failures + count, f->failure_count * sizeof *failures);
    }
    pthread_mutex_unlock(&f->lock);
    return count;
}

void fsx_fetcher_count(struct fsx_fetcher *f, struct fsx_latency *operations, struct fsx_read_counts *reads) {
    for (uint32_t i = 0; i <= FSX_LANDERS; i++) {
        const struct fsx_lander *lander = i < FSX_LANDERS ? &f->landers[i] : &f->here;
        fsx_latency_add(operations, &lander->reads);
        fsx_read_counts_add(reads, &lander->hands.counts);
    }
}

void fsx_fetcher_count_answers(struct fsx_fetcher *f, struct fsx_latency *answers) {
    pthread_mutex_lock(&f->lock);
    fsx_latency_add(answers, &f->answers);
    pthread_mutex_unlock(&f->lock);
}

struct fsx_peer_counts fsx_fetcher_count_peer(struct fsx_fetcher *f, int peer) {
    pthread_mutex_lock(&f->lock);
    const struct fsx_peer_counts counts = f->counts[peer];
    pthread_mutex_unlock(&f->lock);
    return counts;
}

/* ---- life ------------------------------------------------------------------------------------------------------- */

struct fsx_fetcher *fsx_fetcher_new(struct fsx_exchange *exchange, struct fsx_content *content, uint32_t rank,
                                    uint64_t limit_ns, uint32_t cores) {
    struct fsx_fetcher *f = calloc(1, sizeof *f);
    if (f == NULL)
        return NULL;
    f->exchange = exchange;
    f->content = content;
    f->index = fsx_content_index(content);
    f->rank = rank;
    f->limit_ns = limit_ns;
    f->pool.keep_bytes = KEEP_BYTES;
    f->here.fetcher = f;
    f->few_cores = cores <= FEW_CORES;
    /* Twice as many fit into the cache, or those that land would push out those of which only a part was read so far. */
    struct fsx_cache_counts cache;
    fsx_cache_count(fsx_content_cache(content), &cache);
    const uint64_t half = cache.capacity_bytes / 2 / FSX_CHUNK_BYTES;
    f->large_most = half > LARGE_FETCHES ? LARGE_FETCHES : half < LARGE_FETCHES_LEAST ? LARGE_FETCHES_LEAST : (uint32_t)half;
    f->line.last = &f->line.first;
    f->landed.last = &f->landed.first;
    pthread_mutex_init(&f->pool_lock, NULL);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->arrived, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&f->sooner, &monotonic);
    pthread_condattr_destroy(&monotonic);
    f->routes = calloc((size_t)f->index->partitions + 1, sizeof *f->routes);
    f->taken = calloc((size_t)exchange->size, sizeof *f->taken);
    f->counts = calloc((size_t)exchange->size, sizeof *f->counts);
    bool made = f->routes != NULL && f->taken != NULL && f->counts != NULL;
    for (uint32_t i = 0; i < FSX_LANDERS; i++) {
        f->landers[i].fetcher = f;
        made = fsx_hands_make(&f->landers[i].hands) && made;
    }
    if (!made) {
        fsx_fetcher_free(f);
        return NULL;
    }
    return f;
}

int fsx_fetcher_start(struct fsx_fetcher *f, const struct fsx_fetch_ends *ends) {
    f->ends = *ends;
    int error = 0;
    for (; error == 0 && f->started < FSX_LANDERS; f->started += error == 0)
        error = pthread_create(&f->landers[f->started].thread, NULL, fsx_lander_main, &f->landers[f->started]);
    if (error == 0)
        error = pthread_create(&f->clock, NULL, clock_main, f);
    f->started += error == 0;
    return error;
}

void fsx_fetcher_end(struct fsx_fetcher *f) {
    struct fsx_waiting *readers = NULL, **last = &readers;
    pthread_mutex_lock(&f->lock);
    f->ending = true;
    for (struct fsx_flight *flight = f->oldest; flight != NULL; flight = flight->newer)
        for (*last = fsx_flight_take_readers(flight); *last != NULL;)
            last = &(*last)->next;
    pthread_cond_broadcast(&f->arrived);
    pthread_cond_broadcast(&f->sooner);
    pthread_mutex_unlock(&f->lock);
    fsx_flight_finish_readers(f, readers, EIO);
}

uint32_t fsx_fetcher_running(struct fsx_fetcher *f) {
    return f->started - atomic_load(&f->done) + atomic_load(&f->settling);
}

void fsx_fetcher_join(struct fsx_fetcher *f) {
    for (uint32_t i = 0; i < f->started; i++)
        pthread_join(i < FSX_LANDERS ? f->landers[i].thread : f->clock, NULL);
    f->started = 0;
    atomic_store(&f->done, 0);
}

static void free_queue(struct fsx_flight_queue *queue) {
    while (queue->first != NULL)
        fsx_flight_free(fsx_flight_unlink(queue, &queue->first));
}

void fsx_fetcher_free(struct fsx_fetcher *f) {
    if (f == NULL)
        return;
    pthread_mutex_lock(&f->lock);
    f->ending = true; /* what lands from now on is thrown away by whoever brings it */
    const bool owned = f->owned > 0;
    pthread_mutex_unlock(&f->lock);
    for (uint32_t i = 0; i < FSX_LANDERS; i++)
        fsx_hands_free(&f->landers[i].hands);
    if (owned)
        return;
    free_queue(&f->line);
    free_queue(&f->landed);
    for (uint32_t i = 0; f->routes != NULL && i < f->index->partitions; i++)
        free(f->routes[i].ranks);
    fsx_pool_empty(&f->pool);
    void *memory[] = {f->routes, f->taken, f->counts, f->failures};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        free(memory[i]);
    pthread_cond_destroy(&f->sooner);
    pthread_cond_destroy(&f->arrived);
    pthread_mutex_destroy(&f->lock);
    pthread_mutex_destroy(&f->pool_lock);
    free(f);
}
