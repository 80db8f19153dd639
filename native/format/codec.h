/* codec.h: how the content of files is stored: one row per codec, found by its number in the index.
 *
 * A new codec is a file of its own with its row, and a line in the table of codec.c (and the same in fanstore/format/:
 * codec_table.py); the rows are described in docs/format.md, *Chunks*. Rows are constant; their functions may be called
 * by any thread, an encoder by one at a time.
 */
#ifndef FANSTORE_FORMAT_CODEC_H
#define FANSTORE_FORMAT_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* No stored chunk is longer than its content by more than this: readers have room for so much. */
#define FSX_CODEC_OVERHEAD_MAX (32u << 10)

/* One chunk of a file that is to be compressed. */
struct fsx_piece {
    const uint8_t *content;
    size_t bytes;
    uint64_t file_bytes; /* of the whole file */
    bool first, last;    /* of its file */
};

/* One way to store content. Of a row without `decode`, content is stored as it is, and the fields after `name` are 0. */
struct fsx_codec {
    uint32_t number; /* in the index */
    const char *name;
    const char *suffix;    /* of the tar members that it has compressed */
    size_t shortest_bytes; /* no file that it has compressed is shorter */
    size_t overhead_bytes; /* nor a stored chunk longer than FSX_CHUNK_BYTES and this; at most FSX_CODEC_OVERHEAD_MAX */
    int quick_level;       /* where this level does not shrink a file, the slower levels above it are not tried */

    /* The content of one stored chunk, `content_bytes` long, into `content`, which has room for exactly that; `first`: it
     * is the first one of its file. False if the stored bytes mean anything else. */
    bool (*decode)(const uint8_t *stored, size_t stored_bytes, bool first, uint8_t *content, size_t content_bytes);

    /* Something to compress with, file after file; NULL if there is no memory. The caller frees it. */
    void *(*encoder_new)(void);
    void (*encoder_free)(void *encoder);
    /* The stored bytes of a chunk at `out`; the chunks of a file come in order, with the same level. Returns their number,
     * or 0 if `room` is too small. */
    size_t (*encode)(void *encoder, int level, const struct fsx_piece *piece, uint8_t *out, size_t room);
};

extern const struct fsx_codec fsx_codec_none;
extern const struct fsx_codec fsx_codec_lz4;
extern const struct fsx_codec fsx_codec_zstd;

/* All codecs, and NULL. */
extern const struct fsx_codec *const fsx_codecs[];

/* The codec with this number, or NULL. Of an index that was opened, every file has one. */
const struct fsx_codec *fsx_codec_find(uint32_t number);

#endif
