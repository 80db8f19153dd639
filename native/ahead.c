/* ahead.c: see ahead.h. */
#include "ahead.h"

#include <pthread.h>
#include <stdlib.h>

/* A file that was looked up and not read while so many others were looked up will not be read. */
#define RECENT 16u
/* Programs read what they look up from SCORE_ENOUGH on: one more for each file that was read, two less for each that was
 * not. So a job is recognised after 16 files, and a walk after as many and the 4 that lead down from SCORE_MOST. */
#define SCORE_MOST 24u
#define SCORE_ENOUGH 16u
#define SCORE_LOSS 2u

enum state {
    FREE,
    READING,  /* by a thread, which settles it */
    READY,    /* in `data` */
    ANSWERING /* a thread answers a READ, from `data` or from its own buffer */
};

struct place {
    enum state state;
    uint32_t entry;
    uint32_t bytes; /* of the file */
    enum fsx_origin origin;
    bool waits; /* READING: `waiting` does */
    bool wanted;
    uint64_t turn; /* READY: the order in which they became so */
    uint8_t *data; /* of fsx_answer_room */
    struct fsx_reader waiting;
};

struct fsx_ahead {
    struct fsx_content *content;
    uint32_t place_count;
    uint32_t readers_most;
    pthread_mutex_t lock; /* guards what follows; data and origin of a place that is ANSWERING are its thread's */
    uint32_t readers;     /* places that are READING */
    uint32_t score;
    uint32_t next_recent;
    uint64_t recent[RECENT]; /* a ring of what was looked up and not read yet: entry plus one, 0 for none */
    uint64_t turns;
    struct fsx_ahead_counts counts;
    struct place places[];
};

struct fsx_ahead *fsx_ahead_new(struct fsx_content *content, uint32_t workers) {
    struct fsx_ahead *ahead = calloc(1, sizeof *ahead + workers * sizeof ahead->places[0]);
    if (ahead == NULL)
        return NULL;
    pthread_mutex_init(&ahead->lock, NULL);
    ahead->content = content;
    ahead->place_count = workers > 1 ? workers : 0;
    ahead->readers_most = workers / 2;
    for (uint32_t i = 0; i < ahead->place_count; i++)
        if ((ahead->places[i].data = fsx_answer_room()) == NULL) {
            fsx_ahead_free(ahead);
            return NULL;
        }
    return ahead;
}

void fsx_ahead_free(struct fsx_ahead *ahead) {
    if (ahead == NULL)
        return;
    for (uint32_t i = 0; i < ahead->place_count; i++)
        free(ahead->places[i].data);
    pthread_mutex_destroy(&ahead->lock);
    free(ahead);
}

struct fsx_ahead_counts fsx_ahead_count(struct fsx_ahead *ahead) {
    pthread_mutex_lock(&ahead->lock);
    const struct fsx_ahead_counts counts = ahead->counts;
    pthread_mutex_unlock(&ahead->lock);
    return counts;
}

/* ---- with the lock held: what is likely --------------------------------------------------------------------------- */

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

/* ---- with the lock held: places ----------------------------------------------------------------------------------- */

static struct place *find_place(struct fsx_ahead *ahead, uint32_t entry) {
    for (uint32_t i = 0; i < ahead->place_count; i++)
        if (ahead->places[i].state != FREE && ahead->places[i].entry == entry)
            return &ahead->places[i];
    return NULL;
}

/* One that is free, or else what has waited longest to be wanted. */
static struct place *spare_place(struct fsx_ahead *ahead) {
    struct place *oldest = NULL;
    for (uint32_t i = 0; i < ahead->place_count; i++) {
        struct place *place = &ahead->places[i];
        if (place->state == FREE)
            return place;
        if (place->state == READY && (oldest == NULL || place->turn < oldest->turn))
            oldest = place;
    }
    return oldest;
}

static void begin_answer(struct fsx_ahead *ahead, struct place *place) {
    ahead->counts.wanted += place->wanted ? 0 : 1;
    place->wanted = true;
    place->state = ANSWERING;
}

/* What was read is kept. `buffer`: where it is, if not in the place; it is exchanged for another. */
static void keep(struct fsx_ahead *ahead, struct place *place, uint8_t **buffer) {
    if (buffer != NULL) {
        uint8_t *data = *buffer;
        *buffer = place->data;
        place->data = data;
    }
    place->state = READY;
    place->turn = ahead->turns++;
}

/* ---- steps of a place --------------------------------------------------------------------------------------------- */

