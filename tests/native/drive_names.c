/* drive_names.c: native/fuse/namesahead.c, with the driver for the process that lists directories.
 *
 * The index is made by hand: a directory with many names, one with few, and one so deep that no path leads there.
 */
#include "drive_world.h"

#include "fuse/nameorder.h"

#include <pthread.h>
#include <stddef.h>
#include <sys/socket.h>
#include <unistd.h>

#define MANY 20000u
#define FEW (FSX_NAMES_WORTH - 1)
#define SOME 50u
#define DEPTH 20u
#define THREADS 6u

/* Entries: root, "many", "few", "some", a chain of DEPTH directories with names of 250 bytes, then the files of "many", of
 * "few", of "some" and of the last in the chain, which has as many as "some". */
enum { ROOT, MANY_DIR, FEW_DIR, SOME_DIR, CHAIN };
#define CHAIN_END (CHAIN + DEPTH - 1)
#define FILES (CHAIN + DEPTH)
#define ENTRIES (FILES + MANY + FEW + 2 * SOME)

static struct fsx_index made;
static uint32_t parent[ENTRIES], first[ENTRIES], count[ENTRIES];
static uint64_t nameoff[ENTRIES + 1];
static uint8_t names_of[ENTRIES * 8 + DEPTH * 256];

static void make_index(void) {
    uint64_t at = 0;
    for (uint32_t i = 0; i < ENTRIES; i++) {
        nameoff[i] = at;
        char name[256] = "";
        if (i >= CHAIN && i < FILES)
            memset(name, 'd', 250);
        else if (i != ROOT)
            snprintf(name, sizeof name, i < CHAIN ? "%u" : "%07u", i);
        memcpy(names_of + at, name, strlen(name));
        at += strlen(name);
    }
    nameoff[ENTRIES] = at;
    for (uint32_t i = CHAIN + 1; i < FILES; i++)
        parent[i] = i - 1;
    const uint32_t places[] = {MANY_DIR, FEW_DIR, SOME_DIR, CHAIN_END}, sizes[] = {MANY, FEW, SOME, SOME};
    uint32_t next = FILES;
    for (uint32_t i = 0; i < 4; i++) {
        first[places[i]] = next;
        count[places[i]] = sizes[i];
        for (uint32_t k = 0; k < sizes[i]; k++)
            parent[next++] = places[i];
    }
    check(next == ENTRIES, "the index is made wrong");
    made = (struct fsx_index){.entries = ENTRIES, .parent = parent, .nameoff = nameoff, .first = first, .count = count,
                              .names = names_of};
}

/* ---- the process that lists --------------------------------------------------------------------------------------- */

static struct fsx_names_ahead *names;
static int theirs;

static void begin(uint64_t most) {
    int pair[2];
    check_call(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0, "a socket pair");
    names = fsx_names_ahead_new(&made);
    check(names != NULL && fsx_names_ahead_use(names, pair[0], most) == 0, "it is not used");
    check(fsx_names_ahead_use(names, pair[0], most) == EBUSY, "it is used twice");
    close(pair[0]);
    theirs = pair[1];
}

static void end(void) {
    fsx_names_ahead_end(names);
    struct fsx_name_order order;
    while (recv(theirs, &order, sizeof order, 0) > 0)
        ;
    fsx_names_ahead_note(names, MANY_DIR);
    fsx_names_ahead_free(names);
    close(theirs);
}

/* The next order, if there is one. */
static bool next_order(struct fsx_name_order *order) {
    const ssize_t got = recv(theirs, order, sizeof *order, MSG_DONTWAIT);
    if (got <= 0)
        return false;
    check((size_t)got > FSX_NAME_ORDER_HEAD && ((char *)order)[got - 1] == '\0', "an order is cut short");
    check(strlen(order->path) + 1 + FSX_NAME_ORDER_HEAD == (size_t)got, "a path is longer than it is");
    check(order->directory < ENTRIES && order->names > 0 && order->names <= FSX_NAMES_SLICE_MOST, "an odd order");
    check(order->bytes == order->names * 160u, "names of 7 bytes do not take 160"); /* 152 + 7, aligned to 8 */
    return true;
}

static void answer(const struct fsx_name_order *order, uint32_t done, bool over) {
    const struct fsx_name_answer said = {order->directory, order->cookie + done, done, over};
    check_call(send(theirs, &said, sizeof said, MSG_NOSIGNAL) == sizeof said, "an answer");
}

static void look_up(uint32_t directory, uint32_t times) {
    for (; times > 0; times--)
        fsx_names_ahead_note(names, directory);
}

static void check_none(const char *text) {
    struct fsx_name_order order;
    check(!next_order(&order), text);
}

static void check_counts(uint64_t listings, uint64_t listed, uint64_t directories) {
    const struct fsx_names_ahead_counts counts = fsx_names_ahead_count(names);
    check(counts.listings == listings && counts.names == listed && counts.directories == directories, "wrong counts");
}

/* ---- scenarios ---------------------------------------------------------------------------------------------------- */

