/* engine_drive.c: drives the native engine with real partitions; built with sanitizers by test_native_engine.py.
 *
 *   engine_drive slabs|broker|ahead|names|fetch|fetch-few-cores|busy_poll|socket|outputs ROUNDS INDEX SOURCE FOLDER PART...
 *   engine_drive mount SECONDS INDEX SOURCE FOLDER PART...       as root: FOLDER/mount is the mount point
 *   engine_drive hang 0 INDEX SOURCE FOLDER PART...               likewise
 *   engine_drive reader SECONDS:SEED INDEX SOURCE FOLDER         started by the one above: reads the mount
 *
 * SOURCE is the tree that was prepared: all bytes that are read are compared with it. FOLDER takes damaged copies of the
 * partitions, and the content of outputs. Anything odd ends the program with a message and a code that is not zero; so does an alarm.
 */
#include "drive_world.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#define LIMIT_S 90u

struct world world;
const char *volatile waits_for = "something";

void die(const char *text, int error) {
    fprintf(stderr, "engine_drive: %s%s%s\n", text, error != 0 ? ": " : "", error != 0 ? strerror(error) : "");
    exit(3);
}

char *path_of(const char *root, uint32_t entry) {
    const struct fsx_index *x = &world.index;
    char *path = strdup("");
    for (; entry != 0; entry = x->parent[entry]) {
        char *longer;
        const int bytes = (int)(x->nameoff[entry + 1] - x->nameoff[entry]);
        check(asprintf(&longer, "/%.*s%s", bytes, (const char *)x->names + x->nameoff[entry], path) > 0, "no memory");
        free(path);
        path = longer;
    }
    char *whole;
    check(asprintf(&whole, "%s%s", root, path) > 0, "no memory");
    free(path);
    return whole;
}

struct piece some_piece(uint64_t *state, uint32_t most) {
    struct piece piece = {.entry = world.files[below(state, world.file_count)]};
    const uint64_t size = world.index.size[piece.entry];
    static const uint32_t lengths[] = {1, 512, 4096, 5000, 131072, 1 << 20};
    const uint32_t wanted = lengths[below(state, 6)] < most ? lengths[below(state, 6)] : most;
    switch (below(state, 4)) {
    case 0: /* from the beginning, or all of it */
        break;
    case 1: /* pages */
        piece.offset = below(state, size) / 4096 * 4096;
        break;
    case 2: /* across the border of two chunks */
        piece.offset = size > FSX_CHUNK_BYTES + 700 ? FSX_CHUNK_BYTES - 700 : 0;
        break;
    default:
        piece.offset = below(state, size);
    }
    const uint32_t capped = wanted < most ? wanted : most;
    piece.length = size - piece.offset < capped ? (uint32_t)(size - piece.offset) : capped;
    return piece;
}

static uint8_t *read_file(const char *path, size_t *length) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat facts;
    check_call(fd >= 0 && fstat(fd, &facts) == 0, path);
    uint8_t *data = malloc((size_t)facts.st_size + 8);
    check(data != NULL, "no memory");
    for (size_t done = 0; done < (size_t)facts.st_size;) {
        const ssize_t got = read(fd, data + done, (size_t)facts.st_size - done);
        check_call(got > 0, path);
        done += (size_t)got;
    }
    close(fd);
    *length = (size_t)facts.st_size;
    return data;
}

static void load_truth(const char *source) {
    const struct fsx_index *x = &world.index;
    world.truth = calloc(x->entries, sizeof *world.truth);
    world.files = calloc(x->entries, sizeof *world.files);
    check(world.truth != NULL && world.files != NULL, "no memory");
    for (uint32_t i = 0; i < x->entries; i++) {
        if (!S_ISREG(x->mode[i]) || x->inode[i] != i || x->size[i] == 0)
            continue;
        size_t bytes;
        char *path = path_of(source, i);
        world.truth[i] = read_file(path, &bytes);
        free(path);
        check(bytes == x->size[i], "the source is another one");
        world.files[world.file_count++] = i;
    }
    check(world.file_count > 0, "no files");
}

