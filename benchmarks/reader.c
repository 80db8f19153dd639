/* The measured reader: whole files, in the order given, by several threads.
 *
 * Usage: reader LIST READERS BUFFER_BYTES
 *   LIST holds absolute paths, each ended by a NUL byte, in the order in which they are to be read.
 *   Each thread takes the next path of the list: open, fstat, read until the end, close.
 * Prints one JSON object: files, bytes, seconds, latency per file. Any error, and any file that gives another number
 * of bytes than fstat said, ends the program with a message and code 1: a benchmark of wrong reads is worth nothing.
 *
 * Used by benchmarks/harness/reading.py, which compiles it. Knows nothing of file systems or of FanStore.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PAGE_BYTES = 4096, READERS_MAX = 256 };

/* Written before the threads start and only read by them, but for `next`, which is atomic, and `latency_ns`, of which
 * each element is written by the one thread that took it. */
static struct {
    char **paths;
    size_t path_count;
    uint64_t *latency_ns;
    size_t buffer_bytes;
    atomic_size_t next;
    pthread_barrier_t start;
} work;

struct reader {
    pthread_t thread;
    uint64_t bytes;
    uint64_t begin_ns;
    uint64_t end_ns;
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static _Noreturn void fail(const char *what, const char *path) {
    fprintf(stderr, "reader: %s %s: %s\n", what, path, strerror(errno));
    exit(1);
}

static uint64_t read_whole(const char *path, char *buffer) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        fail("open", path);
    }
    struct stat status;
    if (fstat(fd, &status) != 0) {
        fail("fstat", path);
    }
    uint64_t bytes = 0;
    for (;;) {
        ssize_t got = read(fd, buffer, work.buffer_bytes);
        if (got < 0) {
            if (errno == EINTR) {
                continue;
            }
            fail("read", path);
        }
        if (got == 0) {
            break;
        }
        bytes += (uint64_t)got;
    }
    close(fd);
    if (bytes != (uint64_t)status.st_size) {
        fprintf(stderr, "reader: %s: read %" PRIu64 " bytes of %jd\n", path, bytes, (intmax_t)status.st_size);
        exit(1);
    }
    return bytes;
}

static void *reader_main(void *argument) {
    struct reader *self = argument;
    /* Page-aligned: on AMD Zen the kernel's copy to a misaligned buffer was four times slower, which once made a
     * benchmark of this kind compare buffers and not file systems. */
    char *buffer = aligned_alloc(PAGE_BYTES, work.buffer_bytes);
    if (buffer == NULL) {
        fail("allocate", "buffer");
    }
    memset(buffer, 0, work.buffer_bytes); /* page faults before the clock, not in it */
    pthread_barrier_wait(&work.start);
    self->begin_ns = now_ns();
    for (;;) {
        size_t item = atomic_fetch_add_explicit(&work.next, 1, memory_order_relaxed);
        if (item >= work.path_count) {
            break;
        }
        uint64_t begin = now_ns();
        self->bytes += read_whole(work.paths[item], buffer);
        work.latency_ns[item] = now_ns() - begin;
    }
    self->end_ns = now_ns();
    free(buffer);
    return NULL;
}

/* The list stays in memory until the program ends: the paths point into it. */
static void load_list(const char *list) {
    int fd = open(list, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) {
        fail("open", list);
    }
    size_t size = (size_t)status.st_size;
    char *text = malloc(size + 1);
    if (text == NULL) {
        fail("allocate", list);
    }
    for (size_t done = 0; done < size;) {
        ssize_t got = read(fd, text + done, size - done);
        if (got <= 0) {
            fail("read", list);
        }
        done += (size_t)got;
    }
    close(fd);
    text[size] = '\0';
    size_t count = 0;
    for (size_t i = 0; i < size; i++) {
        count += text[i] == '\0';
    }
    work.paths = calloc(count + 1, sizeof *work.paths);
    work.latency_ns = calloc(count + 1, sizeof *work.latency_ns);
    if (work.paths == NULL || work.latency_ns == NULL) {
        fail("allocate", list);
    }
    for (char *path = text; work.path_count < count; path += strlen(path) + 1) {
        work.paths[work.path_count++] = path;
    }
}

static int compare_u64(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

/* latency_ns must be sorted. */
static double percentile_us(double share) {
    size_t last = work.path_count - 1;
    return (double)work.latency_ns[(size_t)((double)last * share + 0.5)] / 1e3;
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: reader LIST READERS BUFFER_BYTES\n");
        return 2;
    }
    long readers = strtol(argv[2], NULL, 10);
    long buffer_bytes = strtol(argv[3], NULL, 10);
    if (readers < 1 || readers > READERS_MAX || buffer_bytes < PAGE_BYTES || buffer_bytes % PAGE_BYTES != 0) {
        fprintf(stderr, "reader: 1 to %d readers; a buffer of whole pages\n", READERS_MAX);
        return 2;
    }
    work.buffer_bytes = (size_t)buffer_bytes;
    load_list(argv[1]);
    if (work.path_count == 0) {
        fprintf(stderr, "reader: %s is empty\n", argv[1]);
        return 2;
    }
    struct reader *reader = calloc((size_t)readers, sizeof *reader);
    if (reader == NULL || pthread_barrier_init(&work.start, NULL, (unsigned)readers) != 0) {
        fail("start", "readers");
    }
    for (long i = 0; i < readers; i++) {
        errno = pthread_create(&reader[i].thread, NULL, reader_main, &reader[i]);
        if (errno != 0) {
            fail("start", "a reader");
        }
    }
    uint64_t bytes = 0, begin_ns = UINT64_MAX, end_ns = 0;
    for (long i = 0; i < readers; i++) {
        pthread_join(reader[i].thread, NULL);
        bytes += reader[i].bytes;
        begin_ns = reader[i].begin_ns < begin_ns ? reader[i].begin_ns : begin_ns;
        end_ns = reader[i].end_ns > end_ns ? reader[i].end_ns : end_ns;
    }
    qsort(work.latency_ns, work.path_count, sizeof *work.latency_ns, compare_u64);
    printf("{\"files\": %zu, \"bytes\": %" PRIu64 ", \"seconds\": %.6f, \"latency_us\": "
           "{\"p50\": %.1f, \"p90\": %.1f, \"p99\": %.1f, \"max\": %.1f}}\n",
           work.path_count, bytes, (double)(end_ns - begin_ns) / 1e9, percentile_us(0.5), percentile_us(0.9),
           percentile_us(0.99), percentile_us(1.0));
    return 0;
}
