/* drive_content.c: many threads on native/chunkcache.c and native/content.c, without an engine. */
#include "drive_world.h"

#include <pthread.h>
#include <unistd.h>

#define THREADS 6u

/* ---- the cache ------------------------------------------------------------------------------------------------ */

#define KEYS 8u
#define CHUNK 20000u

struct cache_job {
    struct fsx_cache *cache;
    uint64_t seed;
    uint32_t rounds;
    uint64_t loaded, failed;
};

static void *use_cache(void *argument) {
    struct cache_job *job = argument;
    for (uint32_t round = 0; round < job->rounds; round++) {
        const uint32_t key = (uint32_t)below(&job->seed, KEYS);
        bool claimed = false;
        struct fsx_cached *cached = below(&job->seed, 4) == 0
                                        ? fsx_cache_find(job->cache, key, key * 3)
                                        : fsx_cache_claim(job->cache, key, key * 3, CHUNK + key, &claimed);
        if (cached == NULL)
            continue;
        check(cached->bytes == CHUNK + key && (uintptr_t)cached->data % 4096 == 0, "a chunk of another length");
        if (claimed && below(&job->seed, 5) == 0) {
            fsx_cache_abandon(job->cache, cached);
            job->failed++;
            continue;
        }
        if (claimed) {
            memset(cached->data, (int)key, CHUNK + key + 4096 - CHUNK % 4096);
            fsx_cache_publish(job->cache, cached, below(&job->seed, 3) != 0);
            job->loaded++;
        }
        for (uint32_t i = 0; i < CHUNK + key; i += 997)
            check(cached->data[i] == key, "a chunk with other bytes");
        fsx_cache_release(job->cache, cached);
    }
    return NULL;
}

void drive_cache(uint32_t rounds) {
    const uint64_t capacities[] = {0, 3 * CHUNK, 100 * CHUNK};
    for (uint32_t c = 0; c < 3; c++) {
        struct fsx_cache *cache = fsx_cache_new(capacities[c]);
        check(cache != NULL, "no memory");
        struct cache_job jobs[THREADS];
        pthread_t threads[THREADS];
        for (uint32_t i = 0; i < THREADS; i++) {
            jobs[i] = (struct cache_job){.cache = cache, .seed = 77 + i + c * 100, .rounds = rounds};
            check(pthread_create(&threads[i], NULL, use_cache, &jobs[i]) == 0, "no thread");
        }
        uint64_t loaded = 0, failed = 0;
        for (uint32_t i = 0; i < THREADS; i++) {
            pthread_join(threads[i], NULL);
            loaded += jobs[i].loaded;
            failed += jobs[i].failed;
        }
        struct fsx_cache_counts counts;
        fsx_cache_count(cache, &counts);
        check(counts.misses == loaded + failed && counts.failed == failed, "wrong counts of the cache");
        check(counts.used_bytes <= capacities[c] && counts.chunks <= KEYS, "more is kept than there is room for");
        check(capacities[c] != 0 || counts.chunks == 0, "something is kept without room");
        fsx_cache_free(cache);
    }
}

/* ---- content -------------------------------------------------------------------------------------------------- */

struct content_job {
    struct fsx_content *content;
    uint64_t seed;
    uint32_t rounds; /* at least; until all files are published */
    atomic_bool *published;
    struct fsx_hands hands;
    uint64_t served, refused;
};

/* What Python does with a read that is left to it: now and then it gives the whole chunk. */
static void keep_chunk(struct fsx_content *content, const struct piece *piece) {
    const uint64_t size = world.index.size[piece->entry];
    const uint32_t number = (uint32_t)(piece->offset / FSX_CHUNK_BYTES);
    const uint64_t start = (uint64_t)number * FSX_CHUNK_BYTES, left = size - start;
    const size_t bytes = left < FSX_CHUNK_BYTES ? (size_t)left : FSX_CHUNK_BYTES;
    const uint8_t *data = world.truth[piece->entry] + start;
    check(fsx_content_keep(content, piece->entry, number, data, bytes) == 0, "a chunk is not kept");
    check(bytes == 0 || fsx_content_keep(content, piece->entry, number, data, bytes - 1) == EINVAL,
          "half a chunk is kept");
}

