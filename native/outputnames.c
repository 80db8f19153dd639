/* outputnames.c: see outputnames.h.
 *
 * A table with open addressing and linear probing, at most three quarters full; what is removed leaves no gap.
 */
#include "outputnames.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <xxhash.h>

#define FIRST_SLOTS 256u

struct slot {
    uint64_t hash;
    uint64_t count; /* how many names have it; 0: the slot is free */
};

struct fsx_output_names {
    atomic_size_t used;    /* slots; while there is no output at all, nobody needs the lock */
    pthread_rwlock_t lock; /* guards what follows, and writes of `used` */
    struct slot *slots;
    size_t mask; /* number of slots, a power of two, less one */
};

struct fsx_output_names *fsx_output_names_new(void) {
    struct fsx_output_names *names = calloc(1, sizeof *names);
    struct slot *slots = calloc(FIRST_SLOTS, sizeof *slots);
    if (names == NULL || slots == NULL) {
        free(names);
        free(slots);
        return NULL;
    }
    names->slots = slots;
    names->mask = FIRST_SLOTS - 1;
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    /* Readers are many and never stop: Python must not wait for a moment without any. */
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&names->lock, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    return names;
}

void fsx_output_names_free(struct fsx_output_names *names) {
    if (names == NULL)
        return;
    pthread_rwlock_destroy(&names->lock);
    free(names->slots);
    free(names);
}

static uint64_t hash_of(uint64_t parent, const void *name, size_t name_bytes) {
    return XXH3_64bits_withSeed(name, name_bytes, parent);
}

/* The slot that has this hash, or the free one where it belongs. */
static size_t find(const struct slot *slots, size_t mask, uint64_t hash) {
    size_t i = hash & mask;
    while (slots[i].count != 0 && slots[i].hash != hash)
        i = (i + 1) & mask;
    return i;
}

/* With the lock held: room for one more. */
static bool grow(struct fsx_output_names *names) {
    const size_t count = names->mask + 1;
    if ((atomic_load(&names->used) + 1) * 4 <= count * 3)
        return true;
    struct slot *slots = calloc(count * 2, sizeof *slots);
    if (slots == NULL)
        return false;
    const size_t mask = count * 2 - 1;
    for (size_t i = 0; i < count; i++)
        if (names->slots[i].count != 0)
            slots[find(slots, mask, names->slots[i].hash)] = names->slots[i];
    free(names->slots);
    names->slots = slots;
    names->mask = mask;
    return true;
}

bool fsx_output_names_add(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes) {
    const uint64_t hash = hash_of(parent, name, name_bytes);
    pthread_rwlock_wrlock(&names->lock);
    const bool room = grow(names);
    if (room) {
        struct slot *slot = &names->slots[find(names->slots, names->mask, hash)];
        if (slot->count == 0)
            atomic_fetch_add(&names->used, 1);
        slot->hash = hash;
        slot->count++;
    }
    pthread_rwlock_unlock(&names->lock);
    return room;
}

/* With the lock held: free a slot, and move up what was put behind it because it was taken. */
static void clear(struct fsx_output_names *names, size_t hole) {
    struct slot *slots = names->slots;
    const size_t mask = names->mask;
    for (size_t i = (hole + 1) & mask; slots[i].count != 0; i = (i + 1) & mask) {
        const size_t home = slots[i].hash & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            slots[hole] = slots[i];
            hole = i;
        }
    }
    slots[hole].count = 0;
    atomic_fetch_sub(&names->used, 1);
}

bool fsx_output_names_remove(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes) {
    const uint64_t hash = hash_of(parent, name, name_bytes);
    pthread_rwlock_wrlock(&names->lock);
    const size_t i = find(names->slots, names->mask, hash);
    const bool there = names->slots[i].count != 0;
    if (there && --names->slots[i].count == 0)
        clear(names, i);
    pthread_rwlock_unlock(&names->lock);
    return there;
}

bool fsx_output_names_has(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes) {
    if (atomic_load(&names->used) == 0)
        return false;
    const uint64_t hash = hash_of(parent, name, name_bytes);
    pthread_rwlock_rdlock(&names->lock);
    const bool there = names->slots[find(names->slots, names->mask, hash)].count != 0;
    pthread_rwlock_unlock(&names->lock);
    return there;
}
