/* drive_socket.c: an engine with one worker, whose kernel is this program. */
#include "drive_rig.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define LARGEST (128u << 10)
#define MANY 4096u

struct reply {
    struct fuse_out_header head;
    uint8_t data[LARGEST + 4096];
    size_t bytes; /* of data */
};

static uint64_t last_unique;
static struct reply reply;

static uint64_t next_unique(void) { return last_unique += 2; }

/* True if it was sent; false if the engine's side is full or closed. */
static bool send_message(const struct rig *rig, uint32_t opcode, uint64_t node, uint64_t unique, const void *arg,
                         size_t bytes, int flags) {
    struct fuse_in_header head = {.len = (uint32_t)(sizeof head + bytes), .opcode = opcode, .unique = unique,
                                  .nodeid = node};
    const struct iovec parts[2] = {{&head, sizeof head}, {(void *)(uintptr_t)arg, bytes}};
    const struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)parts, .msg_iovlen = 2};
    return sendmsg(rig->kernel, &message, MSG_NOSIGNAL | flags) == (ssize_t)head.len;
}

static void receive(const struct rig *rig) {
    uint8_t packet[sizeof reply.head + sizeof reply.data];
    const ssize_t got = recv(rig->kernel, packet, sizeof packet, 0);
    check_call(got >= (ssize_t)sizeof reply.head, "no reply");
    memcpy(&reply.head, packet, sizeof reply.head);
    reply.bytes = (size_t)got - sizeof reply.head;
    memcpy(reply.data, packet + sizeof reply.head, reply.bytes);
    check(reply.head.len == (size_t)got && (reply.head.error == 0 || reply.bytes == 0), "a reply of a wrong length");
}

/* Ask and wait for the answer; its errno. */
static int ask(const struct rig *rig, uint32_t opcode, uint64_t node, const void *arg, size_t bytes) {
    const uint64_t unique = next_unique();
    check_call(send_message(rig, opcode, node, unique, arg, bytes, 0), "the engine takes no message");
    receive(rig);
    check(reply.head.unique == unique, "a reply to something else");
    return -reply.head.error;
}

static void begin(const struct rig *rig) {
    const struct fuse_init_in in = {.major = 7, .minor = 38, .max_readahead = 1 << 20,
                                    .flags = FUSE_ASYNC_READ | FUSE_MAX_PAGES | FUSE_NO_OPEN_SUPPORT | FUSE_DO_READDIRPLUS |
                                             FUSE_PARALLEL_DIROPS};
    check(ask(rig, FUSE_INIT, 0, &in, sizeof in) == 0, "INIT fails");
    struct fuse_init_out out;
    check(reply.bytes == sizeof out, "a short answer to INIT");
    memcpy(&out, reply.data, sizeof out);
    check((out.flags & FUSE_DO_READDIRPLUS) != 0 && out.max_background == 64 && out.max_write <= 128 << 10,
          "INIT is not completed");
    check(fsx_engine_kernel(rig->engine).minor == 38, "INIT was not observed");
    const struct fuse_open_in open = {0};
    check(ask(rig, FUSE_OPEN, 1, &open, sizeof open) == ENOSYS, "OPEN is wanted");
    check(ask(rig, FUSE_OPENDIR, 1, &open, sizeof open) == 0, "OPENDIR is not answered");
}

static bool send_read(const struct rig *rig, const struct piece *piece, uint64_t unique, int flags) {
    const struct fuse_read_in in = {.offset = piece->offset, .size = piece->length};
    return send_message(rig, FUSE_READ, (uint64_t)piece->entry + 1, unique, &in, sizeof in, flags);
}

static void check_piece(const struct piece *piece) {
    check(reply.head.error == 0 && reply.bytes == piece->length &&
              memcmp(reply.data, world.truth[piece->entry] + piece->offset, piece->length) == 0,
          "wrong bytes");
}

static void read_pieces(const struct rig *rig, uint32_t rounds, uint64_t seed) {
    for (uint32_t round = 0; round < rounds; round++) {
        const struct piece piece = some_piece(&seed, LARGEST);
        const uint64_t unique = next_unique();
        check_call(send_read(rig, &piece, unique, 0), "the engine takes no message");
        receive(rig);
        check(reply.head.unique == unique, "a reply to something else");
        check_piece(&piece);
    }
}

static void look_up_all(const struct rig *rig) {
    const struct fsx_index *x = &world.index;
    for (uint32_t i = 1; i < x->entries; i++) {
        char name[FSX_NAME_MAX + 1] = {0};
        memcpy(name, x->names + x->nameoff[i], x->nameoff[i + 1] - x->nameoff[i]);
        check(ask(rig, FUSE_LOOKUP, (uint64_t)x->parent[i] + 1, name, strlen(name) + 1) == 0, "a name is not found");
        struct fuse_entry_out out;
        memcpy(&out, reply.data, sizeof out);
        check(out.nodeid == (uint64_t)x->inode[i] + 1 && out.attr.size == x->size[i], "another file");
    }
}

