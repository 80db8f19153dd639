/* pages.h: whether mapped pages are in memory, and bringing them there without a signal.
 *
 * A mapped file whose disk fails gives SIGBUS at the first touch; what is sent straight from a mapping is therefore
 * looked at first. No state, any thread.
 */
#ifndef FANSTORE_PAGES_H
#define FANSTORE_PAGES_H

#include <stdbool.h>
#include <stddef.h>

/* Are all pages of a mapped range in the page cache? Does not block. False if it cannot be told. */
bool fsx_pages_resident(const void *start, size_t bytes);

/* Bring all pages of a mapped range into memory and into the page table; false if that is not possible (an error of the
 * disk, a file that has become shorter). Blocks as long as the disk does. */
bool fsx_pages_populate(const void *start, size_t bytes);

#endif
