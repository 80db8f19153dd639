/* outputs/files.c: see outputs/files.h. */
#include "outputs/files.h"
#include "outputs/spare_files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* More than threads use at a time; a job that writes more files than that at once opens some of them again. */
#define KEPT 128u
/* A descriptor that is not kept, but closed by who uses it. */
#define NO_PLACE UINT32_MAX

struct kept {
    uint64_t inode; /* 0: nobody finds it; it is closed by its last user, or free */
    uint64_t turn;  /* of the last use */
    uint32_t users;
    int fd; /* -1: free */
};

struct fsx_output_files {
    int directory;
    struct fsx_spare_files *spare;
    pthread_mutex_t lock; /* guards what follows */
    uint64_t turn;
    uint64_t drops; /* so far; what was opened before one must not be kept after it */
    struct kept kept[KEPT];
};

struct fsx_output_files *fsx_output_files_new(int directory) {
    struct fsx_output_files *files = calloc(1, sizeof *files);
    if (files == NULL)
        return NULL;
    files->directory = fcntl(directory, F_DUPFD_CLOEXEC, 0);
    files->spare = files->directory < 0 ? NULL : fsx_spare_files_new(files->directory);
    if (files->spare == NULL) {
        const int error = errno;
        if (files->directory >= 0)
            close(files->directory);
        free(files);
        errno = error;
        return NULL;
    }
    for (uint32_t i = 0; i < KEPT; i++)
        files->kept[i].fd = -1;
    pthread_mutex_init(&files->lock, NULL);
    return files;
}

void fsx_output_files_free(struct fsx_output_files *files) {
    if (files == NULL)
        return;
    fsx_spare_files_free(files->spare);
    for (uint32_t i = 0; i < KEPT; i++)
        if (files->kept[i].fd >= 0)
            close(files->kept[i].fd);
    close(files->directory);
    pthread_mutex_destroy(&files->lock);
    free(files);
}

/* With the lock held: where the file is kept; NO_PLACE if it is not. */
static uint32_t find(const struct fsx_output_files *files, uint64_t inode) {
    for (uint32_t i = 0; i < KEPT; i++)
        if (files->kept[i].inode == inode)
            return i;
    return NO_PLACE;
}

/* With the lock held. */
static void begin(struct fsx_output_files *files, uint32_t place, struct fsx_output_use *use) {
    files->kept[place].users++;
    files->kept[place].turn = ++files->turn;
    *use = (struct fsx_output_use){.fd = files->kept[place].fd, .place = place};
}

/* With the lock held: a free place, or that of the file not used for longest; NO_PLACE if all are in use. */
static uint32_t find_room(const struct fsx_output_files *files) {
    uint32_t best = NO_PLACE;
    for (uint32_t i = 0; i < KEPT; i++) {
        const struct kept *kept = &files->kept[i];
        if (kept->fd < 0)
            return i;
        if (kept->users == 0 && (best == NO_PLACE || kept->turn < files->kept[best].turn))
            best = i;
    }
    return best;
}

/* Keep a file that was just opened, unless another thread was faster, there is no room, or it may be the wrong one by now.
 * The descriptor that is to be closed; -1 for none. */
static int keep(struct fsx_output_files *files, uint64_t inode, int fd, uint64_t drops, struct fsx_output_use *use) {
    int spare = -1;
    pthread_mutex_lock(&files->lock);
    uint32_t place = find(files, inode);
    const bool here = place != NO_PLACE;
    if (here)
        spare = fd;
    else if (files->drops == drops)
        place = find_room(files);
    if (!here && place != NO_PLACE) {
        spare = files->kept[place].fd;
        files->kept[place] = (struct kept){.inode = inode, .fd = fd};
    }
    if (place != NO_PLACE)
        begin(files, place, use);
    else
        *use = (struct fsx_output_use){.fd = fd, .place = NO_PLACE};
    pthread_mutex_unlock(&files->lock);
    return spare;
}

/* Its descriptor; -1 with errno set. */
static int open_file(const struct fsx_output_files *files, uint64_t inode, int more_flags) {
    char name[20];
    snprintf(name, sizeof name, "%" PRIx64, inode);
    int fd;
    do
        fd = openat(files->directory, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC | more_flags, 0600);
    while (fd < 0 && errno == EINTR);
    return fd;
}

int fsx_output_files_use(struct fsx_output_files *files, uint64_t inode, struct fsx_output_use *use) {
    pthread_mutex_lock(&files->lock);
    const uint64_t drops = files->drops;
    const uint32_t place = find(files, inode);
    if (place != NO_PLACE)
        begin(files, place, use);
    pthread_mutex_unlock(&files->lock);
    if (place != NO_PLACE)
        return 0;
    const int fd = open_file(files, inode, 0);
    if (fd < 0)
        return errno;
    const int spare = keep(files, inode, fd, drops, use);
    if (spare >= 0)
        close(spare);
    return 0;
}

void fsx_output_files_release(struct fsx_output_files *files, const struct fsx_output_use *use) {
    int spare = -1;
    if (use->place == NO_PLACE) {
        spare = use->fd;
    } else {
        pthread_mutex_lock(&files->lock);
        struct kept *kept = &files->kept[use->place];
        if (--kept->users == 0 && kept->inode == 0) {
            spare = kept->fd;
            kept->fd = -1;
        }
        pthread_mutex_unlock(&files->lock);
    }
    if (spare >= 0)
        close(spare);
}

int fsx_output_files_make(struct fsx_output_files *files, uint64_t inode, struct stat *facts) {
    int fd = fsx_spare_files_take(files->spare, inode);
    const bool ahead = fd >= 0;
    if (!ahead)
        fd = open_file(files, inode, O_CREAT | O_EXCL);
    if (fd < 0)
        return errno;
    if ((ahead && futimens(fd, NULL) != 0) || fstat(fd, facts) != 0) {
        const int error = errno;
        close(fd);
        fsx_output_files_unmake(files, inode);
        return error;
    }
    pthread_mutex_lock(&files->lock);
    const uint64_t drops = files->drops;
    pthread_mutex_unlock(&files->lock);
    struct fsx_output_use use;
    const int spare = keep(files, inode, fd, drops, &use); /* nobody else knows of it: it is not dropped meanwhile */
    if (spare >= 0)
        close(spare);
    fsx_output_files_release(files, &use);
    return 0;
}

void fsx_output_files_skip(struct fsx_output_files *files, uint64_t inode) {
    fsx_spare_files_skip(files->spare, inode);
}

void fsx_output_files_finish(struct fsx_output_files *files) { fsx_spare_files_stop(files->spare); }

void fsx_output_files_unmake(struct fsx_output_files *files, uint64_t inode) {
    char name[20];
    snprintf(name, sizeof name, "%" PRIx64, inode);
    unlinkat(files->directory, name, 0);
    fsx_output_files_drop(files, inode);
}

void fsx_output_files_drop(struct fsx_output_files *files, uint64_t inode) {
    int spare = -1;
    pthread_mutex_lock(&files->lock);
    files->drops++;
    const uint32_t place = inode == 0 ? NO_PLACE : find(files, inode);
    if (place != NO_PLACE) {
        struct kept *kept = &files->kept[place];
        kept->inode = 0;
        if (kept->users == 0) {
            spare = kept->fd;
            kept->fd = -1;
        }
    }
    pthread_mutex_unlock(&files->lock);
    if (spare >= 0)
        close(spare);
}