/* ---- scenarios ------------------------------------------------------------------------------------------------ */

static void read_by_all_ways(uint32_t rounds) {
    const struct {
        enum files files;
        enum fsx_verify verify;
        uint64_t cache_bytes;
    } ways[] = {{NO_FILES, FSX_VERIFY_FIRST, 0},
                {SHARED_FILES, FSX_VERIFY_FIRST, 64 << 20},
                {LOCAL_FILES, FSX_VERIFY_FIRST, 5 << 20},
                {LOCAL_FILES, FSX_VERIFY_NEVER, 0},
                {MIXED_FILES, FSX_VERIFY_ALWAYS, 9 << 20},
                {DAMAGED_FILES, FSX_VERIFY_FIRST, 64 << 20},
                {DAMAGED_FILES, FSX_VERIFY_ALWAYS, 0}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        struct rig rig;
        rig_start(&rig, -1, 1, ways[i].files, ways[i].verify, ways[i].cache_bytes, 0);
        begin(&rig);
        look_up_all(&rig);
        read_pieces(&rig, rounds, 1000 + i);
        struct fsx_engine_counts counts;
        do /* a request is counted when it was answered; the alarm ends this if it never is */
            fsx_engine_count(rig.engine, &counts);
        while (counts.operations[FSX_OP_READ].count != rounds);
        const uint64_t upcalls = atomic_load(&rig.upcalls);
        const bool all = ways[i].files == SHARED_FILES || ways[i].files == LOCAL_FILES;
        if (all != (upcalls == 0))
            fprintf(stderr, "way %zu: %" PRIu64 " upcalls\n", i, upcalls);
        check(all ? upcalls == 0 : upcalls > 0, "the wrong side has read it");
        rig_stop(&rig);
    }
}

/* Nonsense gets an answer or none, and does not disturb what makes sense. */
static void send_nonsense(uint32_t rounds) {
    struct rig rig;
    uint64_t seed = 99;
    rig_start(&rig, -1, 1, MIXED_FILES, FSX_VERIFY_FIRST, 1 << 20, 0);
    begin(&rig);
    for (uint32_t round = 0; round < rounds; round++) {
        uint8_t noise[300];
        for (size_t i = 0; i < sizeof noise; i++)
            noise[i] = (uint8_t)below(&seed, 8 + round % 248);
        const uint32_t opcode = 1 + (uint32_t)below(&seed, 60);
        if (opcode == FUSE_INIT)
            continue;
        if (below(&seed, 8) == 0) /* with a header of another length */
            check_call(send(rig.kernel, noise, 1 + below(&seed, sizeof noise - 1), 0) > 0, "it takes no noise");
        else
            check_call(send_message(&rig, opcode, below(&seed, world.index.entries + 5), UINT64_C(1) << 40, noise,
                                    below(&seed, sizeof noise), 0),
                       "it takes no message");
        if (round % 16 == 0) {
            const uint64_t unique = next_unique();
            check_call(send_message(&rig, FUSE_GETATTR, 1, unique, NULL, 0, 0), "it takes no message");
            do
                receive(&rig);
            while (reply.head.unique != unique);
            check(reply.head.error == 0 && reply.bytes == sizeof(struct fuse_attr_out), "no attributes");
        }
    }
    struct fsx_engine_counts counts;
    fsx_engine_count(rig.engine, &counts);
    check(counts.malformed > 0 && counts.forwarded > 0, "the nonsense made too much sense");
    rig_stop(&rig);
}

static void interrupt(void) {
    struct rig rig;
    uint64_t seed = 3;
    rig_start(&rig, -1, 1, NO_FILES, FSX_VERIFY_FIRST, 0, 0);
    begin(&rig);
    atomic_store(&rig.idle, true);
    for (int turn = 0; turn < 2; turn++) {
        const struct piece piece = some_piece(&seed, 100);
        const struct fuse_interrupt_in in = {.unique = next_unique()};
        check_call(send_read(&rig, &piece, in.unique, 0), "it takes no message");
        check_call(send_message(&rig, FUSE_INTERRUPT, 0, in.unique | 1, &in, sizeof in, 0), "it takes no message");
        receive(&rig);
        check(reply.head.unique == in.unique && reply.head.error == -EINTR, "not interrupted");
    }
    const struct piece piece = some_piece(&seed, 100);
    check_call(send_read(&rig, &piece, next_unique(), 0), "it takes no message");
    struct fsx_chunk_upcall taken; /* those that were interrupted are still fetched */
    do
        while (fsx_broker_take_upcalls(rig.broker, &taken, 1) == 0)
            poll(NULL, 0, 1);
    while (fsx_broker_give(rig.broker, taken, NULL, 0, FSX_SHARED, EIO) == 0);
    receive(&rig);
    check(reply.head.unique == last_unique && reply.head.error == -EIO, "an error that is none");
    atomic_store(&rig.idle, false);
    read_pieces(&rig, 20, 4); /* what was given up gets no second answer */
    struct fsx_engine_counts counts;
    fsx_engine_count(rig.engine, &counts);
    check(counts.interrupted == 2, "interrupts are not counted");
    rig_stop(&rig);
}

