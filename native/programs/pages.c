/* pages.c: the program fanstore-pages, which has files of a mount read so that the kernel has their bytes.
 *
 *   fanstore-pages MOUNTPOINT      started by fuse/helper.py, with a socket for its standard input (chunks/pageorder.h)
 *
 * A process of its own for the same reason as fanstore-names (names.c): a daemon that waits for its own mount cannot be
 * ended. It asks the kernel to read ahead, which does not wait for the bytes, and then for the last of them, which does: so
 * no more files than DEPTH are under way because of it, and what a program wants at the moment does not stand behind many.
 * What goes wrong is nobody's error. Ends with its socket, or with the daemon.
 */
#include "chunks/pageorder.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

/* Files that are read at a time. */
#define DEPTH 4u
/* The kernel reads no more than this ahead for one call: the size of its requests to the mount. */
#define PIECE_BYTES ((off_t)1 << 20)

struct ahead {
    int fd;
    off_t last; /* byte that was asked for */
};

/* Wait until it is there. */
static void finish(const struct ahead *ahead) {
    char byte;
    while (pread(ahead->fd, &byte, 1, ahead->last) < 0 && errno == EINTR)
        ;
    close(ahead->fd);
}

/* `mount`: on which device it is; where something else has taken its place, there is nothing to be read. */
static bool begin(const char *point, dev_t mount, const struct fsx_page_order *order, struct ahead *ahead) {
    char path[2 * PATH_MAX];
    struct stat facts;
    snprintf(path, sizeof path, "%s/%s", point, order->path);
    const int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return false;
    if (fstat(fd, &facts) != 0 || facts.st_dev != mount || !S_ISREG(facts.st_mode) || facts.st_size == 0) {
        close(fd);
        return false;
    }
    const off_t bytes = order->bytes < (uint64_t)facts.st_size ? (off_t)order->bytes : facts.st_size;
    for (off_t at = 0; at < bytes; at += PIECE_BYTES)
        posix_fadvise(fd, at, bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES, POSIX_FADV_WILLNEED);
    *ahead = (struct ahead){.fd = fd, .last = bytes - 1};
    return true;
}

int main(int argc, char **argv) {
    /* Signals are for the daemon, which ends this: a warning to a whole process group is not the end of it. */
    const int ignored[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGPIPE};
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++)
        signal(ignored[i], SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct stat facts;
    if (argc != 2 || stat(argv[1], &facts) != 0)
        return 2;
    struct ahead under_way[DEPTH];
    unsigned first = 0, count = 0;
    for (;;) {
        struct fsx_page_order order;
        const ssize_t got = recv(STDIN_FILENO, &order, sizeof order, count > 0 ? MSG_DONTWAIT : 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (count == DEPTH || (got < 0 && errno == EAGAIN && count > 0)) {
            finish(&under_way[first]);
            first = (first + 1) % DEPTH;
            count--;
        }
        if (got < 0 && errno == EAGAIN)
            continue;
        if (got <= (ssize_t)FSX_PAGE_ORDER_HEAD || ((const char *)&order)[got - 1] != '\0')
            return got == 0 ? 0 : 1;
        if (begin(argv[1], facts.st_dev, &order, &under_way[(first + count) % DEPTH]))
            count++;
    }
}
