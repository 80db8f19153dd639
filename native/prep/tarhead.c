/* tarhead.c: see tarhead.h. The layout is that of POSIX.1-2001 (ustar and pax interchange format). */
#include "prep/tarhead.h"

#include <stdbool.h>
#include <string.h>

struct ustar {
    char name[100];
    char mode[8];
    char uid[8];
    char gid[8];
    char size[12];
    char mtime[12];
    char chksum[8];
    char typeflag;
    char linkname[100];
    char magic[6];
    char version[2];
    char uname[32];
    char gname[32];
    char devmajor[8];
    char devminor[8];
    char prefix[155];
    char pad[12];
};
_Static_assert(sizeof(struct ustar) == FSX_TAR_BLOCK, "a ustar header is one block");

#define OCTAL7_MAX 07777777u      /* 7 octal digits and NUL */
#define OCTAL11_MAX 077777777777u /* 11 octal digits and NUL */
#define PAX_NUMBERS_MAX 512u      /* room for all records but path and linkpath */
#define COMMENT_MIN 16u           /* a record with a comment has at least so many bytes */

static void octal(char *field, size_t bytes, uint64_t value) {
    for (size_t i = bytes - 1; i-- > 0; value >>= 3)
        field[i] = (char)('0' + (value & 7));
    field[bytes - 1] = 0;
}

static void finish(struct ustar *head) {
    memcpy(head->magic, "ustar", 6);
    memcpy(head->version, "00", 2);
    octal(head->devmajor, sizeof head->devmajor, 0);
    octal(head->devminor, sizeof head->devminor, 0);
    memset(head->chksum, ' ', sizeof head->chksum);
    uint32_t sum = 0;
    const uint8_t *bytes = (const uint8_t *)head;
    for (size_t i = 0; i < sizeof *head; i++)
        sum += bytes[i];
    octal(head->chksum, 7, sum); /* six digits, NUL, and the blank that is there already */
}

/* Numbers are written by hand: printf took some 3 % of the time for files of 3 KB (perf). */
static size_t decimal_width(uint64_t value) {
    size_t width = 1;
    while (value >= 10) {
        value /= 10;
        width++;
    }
    return width;
}

/* The last `width` digits of `value`, without a NUL. */
static void decimal(char *out, size_t width, uint64_t value) {
    for (size_t i = width; i-- > 0; value /= 10)
        out[i] = (char)('0' + value % 10);
}

/* Append "LENGTH KEY=VALUE\n", where LENGTH counts itself. */
static size_t pax_record(uint8_t *out, const char *key, const uint8_t *value, size_t value_bytes) {
    const size_t key_bytes = strlen(key);
    const size_t rest = 1 + key_bytes + 1 + value_bytes + 1;
    size_t width = 1;
    while (decimal_width(rest + width) != width)
        width++;
    decimal((char *)out, width, rest + width);
    size_t used = width;
    out[used++] = ' ';
    memcpy(out + used, key, key_bytes);
    used += key_bytes;
    out[used++] = '=';
    memcpy(out + used, value, value_bytes);
    used += value_bytes;
    out[used++] = '\n';
    return used;
}

static size_t pax_number(uint8_t *out, const char *key, uint64_t value) {
    char text[20];
    /* Fixed width, so that the length of a header does not depend on the value. */
    decimal(text, sizeof text, value);
    return pax_record(out, key, (const uint8_t *)text, sizeof text);
}

static size_t pax_time(uint8_t *out, int64_t ns) {
    const uint64_t magnitude = ns < 0 ? 0 - (uint64_t)ns : (uint64_t)ns;
    const uint64_t seconds = magnitude / 1000000000u;
    const size_t width = decimal_width(seconds);
    char text[40];
    size_t bytes = 0;
    if (ns < 0)
        text[bytes++] = '-';
    decimal(text + bytes, width, seconds);
    bytes += width;
    text[bytes++] = '.';
    decimal(text + bytes, 9, magnitude % 1000000000u);
    bytes += 9;
    while (text[bytes - 1] == '0')
        bytes--;
    if (text[bytes - 1] == '.')
        bytes--;
    return pax_record(out, "mtime", (const uint8_t *)text, bytes);
}

/* Append a record that means nothing and has `bytes` bytes, from COMMENT_MIN to some thousand. */
static void pax_comment(uint8_t *out, size_t bytes) {
    const size_t width = decimal_width(bytes);
    decimal((char *)out, width, bytes);
    memcpy(out + width, " comment=", 9);
    memset(out + width + 9, ' ', bytes - width - 10);
    out[bytes - 1] = '\n';
}

/* The header of `bytes` records, with a name for readers that know no pax and would unpack them. */
static void pax_header(uint8_t *out, char type, const uint8_t *name, size_t name_bytes, size_t bytes) {
    struct ustar head;
    memset(&head, 0, sizeof head);
    memcpy(head.name, "PaxHeaders/", 11);
    memcpy(head.name + 11, name, name_bytes);
    octal(head.mode, sizeof head.mode, 0644);
    octal(head.uid, sizeof head.uid, 0);
    octal(head.gid, sizeof head.gid, 0);
    octal(head.size, sizeof head.size, bytes);
    octal(head.mtime, sizeof head.mtime, 0);
    head.typeflag = type;
    finish(&head);
    memcpy(out, &head, sizeof head);
}

