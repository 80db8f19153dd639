/* outputs/engine_creates.c: see outputs/engine_creates.h. */
#include "outputs/engine_creates.h"
#include "outputs/journal.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Some tenths of a second of creating; more wait for Python, which then takes them over. */
#define FILES_MOST 4096u
/* Files whose contents may be noted here; those of others are noted by Python. */
#define OWN_MOST 8192u

/* A file whose content may be noted here. */
struct own {
    uint64_t inode;  /* 0 for none */
    uint64_t number; /* of its creation, among all */
    bool is_new;     /* created here, and its content was never noted */
};

struct fsx_creates {
    pthread_mutex_t turn; /* guards what follows, and writes of `count` */
    atomic_size_t count;
    uint64_t next; /* the number of the next one; 0: nothing can be created */
    struct fsx_output_journal journal;
    uint64_t taken; /* files that Python has taken so far */
    struct own own[OWN_MOST]; /* by inode */
    struct fsx_create files[FILES_MOST];
};

struct fsx_creates *fsx_creates_new(int journal, uint32_t rank) {
    struct fsx_creates *creates = calloc(1, sizeof *creates);
    if (creates == NULL)
        return NULL;
    if (!fsx_output_journal_open(&creates->journal, journal, rank)) {
        const int error = errno;
        free(creates);
        errno = error;
        return NULL;
    }
    pthread_mutex_init(&creates->turn, NULL);
    return creates;
}

void fsx_creates_free(struct fsx_creates *creates) {
    if (creates == NULL)
        return;
    fsx_output_journal_close(&creates->journal);
    pthread_mutex_destroy(&creates->turn);
    free(creates);
}

bool fsx_creates_any(const struct fsx_creates *creates) { return atomic_load(&creates->count) > 0; }

void fsx_creates_begin(struct fsx_creates *creates) { pthread_mutex_lock(&creates->turn); }

void fsx_creates_end(struct fsx_creates *creates) { pthread_mutex_unlock(&creates->turn); }

const struct fsx_create *fsx_creates_take(struct fsx_creates *creates, size_t *count) {
    *count = atomic_exchange(&creates->count, 0);
    creates->taken += *count;
    return creates->files;
}

int64_t fsx_creates_journal_end(const struct fsx_creates *creates) { return creates->journal.position; }

void fsx_creates_set(struct fsx_creates *creates, uint64_t next_inode, int64_t journal_end) {
    creates->next = next_inode;
    creates->journal.position = journal_end;
    fsx_creates_end(creates);
}

static bool is_full(const struct fsx_creates *creates) { return atomic_load(&creates->count) == FILES_MOST; }

static struct own *place_of(const struct fsx_creates *creates, uint64_t inode) {
    return (struct own *)&creates->own[inode % OWN_MOST];
}

struct fsx_create *fsx_creates_next(struct fsx_creates *creates) {
    const bool noted = creates->journal.fd < 0 || creates->journal.position >= 0;
    if (creates->next == 0 || is_full(creates) || !noted)
        return NULL;
    struct fsx_create *file = &creates->files[atomic_load(&creates->count)];
    file->inode = creates->next;
    file->noted = false;
    return file;
}

bool fsx_creates_add(struct fsx_creates *creates, struct fsx_create *file) {
    if (!fsx_output_journal_create(&creates->journal, file->parent, file->name, file->name_bytes,
                                 file->mode, file->mtime_ns))
        return false;
    creates->next++;
    const size_t before = atomic_fetch_add(&creates->count, 1);
    *place_of(creates, file->inode) = (struct own){.inode = file->inode, .number = creates->taken + before, .is_new = true};
    return true;
}

bool fsx_creates_is_new(const struct fsx_creates *creates, uint64_t inode) {
    return fsx_creates_is_own(creates, inode) && place_of(creates, inode)->is_new;
}

bool fsx_creates_is_own(const struct fsx_creates *creates, uint64_t inode) {
    return place_of(creates, inode)->inode == inode;
}

void fsx_creates_disown(struct fsx_creates *creates, uint64_t inode) {
    if (fsx_creates_is_own(creates, inode))
        place_of(creates, inode)->inode = 0;
}

void fsx_creates_own(struct fsx_creates *creates, uint64_t inode) {
    *place_of(creates, inode) = (struct own){.inode = inode};
}

bool fsx_creates_note(struct fsx_creates *creates, uint64_t inode, uint64_t size, int64_t mtime_ns, int64_t ctime_ns) {
    struct own *own = place_of(creates, inode);
    const bool with_creation = own->is_new && own->number >= creates->taken;
    if ((!with_creation && is_full(creates)) || !fsx_output_journal_commit(&creates->journal, inode, size, mtime_ns))
        return false;
    struct fsx_create *file = &creates->files[with_creation ? own->number - creates->taken : atomic_load(&creates->count)];
    if (!with_creation)
        *file = (struct fsx_create){.inode = inode};
    file->noted = true;
    file->size = size;
    file->noted_mtime_ns = mtime_ns;
    file->noted_ctime_ns = ctime_ns;
    if (!with_creation)
        atomic_fetch_add(&creates->count, 1);
    own->is_new = false;
    return true;
}
