/* slots.c: see slots.h. */
#include "mpi/slots.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The small tables of the MPI thread. Without memory for a few bytes there is nobody left who could be told. */
void *fsx_grown(void *memory, size_t count, size_t item_bytes) {
    void *result = reallocarray(memory, count, item_bytes);
    if (result == NULL) {
        fputs("fanstore: no memory for requests between nodes\n", stderr);
        abort();
    }
    return result;
}

void *fsx_slot_handle(struct fsx_exchange *x, int slot) { return x->handles + (size_t)slot * x->mpi.handle_bytes; }

static void set_null(struct fsx_exchange *x, int slot) {
    /* A handle of 4 bytes is the lower half: this machine is little-endian, as the format demands. */
    memcpy(fsx_slot_handle(x, slot), &x->mpi.null_request, x->mpi.handle_bytes);
}

void fsx_slots_grow(struct fsx_exchange *x) {
    const int begin = x->slot_count, count = begin == 0 ? 64 : 2 * begin;
    x->handles = fsx_grown(x->handles, (size_t)count, x->mpi.handle_bytes);
    x->slots = fsx_grown(x->slots, (size_t)count, sizeof *x->slots);
    x->free_slots = fsx_grown(x->free_slots, (size_t)count, sizeof *x->free_slots);
    x->indices = fsx_grown(x->indices, (size_t)count, sizeof *x->indices);
    x->statuses = fsx_grown(x->statuses, (size_t)count, x->mpi.status_bytes);
    x->slot_count = count;
    for (int slot = count - 1; slot >= begin; slot--) {
        set_null(x, slot);
        x->slots[slot] = (struct fsx_slot){.kind = FSX_SLOT_EMPTY};
        x->free_slots[x->free_count++] = slot;
    }
}

int fsx_slot_take(struct fsx_exchange *x, struct fsx_slot content) {
    if (x->free_count == 0)
        fsx_slots_grow(x);
    const int slot = x->free_slots[--x->free_count];
    x->slots[slot] = content;
    return slot;
}

struct fsx_slot fsx_slot_free(struct fsx_exchange *x, int slot) {
    const struct fsx_slot content = x->slots[slot];
    x->slots[slot].kind = FSX_SLOT_EMPTY;
    set_null(x, slot);
    x->free_slots[x->free_count++] = slot;
    return content;
}
