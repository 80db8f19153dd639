/* slabs.c: see slabs.h. */
#include "chunks/slabs.h"
#include "chunks/shared.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)
#define SLAB_BYTES ((size_t)2 << 20)
/* Sizes: multiples of a page up to 32 KiB, then four for each doubling, up to 8 MiB; what is larger is refused: the
 * longest stored chunk is a little over 4 MiB. */
#define SMALL_CLASSES 8u
#define STEPS 4u
#define CLASSES (SMALL_CLASSES + STEPS * 8u)

struct fsx_slab {
    uint8_t *start;
    size_t bytes;      /* mapped */
    bool shared;       /* its memory is that of `shared` */
    bool late;         /* it was made when there was such memory, if not of it */
    uint32_t class;
    uint32_t blocks;
    uint32_t used;
    uint32_t fresh;    /* blocks from here on were never handed out */
    void *free;        /* a list through the first word of each that was given back */
    struct fsx_slab *next, **link; /* in the list of its class with something free, or of free slabs */
};

struct fsx_slabs {
    pthread_mutex_t lock; /* guards all below */
    struct fsx_shared *shared; /* NULL until there is one */
    uint64_t limit_bytes, mapped_bytes, used_bytes;
    size_t lost_bytes;                /* come on top of the limit */
    size_t empty_bytes;               /* in `empty` */
    struct fsx_slab *partly[CLASSES]; /* something is free, and something is used */
    struct fsx_slab *empty;           /* nothing is used; of any class */
};

/* The class for so many bytes, CLASSES if there is none. */
static uint32_t class_of(size_t bytes) {
    const size_t pages = bytes == 0 ? 1 : (bytes + PAGE - 1) / PAGE;
    if (pages <= SMALL_CLASSES)
        return (uint32_t)pages - 1;
    size_t base = SMALL_CLASSES;
    uint32_t class = SMALL_CLASSES;
    for (; class < CLASSES && pages > 2 * base; base *= 2)
        class += STEPS;
    const size_t step = base / STEPS;
    return class < CLASSES ? class + (uint32_t)((pages - base - 1) / step) : CLASSES;
}

/* Bytes of a block of this class, with the slack. */
static size_t stride_of(uint32_t class) {
    if (class < SMALL_CLASSES)
        return (class + 1) * PAGE + FSX_BLOCK_SLACK;
    const uint32_t doublings = (class - SMALL_CLASSES) / STEPS, step = (class - SMALL_CLASSES) % STEPS + 1;
    const size_t base = (size_t)SMALL_CLASSES << doublings;
    return (base + base / STEPS * step) * PAGE + FSX_BLOCK_SLACK;
}

size_t fsx_slabs_size(size_t bytes) {
    const uint32_t class = class_of(bytes);
    return class < CLASSES ? stride_of(class) : bytes;
}

struct fsx_slabs *fsx_slabs_new(uint64_t limit_bytes) {
    struct fsx_slabs *slabs = calloc(1, sizeof *slabs);
    if (slabs == NULL)
        return NULL;
    slabs->limit_bytes = limit_bytes;
    pthread_mutex_init(&slabs->lock, NULL);
    return slabs;
}

static void enter(struct fsx_slab **list, struct fsx_slab *slab) {
    slab->next = *list;
    slab->link = list;
    if (slab->next != NULL)
        slab->next->link = &slab->next;
    *list = slab;
}

static void leave(struct fsx_slab *slab) {
    *slab->link = slab->next;
    if (slab->next != NULL)
        slab->next->link = slab->link;
    slab->next = NULL;
    slab->link = NULL;
}

