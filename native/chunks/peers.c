/* peers.c: see peers.h. */
#include "chunks/peers.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/nanoseconds.h"

/* Bytes of an answer that is NOT_YET (fanstore/transport/peers.py): Python asks again. */
#define NOT_YET_BYTES 1
/* Instead of a number of bytes, beside FSX_FAILED: the fault of nobody. */
#define NO_MEMORY (-2)

enum state {
    IN_LINE,  /* waits for a place in the window */
    ASKED,    /* with the exchange */
    GIVEN_UP, /* with the exchange, and nobody waits */
    KEPT      /* done with, but MPI may still write to the block */
};

struct ask {
    struct fsx_peers *peers;
    enum state state;
    int peer;
    uint32_t partition, bytes;
    uint64_t position;
    uint64_t start_ns; /* since when its time runs */
    struct fsx_block block;
    void *owner;
    bool timed;
    struct ask *older, *newer; /* by time, while it is IN_LINE or ASKED */
    struct ask *next;          /* in the line */
};

struct route {
    uint32_t count;
    int *ranks;
};

struct fsx_peers {
    struct fsx_exchange *exchange;
    struct fsx_slabs *slabs;
    fsx_arrived *arrived;
    void *context;
    uint32_t rank, partitions;
    uint64_t limit_ns;
    pthread_t clock;
    bool started;

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t sooner;
    bool ending, clock_sleeps, clock_ended;
    uint32_t inside; /* calls of the exchange under way */
    uint32_t owned;  /* questions of which the exchange will speak */
    struct route *routes;    /* by partition */
    uint32_t *taken;         /* by rank: places in its window */
    struct fsx_peer_counts *counts;
    struct fsx_latency answers;
    struct ask *oldest, *newest;
    struct ask *line, **line_end;
    struct fsx_failure *failures;
    size_t failure_count, failure_room;
};

/* ---- with the lock held ------------------------------------------------------------------------------------------- */

static void enter_time(struct fsx_peers *p, struct ask *ask) {
    ask->older = p->newest;
    ask->newer = NULL;
    *(p->newest != NULL ? &p->newest->newer : &p->oldest) = ask;
    p->newest = ask;
    ask->timed = true;
}

static void leave_time(struct fsx_peers *p, struct ask *ask) {
    if (!ask->timed)
        return;
    *(ask->older != NULL ? &ask->older->newer : &p->oldest) = ask->newer;
    *(ask->newer != NULL ? &ask->newer->older : &p->newest) = ask->older;
    ask->timed = false;
}

static void note(struct fsx_peers *p, enum fsx_failure_kind kind, int peer, uint32_t partition) {
    if (p->failure_count == p->failure_room) {
        const size_t room = 2 * p->failure_room + 16;
        struct fsx_failure *larger = reallocarray(p->failures, room, sizeof *larger);
        if (larger == NULL)
            return; /* Python asks the peer once more, and finds out */
        p->failures = larger;
        p->failure_room = room;
    }
    p->failures[p->failure_count++] = (struct fsx_failure){kind, peer, partition};
}

/* Those in line for which there is a place now, as a list; they have it. */
static struct ask *take_ready(struct fsx_peers *p) {
    struct ask *ready = NULL, **last = &ready;
    const uint64_t now_ns = p->line != NULL ? fsx_now_ns() : 0;
    for (struct ask **link = &p->line; *link != NULL && !p->ending;) {
        struct ask *ask = *link;
        if (p->taken[ask->peer] >= FSX_WINDOW) {
            link = &ask->next;
            continue;
        }
        *link = ask->next;
        if (p->line_end == &ask->next)
            p->line_end = link;
        p->taken[ask->peer]++;
        p->owned++;
        ask->state = ASKED;
        leave_time(p, ask); /* its peer has the whole time, however long it stood in line */
        ask->start_ns = now_ns;
        enter_time(p, ask);
        ask->next = NULL;
        *last = ask;
        last = &ask->next;
    }
    return ready;
}

