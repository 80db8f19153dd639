/* outputs/names.c: see outputs/names.h.
 *
 * Names in chains, by a hash of parent and name, about as many chains as names; directories in chains by inode, in the same
 * array: the hash of a directory is that of its inode and no name.
 */
#include "outputs/names.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define FIRST_CHAINS 256u

struct directory {
    struct fuse_attr_out attributes;
    uint64_t told;
};

/* A name, or a directory. There may be a million of them. */
struct record {
    struct record *next;
    uint64_t hash;
    uint64_t key;            /* of a name, its parent; of a directory, its inode */
    uint64_t inode;          /* of a name: that of the directory, if it is one, or 0 */
    struct directory *about; /* NULL for a name */
    size_t name_bytes;
    uint8_t name[]; /* none for a directory */
};

struct fsx_output_names {
    atomic_size_t count;   /* records; while there is none at all, nobody needs the lock */
    pthread_rwlock_t lock; /* guards what follows, and writes of `count` */
    struct record **chains;
    size_t mask; /* number of chains, a power of two, less one */
};

/* What a record is found by. */
struct key {
    uint64_t hash, key;
    const void *name;
    size_t name_bytes;
    bool is_directory;
};

static struct key key_of_name(uint64_t parent, const void *name, size_t name_bytes) {
    return (struct key){.hash = XXH3_64bits_withSeed(name, name_bytes, parent), .key = parent, .name = name,
                        .name_bytes = name_bytes};
}

static struct key key_of_directory(uint64_t inode) {
    return (struct key){.hash = XXH3_64bits_withSeed("", 0, inode), .key = inode, .name = "", .is_directory = true};
}

struct fsx_output_names *fsx_output_names_new(void) {
    struct fsx_output_names *names = calloc(1, sizeof *names);
    struct record **chains = calloc(FIRST_CHAINS, sizeof(struct record *));
    if (names == NULL || chains == NULL) {
        free(names);
        free(chains);
        return NULL;
    }
    names->chains = chains;
    names->mask = FIRST_CHAINS - 1;
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
    for (size_t i = 0; i <= names->mask; i++)
        while (names->chains[i] != NULL) {
            struct record *record = names->chains[i];
            names->chains[i] = record->next;
            free(record->about);
            free(record);
        }
    pthread_rwlock_destroy(&names->lock);
    free(names->chains);
    free(names);
}

/* With the lock held: the link to a record, or the end of its chain. */
static struct record **find(const struct fsx_output_names *names, const struct key *key) {
    struct record **link = &names->chains[key->hash & names->mask];
    for (struct record *record; (record = *link) != NULL; link = &record->next)
        if (record->hash == key->hash && record->key == key->key && (record->about != NULL) == key->is_directory &&
            record->name_bytes == key->name_bytes && memcmp(record->name, key->name, key->name_bytes) == 0)
            break;
    return link;
}

/* With the lock held for writing. Without memory, chains get longer. */
static void grow(struct fsx_output_names *names) {
    if (atomic_load(&names->count) <= names->mask)
        return;
    const size_t mask = (names->mask + 1) * 2 - 1;
    struct record **chains = calloc(mask + 1, sizeof(struct record *));
    if (chains == NULL)
        return;
    for (size_t i = 0; i <= names->mask; i++)
        while (names->chains[i] != NULL) {
            struct record *record = names->chains[i];
            names->chains[i] = record->next;
            record->next = chains[record->hash & mask];
            chains[record->hash & mask] = record;
        }
    free(names->chains);
    names->chains = chains;
    names->mask = mask;
}

/* With the lock held for writing: the record with this key, which is made if there is none. NULL without memory. */
static struct record *require(struct fsx_output_names *names, const struct key *key) {
    grow(names);
    struct record **link = find(names, key);
    if (*link == NULL) {
        struct record *record = calloc(1, sizeof *record + key->name_bytes);
        struct directory *about = key->is_directory ? calloc(1, sizeof *about) : NULL;
        if (record == NULL || (key->is_directory && about == NULL)) {
            free(record);
            free(about);
            return NULL;
        }
        record->hash = key->hash;
        record->key = key->key;
        record->about = about;
        record->name_bytes = key->name_bytes;
        memcpy(record->name, key->name, key->name_bytes);
        *link = record;
        atomic_fetch_add(&names->count, 1);
    }
    return *link;
}

