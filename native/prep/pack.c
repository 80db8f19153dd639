/* pack.c: see pack.h. */
#include "prep/pack.h"

#define XXH_STATIC_LINKING_ONLY /* for the size of a hash state */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/nanoseconds.h"
#include "prep/tarhead.h"

/* Files opened and announced to the kernel ahead of the one being read, so that a cold disk has work queued. */
#define AHEAD 16u
/* The longest path handed to one openat: longer ones are walked in steps. */
#define STEP_MAX (PATH_MAX - 256)

struct opened {
    int fd;
    int error;
};

/* State of one fsx_pack call; lives on its stack. */
struct packer {
    const struct fsx_table *table;
    struct fsx_batch *batch;
    void *encoder; /* of the batch's codec; NULL if it stores content as it is */
    uint8_t *path; /* path_room bytes */
    size_t path_room;
    int64_t directory; /* entry whose directory is open as directory_fd, or -1 */
    int directory_fd;
    int64_t failed; /* the last entry with content that could not be packed, or -1: its hard links follow it */
    struct opened ahead[AHEAD];
};

static size_t name_bytes(const struct fsx_table *t, uint32_t entry) {
    return (size_t)(t->nameoff[entry + 1] - t->nameoff[entry]);
}

static bool entry_valid(const struct fsx_table *t, uint32_t entry) {
    return entry < t->entries && (entry == 0 || t->parent[entry] < entry) && t->nameoff[entry] <= t->nameoff[entry + 1] &&
           t->nameoff[entry + 1] <= t->names_bytes && t->inode[entry] <= entry && t->source[entry] < t->sources_count;
}

size_t fsx_table_path(const struct fsx_table *t, uint32_t entry, uint8_t *out, size_t capacity) {
    size_t bytes = 0;
    for (uint32_t e = entry; e != 0; e = t->parent[e]) {
        if (!entry_valid(t, e))
            return 0;
        bytes += name_bytes(t, e) + (e == entry ? 0 : 1);
    }
    if (bytes > capacity)
        return 0;
    uint8_t *end = out + bytes;
    for (uint32_t e = entry; e != 0; e = t->parent[e]) {
        if (e != entry)
            *--end = '/';
        end -= name_bytes(t, e);
        memcpy(end, t->names + t->nameoff[e], name_bytes(t, e));
    }
    return bytes;
}

/* The path of `entry` in p->path, grown as needed, with `extra` bytes of room after it. Returns its length or -1. */
static int64_t make_path(struct packer *p, uint32_t entry, size_t extra) {
    size_t bytes = 0;
    for (uint32_t e = entry; e != 0; e = p->table->parent[e])
        bytes += name_bytes(p->table, e) + 1;
    if (bytes + extra > p->path_room) {
        uint8_t *larger = realloc(p->path, bytes + extra + 4096);
        if (larger == NULL)
            return -1;
        p->path = larger;
        p->path_room = bytes + extra + 4096;
    }
    return (int64_t)fsx_table_path(p->table, entry, p->path, p->path_room - extra);
}

/* Open the directory `entry` below its source's root, in steps that the kernel's path limit allows. */
static int open_directory(struct packer *p, uint32_t entry, const struct fsx_pack_source *source) {
    const int root = source->fd;
    const int flags = O_PATH | O_DIRECTORY | O_CLOEXEC;
    const int64_t made = make_path(p, entry, 1);
    if (made < 0)
        return -ENOMEM;
    if ((size_t)made <= source->prefix_bytes) {
        const int fd = openat(root, ".", flags);
        return fd < 0 ? -errno : fd;
    }
    size_t start = source->prefix_bytes == 0 ? 0 : source->prefix_bytes + 1;
    const size_t end = (size_t)made;
    p->path[end] = 0;
    int at = root;
    while (start < end) {
        size_t stop = end;
        if (stop - start > STEP_MAX) {
            stop = start + STEP_MAX;
            while (p->path[stop] != '/') /* a name is at most 255 bytes, STEP_MAX is far more */
                stop--;
            p->path[stop] = 0;
        }
        const int fd = openat(at, (const char *)p->path + start, flags);
        const int error = errno;
        if (at != root)
            close(at);
        if (fd < 0)
            return -error;
        at = fd;
        start = stop + 1;
    }
    return at;
}

