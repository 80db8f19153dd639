/* shared.h: memory of chunks that programs on this node can read: a memory file, and the table of what is in it.
 *
 * Owns the file and its mapping. Memory is handed out in pieces of 2 MiB (slabs.h), and goes back to the kernel when it is
 * given back; the file itself is larger than what is used of it at any time. The layout is that of format/sharedcache.h.
 * Programs get descriptors for reading only. A caller's lock guards each of the two halves: pieces (that of slabs.h) and the
 * table (that of broker.h).
 */
#ifndef FANSTORE_CHUNKS_SHARED_H
#define FANSTORE_CHUNKS_SHARED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct fsx_shared;

/* For so many bytes in use at a time. NULL with errno. */
struct fsx_shared *fsx_shared_new(uint64_t most_bytes);
/* NULL is allowed. What programs have mapped stays theirs. */
void fsx_shared_free(struct fsx_shared *shared);

/* A new descriptor of the file, for reading; -1 with errno. */
int fsx_shared_open(const struct fsx_shared *shared);

/* Memory that begins at a multiple of 2 MiB; NULL if there is none. */
uint8_t *fsx_shared_take(struct fsx_shared *shared, size_t bytes);
/* Its content is gone. */
void fsx_shared_give(struct fsx_shared *shared, uint8_t *start, size_t bytes);

/* Is this in the file? Then where. */
bool fsx_shared_has(const struct fsx_shared *shared, const uint8_t *data, uint64_t *offset);

/* Enter a chunk into the table: its stamp, 0 if there is no room in its bucket. */
uint64_t fsx_shared_publish(struct fsx_shared *shared, uint64_t key, uint64_t offset, uint64_t bytes);
/* Before its memory is used for something else. */
void fsx_shared_withdraw(struct fsx_shared *shared, uint64_t key, uint64_t stamp);

#endif