/* Every 64 KiB a byte is wrong; the file is unlinked at once. */
static int make_damaged(const char *part, const char *folder) {
    char path[4096];
    snprintf(path, sizeof path, "%s/damaged-XXXXXX", folder);
    const int fd = mkostemp(path, O_CLOEXEC);
    check_call(fd >= 0 && unlink(path) == 0, path);
    size_t bytes;
    uint8_t *data = read_file(part, &bytes);
    for (size_t i = 600; i < bytes; i += 1 << 16)
        data[i] ^= 1;
    for (size_t done = 0; done < bytes;) {
        const ssize_t put = write(fd, data + done, bytes - done);
        check_call(put > 0, path);
        done += (size_t)put;
    }
    free(data);
    return fd;
}

/* With what a signal handler may do. */
static void say_time_is_up(int number) {
    (void)number;
    static const char text[] = "the time is up; waited for ";
    const char *what = waits_for;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0 || write(STDERR_FILENO, what, strlen(what)) < 0)
        _exit(3);
    _exit(2);
}

int main(int argc, char **argv) {
    check(argc >= 6, "usage: engine_drive MODE ROUNDS INDEX SOURCE FOLDER PART...");
    signal(SIGALRM, say_time_is_up);
    alarm(LIMIT_S);
    const char *mode = argv[1], *folder = argv[5];
    world.program = argv[0];
    world.index_path = argv[3];
    world.source = argv[4];
    struct fsx_problem problem;
    size_t index_bytes;
    uint8_t *index = read_file(argv[3], &index_bytes);
    if (fsx_index_open(index, index_bytes, &world.index, &problem) != 0)
        die(problem.text, 0);
    load_truth(argv[4]);
    for (int i = 6; i < argc; i++) {
        check(world.parts < PARTS_MAX, "too many partitions");
        world.part[world.parts] = open(argv[i], O_RDONLY | O_CLOEXEC);
        check_call(world.part[world.parts] >= 0, argv[i]);
        world.damaged[world.parts++] = make_damaged(argv[i], folder);
    }
    char point[4096];
    snprintf(point, sizeof point, "%s/mount", folder);
    int code = 0;
    if (strcmp(mode, "slabs") == 0)
        drive_slabs((uint32_t)strtoul(argv[2], NULL, 10));
    else if (strcmp(mode, "broker") == 0)
        drive_broker((uint32_t)strtoul(argv[2], NULL, 10));
    else if (strcmp(mode, "ahead") == 0)
        drive_ahead((uint32_t)strtoul(argv[2], NULL, 10));
    else if (strcmp(mode, "names") == 0)
        drive_names((uint32_t)strtoul(argv[2], NULL, 10));
    else if (strcmp(mode, "fetch") == 0)
        drive_fetch((uint32_t)strtoul(argv[2], NULL, 10), 64);
    else if (strcmp(mode, "fetch-few-cores") == 0)
        drive_fetch((uint32_t)strtoul(argv[2], NULL, 10), 1);
    else if (strcmp(mode, "busy_poll") == 0)
        drive_busy_poll((uint32_t)strtoul(argv[2], NULL, 10));
    else if (strcmp(mode, "socket") == 0)
        drive_socket((uint32_t)strtoul(argv[2], NULL, 10));
    else if (strcmp(mode, "outputs") == 0)
        drive_outputs((uint32_t)strtoul(argv[2], NULL, 10), folder);
    else if (strcmp(mode, "mount") == 0)
        drive_mount(strtod(argv[2], NULL), point);
    else if (strcmp(mode, "hang") == 0)
        drive_hang(point);
    else if (strcmp(mode, "reader") == 0)
        code = drive_reader(strtod(argv[2], NULL), strtoull(strchr(argv[2], ':') + 1, NULL, 10), point);
    else
        die("no such mode", 0);
    for (uint32_t i = 0; i < world.index.entries; i++)
        free(world.truth[i]);
    for (uint32_t i = 0; i < world.parts; i++) {
        close(world.part[i]);
        close(world.damaged[i]);
    }
    free(world.truth);
    free(world.files);
    free(index);
    if (code == 0)
        puts("done");
    return code;
}
