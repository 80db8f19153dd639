/* drive_rig.c: see drive_rig.h. */
#include "drive_rig.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define PACKET 300000u

static void answer_init(int socket, const uint8_t *packet, const struct fuse_in_header *head) {
    struct fuse_init_in in;
    memcpy(&in, packet + sizeof *head, sizeof in);
    struct {
        struct fuse_out_header head;
        struct fuse_init_out out;
    } reply = {.head = {.len = sizeof reply, .unique = head->unique},
               .out = {.major = 7, .minor = in.minor < 31 ? in.minor : 31, .max_readahead = in.max_readahead,
                       .flags = in.flags & (FUSE_ASYNC_READ | FUSE_MAX_PAGES | FUSE_BIG_WRITES),
                       .max_background = 12, .congestion_threshold = 9, .max_write = 1 << 20, .time_gran = 1,
                       .max_pages = 256}};
    check_call(send(socket, &reply, sizeof reply, MSG_NOSIGNAL) == sizeof reply, "INIT is not answered");
}

/* A real kernel forgets a name, and will look it up again. */
static void forget_name(int socket, uint64_t *seed) {
    const struct fsx_index *x = &world.index;
    const uint32_t entry = world.files[below(seed, world.file_count)];
    const uint32_t bytes = (uint32_t)(x->nameoff[entry + 1] - x->nameoff[entry]);
    struct {
        struct fuse_out_header head;
        struct fuse_notify_inval_entry_out out;
        char name[FSX_NAME_MAX + 1];
    } packet = {.head = {.error = FUSE_NOTIFY_INVAL_ENTRY},
                .out = {.parent = (uint64_t)x->parent[entry] + 1, .namelen = bytes}};
    memcpy(packet.name, x->names + x->nameoff[entry], bytes);
    packet.head.len = (uint32_t)(sizeof packet.head + sizeof packet.out) + bytes + 1;
    send(socket, &packet, packet.head.len, MSG_NOSIGNAL);
}

/* pyfuse3: answers INIT, and knows nothing else. */
static void *pyfuse3_main(void *argument) {
    struct rig *rig = argument;
    uint8_t *packet = malloc(PACKET);
    check(packet != NULL, "no memory");
    uint64_t seed = 13;
    while (!atomic_load(&rig->ending)) {
        if (rig->kernel < 0 && !atomic_load(&rig->deaf))
            forget_name(rig->python, &seed);
        struct pollfd ready = {.fd = rig->python, .events = POLLIN};
        if (atomic_load(&rig->deaf) || poll(&ready, 1, 2) != 1) {
            poll(NULL, 0, 1);
            continue;
        }
        const ssize_t got = recv(rig->python, packet, PACKET, 0);
        if (got <= 0)
            break;
        struct fuse_in_header head;
        check((size_t)got >= sizeof head, "a message that is none was passed on");
        memcpy(&head, packet, sizeof head);
        check(head.len == (size_t)got, "a message of another length was passed on");
        if (head.opcode == FUSE_INIT) {
            answer_init(rig->python, packet, &head);
            continue;
        }
        atomic_fetch_add(&rig->forwarded, 1);
        /* Told ENOSYS, a real kernel never asks again; one question is to come again and again. */
        const int error = head.opcode == FUSE_LISTXATTR ? -EACCES : -ENOSYS;
        struct fuse_out_header out = {.len = sizeof out, .error = error, .unique = head.unique};
        if (rig->kernel < 0 && error == -EACCES && atomic_load(&rig->forwarded) % 2 == 0)
            out.len++; /* a real kernel does not take this: the engine has to find other words */
        if (head.opcode != FUSE_FORGET && head.opcode != FUSE_BATCH_FORGET && head.opcode != FUSE_INTERRUPT)
            send(rig->python, &out, sizeof out, MSG_NOSIGNAL);
    }
    free(packet);
    return NULL;
}

