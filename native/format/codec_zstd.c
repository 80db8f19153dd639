/* codec_zstd.c: every chunk is one zstd frame of its own (docs/format.md, *Chunks*); see codec.h.
 *
 * Frames one after the other are what `zstd -d` reads. A thread that decodes keeps its context (160 KB) until it ends:
 * to make one takes as long as to decompress a small file.
 */
#include "format/codec.h"

#include <pthread.h>
#include <string.h>
#include <zstd.h>

#include "format/index.h"

/* A frame of a few equal bytes: magic number, descriptor, content size, and a block of 4 bytes. */
#define FRAME_MIN 10u
/* What the first bytes say: no dictionary, no checksum; content size and window as the writer likes, but no window that is
 * larger than a chunk, so that no reader takes more memory. */
#define DESCRIPTOR 4u
#define FORBIDDEN_FLAGS 0x1Fu
#define SINGLE_SEGMENT 0x20u
#define LARGEST_WINDOW (12u << 3) /* 2^(10 + 12) bytes */

_Static_assert(ZSTD_COMPRESSBOUND(FSX_CHUNK_BYTES) - FSX_CHUNK_BYTES <= FSX_CODEC_OVERHEAD_MAX, "readers have room");
_Static_assert(1u << (10 + 12) == FSX_CHUNK_BYTES, "the largest window is a chunk");

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key; /* of each thread's ZSTD_DCtx */

static void free_context(void *context) { ZSTD_freeDCtx(context); }

static void make_key(void) {
    if (pthread_key_create(&key, free_context) != 0)
        key = (pthread_key_t)-1; /* no such key: pthread_getspecific gives NULL, pthread_setspecific an error */
}

/* This thread's context, or NULL if there is no memory. */
static ZSTD_DCtx *context_of_thread(void) {
    pthread_once(&once, make_key);
    ZSTD_DCtx *context = pthread_getspecific(key);
    if (context == NULL) {
        context = ZSTD_createDCtx();
        if (pthread_setspecific(key, context) != 0) {
            ZSTD_freeDCtx(context);
            context = NULL;
        }
    }
    return context;
}

static bool header_is_ours(const uint8_t *stored, size_t bytes) {
    static const uint8_t MAGIC[4] = {0x28, 0xB5, 0x2F, 0xFD};
    return bytes >= FRAME_MIN && memcmp(stored, MAGIC, sizeof MAGIC) == 0 &&
           (stored[DESCRIPTOR] & FORBIDDEN_FLAGS) == 0 &&
           ((stored[DESCRIPTOR] & SINGLE_SEGMENT) != 0 || stored[DESCRIPTOR + 1] <= LARGEST_WINDOW);
}

/* Exactly one frame, for exactly this content: zstd would skip frames, and read one after the other. */
static bool decode(const uint8_t *stored, size_t stored_bytes, bool first, uint8_t *content, size_t content_bytes) {
    (void)first; /* all frames are alike */
    if (!header_is_ours(stored, stored_bytes) || ZSTD_getFrameContentSize(stored, stored_bytes) != content_bytes ||
        ZSTD_findFrameCompressedSize(stored, stored_bytes) != stored_bytes)
        return false;
    ZSTD_DCtx *context = context_of_thread();
    return context != NULL &&
           ZSTD_decompressDCtx(context, content, content_bytes, stored, stored_bytes) == content_bytes;
}

static void *encoder_new(void) { return ZSTD_createCCtx(); }

static void encoder_free(void *encoder) { ZSTD_freeCCtx(encoder); }

static size_t encode(void *encoder, int level, const struct fsx_piece *piece, uint8_t *out, size_t room) {
    const size_t used = ZSTD_compressCCtx(encoder, out, room, piece->content, piece->bytes, level);
    return ZSTD_isError(used) ? 0 : used;
}

const struct fsx_codec fsx_codec_zstd = {
    .number = 2,
    .name = "zstd",
    .suffix = ".zst",
    .shortest_bytes = FRAME_MIN,
    .overhead_bytes = ZSTD_COMPRESSBOUND(FSX_CHUNK_BYTES) - FSX_CHUNK_BYTES,
    .quick_level = 3,
    .decode = decode,
    .encoder_new = encoder_new,
    .encoder_free = encoder_free,
    .encode = encode,
};
