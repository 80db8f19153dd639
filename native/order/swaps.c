/* swaps.c: shuffles of frameworks, replayed from the random numbers that they draw; see swaps.h. */
#include "order/swaps.h"

static void swap(int64_t *order, size_t a, size_t b) {
    const int64_t kept = order[a];
    order[a] = order[b];
    order[b] = kept;
}

void fsx_swap_forward(const uint32_t *draws, size_t draws_count, int64_t *order, size_t count) {
    for (size_t i = 0; i < draws_count && i + 1 < count; i++)
        swap(order, i, i + draws[i] % (count - i));
}

size_t fsx_swap_backward(const uint32_t *draws, size_t draws_count, int64_t *order, size_t count) {
    size_t used = 0;
    for (size_t last = count; last-- > 1;) {
        const int excess = __builtin_clz((uint32_t)(last + 1)); /* a draw has so many bits more than the bound */
        size_t chosen;
        do {
            if (used == draws_count)
                return SIZE_MAX;
            chosen = draws[used++] >> excess;
        } while (chosen > last);
        swap(order, last, chosen);
    }
    return used;
}

void fsx_swap_buffer(const uint32_t *draws, int64_t *order, size_t count, int64_t *ring, size_t buffer) {
    size_t filled = 0;
    for (size_t taken = 0; taken < count; taken++) {
        for (; filled < count && filled - taken < buffer; filled++)
            ring[filled % buffer] = (int64_t)filled;
        const size_t chosen = (taken + draws[taken] % (filled - taken)) % buffer;
        order[taken] = ring[chosen];
        ring[chosen] = ring[taken % buffer];
    }
}
