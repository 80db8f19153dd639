/* index.c: checks of index.fsx. See index.h, and docs/format.md for the rules checked here. */
#include "format/index.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "format/codec.h"

#define refuse fsx_index_refuse

static bool is_directory(const struct fsx_index *x, uint32_t entry) { return S_ISDIR(x->mode[entry]); }

static int check_name(const struct fsx_index *x, uint32_t entry, struct fsx_problem *problem) {
    const uint8_t *name = x->names + x->nameoff[entry];
    const uint64_t bytes = x->nameoff[entry + 1] - x->nameoff[entry];
    if (entry == 0)
        return bytes == 0 ? 0 : refuse(problem, "the root directory has a name");
    if (bytes == 0 || bytes > FSX_NAME_MAX)
        return refuse(problem, "the name of entry %" PRIu32 " has %" PRIu64 " bytes", entry, bytes);
    if (memchr(name, '/', bytes) != NULL || memchr(name, 0, bytes) != NULL)
        return refuse(problem, "the name of entry %" PRIu32 " contains '/' or NUL", entry);
    if (name[0] == '.' && (bytes == 1 || (bytes == 2 && name[1] == '.')))
        return refuse(problem, "entry %" PRIu32 " is called '%.*s'", entry, (int)bytes, (const char *)name);
    return 0;
}

static int check_file(const struct fsx_index *x, uint32_t i, struct fsx_problem *problem) {
    if (x->part[i] >= x->partitions)
        return refuse(problem, "entry %" PRIu32 " is in partition %" PRIu32 " of %" PRIu32, i, x->part[i], x->partitions);
    const uint64_t part_bytes = x->parts[x->part[i]];
    if (x->offset[i] > part_bytes || x->stored[i] > part_bytes - x->offset[i])
        return refuse(problem, "the bytes of entry %" PRIu32 " are outside partition %" PRIu32, i, x->part[i]);
    if (x->size[i] > INT64_MAX)
        return refuse(problem, "the size of entry %" PRIu32 " is impossible", i);
    const struct fsx_codec *codec = fsx_codec_find(x->codec[i]);
    if (codec == NULL)
        return refuse(problem, "entry %" PRIu32 " has codec %" PRIu32 ", which is unknown here; a newer FanStore has written it", i,
                      x->codec[i]);
    const bool plain = codec->decode == NULL;
    if (plain ? x->stored[i] != x->size[i] : x->stored[i] >= x->size[i] || x->stored[i] < codec->shortest_bytes)
        return refuse(problem, "the stored size of entry %" PRIu32 " does not fit its size", i);

    if (x->size[i] <= FSX_CHUNK_BYTES)
        return x->first[i] == 0 && x->count[i] == 0
                   ? 0
                   : refuse(problem, "entry %" PRIu32 " of one chunk has a chunk list", i);
    const uint64_t count = (x->size[i] + FSX_CHUNK_BYTES - 1) / FSX_CHUNK_BYTES;
    if (x->count[i] != count || x->first[i] > x->chunk_records || count > x->chunk_records - x->first[i])
        return refuse(problem, "the chunk list of entry %" PRIu32 " is outside the file", i);
    const struct fsx_chunk *chunk = x->chunks + x->first[i];
    for (uint64_t k = 0; k < count; k++) {
        const uint64_t end = k + 1 < count ? chunk[k + 1].start : x->stored[i];
        const uint64_t longest = (uint64_t)FSX_CHUNK_BYTES + codec->overhead_bytes;
        const bool placed = k == 0 ? chunk[k].start == 0 : !plain || chunk[k].start == k * (uint64_t)FSX_CHUNK_BYTES;
        if (!placed || chunk[k].start >= end || end > x->stored[i] || end - chunk[k].start > longest)
            return refuse(problem, "chunk %" PRIu64 " of entry %" PRIu32 " is not where it belongs", k, i);
    }
    return 0;
}

static int check_symlink(const struct fsx_index *x, uint32_t i, struct fsx_problem *problem) {
    if (x->size[i] == 0 || x->size[i] > FSX_LINK_MAX || x->stored[i] != x->size[i] ||
        x->offset[i] > x->links_bytes || x->size[i] > x->links_bytes - x->offset[i] ||
        memchr(x->links + x->offset[i], 0, x->size[i]) != NULL)
        return refuse(problem, "the target of symbolic link %" PRIu32 " is not valid", i);
    if (x->part[i] != FSX_NO_PARTITION || x->codec[i] != 0 || x->checksum[i] != 0 || x->first[i] != 0 || x->count[i] != 0)
        return refuse(problem, "symbolic link %" PRIu32 " has fields of a file", i);
    return 0;
}

