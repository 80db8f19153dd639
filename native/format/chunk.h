/* chunk.h: one chunk of a file: where it is stored, what its bytes must be, and what they mean.
 *
 * No state. The same meaning as Chunk of fanstore/format/index.py. Used by chunks/. Any
 * thread.
 */
#ifndef FANSTORE_FORMAT_CHUNK_H
#define FANSTORE_FORMAT_CHUNK_H

#include <stdbool.h>

#include "format/codec.h"
#include "format/index.h"

struct fsx_stored {
    uint64_t position; /* in the partition file */
    size_t stored_bytes;
    size_t content_bytes;
    uint64_t checksum; /* of the stored bytes */
    size_t mark;       /* its place in what Python and the engine know of checked chunks */
    bool first;        /* of its file */
    const struct fsx_codec *codec;
};

/* Chunk `number` of a regular file, which has it. */
struct fsx_stored fsx_chunk_of(const struct fsx_index *index, uint32_t entry, uint32_t number);

/* Are these the bytes that were stored? */
bool fsx_chunk_is_intact(const struct fsx_stored *chunk, const uint8_t *stored);

/* The content of a chunk that is compressed (its codec has a decode), into `target`, which has room for it. False if these
 * bytes mean nothing. */
bool fsx_chunk_decode(const struct fsx_stored *chunk, const uint8_t *stored, uint8_t *target);

#endif
