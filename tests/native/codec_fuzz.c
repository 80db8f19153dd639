/* codec_fuzz.c: throws spoiled chunks at the decoders of native/format/codec.c; built with sanitizers by test_codecs.py.
 *
 *   codec_fuzz SEED ROUNDS FILE...
 *
 * A FILE is one stored chunk, after three numbers of 64 bits: of its codec, whether it is the first of its file, and the
 * length of its content. It must decode. Then ROUNDS spoiled copies are decoded, some of them for a content of another
 * length. Stored bytes and content lie in blocks of memory of exactly their size, so that the address sanitizer sees any
 * access outside. Prints "decoded D refused R"; anything odd ends the program with a code that is not zero.
 */
#include "format/codec.h"
#include "chance.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONTENT_MAX (1u << 20)

static uint64_t decoded, refused;

static void die(const char *text) {
    fprintf(stderr, "codec_fuzz: %s\n", text);
    exit(3);
}

static uint8_t *exact(size_t length) {
    uint8_t *data = malloc(length == 0 ? 1 : length);
    if (data == NULL)
        die("out of memory");
    return data;
}

static bool decode(const struct fsx_codec *codec, const uint8_t *stored, size_t bytes, bool first, size_t content_bytes) {
    uint8_t *copy = exact(bytes), *content = exact(content_bytes);
    memcpy(copy, stored, bytes);
    const bool right = codec->decode(copy, bytes, first, content, content_bytes);
    free(copy);
    free(content);
    return right;
}

/* Change bytes at random, mostly near the beginning, where the headers are. Returns the new length. */
static size_t spoil(uint8_t *stored, size_t bytes) {
    if (below(5) == 0)
        return below(bytes + 1);
    for (uint64_t times = 1 + below(4); times > 0; times--) {
        uint8_t *at = stored + below(below(2) == 0 && bytes > 24 ? 24 : bytes);
        *at = below(2) == 0 ? (uint8_t)next_random() : *at ^ (uint8_t)(1u << below(8));
    }
    return bytes;
}

static void fuzz(const uint8_t *file, size_t bytes, uint64_t rounds) {
    uint64_t head[3];
    if (bytes < sizeof head)
        die("a file without a head");
    memcpy(head, file, sizeof head);
    const struct fsx_codec *codec = fsx_codec_find((uint32_t)head[0]);
    const uint8_t *stored = file + sizeof head;
    bytes -= sizeof head;
    if (codec == NULL || codec->decode == NULL || !decode(codec, stored, bytes, head[1] != 0, (size_t)head[2]))
        die("a sound chunk does not decode");
    for (uint64_t round = 0; round < rounds; round++) {
        uint8_t *copy = exact(bytes);
        memcpy(copy, stored, bytes);
        const size_t left = below(8) == 0 ? bytes : spoil(copy, bytes);
        const size_t expected = below(4) == 0 ? below(below(2) == 0 ? 64 : CONTENT_MAX) : (size_t)head[2];
        if (decode(codec, copy, left, below(16) == 0 ? head[1] == 0 : head[1] != 0, expected))
            decoded++;
        else
            refused++;
        free(copy);
    }
}

int main(int argc, char **argv) {
    if (argc < 4)
        die("usage: codec_fuzz SEED ROUNDS FILE...");
    state = strtoull(argv[1], NULL, 10) | 1;
    const uint64_t rounds = strtoull(argv[2], NULL, 10);
    for (int i = 3; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (file == NULL || fseek(file, 0, SEEK_END) != 0)
            die("a file cannot be read");
        const size_t bytes = (size_t)ftell(file);
        rewind(file);
        uint8_t *data = exact(bytes);
        if (fread(data, 1, bytes, file) != bytes)
            die("a file cannot be read");
        fclose(file);
        fuzz(data, bytes, rounds);
        free(data);
    }
    printf("decoded %" PRIu64 " refused %" PRIu64 "\n", decoded, refused);
    return 0;
}
