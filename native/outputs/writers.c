/* writers.c: see writers.h. */
#include "outputs/writers.h"

#include <errno.h>
#include <string.h>

/* Threads that never write to a disk at the same time. */
#define READERS_LEAST 4u

void fsx_writers_init(struct fsx_writers *writers, struct fsx_outputs *outputs, uint32_t workers) {
    writers->outputs = outputs;
    writers->most = workers > READERS_LEAST ? workers - READERS_LEAST : 1;
    atomic_init(&writers->count, 0);
}

/* Whether one more may write. Ends with `end` either way. */
static bool begin(struct fsx_writers *writers) { return atomic_fetch_add(&writers->count, 1) < writers->most; }

static void end(struct fsx_writers *writers) { atomic_fetch_sub(&writers->count, 1); }

int fsx_writers_do(struct fsx_writers *writers, const struct fsx_task *task, uint8_t *answer, size_t *bytes) {
    if (task->opcode == FUSE_READ || task->opcode == FUSE_LSEEK)
        return fsx_outputs_do(writers->outputs, task, answer, bytes);
    int error = ENOENT;
    if (begin(writers))
        error = fsx_outputs_do(writers->outputs, task, answer, bytes);
    end(writers);
    return error;
}

bool fsx_writers_sync(struct fsx_writers *writers, const struct fsx_task *task, bool *first, int *error) {
    const bool done = begin(writers) && fsx_outputs_sync(writers->outputs, task, first, error);
    end(writers);
    return done;
}

bool fsx_writers_create(struct fsx_writers *writers, const struct fsx_wanted *wanted, uint8_t *answer, size_t *bytes,
                        bool *first) {
    struct fsx_created created;
    const bool done = begin(writers) && fsx_outputs_create(writers->outputs, wanted, &created);
    end(writers);
    if (!done)
        return false;
    memcpy(answer, &created.entry, sizeof created.entry);
    memcpy(answer + sizeof created.entry, &created.open, sizeof created.open);
    *bytes = sizeof created.entry + sizeof created.open;
    *first = created.first;
    return true;
}
