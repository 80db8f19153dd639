/* ask_drive.c: asks a daemon through native/preload/ask.c, which is linked in; also built with sanitizers. Used by
 * test_preload_ask.py. FANSTORE_PRELOAD_STATE says which daemon.
 *
 *   ask_drive content PATH...            size, hash, seals and flags of each file's content, or why there is none
 *   ask_drive wait PATH                  the same of one file, twice: at once, and when standard input ends
 *   ask_drive numbers PATH               the same of one file, six times, and takes numbers of descriptors for itself
 *   ask_drive race SECONDS SOURCE ROOT FILE...
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "preload/ask.h"
#include "preload/preload.h"

#define ASKERS 7 /* more than there are connections */

static uint64_t hash(const uint8_t *data, size_t bytes) {
    uint64_t value = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++)
        value = (value ^ data[i]) * 1099511628211u;
    return value;
}

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    _exit(1);
}

/* The content of a descriptor, mapped, which is closed. */
static const uint8_t *map(int fd, size_t *bytes) {
    const off_t end = lseek(fd, 0, SEEK_END);
    const uint8_t *data = end > 0 ? mmap(NULL, (size_t)end, PROT_READ, MAP_SHARED, fd, 0) : (const uint8_t *)"";
    if (end < 0 || data == MAP_FAILED)
        fail("map");
    *bytes = (size_t)end;
    close(fd);
    return data;
}

static void say_content(const char *path) {
    const int64_t entry = fsx_resolve(AT_FDCWD, path);
    const int fd = entry < 0 ? -1 : fsx_ask_content((uint32_t)entry);
    if (fd < 0) {
        printf("%s\n", entry < 0 ? "no entry" : strerrorname_np(errno));
        return;
    }
    const int seals = fcntl(fd, F_GET_SEALS), flags = fcntl(fd, F_GETFL) & O_ACCMODE;
    size_t bytes;
    const uint8_t *data = map(fd, &bytes);
    printf("%zu %016" PRIx64 " %d %d\n", bytes, hash(data, bytes), seals, flags);
    fflush(stdout);
}

/* ---- races -------------------------------------------------------------------------------------------------------------- */

static _Atomic bool over;
static uint32_t entries[64];
static const uint8_t *contents[64];
static size_t sizes[64];
static int count;

/* This file's content is what it should be. */
static void ask_one(int i) {
    const int fd = fsx_ask_content(entries[i]);
    if (fd < 0)
        fail("ask");
    size_t bytes;
    const uint8_t *data = map(fd, &bytes);
    if (bytes != sizes[i] || memcmp(data, contents[i], bytes) != 0)
        fail("content");
    if (bytes > 0)
        munmap((void *)(uintptr_t)data, bytes);
}

static void *ask(void *argument) {
    for (unsigned seed = (unsigned)(uintptr_t)argument; !atomic_load(&over);)
        ask_one(rand_r(&seed) % count);
    return NULL;
}

static void *fork_and_ask(void *argument) {
    (void)argument;
    for (int i = 0; !atomic_load(&over); i++) {
        const pid_t child = fork();
        if (child == 0) {
            ask_one(i % count);
            ask_one((i + 1) % count);
            _exit(0);
        }
        int status;
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
            fail("child");
    }
    return NULL;
}

#ifndef vfork
/* The child of a vfork asks as well. */
static void *vfork_and_ask(void *argument) {
    (void)argument;
    for (int i = 0; !atomic_load(&over); i++) {
        const pid_t child = vfork();
        if (child == 0)
            _exit(fsx_ask_content(entries[0]) >= 0 ? 0 : 2);
        int status;
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
            fail("child of vfork");
        usleep(1000);
    }
    return NULL;
}
#endif

/* Takes the numbers of the library's descriptors for its own, between one question and the next. */
static int take_numbers(const char *path) {
    const int mine = open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (int i = 0; i < 3; i++) {
        say_content(path);
        for (int fd = 512; fd < 524; fd++)
            if (dup2(mine, fd) != fd)
                fail("dup2");
        say_content(path);
        for (int fd = 512; fd < 524; fd++)
            if (close(fd) != 0)
                fail("close");
    }
    return 0;
}

static int race(int seconds, const char *source, const char *root, char **names) {
    char path[4096];
    for (; names[count] != NULL && count < 64; count++) {
        snprintf(path, sizeof path, "%s/%s", source, names[count]);
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            fail(path);
        contents[count] = map(fd, &sizes[count]);
        snprintf(path, sizeof path, "%s/%s", root, names[count]);
        const int64_t entry = fsx_resolve(AT_FDCWD, path);
        if (entry < 0)
            fail(path);
        entries[count] = (uint32_t)entry;
    }
    pthread_t threads[ASKERS + 2];
    int started = 0;
    for (; started < ASKERS; started++)
        pthread_create(&threads[started], NULL, ask, (void *)(uintptr_t)(started + 1));
    pthread_create(&threads[started++], NULL, fork_and_ask, NULL);
#ifndef vfork
    pthread_create(&threads[started++], NULL, vfork_and_ask, NULL);
#endif
    sleep((unsigned)seconds);
    atomic_store(&over, true);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 5 && strcmp(argv[1], "race") == 0)
        return race(atoi(argv[2]), argv[3], argv[4], argv + 5);
    if (argc == 3 && strcmp(argv[1], "numbers") == 0)
        return take_numbers(argv[2]);
    if (argc == 3 && strcmp(argv[1], "wait") == 0) {
        say_content(argv[2]);
        while (getchar() != EOF)
            ;
        say_content(argv[2]);
        return 0;
    }
    if (argc < 3 || strcmp(argv[1], "content") != 0) {
        fprintf(stderr, "usage: see the first lines of the source\n");
        return 2;
    }
    for (int i = 2; i < argc; i++)
        say_content(argv[i]);
    return 0;
}
