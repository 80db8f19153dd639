/* listing.h: all entries of one directory with their attributes, sorted by name, in columns.
 *
 * Replaces a Python loop over scandir and stat, which costs several times the system calls themselves. No state, any
 * thread.
 */
#ifndef FANSTORE_PREP_LISTING_H
#define FANSTORE_PREP_LISTING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One regular file, directory or symbolic link. `name` is its position in the listing's names. */
struct fsx_listed {
    uint64_t dev;
    uint64_t ino;
    uint64_t size;    /* a symbolic link's is the length of its target, a directory's 0 */
    uint64_t target;  /* of a symbolic link: position in the listing's targets */
    int64_t mtime_ns; /* kept within what 64 bits can say */
    uint64_t name;
    uint32_t name_bytes;
    uint32_t mode;
    uint32_t uid;
    uint32_t gid;
    uint32_t nlink;
    uint8_t plain; /* 1 if the name with the suffix of a codec is too long or taken by another entry */
};

/* An entry that is there but could not be looked at. */
struct fsx_unlisted {
    uint64_t name;
    uint32_t name_bytes;
    int32_t error;
};

/* Memory that grows; `room` and `used` count items. */
struct fsx_list {
    void *items;
    size_t used;
    size_t room;
};

struct fsx_listing {
    struct fsx_list entries;  /* struct fsx_listed */
    struct fsx_list failed;   /* struct fsx_unlisted */
    struct fsx_list names;    /* bytes */
    struct fsx_list targets;  /* bytes */
    size_t skipped;           /* sockets, pipes and devices */
};

/* How to take symbolic links: as they are, or (`follow`) as what they point to. Then a directory that is one of `above`
 * (owned by the caller) would lead round in circles: it is not listed, but fails with ELOOP. */
struct fsx_directory_id {
    uint64_t dev;
    uint64_t ino;
};

struct fsx_links {
    bool follow;
    const struct fsx_directory_id *above;
    size_t above_count;
};

/* Fill `listing` (zeroed by the caller) with the entries of the directory open as `fd`, which is read from its current
 * position; sorted by the bytes of the names, "." and ".." left out. Returns 0 or an errno; what was read until then is
 * in `listing`. Free it with fsx_listing_free in either case. */
int fsx_listing_read(int fd, const struct fsx_links *links, struct fsx_listing *listing);

void fsx_listing_free(struct fsx_listing *listing);

#endif
