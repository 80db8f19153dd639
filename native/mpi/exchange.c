/* exchange.c: see exchange.h. */
#include "mpi/exchange.h"

#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/nanoseconds.h"
#include "base/pages.h"
#include "mpi/slots.h"

/* Polls between two looks at the clock, and between two offers of the core to others: some 5 µs. An idle daemon that
 * wakes up needs two: in the first MPI looks for what has come, the second reports it. */
#define POLLS_PER_LOOK 16
#define POLLS_IDLE 2
/* At least so long it is polled without pause after traffic: what several parts of one answer are apart. */
#define LEAST_PATIENCE_NS 20000u
/* With traffic and nothing to report, run returns so often: its caller has limits of time to look after. */
#define LONGEST_RUN_NS 20000000u

struct fsx_outgoing {
    int peer, tag, bytes;
    const void *data;
    void *memory;
};

struct header { /* docs/protocol.md */
    uint32_t kind, tag, partition, length;
    uint64_t offset;
};
_Static_assert(sizeof(struct header) == FSX_HEADER_BYTES, "as in wire.py");

/* ---- what happens ---------------------------------------------------------------------------------------------- */

static void add_event(struct fsx_exchange *x, enum fsx_event_kind kind, int peer, int value) {
    if (x->event_count == x->event_room) {
        x->event_room = 2 * x->event_room + 16;
        x->events = fsx_grown(x->events, (size_t)x->event_room, sizeof *x->events);
    }
    x->events[x->event_count++] = (struct fsx_event){kind, peer, value};
}

static void release(struct fsx_exchange *x, void *memory) {
    if (memory == NULL)
        return;
    if (x->released_count == x->released_room) {
        x->released_room = 2 * x->released_room + 16;
        x->released = fsx_grown(x->released, (size_t)x->released_room, sizeof *x->released);
    }
    x->released[x->released_count++] = memory;
}

/* Give an answer to who asked; `completion.memory` is NULL if MPI keeps it. */
static void complete(struct fsx_exchange *x, const struct fsx_asker *asker, bool returned, struct fsx_completion completion) {
    if (asker != NULL) {
        asker->completed(completion.owner, completion.got, returned);
        return;
    }
    pthread_mutex_lock(&x->lock);
    x->completions[x->completion_count++] = completion;
    pthread_mutex_unlock(&x->lock);
}

static enum fsx_side side_of(const struct fsx_asker *asker) {
    return asker == NULL ? FSX_SIDE_PYTHON : FSX_SIDE_ENGINE;
}

static void set_flag(uint8_t *flag, uint8_t value) { __atomic_store_n(flag, value, __ATOMIC_RELAXED); }

static void write_eventfd(int fd) {
    const uint64_t one = 1;
    /* The only failure is a counter that is full, and then the reader is awake. */
    if (write(fd, &one, sizeof one) < 0 && errno != EAGAIN)
        perror("fanstore: eventfd");
}

static void read_eventfd(int fd) {
    uint64_t value;
    if (read(fd, &value, sizeof value) < 0 && errno != EAGAIN)
        perror("fanstore: eventfd");
}

static void tell_trio(struct fsx_exchange *x) {
    if (__atomic_load_n(&x->completion_count, __ATOMIC_ACQUIRE) > 0 &&
        __atomic_exchange_n(&x->trio_waits, 0, __ATOMIC_SEQ_CST) != 0)
        write_eventfd(x->notify);
}

/* ---- replies -------------------------------------------------------------------------------------------------- */

/* Pages of partitions that were sent leave the page table, in which they would count as memory of this process: they stay in
 * the page cache. One that is being sent just now is mapped again. */
static void unmap_sent(struct fsx_exchange *x, int bytes) {
    x->mapped_bytes += (size_t)bytes;
    if (x->mapped_bytes < FSX_MAPPED_BYTES)
        return;
    x->mapped_bytes = 0;
    for (uint32_t i = 0; i < x->map_count; i++)
        if (x->maps[i].start != NULL)
            fsx_pages_unmap(x->maps[i].start, x->maps[i].bytes);
}

static void send_reply(struct fsx_exchange *x, const struct fsx_outgoing *reply) {
    if (x->peers[reply->peer].gone) {
        release(x, reply->memory);
        return;
    }
    unmap_sent(x, reply->bytes);
    const int slot =
        fsx_slot_take(x, (struct fsx_slot){.kind = FSX_SLOT_REPLY, .peer = reply->peer, .memory = reply->memory});
    const int code = x->mpi.isend(reply->data, reply->bytes, x->mpi.byte, reply->peer, reply->tag, x->mpi.communicator,
                                  fsx_slot_handle(x, slot));
    if (code != 0) {
        release(x, fsx_slot_free(x, slot).memory);
        add_event(x, FSX_LOST, reply->peer, code);
        return;
    }
    x->sending++;
}

