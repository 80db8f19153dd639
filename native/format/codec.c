/* codec.c: the table of codecs; see codec.h. */
#include "format/codec.h"

const struct fsx_codec fsx_codec_none = {.number = 0, .name = "none"};

const struct fsx_codec *const fsx_codecs[] = {&fsx_codec_none, &fsx_codec_lz4, &fsx_codec_zstd, NULL};

const struct fsx_codec *fsx_codec_find(uint32_t number) {
    for (size_t i = 0; fsx_codecs[i] != NULL; i++)
        if (fsx_codecs[i]->number == number)
            return fsx_codecs[i];
    return NULL;
}