/* A place for a file that the caller is about to read. NULL: there is none, or its READ was faster than the caller. */
static struct place *begin(struct fsx_ahead *ahead, uint32_t entry, uint32_t bytes) {
    struct place *place = NULL;
    pthread_mutex_lock(&ahead->lock);
    if (ahead->readers < ahead->readers_most && find_recent(ahead, entry) != NULL && find_place(ahead, entry) == NULL)
        place = spare_place(ahead);
    if (place != NULL) {
        *place = (struct place){.state = READING, .entry = entry, .bytes = bytes, .data = place->data};
        ahead->readers++;
    }
    pthread_mutex_unlock(&ahead->lock);
    return place;
}

/* What has become of it: read into `*buffer`, or not. True if a READ waits for it, which is the caller's then. */
static bool settle(struct fsx_ahead *ahead, struct place *place, bool done, enum fsx_origin origin, uint8_t **buffer,
                   struct fsx_reader *waiting) {
    pthread_mutex_lock(&ahead->lock);
    const bool waits = place->waits;
    *waiting = place->waiting;
    place->origin = origin;
    ahead->readers--;
    if (done)
        ahead->counts.files++;
    if (!done)
        place->state = FREE;
    else if (waits)
        begin_answer(ahead, place);
    else
        keep(ahead, place, buffer);
    pthread_mutex_unlock(&ahead->lock);
    return waits;
}

/* A READ was answered; what comes after it in the file is kept for the next. */
static void let_go(struct fsx_ahead *ahead, struct place *place, const struct fsx_reader *reader, uint8_t **buffer) {
    pthread_mutex_lock(&ahead->lock);
    if (reader->offset + reader->length < place->bytes)
        keep(ahead, place, buffer);
    else
        place->state = FREE;
    pthread_mutex_unlock(&ahead->lock);
}

/* The place from which to answer a READ; or NULL, and `*waits` if the thread that reads the file sees to it. */
static struct place *claim(struct fsx_ahead *ahead, const struct fsx_reader *reader, bool *waits) {
    pthread_mutex_lock(&ahead->lock);
    note_read(ahead, reader->entry);
    struct place *place = find_place(ahead, reader->entry);
    const bool ready = place != NULL && place->state == READY;
    *waits = place != NULL && place->state == READING && !place->waits;
    if (ready)
        begin_answer(ahead, place);
    if (*waits) {
        place->waiting = *reader;
        place->waits = true;
    }
    pthread_mutex_unlock(&ahead->lock);
    return ready ? place : NULL;
}

/* ---- for the engine ----------------------------------------------------------------------------------------------- */

/* Does one answer hold all of a file? Others are not read ahead, and say nothing of what is likely. */
static bool suits(const struct fsx_ahead *ahead, uint32_t entry) {
    const uint64_t bytes = fsx_content_index(ahead->content)->size[entry];
    return ahead->readers_most > 0 && bytes > 0 && bytes <= FSX_ANSWER_BYTES;
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

/* Of a file that a disk has. */
static void fetch(struct fsx_ahead *ahead, uint32_t entry, struct fsx_hands *hands, const struct fsx_ahead_ends *ends) {
    const uint32_t bytes = (uint32_t)fsx_content_index(ahead->content)->size[entry];
    struct place *place = begin(ahead, entry, bytes);
    if (place == NULL)
        return;
    struct fsx_reader waiting;
    enum fsx_origin origin;
    const bool done = fsx_content_read_ahead(ahead->content, hands, entry, bytes, &origin);
    if (!settle(ahead, place, done, origin, &hands->answer, &waiting))
        return;
    if (!done) {
        ends->elsewhere(ends->context, &waiting);
        return;
    }
    fsx_content_count_read(hands, origin, waiting.length);
    ends->answer(ends->context, &waiting, hands->answer + waiting.offset);
    let_go(ahead, place, &waiting, &hands->answer);
}

bool fsx_ahead_fetch(struct fsx_ahead *ahead, uint32_t entry, struct fsx_hands *hands, const struct fsx_ahead_ends *ends) {
    const bool waits = fsx_content_waits(ahead->content, entry);
    if (waits)
        fetch(ahead, entry, hands, ends);
    return waits;
}

void fsx_ahead_read(struct fsx_ahead *ahead, const struct fsx_reader *reader, struct fsx_hands *hands,
                    const struct fsx_ahead_ends *ends) {
    bool waits = false;
    struct place *place = reader->length > 0 && suits(ahead, reader->entry) ? claim(ahead, reader, &waits) : NULL;
    if (waits)
        return;
    if (place != NULL) {
        fsx_content_count_read(hands, place->origin, reader->length);
        ends->answer(ends->context, reader, place->data + reader->offset);
        let_go(ahead, place, reader, NULL);
    } else if (fsx_content_read(ahead->content, hands, reader->entry, reader->offset, reader->length)) {
        ends->answer(ends->context, reader, hands->answer);
    } else {
        ends->elsewhere(ends->context, reader);
    }
}
