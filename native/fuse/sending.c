/* sending.c: see sending.h. */
#include "fuse/sending.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>

struct waiting {
    struct waiting *next;
    size_t bytes;
    char packet[];
};

struct fsx_sender {
    int socket;
    fsx_unsent *unsent;
    void *context;
    pthread_mutex_t lock; /* guards what follows; never held during a system call */
    bool busy;            /* a thread waits for the socket, and will send the line */
    struct waiting *first, *last;
};

struct fsx_sender *fsx_sender_new(int socket, fsx_unsent *unsent, void *context) {
    struct fsx_sender *sender = calloc(1, sizeof *sender);
    if (sender == NULL)
        return NULL;
    sender->socket = socket;
    sender->unsent = unsent;
    sender->context = context;
    pthread_mutex_init(&sender->lock, NULL);
    return sender;
}

void fsx_sender_free(struct fsx_sender *sender) {
    if (sender == NULL)
        return;
    pthread_mutex_destroy(&sender->lock); /* the line is empty: who is busy does not leave before */
    free(sender);
}

/* 0 or an errno. */
static int send_packet(const struct fsx_sender *sender, const void *packet, size_t bytes, int flags) {
    for (;;) {
        if (send(sender->socket, packet, bytes, MSG_NOSIGNAL | flags) >= 0)
            return 0;
        if (errno != EINTR)
            return errno;
    }
}

/* Put a copy in the line. EAGAIN if nobody waits for the socket: then that is for the caller to do. Or ENOMEM. */
static int put_in_line(struct fsx_sender *sender, const void *packet, size_t bytes) {
    struct waiting *waiting = malloc(sizeof *waiting + bytes);
    if (waiting == NULL)
        return ENOMEM;
    waiting->next = NULL;
    waiting->bytes = bytes;
    memcpy(waiting->packet, packet, bytes);
    pthread_mutex_lock(&sender->lock);
    const bool ours = !sender->busy;
    sender->busy = true;
    if (!ours) {
        *(sender->first != NULL ? &sender->last->next : &sender->first) = waiting;
        sender->last = waiting;
    }
    pthread_mutex_unlock(&sender->lock);
    if (ours)
        free(waiting);
    return ours ? EAGAIN : 0;
}

/* The next packet of the line; NULL if there is none, and nobody is busy any more. */
static struct waiting *take(struct fsx_sender *sender) {
    pthread_mutex_lock(&sender->lock);
    struct waiting *waiting = sender->first;
    if (waiting != NULL)
        sender->first = waiting->next;
    else
        sender->busy = false;
    pthread_mutex_unlock(&sender->lock);
    return waiting;
}

void fsx_sender_send(struct fsx_sender *sender, const void *packet, size_t bytes) {
    int error = send_packet(sender, packet, bytes, MSG_DONTWAIT);
    if (error == EAGAIN)
        error = put_in_line(sender, packet, bytes);
    const bool busy = error == EAGAIN;
    if (busy)
        error = send_packet(sender, packet, bytes, 0);
    if (error != 0)
        sender->unsent(sender->context, packet, bytes);
    for (struct waiting *waiting; busy && (waiting = take(sender)) != NULL; free(waiting))
        if (send_packet(sender, waiting->packet, waiting->bytes, 0) != 0)
            sender->unsent(sender->context, waiting->packet, waiting->bytes);
}
