/* pages.c: see pages.h. */
#include "base/pages.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif

/* Pages looked at with one call: 4 MiB and a bit, the longest stored chunk. */
#define PAGES_MAX 1100u

struct range {
    uint8_t *start;
    size_t bytes;
};

static struct range whole_pages(const void *start, size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const uintptr_t first = (uintptr_t)start / page * page;
    const uintptr_t end = ((uintptr_t)start + bytes + page - 1) / page * page;
    return (struct range){(uint8_t *)first, end - first};
}

bool fsx_pages_resident(const void *start, size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const struct range range = whole_pages(start, bytes);
    const size_t pages = range.bytes / page;
    unsigned char state[PAGES_MAX];
    if (pages > PAGES_MAX || mincore(range.start, range.bytes, state) != 0)
        return false;
    for (size_t i = 0; i < pages; i++)
        if ((state[i] & 1) == 0)
            return false;
    return true;
}

bool fsx_pages_populate(const void *start, size_t bytes) {
    const struct range range = whole_pages(start, bytes);
    if (madvise(range.start, range.bytes, MADV_POPULATE_READ) == 0)
        return true;
    if (errno != EINVAL)
        return false;
    /* An older kernel: touch every page, and trust the disk. */
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < range.bytes; i += page)
        (void)*(volatile const uint8_t *)(range.start + i);
    return true;
}

void fsx_pages_unmap(const void *start, size_t bytes) {
    const struct range range = whole_pages(start, bytes);
    (void)madvise(range.start, range.bytes, MADV_DONTNEED);
}

void fsx_pages_start_writing(int fd, uint64_t offset, uint64_t bytes) {
    (void)sync_file_range(fd, (off_t)offset, (off_t)bytes, SYNC_FILE_RANGE_WRITE);
}
