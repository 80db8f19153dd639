/* sockets.h: the connections of a process to its daemon: a few of a kind, each in the hands of one thread at a time.
 *
 * They lie in memory that is empty in the child of a fork, which connects anew, and have high numbers that programs do not see
 * (table.c). A program can close them all the same, with a system call: so each is looked at before it is used.
 */
#ifndef FANSTORE_PRELOAD_SOCKETS_H
#define FANSTORE_PRELOAD_SOCKETS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum fsx_socket_kind { FSX_ASKING, FSX_FETCHING, FSX_SOCKET_KINDS }; /* ask.c, cache.c */

/* All zeros: not connected. */
struct fsx_socket {
    _Atomic uint32_t busy;
    int open;        /* number of its descriptor + 1 */
    uint32_t number; /* of the last request: its user's */
    ino_t inode;
};

/* False without memory. */
bool fsx_sockets_start(void);

/* Until something can be done with the descriptor; false when it is too late. */
bool fsx_wait_for(int fd, short events, int64_t end_ns);

/* One that nobody uses, connected or not; NULL if there is none in time. All signals are blocked until it is given back. */
struct fsx_socket *fsx_socket_claim(enum fsx_socket_kind kind, int64_t end_ns, uint64_t *signals);
void fsx_socket_give_back(enum fsx_socket_kind kind, struct fsx_socket *socket, uint64_t signals);

/* Is it open, and still what it was? */
bool fsx_socket_is_open(enum fsx_socket_kind kind, struct fsx_socket *socket);
/* Keep this descriptor as it; false, and closed, if that is not possible. */
bool fsx_socket_open(enum fsx_socket_kind kind, struct fsx_socket *socket, int fd);
void fsx_socket_close(enum fsx_socket_kind kind, struct fsx_socket *socket);

/* In the child of a fork. */
void fsx_sockets_forked(void);
/* A descriptor of ours has to make room; true if it was one of these. */
bool fsx_sockets_move(int fd);

#endif
