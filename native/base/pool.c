/* pool.c: see pool.h. */
#include "base/pool.h"

#include <stdbool.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)
#define HUGE_BYTES ((size_t)2 << 20)
#define SMALL (8 * PAGE)
#define TOO_LARGE FSX_POOL_CLASSES

struct fsx_block {
    struct fsx_block *next;
};

/* The class of a size, and the size of its blocks. */
static int class_of(size_t bytes, size_t *capacity) {
    if (bytes <= SMALL) {
        const size_t pages = bytes == 0 ? 1 : (bytes + PAGE - 1) / PAGE;
        *capacity = pages * PAGE;
        return (int)pages - 1;
    }
    size_t base = SMALL;
    int first = 8;
    while (bytes > 2 * base && first < TOO_LARGE) {
        base *= 2;
        first += 8;
    }
    if (first >= TOO_LARGE) {
        *capacity = (bytes + PAGE - 1) / PAGE * PAGE;
        return TOO_LARGE;
    }
    const size_t step = base / 8;
    const size_t steps = (bytes - base + step - 1) / step; /* 1 to 8 */
    *capacity = base + steps * step;
    return first + (int)steps - 1;
}

static void *pop(struct fsx_pool *pool, int class, size_t capacity) {
    struct fsx_block *block = pool->free[class];
    pool->free[class] = block->next;
    pool->kept_bytes -= capacity;
    return block;
}

static size_t capacity_of(int class) {
    if (class < 8)
        return ((size_t)class + 1) * PAGE;
    const size_t base = SMALL << (class / 8 - 1);
    return base + ((size_t)(class % 8) + 1) * (base / 8);
}

void *fsx_pool_take(struct fsx_pool *pool, size_t bytes, size_t *capacity) {
    const int class = class_of(bytes, capacity);
    if (class != TOO_LARGE && pool->free[class] != NULL)
        return pop(pool, class, *capacity);
    void *block = mmap(NULL, *capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED)
        return NULL;
    if (*capacity >= HUGE_BYTES)
        madvise(block, *capacity, MADV_HUGEPAGE); /* fewer faults, and one request of direct I/O; only an advice */
    return block;
}

/* Sizes that are in demand push out others, in turn. */
static void drop_to(struct fsx_pool *pool, size_t most_bytes) {
    while (pool->kept_bytes > most_bytes) {
        pool->victim = (pool->victim + 1) % FSX_POOL_CLASSES;
        if (pool->free[pool->victim] != NULL) {
            const size_t capacity = capacity_of(pool->victim);
            munmap(pop(pool, pool->victim, capacity), capacity);
        }
    }
}

void fsx_pool_give(struct fsx_pool *pool, void *memory, size_t capacity) {
    size_t same;
    const int class = class_of(capacity, &same);
    const bool keeps = class != TOO_LARGE && capacity <= pool->keep_bytes;
    drop_to(pool, keeps ? pool->keep_bytes - capacity : pool->keep_bytes);
    if (!keeps) {
        munmap(memory, capacity);
        return;
    }
    struct fsx_block *block = memory;
    block->next = pool->free[class];
    pool->free[class] = block;
    pool->kept_bytes += capacity;
}

void fsx_pool_keep(struct fsx_pool *pool, size_t keep_bytes) {
    pool->keep_bytes = keep_bytes;
    drop_to(pool, keep_bytes);
}
