/* outputs/files.h: descriptors of the files that hold the content of outputs, kept open for the next request.
 *
 * The content of output I is the file with the name I, in hexadecimal, in the directory of objects, if it is on this node
 * at all. Python makes and removes these files, but for new ones of outputs/engine_creates.h, some of which are made ahead
 * (outputs/spare_files.h). Owns the descriptors; one that is in use is never closed. Any thread; one lock, never held during a
 * system call.
 */
#ifndef FANSTORE_OUTPUTS_FILES_H
#define FANSTORE_OUTPUTS_FILES_H

#include <stdint.h>
#include <sys/stat.h>

struct fsx_output_files;

/* An open file, for one operation. */
struct fsx_output_use {
    int fd;
    uint32_t place; /* where it is kept */
};

/* `directory` is duplicated. NULL with errno set. */
struct fsx_output_files *fsx_output_files_new(int directory);
/* Nobody may use it any more. NULL is allowed. */
void fsx_output_files_free(struct fsx_output_files *files);

/* Open the file of an output, to be given back with release. 0, ENOENT if it is not on this node, or another errno. */
int fsx_output_files_use(struct fsx_output_files *files, uint64_t inode, struct fsx_output_use *use);
void fsx_output_files_release(struct fsx_output_files *files, const struct fsx_output_use *use);

/* Make the file of a new output, empty; what stat says of it. 0 or an errno. One thread at a time, as for the next. */
int fsx_output_files_make(struct fsx_output_files *files, uint64_t inode, struct stat *facts);
/* New outputs will have this number or a higher one. */
void fsx_output_files_skip(struct fsx_output_files *files, uint64_t inode);
/* Nothing new will come: what was made ahead is removed. Whoever wants something all the same gets it. */
void fsx_output_files_finish(struct fsx_output_files *files);
/* It is not to be: remove it, and forget its descriptor. */
void fsx_output_files_unmake(struct fsx_output_files *files, uint64_t inode);

/* Forget the descriptor: the name of the file is gone, or is another file's now; not before, or it may be opened again.
 * Operations under way end on the file with which they began. */
void fsx_output_files_drop(struct fsx_output_files *files, uint64_t inode);

#endif
