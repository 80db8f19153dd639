/* prefetch.c: see prefetch.h. */
#include "chunks/prefetch.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "chunks/broker.h"

/* A line of so many chunks: a window of 256 MiB of files of 64 KiB. */
#define LINE 4096u
/* In flight at a time. One remote file of 107 KiB takes 130 µs here, one of 16 under way 65. While a reader waits, only
 * so many that the link or the disk does not run dry between its reads. */
#define IN_FLIGHT 16u
#define IN_FLIGHT_BEHIND_READERS 4u
#define FLIGHT_BYTES ((uint64_t)8 << 20)

struct fsx_prefetch {
    struct fsx_broker *broker;
    _Atomic(uint32_t) waiting; /* what stands in line, to be seen without the lock */
    pthread_mutex_t lock;      /* guards what follows */
    struct fsx_pages_ahead *pages;
    uint64_t line[LINE];       /* a ring of entry and number, and whether it goes on */
    uint32_t first, count;
    uint32_t in_flight;
    uint64_t in_flight_bytes;
    uint64_t begun; /* so far */
    bool beginning; /* a thread begins chunks; it looks again when another one would */
    bool again;
    uint32_t going_on[IN_FLIGHT]; /* files that are in flight and go on then; 0, the root, for none */
};

/* In a number of the line: it goes on; it stays. No file has so many chunks. */
#define GOES_ON (UINT32_C(1) << 31)
#define STAYS (UINT32_C(1) << 30)

struct fsx_prefetch *fsx_prefetch_new(struct fsx_broker *broker) {
    struct fsx_prefetch *prefetch = calloc(1, sizeof *prefetch);
    if (prefetch == NULL)
        return NULL;
    prefetch->broker = broker;
    pthread_mutex_init(&prefetch->lock, NULL);
    prefetch->pages = fsx_pages_ahead_new(fsx_broker_index(broker));
    if (prefetch->pages == NULL) {
        fsx_prefetch_free(prefetch);
        return NULL;
    }
    return prefetch;
}

void fsx_prefetch_free(struct fsx_prefetch *prefetch) {
    if (prefetch == NULL)
        return;
    fsx_pages_ahead_free(prefetch->pages);
    pthread_mutex_destroy(&prefetch->lock);
    free(prefetch);
}

/* Is there anything to be waited for? Plain bytes in the page cache of this node are read from there as fast. */
static bool pays(struct fsx_broker *broker, uint32_t entry, uint32_t number, uint64_t *bytes) {
    const struct fsx_stored chunk = fsx_chunk_of(fsx_broker_index(broker), entry, number);
    *bytes = chunk.content_bytes;
    return chunk.codec->decode != NULL ||
           fsx_broker_waits_for(broker, entry, (uint64_t)number * FSX_CHUNK_BYTES, (uint32_t)chunk.content_bytes);
}

/* With the lock held: the next of the line, if it may be begun now. */
static bool next(struct fsx_prefetch *p, uint32_t *entry, uint32_t *number) {
    const uint32_t most = fsx_broker_awaited(p->broker) > 0 ? IN_FLIGHT_BEHIND_READERS : IN_FLIGHT;
    if (p->count == 0 || p->in_flight >= most || p->in_flight_bytes >= FLIGHT_BYTES)
        return false;
    const uint64_t key = p->line[p->first];
    p->first = (p->first + 1) % LINE;
    atomic_store_explicit(&p->waiting, --p->count, memory_order_relaxed);
    *entry = (uint32_t)(key >> 32);
    *number = (uint32_t)key;
    return true;
}

/* With the lock held: it goes on when it is there; no more are in flight than there are places. */
static void note_going_on(struct fsx_prefetch *p, uint32_t entry) {
    for (uint32_t i = 0; i < IN_FLIGHT; i++)
        if (p->going_on[i] == 0) {
            p->going_on[i] = entry;
            return;
        }
}

/* With the lock held: whether it goes on. */
static bool take_going_on(struct fsx_prefetch *p, uint32_t entry) {
    for (uint32_t i = 0; i < IN_FLIGHT; i++)
        if (p->going_on[i] == entry) {
            p->going_on[i] = 0;
            return true;
        }
    return false;
}

static void begin(struct fsx_prefetch *p) {
    pthread_mutex_lock(&p->lock);
    p->again = true;
    if (p->beginning) {
        pthread_mutex_unlock(&p->lock);
        return;
    }
    p->beginning = true;
    while (p->again) {
        p->again = false;
        for (uint32_t entry, number; next(p, &entry, &number);) {
            uint64_t bytes;
            const bool goes_on = (number & GOES_ON) != 0, stays = (number & STAYS) != 0;
            number &= ~(GOES_ON | STAYS);
            pthread_mutex_unlock(&p->lock);
            bool begun = pays(p->broker, entry, number, &bytes);
            if (begun) {
                pthread_mutex_lock(&p->lock);
                p->in_flight++; /* before: it may have come when the call returns */
                p->in_flight_bytes += bytes;
                if (goes_on)
                    note_going_on(p, entry);
                pthread_mutex_unlock(&p->lock);
                begun = fsx_broker_want(p->broker, NULL, entry, number, NULL, stays ? FSX_KEEP : FSX_KEEP_ONCE);
                pthread_mutex_lock(&p->lock);
                p->begun += begun;
                if (!begun) { /* it is there, or somebody else brings it */
                    p->in_flight--;
                    p->in_flight_bytes -= bytes;
                    take_going_on(p, entry);
                }
                pthread_mutex_unlock(&p->lock);
            }
            if (!begun && goes_on)
                fsx_pages_ahead_add(p->pages, entry);
            pthread_mutex_lock(&p->lock);
        }
    }
    p->beginning = false;
    pthread_mutex_unlock(&p->lock);
}

bool fsx_prefetch_add(struct fsx_prefetch *p, uint32_t entry, uint32_t number, bool into_kernel, bool stay) {
    pthread_mutex_lock(&p->lock);
    const bool room = p->count < LINE;
    if (room) {
        p->line[(p->first + p->count) % LINE] =
            (uint64_t)entry << 32 | number | (into_kernel ? GOES_ON : 0) | (stay ? STAYS : 0);
        atomic_store_explicit(&p->waiting, ++p->count, memory_order_relaxed);
    }
    pthread_mutex_unlock(&p->lock);
    begin(p);
    return room;
}

uint32_t fsx_prefetch_count(struct fsx_prefetch *p, uint64_t *begun) {
    pthread_mutex_lock(&p->lock);
    *begun = p->begun;
    const uint32_t count = p->count + p->in_flight;
    pthread_mutex_unlock(&p->lock);
    return count;
}

void fsx_prefetch_go_on(struct fsx_prefetch *p, const struct fsx_loaded *loaded) {
    if (loaded->bytes > 0) {
        pthread_mutex_lock(&p->lock);
        p->in_flight--;
        p->in_flight_bytes -= loaded->bytes;
        const bool goes_on = take_going_on(p, loaded->entry);
        pthread_mutex_unlock(&p->lock);
        if (goes_on && loaded->right)
            fsx_pages_ahead_add(p->pages, loaded->entry);
    }
    if (atomic_load_explicit(&p->waiting, memory_order_relaxed) > 0)
        begin(p);
}

struct fsx_pages_ahead *fsx_prefetch_pages(struct fsx_prefetch *p) { return p->pages; }
