/* drive_outputs.c: threads on the content and the names of outputs; and an engine with outputs, whose kernel is this. */
#include "drive_rig.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define THREADS 4u
#define OUTPUTS 160u /* more than are kept open */
#define OUTPUT_BYTES 40000u
#define REPLACED (OUTPUTS - 1) /* that one is read only, and replaced all the time */

static char folder_path[4096];
static int folder;

static uint64_t inode_of(uint64_t number) { return FSX_OUTPUT_FIRST + 16 * number; }

static void make_folder(const char *where) {
    snprintf(folder_path, sizeof folder_path, "%s/objects-XXXXXX", where);
    check_call(mkdtemp(folder_path) != NULL, folder_path);
    folder = open(folder_path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    check_call(folder >= 0, folder_path);
}

static void object_name(uint64_t inode, char name[20]) { snprintf(name, 20, "%" PRIx64, inode); }

static void make_object(uint64_t inode) {
    char name[20];
    object_name(inode, name);
    const int fd = openat(folder, name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    check_call(fd >= 0, name);
    close(fd);
}

static void remove_objects(void) {
    for (uint64_t i = 0; i < OUTPUTS; i++) {
        char name[20];
        object_name(inode_of(i), name);
        check_call(unlinkat(folder, name, 0) == 0 || errno == ENOENT, name);
    }
}

/* ---- threads ---------------------------------------------------------------------------------------------------- */

struct writer {
    struct fsx_outputs *outputs;
    pthread_t thread;
    uint64_t number;
    uint32_t rounds;
};

static atomic_bool writing;

static int do_task(struct fsx_outputs *outputs, uint32_t opcode, uint64_t inode, uint64_t offset, uint64_t *value) {
    const struct fsx_task task = {.opcode = opcode, .inode = inode, .offset = offset, .length = sizeof *value,
                                  .data = opcode == FUSE_WRITE ? (const uint8_t *)value : NULL};
    _Alignas(8) uint8_t answer[16];
    size_t bytes;
    const int error = fsx_outputs_do(outputs, &task, answer, &bytes);
    if (error == 0 && opcode == FUSE_READ) {
        check(bytes == sizeof *value, "a short read");
        memcpy(value, answer, sizeof *value);
    }
    return error;
}

/* Each thread has eight bytes of its own in every output. */
static void *write_main(void *argument) {
    const struct writer *writer = argument;
    uint64_t seed = writer->number * 2 + 1, last[OUTPUTS] = {0};
    for (uint32_t round = 0; round < writer->rounds; round++) {
        const uint64_t number = below(&seed, REPLACED), offset = writer->number * sizeof(uint64_t);
        uint64_t value = next_random(&seed), again = 0;
        if (last[number] != 0) {
            check(do_task(writer->outputs, FUSE_READ, inode_of(number), offset, &again) == 0, "a read fails");
            check(again == last[number], "another's content");
        }
        check(do_task(writer->outputs, FUSE_WRITE, inode_of(number), offset, &value) == 0, "a write fails");
        last[number] = value;
        for (int i = 0; i < 3; i++)
            check(do_task(writer->outputs, FUSE_READ, inode_of(REPLACED), 0, &again) == 0, "a read fails");
        check(do_task(writer->outputs, FUSE_READ, inode_of(OUTPUTS) + number, 0, &again) == ENOENT, "a file of nobody");
        check(fsx_outputs_has_name(writer->outputs, 7, "for ever", 8), "a name is denied");
        struct fuse_attr_out out;
        const uint64_t directory = inode_of(3 * number);
        check(!fsx_outputs_described(writer->outputs, directory, &out) || out.attr.ino == directory, "another's attributes");
        check(!fsx_outputs_is_mixed(writer->outputs, 1) || fsx_outputs_is_mixed(writer->outputs, 0), "out of order");
    }
    return NULL;
}

/* Put another file in the place of this output, as Python does, and drop it: from then on nobody reads the old one. */
static void replace(struct fsx_outputs *outputs, uint64_t value) {
    char name[20];
    object_name(inode_of(REPLACED), name);
    const int fd = openat(folder, "new", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    check_call(fd >= 0 && write(fd, &value, sizeof value) == sizeof value, "new");
    close(fd);
    check_call(renameat(folder, "new", folder, name) == 0, name);
    fsx_outputs_drop(outputs, inode_of(REPLACED));
    uint64_t found = 0;
    check(do_task(outputs, FUSE_READ, inode_of(REPLACED), 0, &found) == 0 && found == value, "an old file is read");
}

static void *drop_main(void *argument) {
    struct fsx_outputs *outputs = argument;
    uint64_t seed = 77;
    for (uint64_t value = 1; atomic_load(&writing); value++) {
        fsx_outputs_drop(outputs, inode_of(below(&seed, OUTPUTS)));
        replace(outputs, value);
        struct fsx_output_counts counts;
        fsx_outputs_count(outputs, &counts);
    }
    return NULL;
}

static void *name_main(void *argument) {
    struct fsx_outputs *outputs = argument;
    while (atomic_load(&writing)) {
        for (uint32_t pass = 0; pass < 2; pass++)
            for (uint32_t i = 0; i < 1000; i++) {
                const uint64_t directory = i % 3 == 0 ? inode_of(i) : 0;
                const struct fuse_attr_out attributes = {.attr = {.ino = directory, .size = i}};
                struct fuse_entry_out entry;
                if (pass == 0) {
                    check(fsx_outputs_add_name(outputs, i % 5, &i, sizeof i, directory), "no memory");
                    check(!fsx_outputs_tell(outputs, i % 5, &i, sizeof i, &entry), "nobody has said what it is");
                    check(directory == 0 || fsx_outputs_describe(outputs, &attributes), "no memory");
                    continue;
                }
                const bool told = fsx_outputs_tell(outputs, i % 5, &i, sizeof i, &entry);
                check(told == (directory != 0) && (!told || (entry.nodeid == directory && entry.attr.size == i)),
                      "another's attributes");
                check(fsx_outputs_remove_name(outputs, i % 5, &i, sizeof i), "a name is lost");
                check(!told || fsx_outputs_undescribe(outputs, directory) == 1, "look-ups are not counted");
            }
    }
    return NULL;
}

static void use_from_threads(uint32_t rounds) {
    struct fsx_outputs *outputs = fsx_outputs_new(folder, world.index.entries, true, false, false, -1, 0);
    check_call(outputs != NULL, "no outputs");
    check(fsx_outputs_add_name(outputs, 7, "for ever", 8, 0), "no memory");
    for (uint64_t i = 0; i < OUTPUTS; i++)
        make_object(inode_of(i));
    replace(outputs, 0);
    atomic_store(&writing, true);
    pthread_t dropper, namer;
    struct writer writers[THREADS];
    check(pthread_create(&dropper, NULL, drop_main, outputs) == 0, "no thread");
    check(pthread_create(&namer, NULL, name_main, outputs) == 0, "no thread");
    for (uint32_t i = 0; i < THREADS; i++) {
        writers[i] = (struct writer){.outputs = outputs, .number = i, .rounds = rounds};
        check(pthread_create(&writers[i].thread, NULL, write_main, &writers[i]) == 0, "no thread");
    }
    fsx_outputs_mix(outputs, 0);
    fsx_outputs_mix(outputs, 1);
    for (uint32_t i = 0; i < THREADS; i++)
        pthread_join(writers[i].thread, NULL);
    atomic_store(&writing, false);
    pthread_join(dropper, NULL);
    pthread_join(namer, NULL);
    struct fsx_output_counts counts;
    fsx_outputs_count(outputs, &counts);
    check(counts.writes == THREADS * rounds && counts.written_bytes == 8 * counts.writes, "wrong counts");
    fsx_outputs_free(outputs);
    remove_objects();
}

/* ---- an engine -------------------------------------------------------------------------------------------------- */

static uint64_t last_unique;
static struct {
    struct fuse_out_header head;
    uint8_t data[OUTPUT_BYTES];
} reply;

static void send_message(const struct rig *rig, uint32_t opcode, uint64_t node, const void *arg, size_t arg_bytes,
                         const void *data, size_t bytes) {
    struct fuse_in_header head = {.len = (uint32_t)(sizeof head + arg_bytes + bytes), .opcode = opcode,
                                  .unique = last_unique += 2, .nodeid = node};
    const struct iovec parts[3] = {{&head, sizeof head}, {(void *)(uintptr_t)arg, arg_bytes},
                                   {(void *)(uintptr_t)data, bytes}};
    const struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)parts, .msg_iovlen = 3};
    check_call(sendmsg(rig->kernel, &message, MSG_NOSIGNAL) == (ssize_t)head.len, "the engine takes no message");
}

/* The length of what was answered. */
static size_t receive(const struct rig *rig, const char *what) {
    const ssize_t got = recv(rig->kernel, &reply, sizeof reply, 0);
    check_call(got >= (ssize_t)sizeof reply.head, "no reply");
    check(reply.head.len == (size_t)got && reply.head.unique == last_unique && reply.head.error == 0, what);
    return (size_t)got - sizeof reply.head;
}

static void send_write(const struct rig *rig, uint64_t inode, uint64_t offset, const void *data, uint32_t bytes) {
    const struct fuse_write_in in = {.offset = offset, .size = bytes};
    send_message(rig, FUSE_WRITE, inode, &in, sizeof in, data, bytes);
}

/* The truth about an output: what was written, on top of what the other node had (drive_rig.c), which is nothing. */
struct output {
    uint8_t content[OUTPUT_BYTES];
    size_t size;
};

static void change_and_compare(const struct rig *rig, struct output *truth, uint64_t *seed) {
    const uint64_t number = below(seed, OUTPUTS);
    struct output *output = &truth[number];
    const size_t offset = below(seed, OUTPUT_BYTES), room = OUTPUT_BYTES - offset;
    const size_t bytes = below(seed, room) + 1;
    if (below(seed, 2) == 0) {
        uint8_t data[OUTPUT_BYTES];
        memset(data, (int)below(seed, 256), bytes);
        send_write(rig, inode_of(number), offset, data, (uint32_t)bytes);
        struct fuse_write_out out;
        check(receive(rig, "a write fails") == sizeof out, "a wrong answer to a write");
        memcpy(&out, reply.data, sizeof out);
        check(out.size == bytes, "a short write");
        memcpy(output->content + offset, data, bytes);
        output->size = offset + bytes > output->size ? offset + bytes : output->size;
    } else {
        const struct fuse_read_in in = {.offset = offset, .size = (uint32_t)bytes};
        send_message(rig, FUSE_READ, inode_of(number), &in, sizeof in, NULL, 0);
        const size_t left = offset < output->size ? output->size - offset : 0;
        const size_t there = left < bytes ? left : bytes;
        check(receive(rig, "a read fails") == there && memcmp(reply.data, output->content + offset, there) == 0,
              "wrong bytes");
    }
    if (below(seed, 4) == 0)
        fsx_outputs_drop(rig->outputs, inode_of(number));
    if (below(seed, 4) == 0) {
        const struct fuse_flush_in in = {0};
        send_message(rig, FUSE_FLUSH, inode_of(number), &in, sizeof in, NULL, 0);
        check(receive(rig, "a close fails") == 0, "a close with data");
    }
}

static void use_engine(uint32_t rounds) {
    struct rig rig;
    struct output *truth = calloc(OUTPUTS, sizeof *truth);
    check(truth != NULL, "no memory");
    uint64_t seed = 5;
    struct fsx_outputs *outputs = fsx_outputs_new(folder, world.index.entries, true, false, false, -1, 0);
    check_call(outputs != NULL, "no outputs");
    rig_start_with(&rig, outputs, folder, -1, 1, LOCAL_FILES, FSX_VERIFY_FIRST, 0, 0);
    for (uint32_t round = 0; round < rounds; round++)
        change_and_compare(&rig, truth, &seed);
    check(atomic_load(&rig.made_local) > 0, "Python had nothing to do");
    /* The end, with writes that wait, and one that Python has taken. */
    atomic_store(&rig.idle, true);
    for (uint64_t i = 0; i < 20; i++)
        send_write(&rig, inode_of(OUTPUTS + i), 0, truth, 5000);
    struct fsx_upcall taken;
    while (fsx_engine_take(rig.engine, &taken, 1) == 0)
        poll(NULL, 0, 1);
    rig_stop(&rig);
    fsx_outputs_free(outputs);
    free(truth);
    remove_objects();
}

void drive_outputs(uint32_t rounds, const char *where) {
    make_folder(where);
    use_from_threads(rounds);
    use_engine(rounds);
    drive_creates(rounds, folder);
    close(folder);
    check_call(rmdir(folder_path) == 0, folder_path);
}