void fsx_exchange_reply(struct fsx_exchange *x, int peer, int tag, const void *data, int bytes, void *memory) {
    const struct fsx_outgoing reply = {peer, tag, bytes, data, memory};
    if (x->closing) { /* the asker knows */
        release(x, memory);
    } else if (x->sending < FSX_SENDS) {
        send_reply(x, &reply);
    } else {
        if (x->waiting_count == x->waiting_room) {
            struct fsx_outgoing *larger = fsx_grown(NULL, 2 * (size_t)x->waiting_room + 16, sizeof *larger);
            for (int i = 0; i < x->waiting_count; i++)
                larger[i] = x->waiting[(x->waiting_first + i) % x->waiting_room];
            free(x->waiting);
            x->waiting = larger;
            x->waiting_first = 0;
            x->waiting_room = 2 * x->waiting_room + 16;
        }
        x->waiting[(x->waiting_first + x->waiting_count++) % x->waiting_room] = reply;
    }
}

static void send_waiting(struct fsx_exchange *x) {
    while (x->waiting_count > 0 && x->sending < FSX_SENDS) {
        const struct fsx_outgoing reply = x->waiting[x->waiting_first];
        x->waiting_first = (x->waiting_first + 1) % x->waiting_room;
        x->waiting_count--;
        send_reply(x, &reply);
    }
}

/* Answer a FETCH whose bytes are in memory; false: Python shall look into it. */
static bool serve(struct fsx_exchange *x, int peer, int bytes) {
    struct header header;
    if (!x->serving || bytes != FSX_HEADER_BYTES)
        return false;
    memcpy(&header, x->peers[peer].buffer, sizeof header);
    const uint32_t tag = le32toh(header.tag), partition = le32toh(header.partition), length = le32toh(header.length);
    const uint64_t offset = le64toh(header.offset);
    if (le32toh(header.kind) != FSX_KIND_FETCH || partition >= x->map_count || length > INT32_MAX || length == 0 ||
        tag > INT32_MAX)
        return false;
    const struct fsx_map *map = &x->maps[partition];
    if (map->start == NULL || length > map->bytes || offset > map->bytes - length)
        return false;
    if (!fsx_pages_resident(map->start + offset, length))
        return false;
    x->counters.served++;
    x->counters.served_bytes += length;
    fsx_exchange_reply(x, peer, (int)tag, map->start + offset, (int)length, NULL);
    return true;
}

bool fsx_exchange_add_map(struct fsx_exchange *x, uint32_t partition, const void *start, size_t bytes, void *memory) {
    if (partition >= x->map_count) {
        const uint32_t count = partition + partition / 2 + 16;
        struct fsx_map *maps = reallocarray(x->maps, count, sizeof *maps);
        if (maps == NULL)
            return false;
        memset(maps + x->map_count, 0, (count - x->map_count) * sizeof *maps);
        x->maps = maps;
        x->map_count = count;
    }
    x->maps[partition] = (struct fsx_map){start, bytes, memory};
    return true;
}

/* ---- messages ------------------------------------------------------------------------------------------------- */

/* A message is here; take it and those behind it, up to one that is for Python. */
static void hear(struct fsx_exchange *x, int peer, int bytes) {
    while (bytes != FSX_FAILED) {
        set_flag(&x->peers[peer].silent, 0);
        if (!serve(x, peer, bytes)) {
            add_event(x, FSX_HEARD, peer, bytes);
            return;
        }
        const int slot = fsx_slot_take(x, (struct fsx_slot){.kind = FSX_SLOT_LISTEN, .peer = peer});
        int code = x->mpi.irecv(x->peers[peer].buffer, x->buffer_bytes, x->mpi.byte, peer, FSX_TAG_MESSAGE,
                                x->mpi.communicator, fsx_slot_handle(x, slot));
        int here = 0;
        if (code == 0)
            code = x->mpi.test(fsx_slot_handle(x, slot), &here, x->statuses);
        if (code == 0 && !here)
            return;
        bytes = FSX_FAILED;
        if (code == 0 && x->mpi.get_count(x->statuses, x->mpi.byte, &bytes) != 0)
            bytes = FSX_FAILED;
        fsx_slot_free(x, slot);
    }
    add_event(x, FSX_LOST, peer, FSX_FAILED);
}

