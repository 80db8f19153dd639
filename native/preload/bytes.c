/* bytes.c: content of files from the partition files of this node; see preload.h.
 *
 * What a process reads for the first time it reads with pread. When it has read a small file to its end and comes again, and
 * the partition is on a file system of this machine, it copies from a map of the partition, without the kernel: 107,000 bytes
 * take 6 µs in Python, with pread 12, from a directory of ext4 15; but the first time in a map costs 19, for page tables that
 * a worker of one epoch never uses again (AMD EPYC, Linux 6.18; benchmarks/results/interception.md). Pages are asked for with
 * MADV_POPULATE_READ then, so that an error of the disk is an error and not a SIGBUS. On other file systems (NFS, Lustre: a
 * server that comes and goes), and on kernels before 5.14, nothing is mapped.
 *
 * What is not stored as it is, or not here, is in the daemon's memory (cache.c).
 *
 * A program's own map of a file that begins at a page of the partition is one of the partition (fsx_bytes_map).
 *
 * A chunk is checked by the first program that reads it in this file, and marked for all of the mount. One that is damaged,
 * or cannot be read, is left to the mount, which knows other copies and counts.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <xxhash.h>

#include "preload/next.h"
#include "preload/preload.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#define PAGE_BYTES 4096u
#define SMALL_BYTES (1u << 20) /* larger files are not copied from the map as long as there is a descriptor */
#define PIECE_BYTES (16u << 10) /* on the stack of whoever reads */
/* Descriptors for partitions, at most, and of all that the process may have one in so many. Partitions beyond are mapped. */
#define DESCRIPTORS_MOST 256u
#define DESCRIPTORS_SHARE 8u
/* FANSTORE_PRELOAD_READ: `pread` or `map` asks for one way, for tests and measurements. */
#define READ_VARIABLE "FANSTORE_PRELOAD_READ"

/* A partition file, in this process: nothing changes once it is OPEN, but for `fd` (fsx_bytes_move). */
enum { UNTRIED, OPEN, UNUSABLE };
struct place {
    _Atomic uint32_t how;
    _Atomic int fd;     /* -1 for none */
    const uint8_t *map; /* NULL for none */
    dev_t device;
    ino_t inode;
};

static struct place *places;       /* two per partition: prepared, local */
static _Atomic uint8_t *read_once; /* a bit per entry: read to its end in this process */
static _Atomic uint8_t *populated[2]; /* a bit per entry, for either file: its pages are in the page table */
static _Atomic uint32_t descriptors;
static _Atomic uint32_t opening; /* one thread opens at a time; another one asks the mount meanwhile */
static bool may_map = true, may_read = true;

static void *memory(size_t bytes) {
    void *got = fsx_map(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    return got == MAP_FAILED ? NULL : got;
}

static bool has_bit(_Atomic uint8_t *bits, uint64_t number) {
    return (atomic_load_explicit(&bits[number / 8], memory_order_relaxed) & 1u << number % 8) != 0;
}

static void set_bit(_Atomic uint8_t *bits, uint64_t number) {
    atomic_fetch_or_explicit(&bits[number / 8], (uint8_t)(1u << number % 8), memory_order_relaxed);
}

bool fsx_bytes_start(void) {
    const char *how = getenv(READ_VARIABLE);
    may_map = how == NULL || strcmp(how, "pread") != 0;
    may_read = how == NULL || strcmp(how, "map") != 0;
    places = memory((fsx_at.index.partitions + 1) * 2 * sizeof *places);
    read_once = memory(fsx_at.index.entries / 8 + 1);
    for (int i = 0; i < 2; i++)
        populated[i] = memory(fsx_at.index.entries / 8 + 1);
    return places != NULL && read_once != NULL && populated[0] != NULL && populated[1] != NULL;
}

/* Whoever was opening a partition is not here. */
void fsx_bytes_forked(void) { atomic_store(&opening, 0); }

/* ---- partition files --------------------------------------------------------------------------------------------------- */

/* File systems whose pages stay readable as long as this machine runs. */
static bool is_of_this_machine(int fd) {
    struct statfs about;
    if (syscall(SYS_fstatfs, fd, &about) != 0)
        return false;
    switch ((uint32_t)about.f_type) {
    case 0xef53:     /* ext4 */
    case 0x58465342: /* xfs */
    case 0x9123683e: /* btrfs */
    case 0xf2f52010: /* f2fs */
    case 0x2fc12fc1: /* zfs */
    case 0xca451a4e: /* bcachefs */
    case 0x01021994: /* tmpfs */
    case 0x858458f6: /* ramfs */
        return true;
    default:
        return false;
    }
}

static const uint8_t *map_file(int fd, uint64_t bytes) {
    if (!may_map || bytes < PAGE_BYTES || !is_of_this_machine(fd))
        return NULL;
    const uint8_t *map = fsx_map((size_t)bytes, PROT_READ, MAP_SHARED, fd);
    if (map == MAP_FAILED)
        return NULL;
    if (syscall(SYS_madvise, map, (size_t)PAGE_BYTES, MADV_POPULATE_READ) == 0)
        return map;
    syscall(SYS_munmap, map, (size_t)bytes);
    return NULL;
}

static bool may_keep_one_more(void) {
    struct rlimit limit = {0};
    syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, NULL, &limit);
    const uint32_t now = atomic_load(&descriptors);
    return now < DESCRIPTORS_MOST && now < limit.rlim_cur / DESCRIPTORS_SHARE;
}

