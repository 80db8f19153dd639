/* outputfolders.h: the names of directories that are outputs, for LOOKUP without Python.
 *
 * In a job of several nodes the kernel believes no name for longer than a moment, so that each path that leads through a
 * directory asks for it again. Python adds and removes; any thread asks. Owns its memory.
 */
#ifndef FANSTORE_OUTPUTFOLDERS_H
#define FANSTORE_OUTPUTFOLDERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct fsx_output_folders;

/* NULL without memory. */
struct fsx_output_folders *fsx_output_folders_new(void);
/* Nobody may use it any more. NULL is allowed. */
void fsx_output_folders_free(struct fsx_output_folders *folders);

/* The directory with this name, of at most 255 bytes, has this inode, not 0. False without memory: then it is not known. */
bool fsx_output_folders_add(struct fsx_output_folders *folders, uint64_t parent, const void *name, size_t name_bytes,
                            uint64_t inode);
/* The name is not one of a directory any more, if it ever was. */
void fsx_output_folders_remove(struct fsx_output_folders *folders, uint64_t parent, const void *name, size_t name_bytes);
/* The inode of the directory with this name; 0 if none is known. */
uint64_t fsx_output_folders_find(struct fsx_output_folders *folders, uint64_t parent, const void *name, size_t name_bytes);

#endif
