/* upcalls.c: see upcalls.h. */
#include "fuse/upcalls.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

/* Upcalls under way. The kernel sends no more background reads than max_background; readers in the foreground add one
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

struct fsx_upcalls {
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

struct fsx_upcalls *fsx_upcalls_new(int wake) {
    struct fsx_upcalls *upcalls = calloc(1, sizeof *upcalls);
    if (upcalls == NULL)
        return NULL;
    upcalls->wake = wake;
    pthread_mutex_init(&upcalls->lock, NULL);
    pthread_cond_init(&upcalls->slot_free, NULL);
    for (uint32_t i = 0; i < SLOTS; i++)
        upcalls->slots[i].next = i + 1 < SLOTS ? i + 1 : NO_SLOT;
    upcalls->first_waiting = upcalls->last_waiting = NO_SLOT;
    return upcalls;
}

void fsx_upcalls_free(struct fsx_upcalls *upcalls) {
    if (upcalls == NULL)
        return;
    for (uint32_t i = 0; i < SLOTS; i++)
        free(upcalls->slots[i].asked.parked);
    pthread_cond_destroy(&upcalls->slot_free);
    pthread_mutex_destroy(&upcalls->lock);
    free(upcalls);
}

void fsx_upcalls_end(struct fsx_upcalls *upcalls) {
    pthread_mutex_lock(&upcalls->lock);
    upcalls->ending = true;
    pthread_cond_broadcast(&upcalls->slot_free);
    pthread_mutex_unlock(&upcalls->lock);
}

/* With the lock held: was this request interrupted before it got here? */
static bool interrupted_early(struct fsx_upcalls *upcalls, uint64_t unique) {
    for (uint32_t i = 0; i < EARLY_INTERRUPTS; i++)
        if (upcalls->early[i] == unique && unique != 0) {
            upcalls->early[i] = 0;
            return true;
        }
    return false;
}

int fsx_upcalls_put(struct fsx_upcalls *upcalls, const struct fsx_asked *asked) {
    pthread_mutex_lock(&upcalls->lock);
    while (upcalls->free_slots == NO_SLOT && !upcalls->ending)
        pthread_cond_wait(&upcalls->slot_free, &upcalls->lock);
    const uint32_t number = upcalls->free_slots;
    const bool first = upcalls->first_waiting == NO_SLOT;
    const bool gone = interrupted_early(upcalls, asked->unique);
    if (number != NO_SLOT && !gone) {
        struct slot *slot = &upcalls->slots[number];
        upcalls->free_slots = slot->next;
        *slot = (struct slot){.asked = *asked, .turn = slot->turn + 1, .next = NO_SLOT, .state = SLOT_WAITING};
        if (first)
            upcalls->first_waiting = number;
        else
            upcalls->slots[upcalls->last_waiting].next = number;
        upcalls->last_waiting = number;
    }
    pthread_mutex_unlock(&upcalls->lock);
    if (gone || number == NO_SLOT)
        return gone ? EINTR : EIO;
    const uint64_t one = 1;
    while (first && write(upcalls->wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
    return 0;
}

/* With the lock held. */
static void free_slot(struct fsx_upcalls *upcalls, uint32_t number) {
    struct slot *slot = &upcalls->slots[number];
    slot->state = SLOT_FREE;
    slot->asked.parked = NULL;
    slot->next = upcalls->free_slots;
    upcalls->free_slots = number;
    pthread_cond_signal(&upcalls->slot_free);
}

size_t fsx_upcalls_take(struct fsx_upcalls *upcalls, struct fsx_upcall *taken, size_t most) {
    size_t count = 0;
    pthread_mutex_lock(&upcalls->lock);
    while (count < most && upcalls->first_waiting != NO_SLOT) {
        const uint32_t number = upcalls->first_waiting;
        struct slot *slot = &upcalls->slots[number];
        const struct fsx_asked *asked = &slot->asked;
        upcalls->first_waiting = slot->next;
        if (slot->state == SLOT_WAITING)
            slot->state = SLOT_TAKEN; /* one that was abandoned is answered all the same, to be free again */
        taken[count++] = (struct fsx_upcall){.token = (uint64_t)slot->turn << 32 | number, .kind = asked->kind,
                                               .number = asked->number, .offset = asked->offset,
                                               .length = asked->length};
    }
    pthread_mutex_unlock(&upcalls->lock);
    return count;
}

bool fsx_upcalls_finish(struct fsx_upcalls *upcalls, uint64_t token, struct fsx_asked *asked) {
    const uint32_t number = (uint32_t)token;
    if (number >= SLOTS)
        return false;
    pthread_mutex_lock(&upcalls->lock);
    struct slot *slot = &upcalls->slots[number];
    const enum slot_state state = slot->state;
    const bool valid = slot->turn == (uint32_t)(token >> 32) && state >= SLOT_TAKEN;
    *asked = slot->asked;
    if (valid)
        free_slot(upcalls, number);
    pthread_mutex_unlock(&upcalls->lock);
    if (valid && state == SLOT_ABANDONED)
        free(asked->parked);
    return valid && state == SLOT_TAKEN;
}

bool fsx_upcalls_interrupt(struct fsx_upcalls *upcalls, uint64_t unique, uint32_t *worker) {
    if (unique == 0)
        return false;
    bool found = false;
    pthread_mutex_lock(&upcalls->lock);
    for (uint32_t i = 0; i < SLOTS && !found; i++) {
        struct slot *slot = &upcalls->slots[i];
        found = slot->asked.unique == unique && (slot->state == SLOT_WAITING || slot->state == SLOT_TAKEN);
        if (found) {
            slot->state = SLOT_ABANDONED;
            *worker = slot->asked.worker;
        }
    }
    if (!found)
        upcalls->early[upcalls->next_early++ % EARLY_INTERRUPTS] = unique;
    pthread_mutex_unlock(&upcalls->lock);
    return found;
}
