/* upcalls.h: what the engine asks of Python: a line of requests that Python takes, does, and answers.
 *
 * Owns the places in the line, the tokens, and copies of what is to be done once Python is ready for it. An eventfd, the
 * caller's, is written when the line was empty. Any thread; one lock, held for a few assignments (and for a look through
 * all places when a request is interrupted), never during a system call.
 */
#ifndef FANSTORE_FUSE_UPCALLS_H
#define FANSTORE_FUSE_UPCALLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Numbers as fanstore/fuse/native.py has them. */
enum fsx_upcall_kind {
    FSX_UPCALL_OUTPUT_READ, /* of an output that is not here; the number is its inode, also below */
    FSX_UPCALL_MAKE_LOCAL,  /* an output is written that is not here: the operation waits until it is */
    FSX_UPCALL_NO_ROOM      /* the disk is full, but what was removed a moment ago may still go: likewise */
};

/* What Python is told. `token` is what it answers with. */
struct fsx_upcall {
    uint64_t token;
    enum fsx_upcall_kind kind;
    uint64_t number;
    uint64_t offset;
    uint64_t length;
};

/* What is asked, and by whom. */
struct fsx_asked {
    enum fsx_upcall_kind kind;
    uint32_t worker; /* on whose device the answer goes */
    uint64_t unique; /* of the request; 0 if nobody waits */
    uint64_t number;
    uint64_t offset;
    uint64_t length;
    void *parked; /* what waits for Python, for free(3); NULL for none */
};

struct fsx_upcalls;

/* NULL without memory. */
struct fsx_upcalls *fsx_upcalls_new(int wake);
/* Nobody may use it any more. What is parked is freed. NULL is allowed. */
void fsx_upcalls_free(struct fsx_upcalls *upcalls);

/* From now on nobody waits for a place. */
void fsx_upcalls_end(struct fsx_upcalls *upcalls);

/* Put a request in the line, and wait while all places are taken. 0, and `parked` is the line's; or the errno to answer it
 * with: EINTR if nobody waits for it any more, EIO if the engine is ending and nobody is left to ask. */
int fsx_upcalls_put(struct fsx_upcalls *upcalls, const struct fsx_asked *asked);

/* Up to `most`, oldest first, each once; how many there were. */
size_t fsx_upcalls_take(struct fsx_upcalls *upcalls, struct fsx_upcall *taken, size_t most);

/* The place of one that was taken is free again. True if it is to be answered: `*asked` is what it was, with what is
 * parked; false if the token means nothing, or the request was interrupted. */
bool fsx_upcalls_finish(struct fsx_upcalls *upcalls, uint64_t token, struct fsx_asked *asked);

/* Whoever waits for this request need not wait any longer. True if it is in the line or with Python: the caller answers
 * it, on the device of `*worker`. Otherwise it is noted, as another thread may be about to put it in the line. */
bool fsx_upcalls_interrupt(struct fsx_upcalls *upcalls, uint64_t unique, uint32_t *worker);

#endif
