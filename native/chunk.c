/* chunk.c: see chunk.h. */
#include "chunk.h"

#include <lz4.h>
#include <string.h>
#include <xxhash.h>

#define FRAME_HEADER_BYTES 15u
#define BLOCK_IS_PLAIN 0x80000000u

struct fsx_stored fsx_chunk_of(const struct fsx_index *x, uint32_t entry, uint32_t number) {
    const bool lz4 = x->codec[entry] == FSX_CODEC_LZ4;
    if (x->count[entry] == 0)
        return (struct fsx_stored){.position = x->offset[entry], .stored_bytes = (size_t)x->stored[entry],
                                   .content_bytes = (size_t)x->size[entry], .checksum = x->checksum[entry],
                                   .mark = entry, .first = true, .lz4 = lz4};
    const struct fsx_chunk *record = x->chunks + x->first[entry] + number;
    const uint64_t end = number + 1 < x->count[entry] ? record[1].start : x->stored[entry];
    const uint64_t left = x->size[entry] - (uint64_t)number * FSX_CHUNK_BYTES;
    return (struct fsx_stored){.position = x->offset[entry] + record->start,
                               .stored_bytes = (size_t)(end - record->start),
                               .content_bytes = left < FSX_CHUNK_BYTES ? (size_t)left : FSX_CHUNK_BYTES,
                               .checksum = record->checksum, .mark = (size_t)x->entries + x->first[entry] + number,
                               .first = number == 0, .lz4 = lz4};
}

bool fsx_chunk_is_intact(const struct fsx_stored *chunk, const uint8_t *stored) {
    return XXH3_64bits(stored, chunk->stored_bytes) == chunk->checksum;
}

bool fsx_chunk_decode(const struct fsx_stored *chunk, const uint8_t *stored, uint8_t *target) {
    static const uint8_t FRAME_START[6] = {0x04, 0x22, 0x4D, 0x18, 0x68, 0x70};
    size_t left = chunk->stored_bytes;
    if (chunk->first) {
        if (left < FRAME_HEADER_BYTES || memcmp(stored, FRAME_START, sizeof FRAME_START) != 0)
            return false;
        stored += FRAME_HEADER_BYTES;
        left -= FRAME_HEADER_BYTES;
    }
    if (left < 4)
        return false;
    const uint32_t field = (uint32_t)stored[0] | (uint32_t)stored[1] << 8 | (uint32_t)stored[2] << 16 |
                           (uint32_t)stored[3] << 24;
    const size_t length = field & ~BLOCK_IS_PLAIN;
    stored += 4;
    left -= 4;
    if (length > left)
        return false;
    if ((field & BLOCK_IS_PLAIN) != 0) {
        if (length != chunk->content_bytes)
            return false;
        memcpy(target, stored, length);
        return true;
    }
    return LZ4_decompress_safe((const char *)stored, (char *)target, (int)length, (int)chunk->content_bytes) ==
           (int)chunk->content_bytes;
}