static void *use_content(void *argument) {
    struct content_job *job = argument;
    for (uint32_t round = 0; round < job->rounds || !atomic_load(job->published); round++) {
        const struct piece piece = some_piece(&job->seed, FSX_ANSWER_BYTES);
        if (fsx_content_read(job->content, &job->hands, piece.entry, piece.offset, piece.length)) {
            check(memcmp(job->hands.answer, world.truth[piece.entry] + piece.offset, piece.length) == 0, "wrong bytes");
            job->served++;
        } else {
            job->refused++;
            if (below(&job->seed, 2) == 0)
                keep_chunk(job->content, &piece);
        }
    }
    return NULL;
}

struct publisher {
    struct fsx_content *content;
    bool damage;
};

/* First nothing is there, then the prepared files, then local copies, which may be damaged; each told of twice. */
static void *publish(void *argument) {
    const struct publisher *job = argument;
    for (uint8_t number = 1; number <= 2; number++)
        for (uint32_t p = 0; p < world.parts; p++) {
            usleep(3000);
            const int fd = number == 2 && job->damage && p % 2 == 0 ? world.damaged[p] : world.part[p];
            const int result = fsx_content_use(job->content, p, fd, number, false);
            check(result == 0 || result == EEXIST, "a file is not used");
        }
    return NULL;
}

static void drive_one(enum fsx_verify verify, uint64_t cache_bytes, bool damage, uint32_t rounds) {
    const size_t mark_bytes = (size_t)(world.index.entries + world.index.chunk_records);
    uint8_t *marks = calloc(mark_bytes, 1);
    struct fsx_content *content = fsx_content_new(&world.index, marks, verify, cache_bytes, 3);
    check(marks != NULL && content != NULL, "no memory");
    struct content_job jobs[THREADS];
    pthread_t threads[THREADS], publishers[2];
    struct publisher publisher = {.content = content, .damage = damage};
    atomic_bool published = false;
    for (uint32_t i = 0; i < THREADS; i++) {
        jobs[i] = (struct content_job){.content = content, .seed = 5 + i, .rounds = rounds, .published = &published};
        check(fsx_hands_make(&jobs[i].hands), "no memory");
        check(pthread_create(&threads[i], NULL, use_content, &jobs[i]) == 0, "no thread");
    }
    for (uint32_t i = 0; i < 2; i++)
        check(pthread_create(&publishers[i], NULL, publish, &publisher) == 0, "no thread");
    uint64_t served = 0, refused = 0, reads = 0;
    for (uint32_t i = 0; i < 2; i++)
        pthread_join(publishers[i], NULL);
    atomic_store(&published, true);
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        served += jobs[i].served;
        refused += jobs[i].refused;
        for (int o = 0; o < FSX_ORIGINS; o++)
            reads += jobs[i].hands.counts.origin[o].reads;
        fsx_hands_free(&jobs[i].hands);
    }
    check(served + refused >= (uint64_t)THREADS * rounds && served > 0 && reads >= served, "wrong counts of reads");
    struct fsx_cache_counts counts;
    fsx_cache_count(fsx_content_cache(content), &counts);
    check(counts.used_bytes <= cache_bytes, "the cache holds more than it may");
    check(!damage || counts.failed > 0 || refused > 0, "no damage was seen");
    /* All is published now: each file as a whole, by one thread, so that nothing depends on luck. */
    struct fsx_hands hands;
    check(fsx_hands_make(&hands), "no memory");
    uint64_t left = 0;
    for (uint32_t f = 0; f < world.file_count; f++) {
        const uint32_t entry = world.files[f];
        const uint64_t size = world.index.size[entry];
        for (uint64_t offset = 0; offset < size; offset += FSX_ANSWER_BYTES) {
            const uint32_t length = size - offset < FSX_ANSWER_BYTES ? (uint32_t)(size - offset) : FSX_ANSWER_BYTES;
            if (fsx_content_read(content, &hands, entry, offset, length))
                check(memcmp(hands.answer, world.truth[entry] + offset, length) == 0, "wrong bytes of a whole file");
            else
                left++;
        }
    }
    fsx_hands_free(&hands);
    check(damage ? left > 0 : left == 0, damage ? "damaged files were read" : "a sound file was not read");
    check(!fsx_content_read(content, &jobs[0].hands, world.files[0], 0, FSX_ANSWER_BYTES + 1), "an answer too long");
    fsx_content_free(content);
    free(marks);
}

void drive_content(uint32_t rounds) {
    drive_one(FSX_VERIFY_FIRST, 64 << 20, false, rounds);
    drive_one(FSX_VERIFY_FIRST, 5 << 20, true, rounds);
    drive_one(FSX_VERIFY_ALWAYS, 0, true, rounds);
    drive_one(FSX_VERIFY_NEVER, 5 << 20, false, rounds);
}
