/* broker.c: see broker.h.
 *
 * A chunk is a node: in the table by its key from the first want until it is neither wanted nor kept. While it is LOADING it
 * belongs to whoever brings it on its way (a thread, the peers, Python), who finishes it exactly once.
 */
#include "chunks/broker.h"
#include "chunks/nodes.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/nanoseconds.h"
#include "chunks/shared.h"
#include "format/sharedcache.h"

#define BUCKETS 4096u
/* Threads that are left for answers of peers and Python while all loaders wait for a disk. */
#define COMPLETERS 2u
/* With so many cores or fewer, what the MPI thread hands over waits for a core. Measured with two, files of 107 KiB through
 * the mount: one under way 9,100 instead of 7,000 files/s, 16 under way 14,200 instead of 11,200 (medians of three runs in
 * turns, others at work). More could not be tried. */
#define FEW_CORES 4u
/* What is kept for one use may exceed the capacity by this, until somebody else needs memory. */
#define ONCE_BYTES ((uint64_t)8 << 20)
/* What the MPI thread completes by itself: plain, and no larger than this. */
#define LIGHT_BYTES (256u << 10)

struct fsx_broker {
    struct fsx_broker_settings settings;
    const struct fsx_index *index;
    _Atomic(uint8_t) *marks;
    struct fsx_files *files;
    struct fsx_peers *peers;
    struct fsx_slabs *slabs;
    struct fsx_shared *_Atomic shared; /* NULL until memory is shared */
    struct fsx_prefetch *prefetch;
    struct fsx_read_counts counts; /* of all threads that have none of their own */
    pthread_t *threads;
    uint32_t thread_count;
    _Atomic(uint32_t) threads_ended;
    _Atomic(uint32_t) visitors;  /* threads of others that are in a call that may block */
    _Atomic(uint32_t) awaited;   /* nodes that are LOADING and have waiters */
    _Atomic(uint32_t) kept_once; /* nodes of FSX_KEEP_ONCE: a look into the table may pay */

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t work;
    bool ending;
    uint32_t loading_now;        /* threads that are loading */
    uint32_t in_flight;          /* nodes that are LOADING and have memory */
    uint64_t in_flight_bytes;
    struct fsx_node *buckets[BUCKETS];
    struct list idle, loading;
    struct queue starved;        /* wait for memory */
    struct queue loads;          /* for a thread that may block */
    struct queue arrived;        /* from a peer, or not; from Python */
    struct queue upcalls;        /* for Python to take */
    struct fsx_node *dead;           /* to be freed without the lock */
    bool freed;                  /* there is memory, or less in flight: somebody may have waited for it */
    struct fsx_cache_counts cache;
};

_Static_assert(sizeof(_Atomic(uint8_t)) == 1, "marks are shared with Python");

/* ---- with the lock held: table, lists, queues ---------------------------------------------------------------------- */

static uint64_t key_of(uint32_t entry, uint32_t number) { return fsx_shared_key(entry, number); }

static struct fsx_node **bucket_of(struct fsx_broker *b, uint64_t key) {
    return &b->buckets[(key * 0x9E3779B97F4A7C15u) >> 52];
}
_Static_assert(BUCKETS == 1u << 12, "bucket_of takes the upper 12 bits");

static struct fsx_node *lookup(struct fsx_broker *b, uint32_t entry, uint32_t number) {
    const uint64_t key = key_of(entry, number);
    struct fsx_node *node = *bucket_of(b, key);
    while (node != NULL && node->key != key)
        node = node->chain;
    return node;
}