void fsx_exchange_listen(struct fsx_exchange *x, int peer) {
    const int slot = fsx_slot_take(x, (struct fsx_slot){.kind = FSX_SLOT_LISTEN, .peer = peer});
    const int code = x->mpi.irecv(x->peers[peer].buffer, x->buffer_bytes, x->mpi.byte, peer, FSX_TAG_MESSAGE,
                                  x->mpi.communicator, fsx_slot_handle(x, slot));
    if (code != 0) {
        fsx_slot_free(x, slot);
        add_event(x, FSX_LOST, peer, code);
    }
}

void fsx_exchange_send(struct fsx_exchange *x, int peer, void *message, int bytes, bool farewell) {
    if (x->peers[peer].gone && !farewell) {
        free(message);
        return;
    }
    const int slot = fsx_slot_take(x, (struct fsx_slot){.kind = FSX_SLOT_MESSAGE, .peer = peer, .memory = message});
    int sent = 0;
    int code = x->mpi.isend(message, bytes, x->mpi.byte, peer, FSX_TAG_MESSAGE, x->mpi.communicator,
                            fsx_slot_handle(x, slot));
    if (code == 0) /* a small message is on its way at once */
        code = x->mpi.test(fsx_slot_handle(x, slot), &sent, x->statuses);
    if (code != 0 || sent)
        free(fsx_slot_free(x, slot).memory);
    if (code != 0)
        add_event(x, FSX_LOST, peer, code);
}

static void ask(struct fsx_exchange *x, const struct fsx_question *question) {
    struct fsx_peer *peer = &x->peers[question->peer];
    const struct fsx_completion failed = {question->owner, question->memory, question->peer, FSX_FAILED};
    if (peer->gone || x->closing) {
        free(question->message);
        complete(x, question->asker, true, failed);
        return;
    }
    /* There is a tag: a question has a place in the window, and keeps it as long as its tag. */
    const enum fsx_side side = side_of(question->asker);
    const int tag = peer->tags[side][--peer->tag_count[side]];
    const int slot = fsx_slot_take(x, (struct fsx_slot){.kind = FSX_SLOT_ANSWER, .peer = question->peer, .tag = tag,
                                                    .asker = question->asker, .owner = question->owner,
                                                    .memory = question->memory, .bytes = question->answer_bytes});
    const int code = x->mpi.irecv(question->answer, question->answer_bytes, x->mpi.byte, question->peer, tag,
                                  x->mpi.communicator, fsx_slot_handle(x, slot));
    if (code != 0) {
        fsx_slot_free(x, slot);
        free(question->message);
        complete(x, question->asker, true, failed);
        add_event(x, FSX_LOST, question->peer, code);
        return;
    }
    peer->asked_bytes += (size_t)question->answer_bytes;
    peer->asked++;
    const uint32_t tag_field = htole32((uint32_t)tag);
    memcpy((char *)question->message + offsetof(struct header, tag), &tag_field, sizeof tag_field);
    fsx_exchange_send(x, question->peer, question->message, question->message_bytes, false);
}

/* Ask what is held, as far as the answers under way leave room; what a peer that is gone would be asked completes at once. So
 * nothing is held while no answer is awaited. */
static void ask_held(struct fsx_exchange *x, struct fsx_peer *peer) {
    while (peer->held_count > 0 &&
           (peer->asked_bytes < FSX_ASKED_BYTES || peer->asked < FSX_ASKED_LEAST || peer->gone)) {
        const struct fsx_question question = peer->held[peer->held_first];
        peer->held_first = (peer->held_first + 1) % FSX_HELD;
        peer->held_count--;
        ask(x, &question);
    }
}

static bool start_submitted(struct fsx_exchange *x) {
    if (__atomic_load_n(&x->submitted_count, __ATOMIC_ACQUIRE) == 0)
        return false;
    struct fsx_question questions[FSX_WINDOW];
    for (;;) {
        pthread_mutex_lock(&x->lock);
        const int count = x->submitted_count < FSX_WINDOW ? x->submitted_count : FSX_WINDOW;
        memcpy(questions, x->submitted, (size_t)count * sizeof *questions);
        x->submitted_count -= count;
        memmove(x->submitted, x->submitted + count, (size_t)x->submitted_count * sizeof *questions);
        pthread_mutex_unlock(&x->lock);
        if (count == 0)
            return true;
        for (int i = 0; i < count; i++) {
            struct fsx_peer *peer = &x->peers[questions[i].peer];
            peer->held[(peer->held_first + peer->held_count++) % FSX_HELD] = questions[i];
            ask_held(x, peer);
        }
    }
}