/* Whom to ask, as Remote._candidates does; -1 for nobody. */
static int choose(const struct fsx_peers *p, uint32_t partition, uint64_t position) {
    const struct route *route = &p->routes[partition];
    uint32_t alive = 0;
    for (uint32_t i = 0; i < route->count; i++)
        alive += fsx_exchange_is_alive(p->exchange, route->ranks[i]);
    if (alive == 0)
        return -1;
    uint64_t turn = (((position >> 9) * 0x9E3779B1u >> 16) + partition + p->rank) % alive;
    for (uint32_t i = 0; i < route->count; i++)
        if (fsx_exchange_is_alive(p->exchange, route->ranks[i]) && turn-- == 0)
            return route->ranks[i];
    return -1; /* one has died in between */
}

/* ---- asking ------------------------------------------------------------------------------------------------------- */

static void launch(struct fsx_peers *p, struct ask *ready);

static void completed(void *owner, int got, bool returned) {
    struct ask *ask = owner;
    struct fsx_peers *p = ask->peers;
    pthread_mutex_lock(&p->lock);
    leave_time(p, ask);
    const bool wanted = ask->state == ASKED && !p->ending, complete = got >= 0 && (uint32_t)got == ask->bytes;
    const bool failed = !complete && got != NOT_YET_BYTES;
    if (wanted && got != NO_MEMORY) {
        fsx_latency_record(&p->answers, fsx_now_ns() - ask->start_ns, failed);
        if (failed)
            note(p, got >= 0 ? FSX_PEER_REFUSED : FSX_PEER_LOST, ask->peer, ask->partition);
    }
    if (ask->state == GIVEN_UP && got >= 0)
        p->exchange->counters.late_answers++; /* on its own thread */
    if (returned && ask->state == GIVEN_UP)
        fsx_slabs_set_lost(p->slabs, &ask->block, false);
    else if (!returned && ask->state != GIVEN_UP)
        fsx_slabs_set_lost(p->slabs, &ask->block, true);
    p->taken[ask->peer]--;
    p->owned -= returned;
    p->inside++; /* who sees nothing owned and nobody inside may free all of this */
    struct fsx_arrival arrival = {.peer = ask->peer, .complete = complete, .alone = p->owned == 0};
    void *const asker = ask->owner;
    if (returned)
        arrival.block = ask->block;
    else
        ask->state = KEPT;
    struct ask *ready = take_ready(p);
    pthread_mutex_unlock(&p->lock);
    launch(p, ready);
    if (returned)
        free(ask);
    if (wanted)
        p->arrived(p->context, asker, &arrival);
    else
        fsx_slabs_give(p->slabs, &arrival.block);
    pthread_mutex_lock(&p->lock);
    p->inside--;
    pthread_mutex_unlock(&p->lock);
}

/* MPI is done with a block of which nobody has heard since `completed`. */
static void memory_returned(void *owner) {
    struct ask *ask = owner;
    struct fsx_peers *p = ask->peers;
    fsx_slabs_set_lost(p->slabs, &ask->block, false);
    fsx_slabs_give(p->slabs, &ask->block);
    free(ask);
    pthread_mutex_lock(&p->lock);
    p->owned--; /* last: who sees none owned may free all of this */
    pthread_mutex_unlock(&p->lock);
}

static const struct fsx_asker ASKER = {.completed = completed, .returned = memory_returned};

static void launch(struct fsx_peers *p, struct ask *ready) {
    for (struct ask *ask = ready, *next; ask != NULL; ask = next) {
        next = ask->next;
        void *message = fsx_exchange_fetch_message(ask->partition, ask->position, ask->bytes);
        if (message == NULL) {
            completed(ask, NO_MEMORY, true);
            continue;
        }
        fsx_exchange_submit(p->exchange, &(struct fsx_question){
            .asker = &ASKER, .owner = ask, .answer = ask->block.data, .message = message,
            .message_bytes = FSX_HEADER_BYTES, .answer_bytes = (int)ask->bytes, .peer = ask->peer});
    }
}

