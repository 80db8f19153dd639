/* outputbirths.c: see outputbirths.h. */
#include "outputbirths.h"
#include "outputjournal.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Some tenths of a second of creating; more wait for Python, which then takes them over. */
#define BIRTHS_MOST 4096u

struct fsx_births {
    pthread_mutex_t turn; /* guards what follows, and writes of `count` */
    atomic_size_t count;
    uint64_t next; /* 0: nothing can be created */
    struct fsx_output_journal journal;
    struct fsx_birth births[BIRTHS_MOST]; /* consecutive numbers: Python gives none before it has taken all of these */
};

struct fsx_births *fsx_births_new(int journal) {
    struct fsx_births *births = calloc(1, sizeof *births);
    if (births == NULL)
        return NULL;
    if (!fsx_output_journal_open(&births->journal, journal)) {
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
    return births->births;
}

int64_t fsx_births_journal_end(const struct fsx_births *births) { return births->journal.position; }

void fsx_births_set(struct fsx_births *births, uint64_t next_inode, int64_t journal_end) {
    births->next = next_inode;
    births->journal.position = journal_end;
    fsx_births_end(births);
}

struct fsx_birth *fsx_births_next(struct fsx_births *births) {
    const size_t count = atomic_load(&births->count);
    const bool noted = births->journal.fd < 0 || births->journal.position >= 0;
    if (births->next == 0 || count == BIRTHS_MOST || !noted)
        return NULL;
    struct fsx_birth *birth = &births->births[count];
    birth->inode = births->next;
    birth->closed = false;
    return birth;
}

bool fsx_births_add(struct fsx_births *births, struct fsx_birth *birth) {
    if (!fsx_output_journal_create(&births->journal, birth->parent, birth->name, birth->name_bytes, birth->mode,
                                   birth->mtime_ns))
        return false;
    births->next++;
    atomic_fetch_add(&births->count, 1);
    return true;
}

struct fsx_birth *fsx_births_find(struct fsx_births *births, uint64_t inode) {
    const size_t count = atomic_load(&births->count);
    const uint64_t first = births->next - count;
    return inode >= first && inode - first < count ? &births->births[inode - first] : NULL;
}

bool fsx_births_close(struct fsx_births *births, struct fsx_birth *birth) {
    birth->closed = fsx_output_journal_commit(&births->journal, birth->inode, birth->size, birth->closed_mtime_ns);
    return birth->closed;
}
