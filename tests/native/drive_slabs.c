/* drive_slabs.c: many threads on native/chunks/slabs.c: blocks of all sizes, never shared, never more than the bound. */
#include "drive_world.h"

#include <pthread.h>

#define THREADS 6u
#define HELD 40u

struct job {
    struct fsx_slabs *slabs;
    uint64_t seed;
    uint32_t rounds;
    uint64_t taken, refused;
};

static void fill(const struct fsx_block *block, uint64_t mark) {
    for (size_t i = 0; i < block->bytes; i += 4096)
        memcpy(block->data + i, &mark, sizeof mark);
}

static void check_filled(const struct fsx_block *block, uint64_t mark) {
    for (size_t i = 0; i < block->bytes; i += 4096)
        check(memcmp(block->data + i, &mark, sizeof mark) == 0, "somebody else writes to this block");
}

static void *use_slabs(void *argument) {
    struct job *job = argument;
    struct fsx_block blocks[HELD] = {0};
    uint64_t marks[HELD];
    for (uint32_t round = 0; round < job->rounds; round++) {
        const uint32_t i = (uint32_t)below(&job->seed, HELD);
        if (blocks[i].data != NULL) {
            check_filled(&blocks[i], marks[i]);
            fsx_slabs_give(job->slabs, &blocks[i]);
            check(blocks[i].data == NULL, "a block that was given back is still there");
        }
        const size_t most = below(&job->seed, 4) == 0 ? 5u << 20 : 200u << 10;
        const size_t bytes = below(&job->seed, most);
        if (!fsx_slabs_take(job->slabs, bytes, &blocks[i])) {
            job->refused++;
            continue;
        }
        job->taken++;
        check((uintptr_t)blocks[i].data % 4096 == 0 && blocks[i].bytes >= bytes + FSX_BLOCK_SLACK &&
                  blocks[i].bytes == fsx_slabs_size(bytes),
              "a block that does not suit");
        marks[i] = next_random(&job->seed);
        fill(&blocks[i], marks[i]);
    }
    for (uint32_t i = 0; i < HELD; i++)
        fsx_slabs_give(job->slabs, &blocks[i]);
    return NULL;
}

/* Every size of a chunk has a block, and what it wastes is bounded. */
static void check_sizes(struct fsx_slabs *slabs) {
    for (size_t bytes = 0; bytes <= (4u << 20) + (32u << 10); bytes += 3001) {
        struct fsx_block block;
        check(fsx_slabs_take(slabs, bytes, &block), "no block of this size");
        check(block.bytes <= bytes + bytes / 4 + 3 * 4096, "a block that is much too large");
        fsx_slabs_give(slabs, &block);
    }
    struct fsx_block none;
    check(!fsx_slabs_take(slabs, 9u << 20, &none) && none.data == NULL, "a block larger than there are");
}

void drive_slabs(uint32_t rounds) {
    const uint64_t limits[] = {4 << 20, 32 << 20, 1 << 30};
    for (uint32_t l = 0; l < 3; l++) {
        struct fsx_slabs *slabs = fsx_slabs_new(limits[l]);
        check(slabs != NULL, "no memory");
        struct job jobs[THREADS];
        pthread_t threads[THREADS];
        for (uint32_t i = 0; i < THREADS; i++) {
            jobs[i] = (struct job){.slabs = slabs, .seed = 77 + i + l * 100, .rounds = rounds};
            check(pthread_create(&threads[i], NULL, use_slabs, &jobs[i]) == 0, "no thread");
        }
        uint64_t taken = 0, refused = 0;
        for (uint32_t i = 0; i < THREADS; i++) {
            pthread_join(threads[i], NULL);
            taken += jobs[i].taken;
            refused += jobs[i].refused;
        }
        struct fsx_slabs_counts counts = fsx_slabs_count(slabs);
        check(taken > 0 && (l == 2) == (refused == 0), "the bound does not hold, or holds too early");
        check(counts.used_bytes == 0 && counts.mapped_bytes <= limits[l] && counts.mapped_bytes <= FSX_SLABS_KEPT_BYTES,
              "memory is kept that nobody uses");
        fsx_slabs_set_limit(slabs, 0);
        check(fsx_slabs_count(slabs).mapped_bytes == 0, "a new bound does not count");
        fsx_slabs_set_limit(slabs, 64 << 20);
        check_sizes(slabs);
        fsx_slabs_free(slabs);
    }
}
