/* chunkcache.c: see chunkcache.h.
 *
 * A hash table of nodes in chains, and a list of the nodes that are ready and that nobody uses, oldest first: only those
 * can be evicted. A node in use that the capacity has no room for is freed when it is given back.
 */
#include "chunkcache.h"

#include <pthread.h>
#include <stdlib.h>

#define BUCKETS 4096u
#define PAGE_BYTES 4096u

enum state { LOADING, READY, FAILED };

struct node {
    struct fsx_cached public; /* first: a struct fsx_cached * is a struct node * */
    struct fsx_lent lent;     /* its memory, if it is not malloc's */
    uint64_t key;
    struct node *chain;          /* next in its bucket */
    struct node *older, *newer;  /* in the list of idle nodes */
    uint32_t users;              /* who holds it or waits for it */
    enum state state;
    bool idle;
    bool transient; /* not kept when nobody uses it any more */
};

/* All fields are guarded by `lock`. */
struct fsx_cache {
    pthread_mutex_t lock;
    pthread_cond_t loaded; /* a node is not LOADING any more */
    struct node *buckets[BUCKETS];
    struct node *oldest, *newest;
    struct fsx_cache_counts counts;
};

static uint64_t key_of(uint32_t entry, uint32_t chunk) { return (uint64_t)entry << 32 | chunk; }

static struct node **bucket_of(struct fsx_cache *cache, uint64_t key) {
    return &cache->buckets[(key * 0x9E3779B97F4A7C15u) >> 52];
}
_Static_assert(BUCKETS == 1u << 12, "bucket_of takes the upper 12 bits");

struct fsx_cache *fsx_cache_new(uint64_t capacity_bytes) {
    struct fsx_cache *cache = calloc(1, sizeof *cache);
    if (cache == NULL)
        return NULL;
    pthread_mutex_init(&cache->lock, NULL);
    pthread_cond_init(&cache->loaded, NULL);
    cache->counts.capacity_bytes = capacity_bytes;
    return cache;
}

static void free_node(struct node *node) {
    if (node->lent.give != NULL)
        node->lent.give(node->lent.owner, node->lent.data, node->lent.capacity);
    else
        free(node->public.data);
    free(node);
}

void fsx_cache_free(struct fsx_cache *cache) {
    if (cache == NULL)
        return;
    for (size_t i = 0; i < BUCKETS; i++)
        for (struct node *node = cache->buckets[i], *next; node != NULL; node = next) {
            next = node->chain;
            free_node(node);
        }
    pthread_cond_destroy(&cache->loaded);
    pthread_mutex_destroy(&cache->lock);
    free(cache);
}

static struct node *lookup(struct fsx_cache *cache, uint64_t key) {
    struct node *node = *bucket_of(cache, key);
    while (node != NULL && node->key != key)
        node = node->chain;
    return node;
}

/* Take a node out of the table; its memory is the caller's. */
static void detach(struct fsx_cache *cache, struct node *node) {
    struct node **link = bucket_of(cache, node->key);
    while (*link != node)
        link = &(*link)->chain;
    *link = node->chain;
    cache->counts.used_bytes -= node->public.bytes;
    cache->counts.chunks--;
}

static void leave_idle(struct fsx_cache *cache, struct node *node) {
    if (!node->idle)
        return;
    *(node->older != NULL ? &node->older->newer : &cache->oldest) = node->newer;
    *(node->newer != NULL ? &node->newer->older : &cache->newest) = node->older;
    node->older = node->newer = NULL;
    node->idle = false;
}

static void enter_idle(struct fsx_cache *cache, struct node *node) {
    node->older = cache->newest;
    *(cache->newest != NULL ? &cache->newest->newer : &cache->oldest) = node;
    cache->newest = node;
    node->idle = true;
}

/* Evict until the capacity holds. What is in use stays. */
static void make_room(struct fsx_cache *cache) {
    while (cache->counts.used_bytes > cache->counts.capacity_bytes && cache->oldest != NULL) {
        struct node *node = cache->oldest;
        leave_idle(cache, node);
        detach(cache, node);
        free_node(node);
        cache->counts.evictions++;
    }
}

/* With the lock held: one user less. */
static void let_go(struct fsx_cache *cache, struct node *node) {
    if (--node->users > 0)
        return;
    if (node->state == READY && node->transient) {
        detach(cache, node);
        free_node(node);
    } else if (node->state == READY) {
        enter_idle(cache, node);
        make_room(cache);
    } else if (node->state == FAILED) {
        free_node(node); /* not in the table any more */
    }
}