static void wake_python(const struct fsx_broker *b) {
    const uint64_t one = 1;
    while (write(b->settings.wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* From now on nobody finds it. */
static void leave_table(struct fsx_broker *b, struct fsx_node *node) {
    struct fsx_node **link = bucket_of(b, node->key);
    while (*link != node)
        link = &(*link)->chain;
    *link = node->chain;
}

static void set_keep(struct fsx_broker *b, struct fsx_node *node, enum fsx_keep keep) {
    if (node->keep == FSX_KEEP_ONCE)
        atomic_fetch_sub(&b->kept_once, 1);
    if (keep == FSX_KEEP_ONCE)
        atomic_fetch_add(&b->kept_once, 1);
    node->keep = keep;
}

/* It is READY and kept: programs may find it, if it lies in memory that they can read. */
static void publish(struct fsx_broker *b, struct fsx_node *node) {
    struct fsx_shared *shared = atomic_load(&b->shared);
    uint64_t offset;
    if (shared != NULL && node->stamp == 0 && fsx_shared_has(shared, node->content.data, &offset))
        node->stamp = fsx_shared_publish(shared, node->key, offset, node->chunk.content_bytes);
}

/* A node that is in no list and no table goes. */
static void bury(struct fsx_broker *b, struct fsx_node *node) {
    if (node->stamp != 0)
        fsx_shared_withdraw(atomic_load(&b->shared), node->key, node->stamp);
    if (node->has_memory) {
        b->cache.used_bytes -= node->bytes;
        b->cache.chunks--;
    }
    set_keep(b, node, FSX_PASS);
    node->next = b->dead;
    b->dead = node;
    b->freed = true;
}

/* The one question of eviction: which of the idle ones is wanted last? The one that was not used for longest, as it seems. */
static struct fsx_node *victim(struct fsx_broker *b) { return b->idle.oldest; }

/* Let one of the idle ones go; false if there is none. */
static bool evict(struct fsx_broker *b) {
    struct fsx_node *node = victim(b);
    if (node == NULL)
        return false;
    leave_list(&b->idle, node);
    leave_table(b, node);
    bury(b, node);
    b->cache.evictions++;
    return true;
}

/* Evict until so much more may be used within the capacity, as far as that is possible. */
static void make_room(struct fsx_broker *b, uint64_t more) {
    while (b->cache.used_bytes + more > b->cache.capacity_bytes && evict(b))
        ;
}

/* One user less. */
static void let_go(struct fsx_broker *b, struct fsx_node *node) {
    if (--node->users > 0)
        return;
    if (node->state == READY && node->keep != FSX_PASS) {
        enter_list(&b->idle, node);
        b->freed = b->freed || b->starved.first != NULL; /* it can be evicted now */
        /* What was looked up and fetched for one use has a chance to be used, however small the capacity is. */
        if (node->keep == FSX_KEEP || node->from_line || b->cache.used_bytes > b->cache.capacity_bytes + ONCE_BYTES)
            make_room(b, 0);
        return;
    }
    if (node->state == READY)
        leave_table(b, node); /* one that has failed has left it */
    bury(b, node);
}

/* One user more, of a node that is READY. */
static void hold(struct fsx_broker *b, struct fsx_node *node) {
    if (node->users++ == 0)
        leave_list(&b->idle, node);
}

/* End of a section under the lock: what has died meanwhile is freed, and somebody may have waited for its memory. */
static void unlock(struct fsx_broker *b) {
    struct fsx_node *dead = b->dead;
    const bool freed = b->freed;
    b->dead = NULL;
    b->freed = false;
    pthread_mutex_unlock(&b->lock);
    if (!freed)
        return;
    while (dead != NULL) {
        struct fsx_node *next = dead->next;
        fsx_slabs_give(b->slabs, &dead->content);
        fsx_slabs_give(b->slabs, &dead->stored);
        free(dead);
        dead = next;
    }
    pthread_mutex_lock(&b->lock);
    struct fsx_node *starved = pop(&b->starved);
    if (starved != NULL) {
        push(&b->loads, starved);
        pthread_cond_signal(&b->work);
    }
    pthread_mutex_unlock(&b->lock);
}

/* ---- delivery ----------------------------------------------------------------------------------------------------- */

static int deliver(struct fsx_node *node, struct fsx_waiter *waiters, enum fsx_source source, int error,
                   struct fsx_read_counts *counts) {
    int count = 0;
    for (struct fsx_waiter *waiter = waiters, *next; waiter != NULL; waiter = next, count++) {
        next = waiter->next;
        waiter->done(waiter, &(struct fsx_delivery){.node = node, .data = error == 0 ? node->content.data : NULL,
                                                    .bytes = node->chunk.content_bytes, .source = source, .error = error,
                                                    .counts = counts});
        source = FSX_CACHE; /* it was fetched once */
    }
    return count;
}

/* With the lock held: these have it now. */
static void note_taken(struct fsx_broker *b, struct fsx_node *node, const struct fsx_waiter *waiters) {
    for (const struct fsx_waiter *waiter = waiters; waiter != NULL && node->keep == FSX_KEEP_ONCE; waiter = waiter->next)
        if (waiter->takes_end)
            set_keep(b, node, FSX_PASS);
}

/* With the lock held: these have waited for it. */
static void note_waited(struct fsx_broker *b, const struct fsx_waiter *waiters) {
    atomic_fetch_sub(&b->awaited, waiters != NULL);
    for (const struct fsx_waiter *waiter = waiters; waiter != NULL; waiter = waiter->next)
        b->cache.waited_ns += fsx_now_ns() - waiter->since_ns;
}

/* It has been loaded, or cannot be: whoever brought it here has nothing to do with it any more. How many waited for it. */
static int finish(struct fsx_broker *b, struct fsx_node *node, int error, struct fsx_read_counts *counts) {
    pthread_mutex_lock(&b->lock);
    struct fsx_waiter *waiters = node->waiters;
    node->waiters = NULL;
    node->last_waiter = &node->waiters;
    note_waited(b, waiters);
    leave_list(&b->loading, node);
    if (node->has_memory) {
        b->in_flight--;
        b->cache.in_flight_bytes -= node->bytes;
        b->cache.used_bytes -= node->stored.bytes; /* only the content is kept */
        node->bytes -= node->stored.bytes;
        b->freed = true;
    }
    struct fsx_block stored = node->stored;
    node->stored = (struct fsx_block){0};
    if (error != 0) {
        b->cache.failed += error != ENOMEM;
        if (node->state == LOADING)
            leave_table(b, node); /* the next one who wants it tries again */
    } else if (node->again && waiters != NULL) {
        set_keep(b, node, FSX_PASS);
    }
    node->state = error == 0 ? READY : FAILED;
    note_taken(b, node, waiters);
    if (error == 0 && node->keep != FSX_PASS)
        publish(b, node);
    unlock(b);
    fsx_slabs_give(b->slabs, &stored);
    const struct fsx_loaded loaded = {node->entry, error == 0, node->from_line ? node->chunk.content_bytes : 0};
    const int count = deliver(node, waiters, node->source, error, counts);
    pthread_mutex_lock(&b->lock);
    let_go(b, node);
    unlock(b);
    fsx_prefetch_go_on(b->prefetch, &loaded);
    return count;
}

/* ---- checking and decoding ---------------------------------------------------------------------------------------- */

static bool is_plain(const struct fsx_stored *chunk) { return chunk->codec->decode == NULL; }

/* Where its stored bytes arrive. */
static uint8_t *arrival_of(struct fsx_node *node) {
    return is_plain(&node->chunk) ? node->content.data : node->stored.data;
}

static bool must_check(const struct fsx_broker *b, const struct fsx_file *file, const struct fsx_stored *chunk) {
    if (b->settings.verify == FSX_VERIFY_NEVER)
        return false;
    if (b->settings.verify == FSX_VERIFY_ALWAYS)
        return true;
    return !file->verified && atomic_load_explicit(&b->marks[chunk->mark], memory_order_relaxed) != file->number;
}

/* Are these the bytes that were stored? Counted. */
static bool is_intact(const struct fsx_node *node, const uint8_t *stored, struct fsx_read_counts *counts) {
    if (!fsx_chunk_is_intact(&node->chunk, stored))
        return false;
    fsx_count_check(counts, node->chunk.stored_bytes);
    return true;
}

static bool decode(struct fsx_node *node) {
    return is_plain(&node->chunk) || fsx_chunk_decode(&node->chunk, node->stored.data, node->content.data);
}

/* It comes from a file here: plain bytes that are known to be right are read piece by piece from then on, from the page
 * cache, and need not be kept. */
static void note_again(struct fsx_broker *b, struct fsx_node *node) {
    pthread_mutex_lock(&b->lock);
    node->again = is_plain(&node->chunk) && node->keep == FSX_KEEP && node->waiters != NULL &&
                  b->settings.verify != FSX_VERIFY_ALWAYS;
    pthread_mutex_unlock(&b->lock);
}

/* From a partition file of this node; blocks. */
static bool load_from_file(struct fsx_broker *b, struct fsx_node *node, const struct fsx_file *file,
                           struct fsx_read_counts *counts) {
    const struct fsx_stored *chunk = &node->chunk;
    uint8_t *target = arrival_of(node);
    note_again(b, node);
    if (!fsx_file_read(file, counts, target, chunk->stored_bytes, chunk->position, node->again))
        return false;
    if (must_check(b, file, chunk)) {
        if (!is_intact(node, target, counts))
            return false;
        atomic_store_explicit(&b->marks[chunk->mark], file->number, memory_order_relaxed);
    }
    node->source = file->source;
    return decode(node);
}

/* ---- memory ------------------------------------------------------------------------------------------------------- */

/* With the lock held. What a node needs counts from now on; false if there is no room for it now. */
static bool reserve(struct fsx_broker *b, struct fsx_node *node) {
    const struct fsx_stored *chunk = &node->chunk;
    const size_t bytes =
        fsx_slabs_size(chunk->content_bytes) + (is_plain(chunk) ? 0 : fsx_slabs_size(chunk->stored_bytes));
    make_room(b, bytes);
    if (b->cache.used_bytes + bytes > b->cache.capacity_bytes + FSX_IN_FLIGHT_BYTES && b->in_flight > 0)
        return false;
    node->bytes = bytes;
    node->has_memory = true;
    b->cache.used_bytes += bytes;
    b->cache.in_flight_bytes += bytes;
    b->cache.chunks++;
    b->in_flight++;
    return true;
}

/* With the lock held: it has got none. */
static void unreserve(struct fsx_broker *b, struct fsx_node *node) {
    node->has_memory = false;
    b->cache.used_bytes -= node->bytes;
    b->cache.in_flight_bytes -= node->bytes;
    b->cache.chunks--;
    b->in_flight--;
}

/* It has to find memory anew. */
static void give_memory_back(struct fsx_broker *b, struct fsx_node *node) {
    fsx_slabs_give(b->slabs, &node->content);
    fsx_slabs_give(b->slabs, &node->stored);
    pthread_mutex_lock(&b->lock);
    unreserve(b, node);
    unlock(b);
}

static bool take_blocks(struct fsx_broker *b, struct fsx_node *node) {
    const struct fsx_stored *chunk = &node->chunk;
    if (node->content.data == NULL && !fsx_slabs_take(b->slabs, chunk->content_bytes, &node->content))
        return false;
    return is_plain(chunk) || node->stored.data != NULL || fsx_slabs_take(b->slabs, chunk->stored_bytes, &node->stored);
}

/* With the lock held, which is given up: there is no memory for it now. What is in flight, or being delivered, will give
 * some back, and it waits for that; if nobody waits for it, or there is nothing to wait for, it is finished. */
static void starve(struct fsx_broker *b, struct fsx_node *node, struct fsx_read_counts *counts) {
    const bool wait = b->cache.used_bytes > 0 && node->waiters != NULL && !b->ending;
    if (wait) {
        push(&b->starved, node);
    } else {
        b->cache.forgotten += node->waiters == NULL;
        node->state = FAILED;
        leave_table(b, node); /* before anybody joins it, who would be told of a lack of memory that is none of theirs */
    }
    unlock(b);
    if (!wait)
        finish(b, node, ENOMEM, counts);
}

/* Memory for a node; false if it has none, and is not the caller's any more. */
static bool find_memory(struct fsx_broker *b, struct fsx_node *node, struct fsx_read_counts *counts) {
    for (;;) {
        pthread_mutex_lock(&b->lock);
        if (!reserve(b, node)) {
            starve(b, node, counts);
            return false;
        }
        unlock(b);
        if (take_blocks(b, node))
            return true;
        give_memory_back(b, node);
        pthread_mutex_lock(&b->lock);
        if (evict(b)) { /* free memory in slabs of other sizes: let some of them go */
            unlock(b);
        } else if (b->cache.used_bytes == 0 && fsx_slabs_count(b->slabs).used_bytes > 0) {
            unlock(b); /* somebody is just giving the last of it back */
            sched_yield();
        } else {
            starve(b, node, counts);
            return false;
        }
    }
}

/* ---- on its way --------------------------------------------------------------------------------------------------- */

static void queue_up(struct fsx_broker *b, struct queue *queue, struct fsx_node *node) {
    pthread_mutex_lock(&b->lock);
    push(queue, node);
    pthread_cond_signal(&b->work);
    pthread_mutex_unlock(&b->lock);
}

/* Python shall bring the stored bytes. */
static void ask_python(struct fsx_broker *b, struct fsx_node *node, struct fsx_read_counts *counts) {
    pthread_mutex_lock(&b->lock);
    const bool ending = b->ending;
    if (!ending) {
        b->cache.upcalls++;
        push(&b->upcalls, node);
    }
    pthread_mutex_unlock(&b->lock);
    if (ending)
        finish(b, node, EIO, counts);
    else
        wake_python(b);
}

/* The first source, or the next after one has failed. `mine`: this thread may block. */
static void advance(struct fsx_broker *b, struct fsx_node *node, struct fsx_read_counts *mine) {
    struct fsx_read_counts *counts = mine != NULL ? mine : &b->counts;
    if (!node->has_memory && !find_memory(b, node, counts))
        return;
    const uint32_t partition = b->index->part[node->entry];
    const struct fsx_file *file = node->file_tried ? NULL : fsx_files_find(b->files, partition);
    if (file != NULL && mine != NULL && fsx_files_begin(b->files, file)) {
        node->file_tried = true;
        const bool done = load_from_file(b, node, file, mine);
        fsx_files_end(b->files, file);
        if (done) {
            finish(b, node, 0, mine);
            return;
        }
        node->again = false;
        file = NULL; /* it is here, but not as it should be: Python knows where else */
        node->peer_tried = true;
    }
    if (file != NULL) {
        queue_up(b, &b->loads, node);
        return;
    }
    if (b->peers != NULL && !node->peer_tried) {
        node->peer_tried = true;
        struct fsx_block *block = is_plain(&node->chunk) ? &node->content : &node->stored;
        struct fsx_block given = *block;
        *block = (struct fsx_block){0}; /* before: it may arrive at once */
        if (fsx_peers_ask(b->peers, partition, node->chunk.position, (uint32_t)node->chunk.stored_bytes, &given, node))
            return;
        *block = given;
    }
    ask_python(b, node, counts);
}

/* What has arrived from a peer or from Python, or has not. */
static void complete(struct fsx_broker *b, struct fsx_node *node) {
    struct fsx_read_counts *counts = &b->counts;
    const bool check = b->settings.verify != FSX_VERIFY_NEVER;
    const uint32_t partition = b->index->part[node->entry];
    const bool right = node->complete && (!check || is_intact(node, arrival_of(node), counts)) && decode(node);
    if (right) {
        if (node->from_peer)
            fsx_peers_note_right(b->peers, node->peer, node->chunk.stored_bytes);
        else if (check && node->source != FSX_REMOTE) /* Python has read a file of which we may have a descriptor by now */
            atomic_store_explicit(&b->marks[node->chunk.mark], node->source == FSX_LOCAL ? FSX_FILE_LOCAL : FSX_FILE_PREPARED,
                                  memory_order_relaxed);
        fsx_count_fetch(counts, node->source, node->chunk.stored_bytes);
        if (node->source != FSX_REMOTE && fsx_files_find(b->files, partition) != NULL)
            note_again(b, node); /* from now on, it is read here */
        finish(b, node, 0, counts);
    } else if (!node->from_peer) {
        finish(b, node, EIO, counts);
    } else {
        if (node->complete)
            fsx_peers_note_damage(b->peers, node->peer, partition);
        wake_python(b); /* there is a failure for it to take, before it is asked for the chunk */
        if (!take_blocks(b, node))
            give_memory_back(b, node); /* a silent peer keeps its own; others may have taken the rest */
        advance(b, node, NULL);
    }
}

/* Called by peers.c: often on the MPI thread, which completes by itself what takes no longer than a copy, unless others
 * could do it while it goes on. */
static void arrived(void *context, void *owner, struct fsx_arrival *arrival) {
    struct fsx_broker *b = context;
    struct fsx_node *node = owner;
    const struct fsx_stored *chunk = &node->chunk;
    *(is_plain(chunk) ? &node->content : &node->stored) = arrival->block;
    node->from_peer = true;
    node->peer = arrival->peer;
    node->complete = arrival->complete;
    node->source = FSX_REMOTE;
    const bool light = arrival->complete && is_plain(chunk) && chunk->stored_bytes <= LIGHT_BYTES &&
                       (b->settings.cores <= FEW_CORES || arrival->alone);
    if (light)
        complete(b, node);
    else
        queue_up(b, &b->arrived, node);
}

static void *thread_main(void *argument) {
    struct fsx_broker *b = argument;
    pthread_mutex_lock(&b->lock);
    while (!b->ending) {
        struct fsx_node *node = pop(&b->arrived);
        if (node != NULL) {
            pthread_mutex_unlock(&b->lock);
            complete(b, node);
            pthread_mutex_lock(&b->lock);
        } else if (b->loads.first != NULL && b->loading_now < b->settings.loaders) {
            node = pop(&b->loads);
            b->loading_now++;
            pthread_mutex_unlock(&b->lock);
            advance(b, node, &b->counts);
            pthread_mutex_lock(&b->lock);
            b->loading_now--;
        } else {
            pthread_cond_wait(&b->work, &b->lock);
        }
    }
    pthread_mutex_unlock(&b->lock);
    atomic_fetch_add(&b->threads_ended, 1);
    return NULL;
}

/* ---- for those who want chunks ------------------------------------------------------------------------------------ */

/* With the lock held: a node for a chunk that is wanted for the first time; NULL without memory. */
static struct fsx_node *insert(struct fsx_broker *b, uint32_t entry, uint32_t number) {
    struct fsx_node *node = calloc(1, sizeof *node);
    if (node == NULL)
        return NULL;
    struct fsx_node **bucket = bucket_of(b, key_of(entry, number));
    *node = (struct fsx_node){.key = key_of(entry, number), .entry = entry, .number = number, .users = 1,
                          .chunk = fsx_chunk_of(b->index, entry, number), .chain = *bucket};
    node->last_waiter = &node->waiters;
    *bucket = node;
    enter_list(&b->loading, node);
    return node;
}

static void refuse(struct fsx_broker *b, struct fsx_waiter *waiter, int error) {
    if (waiter != NULL)
        waiter->done(waiter, &(struct fsx_delivery){.error = error, .counts = &b->counts});
}

bool fsx_broker_want(struct fsx_broker *b, struct fsx_read_counts *mine, uint32_t entry, uint32_t number,
                     struct fsx_waiter *waiter, enum fsx_keep keep) {
    pthread_mutex_lock(&b->lock);
    const bool ending = b->ending;
    struct fsx_node *node = ending ? NULL : lookup(b, entry, number);
    const bool ready = node != NULL && node->state == READY, joined = node != NULL && !ready;
    const bool forgets = waiter == NULL && keep == FSX_PASS;
    if (node == NULL && !ending && !forgets)
        node = insert(b, entry, number);
    if (node == NULL) {
        pthread_mutex_unlock(&b->lock);
        refuse(b, waiter, ending ? EIO : ENOMEM);
        return false;
    }
    if (keep > node->keep || (forgets && node->keep == FSX_KEEP))
        set_keep(b, node, keep);
    const bool for_it = waiter != NULL && node->prefetched; /* it was fetched for this one */
    if (waiter != NULL) {
        waiter->next = NULL;
        node->prefetched = false;
        b->cache.prefetched_taken += for_it;
        b->cache.late += for_it && !ready;
    } else if (!ready && !joined) {
        node->prefetched = true;
        node->from_line = mine == NULL; /* engine threads, which may block, fetch what was looked up (fuse/ahead.h) */
        b->cache.prefetched++;
    }
    if (ready) {
        hold(b, node);
        b->cache.hits += waiter != NULL;
        note_taken(b, node, waiter);
    } else {
        if (waiter != NULL) {
            waiter->since_ns = fsx_now_ns();
            atomic_fetch_add(&b->awaited, node->waiters == NULL);
            *node->last_waiter = waiter;
            node->last_waiter = &waiter->next;
        }
        b->cache.joined += joined && waiter != NULL;
        b->cache.misses += !joined;
    }
    pthread_mutex_unlock(&b->lock);
    if (ready) {
        deliver(node, waiter, for_it ? node->source : FSX_CACHE, 0, mine != NULL ? mine : &b->counts);
        pthread_mutex_lock(&b->lock);
        let_go(b, node);
        unlock(b);
    } else if (!joined) {
        atomic_fetch_add(&b->visitors, mine != NULL);
        advance(b, node, mine);
        atomic_fetch_sub(&b->visitors, mine != NULL); /* last: who sees none may free the broker */
    }
    return !ready && !joined;
}

struct fsx_waiter *fsx_broker_cancel(struct fsx_broker *b, bool (*matches)(const struct fsx_waiter *waiter, uint64_t key),
                                     uint64_t key) {
    struct fsx_waiter *found = NULL;
    pthread_mutex_lock(&b->lock);
    for (struct fsx_node *node = b->loading.oldest; node != NULL && found == NULL; node = node->newer)
        for (struct fsx_waiter **link = &node->waiters; *link != NULL; link = &(*link)->next)
            if (matches(*link, key)) {
                found = *link;
                *link = found->next;
                if (node->last_waiter == &found->next)
                    node->last_waiter = link;
                atomic_fetch_sub(&b->awaited, node->waiters == NULL);
                break;
            }
    pthread_mutex_unlock(&b->lock);
    return found;
}

/* Is this plain chunk in the cache or in flight, so that a file need not be read? Only for one use are such kept. */
static bool is_here(struct fsx_broker *b, uint32_t entry, uint32_t number) {
    if (atomic_load_explicit(&b->kept_once, memory_order_relaxed) == 0)
        return false;
    pthread_mutex_lock(&b->lock);
    const bool found = lookup(b, entry, number) != NULL;
    pthread_mutex_unlock(&b->lock);
    return found;
}

bool fsx_broker_read_plain(struct fsx_broker *b, struct fsx_read_counts *mine, uint32_t entry, uint64_t offset,
                           uint32_t length, uint8_t *target) {
    const struct fsx_file *file = fsx_files_find(b->files, b->index->part[entry]);
    if (file == NULL)
        return false;
    const uint32_t first = (uint32_t)(offset / FSX_CHUNK_BYTES);
    const uint32_t last = (uint32_t)((offset + length - 1) / FSX_CHUNK_BYTES);
    for (uint32_t number = first; number <= last; number++) {
        const struct fsx_stored chunk = fsx_chunk_of(b->index, entry, number);
        if (!is_plain(&chunk) || must_check(b, file, &chunk) || is_here(b, entry, number))
            return false;
    }
    if (!fsx_files_begin(b->files, file))
        return false;
    atomic_fetch_add(&b->visitors, 1);
    /* The chunks of a plain file follow each other. */
    const bool done = fsx_file_read(file, mine, target, length, b->index->offset[entry] + offset, false);
    fsx_files_end(b->files, file);
    if (done)
        fsx_count_read(mine, file->source, length);
    atomic_fetch_sub(&b->visitors, 1);
    return done;
}

bool fsx_broker_read_cached(struct fsx_broker *b, struct fsx_read_counts *mine, uint32_t entry, uint64_t offset,
                            uint32_t length, uint8_t *target) {
    for (uint32_t done = 0; done < length;) {
        const uint64_t position = offset + done;
        const size_t start = (size_t)(position % FSX_CHUNK_BYTES);
        pthread_mutex_lock(&b->lock);
        struct fsx_node *node = lookup(b, entry, (uint32_t)(position / FSX_CHUNK_BYTES));
        if (node == NULL || node->state != READY) {
            pthread_mutex_unlock(&b->lock);
            return false;
        }
        hold(b, node);
        b->cache.hits++;
        const enum fsx_source source = node->prefetched ? node->source : FSX_CACHE;
        b->cache.prefetched_taken += node->prefetched;
        node->prefetched = false;
        pthread_mutex_unlock(&b->lock);
        const size_t there = node->chunk.content_bytes - start;
        const uint32_t part = there < length - done ? (uint32_t)there : length - done;
        memcpy(target + done, node->content.data + start, part);
        fsx_count_read(mine, source, part);
        done += part;
        pthread_mutex_lock(&b->lock);
        if (part == there && node->keep == FSX_KEEP_ONCE)
            set_keep(b, node, FSX_PASS);
        let_go(b, node);
        unlock(b);
    }
    return true;
}

bool fsx_broker_waits_for(struct fsx_broker *b, uint32_t entry, uint64_t offset, uint32_t length) {
    const struct fsx_file *file = fsx_files_find(b->files, b->index->part[entry]);
    return file == NULL || fsx_file_waits(file, b->index->offset[entry] + offset, length);
}

bool fsx_broker_waits(struct fsx_broker *b, uint32_t entry) {
    const struct fsx_file *file = fsx_files_find(b->files, b->index->part[entry]);
    const struct fsx_stored chunk = fsx_chunk_of(b->index, entry, 0);
    return file != NULL && fsx_file_waits(file, chunk.position, chunk.stored_bytes);
}

/* ---- shared memory -------------------------------------------------------------------------------------------------- */

int fsx_broker_share(struct fsx_broker *b) {
    if (atomic_load(&b->shared) != NULL)
        return 0;
    struct fsx_shared *shared = fsx_shared_new(b->settings.capacity_bytes + FSX_IN_FLIGHT_BYTES + FSX_SLAB_ROOM_BYTES);
    if (shared == NULL)
        return errno;
    fsx_slabs_share(b->slabs, shared);
    pthread_mutex_lock(&b->lock);
    atomic_store(&b->shared, shared);
    while (evict(b))
        ;
    unlock(b);
    return 0;
}

const struct fsx_shared *fsx_broker_shared(struct fsx_broker *b) { return atomic_load(&b->shared); }

bool fsx_broker_lease(struct fsx_broker *b, const struct fsx_delivery *delivery, struct fsx_lease *lease) {
    const struct fsx_shared *shared = atomic_load(&b->shared);
    *lease = (struct fsx_lease){.bytes = delivery->bytes};
    if (shared == NULL || delivery->error != 0 || !fsx_shared_has(shared, delivery->data, &lease->offset))
        return false;
    lease->node = delivery->node;
    pthread_mutex_lock(&b->lock);
    lease->node->users++; /* whoever delivers it is one, too */
    publish(b, lease->node);
    lease->stamp = lease->node->stamp;
    pthread_mutex_unlock(&b->lock);
    return true;
}

void fsx_broker_end_lease(struct fsx_broker *b, struct fsx_lease *lease) {
    if (lease->node == NULL)
        return;
    pthread_mutex_lock(&b->lock);
    let_go(b, lease->node);
    unlock(b);
    lease->node = NULL;
}

/* ---- Python ------------------------------------------------------------------------------------------------------- */

size_t fsx_broker_take_upcalls(struct fsx_broker *b, struct fsx_chunk_upcall *upcalls, size_t most) {
    size_t count = 0;
    pthread_mutex_lock(&b->lock);
    for (struct fsx_node *node; count < most && (node = pop(&b->upcalls)) != NULL; count++) {
        node->with_python = true;
        upcalls[count] = (struct fsx_chunk_upcall){node->entry, node->number};
    }
    pthread_mutex_unlock(&b->lock);
    return count;
}

int fsx_broker_give(struct fsx_broker *b, struct fsx_chunk_upcall upcall, const void *stored, size_t bytes,
                    enum fsx_source source, int error) {
    pthread_mutex_lock(&b->lock);
    struct fsx_node *node = lookup(b, upcall.entry, upcall.number);
    const bool awaited = node != NULL && node->state == LOADING && node->with_python;
    if (awaited)
        node->with_python = false;
    pthread_mutex_unlock(&b->lock);
    if (!awaited)
        return -1;
    if (error != 0)
        return finish(b, node, error, &b->counts);
    if (bytes != node->chunk.stored_bytes) {
        finish(b, node, EIO, &b->counts);
        return -1;
    }
    memcpy(arrival_of(node), stored, bytes);
    node->from_peer = false;
    node->complete = true;
    node->source = source;
    queue_up(b, &b->arrived, node);
    return 0;
}

void fsx_broker_set_capacity(struct fsx_broker *b, uint64_t capacity_bytes) {
    pthread_mutex_lock(&b->lock);
    b->cache.capacity_bytes = capacity_bytes;
    make_room(b, 0);
    unlock(b);
    fsx_slabs_set_limit(b->slabs, capacity_bytes + FSX_IN_FLIGHT_BYTES + FSX_SLAB_ROOM_BYTES);
}

void fsx_broker_count(struct fsx_broker *b, struct fsx_cache_counts *cache, struct fsx_read_counts *reads) {
    pthread_mutex_lock(&b->lock);
    *cache = b->cache;
    pthread_mutex_unlock(&b->lock);
    cache->mapped_bytes = fsx_slabs_count(b->slabs).mapped_bytes;
    fsx_read_counts_add(reads, &b->counts);
}

/* ---- life --------------------------------------------------------------------------------------------------------- */

struct fsx_broker *fsx_broker_new(const struct fsx_broker_settings *settings) {
    struct fsx_broker *b = calloc(1, sizeof *b);
    if (b == NULL)
        return NULL;
    b->settings = *settings;
    b->index = settings->index;
    b->marks = (_Atomic(uint8_t) *)settings->marks;
    b->cache.capacity_bytes = settings->capacity_bytes;
    struct queue *queues[] = {&b->starved, &b->loads, &b->arrived, &b->upcalls};
    for (size_t i = 0; i < sizeof queues / sizeof *queues; i++)
        queues[i]->last = &queues[i]->first;
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->work, NULL);
    b->files = fsx_files_new(settings->index->partitions, settings->shared_readers);
    b->slabs = fsx_slabs_new(settings->capacity_bytes + FSX_IN_FLIGHT_BYTES + FSX_SLAB_ROOM_BYTES);
    b->threads = calloc(settings->loaders + COMPLETERS, sizeof *b->threads);
    b->prefetch = fsx_prefetch_new(b);
    if (b->files == NULL || b->slabs == NULL || b->threads == NULL || b->prefetch == NULL) {
        fsx_broker_free(b);
        return NULL;
    }
    return b;
}

int fsx_broker_ask_peers(struct fsx_broker *b, struct fsx_exchange *exchange, uint32_t rank, uint64_t limit_ns) {
    b->peers = fsx_peers_new(exchange, b->slabs, b->index->partitions, rank, limit_ns, arrived, b);
    return b->peers == NULL ? ENOMEM : 0;
}

int fsx_broker_start(struct fsx_broker *b) {
    int error = b->peers != NULL ? fsx_peers_start(b->peers) : 0;
    for (; error == 0 && b->thread_count < b->settings.loaders + COMPLETERS; b->thread_count += error == 0)
        error = pthread_create(&b->threads[b->thread_count], NULL, thread_main, b);
    return error;
}

void fsx_broker_end(struct fsx_broker *b) {
    struct fsx_waiter *waiters = NULL, **last = &waiters;
    pthread_mutex_lock(&b->lock);
    b->ending = true;
    for (struct fsx_node *node = b->loading.oldest; node != NULL; node = node->newer) {
        for (*last = node->waiters; *last != NULL;)
            last = &(*last)->next;
        node->waiters = NULL;
        node->last_waiter = &node->waiters;
    }
    atomic_store(&b->awaited, 0);
    pthread_cond_broadcast(&b->work);
    pthread_mutex_unlock(&b->lock);
    if (b->peers != NULL)
        fsx_peers_end(b->peers);
    for (struct fsx_waiter *waiter = waiters, *next; waiter != NULL; waiter = next) {
        next = waiter->next;
        refuse(b, waiter, EIO);
    }
}

uint32_t fsx_broker_running(struct fsx_broker *b) {
    return b->thread_count - atomic_load(&b->threads_ended) + atomic_load(&b->visitors) + (b->peers != NULL ? fsx_peers_running(b->peers) : 0);
}

void fsx_broker_free(struct fsx_broker *b) {
    if (b == NULL)
        return;
    for (uint32_t i = 0; i < b->thread_count; i++)
        pthread_join(b->threads[i], NULL);
    if (!fsx_peers_free(b->peers))
        return; /* MPI may write to blocks, and speak of them: all of it stays */
    for (size_t i = 0; i < BUCKETS; i++)
        for (struct fsx_node *node = b->buckets[i], *next; node != NULL; node = next) {
            next = node->chain;
            fsx_slabs_give(b->slabs, &node->content);
            fsx_slabs_give(b->slabs, &node->stored);
            free(node);
        }
    fsx_files_free(b->files);
    fsx_slabs_free(b->slabs);
    fsx_shared_free(atomic_load(&b->shared));
    fsx_prefetch_free(b->prefetch);
    free(b->threads);
    pthread_cond_destroy(&b->work);
    pthread_mutex_destroy(&b->lock);
    free(b);
}

struct fsx_read_counts *fsx_broker_counts(struct fsx_broker *b) { return &b->counts; }
struct fsx_files *fsx_broker_files(struct fsx_broker *b) { return b->files; }
struct fsx_peers *fsx_broker_peers(struct fsx_broker *b) { return b->peers; }
struct fsx_prefetch *fsx_broker_prefetch(struct fsx_broker *b) { return b->prefetch; }
uint32_t fsx_broker_awaited(struct fsx_broker *b) { return atomic_load(&b->awaited); }
const struct fsx_index *fsx_broker_index(const struct fsx_broker *b) { return b->index; }