bool fsx_peers_ask(struct fsx_peers *p, uint32_t partition, uint64_t position, uint32_t bytes, struct fsx_block *block,
                   void *owner) {
    struct ask *ask = malloc(sizeof *ask);
    if (ask == NULL)
        return false;
    pthread_mutex_lock(&p->lock);
    const int peer = p->ending ? -1 : choose(p, partition, position);
    struct ask *ready = NULL;
    if (peer >= 0) {
        *ask = (struct ask){.peers = p, .state = IN_LINE, .peer = peer, .partition = partition, .bytes = bytes,
                            .position = position, .start_ns = fsx_now_ns(), .block = *block, .owner = owner};
        *p->line_end = ask;
        p->line_end = &ask->next;
        enter_time(p, ask);
        if (p->clock_sleeps)
            pthread_cond_signal(&p->sooner);
        ready = take_ready(p);
    }
    pthread_mutex_unlock(&p->lock);
    if (peer < 0) {
        free(ask);
        return false;
    }
    *block = (struct fsx_block){0};
    launch(p, ready);
    return true;
}

/* ---- time --------------------------------------------------------------------------------------------------------- */

/* With the lock held, which is given up meanwhile: the time of a question is up. If it still stands in line, that is not
 * the fault of its peer: others have the places. */
static void give_up(struct fsx_peers *p, struct ask *ask) {
    const int peer = ask->peer;
    const bool asked = ask->state == ASKED;
    struct fsx_arrival arrival = {.peer = peer};
    void *const owner = ask->owner;
    leave_time(p, ask);
    if (asked) { /* its place in the window and its block stay with it until it is answered */
        ask->state = GIVEN_UP;
        fsx_slabs_set_lost(p->slabs, &ask->block, true);
        fsx_latency_record(&p->answers, fsx_now_ns() - ask->start_ns, true);
        note(p, FSX_PEER_SILENT, peer, ask->partition);
    } else {
        struct ask **link = &p->line;
        while (*link != ask)
            link = &(*link)->next;
        *link = ask->next;
        if (p->line_end == &ask->next)
            p->line_end = link;
        arrival.block = ask->block;
        free(ask);
    }
    pthread_mutex_unlock(&p->lock);
    if (asked)
        fsx_exchange_time_out(p->exchange, peer);
    p->arrived(p->context, owner, &arrival);
    pthread_mutex_lock(&p->lock);
}