/* ---- completion ----------------------------------------------------------------------------------------------- */

static void dispatch(struct fsx_exchange *x, int slot_number, int got) {
    const struct fsx_slot slot = fsx_slot_free(x, slot_number);
    struct fsx_peer *peer = &x->peers[slot.peer];
    switch (slot.kind) {
    case FSX_SLOT_EMPTY:
        break;
    case FSX_SLOT_LISTEN:
        hear(x, slot.peer, got);
        break;
    case FSX_SLOT_ANSWER:
        peer->tags[side_of(slot.asker)][peer->tag_count[side_of(slot.asker)]++] = slot.tag;
        if (got == FSX_FAILED) {
            add_event(x, FSX_LOST, slot.peer, FSX_FAILED);
        } else {
            set_flag(&peer->silent, 0);
            x->counters.fetches++;
            x->counters.fetched_bytes += (uint64_t)got;
        }
        peer->asked_bytes -= (size_t)slot.bytes;
        peer->asked--;
        ask_held(x, peer); /* at once: the next answer comes while this one is looked at */
        complete(x, slot.asker, true, (struct fsx_completion){slot.owner, slot.memory, slot.peer, got});
        break;
    case FSX_SLOT_ABANDONED:
        x->abandoned--;
        if (slot.asker != NULL)
            slot.asker->returned(slot.owner);
        release(x, slot.memory);
        break;
    case FSX_SLOT_MESSAGE:
        free(slot.memory);
        break;
    case FSX_SLOT_REPLY:
        x->sending--;
        release(x, slot.memory);
        break;
    }
}

/* Bytes received by a request that has completed; FSX_FAILED if it was cancelled or its peer is dead. */
static int received(struct fsx_exchange *x, const char *status, bool errors_set) {
    int error = 0, cancelled = 0, bytes = 0;
    if (errors_set) /* only then is the field set */
        memcpy(&error, status + x->mpi.error_offset, sizeof error);
    if (error != 0 || x->mpi.test_cancelled(status, &cancelled) != 0 || cancelled ||
        x->mpi.get_count(status, x->mpi.byte, &bytes) != 0)
        return FSX_FAILED;
    return bytes;
}

static bool progress(struct fsx_exchange *x) {
    int completed = 0, got[64];
    const int code = x->mpi.testsome(x->slot_count, x->handles, &completed, x->indices, x->statuses);
    if (completed <= 0) /* MPI_UNDEFINED: there was nothing to test */
        return false;
    /* What is dispatched reuses slots, statuses and, when it grows them, indices: taken out first, some at a time. */
    int slots[64];
    const int all = completed;
    for (int begin = 0; begin < all; begin += 64) {
        const int count = all - begin < 64 ? all - begin : 64;
        for (int i = 0; i < count; i++) {
            slots[i] = x->indices[begin + i];
            const enum fsx_slot_kind kind = x->slots[slots[i]].kind;
            const bool matters = kind == FSX_SLOT_LISTEN || kind == FSX_SLOT_ANSWER;
            got[i] = matters ? received(x, x->statuses + (size_t)(begin + i) * x->mpi.status_bytes, code != 0) : 0;
        }
        for (int i = 0; i < count; i++)
            dispatch(x, slots[i], got[i]);
    }
    send_waiting(x);
    return true;
}

/* How long to poll without pause after traffic, from how long it took for the next to come. Where links are slow nothing
 * comes within `most_ns`, and to poll for that long after each message would cost a core that the job needs. */
static void learn(struct fsx_exchange *x, uint64_t gap_ns, uint64_t most_ns) {
    if (gap_ns > most_ns)
        x->patience_ns = x->patience_ns / 2 > LEAST_PATIENCE_NS ? x->patience_ns / 2 : LEAST_PATIENCE_NS;
    else if (gap_ns > x->patience_ns / 2)
        x->patience_ns = x->patience_ns * 2 < most_ns ? x->patience_ns * 2 : most_ns;
}

