/* index.c: checks of index.fsx and look-up by name. See index.h, and docs/format.md for the rules checked here. */
#include "index.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

static const uint8_t MAGIC[8] = {0x89, 'F', 'S', 'X', '\r', '\n', 0x1a, '\n'};

enum section {
    S_PARENT, S_NAMEOFF, S_MODE, S_MTIME, S_SIZE, S_PART, S_OFFSET, S_STORED, S_CODEC, S_CHECKSUM, S_INODE, S_NLINK,
    S_FIRST, S_COUNT, S_NAMES, S_LINKS, S_CHUNKS, S_PARTS, SECTIONS
};

static const struct {
    char tag[8];
    uint32_t item_bytes;
} LAYOUT[SECTIONS] = {
    {"parent", 4}, {"nameoff", 8}, {"mode", 4},     {"mtime", 8}, {"size", 8},  {"part", 4},
    {"offset", 8}, {"stored", 8},  {"codec", 4},    {"checksum", 8}, {"inode", 4}, {"nlink", 4},
    {"first", 4},  {"count", 4},   {"names", 1},    {"links", 1}, {"chunks", 16}, {"parts", 8},
};

/* Shortest possible LZ4 frame of ours: header with content size (15) and end mark (4). */
#define LZ4_FRAME_MIN 19u

__attribute__((format(printf, 2, 3))) static int refuse(struct fsx_problem *problem, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem->text, sizeof problem->text, format, arguments);
    va_end(arguments);
    return -1;
}

static bool is_directory(const struct fsx_index *x, uint32_t entry) { return S_ISDIR(x->mode[entry]); }

/* Header, section table and checksums; fills the pointers of `x`. */
static int check_layout(const uint8_t *data, size_t length, struct fsx_index *x, struct fsx_problem *problem) {
    struct fsx_header head;
    if (length < sizeof head)
        return refuse(problem, "it is truncated: %zu bytes are less than a header", length);
    memcpy(&head, data, sizeof head);
    if (memcmp(head.magic, MAGIC, sizeof MAGIC) != 0)
        return refuse(problem, "it is not a FanStore index (wrong magic number)");
    if (head.version != FSX_VERSION)
        return refuse(problem, "it has format version %" PRIu32 ", this program reads version %u", head.version,
                      FSX_VERSION);
    if (XXH3_64bits(data, offsetof(struct fsx_header, header_checksum)) != head.header_checksum)
        return refuse(problem, "its header is damaged (checksum)");
    if (head.file_bytes != length)
        return refuse(problem, "it has %zu bytes, its header says %" PRIu64 ": truncated or extended", length,
                      head.file_bytes);
    if (head.sections != SECTIONS)
        return refuse(problem, "it has %" PRIu32 " sections, %d are expected", head.sections, SECTIONS);
    if (head.chunk_bytes != FSX_CHUNK_BYTES)
        return refuse(problem, "it has chunks of %" PRIu32 " bytes, %u are expected", head.chunk_bytes, FSX_CHUNK_BYTES);
    if (head.entries < 1 || head.entries > UINT32_MAX - 1)
        return refuse(problem, "it has an impossible number of entries, %" PRIu64, head.entries);
    if (head.chunks > UINT32_MAX)
        return refuse(problem, "it has an impossible number of chunks, %" PRIu64, head.chunks);
    const size_t table_end = sizeof head + SECTIONS * sizeof(struct fsx_section);
    if (length < table_end)
        return refuse(problem, "it is truncated inside its section table");
    if (XXH3_64bits(data + sizeof head, length - sizeof head) != head.body_checksum)
        return refuse(problem, "it is damaged (checksum)");

    const void *base[SECTIONS];
    uint64_t bytes[SECTIONS];
    uint64_t end = table_end;
    for (int s = 0; s < SECTIONS; s++) {
        struct fsx_section section;
        memcpy(&section, data + sizeof head + (size_t)s * sizeof section, sizeof section);
        if (memcmp(section.tag, LAYOUT[s].tag, sizeof section.tag) != 0 || section.item_bytes != LAYOUT[s].item_bytes ||
            section.zero != 0)
            return refuse(problem, "section %d is not '%.8s' as expected", s, LAYOUT[s].tag);
        const uint64_t start = (end + FSX_SECTION_ALIGN - 1) / FSX_SECTION_ALIGN * FSX_SECTION_ALIGN;
        if (section.offset != start || start > length || section.bytes > length - start)
            return refuse(problem, "section '%.8s' is not inside the file where it belongs", LAYOUT[s].tag);
        for (uint64_t i = end; i < start; i++)
            if (data[i] != 0)
                return refuse(problem, "padding before section '%.8s' is not zero", LAYOUT[s].tag);
        uint64_t items = head.entries;
        if (s == S_NAMEOFF)
            items = head.entries + 1;
        else if (s == S_CHUNKS)
            items = head.chunks;
        else if (s == S_PARTS)
            items = head.partitions;
        else if (s == S_NAMES || s == S_LINKS)
            items = section.bytes;
        if (section.bytes != items * section.item_bytes)
            return refuse(problem, "section '%.8s' has %" PRIu64 " bytes, %" PRIu64 " are expected", LAYOUT[s].tag,
                          section.bytes, items * section.item_bytes);
        base[s] = data + start;
        bytes[s] = section.bytes;
        end = start + section.bytes;
    }
    if (end != length)
        return refuse(problem, "it has %" PRIu64 " bytes after its last section", length - end);

    *x = (struct fsx_index){
        .entries = (uint32_t)head.entries,
        .partitions = head.partitions,
        .chunk_records = head.chunks,
        .parent = base[S_PARENT], .nameoff = base[S_NAMEOFF], .mode = base[S_MODE], .mtime = base[S_MTIME],
        .size = base[S_SIZE], .part = base[S_PART], .offset = base[S_OFFSET], .stored = base[S_STORED],
        .codec = base[S_CODEC], .checksum = base[S_CHECKSUM], .inode = base[S_INODE], .nlink = base[S_NLINK],
        .first = base[S_FIRST], .count = base[S_COUNT], .names = base[S_NAMES], .links = base[S_LINKS],
        .links_bytes = bytes[S_LINKS], .chunks = base[S_CHUNKS], .parts = base[S_PARTS],
    };
    if (x->nameoff[0] != 0)
        return refuse(problem, "the first name does not begin at 0");
    for (uint32_t i = 0; i < x->entries; i++)
        if (x->nameoff[i + 1] < x->nameoff[i] || x->nameoff[i + 1] > bytes[S_NAMES])
            return refuse(problem, "the name of entry %" PRIu32 " is outside the file", i);
    if (x->nameoff[x->entries] != bytes[S_NAMES])
        return refuse(problem, "there are bytes after the last name");
    return 0;
}