static void *clock_main(void *argument) {
    struct fsx_peers *p = argument;
    pthread_mutex_lock(&p->lock);
    while (!p->ending) {
        struct ask *oldest = p->oldest;
        if (oldest == NULL) {
            p->clock_sleeps = true;
            pthread_cond_wait(&p->sooner, &p->lock);
            p->clock_sleeps = false;
            continue;
        }
        const uint64_t due_ns = oldest->start_ns + p->limit_ns;
        if (due_ns <= fsx_now_ns()) {
            give_up(p, oldest);
            continue;
        }
        /* Most are answered long before: then it looks once per limit, however many there were. */
        const struct timespec until = {(time_t)(due_ns / 1000000000u), (long)(due_ns % 1000000000u)};
        pthread_cond_timedwait(&p->sooner, &p->lock, &until);
    }
    p->clock_ended = true;
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* ---- Python ------------------------------------------------------------------------------------------------------- */

bool fsx_peers_route(struct fsx_peers *p, uint32_t partition, const int *ranks, uint32_t count) {
    int *copy = NULL;
    if (count > 0) {
        copy = malloc(count * sizeof *copy);
        if (copy == NULL)
            return false;
        memcpy(copy, ranks, count * sizeof *copy);
    }
    pthread_mutex_lock(&p->lock);
    int *before = p->routes[partition].ranks;
    p->routes[partition] = (struct route){count, copy};
    pthread_mutex_unlock(&p->lock);
    free(before);
    return true;
}

void fsx_peers_note_right(struct fsx_peers *p, int peer, uint64_t bytes) {
    pthread_mutex_lock(&p->lock);
    p->counts[peer].fetches++;
    p->counts[peer].fetched_bytes += bytes;
    pthread_mutex_unlock(&p->lock);
}

void fsx_peers_note_damage(struct fsx_peers *p, int peer, uint32_t partition) {
    pthread_mutex_lock(&p->lock);
    note(p, FSX_PEER_DAMAGED, peer, partition);
    pthread_mutex_unlock(&p->lock);
}

size_t fsx_peers_take_failures(struct fsx_peers *p, struct fsx_failure *failures, size_t most) {
    pthread_mutex_lock(&p->lock);
    const size_t count = p->failure_count < most ? p->failure_count : most;
    if (count > 0) {
        memcpy(failures, p->failures, count * sizeof *failures);
        p->failure_count -= count;
        memmove(p->failures, p->failures + count, p->failure_count * sizeof *failures);
    }
    pthread_mutex_unlock(&p->lock);
    return count;
}

struct fsx_peer_counts fsx_peers_count(struct fsx_peers *p, int peer) {
    pthread_mutex_lock(&p->lock);
    const struct fsx_peer_counts counts = p->counts[peer];
    pthread_mutex_unlock(&p->lock);
    return counts;
}

void fsx_peers_count_answers(struct fsx_peers *p, struct fsx_latency *answers) {
    pthread_mutex_lock(&p->lock);
    fsx_latency_add(answers, &p->answers);
    pthread_mutex_unlock(&p->lock);
}

/* ---- life --------------------------------------------------------------------------------------------------------- */

struct fsx_peers *fsx_peers_new(struct fsx_exchange *exchange, struct fsx_slabs *slabs, uint32_t partitions, uint32_t rank,
                                uint64_t limit_ns, fsx_arrived *arrived, void *context) {
    struct fsx_peers *p = calloc(1, sizeof *p);
    if (p == NULL)
        return NULL;
    *p = (struct fsx_peers){.exchange = exchange, .slabs = slabs, .arrived = arrived, .context = context, .rank = rank,
                            .partitions = partitions, .limit_ns = limit_ns};
    p->line_end = &p->line;
    pthread_mutex_init(&p->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&p->sooner, &monotonic);
    pthread_condattr_destroy(&monotonic);
    p->routes = calloc((size_t)partitions + 1, sizeof *p->routes);
    p->taken = calloc((size_t)exchange->size, sizeof *p->taken);
    p->counts = calloc((size_t)exchange->size, sizeof *p->counts);
    if (p->routes == NULL || p->taken == NULL || p->counts == NULL) {
        fsx_peers_free(p);
        return NULL;
    }
    return p;
}

int fsx_peers_start(struct fsx_peers *p) {
    const int error = pthread_create(&p->clock, NULL, clock_main, p);
    p->started = error == 0;
    return error;
}

void fsx_peers_end(struct fsx_peers *p) {
    pthread_mutex_lock(&p->lock);
    p->ending = true;
    pthread_cond_broadcast(&p->sooner);
    pthread_mutex_unlock(&p->lock);
}

uint32_t fsx_peers_running(struct fsx_peers *p) {
    pthread_mutex_lock(&p->lock);
    const uint32_t running = p->inside + (p->started && !p->clock_ended);
    pthread_mutex_unlock(&p->lock);
    return running;
}

bool fsx_peers_free(struct fsx_peers *p) {
    if (p == NULL)
        return true;
    fsx_peers_end(p);
    if (p->started)
        pthread_join(p->clock, NULL);
    p->started = false;
    for (;;) { /* the exchange may be speaking of the last one at this moment */
        pthread_mutex_lock(&p->lock);
        const bool inside = p->inside > 0, owned = p->owned > 0;
        pthread_mutex_unlock(&p->lock);
        if (!inside && owned)
            return false;
        if (!inside)
            break;
        usleep(100);
    }
    for (struct ask *ask = p->line, *next; ask != NULL; ask = next) {
        next = ask->next;
        fsx_slabs_give(p->slabs, &ask->block);
        free(ask);
    }
    for (uint32_t i = 0; p->routes != NULL && i < p->partitions; i++)
        free(p->routes[i].ranks);
    void *memory[] = {p->routes, p->taken, p->counts, p->failures};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        free(memory[i]);
    pthread_cond_destroy(&p->sooner);
    pthread_mutex_destroy(&p->lock);
    free(p);
    return true;
}
