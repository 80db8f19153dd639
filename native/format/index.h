/* index.h: the name space of a prepared dataset (index.fsx), checked once and then read in place.
 *
 * The format is described byte by byte in docs/format.md. Nothing here allocates memory that outlives a call, takes a
 * lock or knows of Python; a struct fsx_index only points into the caller's buffer, which must stay mapped and
 * unchanged for as long as it is used. After a successful fsx_index_open every function below is safe for any argument
 * that its comment allows, from any number of threads.
 */
#ifndef FANSTORE_FORMAT_INDEX_H
#define FANSTORE_FORMAT_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FSX_VERSION 1u
#define FSX_CHUNK_BYTES (4u << 20)
#define FSX_NO_PARTITION UINT32_MAX
#define FSX_NAME_MAX 255u
#define FSX_LINK_MAX 4095u
#define FSX_SECTION_ALIGN 64u

struct fsx_header {
    uint8_t magic[8];
    uint32_t version;
    uint32_t sections;
    uint64_t file_bytes;
    uint64_t entries;
    uint32_t partitions;
    uint32_t chunk_bytes;
    uint64_t chunks;
    uint64_t body_checksum;
    uint64_t header_checksum;
};
_Static_assert(sizeof(struct fsx_header) == 64, "header layout is shared with Python");

struct fsx_section {
    char tag[8];
    uint64_t offset;
    uint64_t bytes;
    uint32_t item_bytes;
    uint32_t zero;
};
_Static_assert(sizeof(struct fsx_section) == 32, "section layout is shared with Python");

struct fsx_chunk {
    uint64_t start;
    uint64_t checksum;
};
_Static_assert(sizeof(struct fsx_chunk) == 16, "chunk layout is shared with Python");

/* Columns of a checked index. All pointers point into the buffer given to fsx_index_open. */
struct fsx_index {
    uint32_t entries;
    uint32_t partitions;
    uint64_t chunk_records;
    const uint32_t *parent;
    const uint64_t *nameoff;
    const uint32_t *mode;
    const int64_t *mtime;
    const uint64_t *size;
    const uint32_t *part;
    const uint64_t *offset;
    const uint64_t *stored;
    const uint32_t *codec;
    const uint64_t *checksum;
    const uint32_t *inode;
    const uint32_t *nlink;
    const uint32_t *first;
    const uint32_t *count;
    const uint8_t *names;
    const uint8_t *links;
    uint64_t links_bytes;
    const struct fsx_chunk *chunks;
    const uint64_t *parts;
};

/* Why an index was refused: half a sentence, without the file's name. */
struct fsx_problem {
    char text[192];
};

/* Check the `length` bytes at `data` (aligned to 8) completely and fill `index`. Returns 0, or -1 with `problem` filled
 * in; then `index` must not be used. Takes time linear in the length and 4 bytes of temporary memory per entry. */
int fsx_index_open(const void *data, size_t length, struct fsx_index *index, struct fsx_problem *problem);

/* The first part of that: header and section table, and checksums if one is suspicious. Without suspicion it takes no time,
 * for the copy of an index that was checked already. */
int fsx_index_columns(const void *data, size_t length, bool suspicious, struct fsx_index *index,
                      struct fsx_problem *problem);

/* For the checks: -1, with a sentence in `problem`; the order of names. */
__attribute__((format(printf, 2, 3))) int fsx_index_refuse(struct fsx_problem *problem, const char *format, ...);
int fsx_index_compare_names(const uint8_t *a, size_t a_bytes, const uint8_t *b, size_t b_bytes);

/* The child of directory `directory` with this name, or -1. `directory` may be any number: one that is not a directory
 * of this index has no children. */
int64_t fsx_index_lookup(const struct fsx_index *index, uint64_t directory, const uint8_t *name, size_t name_bytes);

/* The path of an entry below the root, ended by a NUL; "" for the root. Its length with the NUL, or 0 if that is more than
 * `room`. */
size_t fsx_index_path(const struct fsx_index *index, uint32_t entry, char *path, size_t room);

#endif
