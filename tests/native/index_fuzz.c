/* index_fuzz.c: throws spoiled indexes at native/format/index.c; built with sanitizers by test_native_sanitized.py.
 *
 *   index_fuzz SEED ROUNDS FILE...
 *
 * Each FILE must be accepted. Then ROUNDS spoiled copies of each are checked, most of them with both checksums computed
 * anew, as a hostile author would do. Each copy lies in a block of memory of exactly its size, so that the address
 * sanitizer sees any read outside it. What is accepted is walked completely: all names, look-ups, targets and chunks.
 * Prints "accepted A refused R"; anything odd ends the program with a message and a code that is not zero.
 */
#include "format/index.h"
#include "chance.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

static void die(const char *text) {
    fprintf(stderr, "index_fuzz: %s\n", text);
    exit(3);
}

static uint8_t *exact(size_t length) {
    uint8_t *data = malloc(length == 0 ? 1 : length);
    if (data == NULL)
        die("out of memory");
    return data;
}

static volatile uint64_t sink;

static uint64_t sum_bytes(const uint8_t *bytes, uint64_t count) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < count; i++)
        sum += bytes[i];
    return sum;
}

/* Read everything that an accepted index offers. */
static void walk(const struct fsx_index *x) {
    uint64_t sum = 0;
    uint32_t reached = 1;
    for (uint32_t i = 0; i < x->entries; i++) {
        const uint8_t *name = x->names + x->nameoff[i];
        const uint64_t name_bytes = x->nameoff[i + 1] - x->nameoff[i];
        sum += sum_bytes(name, name_bytes);
        if (S_ISDIR(x->mode[i])) {
            for (uint32_t c = x->first[i]; c < x->first[i] + x->count[i]; c++, reached++) {
                const uint64_t bytes = x->nameoff[c + 1] - x->nameoff[c];
                /* A copy of its own size: a comparison that runs over the end of the given name is seen too. */
                uint8_t *copy = exact(bytes);
                memcpy(copy, x->names + x->nameoff[c], bytes);
                if (fsx_index_lookup(x, i, copy, bytes) != (int64_t)c)
                    die("an entry is not found under its name");
                if (bytes > 1 && copy[bytes - 1] != 0) {
                    copy[bytes - 1] = 0; /* no name has a NUL */
                    if (fsx_index_lookup(x, i, copy, bytes) != -1)
                        die("a name is found that is not there");
                }
                free(copy);
            }
        } else if (S_ISLNK(x->mode[i])) {
            sum += sum_bytes(x->links + x->offset[i], x->size[i]);
        } else {
            if (x->offset[i] + x->stored[i] > x->parts[x->part[i]])
                die("a file outside its partition was accepted");
            uint64_t previous = 0;
            for (uint32_t k = 0; k < x->count[i]; k++) {
                const struct fsx_chunk *chunk = x->chunks + x->first[i] + k;
                if (chunk->start < previous || chunk->start >= x->stored[i])
                    die("a chunk outside its file was accepted");
                previous = chunk->start;
                sum += chunk->checksum;
            }
        }
        if (fsx_index_lookup(x, i, (const uint8_t *)"", 0) != -1)
            die("the empty name is found");
    }
    if (reached != x->entries)
        die("not every entry is reached from the root");
    if (fsx_index_lookup(x, UINT64_MAX, (const uint8_t *)"a", 1) != -1 ||
        fsx_index_lookup(x, x->entries, (const uint8_t *)"a", 1) != -1)
        die("a directory that does not exist has a child");
    sink += sum;
}

static void put64(uint8_t *at, uint64_t value) { memcpy(at, &value, sizeof value); }

/* A number that is likely to hurt. */
static uint64_t nasty(uint64_t old, uint64_t length) {
    static const uint64_t fixed[] = {0, 1, 2, 63, 64, 255, 256, 4095, 4096, 4194303, 4194304, 4194305, INT32_MAX,
                                     UINT32_MAX, UINT32_MAX - 1, (uint64_t)UINT32_MAX + 1, INT64_MAX,
                                     (uint64_t)INT64_MAX + 1, UINT64_MAX, UINT64_MAX - 1, UINT64_MAX - 511};
    switch (below(6)) {
    case 0: return old + 1;
    case 1: return old - 1;
    case 2: return old ^ (UINT64_C(1) << below(64));
    case 3: return length - below(65);
    case 4: return below(40);
    default: return fixed[below(sizeof fixed / sizeof *fixed)];
    }
}