static void keeps_to_what_was_looked_up(void) {
    struct fsx_name_order order;
    begin(UINT64_MAX);
    look_up(FEW_DIR, 100);
    look_up(CHAIN_END, 100);
    look_up(ENTRIES, 100);
    look_up(FILES, 100);
    look_up(MANY_DIR, FSX_NAMES_FIRST_LOOKUPS - 1);
    check_none("a directory is listed that should not be");
    uint32_t looked_up = FSX_NAMES_FIRST_LOOKUPS - 1, listed = 0, listings = 0;
    while (listed < MANY) {
        look_up(MANY_DIR, 1);
        looked_up++;
        if (!next_order(&order))
            continue;
        check(order.directory == MANY_DIR && strcmp(order.path, "1") == 0 && order.cookie == listed + 2, "another one");
        look_up(MANY_DIR, 3);
        looked_up += 3;
        check_none("two orders for one directory");
        listed += order.names;
        check(listed <= looked_up * FSX_NAMES_PER_LOOKUP, "more is listed than was paid for");
        check(order.names >= FSX_NAMES_SLICE_LEAST || listed == MANY, "a slice is too short");
        answer(&order, order.names, false);
        check_counts(++listings, listed, listed == MANY);
    }
    check(looked_up < MANY / FSX_NAMES_PER_LOOKUP + 10, "it takes too long");
    look_up(MANY_DIR, MANY / 5);
    check_none("it is listed again although the kernel has its names");
    look_up(MANY_DIR, MANY / 10);
    check(next_order(&order) && order.cookie == 2, "names that the kernel has dropped are not listed again");
    end();
}

static void is_bounded(void) {
    struct fsx_name_order order;
    begin(SOME + 10);
    look_up(MANY_DIR, 100);
    check_none("more is listed than memory is for");
    look_up(SOME_DIR, FSX_NAMES_FIRST_LOOKUPS);
    check(next_order(&order) && order.names == SOME, "what there is memory for is not listed");
    answer(&order, SOME, false);
    check_counts(1, SOME, 1);
    look_up(SOME_DIR, 200);
    check(next_order(&order) && order.names == SOME, "what is listed again counts twice");
    answer(&order, 0, true); /* it cannot be listed any more */
    check_counts(2, SOME, 1);
    end();
}

static void bears_nonsense(void) {
    struct fsx_name_order order;
    begin(UINT64_MAX);
    look_up(MANY_DIR, 20);
    check(next_order(&order), "no order");
    const struct fsx_name_answer odd[] = {{ENTRIES, 5, 5, 0}, {UINT64_MAX, 5, 5, 0}, {FEW_DIR, 5, 5, 0}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        check_call(send(theirs, &odd[i], sizeof odd[i], 0) == sizeof odd[i], "an answer");
    check_counts(0, 0, 0);
    answer(&order, 3u * MANY, false); /* more than there is */
    check_counts(1, 3u * MANY, 1);
    look_up(MANY_DIR, MANY);
    check(next_order(&order), "no order");
    order.cookie = 0;
    answer(&order, 0, false); /* backwards */
    check_counts(2, 3u * MANY, 1);
    shutdown(theirs, SHUT_RDWR); /* it dies */
    look_up(MANY_DIR, MANY);
    look_up(SOME_DIR, MANY);
    check_none("an order goes nowhere");
    end();
}

static void *look_up_much(void *argument) {
    uint64_t seed = 5 + (uint64_t)(uintptr_t)argument;
    for (uint32_t i = 0; i < 3000; i++)
        look_up(below(&seed, 5) > 0 ? MANY_DIR : SOME_DIR, 1);
    return NULL;
}

static atomic_bool done;

static void *list(void *argument) {
    uint64_t *listed = argument, seed = 99;
    for (;;) {
        struct fsx_name_order order;
        const bool last = atomic_load(&done); /* before the look at the socket */
        if (!next_order(&order)) {
            if (last)
                return NULL;
            continue;
        }
        const bool over = below(&seed, 50) == 0;
        const uint32_t part = below(&seed, 4) > 0 ? order.names : (uint32_t)below(&seed, order.names + 1);
        listed[0]++;
        listed[1] += part;
        answer(&order, part, over);
    }
}

static void all_at_once(void) {
    pthread_t threads[THREADS], lister;
    uint64_t listed[2] = {0};
    begin(UINT64_MAX);
    atomic_store(&done, false);
    check(pthread_create(&lister, NULL, list, listed) == 0, "no thread");
    for (uintptr_t i = 0; i < THREADS; i++)
        check(pthread_create(&threads[i], NULL, look_up_much, (void *)i) == 0, "no thread");
    for (uint32_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    atomic_store(&done, true);
    pthread_join(lister, NULL);
    const struct fsx_names_ahead_counts counts = fsx_names_ahead_count(names);
    check(counts.listings == listed[0] && counts.names == listed[1] && listed[0] > 0, "answers are lost");
    end();
}

void drive_names(uint32_t rounds) {
    make_index();
    keeps_to_what_was_looked_up();
    is_bounded();
    bears_nonsense();
    for (; rounds > 0; rounds--)
        all_at_once();
}
