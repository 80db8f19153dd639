/* outputcards.c: see outputcards.h.
 *
 * A table with open addressing and linear probing, at most half full. A dropped card leaves its inode in the table, without
 * attributes: directories are few, and most of them stay.
 */
#include "outputcards.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_SLOTS 64u

struct card {
    struct fuse_attr_out out; /* out.attr.ino is 0: the slot is free */
    uint64_t told;
    bool valid, lent;
};

struct fsx_output_cards {
    pthread_rwlock_t lock; /* guards what follows */
    struct card *slots;
    size_t used, mask; /* the number of slots, a power of two, less one */
};

struct fsx_output_cards *fsx_output_cards_new(void) {
    struct fsx_output_cards *cards = calloc(1, sizeof *cards);
    struct card *slots = calloc(FIRST_SLOTS, sizeof *slots);
    if (cards == NULL || slots == NULL) {
        free(cards);
        free(slots);
        return NULL;
    }
    cards->slots = slots;
    cards->mask = FIRST_SLOTS - 1;
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&cards->lock, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    return cards;
}

void fsx_output_cards_free(struct fsx_output_cards *cards) {
    if (cards == NULL)
        return;
    pthread_rwlock_destroy(&cards->lock);
    free(cards->slots);
    free(cards);
}

/* The slot of an inode, or the free one where it belongs. */
static struct card *find(struct card *slots, size_t mask, uint64_t inode) {
    size_t i = (size_t)(inode * UINT64_C(0x9E3779B97F4A7C15) >> 32) & mask;
    while (slots[i].out.attr.ino != 0 && slots[i].out.attr.ino != inode)
        i = (i + 1) & mask;
    return &slots[i];
}

/* With the lock held: room for one more. Cards that were dropped go. */
static bool grow(struct fsx_output_cards *cards) {
    const size_t count = cards->mask + 1;
    if ((cards->used + 1) * 2 <= count)
        return true;
    struct card *slots = calloc(count * 2, sizeof *slots);
    if (slots == NULL)
        return false;
    cards->used = 0;
    for (size_t i = 0; i < count; i++)
        if (cards->slots[i].valid) {
            *find(slots, count * 2 - 1, cards->slots[i].out.attr.ino) = cards->slots[i];
            cards->used++;
        }
    free(cards->slots);
    cards->slots = slots;
    cards->mask = count * 2 - 1;
    return true;
}

bool fsx_output_cards_put(struct fsx_output_cards *cards, const struct fuse_attr_out *out) {
    pthread_rwlock_wrlock(&cards->lock);
    const bool room = grow(cards);
    if (room) {
        struct card *card = find(cards->slots, cards->mask, out->attr.ino);
        cards->used += card->out.attr.ino == 0;
        card->out = *out;
        card->valid = true;
    }
    pthread_rwlock_unlock(&cards->lock);
    return room;
}

bool fsx_output_cards_touch(struct fsx_output_cards *cards, uint64_t inode, uint64_t seconds, uint32_t nanoseconds) {
    pthread_rwlock_wrlock(&cards->lock);
    struct card *card = find(cards->slots, cards->mask, inode);
    const bool valid = card->valid;
    if (valid) {
        struct fuse_attr *attr = &card->out.attr;
        attr->atime = attr->mtime = attr->ctime = seconds;
        attr->atimensec = attr->mtimensec = attr->ctimensec = nanoseconds;
    }
    pthread_rwlock_unlock(&cards->lock);
    return valid;
}

uint64_t fsx_output_cards_drop(struct fsx_output_cards *cards, uint64_t inode) {
    pthread_rwlock_wrlock(&cards->lock);
    struct card *card = find(cards->slots, cards->mask, inode);
    const uint64_t told = card->told;
    card->told = 0; /* of a free slot all of it is so already */
    card->valid = card->lent = false;
    pthread_rwlock_unlock(&cards->lock);
    return told;
}

void fsx_output_cards_lend(struct fsx_output_cards *cards, uint64_t inode, bool lent) {
    pthread_rwlock_wrlock(&cards->lock);
    struct card *card = find(cards->slots, cards->mask, inode);
    card->lent = lent && card->valid;
    pthread_rwlock_unlock(&cards->lock);
}

bool fsx_output_cards_is_lent(struct fsx_output_cards *cards, uint64_t inode) {
    pthread_rwlock_rdlock(&cards->lock);
    const bool lent = find(cards->slots, cards->mask, inode)->lent;
    pthread_rwlock_unlock(&cards->lock);
    return lent;
}

bool fsx_output_cards_tell(struct fsx_output_cards *cards, uint64_t inode, struct fuse_attr_out *out) {
    pthread_rwlock_wrlock(&cards->lock);
    struct card *card = find(cards->slots, cards->mask, inode);
    const bool valid = card->valid;
    if (valid) {
        *out = card->out;
        card->told++;
    }
    pthread_rwlock_unlock(&cards->lock);
    return valid;
}

uint64_t fsx_output_cards_take_told(struct fsx_output_cards *cards, uint64_t inode) {
    pthread_rwlock_wrlock(&cards->lock);
    struct card *card = find(cards->slots, cards->mask, inode);
    const uint64_t told = card->told;
    card->told = 0;
    pthread_rwlock_unlock(&cards->lock);
    return told;
}

bool fsx_output_cards_get(struct fsx_output_cards *cards, uint64_t inode, struct fuse_attr_out *out) {
    pthread_rwlock_rdlock(&cards->lock);
    const struct card *card = find(cards->slots, cards->mask, inode);
    const bool valid = card->valid;
    if (valid)
        *out = card->out;
    pthread_rwlock_unlock(&cards->lock);
    return valid;
}