static void spoil(uint8_t *data, size_t length) {
    if (length < 16)
        return;
    const uint64_t kind = below(8);
    /* Most of the meaning is in the sections; header and table are hit about once in four. */
    const size_t from = length >= 640 + 16 && below(4) != 0 ? 640 : 0;
    const size_t span = length - from;
    if (kind <= 1) {
        for (uint64_t times = 1 + below(3); times > 0; times--)
            data[from + below(span)] ^= (uint8_t)(1u << below(8));
    } else if (kind == 2) {
        data[from + below(span)] = (uint8_t)next_random();
    } else if (kind <= 5) {
        const size_t width = below(2) == 0 ? 4 : 8;
        for (uint64_t times = 1 + below(2); times > 0; times--) {
            uint8_t *at = data + (from + below(span - width + 1)) / width * width;
            uint64_t value = 0;
            memcpy(&value, at, width); /* little-endian, as the whole format */
            value = nasty(value, length);
            memcpy(at, &value, width);
        }
    } else if (kind == 6) {
        /* Two fields change places: valid numbers where they do not belong. */
        const size_t a = (from + below(span - 8)) / 4 * 4, b = (from + below(span - 8)) / 4 * 4;
        uint8_t x[4], y[4];
        memcpy(x, data + a, 4);
        memcpy(y, data + b, 4);
        memcpy(data + a, y, 4);
        memcpy(data + b, x, 4);
    } else {
        const size_t bytes = 1 + below(span / 2), a = from + below(span - bytes), b = from + below(span - bytes);
        memmove(data + a, data + b, bytes);
    }
}

/* Spoil whole fields of one or two entries, knowing the columns: gets past the simple checks more often. `head` is of
 * the unspoiled file. */
static void spoil_fields(uint8_t *data, size_t length, const struct fsx_header *head) {
    const uint64_t entry = below(head->entries);
    uint64_t value = 0;
    for (uint64_t times = 1 + below(3); times > 0; times--) {
        struct fsx_section section;
        memcpy(&section, data + sizeof *head + below(head->sections) * sizeof section, sizeof section);
        if (section.bytes < 8)
            continue;
        const size_t width = section.item_bytes == 4 ? 4 : 8;
        const uint64_t items = section.bytes / width;
        uint8_t *at = data + section.offset + (entry < items && below(4) != 0 ? entry : below(items)) * width;
        switch (below(4)) {
        case 0: /* the number of another entry */
            memcpy(&value, data + section.offset + below(items) * width, width);
            break;
        case 1: /* the same number as in the column before */
            break;
        default:
            value = 0;
            memcpy(&value, at, width);
            value = nasty(value, length);
        }
        memcpy(at, &value, width);
    }
}

/* Write length and checksums anew. */
static void seal(uint8_t *data, size_t length) {
    if (length < sizeof(struct fsx_header))
        return;
    put64(data + 48, XXH3_64bits(data + 64, length - 64));
    put64(data + 56, XXH3_64bits(data, 56));
}

static uint8_t *read_file(const char *path, size_t *length) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0)
        die("cannot open a file of the corpus");
    const long bytes = ftell(file);
    rewind(file);
    if (bytes < 0)
        die("cannot read a file of the corpus");
    uint8_t *data = exact((size_t)bytes);
    if (fread(data, 1, (size_t)bytes, file) != (size_t)bytes)
        die("cannot read a file of the corpus");
    fclose(file);
    *length = (size_t)bytes;
    return data;
}

int main(int argc, char **argv) {
    if (argc < 4)
        die("usage: index_fuzz SEED ROUNDS FILE...");
    state = strtoull(argv[1], NULL, 10) * 2 + 1;
    const long rounds = strtol(argv[2], NULL, 10);
    uint64_t accepted = 0, refused = 0;
    struct fsx_index index;
    struct fsx_problem problem;
    for (int f = 3; f < argc; f++) {
        size_t length;
        uint8_t *original = read_file(argv[f], &length);
        if (fsx_index_open(original, length, &index, &problem) != 0)
            die(problem.text);
        walk(&index);
        struct fsx_header head;
        memcpy(&head, original, sizeof head);
        for (long round = 0; round < rounds; round++) {
            size_t copy_bytes = length;
            if (below(10) == 0)
                copy_bytes = below(3) == 0 ? length + 1 + below(200) : below(length + 1);
            uint8_t *copy = exact(copy_bytes);
            memset(copy, 0, copy_bytes);
            memcpy(copy, original, copy_bytes < length ? copy_bytes : length);
            if (copy_bytes != length && copy_bytes >= 24 && below(2) == 0)
                put64(copy + 16, copy_bytes);
            if (copy_bytes == length && below(2) == 0)
                spoil_fields(copy, copy_bytes, &head);
            else if (copy_bytes == length || below(2) == 0)
                spoil(copy, copy_bytes);
            if (below(8) != 0)
                seal(copy, copy_bytes);
            memset(problem.text, 'x', sizeof problem.text);
            if (fsx_index_open(copy, copy_bytes, &index, &problem) == 0) {
                walk(&index);
                accepted++;
            } else {
                if (memchr(problem.text, 0, sizeof problem.text) == NULL || problem.text[0] == 0)
                    die("refused without a reason");
                refused++;
            }
            free(copy);
        }
        free(original);
    }
    printf("accepted %" PRIu64 " refused %" PRIu64 "\n", accepted, refused);
    return 0;
}