/* A directory's children must be exactly the next entries not yet claimed: `next` counts them. */
static int check_directory(const struct fsx_index *x, uint32_t i, uint32_t *next, struct fsx_problem *problem) {
    if (x->size[i] != 0 || x->stored[i] != 0 || x->offset[i] != 0 || x->part[i] != FSX_NO_PARTITION ||
        x->codec[i] != 0 || x->checksum[i] != 0)
        return refuse(problem, "directory %" PRIu32 " has fields of a file", i);
    if (x->first[i] != *next || x->count[i] > x->entries - *next || *next <= i)
        return refuse(problem, "the children of directory %" PRIu32 " are not the next entries", i);
    uint32_t subdirectories = 0;
    for (uint32_t c = *next; c < *next + x->count[i]; c++) {
        if (x->parent[c] != i)
            return refuse(problem, "entry %" PRIu32 " is a child of directory %" PRIu32 " but names another", c, i);
        if (c > *next &&
            fsx_index_compare_names(x->names + x->nameoff[c - 1], x->nameoff[c] - x->nameoff[c - 1], x->names + x->nameoff[c],
                          x->nameoff[c + 1] - x->nameoff[c]) >= 0)
            return refuse(problem, "the names of entries %" PRIu32 " and %" PRIu32 " are not in order", c - 1, c);
        subdirectories += is_directory(x, c);
    }
    if (x->nlink[i] != 2 + subdirectories)
        return refuse(problem, "directory %" PRIu32 " has a wrong link count", i);
    *next += x->count[i];
    return 0;
}

static bool same_inode(const struct fsx_index *x, uint32_t a, uint32_t b) {
    return x->mode[a] == x->mode[b] && x->mtime[a] == x->mtime[b] && x->size[a] == x->size[b] &&
           x->part[a] == x->part[b] && x->offset[a] == x->offset[b] && x->stored[a] == x->stored[b] &&
           x->codec[a] == x->codec[b] && x->checksum[a] == x->checksum[b] && x->nlink[a] == x->nlink[b] &&
           x->first[a] == x->first[b] && x->count[a] == x->count[b];
}

/* `names` has one zeroed counter per entry. */
static int check_entries(const struct fsx_index *x, uint32_t *names, struct fsx_problem *problem) {
    uint32_t next = 1;
    if (!is_directory(x, 0) || x->parent[0] != 0)
        return refuse(problem, "entry 0 is not a root directory");
    for (uint32_t i = 0; i < x->entries; i++) {
        if (check_name(x, i, problem) != 0)
            return -1;
        if ((x->mode[i] & ~(uint32_t)(S_IFMT | 07777)) != 0)
            return refuse(problem, "entry %" PRIu32 " has the impossible mode %" PRIo32, i, x->mode[i]);
        int status;
        if (S_ISDIR(x->mode[i]))
            status = check_directory(x, i, &next, problem);
        else if (S_ISREG(x->mode[i]))
            status = check_file(x, i, problem);
        else if (S_ISLNK(x->mode[i]))
            status = check_symlink(x, i, problem);
        else
            status = refuse(problem, "entry %" PRIu32 " is neither file, directory nor symbolic link", i);
        if (status != 0)
            return -1;
        const uint32_t primary = x->inode[i];
        if (primary > i || x->inode[primary] != primary || (primary != i && (is_directory(x, i) || !same_inode(x, i, primary))))
            return refuse(problem, "entry %" PRIu32 " is not a valid hard link to entry %" PRIu32, i, primary);
        names[primary]++;
    }
    if (next != x->entries)
        return refuse(problem, "%" PRIu32 " entries belong to no directory", x->entries - next);
    for (uint32_t i = 0; i < x->entries; i++)
        if (x->inode[i] == i && !is_directory(x, i) && x->nlink[i] != names[i])
            return refuse(problem, "entry %" PRIu32 " has a wrong link count", i);
    return 0;
}

int fsx_index_open(const void *data, size_t length, struct fsx_index *index, struct fsx_problem *problem) {
    if ((uintptr_t)data % 8 != 0)
        return refuse(problem, "it is not aligned in memory");
    if (fsx_index_columns(data, length, true, index, problem) != 0)
        return -1;
    uint32_t *names = calloc(index->entries, sizeof *names);
    if (names == NULL)
        return refuse(problem, "there is not enough memory to check it");
    const int status = check_entries(index, names, problem);
    free(names);
    return status;
}
