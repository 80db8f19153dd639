/* content.h: the bytes of files that this node can read by itself, checked and decompressed.
 *
 * The same meaning as the part of fanstore/core/reader.py that needs no other node: plain bytes that were verified are
 * read straight into the answer; what must be checked or decompressed as a whole comes through the chunk cache, unless
 * the request covers all of it. Whatever does not work out (an error of a disk, a damaged byte, no file here) is left to
 * Python, which tries the other copies, and says what is wrong.
 *
 * Any number of threads, each with a struct fsx_hands of its own. Python publishes files with fsx_content_use at any time;
 * a file that was replaced stays open until the end, because a thread may be reading it.
 */
#ifndef FANSTORE_CONTENT_H
#define FANSTORE_CONTENT_H

#include "chunkcache.h"
#include "index.h"
#include "latency.h"

/* When bytes are compared with their checksum; Verify of fanstore/core/reader.py. */
enum fsx_verify { FSX_VERIFY_FIRST, FSX_VERIFY_ALWAYS, FSX_VERIFY_NEVER };

/* Where bytes come from; order and meaning of Source in fanstore/core/statistics.py. */
enum fsx_origin { FSX_LOCAL, FSX_REMOTE, FSX_SHARED, FSX_CACHE, FSX_ORIGINS };

/* Largest answer to one READ: the most that the kernel asks for (256 pages). */
#define FSX_ANSWER_BYTES (1u << 20)

struct fsx_content;

/* What one thread has counted, with FSX_COUNT. */
struct fsx_read_counts {
    struct {
        uint64_t reads, bytes, fetches, fetched_bytes;
    } origin[FSX_ORIGINS];
    uint64_t checked_chunks, checked_bytes;
    uint64_t direct; /* reads of a disk that went round the page cache */
};

/* Add what another thread has counted so far. */
void fsx_read_counts_add(struct fsx_read_counts *sum, const struct fsx_read_counts *part);

/* What one thread works with. */
struct fsx_hands {
    uint8_t *answer; /* page-aligned, FSX_ANSWER_BYTES and a page */
    uint8_t *stored; /* page-aligned, room for the longest stored chunk and a page */
    struct fsx_read_counts counts;
};

/* Memory as that of `answer`, to be freed with free(); NULL if there is none. Who has one may exchange it for the other. */
uint8_t *fsx_answer_room(void);
bool fsx_hands_make(struct fsx_hands *hands);
void fsx_hands_free(struct fsx_hands *hands);

/* `marks` has one byte per entry and per chunk record, shared with Python: number of the file in which a chunk was found
 * intact. `shared_readers` bounds how many threads may read files that are not local. NULL without memory. */
struct fsx_content *fsx_content_new(const struct fsx_index *index, uint8_t *marks, enum fsx_verify verify,
                                    uint64_t cache_bytes, uint32_t shared_readers);
void fsx_content_free(struct fsx_content *content);

/* Read this partition from a duplicate of descriptor `fd` from now on. `number` is what marks of this file are: 1 the
 * prepared one, 2 a local copy. `verified`: all of its bytes were compared with their checksum. 0 or an errno; EEXIST if
 * one as good is in use: threads that opened both may arrive in any order. */
int fsx_content_use(struct fsx_content *content, uint32_t partition, int fd, uint8_t number, bool verified);

/* Put a chunk that Python has fetched into the cache, unless it is there. 0, ENOMEM, or EINVAL if the index knows no such
 * chunk, or one of another length: what is in the cache is copied from without a further look. */
int fsx_content_keep(struct fsx_content *content, uint32_t entry, uint32_t number, const void *data, size_t bytes);

/* The cache, for its counters, and for chunks of other nodes. */
struct fsx_cache *fsx_content_cache(struct fsx_content *content);
const struct fsx_index *fsx_content_index(const struct fsx_content *content);
/* Is there a file for this partition here? */
bool fsx_content_has_file(const struct fsx_content *content, uint32_t partition);
/* Are chunks that come from elsewhere compared with their checksum? */
bool fsx_content_checks(const struct fsx_content *content);

/* `length` bytes (at most FSX_ANSWER_BYTES) of a file from `offset`, all inside it, into hands->answer. False if Python
 * must do it. */
bool fsx_content_read(struct fsx_content *content, struct fsx_hands *hands, uint32_t entry, uint64_t offset,
                      uint32_t length);

/* Would a read of this file, of one chunk, wait for a disk, as far as can be told without waiting? */
bool fsx_content_waits(const struct fsx_content *content, uint32_t entry);

/* All of a file of `length` bytes (1 to FSX_ANSWER_BYTES), likewise, but not counted as a read: nobody has asked for it yet.
 * Whoever does is counted with fsx_content_count_read, from `*origin`. */
bool fsx_content_read_ahead(struct fsx_content *content, struct fsx_hands *hands, uint32_t entry, uint32_t length,
                            enum fsx_origin *origin);
void fsx_content_count_read(struct fsx_hands *hands, enum fsx_origin origin, size_t bytes);

#endif
