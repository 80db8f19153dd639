/* outputs/opens.c: see outputs/opens.h. */
#include "outputs/opens.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>

#define BUCKETS 1024u

/* An output that is open, or whose pages may be old. */
struct open_file {
    uint64_t inode;
    uint32_t direct, paged; /* how often it is open */
    bool mapped;            /* somebody may have mapped it while it was written past its pages */
    struct open_file *next;
};

struct fsx_output_opens {
    pthread_mutex_t lock; /* guards what follows */
    bool allowed;
    struct open_file *buckets[BUCKETS];
};

struct fsx_output_opens *fsx_output_opens_new(void) {
    struct fsx_output_opens *opens = calloc(1, sizeof *opens);
    if (opens != NULL)
        pthread_mutex_init(&opens->lock, NULL);
    return opens;
}

void fsx_output_opens_free(struct fsx_output_opens *opens) {
    if (opens == NULL)
        return;
    for (size_t i = 0; i < BUCKETS; i++)
        for (struct open_file *file = opens->buckets[i], *next; file != NULL; file = next) {
            next = file->next;
            free(file);
        }
    pthread_mutex_destroy(&opens->lock);
    free(opens);
}

void fsx_output_opens_allow(struct fsx_output_opens *opens) {
    pthread_mutex_lock(&opens->lock);
    opens->allowed = true;
    pthread_mutex_unlock(&opens->lock);
}

/* Where the pointer to a file is, or would be. */
static struct open_file **find(struct fsx_output_opens *opens, uint64_t inode) {
    struct open_file **link = &opens->buckets[(inode * UINT64_C(0x9E3779B97F4A7C15) >> 32) % BUCKETS];
    while (*link != NULL && (*link)->inode != inode)
        link = &(*link)->next;
    return link;
}

struct fsx_opened fsx_output_opens_open(struct fsx_output_opens *opens, uint64_t inode, uint32_t flags) {
    struct fsx_opened opened = {0};
    const bool only_writes = (flags & O_ACCMODE) == O_WRONLY;
    pthread_mutex_lock(&opens->lock);
    struct open_file **link = find(opens, inode), *file = *link;
    if (file == NULL && (file = *link = calloc(1, sizeof *file)) != NULL)
        file->inode = inode;
    if (file != NULL && opens->allowed && (file->direct > 0 || (only_writes && file->paged == 0))) {
        opened.handle = inode | FSX_DIRECT_HANDLE;
        file->direct++;
        file->mapped |= !only_writes;
    } else if (file != NULL) {
        opened.handle = inode;
        opened.old_pages = file->mapped;
        file->mapped = false;
        file->paged++;
    }
    pthread_mutex_unlock(&opens->lock);
    return opened;
}

void fsx_output_opens_release(struct fsx_output_opens *opens, uint64_t handle) {
    pthread_mutex_lock(&opens->lock);
    struct open_file **link = find(opens, handle & ~FSX_DIRECT_HANDLE), *file = *link;
    if (file != NULL) {
        uint32_t *count = (handle & FSX_DIRECT_HANDLE) != 0 ? &file->direct : &file->paged;
        *count -= *count > 0; /* what the kernel says is not believed */
        if (file->direct == 0 && file->paged == 0 && !file->mapped) {
            *link = file->next;
            free(file);
        }
    }
    pthread_mutex_unlock(&opens->lock);
}