static void open_place(struct place *place, const char *path, uint64_t bytes) {
    atomic_store(&place->fd, -1);
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    struct stat about;
    if (fd >= 0 && (syscall(SYS_fstat, fd, &about) != 0 || !S_ISREG(about.st_mode) || about.st_size != (off_t)bytes)) {
        syscall(SYS_close, fd);
    } else if (fd >= 0) {
        place->device = about.st_dev;
        place->inode = about.st_ino;
        place->map = map_file(fd, bytes);
        if ((may_read || place->map == NULL) && may_keep_one_more()) {
            atomic_store(&place->fd, fsx_keep_descriptor(fd)); /* closes it */
            atomic_fetch_add(&descriptors, atomic_load(&place->fd) >= 0);
        } else {
            syscall(SYS_close, fd);
        }
    }
    const bool usable = place->map != NULL || atomic_load(&place->fd) >= 0;
    atomic_store_explicit(&place->how, usable ? OPEN : UNUSABLE, memory_order_release);
}

/* Where this file's partition is, and in which state; NULL: its bytes cannot be read there as they are. */
static struct place *place_of(uint32_t entry, uint32_t *state) {
    if (fsx_at.index.codec[entry] != 0)
        return NULL;
    const uint32_t part = fsx_at.index.part[entry];
    *state = __atomic_load_n(&fsx_at.parts[part].file, __ATOMIC_ACQUIRE);
    const uint32_t number = *state & FSX_STATE_FILE;
    if (number < 1 || number > 2)
        return NULL;
    struct place *place = &places[part * 2 + number - 1];
    uint32_t how = atomic_load_explicit(&place->how, memory_order_acquire);
    if (how == UNTRIED) {
        if (fsx_in_vfork() || atomic_exchange(&opening, 1) != 0)
            return NULL;
        if (atomic_load(&place->how) == UNTRIED) {
            const int kept = errno;
            open_place(place, fsx_at.parts[part].path[number - 1], fsx_at.index.parts[part]);
            errno = kept;
        }
        atomic_store(&opening, 0);
        how = atomic_load_explicit(&place->how, memory_order_acquire);
    }
    return how == OPEN ? place : NULL;
}

bool fsx_bytes_here(uint32_t entry) {
    uint32_t state;
    return fsx_at.index.size[entry] == 0 || place_of(entry, &state) != NULL || fsx_cache_here();
}

bool fsx_bytes_move(int fd) {
    for (uint32_t i = 0; i < fsx_at.index.partitions * 2; i++) {
        if (atomic_load(&places[i].how) != OPEN || atomic_load(&places[i].fd) != fd)
            continue;
        /* Who reads with the old number sees that it has changed, and reads again. */
        atomic_store(&places[i].fd, fsx_keep_descriptor((int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 3)));
        return true;
    }
    return false;
}

/* ---- reading ---------------------------------------------------------------------------------------------------------- */

/* Is the descriptor still that of the partition? A program can close it with a system call that is not seen here. */
static bool is_right(const struct place *place, int fd) {
    struct stat about;
    return fd >= 0 && syscall(SYS_fstat, fd, &about) == 0 && about.st_ino == place->inode &&
           about.st_dev == place->device;
}

