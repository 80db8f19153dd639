/* names.c: the program fanstore-names, which lists directories of a mount so that the kernel knows the names in them.
 *
 *   fanstore-names MOUNTPOINT      started by fuse/helper.py, with a socket for its standard input (nameorder.h)
 *
 * A process of its own, because a daemon that waits for its own mount cannot be ended (docs/concurrency.md, invariant 10): it
 * holds no descriptor of /dev/fuse, so that with the daemon the connection ends, and with that whatever this waits for. In
 * C, because Python would take a hundredth of a second and 10 MB to do what are four system calls.
 *
 * No directory stays open from one order to the next: an unmount finds the mount busy for one short listing at most. What
 * goes wrong is nobody's error: the answer says that there is no more to be had. Ends with its socket, or with the daemon.
 */
#include "fuse/nameorder.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* For the most that is ordered, with names of 255 bytes; only what is used takes memory. */
#define BUFFER_BYTES (512u << 10)

/* As getdents64(2) has it. */
struct entry {
    uint64_t inode;
    int64_t next;
    uint16_t bytes;
    uint8_t type;
    char name[];
};

static _Alignas(8) char buffer[BUFFER_BYTES];

/* Names from where the directory stands, until there are enough. */
static void list(int fd, const struct fsx_name_order *order, struct fsx_name_answer *answer) {
    const size_t room = order->bytes < BUFFER_BYTES ? order->bytes : BUFFER_BYTES;
    while (answer->names < order->names) {
        const long got = syscall(SYS_getdents64, fd, buffer, room);
        if (got <= 0) {
            answer->over = 1;
            return;
        }
        for (long at = 0; at < got; answer->names++) {
            const struct entry *entry = (const struct entry *)(buffer + at);
            answer->cookie = (uint64_t)entry->next;
            at += entry->bytes;
        }
    }
}

/* `mount`: on which device it is; where something else has taken its place, there is nothing to be listed. */
static struct fsx_name_answer obey(const char *point, dev_t mount, const struct fsx_name_order *order) {
    struct fsx_name_answer answer = {.directory = order->directory, .cookie = order->cookie};
    char path[PATH_MAX];
    struct stat facts;
    const int bytes = snprintf(path, sizeof path, "%s/%s", point, order->path);
    const int fd = bytes < (int)sizeof path ? open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    if (fd >= 0 && fstat(fd, &facts) == 0 && facts.st_dev == mount && lseek(fd, (off_t)order->cookie, SEEK_SET) >= 0)
        list(fd, order, &answer);
    else
        answer.over = 1;
    if (fd >= 0)
        close(fd);
    return answer;
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
    for (;;) {
        struct fsx_name_order order;
        const ssize_t got = recv(STDIN_FILENO, &order, sizeof order, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= (ssize_t)FSX_NAME_ORDER_HEAD || ((const char *)&order)[got - 1] != '\0')
            return got == 0 ? 0 : 1;
        const struct fsx_name_answer answer = obey(argv[1], facts.st_dev, &order);
        if (send(STDIN_FILENO, &answer, sizeof answer, MSG_NOSIGNAL) < 0)
            return 1;
    }
}
