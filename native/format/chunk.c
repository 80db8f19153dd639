/* chunk.c: see chunk.h. */
#include "format/chunk.h"

#include <xxhash.h>

struct fsx_stored fsx_chunk_of(const struct fsx_index *x, uint32_t entry, uint32_t number) {
    const struct fsx_codec *codec = fsx_codec_find(x->codec[entry]);
    if (x->count[entry] == 0)
        return (struct fsx_stored){.position = x->offset[entry], .stored_bytes = (size_t)x->stored[entry],
                                   .content_bytes = (size_t)x->size[entry], .checksum = x->checksum[entry],
                                   .mark = entry, .first = true, .codec = codec};
    const struct fsx_chunk *record = x->chunks + x->first[entry] + number;
    const uint64_t end = number + 1 < x->count[entry] ? record[1].start : x->stored[entry];
    const uint64_t left = x->size[entry] - (uint64_t)number * FSX_CHUNK_BYTES;
    return (struct fsx_stored){.position = x->offset[entry] + record->start,
                               .stored_bytes = (size_t)(end - record->start),
                               .content_bytes = left < FSX_CHUNK_BYTES ? (size_t)left : FSX_CHUNK_BYTES,
                               .checksum = record->checksum, .mark = (size_t)x->entries + x->first[entry] + number,
                               .first = number == 0, .codec = codec};
}

bool fsx_chunk_is_intact(const struct fsx_stored *chunk, const uint8_t *stored) {
    return XXH3_64bits(stored, chunk->stored_bytes) == chunk->checksum;
}

bool fsx_chunk_decode(const struct fsx_stored *chunk, const uint8_t *stored, uint8_t *target) {
    return chunk->codec->decode(stored, chunk->stored_bytes, chunk->first, target, chunk->content_bytes);
}
