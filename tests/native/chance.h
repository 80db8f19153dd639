/* chance.h: random numbers for the fuzzers, the same on every machine. Each program sets `state` first, and not to 0. */
#ifndef FANSTORE_CHANCE_H
#define FANSTORE_CHANCE_H

#include <stdint.h>

static uint64_t state;

/* xorshift64*. */
static uint64_t next_random(void) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * UINT64_C(2685821657736338717);
}

static uint64_t below(uint64_t limit) { return limit == 0 ? 0 : next_random() % limit; }

#endif
