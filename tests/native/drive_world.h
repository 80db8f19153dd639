/* drive_world.h: what the parts of engine_drive share: the dataset, the truth about its files, and random numbers.
 *
 * All of it is read-only once it was loaded; any thread.
 */
#ifndef FANSTORE_DRIVE_WORLD_H
#define FANSTORE_DRIVE_WORLD_H

#include "fuse/engine.h"
#include "chunks/reads.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PARTS_MAX 16u

struct world {
    struct fsx_index index;
    uint8_t **truth;    /* by entry: content of a regular file; NULL for the rest */
    uint32_t *files;    /* entries of regular files with content */
    uint32_t file_count;
    uint32_t parts;
    int part[PARTS_MAX];    /* descriptors of the partitions */
    int damaged[PARTS_MAX]; /* and of copies in which every 64 KiB a byte is wrong */
    const char *program;
    const char *index_path, *source;
};

extern struct world world;

/* What the main thread waits for: the last words of a program whose time is up. */
extern const char *volatile waits_for;

_Noreturn void die(const char *text, int error);
static inline void check(bool right, const char *text) {
    if (!right)
        die(text, 0);
}
static inline void check_call(bool right, const char *text) {
    if (!right)
        die(text, errno);
}

/* Numbers of one thread. */
static inline uint64_t next_random(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}
static inline uint64_t below(uint64_t *state, uint64_t limit) { return next_random(state) % limit; }

/* A file, and a piece of it of at most `most` bytes. */
struct piece {
    uint32_t entry;
    uint64_t offset;
    uint32_t length;
};
struct piece some_piece(uint64_t *state, uint32_t most);

/* The path of an entry below `root`; the caller frees it. */
char *path_of(const char *root, uint32_t entry);

/* Partitions that are opened from now on lie on a file system that is neither memory nor a disk. */
extern atomic_bool far_away;

/* Scenarios; each ends the program if something is wrong. */
void drive_slabs(uint32_t rounds);
void drive_broker(uint32_t rounds);
void drive_ahead(uint32_t rounds);
/* As on a machine with so many cores. */
void drive_fetch(uint32_t rounds, uint32_t cores);
void drive_names(uint32_t rounds);
void drive_busy_poll(uint32_t rounds);
void drive_socket(uint32_t rounds);
void drive_outputs(uint32_t rounds, const char *where);
/* In an empty directory, which is left empty. */
void drive_creates(uint32_t rounds, int folder);
void drive_mount(double seconds, const char *point);
void drive_hang(const char *point);
int drive_reader(double seconds, uint64_t seed, const char *point);

#endif
