/* files.h: partition files that this node can read by itself: a copy on its disk, or the prepared one where it is.
 *
 * Owns duplicates of the descriptors, what is known of each file system, and how its page cache is used: the kernel's
 * cache of the mount keeps what was read, so bytes are not kept a second time below it. Python says which file serves a
 * partition (fsx_files_use), at any time and on any thread; one that was replaced stays open until the end, because a
 * thread may be reading it. Reading blocks; any number of threads.
 */
#ifndef FANSTORE_CHUNKS_FILES_H
#define FANSTORE_CHUNKS_FILES_H

#include "chunks/counts.h"

/* Numbers of files; chunks that were found intact in one are marked with it. */
#define FSX_FILE_PREPARED 1u
#define FSX_FILE_LOCAL 2u

/* One file. Does not change once it is in use. */
struct fsx_file {
    enum fsx_source source; /* local or shared */
    uint8_t number;         /* FSX_FILE_PREPARED or FSX_FILE_LOCAL */
    bool verified;          /* all of its bytes were compared with their checksum */
};

struct fsx_files;

/* `shared_readers` bounds how many threads may read files that are not local at a time. NULL without memory. */
struct fsx_files *fsx_files_new(uint32_t partitions, uint32_t shared_readers);
/* Nobody reads any more. NULL is allowed. */
void fsx_files_free(struct fsx_files *files);

/* Read this partition from a duplicate of descriptor `fd` from now on. 0 or an errno; EEXIST if one as good is in use:
 * threads that opened both may arrive in any order. */
int fsx_files_use(struct fsx_files *files, uint32_t partition, int fd, uint8_t number, bool verified);

/* The file of a partition; NULL if there is none here. */
const struct fsx_file *fsx_files_find(const struct fsx_files *files, uint32_t partition);

/* A file server that does not answer must not take all threads: may this one read the file now? Then fsx_files_end. */
bool fsx_files_begin(struct fsx_files *files, const struct fsx_file *file);
void fsx_files_end(struct fsx_files *files, const struct fsx_file *file);

/* `length` bytes at `position` into `target`, which has room for a page more. `again`: they will be read once more soon, so
 * the page cache should have them. False if they could not all be read. */
bool fsx_file_read(const struct fsx_file *file, struct fsx_read_counts *counts, uint8_t *target, size_t length,
                   uint64_t position, bool again);

/* Would reading this wait for a disk, as far as can be told without waiting? */
bool fsx_file_waits(const struct fsx_file *file, uint64_t position, size_t length);

#endif