bool fsx_exchange_run(struct fsx_exchange *x, uint64_t spin_ns) {
    const uint64_t begin_ns = fsx_now_ns();
    const int polls = begin_ns - x->last_traffic_ns > spin_ns ? POLLS_IDLE : POLLS_PER_LOOK;
    if (x->patience_ns == 0)
        x->patience_ns = spin_ns;
    for (;;) {
        for (int turn = 0; turn < polls; turn++) {
            bool traffic = start_submitted(x);
            traffic |= progress(x);
            if (traffic) {
                learn(x, fsx_exchange_idle_ns(x), spin_ns);
                fsx_exchange_touch(x);
                tell_trio(x);
            }
            if (x->event_count > 0 || __atomic_load_n(&x->interrupted, __ATOMIC_SEQ_CST) != 0)
                return false;
        }
        const uint64_t time_ns = fsx_now_ns();
        if (time_ns - x->last_traffic_ns > x->patience_ns)
            return true;
        if (time_ns - begin_ns > LONGEST_RUN_NS)
            return false;
        /* There may be fewer cores than processes that poll: the one that has the answer must get its turn. */
        sched_yield();
    }
}

/* ---- time ----------------------------------------------------------------------------------------------------- */

void fsx_exchange_touch(struct fsx_exchange *x) { x->last_traffic_ns = fsx_now_ns(); }

uint64_t fsx_exchange_idle_ns(const struct fsx_exchange *x) { return fsx_now_ns() - x->last_traffic_ns; }

void fsx_exchange_sleep(struct fsx_exchange *x, uint64_t ns) {
    /* First the flag, then the look: who submits after the look sees the flag. */
    __atomic_store_n(&x->sleeping, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&x->submitted_count, __ATOMIC_SEQ_CST) == 0 &&
        __atomic_load_n(&x->interrupted, __ATOMIC_SEQ_CST) == 0) {
        struct pollfd wake = {.fd = x->wake, .events = POLLIN};
        const struct timespec limit = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
        if (ppoll(&wake, 1, &limit, NULL) > 0)
            read_eventfd(x->wake);
    }
    __atomic_store_n(&x->sleeping, 0, __ATOMIC_SEQ_CST);
}

static void wake_up(struct fsx_exchange *x) {
    if (__atomic_exchange_n(&x->sleeping, 0, __ATOMIC_SEQ_CST) != 0)
        write_eventfd(x->wake);
}

void fsx_exchange_interrupt(struct fsx_exchange *x) {
    __atomic_store_n(&x->interrupted, 1, __ATOMIC_SEQ_CST);
    wake_up(x);
}

void fsx_exchange_clear_interrupt(struct fsx_exchange *x) { __atomic_store_n(&x->interrupted, 0, __ATOMIC_SEQ_CST); }

/* ---- askers --------------------------------------------------------------------------------------------------- */