/* With the lock held for writing. */
static void drop(struct fsx_output_names *names, struct record **link) {
    struct record *record = *link;
    *link = record->next;
    free(record->about);
    free(record);
    atomic_fetch_sub(&names->count, 1);
}

bool fsx_output_names_add(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes,
                          uint64_t directory) {
    const struct key key = key_of_name(parent, name, name_bytes);
    pthread_rwlock_wrlock(&names->lock);
    struct record *record = require(names, &key);
    if (record != NULL)
        record->inode = directory;
    pthread_rwlock_unlock(&names->lock);
    return record != NULL;
}

bool fsx_output_names_remove(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes) {
    const struct key key = key_of_name(parent, name, name_bytes);
    pthread_rwlock_wrlock(&names->lock);
    struct record **link = find(names, &key);
    const bool there = *link != NULL;
    if (there)
        drop(names, link);
    pthread_rwlock_unlock(&names->lock);
    return there;
}

bool fsx_output_names_has(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes) {
    if (atomic_load(&names->count) == 0)
        return false;
    const struct key key = key_of_name(parent, name, name_bytes);
    pthread_rwlock_rdlock(&names->lock);
    const bool there = *find(names, &key) != NULL;
    pthread_rwlock_unlock(&names->lock);
    return there;
}

/* ---- directories ---------------------------------------------------------------------------------------------------- */

bool fsx_output_names_describe(struct fsx_output_names *names, const struct fuse_attr_out *out) {
    const struct key key = key_of_directory(out->attr.ino);
    pthread_rwlock_wrlock(&names->lock);
    struct record *record = require(names, &key);
    if (record != NULL)
        record->about->attributes = *out;
    pthread_rwlock_unlock(&names->lock);
    return record != NULL;
}

/* With the lock held for writing. */
static uint64_t take_told(struct record *record) {
    const uint64_t told = record->about->told;
    record->about->told = 0;
    return told;
}

uint64_t fsx_output_names_undescribe(struct fsx_output_names *names, uint64_t inode) {
    const struct key key = key_of_directory(inode);
    uint64_t told = 0;
    pthread_rwlock_wrlock(&names->lock);
    struct record **link = find(names, &key);
    if (*link != NULL) {
        told = take_told(*link);
        drop(names, link);
    }
    pthread_rwlock_unlock(&names->lock);
    return told;
}

void fsx_output_names_touch(struct fsx_output_names *names, uint64_t inode, uint64_t seconds, uint32_t nanoseconds) {
    const struct key key = key_of_directory(inode);
    pthread_rwlock_wrlock(&names->lock);
    struct record *record = *find(names, &key);
    if (record != NULL) {
        struct fuse_attr *attr = &record->about->attributes.attr;
        attr->atime = attr->mtime = attr->ctime = seconds;
        attr->atimensec = attr->mtimensec = attr->ctimensec = nanoseconds;
    }
    pthread_rwlock_unlock(&names->lock);
}

bool fsx_output_names_described(struct fsx_output_names *names, uint64_t inode, struct fuse_attr_out *out) {
    const struct key key = key_of_directory(inode);
    pthread_rwlock_rdlock(&names->lock);
    const struct record *record = *find(names, &key);
    if (record != NULL)
        *out = record->about->attributes;
    pthread_rwlock_unlock(&names->lock);
    return record != NULL;
}

bool fsx_output_names_tell(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes,
                           struct fuse_attr_out *out) {
    const struct key key = key_of_name(parent, name, name_bytes);
    pthread_rwlock_wrlock(&names->lock);
    const struct record *named = *find(names, &key);
    const struct key inside = key_of_directory(named == NULL ? 0 : named->inode);
    struct record *record = *find(names, &inside);
    if (record != NULL) {
        *out = record->about->attributes;
        record->about->told++;
    }
    pthread_rwlock_unlock(&names->lock);
    return record != NULL;
}

uint64_t fsx_output_names_take_told(struct fsx_output_names *names, uint64_t inode) {
    const struct key key = key_of_directory(inode);
    pthread_rwlock_wrlock(&names->lock);
    struct record *record = *find(names, &key);
    const uint64_t told = record == NULL ? 0 : take_told(record);
    pthread_rwlock_unlock(&names->lock);
    return told;
}