/* An output that is not here: empty. */
static void answer_output(struct rig *rig, const struct fsx_upcall *c) {
    char name[20];
    switch (c->kind) {
    case FSX_UPCALL_MAKE_LOCAL:
        snprintf(name, sizeof name, "%" PRIx64, c->number);
        const int fd = openat(rig->folder, name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        check_call(fd >= 0, name);
        close(fd);
        atomic_fetch_add(&rig->made_local, 1);
        fsx_engine_enter(rig->engine);
        fsx_engine_resume(rig->engine, c->token);
        fsx_engine_resume(rig->engine, c->token); /* an old token means nothing */
        fsx_engine_leave(rig->engine);
        return;
    default:
        check(c->kind == FSX_UPCALL_OUTPUT_READ, "an unknown upcall");
        fsx_engine_answer(rig->engine, c->token, NULL, 0, 0);
    }
}

void bring(struct fsx_broker *broker, struct fsx_chunk_upcall upcall) {
    check(upcall.entry < world.index.entries && world.truth[upcall.entry] != NULL, "an upcall for what is no file");
    const struct fsx_stored chunk = fsx_chunk_of(&world.index, upcall.entry, upcall.number);
    uint8_t *stored = malloc(chunk.stored_bytes + 1);
    check(stored != NULL, "no memory");
    const struct iovec part = {.iov_base = stored, .iov_len = chunk.stored_bytes};
    check_call(preadv(world.part[world.index.part[upcall.entry]], &part, 1, (off_t)chunk.position) ==
                   (ssize_t)chunk.stored_bytes, "a partition is too short");
    fsx_broker_give(broker, upcall, stored, chunk.stored_bytes, FSX_SHARED, 0);
    free(stored);
}

/* Python: knows all bytes. Looks at the counters meanwhile, as fanstore-stat does. */
static void *upcall_main(void *argument) {
    struct rig *rig = argument;
    struct fsx_engine_counts *counts = malloc(sizeof *counts);
    check(counts != NULL, "no memory");
    while (!atomic_load(&rig->ending)) {
        struct pollfd ready = {.fd = rig->wake, .events = POLLIN};
        poll(&ready, 1, 2);
        uint64_t count;
        if ((ready.revents & POLLIN) != 0)
            check_call(read(rig->wake, &count, sizeof count) == sizeof count, "the eventfd cannot be read");
        fsx_engine_count(rig->engine, counts);
        (void)fsx_engine_kernel(rig->engine);
        struct fsx_upcall taken[7];
        for (size_t found; !atomic_load(&rig->idle) && (found = fsx_engine_take(rig->engine, taken, 7)) > 0;)
            for (size_t i = 0; i < found; i++) {
                answer_output(rig, &taken[i]);
                fsx_engine_answer(rig->engine, taken[i].token, NULL, 0, 0); /* an old token means nothing */
                fsx_engine_answer(rig->engine, taken[i].token ^ 0xFFFF0000u, NULL, 0, EIO);
            }
        struct fsx_chunk_upcall upcalls[7];
        for (size_t found; !atomic_load(&rig->idle) && (found = fsx_broker_take_upcalls(rig->broker, upcalls, 7)) > 0;)
            for (size_t i = 0; i < found; i++) {
                if (rig->delay_us > 0)
                    usleep(rig->delay_us);
                atomic_fetch_add(&rig->upcalls, 1);
                bring(rig->broker, upcalls[i]);
            }
    }
    free(counts);
    return NULL;
}

static void use_files(struct rig *rig, enum files files) {
    for (uint32_t p = 0; p < world.parts && files != NO_FILES; p++) {
        if (files == MIXED_FILES && p % 3 == 0)
            continue;
        const uint8_t number = files == SHARED_FILES || (files == MIXED_FILES && p % 3 == 1) ? 1 : 2;
        const int fd = files == DAMAGED_FILES ? world.damaged[p] : world.part[p];
        check(fsx_files_use(fsx_broker_files(rig->broker), p, fd, number, false) == 0, "a file is not used");
    }
}

void rig_start(struct rig *rig, int device, uint32_t workers, enum files files, enum fsx_verify verify,
               uint64_t cache_bytes, uint32_t delay_us) {
    rig_start_with(rig, NULL, -1, device, workers, files, verify, cache_bytes, delay_us);
}

void rig_start_with(struct rig *rig, struct fsx_outputs *outputs, int folder, int device, uint32_t workers,
                    enum files files, enum fsx_verify verify, uint64_t cache_bytes, uint32_t delay_us) {
    int link[2], socket[2];
    memset(rig, 0, sizeof *rig);
    rig->outputs = outputs;
    rig->folder = folder;
    rig->delay_us = delay_us;
    rig->kernel = -1;
    if (device < 0) {
        check_call(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, link) == 0, "no socket");
        const int bytes = 200 << 10;
        for (int i = 0; i < 2; i++)
            setsockopt(link[i], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
        rig->kernel = link[0];
        device = link[1];
    }
    check_call(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, socket) == 0, "no socket");
    rig->python = socket[0];
    rig->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    rig->marks = calloc((size_t)(world.index.entries + world.index.chunk_records), 1);
    rig->broker = fsx_broker_new(&(struct fsx_broker_settings){
        .index = &world.index, .marks = rig->marks, .verify = verify, .capacity_bytes = cache_bytes, .shared_readers = 2,
        .loaders = 2, .cores = 2, .wake = rig->wake});
    check(rig->wake >= 0 && rig->marks != NULL && rig->broker != NULL, "no memory");
    check(fsx_broker_start(rig->broker) == 0, "no thread");
    use_files(rig, files);
    const struct fsx_engine_settings settings = {
        .tree = {.index = &world.index, .uid = 1, .gid = 2, .hidden = -1, .blocks = 5, .files = 6,
                 .outputs = outputs},
        .broker = rig->broker, .device = device, .socket = socket[1], .wake = rig->wake, .workers = workers,
        .max_background = 64};
    rig->engine = fsx_engine_start(&settings);
    check_call(rig->engine != NULL, "the engine does not start");
    close(socket[1]);
    close(device);
    check(pthread_create(&rig->pyfuse3, NULL, pyfuse3_main, rig) == 0, "no thread");
    check(pthread_create(&rig->answering, NULL, upcall_main, rig) == 0, "no thread");
}

void rig_stop(struct rig *rig) {
    atomic_store(&rig->ending, true);
    pthread_join(rig->answering, NULL);
    check(fsx_engine_stop(rig->engine, 20000), "the engine does not stop");
    rig_free(rig);
}

void rig_free(struct rig *rig) {
    pthread_join(rig->pyfuse3, NULL);
    fsx_broker_end(rig->broker);
    waits_for = "the end of the broker";
    while (fsx_broker_running(rig->broker) > 0)
        usleep(200);
    fsx_broker_free(rig->broker);
    free(rig->marks);
    close(rig->python);
    close(rig->wake);
    if (rig->kernel >= 0)
        close(rig->kernel);
}
