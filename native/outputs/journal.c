/* outputs/journal.c: see outputs/journal.h.
 *
 * A record is the length of a text and its CRC-32, both little-endian, and the text: msgpack, of which this knows what it
 * needs.
 */
#include "outputs/journal.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define HEAD_BYTES 8u
#define NAME_MOST 255u
/* Longer than any record: a name and six other values of up to 9 bytes, and what is around them. */
#define RECORD_BYTES (HEAD_BYTES + NAME_MOST + 80u)

struct record {
    uint8_t bytes[RECORD_BYTES];
    size_t used;
};

bool fsx_output_journal_open(struct fsx_output_journal *journal, int fd, uint32_t rank) {
    *journal = (struct fsx_output_journal){.fd = -1, .rank = rank, .position = -1};
    if (fd < 0)
        return true;
    journal->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    return journal->fd >= 0;
}

void fsx_output_journal_close(struct fsx_output_journal *journal) {
    if (journal->fd >= 0)
        close(journal->fd);
    journal->fd = -1;
}

/* As zlib has it, half a byte at a time. */
static uint32_t crc32_of(const uint8_t *data, size_t bytes) {
    static const uint32_t TABLE[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
                                       0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                       0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        crc = crc >> 4 ^ TABLE[crc & 15];
        crc = crc >> 4 ^ TABLE[crc & 15];
    }
    return ~crc;
}

/* ---- msgpack ---------------------------------------------------------------------------------------------------- */

static void put(struct record *record, const void *data, size_t bytes) {
    memcpy(record->bytes + record->used, data, bytes);
    record->used += bytes;
}

static void put_byte(struct record *record, unsigned byte) { record->bytes[record->used++] = (uint8_t)byte; }

/* Fewer than 16 values follow. */
static void put_array(struct record *record, unsigned count) { put_byte(record, 0x90u | count); }

static void put_text(struct record *record, const char *text) {
    const size_t bytes = strlen(text);
    put_byte(record, 0xa0u | (unsigned)bytes);
    put(record, text, bytes);
}

static void put_unsigned(struct record *record, uint64_t value) {
    const uint64_t big = htobe64(value);
    put_byte(record, 0xcf);
    put(record, &big, sizeof big);
}

static void put_signed(struct record *record, int64_t value) {
    const uint64_t big = htobe64((uint64_t)value);
    put_byte(record, 0xd3);
    put(record, &big, sizeof big);
}

static void put_bytes(struct record *record, const void *data, size_t bytes) {
    put_byte(record, 0xc4);
    put_byte(record, (unsigned)bytes);
    put(record, data, bytes);
}

static void put_true(struct record *record) { put_byte(record, 0xc3); }

/* ["op", [kind, ... `count` values in all]] */
static void begin(struct record *record, const char *kind, unsigned count) {
    record->used = HEAD_BYTES;
    put_array(record, 2);
    put_text(record, "op");
    put_array(record, count);
    put_text(record, kind);
}

/* ---- records ---------------------------------------------------------------------------------------------------- */

static bool write_record(struct fsx_output_journal *journal, struct record *record) {
    const size_t text_bytes = record->used - HEAD_BYTES;
    const uint32_t head[2] = {htole32((uint32_t)text_bytes), htole32(crc32_of(record->bytes + HEAD_BYTES, text_bytes))};
    memcpy(record->bytes, head, sizeof head);
    size_t done = 0;
    while (done < record->used) {
        const ssize_t written = pwrite(journal->fd, record->bytes + done, record->used - done,
                                       (off_t)(journal->position + (int64_t)done));
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return false; /* what was begun of it ends the journal, or is written over by the next record */
        done += (size_t)written;
    }
    journal->position += (int64_t)record->used;
    return true;
}

bool fsx_output_journal_create(struct fsx_output_journal *journal, uint64_t parent, const void *name, size_t name_bytes,
                               uint32_t mode, int64_t mtime_ns) {
    if (journal->fd < 0)
        return true;
    if (journal->position < 0 || name_bytes > NAME_MOST)
        return false;
    struct record record;
    begin(&record, "create", 7);
    put_unsigned(&record, parent);
    put_bytes(&record, name, name_bytes);
    put_unsigned(&record, mode);
    put_signed(&record, mtime_ns);
    put_unsigned(&record, journal->rank);
    put_true(&record); /* no other of this name */
    return write_record(journal, &record);
}

bool fsx_output_journal_commit(struct fsx_output_journal *journal, uint64_t inode, uint64_t size, int64_t mtime_ns) {
    if (journal->fd < 0)
        return true;
    if (journal->position < 0)
        return false;
    struct record record;
    begin(&record, "commit", 5);
    put_unsigned(&record, inode);
    put_unsigned(&record, size);
    put_signed(&record, mtime_ns);
    put_unsigned(&record, journal->rank);
    return write_record(journal, &record);
}