static int compare_names(const uint8_t *a, size_t a_bytes, const uint8_t *b, size_t b_bytes) {
    const int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    if (order != 0)
        return order;
    return a_bytes < b_bytes ? -1 : a_bytes > b_bytes;
}

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
    const bool lz4 = x->codec[i] == FSX_CODEC_LZ4;
    if (!lz4 && x->codec[i] != FSX_CODEC_NONE)
        return refuse(problem, "entry %" PRIu32 " has the unknown codec %" PRIu32, i, x->codec[i]);
    if (lz4 ? (x->stored[i] >= x->size[i] || x->stored[i] < LZ4_FRAME_MIN) : x->stored[i] != x->size[i])
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
        const uint64_t longest = (uint64_t)FSX_CHUNK_BYTES + LZ4_FRAME_MIN;
        const bool placed = k == 0 ? chunk[k].start == 0 : lz4 || chunk[k].start == k * (uint64_t)FSX_CHUNK_BYTES;
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
            compare_names(x->names + x->nameoff[c - 1], x->nameoff[c] - x->nameoff[c - 1], x->names + x->nameoff[c],
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
    if (check_layout(data, length, index, problem) != 0)
        return -1;
    uint32_t *names = calloc(index->entries, sizeof *names);
    if (names == NULL)
        return refuse(problem, "there is not enough memory to check it");
    const int status = check_entries(index, names, problem);
    free(names);
    return status;
}

int64_t fsx_index_lookup(const struct fsx_index *x, uint64_t directory, const uint8_t *name, size_t name_bytes) {
    if (directory >= x->entries || !is_directory(x, (uint32_t)directory))
        return -1;
    uint32_t low = x->first[directory];
    uint32_t high = low + x->count[directory];
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const int order = compare_names(x->names + x->nameoff[middle], x->nameoff[middle + 1] - x->nameoff[middle], name,
                                        name_bytes);
        if (order == 0)
            return middle;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return -1;
}
