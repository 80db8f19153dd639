/* outputs/spare_files.h: empty files for the content of outputs to come, made ahead by a thread of its own.
 *
 * To make an empty file takes a disk's file system longer than everything else that a new output costs. Numbers of outputs
 * follow one another, and so do the names of their files, so while a program creates one after the other, the files of the
 * next ones can be made meanwhile, on a core that would otherwise wait. The thread begins after some creations in a row;
 * when nobody has asked for a while, it removes what is left, and sleeps. It is started when it is first needed.
 *
 * Owns the files from the one with the lowest number that may still be asked for, and their descriptors, until they are taken.
 * One taker at a time (outputs/engine_creates.h: in a turn).
 */
#ifndef FANSTORE_OUTPUTS_SPARE_FILES_H
#define FANSTORE_OUTPUTS_SPARE_FILES_H

#include <stdbool.h>
#include <stdint.h>

struct fsx_spare_files;

/* `directory` is duplicated. NULL with errno set. */
struct fsx_spare_files *fsx_spare_files_new(int directory);
/* Nothing is made ahead any more, and what is left is removed. False if the thread hangs in a call of a dead disk. */
bool fsx_spare_files_stop(struct fsx_spare_files *spare);
/* Nobody may use it any more. Stops it first; a thread that hangs is left alone, with its memory. NULL is allowed. */
void fsx_spare_files_free(struct fsx_spare_files *spare);

/* The file of the next output, which has this number, and none that was asked for before: its descriptor, which is the
 * caller's from now on. -1 if there is none, and then nobody else makes it. Waits for it if it is just being made. */
int fsx_spare_files_take(struct fsx_spare_files *spare, uint64_t inode);

/* The next output will have this number, or a higher one; those below that were not taken are somebody else's to make. */
void fsx_spare_files_skip(struct fsx_spare_files *spare, uint64_t inode);

#endif
