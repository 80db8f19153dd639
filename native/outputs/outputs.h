/* outputs.h: what C knows of outputs, files that are written through the mount: their names, which directories of the
 * dataset have some, and their content, as far as it is on this node.
 *
 * Python has the meaning, and says what is here: names are added and removed, directories marked, files dropped, at any
 * time and from any thread. One thing is done without it: new files of a job of one node (outputs/engine_creates.h). Made
 * before the engine, so that it can be filled, and freed after it. Inode numbers of outputs are in [FSX_OUTPUT_FIRST, FSX_OUTPUT_END); those of the dataset are below, control files on either side.
 */
#ifndef FANSTORE_OUTPUTS_OUTPUTS_H
#define FANSTORE_OUTPUTS_OUTPUTS_H

#include "outputs/engine_creates.h"
#include "outputs/opens.h"

#include <linux/fuse.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FSX_OUTPUT_FIRST (UINT64_C(1) << 40)
#define FSX_OUTPUT_END (UINT64_C(1) << 48)

/* Largest WRITE: the most that the kernel sends at once (256 pages). */
#define FSX_OUTPUT_WRITE_BYTES (1u << 20)

/* One operation on the content of an output. */
struct fsx_task {
    uint32_t opcode; /* FUSE_READ, FUSE_WRITE, FUSE_FALLOCATE, FUSE_FSYNC or FUSE_LSEEK */
    uint32_t mode;   /* FUSE_FALLOCATE: of fallocate(2); FUSE_FSYNC: its flags; FUSE_LSEEK: SEEK_DATA or SEEK_HOLE */
    uint64_t inode;
    uint64_t offset;
    uint64_t length;     /* but for FUSE_FSYNC and FUSE_LSEEK */
    const uint8_t *data; /* FUSE_WRITE: `length` bytes, the caller's */
};

/* Sums over all threads. */
struct fsx_output_counts {
    uint64_t reads, read_bytes, writes, written_bytes;
};

struct fsx_outputs;

static inline bool fsx_is_output(uint64_t inode) { return inode >= FSX_OUTPUT_FIRST && inode < FSX_OUTPUT_END; }

/* `directory`: of the objects, duplicated. `entries`: of the index. `alone`: the job has one node, so that nothing changes
 * but through this mount. `waits`: who closes an output waits until Python has taken note of it; otherwise nobody wants to
 * know. `local`: fsync waits for this node's disk and the journal, of a job of one node. `journal`: what files that are created
 * here are noted in, as those of node `rank`; -1 for nothing. NULL with errno set. */
struct fsx_outputs *fsx_outputs_new(int directory, uint32_t entries, bool alone, bool waits, bool local, int journal,
                                    uint32_t rank);
/* Nobody may use it any more. NULL is allowed. */
void fsx_outputs_free(struct fsx_outputs *outputs);

bool fsx_outputs_alone(const struct fsx_outputs *outputs);
bool fsx_outputs_waits(const struct fsx_outputs *outputs);
bool fsx_outputs_local(const struct fsx_outputs *outputs);

/* Names and directories; parts of outputs/names.h. */
bool fsx_outputs_add_name(struct fsx_outputs *outputs, uint64_t parent, const void *name, size_t name_bytes,
                          uint64_t directory);
bool fsx_outputs_remove_name(struct fsx_outputs *outputs, uint64_t parent, const void *name, size_t name_bytes);
bool fsx_outputs_has_name(struct fsx_outputs *outputs, uint64_t parent, const void *name, size_t name_bytes);
/* What LOOKUP is to be answered with for a name that there is; false if it is Python's to say. */
bool fsx_outputs_tell(struct fsx_outputs *outputs, uint64_t parent, const void *name, size_t name_bytes,
                      struct fuse_entry_out *entry);

/* A directory of the dataset that has outputs in it, or had: from now on Python answers for it. False if there is no such
 * entry. */
bool fsx_outputs_mix(struct fsx_outputs *outputs, uint32_t entry);
bool fsx_outputs_is_mixed(const struct fsx_outputs *outputs, uint32_t entry);

/* What GETATTR is to be answered with for a directory, until it is said anew or dropped. */
bool fsx_outputs_describe(struct fsx_outputs *outputs, const struct fuse_attr_out *out);
uint64_t fsx_outputs_undescribe(struct fsx_outputs *outputs, uint64_t inode);
uint64_t fsx_outputs_take_told(struct fsx_outputs *outputs, uint64_t inode);
bool fsx_outputs_described(struct fsx_outputs *outputs, uint64_t inode, struct fuse_attr_out *out);

/* Who has them open; parts of outputs/opens.h. */
void fsx_outputs_allow_direct(struct fsx_outputs *outputs);
struct fsx_opened fsx_outputs_open(struct fsx_outputs *outputs, uint64_t inode, uint32_t flags);
/* What the kernel is told of one that is open: past its pages there is nothing to be written when it is closed, so that if
 * nobody wants to know of it, the kernel need not say it. */
uint32_t fsx_outputs_open_flags(const struct fsx_outputs *outputs, bool direct);
void fsx_outputs_release(struct fsx_outputs *outputs, uint64_t handle);

/* A new file that is wanted. */
struct fsx_wanted {
    uint64_t parent;
    const uint8_t *name; /* not one of the dataset's */
    size_t name_bytes;
    uint32_t mode;  /* permissions */
    uint32_t flags; /* of open(2) */
    uint32_t uid, gid, valid_s; /* how long the kernel may believe the name, and the attributes */
};
struct fsx_created {
    struct fuse_entry_out entry;
    struct fuse_open_out open;
    bool first; /* Python knew of all others */
};
/* In a job of one node: create and open it. False if Python must: it knows more of the parent or of the name, or has to be told
 * of a full disk. May block on a disk. */
bool fsx_outputs_create(struct fsx_outputs *outputs, const struct fsx_wanted *wanted, struct fsx_created *created);
/* Somebody closes a file. False if Python must take note of it: it was not created here, or was closed before. `first` as
 * above. */
bool fsx_outputs_close(struct fsx_outputs *outputs, uint64_t inode, bool *first);
/* Somebody syncs a file: do it, and note what it is like then. The errno goes to `*error`. False if Python must do it: the file is
 * not the engine's, or there is no room for a note. `first` as above. Blocks on a disk. */
bool fsx_outputs_sync(struct fsx_outputs *outputs, const struct fsx_task *task, bool *first, int *error);
/* Files that were created, for Python. */
struct fsx_creates *fsx_outputs_creates(struct fsx_outputs *outputs);
/* The end of a turn of Python's, as fsx_creates_set. */
void fsx_outputs_end_turn(struct fsx_outputs *outputs, uint64_t next_inode, int64_t journal_end);

/* The engine has ended: nothing is created any more. As fsx_output_files_finish. */
void fsx_outputs_finish(struct fsx_outputs *outputs);

/* As fsx_output_files_drop. */
void fsx_outputs_drop(struct fsx_outputs *outputs, uint64_t inode);

/* Do it. The answer for the kernel goes to `answer`, aligned to 8, with room for `length` bytes (FUSE_READ) or 16; its
 * length to `*bytes`. 0, ENOENT if the content is not on this node, or another errno. May block on a disk. */
int fsx_outputs_do(struct fsx_outputs *outputs, const struct fsx_task *task, uint8_t *answer, size_t *bytes);

void fsx_outputs_count(const struct fsx_outputs *outputs, struct fsx_output_counts *counts);

/* A copy with its data in one block, for free(3). NULL without memory. */
struct fsx_task *fsx_task_copy(const struct fsx_task *task);

#endif
