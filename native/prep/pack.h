/* pack.h: turn entries of a scanned tree into tar members in memory.
 *
 * One call packs one batch: a run of entries whose members fit into the caller's buffer. It opens, reads, compresses and
 * checksums without any lock and without Python, so several threads pack different batches at once. What a batch becomes
 * in the file (its position) is the caller's business.
 */
#ifndef FANSTORE_PREP_PACK_H
#define FANSTORE_PREP_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/codec.h"
#include "format/index.h"

/* Where the bytes of an entry come from. */
enum fsx_pack_source_kind { FSX_PACK_DIRECTORY = 0, FSX_PACK_TAR = 1 };

struct fsx_pack_source {
    int fd; /* the root directory (O_PATH will do), or the tar file; owned by the caller */
    enum fsx_pack_source_kind kind;
    bool follow; /* of a directory: symbolic links stand for what they point to */
    size_t prefix_bytes; /* of a directory: length of the path of its root in the table */
};

/* The scanned tree: columns owned by the caller and not changed while a batch is packed. Entry 0 is the root; every
 * parent's number is less than its child's. */
struct fsx_table {
    uint32_t entries;
    uint32_t sources_count;
    const struct fsx_pack_source *sources;
    const uint32_t *parent;
    const uint64_t *nameoff; /* entries + 1 */
    const uint8_t *names;
    uint64_t names_bytes;
    const uint32_t *mode;
    const int64_t *mtime;
    const uint64_t *size;
    const uint32_t *uid;
    const uint32_t *gid;
    const uint32_t *source;
    const uint64_t *origin; /* position of the content in a tar source; position of a link's target in `links` */
    const uint32_t *inode;  /* first entry of the same inode */
    const uint8_t *plain;   /* 1: never compress this file */
    const uint8_t *links;
    uint64_t links_bytes;
};

/* What became of one entry. `status` is 0, an errno, or one of the negative values below. */
enum fsx_pack_status { FSX_PACK_CHANGED = -1, FSX_PACK_NO_ROOM = -2, FSX_PACK_BAD_TABLE = -3, FSX_PACK_NO_CONTENT = -4 };

struct fsx_packed {
    int32_t status;
    uint32_t codec;
    uint64_t offset; /* of the stored bytes, from the start of the batch */
    uint64_t stored;
    uint64_t checksum;
};
_Static_assert(sizeof(struct fsx_packed) == 32, "layout is shared with Python");

struct fsx_batch {
    const uint32_t *order; /* the entries to pack, in this order */
    size_t order_count;
    const struct fsx_codec *codec;
    int level; /* of compression, as the codec understands it */
    uint8_t *out;
    size_t out_bytes;
    uint8_t *scratch; /* for compression: fsx_pack_scratch(largest file) bytes */
    size_t scratch_bytes;
    struct fsx_packed *packed; /* order_count results */
    struct fsx_chunk *chunks;  /* records of the files of several chunks, in order */
    size_t chunks_room;
    size_t chunks_used;
    size_t out_used;
};

/* A batch with a file of FSX_TAR_ALIGNED_BYTES (tarhead.h) or more belongs at a multiple of a page in its partition. */

size_t fsx_pack_scratch(uint64_t largest_file);

/* Pack a batch. An entry that fails leaves no trace in `out` but its status. Returns 0, or an errno if the batch as a
 * whole could not be worked on (no memory). */
int fsx_pack(const struct fsx_table *table, struct fsx_batch *batch);

/* Path of an entry in `out` (not terminated), or 0 if it does not fit; the root has none. */
size_t fsx_table_path(const struct fsx_table *table, uint32_t entry, uint8_t *out, size_t capacity);

#endif
