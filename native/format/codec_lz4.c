/* codec_lz4.c: a file is one LZ4 frame, and block k of it is chunk k (docs/format.md, *Chunks*); see codec.h.
 *
 * The header of the frame belongs to the first chunk, its end mark to the last one.
 */
#include "format/codec.h"

#include <lz4.h>
#include <lz4frame.h>
#include <string.h>

/* With the content size, as FanStore writes it. */
#define FRAME_HEADER_BYTES 15u
#define END_MARK_BYTES 4u
#define BLOCK_IS_PLAIN 0x80000000u

static bool decode(const uint8_t *stored, size_t stored_bytes, bool first, uint8_t *content, size_t content_bytes) {
    static const uint8_t FRAME_START[6] = {0x04, 0x22, 0x4D, 0x18, 0x68, 0x70};
    size_t left = stored_bytes;
    if (first) {
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
        if (length != content_bytes)
            return false;
        memcpy(content, stored, length);
        return true;
    }
    return LZ4_decompress_safe((const char *)stored, (char *)content, (int)length, (int)content_bytes) ==
           (int)content_bytes;
}

static void *encoder_new(void) {
    LZ4F_cctx *context;
    return LZ4F_isError(LZ4F_createCompressionContext(&context, LZ4F_VERSION)) ? NULL : context;
}

static void encoder_free(void *encoder) { LZ4F_freeCompressionContext(encoder); }

/* Level 1 is LZ4, more is LZ4 HC of that level. */
static size_t encode(void *encoder, int level, const struct fsx_piece *piece, uint8_t *out, size_t room) {
    size_t used = 0;
    if (piece->first) {
        const LZ4F_preferences_t preferences = {
            .frameInfo = {.blockSizeID = LZ4F_max4MB, .blockMode = LZ4F_blockIndependent, .contentSize = piece->file_bytes},
            .compressionLevel = level > 1 ? level : 0,
            .autoFlush = 1, /* one update, one block: chunk k is block k */
        };
        used = LZ4F_compressBegin(encoder, out, room, &preferences);
        if (LZ4F_isError(used))
            return 0;
    }
    size_t wrote = LZ4F_compressUpdate(encoder, out + used, room - used, piece->content, piece->bytes, NULL);
    if (LZ4F_isError(wrote))
        return 0;
    used += wrote;
    if (piece->last) {
        wrote = LZ4F_compressEnd(encoder, out + used, room - used, NULL);
        if (LZ4F_isError(wrote))
            return 0;
        used += wrote;
    }
    return used;
}

const struct fsx_codec fsx_codec_lz4 = {
    .number = 1,
    .name = "lz4",
    .suffix = ".lz4",
    .shortest_bytes = FRAME_HEADER_BYTES + END_MARK_BYTES,
    .overhead_bytes = FRAME_HEADER_BYTES + END_MARK_BYTES,
    .quick_level = 1, /* where it finds nothing, HC finds next to nothing (JPEG: 45 MB/s a core against 1 GB/s) */
    .decode = decode,
    .encoder_new = encoder_new,
    .encoder_free = encoder_free,
    .encode = encode,
};
