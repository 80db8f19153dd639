/* index_columns.c: where the columns of an index are, and look-up by name. See index.h; of its rules, only those about the
 * layout of the file are here. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "format/index.h"

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

int fsx_index_refuse(struct fsx_problem *problem, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem->text, sizeof problem->text, format, arguments);
    va_end(arguments);
    return -1;
}

#define refuse fsx_index_refuse

int fsx_index_columns(const void *start_of_index, size_t length, bool suspicious, struct fsx_index *x,
                      struct fsx_problem *problem) {
    const uint8_t *data = start_of_index;
    struct fsx_header head;
    if (length < sizeof head)
        return refuse(problem, "it is truncated: %zu bytes are less than a header", length);
    memcpy(&head, data, sizeof head);
    if (memcmp(head.magic, MAGIC, sizeof MAGIC) != 0)
        return refuse(problem, "it is not a FanStore index (wrong magic number)");
    if (head.version != FSX_VERSION)
        return refuse(problem, "it has format version %" PRIu32 ", this program reads version %u", head.version,
                      FSX_VERSION);
    if (suspicious && XXH3_64bits(data, offsetof(struct fsx_header, header_checksum)) != head.header_checksum)
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
    if (suspicious && XXH3_64bits(data + sizeof head, length - sizeof head) != head.body_checksum)
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
    if (!suspicious)
        return 0;
    if (x->nameoff[0] != 0)
        return refuse(problem, "the first name does not begin at 0");
    for (uint32_t i = 0; i < x->entries; i++)
        if (x->nameoff[i + 1] < x->nameoff[i] || x->nameoff[i + 1] > bytes[S_NAMES])
            return refuse(problem, "the name of entry %" PRIu32 " is outside the file", i);
    if (x->nameoff[x->entries] != bytes[S_NAMES])
        return refuse(problem, "there are bytes after the last name");
    return 0;
}

int fsx_index_compare_names(const uint8_t *a, size_t a_bytes, const uint8_t *b, size_t b_bytes) {
    const int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    if (order != 0)
        return order;
    return a_bytes < b_bytes ? -1 : a_bytes > b_bytes;
}

int64_t fsx_index_lookup(const struct fsx_index *x, uint64_t directory, const uint8_t *name, size_t name_bytes) {
    if (directory >= x->entries || !S_ISDIR(x->mode[directory]))
        return -1;
    uint32_t low = x->first[directory];
    uint32_t high = low + x->count[directory];
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const int order = fsx_index_compare_names(x->names + x->nameoff[middle], x->nameoff[middle + 1] - x->nameoff[middle], name,
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

size_t fsx_index_path(const struct fsx_index *x, uint32_t entry, char *path, size_t room) {
    size_t bytes = 1;
    for (uint32_t e = entry; e != 0; e = x->parent[e])
        bytes += (size_t)(x->nameoff[e + 1] - x->nameoff[e]) + (x->parent[e] != 0);
    if (bytes > room)
        return 0;
    size_t at = bytes - 1;
    path[at] = '\0';
    for (uint32_t e = entry; e != 0; e = x->parent[e]) {
        const size_t name_bytes = (size_t)(x->nameoff[e + 1] - x->nameoff[e]);
        at -= name_bytes;
        memcpy(path + at, x->names + x->nameoff[e], name_bytes);
        if (x->parent[e] != 0)
            path[--at] = '/';
    }
    return bytes;
}