/* How many bytes of records let a header at `position` end at a multiple of a page; `bytes` are there already. */
static size_t aligned_records(uint64_t position, size_t bytes) {
    if (bytes == 0 && (position + FSX_TAR_BLOCK) % FSX_TAR_PAGE == 0)
        return 0;
    const size_t room = (size_t)((FSX_TAR_PAGE - (position + 2 * FSX_TAR_BLOCK) % FSX_TAR_PAGE) % FSX_TAR_PAGE);
    if (bytes > 0 && fsx_tar_padded(bytes) % FSX_TAR_PAGE == room)
        return bytes;
    size_t wanted = room;
    while (wanted < bytes + COMMENT_MIN)
        wanted += FSX_TAR_PAGE;
    return wanted;
}

/* Put the path into name and prefix; false if it does not fit. */
static bool ustar_path(struct ustar *head, const uint8_t *path, size_t bytes) {
    if (bytes <= sizeof head->name) {
        memcpy(head->name, path, bytes);
        return true;
    }
    if (bytes > sizeof head->prefix + 1 + sizeof head->name)
        return false;
    /* The leftmost slash that leaves a short enough, not empty name; a directory's last slash belongs to the name. */
    for (size_t slash = bytes - sizeof head->name - 1; slash + 1 < bytes && slash <= sizeof head->prefix; slash++)
        if (path[slash] == '/' && slash > 0) {
            memcpy(head->prefix, path, slash);
            memcpy(head->name, path + slash + 1, bytes - slash - 1);
            return true;
        }
    return false;
}

size_t fsx_tar_header_bound(size_t path_bytes, size_t link_bytes) {
    return 2 * FSX_TAR_BLOCK + (size_t)fsx_tar_padded(path_bytes + link_bytes + PAX_NUMBERS_MAX);
}

size_t fsx_tar_header(const struct fsx_tar_member *m, uint8_t *out, size_t capacity) {
    if (capacity < fsx_tar_header_bound(m->path_bytes, m->link_bytes) + (m->align ? FSX_TAR_FILL_MAX : 0))
        return 0;
    struct ustar head;
    memset(&head, 0, sizeof head);
    uint8_t *pax = out + FSX_TAR_BLOCK; /* records go here, after the block of their own header */
    size_t pax_bytes = 0;

    if (!ustar_path(&head, m->path, m->path_bytes)) {
        memcpy(head.name, m->path, sizeof head.name);
        pax_bytes += pax_record(pax + pax_bytes, "path", m->path, m->path_bytes);
    }
    if (m->link_bytes <= sizeof head.linkname) {
        if (m->link_bytes > 0)
            memcpy(head.linkname, m->link, m->link_bytes);
    } else {
        memcpy(head.linkname, m->link, sizeof head.linkname);
        pax_bytes += pax_record(pax + pax_bytes, "linkpath", m->link, m->link_bytes);
    }
    octal(head.mode, sizeof head.mode, m->mode & 07777);
    octal(head.uid, sizeof head.uid, m->uid <= OCTAL7_MAX ? m->uid : 0);
    if (m->uid > OCTAL7_MAX)
        pax_bytes += pax_number(pax + pax_bytes, "uid", m->uid);
    octal(head.gid, sizeof head.gid, m->gid <= OCTAL7_MAX ? m->gid : 0);
    if (m->gid > OCTAL7_MAX)
        pax_bytes += pax_number(pax + pax_bytes, "gid", m->gid);
    octal(head.size, sizeof head.size, m->size <= OCTAL11_MAX ? m->size : 0);
    if (m->size > OCTAL11_MAX || m->size_largest > OCTAL11_MAX)
        pax_bytes += pax_number(pax + pax_bytes, "size", m->size);
    const bool whole = m->mtime_ns >= 0 && m->mtime_ns % 1000000000 == 0 &&
                       (uint64_t)m->mtime_ns / 1000000000u <= OCTAL11_MAX;
    const uint64_t seconds = m->mtime_ns < 0 ? 0 : (uint64_t)m->mtime_ns / 1000000000u;
    octal(head.mtime, sizeof head.mtime, seconds <= OCTAL11_MAX ? seconds : 0);
    if (!whole)
        pax_bytes += pax_time(pax + pax_bytes, m->mtime_ns);
    head.typeflag = (char)m->type;
    finish(&head);
    if (m->align) {
        const size_t wanted = aligned_records(m->position, pax_bytes);
        if (wanted > pax_bytes)
            pax_comment(pax + pax_bytes, wanted - pax_bytes);
        pax_bytes = wanted;
    }

    size_t used = 0;
    if (pax_bytes > 0) {
        /* A reader that knows no pax would unpack the records under the file's name: short, and telling what they are. */
        size_t base = m->path_bytes;
        if (base > 0 && m->path[base - 1] == '/')
            base--;
        const size_t stop = base;
        while (base > 0 && m->path[base - 1] != '/')
            base--;
        const size_t base_bytes = stop - base < 80 ? stop - base : 80;
        pax_header(out, 'x', m->path + base, base_bytes, pax_bytes);
        const size_t padded = (size_t)fsx_tar_padded(pax_bytes);
        memset(pax + pax_bytes, 0, padded - pax_bytes);
        used = FSX_TAR_BLOCK + padded;
    }
    memcpy(out + used, &head, sizeof head);
    return used + sizeof head;
}

size_t fsx_tar_fill(uint64_t position, uint8_t *out) {
    if (position % FSX_TAR_PAGE == 0)
        return 0;
    size_t bytes = (size_t)(FSX_TAR_PAGE - position % FSX_TAR_PAGE);
    if (bytes < 2 * FSX_TAR_BLOCK)
        bytes += FSX_TAR_PAGE;
    pax_header(out, 'g', (const uint8_t *)"page", 4, bytes - FSX_TAR_BLOCK);
    pax_comment(out + FSX_TAR_BLOCK, bytes - FSX_TAR_BLOCK);
    return bytes;
}
