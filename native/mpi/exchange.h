/* exchange.h: requests and answers between daemons, without the GIL (docs/protocol.md).
 *
 * What there is much of happens here: questions leave, answers arrive in their memory, FETCH is answered out of a mapped
 * partition whose pages are in memory. Everything else is an event for Python (fanstore/transport/mpi.py), which runs on
 * the same thread. Why: a thread that needs the GIL for each message waits for it up to 5 ms while the trio thread has
 * work, and the trio thread has work while messages come.
 *
 * No MPI header is needed, and no library is linked: the functions are found at run time in the library that mpi4py has
 * loaded; handles are copied and never looked into.
 *
 * The trio thread calls submit, take_completions and interrupt, the threads of the broker (chunks/peers.c) submit; the MPI thread
 * all other functions. `lock` guards the two queues between them (submitted, completions) and `broken`; it is held for a few
 * assignments.
 *
 * Tokens are references of the caller: `owner` is who asked, `memory` keeps the bytes alive that MPI reads or writes.
 * Each comes back exactly once: both with take_completions, or a memory whose request ends otherwise with take_released. Who
 * asks without Python has an asker instead, which is called.
 */
#ifndef FANSTORE_MPI_EXCHANGE_H
#define FANSTORE_MPI_EXCHANGE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FSX_WINDOW 16 /* questions to one peer under way: of Python's (transport/window.py), and as many of the engine's */
/* Answers of one peer on the link: while so many bytes are to come, in at least two of them, further questions are held
 * here, and leave when an answer has come. MPI may receive all that it was asked for within one call, and nobody can look at
 * the first before the last is there: copying and checking took turns. Measured with 16 files under way, relative to raw
 * MPI: 512 KiB 0.66, 0.78, 0.80, 0.62 with 1, 2, 4, 8 MiB. */
#define FSX_ASKED_BYTES ((size_t)4 << 20)
#define FSX_ASKED_LEAST 2
#define FSX_SENDS 32  /* replies being sent at once; further requests wait in line */
/* Bytes of partitions that are sent before their pages leave the page table. */
#define FSX_MAPPED_BYTES ((size_t)32 << 20)
#define FSX_TAG_MESSAGE 1
#define FSX_TAG_REPLY_FIRST 16
#define FSX_HEADER_BYTES 24
#define FSX_KIND_FETCH 1
#define FSX_FAILED (-1) /* instead of a number of bytes: cancelled, or the peer is dead */

/* The functions of the C binding, which is the same in every MPI library but for the size of handles and statuses. A
 * handle passed by value is a pointer, or an int in the lower half of a register. */
struct fsx_mpi {
    int (*irecv)(void *buffer, int count, uintptr_t type, int source, int tag, uintptr_t communicator, void *request);
    int (*isend)(const void *buffer, int count, uintptr_t type, int target, int tag, uintptr_t communicator,
                 void *request);
    int (*test)(void *request, int *flag, void *status);
    int (*testsome)(int count, void *requests, int *completed, int *indices, void *statuses);
    int (*cancel)(void *request);
    int (*get_count)(const void *status, uintptr_t type, int *count);
    int (*test_cancelled)(const void *status, int *flag);
    uintptr_t byte, communicator, null_request;
    uint32_t handle_bytes, status_bytes, error_offset; /* of MPI_ERROR in a status */
};

/* Who asks without Python. Called on the MPI thread, or from submit, without a lock; must not block. */
struct fsx_asker {
    /* The answer is here: bytes or FSX_FAILED. Without `returned` MPI may still write to its memory. Once. */
    void (*completed)(void *owner, int got, bool returned);
    /* Afterwards, if ever: memory that was not returned. */
    void (*returned)(void *owner);
};

struct fsx_question {
    const struct fsx_asker *asker; /* NULL: Python asks */
    void *owner, *memory; /* tokens; with an asker, the owner keeps the memory */
    void *answer;         /* where the answer arrives: answer_bytes in memory */
    void *message;        /* header and text; malloc'd, freed here */
    int message_bytes, answer_bytes, peer;
};

struct fsx_completion {
    void *owner, *memory; /* memory is NULL if MPI may still write to it: it comes back with take_released, if ever */
    int peer, got;        /* bytes, or FSX_FAILED */
};

enum fsx_event_kind {
    FSX_HEARD, /* a message for Python; value: its bytes. Nothing is received from the peer until fsx_exchange_listen */
    FSX_LOST   /* MPI cannot reach the peer; value: MPI's error code, or FSX_FAILED */
};

struct fsx_event {
    enum fsx_event_kind kind;
    int peer, value;
};

struct fsx_counters {
    uint64_t fetches, fetched_bytes, served, served_bytes, late_answers;
    uint64_t timeouts; /* atomic: of the engine's questions, any thread */
};

/* Who asks has tags of its own, so that nobody has to wait for the other's places. */
enum fsx_side { FSX_SIDE_PYTHON, FSX_SIDE_ENGINE, FSX_SIDES };

#define FSX_HELD (FSX_SIDES * FSX_WINDOW) /* whoever submits has a place in the window of its side */

