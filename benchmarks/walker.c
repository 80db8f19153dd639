/* The measured walk: every entry below a directory listed and looked at with lstat, as find or a data loader does.
 *
 * Usage: walker ROOT
 * One thread, depth first, in the order of the directories. Prints one JSON object: entries (ROOT is not counted), bytes
 * (sum of the sizes of regular files), seconds. Any error ends the program with a message and code 1.
 *
 * Used by benchmarks/walk_tree.py, which compiles it. Knows nothing of file systems or of FanStore.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static uint64_t entries, bytes;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static _Noreturn void fail(const char *what, const char *name) {
    fprintf(stderr, "walker: %s %s: %s\n", what, name, strerror(errno));
    exit(1);
}

/* Takes over `fd`. */
static void walk(int fd, const char *name) {
    DIR *directory = fdopendir(fd);
    if (directory == NULL)
        fail("list", name);
    for (;;) {
        errno = 0;
        const struct dirent *entry = readdir(directory);
        if (entry == NULL) {
            if (errno != 0)
                fail("list", name);
            break;
        }
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        struct stat status;
        if (fstatat(fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0)
            fail("stat", entry->d_name);
        entries++;
        if (S_ISREG(status.st_mode))
            bytes += (uint64_t)status.st_size;
        if (S_ISDIR(status.st_mode)) {
            int below = openat(fd, entry->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            if (below < 0)
                fail("open", entry->d_name);
            walk(below, entry->d_name);
        }
    }
    closedir(directory);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: walker ROOT\n");
        return 2;
    }
    const uint64_t begin = now_ns();
    int root = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        fail("open", argv[1]);
    walk(root, argv[1]);
    printf("{\"entries\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"seconds\": %.6f}\n", entries, bytes,
           (double)(now_ns() - begin) / 1e9);
    return 0;
}
