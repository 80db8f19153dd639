/* outputbirths.h: files that engine threads have created and closed, of which Python does not know yet.
 *
 * In a job of one node nobody else decides on names, nor in a directory that is lent to this one of several
 * (fanstore/core/leases.py), so that CREATE of a new file needs nothing of Python: a free name, the next of the inode numbers
 * that were given to us, an empty file, and a record in the journal. Who changes names has a turn: an engine thread for one
 * creation, Python for one operation, at whose beginning it takes over what was created since its last. So there is one
 * order of changes, that of the journal. Owns the turn, the numbers, and the births; not names, files or attributes
 * (outputs.c). Any thread; the turn lasts for a system call or two of the local disk, or for one operation of Python.
 */
#ifndef FANSTORE_OUTPUTBIRTHS_H
#define FANSTORE_OUTPUTBIRTHS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FSX_BIRTH_NAME_MOST 255u

/* What happened to one: it was created (with a name), closed for the first time, or both. */
struct fsx_birth {
    uint64_t inode, parent;
    uint32_t mode;
    int64_t mtime_ns;
    bool closed; /* with what follows as its content */
    uint64_t size;
    int64_t closed_mtime_ns, closed_ctime_ns;
    size_t name_bytes; /* 0: Python knows that it was created */
    uint8_t name[FSX_BIRTH_NAME_MOST];
};

struct fsx_births;

/* Nothing can be created before Python has had a turn. As fsx_output_journal_open. NULL with errno set. */
struct fsx_births *fsx_births_new(int journal, uint32_t rank);
/* Nobody may use it any more. NULL is allowed. */
void fsx_births_free(struct fsx_births *births);

/* Are there any that Python does not know? Without a turn: those of a moment. */
bool fsx_births_any(const struct fsx_births *births);

/* ---- Python ---- */

/* Wait for the turn. */
void fsx_births_begin(struct fsx_births *births);
/* In a turn: all births, oldest first, and how many; they are not the engine's any more. Valid until the turn ends. */
const struct fsx_birth *fsx_births_take(struct fsx_births *births, size_t *count);
/* In a turn: where the journal ends; -1 if it cannot be written to, as Python has said, or if there is none. */
int64_t fsx_births_journal_end(const struct fsx_births *births);
/* In a turn in which all were taken: the number of the next output, the first that it must not have, and where the journal
 * ends; -1: it cannot be written to, so that nothing can be created by the engine. Then the turn ends. */
void fsx_births_set(struct fsx_births *births, uint64_t next_inode, uint64_t end_inode, int64_t journal_end);
/* In a turn: Python itself closes this one, or it is removed: closing it is Python's from now on. 0: all that there are. */
void fsx_births_disown(struct fsx_births *births, uint64_t inode);
/* The turn ends, and all else is as before. */
void fsx_births_end(struct fsx_births *births);

/* ---- engine threads ---- */

/* In a turn: the next birth, with its number, for the caller to fill in; NULL if Python must do it. It is one only with
 * fsx_births_add, which is false if it could not be noted. */
struct fsx_birth *fsx_births_next(struct fsx_births *births);
bool fsx_births_add(struct fsx_births *births, struct fsx_birth *birth);
/* In a turn: was a file with this number created here, and never closed, as far as is remembered? */
bool fsx_births_is_new(const struct fsx_births *births, uint64_t inode);
/* In a turn: such a file is closed, with this content. False if that could not be noted. */
bool fsx_births_close(struct fsx_births *births, uint64_t inode, uint64_t size, int64_t mtime_ns, int64_t ctime_ns);

#endif
