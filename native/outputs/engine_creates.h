/* outputs/engine_creates.h: files that engine threads have created, closed and synced, of which Python does not know yet.
 *
 * In a job of one node nobody else decides on names, so that CREATE of a new file needs nothing of Python: a free name, the
 * next inode number, an empty file, and a record in the journal. Who changes names has a turn: an engine thread for one
 * creation, Python for one operation, at whose beginning it takes over what was created since its last. So there is one
 * order of changes, that of the journal. Contents likewise: of a file that is the engine's it notes the first closing, and, where
 * fsync waits for no more than that, every sync; Python takes a file back before it looks at it to note it itself. Owns the turn, the numbers, and the list of new files; not names, files or attributes
 * (outputs.c). Any thread; the turn lasts for a system call or two of the local disk, or for one operation of Python.
 */
#ifndef FANSTORE_OUTPUTS_ENGINE_CREATES_H
#define FANSTORE_OUTPUTS_ENGINE_CREATES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FSX_CREATE_NAME_MOST 255u

/* What happened to one: it was created (with a name), its content was noted (closed or synced), or both. */
struct fsx_create {
    uint64_t inode, parent;
    uint32_t mode;
    int64_t mtime_ns;
    bool noted; /* with what follows as its content */
    uint64_t size;
    int64_t noted_mtime_ns, noted_ctime_ns;
    size_t name_bytes; /* 0: Python knows that it was created */
    uint8_t name[FSX_CREATE_NAME_MOST];
};

struct fsx_creates;

/* Nothing can be created before Python has had a turn. As fsx_output_journal_open. NULL with errno set. */
struct fsx_creates *fsx_creates_new(int journal, uint32_t rank);
/* Nobody may use it any more. NULL is allowed. */
void fsx_creates_free(struct fsx_creates *creates);

/* Are there any that Python does not know? Without a turn: those of a moment. */
bool fsx_creates_any(const struct fsx_creates *creates);

/* ---- Python ---- */

/* Wait for the turn. */
void fsx_creates_begin(struct fsx_creates *creates);
/* In a turn: all new files, oldest first, and how many; they are not the engine's any more. Valid until the turn ends. */
const struct fsx_create *fsx_creates_take(struct fsx_creates *creates, size_t *count);
/* In a turn: where the journal ends; -1 if it cannot be written to, as Python has said, or if there is none. */
int64_t fsx_creates_journal_end(const struct fsx_creates *creates);
/* In a turn in which all were taken: the number of the next output, and where the journal ends; -1: it cannot be written to,
 * so that nothing can be created by the engine. Then the turn ends. */
void fsx_creates_set(struct fsx_creates *creates, uint64_t next_inode, int64_t journal_end);
/* In a turn: Python itself notes the content of this one, or it is removed: it is not the engine's any more. */
void fsx_creates_disown(struct fsx_creates *creates, uint64_t inode);
/* In a turn: Python has noted the content of this one: the next sync may be the engine's; closing it stays Python's. */
void fsx_creates_own(struct fsx_creates *creates, uint64_t inode);
/* The turn ends, and all else is as before. */
void fsx_creates_end(struct fsx_creates *creates);

/* ---- engine threads ---- */

/* In a turn: the next new file, with its number, for the caller to fill in; NULL if Python must do it. It is one only with
 * fsx_creates_add, which is false if it could not be noted. */
struct fsx_create *fsx_creates_next(struct fsx_creates *creates);
bool fsx_creates_add(struct fsx_creates *creates, struct fsx_create *file);
/* In a turn: was a file with this number created here, and never closed, as far as is remembered? */
bool fsx_creates_is_new(const struct fsx_creates *creates, uint64_t inode);
/* In a turn: is the file with this number, and a name, the engine's, as far as is remembered? */
bool fsx_creates_is_own(const struct fsx_creates *creates, uint64_t inode);
/* In a turn: note the content of such a file. False if that could not be done. */
bool fsx_creates_note(struct fsx_creates *creates, uint64_t inode, uint64_t size, int64_t mtime_ns, int64_t ctime_ns);

#endif
