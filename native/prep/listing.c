/* listing.c: see listing.h. */
#include "prep/listing.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/codec.h"
#include "format/index.h"
#include "base/nanoseconds.h"

/* Room for `count` more items; NULL if there is no memory. */
static void *extend(struct fsx_list *list, size_t count, size_t item_bytes) {
    if (list->used + count > list->room) {
        const size_t room = (list->used + count) * 2 + 64;
        void *moved = realloc(list->items, room * item_bytes);
        if (moved == NULL)
            return NULL;
        list->items = moved;
        list->room = room;
    }
    void *place = (uint8_t *)list->items + list->used * item_bytes;
    list->used += count;
    return place;
}

/* Read the target of a symbolic link. Returns 0 or an errno. */
static int read_target(struct fsx_listing *l, int fd, const char *name, struct fsx_listed *entry) {
    char target[FSX_LINK_MAX + 1];
    const ssize_t bytes = readlinkat(fd, name, target, sizeof target);
    if (bytes < 0)
        return errno;
    if (bytes == 0 || bytes > FSX_LINK_MAX)
        return ENAMETOOLONG;
    entry->target = l->targets.used;
    entry->size = (uint64_t)bytes;
    void *place = extend(&l->targets, (size_t)bytes, 1);
    if (place == NULL)
        return ENOMEM;
    memcpy(place, target, (size_t)bytes);
    return 0;
}

/* Does a link lead back to a directory above it? */
static bool is_above(const struct fsx_links *links, const struct stat *status) {
    for (size_t i = 0; S_ISDIR(status->st_mode) && i < links->above_count; i++)
        if (links->above[i].dev == status->st_dev && links->above[i].ino == status->st_ino)
            return true;
    return false;
}

/* Returns 0, or ENOMEM; a problem of the entry itself is noted in the listing. */
static int add(struct fsx_listing *l, int fd, const struct fsx_links *links, const char *name) {
    const size_t bytes = strlen(name);
    struct stat status;
    int error = fstatat(fd, name, &status, links->follow ? 0 : AT_SYMLINK_NOFOLLOW) == 0 ? 0 : errno;
    if (error == 0 && is_above(links, &status))
        error = ELOOP;
    if (error == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode) && !S_ISLNK(status.st_mode)) {
        l->skipped++;
        return 0;
    }
    const uint64_t position = l->names.used;
    void *place = extend(&l->names, bytes, 1);
    if (place == NULL)
        return ENOMEM;
    memcpy(place, name, bytes);
    struct fsx_listed entry = {.name = position, .name_bytes = (uint32_t)bytes};
    if (error == 0 && S_ISLNK(status.st_mode))
        error = read_target(l, fd, name, &entry);
    if (error != 0) {
        struct fsx_unlisted *failed = extend(&l->failed, 1, sizeof *failed);
        if (failed == NULL)
            return ENOMEM;
        *failed = (struct fsx_unlisted){position, (uint32_t)bytes, error};
        return 0;
    }
    if (S_ISREG(status.st_mode))
        entry.size = (uint64_t)status.st_size;
    entry.dev = status.st_dev;
    entry.ino = status.st_ino;
    entry.mtime_ns = fsx_nanoseconds(status.st_mtim);
    entry.mode = status.st_mode;
    entry.uid = status.st_uid;
    entry.gid = status.st_gid;
    entry.nlink = status.st_nlink > UINT32_MAX ? UINT32_MAX : (uint32_t)status.st_nlink;
    struct fsx_listed *listed = extend(&l->entries, 1, sizeof *listed);
    if (listed == NULL)
        return ENOMEM;
    *listed = entry;
    return 0;
}

static int by_name(const void *a, const void *b, void *names) {
    const struct fsx_listed *x = a, *y = b;
    const size_t common = x->name_bytes < y->name_bytes ? x->name_bytes : y->name_bytes;
    const int order = memcmp((uint8_t *)names + x->name, (uint8_t *)names + y->name, common);
    if (order != 0)
        return order;
    return x->name_bytes < y->name_bytes ? -1 : x->name_bytes > y->name_bytes;
}

/* The entry whose name is the first `bytes` bytes of another's, or NULL. */
static struct fsx_listed *find_stem(struct fsx_listing *l, const struct fsx_listed *entry, size_t bytes) {
    struct fsx_listed *entries = l->entries.items;
    const struct fsx_listed wanted = {.name = entry->name, .name_bytes = (uint32_t)bytes};
    size_t low = 0, high = l->entries.used;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const int order = by_name(&entries[middle], &wanted, l->names.items);
        if (order == 0)
            return &entries[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

/* For every name with the suffix of a codec, mark the one without it, if it is there as well: its compressed member would
 * have the same name. Which codec it will be is not known yet: all count. */
static void mark_plain(struct fsx_listing *l) {
    struct fsx_listed *entries = l->entries.items;
    const uint8_t *names = l->names.items;
    for (size_t i = 0; i < l->entries.used; i++) {
        struct fsx_listed *entry = &entries[i];
        for (size_t c = 0; fsx_codecs[c] != NULL; c++) {
            const char *suffix = fsx_codecs[c]->suffix;
            const size_t bytes = suffix == NULL ? 0 : strlen(suffix);
            if (entry->name_bytes + bytes > FSX_NAME_MAX)
                entry->plain = 1;
            if (bytes == 0 || entry->name_bytes <= bytes ||
                memcmp(names + entry->name + entry->name_bytes - bytes, suffix, bytes) != 0)
                continue;
            struct fsx_listed *stem = find_stem(l, entry, entry->name_bytes - bytes);
            if (stem != NULL)
                stem->plain = 1;
        }
    }
}

int fsx_listing_read(int fd, const struct fsx_links *links, struct fsx_listing *listing) {
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0); /* closedir closes it */
    if (own < 0)
        return errno;
    DIR *directory = fdopendir(own);
    if (directory == NULL) {
        const int error = errno;
        close(own);
        return error;
    }
    int error = 0;
    while (error == 0) {
        errno = 0;
        const struct dirent *found = readdir(directory);
        if (found == NULL) {
            error = errno;
            break;
        }
        if (strcmp(found->d_name, ".") != 0 && strcmp(found->d_name, "..") != 0)
            error = add(listing, fd, links, found->d_name);
    }
    closedir(directory);
    if (listing->entries.used > 1)
        qsort_r(listing->entries.items, listing->entries.used, sizeof(struct fsx_listed), by_name, listing->names.items);
    mark_plain(listing);
    return error;
}

void fsx_listing_free(struct fsx_listing *listing) {
    free(listing->entries.items);
    free(listing->failed.items);
    free(listing->names.items);
    free(listing->targets.items);
    *listing = (struct fsx_listing){0};
}
