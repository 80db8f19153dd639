/* outputbirths.c: see outputbirths.h. */
#include "outputbirths.h"
#include "outputjournal.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Some tenths of a second of creating; more wait for Python, which then takes them over. */
#define BIRTHS_MOST 4096u
/* Files that are open at a time, and were never closed; of more, some are closed by Python. */
#define UNCLOSED_MOST 8192u

/* A file that was created here and not closed since. */
struct unclosed {
    uint64_t inode;  /* 0 for none */
    uint64_t number; /* of its birth, among all */
};

struct fsx_births {
    pthread_mutex_t turn; /* guards what follows, and writes of `count` */
    atomic_size_t count;
    uint64_t next, end; /* numbers from the first up to below the second; 0: nothing can be created */
    struct fsx_output_journal journal;
    uint64_t taken; /* births that Python has taken so far */
    struct unclosed unclosed[UNCLOSED_MOST]; /* by inode */
    struct fsx_birth births[BIRTHS_MOST];
};

struct fsx_births *fsx_births_new(int journal, uint32_t rank) {
    struct fsx_births *births = calloc(1, sizeof *births);
    if (births == NULL)
        return NULL;
    if (!fsx_output_journal_open(&births->journal, journal, rank)) {
        const int error = errno;
        free(births);
        errno = error;
        return NULL;
    }
    pthread_mutex_init(&births->turn, NULL);
    return births;
}

void fsx_births_free(struct fsx_births *births) {
    if (births == NULL)
        return;
    fsx_output_journal_close(&births->journal);
    pthread_mutex_destroy(&births->turn);
    free(births);
}

bool fsx_births_any(const struct fsx_births *births) { return atomic_load(&births->count) > 0; }

void fsx_births_begin(struct fsx_births *births) { pthread_mutex_lock(&births->turn); }

void fsx_births_end(struct fsx_births *births) { pthread_mutex_unlock(&births->turn); }

const struct fsx_birth *fsx_births_take(struct fsx_births *births, size_t *count) {
    *count = atomic_exchange(&births->count, 0);
    births->taken += *count;
    return births->births;
}

int64_t fsx_births_journal_end(const struct fsx_births *births) { return births->journal.position; }

void fsx_births_set(struct fsx_births *births, uint64_t next_inode, uint64_t end_inode, int64_t journal_end) {
    births->next = next_inode;
    births->end = end_inode;
    births->journal.position = journal_end;
    fsx_births_end(births);
}

static bool is_full(const struct fsx_births *births) { return atomic_load(&births->count) == BIRTHS_MOST; }

static struct unclosed *place_of(const struct fsx_births *births, uint64_t inode) {
    return (struct unclosed *)&births->unclosed[inode % UNCLOSED_MOST];
}

struct fsx_birth *fsx_births_next(struct fsx_births *births) {
    const bool noted = births->journal.fd < 0 || births->journal.position >= 0;
    if (births->next == 0 || births->next >= births->end || is_full(births) || !noted)
        return NULL;
    struct fsx_birth *birth = &births->births[atomic_load(&births->count)];
    birth->inode = births->next;
    birth->closed = false;
    return birth;
}

bool fsx_births_add(struct fsx_births *births, struct fsx_birth *birth) {
    if (!fsx_output_journal_born(&births->journal, birth->inode, birth->parent, birth->name, birth->name_bytes,
                                 birth->mode, birth->mtime_ns))
        return false;
    births->next++;
    const size_t before = atomic_fetch_add(&births->count, 1);
    *place_of(births, birth->inode) = (struct unclosed){.inode = birth->inode, .number = births->taken + before};
    return true;
}

bool fsx_births_is_new(const struct fsx_births *births, uint64_t inode) {
    return place_of(births, inode)->inode == inode;
}

void fsx_births_disown(struct fsx_births *births, uint64_t inode) {
    if (inode == 0)
        memset(births->unclosed, 0, sizeof births->unclosed);
    else if (fsx_births_is_new(births, inode))
        place_of(births, inode)->inode = 0;
}

bool fsx_births_close(struct fsx_births *births, uint64_t inode, uint64_t size, int64_t mtime_ns, int64_t ctime_ns) {
    const uint64_t number = place_of(births, inode)->number;
    const bool known = number < births->taken; /* to Python */
    if ((known && is_full(births)) || !fsx_output_journal_commit(&births->journal, inode, size, mtime_ns))
        return false;
    struct fsx_birth *birth = &births->births[known ? atomic_load(&births->count) : number - births->taken];
    if (known)
        *birth = (struct fsx_birth){.inode = inode};
    birth->closed = true;
    birth->size = size;
    birth->closed_mtime_ns = mtime_ns;
    birth->closed_ctime_ns = ctime_ns;
    if (known)
        atomic_fetch_add(&births->count, 1);
    fsx_births_disown(births, inode);
    return true;
}
