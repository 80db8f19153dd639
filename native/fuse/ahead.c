/* ahead.c: see ahead.h. */
#include "fuse/ahead.h"

#include <pthread.h>
#include <stdlib.h>

#include "chunks/reads.h"

/* A file that was looked up and not read while so many others were looked up will not be read. */
#define RECENT 16u
/* Programs read what they look up from SCORE_ENOUGH on: one more for each file that was read, two less for each that was
 * not. So a job is recognised after 16 files, and a walk after as many and the 4 that lead down from SCORE_MOST. */
#define SCORE_MOST 24u
#define SCORE_ENOUGH 16u
#define SCORE_LOSS 2u

struct fsx_ahead {
    struct fsx_broker *broker;
    uint32_t readers_most;
    pthread_mutex_t lock; /* guards what follows */
    uint32_t readers;     /* threads that read ahead */
    uint32_t score;
    uint32_t next_recent;
    uint64_t recent[RECENT]; /* a ring of what was looked up and not read yet: entry plus one, 0 for none */
};

struct fsx_ahead *fsx_ahead_new(struct fsx_broker *broker, uint32_t workers) {
    struct fsx_ahead *ahead = calloc(1, sizeof *ahead);
    if (ahead == NULL)
        return NULL;
    pthread_mutex_init(&ahead->lock, NULL);
    ahead->broker = broker;
    ahead->readers_most = workers / 2;
    return ahead;
}

void fsx_ahead_free(struct fsx_ahead *ahead) {
    if (ahead == NULL)
        return;
    pthread_mutex_destroy(&ahead->lock);
    free(ahead);
}

/* ---- with the lock held ------------------------------------------------------------------------------------------- */

static uint64_t *find_recent(struct fsx_ahead *ahead, uint32_t entry) {
    for (uint32_t i = 0; i < RECENT; i++)
        if (ahead->recent[i] == (uint64_t)entry + 1)
            return &ahead->recent[i];
    return NULL;
}

static void note_look_up(struct fsx_ahead *ahead, uint32_t entry) {
    if (find_recent(ahead, entry) != NULL)
        return;
    uint64_t *oldest = &ahead->recent[ahead->next_recent++ % RECENT];
    if (*oldest != 0)
        ahead->score = ahead->score > SCORE_LOSS ? ahead->score - SCORE_LOSS : 0;
    *oldest = (uint64_t)entry + 1;
}

static void note_read(struct fsx_ahead *ahead, uint32_t entry) {
    uint64_t *recent = find_recent(ahead, entry);
    if (recent == NULL)
        return;
    *recent = 0;
    if (ahead->score < SCORE_MOST)
        ahead->score++;
}

/* ---- for the engine ----------------------------------------------------------------------------------------------- */

/* Does one answer hold all of a file? Others are not read ahead, and say nothing of what is likely. */
static bool suits(const struct fsx_ahead *ahead, uint32_t entry) {
    const uint64_t bytes = fsx_broker_index(ahead->broker)->size[entry];
    return ahead->readers_most > 0 && bytes > 0 && bytes <= FSX_READ_BYTES;
}

bool fsx_ahead_expects(struct fsx_ahead *ahead, uint32_t entry) {
    if (!suits(ahead, entry))
        return false;
    pthread_mutex_lock(&ahead->lock);
    note_look_up(ahead, entry);
    const bool likely = ahead->score >= SCORE_ENOUGH;
    pthread_mutex_unlock(&ahead->lock);
    return likely;
}

void fsx_ahead_note_read(struct fsx_ahead *ahead, uint32_t entry) {
    if (!suits(ahead, entry))
        return;
    pthread_mutex_lock(&ahead->lock);
    note_read(ahead, entry);
    pthread_mutex_unlock(&ahead->lock);
}

bool fsx_ahead_fetch(struct fsx_ahead *ahead, uint32_t entry, struct fsx_read_counts *mine) {
    if (!fsx_broker_waits(ahead->broker, entry))
        return false;
    pthread_mutex_lock(&ahead->lock);
    const bool wanted = ahead->readers < ahead->readers_most && find_recent(ahead, entry) != NULL;
    ahead->readers += wanted;
    pthread_mutex_unlock(&ahead->lock);
    if (!wanted)
        return true;
    fsx_broker_want(ahead->broker, mine, entry, 0, NULL, FSX_KEEP_ONCE);
    pthread_mutex_lock(&ahead->lock);
    ahead->readers--;
    pthread_mutex_unlock(&ahead->lock);
    return true;
}
