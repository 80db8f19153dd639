/* outputs/names.h: the names of outputs, and what stat says of directories that are outputs or hold some.
 *
 * One table with two ways in. By parent and name: is there such an output, and if it is a directory, which? Of other outputs
 * C knows no more than that there is one. By inode: the attributes of a directory, as Python has last said them. After each
 * new name the kernel asks for those of the directory again, so that a program that writes many small files asks once per
 * file; Python would need longer for that than for the file. Python adds and removes, and so does the creation of files
 * (outputs.c); any thread asks. Owns its memory.
 */
#ifndef FANSTORE_OUTPUTS_NAMES_H
#define FANSTORE_OUTPUTS_NAMES_H

#include <linux/fuse.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct fsx_output_names;

/* NULL without memory. */
struct fsx_output_names *fsx_output_names_new(void);
/* Nobody may use it any more. NULL is allowed. */
void fsx_output_names_free(struct fsx_output_names *names);

/* There is an output of this name, in place of one that was there before; `directory` is its inode if it is a directory, 0 if
 * not. False without memory: then nothing has changed. */
bool fsx_output_names_add(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes,
                          uint64_t directory);
/* Whether it was there. */
bool fsx_output_names_remove(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes);
bool fsx_output_names_has(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes);

/* ---- directories ---- */

/* Keep what is to be answered for an inode (`out->attr.ino`, not 0), in place of what was kept before. False without memory:
 * then nothing has changed. */
bool fsx_output_names_describe(struct fsx_output_names *names, const struct fuse_attr_out *out);
/* Nothing is kept for the inode any more. How often the kernel was told of it since that was last taken. */
uint64_t fsx_output_names_undescribe(struct fsx_output_names *names, uint64_t inode);
/* A name has come to the directory: its times are these from now on, if anything is kept for it. */
void fsx_output_names_touch(struct fsx_output_names *names, uint64_t inode, uint64_t seconds, uint32_t nanoseconds);
/* What is kept for an inode; false if nothing is. */
bool fsx_output_names_described(struct fsx_output_names *names, uint64_t inode, struct fuse_attr_out *out);
/* The same for the directory with this name, to be told in an answer to LOOKUP, which the kernel counts, and Python must
 * know. */
bool fsx_output_names_tell(struct fsx_output_names *names, uint64_t parent, const void *name, size_t name_bytes,
                           struct fuse_attr_out *out);
/* How often that was since it was last asked. */
uint64_t fsx_output_names_take_told(struct fsx_output_names *names, uint64_t inode);

#endif