/* Nobody takes upcalls: readers wait, and get their bytes in the end, or the engine ends. */
static void fill_the_line(bool go_on) {
    struct rig rig;
    rig_start(&rig, -1, 1, NO_FILES, FSX_VERIFY_FIRST, 0, 0);
    begin(&rig);
    atomic_store(&rig.idle, true);
    const struct piece piece = {.entry = world.files[0], .offset = 1, .length = 17};
    const uint64_t first = last_unique + 2;
    const uint32_t many = go_on ? MANY : 50; /* at the end all are answered, and a socket that nobody reads holds so many */
    for (uint32_t i = 0; i < many; i++)
        check_call(send_read(&rig, &piece, next_unique(), 0), "it takes no message");
    struct fsx_cache_counts counts;
    struct fsx_read_counts reads;
    do {
        poll(NULL, 0, 1);
        fsx_broker_count(rig.broker, &counts, &reads);
    } while (counts.joined + 1 < many);
    check(counts.upcalls == 1, "a chunk is fetched more than once");
    if (go_on) {
        atomic_store(&rig.idle, false);
        for (uint32_t i = 0; i < many; i++) {
            receive(&rig);
            check(reply.head.unique == first + 2 * i, "out of order");
            check_piece(&piece);
        }
        read_pieces(&rig, 5, 6);
    }
    rig_stop(&rig);
}

/* pyfuse3 does not read: its messages wait, and that does not keep the engine from ending. */
static void do_not_listen(bool go_on) {
    struct rig rig;
    static const uint8_t noise[2000];
    rig_start(&rig, -1, 1, LOCAL_FILES, FSX_VERIFY_FIRST, 0, 0);
    begin(&rig);
    atomic_store(&rig.deaf, true);
    poll(NULL, 0, 5);
    uint32_t sent = 0;
    for (int full = 0; full < 20;) {
        const bool taken = send_message(&rig, FUSE_LISTXATTR, 1, next_unique(), noise, sizeof noise, MSG_DONTWAIT);
        sent += taken;
        full = taken ? 0 : full + 1;
        if (!taken)
            poll(NULL, 0, 1);
    }
    if (go_on) {
        atomic_store(&rig.deaf, false);
        for (uint32_t i = 0; i < sent; i++) {
            receive(&rig);
            check(reply.head.error == -EACCES, "not an answer of pyfuse3");
        }
        read_pieces(&rig, 5, 6);
    }
    rig_stop(&rig);
}

/* pyfuse3 is gone: what needs it fails, the rest goes on. */
static void lose_pyfuse3(void) {
    struct rig rig;
    rig_start(&rig, -1, 1, LOCAL_FILES, FSX_VERIFY_FIRST, 0, 0);
    begin(&rig);
    shutdown(rig.python, SHUT_RDWR);
    check(ask(&rig, FUSE_LISTXATTR, 1, "", 1) == EIO, "an answer from nobody");
    read_pieces(&rig, 10, 8);
    rig_stop(&rig);
}

static void *keep_asking(void *argument) {
    const struct rig *rig = argument;
    uint64_t seed = 12;
    uint8_t packet[LARGEST + 4096];
    for (;;) {
        const struct piece piece = some_piece(&seed, LARGEST);
        if (!send_read(rig, &piece, UINT64_C(1) << 41, 0) || recv(rig->kernel, packet, sizeof packet, 0) <= 0)
            return NULL;
    }
}

static void stop_under_load(void) {
    for (int round = 0; round < 5; round++) {
        struct rig rig;
        pthread_t client;
        rig_start(&rig, -1, 1, MIXED_FILES, FSX_VERIFY_FIRST, 5 << 20, 0);
        begin(&rig);
        check(pthread_create(&client, NULL, keep_asking, &rig) == 0, "no thread");
        poll(NULL, 0, 10 + 5 * round);
        atomic_store(&rig.ending, true);
        pthread_join(rig.answering, NULL);
        check(fsx_engine_stop(rig.engine, 20000), "the engine does not stop");
        pthread_join(client, NULL);
        rig_free(&rig);
    }
}

void drive_socket(uint32_t rounds) {
    read_by_all_ways(rounds);
    send_nonsense(rounds * 20);
    interrupt();
    fill_the_line(true);
    fill_the_line(false);
    do_not_listen(true);
    do_not_listen(false);
    lose_pyfuse3();
    stop_under_load();
}