/* All `length` bytes with pread. */
static bool read_all(struct place *place, void *target, size_t length, uint64_t position) {
    int fd = atomic_load(&place->fd);
    if (!is_right(place, fd))
        return false;
    for (size_t done = 0; done < length;) {
        const ssize_t got = syscall(SYS_pread64, fd, (char *)target + done, length - done, position + done);
        const int now = atomic_load(&place->fd);
        if (now != fd) { /* it had to move, and the old number may be another file */
            fd = now;
            done = 0;
            if (!is_right(place, fd))
                return false;
        } else if (got > 0) {
            done += (size_t)got;
        } else if (got == 0 || errno != EINTR) {
            return false;
        }
    }
    return true;
}

/* Have these bytes of the map in the page table, with one request to the disk. */
static bool populate(const struct place *place, uint64_t from, uint64_t to) {
    const uint64_t start = from / PAGE_BYTES * PAGE_BYTES;
    if (atomic_load_explicit(&place->fd, memory_order_relaxed) < 0) /* or pread has just brought them */
        syscall(SYS_madvise, place->map + start, (size_t)(to - start), MADV_WILLNEED);
    long status;
    do
        status = syscall(SYS_madvise, place->map + start, (size_t)(to - start), MADV_POPULATE_READ);
    while (status != 0 && errno == EINTR);
    return status == 0;
}

/* Is this read to be answered from the map? Then it can be. */
static bool is_mapped(const struct place *place, uint32_t entry, uint64_t position, size_t length) {
    if (place->map == NULL)
        return false;
    _Atomic uint8_t *bits = populated[(place - places) % 2];
    if (has_bit(bits, entry))
        return true;
    const bool small = fsx_at.index.size[entry] <= SMALL_BYTES;
    if (atomic_load_explicit(&place->fd, memory_order_relaxed) >= 0 && !(small && has_bit(read_once, entry)))
        return false;
    const uint64_t first = fsx_at.index.offset[entry];
    if (!(small ? populate(place, first, first + fsx_at.index.size[entry]) : populate(place, position, position + length)))
        return false;
    if (small)
        set_bit(bits, entry);
    return true;
}

/* The checksum of stored bytes, piece by piece; false if they cannot be read. */
static bool hash_stored(struct place *place, uint64_t position, size_t bytes, uint64_t *hash) {
    if (atomic_load_explicit(&place->fd, memory_order_relaxed) < 0) {
        if (!populate(place, position, position + bytes))
            return false;
        *hash = XXH3_64bits(place->map + position, bytes);
        return true;
    }
    uint8_t piece[PIECE_BYTES];
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (size_t done = 0; done < bytes;) {
        const size_t more = bytes - done < sizeof piece ? bytes - done : sizeof piece;
        if (!read_all(place, piece, more, position + done))
            return false;
        XXH3_64bits_update(&state, piece, more);
        done += more;
    }
    *hash = XXH3_64bits_digest(&state);
    return true;
}

/* Check the chunks that hold these bytes, unless that was done. `target` holds them already, or is NULL. */
static bool check(struct place *place, uint32_t file, uint32_t entry, uint64_t offset, const void *target, size_t length) {
    const struct fsx_index *x = &fsx_at.index;
    const uint32_t verify = fsx_at.state->verify;
    if (verify == FSX_STATE_NEVER || (verify == FSX_STATE_FIRST && (file & FSX_STATE_VERIFIED) != 0))
        return true;
    const uint8_t number = (uint8_t)(file & FSX_STATE_FILE);
    const bool one = x->count[entry] == 0;
    for (uint64_t k = offset / FSX_CHUNK_BYTES; k <= (offset + length - 1) / FSX_CHUNK_BYTES; k++) {
        _Atomic uint8_t *mark = &fsx_at.marks[one ? x->inode[entry] : x->entries + x->first[entry] + k];
        if (verify == FSX_STATE_FIRST && atomic_load_explicit(mark, memory_order_relaxed) == number)
            continue;
        const uint64_t start = k * FSX_CHUNK_BYTES;
        const uint64_t left = x->size[entry] - start;
        const size_t bytes = left < FSX_CHUNK_BYTES ? (size_t)left : FSX_CHUNK_BYTES;
        uint64_t hash;
        if (target != NULL && offset <= start && offset + length >= start + bytes)
            hash = XXH3_64bits((const uint8_t *)target + (start - offset), bytes);
        else if (!hash_stored(place, x->offset[entry] + start, bytes, &hash))
            return false;
        if (hash != (one ? x->checksum[entry] : x->chunks[x->first[entry] + k].checksum))
            return false;
        atomic_store_explicit(mark, number, memory_order_relaxed);
    }
    return true;
}