/* With the lock held: the node of this key once it is ready, with one more user; NULL if there is none. */
static struct node *find_ready(struct fsx_cache *cache, uint64_t key) {
    for (;;) {
        struct node *node = lookup(cache, key);
        if (node == NULL)
            return NULL;
        leave_idle(cache, node);
        node->users++;
        if (node->state == LOADING) {
            cache->counts.waits++;
            while (node->state == LOADING)
                pthread_cond_wait(&cache->loaded, &cache->lock);
        }
        if (node->state == READY) {
            cache->counts.hits++;
            return node;
        }
        let_go(cache, node); /* it has failed; look again, somebody else may have claimed it */
    }
}

/* With the lock held: a new node, with one user. */
static void insert(struct fsx_cache *cache, struct node *node, uint64_t key, enum state state, uint8_t *data,
                   size_t bytes) {
    struct node **bucket = bucket_of(cache, key);
    *node = (struct node){.public = {.data = data, .bytes = bytes}, .key = key, .users = 1, .state = state,
                          .chain = *bucket};
    *bucket = node;
    cache->counts.used_bytes += bytes;
    cache->counts.chunks++;
    cache->counts.misses++;
    make_room(cache);
}

struct fsx_cached *fsx_cache_find(struct fsx_cache *cache, uint32_t entry, uint32_t chunk) {
    pthread_mutex_lock(&cache->lock);
    struct node *node = find_ready(cache, key_of(entry, chunk));
    pthread_mutex_unlock(&cache->lock);
    return node == NULL ? NULL : &node->public;
}

struct fsx_cached *fsx_cache_claim(struct fsx_cache *cache, uint32_t entry, uint32_t chunk, size_t bytes, bool *claimed) {
    const uint64_t key = key_of(entry, chunk);
    *claimed = false;
    pthread_mutex_lock(&cache->lock);
    struct node *node = find_ready(cache, key);
    if (node == NULL) {
        node = calloc(1, sizeof *node);
        uint8_t *data = aligned_alloc(PAGE_BYTES, (bytes / PAGE_BYTES + 2) * PAGE_BYTES);
        if (node == NULL || data == NULL) {
            free(node);
            free(data);
            node = NULL;
        } else {
            insert(cache, node, key, LOADING, data, bytes);
            *claimed = true;
        }
    }
    pthread_mutex_unlock(&cache->lock);
    return node == NULL ? NULL : &node->public;
}

struct fsx_cached *fsx_cache_adopt(struct fsx_cache *cache, uint32_t entry, uint32_t chunk, size_t bytes,
                                   const struct fsx_lent *lent) {
    struct node *node = calloc(1, sizeof *node);
    if (node == NULL)
        return NULL;
    pthread_mutex_lock(&cache->lock);
    const bool there = lookup(cache, key_of(entry, chunk)) != NULL;
    if (!there) {
        insert(cache, node, key_of(entry, chunk), READY, lent->data, bytes);
        node->lent = *lent;
    }
    pthread_mutex_unlock(&cache->lock);
    if (there)
        free(node);
    return there ? NULL : &node->public;
}

static void settle(struct fsx_cache *cache, struct fsx_cached *cached, enum state state, bool keep) {
    struct node *node = (struct node *)cached;
    pthread_mutex_lock(&cache->lock);
    node->state = state;
    node->transient = !keep;
    if (state == FAILED) {
        detach(cache, node);
        cache->counts.failed++;
        let_go(cache, node);
    }
    pthread_cond_broadcast(&cache->loaded);
    pthread_mutex_unlock(&cache->lock);
}

void fsx_cache_publish(struct fsx_cache *cache, struct fsx_cached *cached, bool keep) {
    settle(cache, cached, READY, keep);
}

void fsx_cache_abandon(struct fsx_cache *cache, struct fsx_cached *cached) { settle(cache, cached, FAILED, false); }

void fsx_cache_release(struct fsx_cache *cache, struct fsx_cached *cached) {
    pthread_mutex_lock(&cache->lock);
    let_go(cache, (struct node *)cached);
    pthread_mutex_unlock(&cache->lock);
}

void fsx_cache_count(struct fsx_cache *cache, struct fsx_cache_counts *counts) {
    pthread_mutex_lock(&cache->lock);
    *counts = cache->counts;
    pthread_mutex_unlock(&cache->lock);
}