struct fsx_peer {
    uint8_t *buffer;                 /* its next message */
    struct fsx_question *held;       /* a ring of FSX_HELD: submitted, and not asked yet */
    int held_first, held_count;
    int asked;          /* answers that are awaited */
    size_t asked_bytes; /* that they may have */
    int tags[FSX_SIDES][FSX_WINDOW]; /* that no answer is awaited with */
    int tag_count[FSX_SIDES];
    uint8_t gone;   /* atomic: dead, or has said BYE: nothing is sent any more */
    uint8_t silent; /* atomic: set at a time-out by who waited, unset here by any sign of life */
};

struct fsx_slot;
struct fsx_outgoing;

struct fsx_map {
    const uint8_t *start;
    size_t bytes;
    void *memory; /* token, kept to the end */
};

struct fsx_exchange {
    struct fsx_mpi mpi;
    int size, buffer_bytes;
    struct fsx_peer *peers; /* by rank; our own is never used */
    int wake, notify;       /* eventfds: end a sleep of the MPI thread; tell the trio thread of answers */
    bool serving, closing;  /* FETCH is answered; BYE was said, so that nothing may be sent any more */
    struct fsx_counters counters;
    uint64_t last_traffic_ns;
    uint64_t patience_ns; /* polling without pause after traffic that has paid of late */

    /* requests, by slot; an empty one has the null handle, which MPI passes over */
    char *handles;
    struct fsx_slot *slots;
    int *free_slots, *indices;
    char *statuses;
    int slot_count, free_count, abandoned;
    int sending; /* replies */

    struct fsx_outgoing *waiting; /* a ring */
    int waiting_first, waiting_count, waiting_room;
    struct fsx_map *maps; /* by partition */
    uint32_t map_count;
    size_t mapped_bytes; /* sent since pages were last unmapped */
    struct fsx_event *events;
    int event_count, event_room;
    void **released;
    int released_count, released_room;

    pthread_mutex_t lock;
    struct fsx_question *submitted; /* at most FSX_WINDOW for each peer and side: whoever submits has a place there */
    struct fsx_completion *completions;      /* likewise, of Python's */
    int submitted_count, completion_count;
    bool broken;
    uint8_t interrupted, sleeping, trio_waits; /* atomic */
};

/* False if there is no memory. `mpi`, size and buffer_bytes are set before. */
bool fsx_exchange_open(struct fsx_exchange *x);
/* Only if nothing is under way (fsx_exchange_is_idle); tokens are not touched. */
void fsx_exchange_free(struct fsx_exchange *x);
bool fsx_exchange_is_idle(const struct fsx_exchange *x);

/* --- any thread --- */

/* The asker has a place in the window of the peer. */
void fsx_exchange_submit(struct fsx_exchange *x, const struct fsx_question *question);
/* A message that asks for bytes of a partition, malloc'd; NULL without memory. */
void *fsx_exchange_fetch_message(uint32_t partition, uint64_t offset, uint32_t length);
/* Is there no reason not to ask this peer? */
bool fsx_exchange_is_alive(const struct fsx_exchange *x, int peer);
void fsx_exchange_set_silent(struct fsx_exchange *x, int peer);
/* As set_silent, and counted. */
void fsx_exchange_time_out(struct fsx_exchange *x, int peer);

/* --- trio thread --- */

/* Take what has completed, at most `room`. If nothing has, the eventfd `notify` is written as soon as something does. */
int fsx_exchange_take_completions(struct fsx_exchange *x, struct fsx_completion *out, int room);
/* Let a run or sleep of the MPI thread return soon. Any thread. */
void fsx_exchange_interrupt(struct fsx_exchange *x);

/* --- MPI thread --- */

/* Let MPI work until there is an event, an interrupt, or no traffic for `spin_ns`, or for less where it comes too seldom for
 * that to pay. True: there was no traffic. */
bool fsx_exchange_run(struct fsx_exchange *x, uint64_t spin_ns);
/* Wait for a submission or an interrupt, at most so long. */
void fsx_exchange_sleep(struct fsx_exchange *x, uint64_t ns);
/* Something has happened that traffic may follow. */
void fsx_exchange_touch(struct fsx_exchange *x);
uint64_t fsx_exchange_idle_ns(const struct fsx_exchange *x);
void fsx_exchange_clear_interrupt(struct fsx_exchange *x);

/* Receive the next message of a peer. */
void fsx_exchange_listen(struct fsx_exchange *x, int peer);
/* Send a message (malloc'd, freed here); `farewell`: also to a peer that has gone. */
void fsx_exchange_send(struct fsx_exchange *x, int peer, void *message, int bytes, bool farewell);
/* Answer a question of a peer. */
void fsx_exchange_reply(struct fsx_exchange *x, int peer, int tag, const void *data, int bytes, void *memory);
/* Answer FETCH of this partition out of this memory from now on. False if there is no memory for the table. */
bool fsx_exchange_add_map(struct fsx_exchange *x, uint32_t partition, const void *start, size_t bytes, void *memory);
/* The peer is dead: whoever waits for it learns it; the memory stays with MPI until it lets go, if ever. */
void fsx_exchange_lose(struct fsx_exchange *x, int peer);
/* The peer has said BYE: cancel what it has not answered. */
void fsx_exchange_part(struct fsx_exchange *x, int peer);
/* MPI cannot be used any more: everybody who waits, and who comes later, learns it. */
void fsx_exchange_break(struct fsx_exchange *x);
/* Requests under way, without those that were given up. */
int fsx_exchange_pending(const struct fsx_exchange *x);

#endif
