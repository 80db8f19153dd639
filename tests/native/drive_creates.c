/* drive_creates.c: threads that create, sync and close outputs, as engine threads do, while another one has Python's turns. */
#include "drive_world.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "outputs/outputs.h"

#define CREATORS 3u
#define PARENT (FSX_OUTPUT_END - 1)

struct creator {
    struct fsx_outputs *outputs;
    pthread_t thread;
    uint32_t number, rounds;
    uint64_t created, noted;
};

static atomic_bool creating;

static struct fsx_wanted wanted_of(char *name, uint32_t creator, uint32_t round) {
    const int bytes = snprintf(name, 64, "file %u of %u", (unsigned)round, (unsigned)creator);
    return (struct fsx_wanted){.parent = PARENT, .name = (const uint8_t *)name, .name_bytes = (size_t)bytes, .mode = 0644,
                               .flags = O_WRONLY, .valid_s = 1};
}

static void *create_main(void *argument) {
    struct creator *creator = argument;
    struct fsx_outputs *outputs = creator->outputs;
    char name[64];
    for (uint32_t round = 0; round < creator->rounds; round++) {
        /* Half of the names are wanted by the next creator, too: one of them gets each. */
        const uint32_t rival = round % 2 == 0 ? creator->number : creator->number / 2;
        const struct fsx_wanted wanted = wanted_of(name, rival, round);
        struct fsx_created created;
        if (!fsx_outputs_create(outputs, &wanted, &created))
            continue; /* it is there already, or Python must take over first */
        check(fsx_outputs_has_name(outputs, PARENT, wanted.name, wanted.name_bytes), "a new name is denied");
        const uint64_t inode = created.entry.nodeid;
        check(created.entry.attr.ino == inode && created.entry.attr.mode == (S_IFREG | 0644), "not what was wanted");
        creator->created++;
        uint64_t value = inode;
        uint8_t answer[16] __attribute__((aligned(8)));
        size_t bytes;
        const struct fsx_task task = {.opcode = FUSE_WRITE, .inode = inode, .length = sizeof value,
                                      .data = (const uint8_t *)&value};
        check(fsx_outputs_do(outputs, &task, answer, &bytes) == 0, "a new file cannot be written");
        bool first;
        int error = 0;
        const struct fsx_task sync = {.opcode = FUSE_FSYNC, .inode = inode};
        /* False: or Python must, who has too much to take. */
        const bool synced = round % 8 == 0 && fsx_outputs_sync(outputs, &sync, &first, &error);
        check(error == 0, "a new file cannot be synced");
        const bool closed = fsx_outputs_close(outputs, inode, &first);
        check(!closed || (!synced && !fsx_outputs_close(outputs, inode, &first)), "it was noted already");
        creator->noted += synced + closed;
        fsx_outputs_release(outputs, created.open.fh);
    }
    return NULL;
}

struct taker {
    struct fsx_outputs *outputs;
    pthread_t thread;
    uint64_t next, taken, noted;
};

static void take_over(struct taker *taker, size_t count, const struct fsx_create *files) {
    for (size_t i = 0; i < count; i++) {
        check(!files[i].noted || files[i].size == 8, "noted before it was written");
        taker->noted += files[i].noted;
        if (files[i].name_bytes == 0) {
            check(files[i].noted && files[i].inode < taker->next, "nothing happened to it");
            continue;
        }
        check(files[i].inode == taker->next++, "a number was left out");
        check(files[i].parent == PARENT && memcmp(files[i].name, "file ", 5) == 0, "not what was created");
        taker->taken++;
    }
}

static void *take_main(void *argument) {
    struct taker *taker = argument;
    struct fsx_creates *creates = fsx_outputs_creates(taker->outputs);
    bool last = false;
    for (uint64_t round = 0; !last; round++) {
        last = !atomic_load(&creating);
        size_t count;
        if (!fsx_creates_any(creates) && !last)
            continue;
        fsx_creates_begin(creates);
        const struct fsx_create *taken = fsx_creates_take(creates, &count);
        take_over(taker, count, taken);
        if (round % 2 == 0) { /* Python makes something itself */
            taker->next++;
            fsx_outputs_end_turn(taker->outputs, taker->next, fsx_creates_journal_end(creates));
        } else {
            fsx_creates_end(creates);
        }
    }
    return NULL;
}

static uint64_t count_objects(int folder, uint64_t first, uint64_t end) {
    uint64_t found = 0;
    for (uint64_t inode = first; inode < end; inode++) {
        char name[20];
        snprintf(name, sizeof name, "%llx", (unsigned long long)inode);
        found += unlinkat(folder, name, 0) == 0;
    }
    return found;
}

void drive_creates(uint32_t rounds, int folder) {
    const int journal = openat(folder, "journal", O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    check_call(journal >= 0, "journal");
    struct fsx_outputs *outputs = fsx_outputs_new(folder, world.index.entries, true, true, true, journal, 0);
    check_call(outputs != NULL, "no outputs");
    const struct fuse_attr_out attributes = {.attr = {.ino = PARENT}};
    char name[64];
    struct fsx_created created;
    struct fsx_wanted wanted = wanted_of(name, 0, 0);
    check(!fsx_outputs_create(outputs, &wanted, &created), "created before Python has said so");
    struct taker taker = {.outputs = outputs, .next = FSX_OUTPUT_FIRST};
    fsx_creates_begin(fsx_outputs_creates(outputs));
    fsx_outputs_end_turn(outputs, taker.next, 0);
    check(!fsx_outputs_create(outputs, &wanted, &created), "created in a directory that is not there");
    check(fsx_outputs_describe(outputs, &attributes), "no memory");
    atomic_store(&creating, true);
    struct creator creators[CREATORS];
    check(pthread_create(&taker.thread, NULL, take_main, &taker) == 0, "no thread");
    for (uint32_t i = 0; i < CREATORS; i++) {
        creators[i] = (struct creator){.outputs = outputs, .number = i, .rounds = rounds};
        check(pthread_create(&creators[i].thread, NULL, create_main, &creators[i]) == 0, "no thread");
    }
    uint64_t made = 0, noted = 0;
    for (uint32_t i = 0; i < CREATORS; i++) {
        pthread_join(creators[i].thread, NULL);
        made += creators[i].created;
        noted += creators[i].noted;
    }
    atomic_store(&creating, false);
    pthread_join(taker.thread, NULL);
    check(made > rounds && made == taker.taken && noted == taker.noted, "not every file was taken over once");
    check(count_objects(folder, FSX_OUTPUT_FIRST, taker.next) == made, "not all files are there");
    struct stat facts;
    check_call(fstat(journal, &facts) == 0, "journal");
    check(facts.st_size == fsx_creates_journal_end(fsx_outputs_creates(outputs)), "the journal ends elsewhere");
    /* A record of either kind has some sixty bytes. */
    check((uint64_t)facts.st_size > 40 * (made + noted) && (uint64_t)facts.st_size < 100 * (made + noted), "not noted");
    fsx_outputs_free(outputs);
    check(count_objects(folder, taker.next, taker.next + 4096) == 0, "files that were made ahead are left");
    close(journal);
    check_call(unlinkat(folder, "journal", 0) == 0, "journal");
}