bool fsx_bytes_read(uint32_t entry, uint64_t offset, void *target, size_t length) {
    uint32_t file;
    struct place *place = place_of(entry, &file);
    const int kept = errno;
    const uint64_t position = fsx_at.index.offset[entry] + offset;
    bool done = true;
    if (place == NULL)
        done = fsx_cache_read(entry, offset, target, length, has_bit(read_once, entry));
    else if (is_mapped(place, entry, position, length))
        memcpy(target, place->map + position, length);
    else
        done = read_all(place, target, length, position);
    done = done && (place == NULL || check(place, file, entry, offset, target, length));
    if (done && offset + length == fsx_at.index.size[entry] && !has_bit(read_once, entry))
        set_bit(read_once, entry);
    errno = kept;
    return done;
}

/* ---- maps of programs -------------------------------------------------------------------------------------------------- */

#define SEAL_FUTURE_WRITE 16L

/* Behind the end of the file the last page of a map is zeros, where the partition has the next file. So that page is one of memory:
 * a file, so that what is said of it later (MADV_DONTNEED, fork) means what it means for the others. Where the kernel
 * does not know the seal (before 5.1), a program can make its shared map of that page writable; nobody else sees it. */
static bool put_last_page(void *at, size_t content, size_t page, int protection, int flags) {
    const int fd = (int)syscall(SYS_memfd_create, "fanstore-end", FSX_MEMFD_CLOEXEC | FSX_MEMFD_SEALING);
    if (fd < 0)
        return false;
    /* By the kernel, to which an error of the disk is an error and not a SIGBUS. */
    bool done = syscall(SYS_pwrite64, fd, at, content, 0L) == (long)content;
    syscall(SYS_fcntl, fd, FSX_ADD_SEALS, SEAL_FUTURE_WRITE);
    done = done && fsx_map_at(at, page, protection, flags | MAP_FIXED, fd, 0) == at;
    syscall(SYS_close, fd);
    return done;
}

/* From here on in the partition file; NULL if it could not be mapped. */
static void *map_place(struct place *place, const char *path, void *at, size_t bytes, int protection, int flags,
                       uint64_t position) {
    const int kept = atomic_load(&place->fd);
    const int fd = kept >= 0 ? kept : (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    void *map = MAP_FAILED;
    if (is_right(place, fd) && is_of_this_machine(fd))
        map = fsx_map_at(at, bytes, protection, flags, fd, position);
    if (kept < 0 && fd >= 0) {
        syscall(SYS_close, fd);
    } else if (map != MAP_FAILED && (atomic_load(&place->fd) != fd || !is_right(place, fd))) { /* was it another file by then? */
        syscall(SYS_munmap, map, bytes);
        map = MAP_FAILED;
    }
    return map == MAP_FAILED ? NULL : map;
}

void *fsx_bytes_map(uint32_t entry, void *at, size_t bytes, int protection, int flags, off_t offset) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), size = fsx_at.index.size[entry], from = (uint64_t)offset;
    const int kind = flags & ~MAP_NORESERVE;
    if ((kind != MAP_PRIVATE && (kind != MAP_SHARED || (protection & PROT_WRITE) != 0)) ||
        (protection & ~(PROT_READ | PROT_WRITE)) != 0)
        return NULL;
    const uint64_t position = fsx_at.index.offset[entry] + from;
    if (bytes == 0 || from >= size || from % page != 0 || position % page != 0)
        return NULL;
    const uint64_t left = size - from, whole = left / page * page;
    if (whole == 0 || bytes > (left + page - 1) / page * page)
        return NULL;
    const int kept = errno;
    uint32_t file;
    struct place *place = place_of(entry, &file);
    void *map = NULL;
    const uint64_t shown = (bytes + page - 1) / page * page < left ? (bytes + page - 1) / page * page : left;
    if (place != NULL && check(place, file, entry, from, NULL, (size_t)shown)) {
        const char *path = fsx_at.parts[fsx_at.index.part[entry]].path[(file & FSX_STATE_FILE) - 1];
        map = map_place(place, path, at, bytes, protection, flags, position);
    }
    if (map != NULL && shown > whole &&
        !put_last_page((char *)map + whole, (size_t)(shown - whole), (size_t)page, protection, flags)) {
        syscall(SYS_munmap, map, bytes);
        map = NULL;
    }
    errno = kept;
    return map;
}
