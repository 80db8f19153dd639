/* crossings.c: see crossings.h. */
#include "crossings.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

/* Crossings under way. The kernel sends no more background reads than max_background; readers in the foreground add one
 * per process. When all are taken, workers wait: readers are slowed down, nothing is lost. */
#define SLOTS 4096u
#define NO_SLOT UINT32_MAX

/* Interrupts that came before their request was in the line; those of requests that never get there are overwritten. */
#define EARLY_INTERRUPTS 64u

enum slot_state { SLOT_FREE, SLOT_WAITING, SLOT_TAKEN, SLOT_ABANDONED };

struct slot {
    struct fsx_asked asked;
    uint32_t turn; /* counts uses, so that an old token means nothing */
    uint32_t next; /* in the list that it is in */
    enum slot_state state;
};

struct fsx_crossings {
    int wake;
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t slot_free;
    bool ending;
    uint32_t free_slots;                  /* a list */
    uint32_t first_waiting, last_waiting; /* a line */
    uint64_t early[EARLY_INTERRUPTS];     /* unique numbers, which are never used again; 0 for none */
    uint32_t next_early;
    struct slot slots[SLOTS];
};

struct fsx_crossings *fsx_crossings_new(int wake) {
    struct fsx_crossings *crossings = calloc(1, sizeof *crossings);
    if (crossings == NULL)
        return NULL;
    crossings->wake = wake;
    pthread_mutex_init(&crossings->lock, NULL);
    pthread_cond_init(&crossings->slot_free, NULL);
    for (uint32_t i = 0; i < SLOTS; i++)
        crossings->slots[i].next = i + 1 < SLOTS ? i + 1 : NO_SLOT;
    crossings->first_waiting = crossings->last_waiting = NO_SLOT;
    return crossings;
}

void fsx_crossings_free(struct fsx_crossings *crossings) {
    if (crossings == NULL)
        return;
    for (uint32_t i = 0; i < SLOTS; i++)
        free(crossings->slots[i].asked.parked);
    pthread_cond_destroy(&crossings->slot_free);
    pthread_mutex_destroy(&crossings->lock);
    free(crossings);
}

void fsx_crossings_end(struct fsx_crossings *crossings) {
    pthread_mutex_lock(&crossings->lock);
    crossings->ending = true;
    pthread_cond_broadcast(&crossings->slot_free);
    pthread_mutex_unlock(&crossings->lock);
}

/* With the lock held: was this request interrupted before it got here? */
static bool interrupted_early(struct fsx_crossings *crossings, uint64_t unique) {
    for (uint32_t i = 0; i < EARLY_INTERRUPTS; i++)
        if (crossings->early[i] == unique && unique != 0) {
            crossings->early[i] = 0;
            return true;
        }
    return false;
}

int fsx_crossings_put(struct fsx_crossings *crossings, const struct fsx_asked *asked) {
    pthread_mutex_lock(&crossings->lock);
    while (crossings->free_slots == NO_SLOT && !crossings->ending)
        pthread_cond_wait(&crossings->slot_free, &crossings->lock);
    const uint32_t number = crossings->free_slots;
    const bool first = crossings->first_waiting == NO_SLOT;
    const bool gone = interrupted_early(crossings, asked->unique);
    if (number != NO_SLOT && !gone) {
        struct slot *slot = &crossings->slots[number];
        crossings->free_slots = slot->next;
        *slot = (struct slot){.asked = *asked, .turn = slot->turn + 1, .next = NO_SLOT, .state = SLOT_WAITING};
        if (first)
            crossings->first_waiting = number;
        else
            crossings->slots[crossings->last_waiting].next = number;
        crossings->last_waiting = number;
    }
    pthread_mutex_unlock(&crossings->lock);
    if (gone || number == NO_SLOT)
        return gone ? EINTR : EIO;
    const uint64_t one = 1;
    while (first && write(crossings->wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
    return 0;
}

/* With the lock held. */
static void free_slot(struct fsx_crossings *crossings, uint32_t number) {
    struct slot *slot = &crossings->slots[number];
    slot->state = SLOT_FREE;
    slot->asked.parked = NULL;
    slot->next = crossings->free_slots;
    crossings->free_slots = number;
    pthread_cond_signal(&crossings->slot_free);
}

size_t fsx_crossings_take(struct fsx_crossings *crossings, struct fsx_crossing *taken, size_t most) {
    size_t count = 0;
    pthread_mutex_lock(&crossings->lock);
    while (count < most && crossings->first_waiting != NO_SLOT) {
        const uint32_t number = crossings->first_waiting;
        struct slot *slot = &crossings->slots[number];
        const struct fsx_asked *asked = &slot->asked;
        crossings->first_waiting = slot->next;
        if (slot->state == SLOT_WAITING)
            slot->state = SLOT_TAKEN; /* one that was abandoned is answered all the same, to be free again */
        taken[count++] = (struct fsx_crossing){.token = (uint64_t)slot->turn << 32 | number, .kind = asked->kind,
                                               .number = asked->number, .offset = asked->offset,
                                               .length = asked->length};
    }
    pthread_mutex_unlock(&crossings->lock);
    return count;
}

bool fsx_crossings_finish(struct fsx_crossings *crossings, uint64_t token, struct fsx_asked *asked) {
    const uint32_t number = (uint32_t)token;
    if (number >= SLOTS)
        return false;
    pthread_mutex_lock(&crossings->lock);
    struct slot *slot = &crossings->slots[number];
    const enum slot_state state = slot->state;
    const bool valid = slot->turn == (uint32_t)(token >> 32) && state >= SLOT_TAKEN;
    *asked = slot->asked;
    if (valid)
        free_slot(crossings, number);
    pthread_mutex_unlock(&crossings->lock);
    if (valid && state == SLOT_ABANDONED)
        free(asked->parked);
    return valid && state == SLOT_TAKEN;
}

bool fsx_crossings_interrupt(struct fsx_crossings *crossings, uint64_t unique, uint32_t *worker) {
    if (unique == 0)
        return false;
    bool found = false;
    pthread_mutex_lock(&crossings->lock);
    for (uint32_t i = 0; i < SLOTS && !found; i++) {
        struct slot *slot = &crossings->slots[i];
        found = slot->asked.unique == unique && (slot->state == SLOT_WAITING || slot->state == SLOT_TAKEN);
        if (found) {
            slot->state = SLOT_ABANDONED;
            *worker = slot->asked.worker;
        }
    }
    if (!found)
        crossings->early[crossings->next_early++ % EARLY_INTERRUPTS] = unique;
    pthread_mutex_unlock(&crossings->lock);
    return found;
}
