/* seedsearch.c: which seed shuffles like this? See seedsearch.h.
 *
 * MT19937 has 624 words of state. Seeding makes word i from word i - 1; output k (k < 227) is made of words k, k + 1 and
 * k + 397. So seeds are worked on side by side, one per lane of the vector unit, and the words in between are not kept.
 */
#include "order/seedsearch.h"

#include <string.h>

#define WORDS 624u
#define AHEAD 397u
#define LANES 256u /* 64: 15 ns per seed, 128: 8 ns, 256: 7 ns, 512: 8 ns (AVX-512, gcc 12 -O3) */

/* The compiler makes the loops over lanes once for each of these, and the best that the processor has is called. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

static inline uint32_t seeded(uint32_t word, uint32_t index) { return 1812433253u * (word ^ (word >> 30)) + index; }

static inline uint32_t twisted(uint32_t low, uint32_t high, uint32_t ahead) {
    const uint32_t mixed = (low & 0x80000000u) | (high & 0x7fffffffu);
    return ahead ^ (mixed >> 1) ^ ((0u - (high & 1u)) & 0x9908b0dfu);
}

static inline uint32_t tempered(uint32_t word) {
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    return word ^ (word >> 18);
}

/* Output number `output` (below FSX_SEARCH_FIRST) for the seeds `seed`, `seed` + 1, ... */
FOR_EACH_PROCESSOR
static void outputs_of_seeds(uint32_t seed, uint32_t output, uint32_t results[LANES]) {
    uint32_t words[LANES], low[LANES], high[LANES];
    for (uint32_t lane = 0; lane < LANES; lane++)
        words[lane] = seed + lane;
    for (uint32_t i = 1; i <= output; i++)
        for (uint32_t lane = 0; lane < LANES; lane++)
            words[lane] = seeded(words[lane], i);
    memcpy(low, words, sizeof low);
    for (uint32_t lane = 0; lane < LANES; lane++)
        words[lane] = high[lane] = seeded(words[lane], output + 1);
    for (uint32_t i = output + 2; i <= output + AHEAD; i++)
        for (uint32_t lane = 0; lane < LANES; lane++)
            words[lane] = seeded(words[lane], i);
    for (uint32_t lane = 0; lane < LANES; lane++)
        results[lane] = tempered(twisted(low[lane], high[lane], words[lane]));
}

/* The first `count` outputs for one seed. */
static void outputs_of_seed(uint32_t seed, uint32_t *results, size_t count) {
    uint32_t words[WORDS];
    words[0] = seed;
    for (uint32_t i = 1; i < WORDS; i++)
        words[i] = seeded(words[i - 1], i);
    for (size_t i = 0; i < count; i++) {
        uint32_t *word = &words[i % WORDS];
        *word = twisted(*word, words[(i + 1) % WORDS], words[(i + AHEAD) % WORDS]);
        results[i] = tempered(*word);
    }
}

/* Which item the swaps bring to a place: back through them, from the place it was taken from to where it came from. */
static uint32_t item_at(uint32_t place, const uint32_t *draws, uint32_t count) {
    uint32_t item = place + draws[place] % (count - place);
    for (uint32_t earlier = place; earlier-- > 0;)
        if (earlier + draws[earlier] % (count - earlier) == item)
            item = earlier;
    return item;
}

static bool is_true(const struct fsx_search *search, const struct fsx_sighting *hypothesis, uint32_t seed) {
    uint32_t outputs[FSX_SEARCH_FIRST + FSX_SEARCH_PLACES];
    outputs_of_seed(seed, outputs, search->skipped + hypothesis[search->depth - 1].place + 1);
    for (size_t i = 0; i < search->depth; i++)
        if (item_at(hypothesis[i].place, outputs + search->skipped, search->count) != hypothesis[i].item)
            return false;
    return true;
}

bool fsx_search_valid(const struct fsx_search *search) {
    if (search->hypotheses == 0 || search->depth == 0)
        return false;
    for (size_t i = 0; i < search->hypotheses * search->depth; i++) {
        const struct fsx_sighting *sighting = &search->sightings[i];
        /* The last place is no choice: nothing is drawn for it. */
        if (sighting->item >= search->count || sighting->place >= search->count - 1 ||
            sighting->place >= FSX_SEARCH_PLACES)
            return false;
        if (i % search->depth == 0 ? sighting->place != search->sightings[0].place
                                   : sighting->place <= sighting[-1].place)
            return false;
    }
    return search->skipped < FSX_SEARCH_FIRST - 1 &&
           search->sightings[0].place + search->skipped < FSX_SEARCH_FIRST;
}

uint64_t fsx_search_seed(const struct fsx_search *search, uint64_t begin, uint64_t end, size_t *hypothesis) {
    const uint32_t place = search->sightings[0].place;
    for (uint64_t seed = begin; seed < end; seed += LANES) {
        uint32_t items[LANES];
        outputs_of_seeds((uint32_t)seed, search->skipped + place, items);
        for (uint32_t lane = 0; lane < LANES; lane++)
            items[lane] = place + items[lane] % (search->count - place);
        const uint32_t lanes = end - seed < LANES ? (uint32_t)(end - seed) : LANES;
        for (uint32_t lane = 0; lane < lanes; lane++)
            for (size_t h = 0; h < search->hypotheses; h++)
                if (items[lane] == search->sightings[h * search->depth].item &&
                    is_true(search, &search->sightings[h * search->depth], (uint32_t)seed + lane)) {
                    *hypothesis = h;
                    return seed + lane;
                }
    }
    return end;
}
