/* outputfolders.c: see outputfolders.h.
 *
 * Chains of records, in a table that doubles when there are as many of them as chains.
 */
#include "outputfolders.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define FIRST_CHAINS 64u
#define NAME_MOST 255u

struct folder {
    struct folder *next;
    uint64_t hash, parent, inode;
    size_t name_bytes;
    uint8_t name[];
};

struct fsx_output_folders {
    pthread_rwlock_t lock; /* guards what follows */
    struct folder **chains;
    size_t count, mask; /* the number of chains, a power of two, less one */
};

struct fsx_output_folders *fsx_output_folders_new(void) {
    struct fsx_output_folders *folders = calloc(1, sizeof *folders);
    struct folder **chains = calloc(FIRST_CHAINS, sizeof *chains);
    if (folders == NULL || chains == NULL) {
        free(folders);
        free(chains);
        return NULL;
    }
    folders->chains = chains;
    folders->mask = FIRST_CHAINS - 1;
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&folders->lock, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    return folders;
}

void fsx_output_folders_free(struct fsx_output_folders *folders) {
    if (folders == NULL)
        return;
    for (size_t i = 0; i <= folders->mask; i++)
        while (folders->chains[i] != NULL) {
            struct folder *folder = folders->chains[i];
            folders->chains[i] = folder->next;
            free(folder);
        }
    pthread_rwlock_destroy(&folders->lock);
    free(folders->chains);
    free(folders);
}

static uint64_t hash_of(uint64_t parent, const void *name, size_t name_bytes) {
    return XXH3_64bits_withSeed(name, name_bytes, parent);
}

/* With the lock held: the link to the record of a name, or the end of its chain. */
static struct folder **find(struct fsx_output_folders *folders, uint64_t hash, uint64_t parent, const void *name,
                            size_t name_bytes) {
    struct folder **link = &folders->chains[hash & folders->mask];
    while (*link != NULL && ((*link)->hash != hash || (*link)->parent != parent || (*link)->name_bytes != name_bytes ||
                             memcmp((*link)->name, name, name_bytes) != 0))
        link = &(*link)->next;
    return link;
}

/* With the lock held. Without memory, chains get longer. */
static void grow(struct fsx_output_folders *folders) {
    if (folders->count <= folders->mask)
        return;
    const size_t mask = (folders->mask + 1) * 2 - 1;
    struct folder **chains = calloc(mask + 1, sizeof(struct folder *));
    if (chains == NULL)
        return;
    for (size_t i = 0; i <= folders->mask; i++)
        while (folders->chains[i] != NULL) {
            struct folder *folder = folders->chains[i];
            folders->chains[i] = folder->next;
            folder->next = chains[folder->hash & mask];
            chains[folder->hash & mask] = folder;
        }
    free(folders->chains);
    folders->chains = chains;
    folders->mask = mask;
}

bool fsx_output_folders_add(struct fsx_output_folders *folders, uint64_t parent, const void *name, size_t name_bytes,
                            uint64_t inode) {
    struct folder *folder = name_bytes > NAME_MOST ? NULL : malloc(sizeof *folder + name_bytes);
    if (folder == NULL)
        return false;
    *folder = (struct folder){.hash = hash_of(parent, name, name_bytes), .parent = parent, .inode = inode,
                              .name_bytes = name_bytes};
    memcpy(folder->name, name, name_bytes);
    pthread_rwlock_wrlock(&folders->lock);
    grow(folders);
    struct folder **link = find(folders, folder->hash, parent, name, name_bytes);
    struct folder *old = *link;
    folder->next = old == NULL ? NULL : old->next;
    *link = folder;
    folders->count += old == NULL;
    pthread_rwlock_unlock(&folders->lock);
    free(old);
    return true;
}

void fsx_output_folders_remove(struct fsx_output_folders *folders, uint64_t parent, const void *name, size_t name_bytes) {
    pthread_rwlock_wrlock(&folders->lock);
    struct folder **link = find(folders, hash_of(parent, name, name_bytes), parent, name, name_bytes);
    struct folder *old = *link;
    if (old != NULL) {
        *link = old->next;
        folders->count--;
    }
    pthread_rwlock_unlock(&folders->lock);
    free(old);
}

uint64_t fsx_output_folders_find(struct fsx_output_folders *folders, uint64_t parent, const void *name, size_t name_bytes) {
    const uint64_t hash = hash_of(parent, name, name_bytes);
    pthread_rwlock_rdlock(&folders->lock);
    const struct folder *folder = *find(folders, hash, parent, name, name_bytes);
    const uint64_t inode = folder == NULL ? 0 : folder->inode;
    pthread_rwlock_unlock(&folders->lock);
    return inode;
}
