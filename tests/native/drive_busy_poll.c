/* drive_busy_poll.c: native/fuse/busy_poll.c with threads that wait for requests of a device on which this is the kernel.
 *
 * The device is a pipe of packets, which every thread has opened for itself, as it would clone /dev/fuse. Each request says what
 * the thread that takes it is to believe of it, and to do. Time is the scenario's: requests come a microsecond apart.
 */
#include "drive_world.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "fuse/busy_poll.h"

#define THREADS 5u
#define PROGRAM 7u

enum kind {
    QUICK,
    SLOW, /* may take long, and does: until the door is open */
    HELD  /* is thought to be quick, and is not */
};

struct message {
    enum kind kind;
    uint32_t thread;
    uint64_t number;
};

static struct fsx_busy_poll *polling;
static atomic_bool stopping, door;
static _Atomic(uint64_t) answered, at_door;
static _Atomic(uint64_t) clock_ns;

static void *wait_main(void *argument) {
    struct fsx_poller poller = {.device = *(const int *)argument};
    struct message message;
    while (!atomic_load(&stopping)) {
        const ssize_t got = fsx_busy_poll_read(polling, &poller, &message, sizeof message);
        if (got == 0)
            break; /* the kernel's end is closed */
        if (got < 0) {
            check_call(errno == EAGAIN || errno == EINTR, "the device");
            continue;
        }
        check(got == sizeof message, "half a request");
        if (message.kind == SLOW)
            fsx_busy_poll_slow(polling);
        else
            fsx_busy_poll_quick(polling, message.thread, atomic_fetch_add(&clock_ns, 1000));
        if (message.kind != QUICK) {
            atomic_fetch_add(&at_door, 1);
            while (!atomic_load(&door))
                poll(NULL, 0, 1);
        }
        atomic_fetch_add(&answered, 1);
    }
    close(poller.device);
    return NULL;
}

/* Requests so far, and those taken in a polling phase; on a busy machine one may end before it has taken any. */
static uint64_t sent, taken;

static void send_request(int kernel, enum kind kind, uint32_t thread) {
    const struct message message = {.kind = kind, .thread = thread, .number = ++sent};
    check_call(write(kernel, &message, sizeof message) == sizeof message, "the device takes no request");
}

/* Until all but `held` requests were answered. */
static void wait_answered(uint64_t held) {
    while (atomic_load(&answered) < sent - held)
        sched_yield();
}

static void ask(int kernel, uint32_t thread, uint64_t held) {
    send_request(kernel, QUICK, thread);
    wait_answered(held);
}

/* One program asks until it is polled for. How often that was so far. */
static uint64_t ask_until_polling(int kernel) {
    waits_for = "a polling phase";
    const uint64_t before = fsx_busy_poll_count(polling).times;
    while (fsx_busy_poll_count(polling).times == before)
        ask(kernel, PROGRAM, 0);
    for (int i = 0; i < 20; i++) /* all are parked, unless it has ended */
        ask(kernel, PROGRAM, 0);
    return before + 1;
}

/* What somebody waits for must not be waited for by others, whatever was thought of it. */
static void hold_one(int kernel, enum kind kind) {
    waits_for = "answers beside one that is held up";
    atomic_store(&door, false);
    const uint64_t before = atomic_load(&at_door);
    send_request(kernel, kind, PROGRAM);
    while (atomic_load(&at_door) == before)
        sched_yield();
    for (int i = 0; i < 10; i++)
        ask(kernel, PROGRAM + 1, 1);
    atomic_store(&door, true);
    wait_answered(0);
}

/* All but the last of them at once are held up. */
static void hold_many(int kernel) {
    waits_for = "an answer beside many that are held up";
    atomic_store(&door, false);
    const uint64_t before = atomic_load(&at_door);
    for (uint32_t i = 1; i < THREADS; i++)
        send_request(kernel, i % 2 == 0 ? SLOW : HELD, PROGRAM);
    while (atomic_load(&at_door) < before + THREADS - 1)
        sched_yield();
    ask(kernel, PROGRAM, THREADS - 1);
    atomic_store(&door, true);
    wait_answered(0);
}

static void wait_until_over(void) {
    waits_for = "the end of a polling phase";
    uint64_t time_ns;
    do { /* which goes on while there is one */
        time_ns = fsx_busy_poll_count(polling).time_ns;
        poll(NULL, 0, 1);
    } while (fsx_busy_poll_count(polling).time_ns != time_ns);
}

static void live_once(uint64_t round) {
    int ends[2], devices[THREADS];
    check_call(pipe2(ends, O_DIRECT | O_CLOEXEC) == 0, "no pipe");
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", ends[0]);
    polling = fsx_busy_poll_new(THREADS);
    check(polling != NULL, "no memory");
    atomic_store(&stopping, false);
    pthread_t threads[THREADS];
    for (uint32_t i = 0; i < THREADS; i++) {
        devices[i] = open(path, O_RDONLY | O_CLOEXEC);
        check_call(devices[i] >= 0, path);
        check(pthread_create(&threads[i], NULL, wait_main, &devices[i]) == 0, "no thread");
    }
    close(ends[0]);
    const uint64_t times = ask_until_polling(ends[1]);
    if (round % 4 == 0)
        hold_one(ends[1], SLOW);
    if (round % 4 == 1)
        hold_one(ends[1], HELD);
    if (round % 4 == 2)
        hold_many(ends[1]);
    if (round % 4 != 3) { /* or the end comes in a polling phase, or just after one */
        check(ask_until_polling(ends[1]) > times, "polled once");
        wait_until_over();
        ask(ends[1], PROGRAM, 0);
    }
    taken += fsx_busy_poll_count(polling).requests;
    waits_for = "the end of all threads";
    atomic_store(&stopping, true);
    fsx_busy_poll_end(polling);
    close(ends[1]);
    for (uint32_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    fsx_busy_poll_free(polling);
}

/* Several programs that ask in turns are not polled for, nor is one thread of ours. */
static void never(void) {
    for (uint32_t threads = 1; threads <= THREADS; threads += THREADS - 1) {
        polling = fsx_busy_poll_new(threads);
        check(polling != NULL, "no memory");
        for (uint32_t i = 0; i < 1000; i++)
            fsx_busy_poll_quick(polling, threads == 1 ? PROGRAM : PROGRAM + i % 2, i);
        for (uint32_t i = 0; i < 1000; i++) /* nor one that takes its time */
            fsx_busy_poll_quick(polling, PROGRAM, (uint64_t)i * 1000000);
        check(fsx_busy_poll_count(polling).times == 0, "polled for nothing");
        fsx_busy_poll_free(polling);
    }
}

void drive_busy_poll(uint32_t rounds) {
    cpu_set_t ours;
    never();
    if (sched_getaffinity(0, sizeof ours, &ours) == 0 && CPU_COUNT(&ours) == 1)
        return; /* nobody polls */
    for (uint32_t round = 0; round < rounds; round++)
        live_once(round);
    check(taken > 0, "nothing was taken in a polling phase");
}