/* A descriptor to read the content of `entry` from: a new one for a directory source, the shared one for a tar. */
static struct opened open_entry(struct packer *p, uint32_t entry) {
    const struct fsx_table *t = p->table;
    const struct fsx_pack_source *source = &t->sources[t->source[entry]];
    if (source->kind == FSX_PACK_TAR)
        return (struct opened){source->fd, 0};
    /* The same parent in two sources is two directories, so the key has both. */
    const int64_t key = ((int64_t)t->source[entry] << 32) | t->parent[entry];
    if (p->directory != key) {
        if (p->directory_fd >= 0)
            close(p->directory_fd);
        p->directory = -1;
        p->directory_fd = open_directory(p, t->parent[entry], source);
        if (p->directory_fd < 0) {
            const int error = -p->directory_fd;
            p->directory_fd = -1;
            return (struct opened){-1, error};
        }
        p->directory = key;
    }
    char name[FSX_NAME_MAX + 1];
    const size_t bytes = name_bytes(t, entry);
    if (bytes > FSX_NAME_MAX)
        return (struct opened){-1, ENAMETOOLONG};
    memcpy(name, t->names + t->nameoff[entry], bytes);
    name[bytes] = 0;
    /* O_NONBLOCK: should the file have become a pipe meanwhile, open must not wait for a writer. */
    const int fd = openat(p->directory_fd, name, O_RDONLY | (source->follow ? 0 : O_NOFOLLOW) | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return (struct opened){-1, errno == ELOOP ? FSX_PACK_CHANGED : errno};
    return (struct opened){fd, 0};
}

static bool has_content(const struct fsx_table *t, uint32_t entry) {
    return entry_valid(t, entry) && S_ISREG(t->mode[entry]) && t->inode[entry] == entry;
}

/* Open entry number `position` of the batch, if it has content, and let the kernel start reading it. */
static void look_ahead(struct packer *p, size_t position) {
    if (position >= p->batch->order_count || !has_content(p->table, p->batch->order[position]))
        return;
    const uint32_t entry = p->batch->order[position];
    struct opened *slot = &p->ahead[position % AHEAD];
    *slot = open_entry(p, entry);
    if (slot->error == 0 && p->table->size[entry] > 0)
        /* Only a hint: without it the file is read all the same. */
        (void)posix_fadvise(slot->fd,
                            p->table->sources[p->table->source[entry]].kind == FSX_PACK_TAR ? (off_t)p->table->origin[entry] : 0,
                            (off_t)p->table->size[entry], POSIX_FADV_WILLNEED);
}

static bool unchanged(const struct fsx_table *t, uint32_t entry, int fd) {
    struct stat now;
    if (fstat(fd, &now) != 0)
        return false;
    return S_ISREG(now.st_mode) && (uint64_t)now.st_size == t->size[entry] &&
           fsx_nanoseconds(now.st_mtim) == t->mtime[entry];
}

/* Read the whole content of `entry` to `out`, which has room for it. Returns 0 or a status. */
static int read_content(const struct fsx_table *t, uint32_t entry, int fd, uint8_t *out) {
    const bool tar = t->sources[t->source[entry]].kind == FSX_PACK_TAR;
    const uint64_t base = tar ? t->origin[entry] : 0;
    for (uint64_t done = 0; done < t->size[entry];) {
        const ssize_t got = pread(fd, out + done, (size_t)(t->size[entry] - done), (off_t)(base + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return errno;
        if (got == 0)
            return FSX_PACK_CHANGED;
        done += (uint64_t)got;
    }
    /* Compared after reading, with what the scan saw: that covers the whole time between the two. */
    return tar || unchanged(t, entry, fd) ? 0 : FSX_PACK_CHANGED;
}

size_t fsx_pack_scratch(uint64_t largest_file) {
    /* The raw content, and its stored chunks in the worst case, each by FSX_CODEC_OVERHEAD_MAX longer. */
    return (size_t)(2 * largest_file + largest_file / 128 + 65536);
}

/* Checksum of stored bytes, chunk by chunk; `starts` has the chunks' positions for a file of several chunks. */
static uint64_t file_checksum(const uint8_t *stored, uint64_t bytes, struct fsx_chunk *chunks, size_t count) {
    if (count <= 1)
        return XXH3_64bits(stored, (size_t)bytes);
    XXH3_state_t state; /* large, but on the stack of a worker thread */
    XXH3_64bits_reset(&state);
    for (size_t k = 0; k < count; k++) {
        const uint64_t end = k + 1 < count ? chunks[k + 1].start : bytes;
        chunks[k].checksum = XXH3_64bits(stored + chunks[k].start, (size_t)(end - chunks[k].start));
        XXH3_64bits_update(&state, &chunks[k].checksum, sizeof chunks[k].checksum);
    }
    return XXH3_64bits_digest(&state);
}

/* The stored chunks of `raw` at `out`; their starts are noted if there are several. Returns their length, or 0 if it would
 * not be less than the content's. */
static uint64_t compress(struct packer *p, int level, const uint8_t *raw, uint64_t bytes, uint8_t *out, size_t room,
                         struct fsx_chunk *chunks, size_t count) {
    size_t used = 0;
    for (size_t k = 0; k < count; k++) {
        const uint64_t start = (uint64_t)k * FSX_CHUNK_BYTES;
        const struct fsx_piece piece = {
            .content = raw + start,
            .bytes = (size_t)(bytes - start < FSX_CHUNK_BYTES ? bytes - start : FSX_CHUNK_BYTES),
            .file_bytes = bytes,
            .first = k == 0,
            .last = k + 1 == count,
        };
        if (count > 1)
            chunks[k].start = used;
        const size_t wrote = p->batch->codec->encode(p->encoder, level, &piece, out + used, room - used);
        if (wrote == 0)
            return 0;
        used += wrote;
    }
    return used < bytes ? used : 0;
}

/* Whether a slow level is worth its time: a quick one shrinks the first chunk. */
static bool worth_trying(struct packer *p, const uint8_t *raw, uint64_t bytes, uint8_t *out, size_t room) {
    const int quick = p->batch->codec->quick_level;
    return p->batch->level <= quick ||
           compress(p, quick, raw, bytes < FSX_CHUNK_BYTES ? bytes : FSX_CHUNK_BYTES, out, room, NULL, 1) > 0;
}

static size_t put_header(struct packer *p, uint32_t entry, const struct fsx_tar_member *shape, const char *suffix) {
    const struct fsx_table *t = p->table;
    struct fsx_batch *b = p->batch;
    const size_t suffix_bytes = strlen(suffix);
    const int64_t made = make_path(p, entry, suffix_bytes + 2);
    if (made < 0)
        return 0;
    size_t bytes = (size_t)made;
    if (entry == 0) {
        memcpy(p->path, ".", 1);
        bytes = 1;
    }
    memcpy(p->path + bytes, suffix, suffix_bytes);
    struct fsx_tar_member member = *shape;
    member.path = p->path;
    member.path_bytes = bytes + suffix_bytes;
    member.mode = t->mode[entry];
    member.mtime_ns = t->mtime[entry];
    member.uid = t->uid[entry];
    member.gid = t->gid[entry];
    return fsx_tar_header(&member, b->out + b->out_used, b->out_bytes - b->out_used);
}

static int pack_file(struct packer *p, uint32_t entry, int fd, struct fsx_packed *result) {
    const struct fsx_table *t = p->table;
    struct fsx_batch *b = p->batch;
    const uint64_t size = t->size[entry];
    const size_t count = (size_t)((size + FSX_CHUNK_BYTES - 1) / FSX_CHUNK_BYTES);
    struct fsx_chunk *chunks = b->chunks + b->chunks_used;
    if (count > 1 && count > b->chunks_room - b->chunks_used)
        return FSX_PACK_NO_ROOM;

    if (p->encoder != NULL && !t->plain[entry] && size > 0) {
        if (b->scratch_bytes < fsx_pack_scratch(size))
            return FSX_PACK_NO_ROOM;
        const int status = read_content(t, entry, fd, b->scratch);
        if (status != 0)
            return status;
        uint8_t *frame = b->scratch + size;
        const size_t room = b->scratch_bytes - (size_t)size;
        const uint64_t stored = worth_trying(p, b->scratch, size, frame, room)
                                    ? compress(p, b->level, b->scratch, size, frame, room, chunks, count)
                                    : 0;
        if (stored > 0) {
            const size_t head =
                put_header(p, entry, &(struct fsx_tar_member){.size = stored, .type = FSX_TAR_FILE}, b->codec->suffix);
            const uint64_t padded = fsx_tar_padded(stored);
            if (head == 0 || padded > b->out_bytes - b->out_used - head)
                return FSX_PACK_NO_ROOM;
            uint8_t *place = b->out + b->out_used + head;
            memcpy(place, frame, (size_t)stored);
            memset(place + stored, 0, (size_t)(padded - stored));
            *result = (struct fsx_packed){0, b->codec->number, b->out_used + head, stored,
                                          file_checksum(place, stored, chunks, count)};
            b->out_used += head + (size_t)padded;
            b->chunks_used += count > 1 ? count : 0;
            return 0;
        }
    }

    /* The batch will begin at a multiple of a page if it has such a file. */
    const struct fsx_tar_member shape = {
        .size = size, .type = FSX_TAR_FILE, .position = b->out_used, .align = size >= FSX_TAR_ALIGNED_BYTES};
    const size_t head = put_header(p, entry, &shape, "");
    const uint64_t padded = fsx_tar_padded(size);
    if (head == 0 || padded > b->out_bytes - b->out_used - head)
        return FSX_PACK_NO_ROOM;
    uint8_t *place = b->out + b->out_used + head;
    const int status = read_content(t, entry, fd, place);
    if (status != 0)
        return status;
    memset(place + size, 0, (size_t)(padded - size));
    for (size_t k = 0; count > 1 && k < count; k++)
        chunks[k].start = (uint64_t)k * FSX_CHUNK_BYTES;
    *result = (struct fsx_packed){0, fsx_codec_none.number, b->out_used + head, size, file_checksum(place, size, chunks, count)};
    b->out_used += head + (size_t)padded;
    b->chunks_used += count > 1 ? count : 0;
    return 0;
}

/* Directories, symbolic links and further hard links: a header is all. */
static int pack_header_only(struct packer *p, uint32_t entry, struct fsx_packed *result) {
    const struct fsx_table *t = p->table;
    struct fsx_tar_member shape = {.size = 0};
    const char *suffix = "";
    uint8_t *primary_path = NULL;
    if (S_ISDIR(t->mode[entry])) {
        shape.type = FSX_TAR_DIRECTORY;
        suffix = "/";
    } else if (t->inode[entry] != entry) {
        const int64_t bytes = make_path(p, t->inode[entry], 0);
        if (bytes <= 0)
            return ENOMEM;
        primary_path = malloc((size_t)bytes);
        if (primary_path == NULL)
            return ENOMEM;
        memcpy(primary_path, p->path, (size_t)bytes);
        shape.type = FSX_TAR_HARDLINK;
        shape.link = primary_path;
        shape.link_bytes = (size_t)bytes;
    } else {
        if (t->origin[entry] > t->links_bytes || t->size[entry] > t->links_bytes - t->origin[entry])
            return FSX_PACK_BAD_TABLE;
        shape.type = FSX_TAR_SYMLINK;
        shape.link = t->links + t->origin[entry];
        shape.link_bytes = (size_t)t->size[entry];
    }
    const size_t head = put_header(p, entry, &shape, suffix);
    free(primary_path);
    if (head == 0)
        return FSX_PACK_NO_ROOM;
    p->batch->out_used += head;
    *result = (struct fsx_packed){.status = 0};
    return 0;
}

int fsx_pack(const struct fsx_table *table, struct fsx_batch *batch) {
    struct packer p = {.table = table, .batch = batch, .directory = -1, .directory_fd = -1, .failed = -1};
    batch->out_used = 0;
    batch->chunks_used = 0;
    if (batch->codec->encode != NULL) {
        p.encoder = batch->codec->encoder_new();
        if (p.encoder == NULL)
            return ENOMEM;
    }
    for (size_t i = 0; i < AHEAD; i++)
        look_ahead(&p, i);
    for (size_t i = 0; i < batch->order_count; i++) {
        const uint32_t entry = batch->order[i];
        struct fsx_packed *result = &batch->packed[i];
        int status;
        if (!entry_valid(table, entry)) {
            status = FSX_PACK_BAD_TABLE;
        } else if (has_content(table, entry)) {
            const struct opened slot = p.ahead[i % AHEAD];
            status = slot.error != 0 ? slot.error : pack_file(&p, entry, slot.fd, result);
            if (slot.error == 0 && table->sources[table->source[entry]].kind == FSX_PACK_DIRECTORY)
                close(slot.fd);
        } else if (table->inode[entry] == p.failed) {
            status = FSX_PACK_NO_CONTENT;
        } else {
            status = pack_header_only(&p, entry, result);
        }
        if (status != 0) {
            *result = (struct fsx_packed){.status = status};
            if (status != FSX_PACK_NO_CONTENT)
                p.failed = entry;
        }
        look_ahead(&p, i + AHEAD);
    }
    if (p.directory_fd >= 0)
        close(p.directory_fd);
    if (p.encoder != NULL)
        batch->codec->encoder_free(p.encoder);
    free(p.path);
    return 0;
}