/* Memory that begins at a multiple of 2 MiB: a huge page can begin there. */
static uint8_t *map_aligned(size_t bytes) {
    uint8_t *start = mmap(NULL, bytes + SLAB_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    const size_t before = -(uintptr_t)start % SLAB_BYTES;
    if (before > 0)
        munmap(start, before);
    if (before < SLAB_BYTES)
        munmap(start + before + bytes, SLAB_BYTES - before);
    madvise(start + before, bytes, MADV_HUGEPAGE);
    return start + before;
}

static void unmap(struct fsx_slabs *slabs, struct fsx_slab *slab) {
    leave(slab);
    slabs->empty_bytes -= slab->bytes;
    slabs->mapped_bytes -= slab->bytes;
    if (slab->shared)
        fsx_shared_give(slabs->shared, slab->start, slab->bytes);
    else
        munmap(slab->start, slab->bytes);
    free(slab);
}

/* Of the time before memory was shared: it gives out no more blocks, and is in no list. */
static bool is_retired(const struct fsx_slabs *slabs, const struct fsx_slab *slab) {
    return slabs->shared != NULL && !slab->late;
}

void fsx_slabs_share(struct fsx_slabs *slabs, struct fsx_shared *shared) {
    pthread_mutex_lock(&slabs->lock);
    while (slabs->empty != NULL)
        unmap(slabs, slabs->empty);
    for (uint32_t class = 0; class < CLASSES; class++)
        while (slabs->partly[class] != NULL)
            leave(slabs->partly[class]);
    slabs->shared = shared;
    pthread_mutex_unlock(&slabs->lock);
}

void fsx_slabs_free(struct fsx_slabs *slabs) {
    if (slabs == NULL)
        return;
    while (slabs->empty != NULL)
        unmap(slabs, slabs->empty);
    pthread_mutex_destroy(&slabs->lock);
    free(slabs);
}

/* With the lock held: a slab of this class with nothing used, not in a list; NULL if there is no room for it. */
static struct fsx_slab *fresh_slab(struct fsx_slabs *slabs, uint32_t class) {
    const size_t stride = stride_of(class);
    const size_t bytes = stride * 2 <= SLAB_BYTES ? SLAB_BYTES : stride;
    struct fsx_slab *slab = slabs->empty;
    while (slab != NULL && slab->bytes != bytes)
        slab = slab->next;
    if (slab != NULL) { /* as it is, warm; blocks of another size may begin anywhere in it */
        leave(slab);
        slabs->empty_bytes -= bytes;
        *slab = (struct fsx_slab){.start = slab->start, .bytes = bytes, .shared = slab->shared, .late = slab->late};
    } else {
        while (slabs->mapped_bytes + bytes > slabs->limit_bytes + slabs->lost_bytes && slabs->empty != NULL)
            unmap(slabs, slabs->empty);
        if (slabs->mapped_bytes + bytes > slabs->limit_bytes + slabs->lost_bytes || (slab = calloc(1, sizeof *slab)) == NULL)
            return NULL;
        *slab = (struct fsx_slab){.bytes = bytes, .late = slabs->shared != NULL};
        if (slabs->shared != NULL)
            slab->start = fsx_shared_take(slabs->shared, bytes);
        slab->shared = slab->start != NULL;
        if (slab->start == NULL)
            slab->start = map_aligned(bytes);
        if (slab->start == NULL) {
            free(slab);
            return NULL;
        }
        slabs->mapped_bytes += bytes;
    }
    slab->class = class;
    slab->blocks = (uint32_t)(bytes / stride);
    return slab;
}

bool fsx_slabs_take(struct fsx_slabs *slabs, size_t bytes, struct fsx_block *block) {
    const uint32_t class = class_of(bytes);
    *block = (struct fsx_block){0};
    if (class >= CLASSES)
        return false;
    const size_t stride = stride_of(class);
    pthread_mutex_lock(&slabs->lock);
    struct fsx_slab *slab = slabs->partly[class];
    if (slab != NULL)
        leave(slab);
    else
        slab = fresh_slab(slabs, class);
    if (slab != NULL) {
        uint8_t *data = slab->free;
        if (data != NULL)
            slab->free = *(void **)data;
        else
            data = slab->start + stride * slab->fresh++;
        slab->used++;
        if (slab->used < slab->blocks)
            enter(&slabs->partly[class], slab);
        slabs->used_bytes += stride;
        *block = (struct fsx_block){.data = data, .bytes = stride, .slab = slab};
    }
    pthread_mutex_unlock(&slabs->lock);
    return block->data != NULL;
}

void fsx_slabs_give(struct fsx_slabs *slabs, struct fsx_block *block) {
    if (block->data == NULL)
        return;
    struct fsx_slab *slab = block->slab;
    pthread_mutex_lock(&slabs->lock);
    *(void **)block->data = slab->free;
    slab->free = block->data;
    slabs->used_bytes -= block->bytes;
    const bool retired = is_retired(slabs, slab);
    if (slab->used-- < slab->blocks && !retired)
        leave(slab);
    if (slab->used > 0) {
        if (!retired)
            enter(&slabs->partly[slab->class], slab);
    } else {
        enter(&slabs->empty, slab);
        slabs->empty_bytes += slab->bytes;
        if (retired || slabs->empty_bytes > FSX_SLABS_KEPT_BYTES || slabs->mapped_bytes > slabs->limit_bytes)
            unmap(slabs, slab);
    }
    pthread_mutex_unlock(&slabs->lock);
    *block = (struct fsx_block){0};
}

void fsx_slabs_set_limit(struct fsx_slabs *slabs, uint64_t limit_bytes) {
    pthread_mutex_lock(&slabs->lock);
    slabs->limit_bytes = limit_bytes;
    while (slabs->mapped_bytes > limit_bytes && slabs->empty != NULL)
        unmap(slabs, slabs->empty);
    pthread_mutex_unlock(&slabs->lock);
}

void fsx_slabs_set_lost(struct fsx_slabs *slabs, const struct fsx_block *block, bool lost) {
    pthread_mutex_lock(&slabs->lock);
    slabs->lost_bytes += lost ? block->bytes : -block->bytes;
    pthread_mutex_unlock(&slabs->lock);
}

struct fsx_slabs_counts fsx_slabs_count(struct fsx_slabs *slabs) {
    pthread_mutex_lock(&slabs->lock);
    const struct fsx_slabs_counts counts = {slabs->limit_bytes, slabs->mapped_bytes, slabs->used_bytes - slabs->lost_bytes};
    pthread_mutex_unlock(&slabs->lock);
    return counts;
}
