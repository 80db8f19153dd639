/* pages.h: pages of files: whether they are in memory, bringing them there without a signal, sending them to the disk.
 *
 * A mapped file whose disk fails gives SIGBUS at the first touch; what is sent straight from a mapping is therefore
 * looked at first. No state, any thread.
 */
#ifndef FANSTORE_BASE_PAGES_H
#define FANSTORE_BASE_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Are all pages of a mapped range in the page cache? Does not block. False if it cannot be told. */
bool fsx_pages_resident(const void *start, size_t bytes);

/* Bring all pages of a mapped range into memory and into the page table; false if that is not possible (an error of the
 * disk, a file that has become shorter). Blocks as long as the disk does. */
bool fsx_pages_populate(const void *start, size_t bytes);

/* Take the pages of a shared file mapping out of the page table; the page cache has them as before. Only an advice. */
void fsx_pages_unmap(const void *start, size_t bytes);

/* Have the kernel begin to write a range of a file to the disk. Only an advice: says nothing of when it is there, and an
 * error of the disk is found by the fsync that must follow. */
void fsx_pages_start_writing(int fd, uint64_t offset, uint64_t bytes);

#endif
