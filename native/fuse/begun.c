/* begun.c: see begun.h. */
#include "fuse/begun.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

/* More than there are engine threads. */
#define WRITTEN_AT_ONCE 64u

struct fsx_begun {
    int wake;
    atomic_bool waiting;           /* Python is to be woken */
    _Alignas(64) atomic_uint_least64_t next; /* to be written; counts up for ever */
    _Alignas(64) uint64_t taken;   /* up to here; Python's alone */
    atomic_uint_least64_t files[FSX_BEGUN_RING]; /* 0: not written yet; no file is entry 0, which is the root */
};

struct fsx_begun *fsx_begun_new(int wake) {
    struct fsx_begun *begun = aligned_alloc(64, (sizeof *begun + 63) / 64 * 64);
    if (begun == NULL)
        return NULL;
    begun->wake = wake;
    atomic_init(&begun->waiting, false);
    atomic_init(&begun->next, 0);
    begun->taken = 0;
    for (size_t i = 0; i < FSX_BEGUN_RING; i++)
        atomic_init(&begun->files[i], 0);
    return begun;
}

void fsx_begun_free(struct fsx_begun *begun) { free(begun); }

void fsx_begun_note(struct fsx_begun *begun, uint32_t entry, uint32_t thread) {
    const uint64_t place = atomic_fetch_add_explicit(&begun->next, 1, memory_order_relaxed);
    atomic_store_explicit(&begun->files[place % FSX_BEGUN_RING], (uint64_t)entry << 32 | thread, memory_order_seq_cst);
    if (atomic_load_explicit(&begun->waiting, memory_order_seq_cst) && atomic_exchange(&begun->waiting, false)) {
        const uint64_t one = 1;
        while (write(begun->wake, &one, sizeof one) < 0 && errno == EINTR)
            ;
    }
}

size_t fsx_begun_take(struct fsx_begun *begun, uint64_t *files, uint64_t *lost) {
    const uint64_t next = atomic_load(&begun->next);
    if (next - begun->taken > FSX_BEGUN_RING) {
        *lost += next - FSX_BEGUN_RING - begun->taken;
        begun->taken = next - FSX_BEGUN_RING;
    }
    size_t count = 0;
    for (; begun->taken < next; begun->taken++) {
        const uint64_t file = atomic_exchange(&begun->files[begun->taken % FSX_BEGUN_RING], 0);
        if (file == 0 && next - begun->taken <= WRITTEN_AT_ONCE)
            break; /* it is being written */
        if (file != 0) /* or it was taken in place of one that it has overwritten */
            files[count++] = file;
    }
    return count;
}

bool fsx_begun_wait(struct fsx_begun *begun) {
    atomic_store(&begun->waiting, true);
    if (atomic_load(&begun->files[begun->taken % FSX_BEGUN_RING]) == 0)
        return true;
    atomic_store(&begun->waiting, false);
    return false;
}