void fsx_exchange_submit(struct fsx_exchange *x, const struct fsx_question *question) {
    pthread_mutex_lock(&x->lock);
    const bool broken = x->broken;
    if (!broken) {
        x->submitted[x->submitted_count] = *question;
        __atomic_store_n(&x->submitted_count, x->submitted_count + 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&x->lock);
    if (!broken) {
        wake_up(x);
        return;
    }
    free(question->message);
    complete(x, question->asker, true,
         (struct fsx_completion){question->owner, question->memory, question->peer, FSX_FAILED});
    write_eventfd(x->notify);
}

void *fsx_exchange_fetch_message(uint32_t partition, uint64_t offset, uint32_t length) {
    struct header *message = malloc(sizeof *message);
    if (message != NULL) /* the tag is chosen when it leaves */
        *message = (struct header){.kind = htole32(FSX_KIND_FETCH), .partition = htole32(partition),
                                   .length = htole32(length), .offset = htole64(offset)};
    return message;
}

bool fsx_exchange_is_alive(const struct fsx_exchange *x, int peer) {
    return __atomic_load_n(&x->peers[peer].gone, __ATOMIC_RELAXED) == 0 &&
           __atomic_load_n(&x->peers[peer].silent, __ATOMIC_RELAXED) == 0;
}

void fsx_exchange_set_silent(struct fsx_exchange *x, int peer) { set_flag(&x->peers[peer].silent, 1); }

void fsx_exchange_time_out(struct fsx_exchange *x, int peer) {
    __atomic_fetch_add(&x->counters.timeouts, 1, __ATOMIC_RELAXED);
    fsx_exchange_set_silent(x, peer);
}

static int take(struct fsx_exchange *x, struct fsx_completion *out, int room) {
    pthread_mutex_lock(&x->lock);
    const int count = x->completion_count < room ? x->completion_count : room;
    memcpy(out, x->completions, (size_t)count * sizeof *out);
    x->completion_count -= count;
    memmove(x->completions, x->completions + count, (size_t)x->completion_count * sizeof *out);
    pthread_mutex_unlock(&x->lock);
    return count;
}

int fsx_exchange_take_completions(struct fsx_exchange *x, struct fsx_completion *out, int room) {
    int count = take(x, out, room);
    if (count == 0) {
        read_eventfd(x->notify); /* what was announced was taken before */
        __atomic_store_n(&x->trio_waits, 1, __ATOMIC_SEQ_CST);
        count = take(x, out, room); /* whatever completes from now on sees the flag */
    }
    return count;
}

/* ---- loss and end --------------------------------------------------------------------------------------------- */

void fsx_exchange_lose(struct fsx_exchange *x, int peer) {
    set_flag(&x->peers[peer].gone, 1);
    for (int slot = 0; slot < x->slot_count; slot++) {
        struct fsx_slot *content = &x->slots[slot];
        if (content->kind != FSX_SLOT_ANSWER || content->peer != peer)
            continue;
        content->kind = FSX_SLOT_ABANDONED;
        complete(x, content->asker, false, (struct fsx_completion){content->owner, NULL, peer, FSX_FAILED});
        x->abandoned++;
        x->mpi.cancel(fsx_slot_handle(x, slot)); /* an error here: the library has found out itself */
    }
    ask_held(x, &x->peers[peer]);
    fsx_exchange_touch(x);
    tell_trio(x);
}

void fsx_exchange_part(struct fsx_exchange *x, int peer) {
    set_flag(&x->peers[peer].gone, 1);
    for (int slot = 0; slot < x->slot_count; slot++)
        if (x->slots[slot].kind == FSX_SLOT_ANSWER && x->slots[slot].peer == peer)
            x->mpi.cancel(fsx_slot_handle(x, slot));
    ask_held(x, &x->peers[peer]);
    tell_trio(x);
}

void fsx_exchange_break(struct fsx_exchange *x) {
    for (int peer = 0; peer < x->size; peer++)
        fsx_exchange_lose(x, peer);
    pthread_mutex_lock(&x->lock);
    x->broken = true; /* from now on nothing is submitted */
    const int count = x->submitted_count;
    __atomic_store_n(&x->submitted_count, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&x->lock);
    for (int i = 0; i < count; i++) {
        const struct fsx_question *question = &x->submitted[i];
        free(question->message);
        complete(x, question->asker, true,
             (struct fsx_completion){question->owner, question->memory, question->peer, FSX_FAILED});
    }
    write_eventfd(x->notify);
}

int fsx_exchange_pending(const struct fsx_exchange *x) { return x->slot_count - x->free_count - x->abandoned; }

bool fsx_exchange_is_idle(const struct fsx_exchange *x) { return x->slot_count == x->free_count; }

bool fsx_exchange_open(struct fsx_exchange *x) {
    const size_t questions = (size_t)x->size * FSX_WINDOW;
    pthread_mutex_init(&x->lock, NULL);
    x->peers = calloc((size_t)x->size, sizeof *x->peers);
    x->submitted = calloc(FSX_SIDES * questions, sizeof *x->submitted);
    x->completions = calloc(questions, sizeof *x->completions);
    if (x->peers == NULL || x->submitted == NULL || x->completions == NULL)
        return false;
    for (int peer = 0; peer < x->size; peer++) {
        x->peers[peer].buffer = malloc((size_t)x->buffer_bytes);
        x->peers[peer].held = calloc(FSX_HELD, sizeof *x->peers[peer].held);
        if (x->peers[peer].buffer == NULL || x->peers[peer].held == NULL)
            return false;
        for (int side = 0; side < FSX_SIDES; side++)
            for (int i = 0; i < FSX_WINDOW; i++)
                x->peers[peer].tags[side][x->peers[peer].tag_count[side]++] = FSX_TAG_REPLY_FIRST + side * FSX_WINDOW + i;
    }
    fsx_slots_grow(x);
    return true;
}

void fsx_exchange_free(struct fsx_exchange *x) {
    for (int peer = 0; x->peers != NULL && peer < x->size; peer++) {
        free(x->peers[peer].buffer);
        free(x->peers[peer].held);
    }
    void *memory[] = {x->peers,   x->submitted, x->completions, x->handles, x->slots,    x->free_slots, x->indices,
                      x->statuses, x->waiting,  x->maps,   x->events,  x->released};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        free(memory[i]);
    pthread_mutex_destroy(&x->lock);
}
