/* slots.h: the requests that MPI has under way, by slot.
 *
 * Owns the table in struct fsx_exchange (handles, slots, free_slots, indices, statuses) and what each request is for; what
 * happens when one completes is exchange.c's, which alone uses this, on the MPI thread.
 */
#ifndef FANSTORE_MPI_SLOTS_H
#define FANSTORE_MPI_SLOTS_H

#include "mpi/exchange.h"

enum fsx_slot_kind {
    FSX_SLOT_EMPTY,
    FSX_SLOT_LISTEN,
    FSX_SLOT_ANSWER,
    FSX_SLOT_ABANDONED, /* the answer of a peer that is dead */
    FSX_SLOT_MESSAGE,
    FSX_SLOT_REPLY
};

struct fsx_slot {
    enum fsx_slot_kind kind;
    int peer, tag;
    const struct fsx_asker *asker; /* ANSWER, ABANDONED: NULL for Python */
    void *owner;                   /* ANSWER, ABANDONED: token */
    int bytes;                     /* ANSWER: that it may have */
    void *memory;                  /* ANSWER, ABANDONED, REPLY: token or NULL; MESSAGE: to be freed */
};

/* A free slot, with this content; its handle is null until MPI has set it. The table may have moved. */
int fsx_slot_take(struct fsx_exchange *x, struct fsx_slot content);
/* The request is over: what it was. */
struct fsx_slot fsx_slot_free(struct fsx_exchange *x, int slot);
/* Where its MPI_Request is, until the next fsx_slot_take. */
void *fsx_slot_handle(struct fsx_exchange *x, int slot);
/* Twice as many slots; at the beginning the first ones. */
void fsx_slots_grow(struct fsx_exchange *x);

/* A larger table of the MPI thread, as reallocarray(3); never NULL. */
void *fsx_grown(void *memory, size_t count, size_t item_bytes);

#endif
