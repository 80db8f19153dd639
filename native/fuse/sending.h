/* sending.h: packets to pyfuse3, which may not read them for a while, without holding up more than one thread.
 *
 * One thread at a time waits for the socket; what others want to send meanwhile is put in a line, which that thread sends
 * as well before it goes on. Owns the packets in the line. Any thread.
 */
#ifndef FANSTORE_FUSE_SENDING_H
#define FANSTORE_FUSE_SENDING_H

#include <stddef.h>

struct fsx_sender;

/* What is done with a packet that cannot be sent any more; on the thread that tried. */
typedef void fsx_unsent(void *context, const void *packet, size_t bytes);

/* NULL without memory. The socket stays the caller's. */
struct fsx_sender *fsx_sender_new(int socket, fsx_unsent *unsent, void *context);
/* Nobody may use it any more. NULL is allowed. */
void fsx_sender_free(struct fsx_sender *sender);

/* Send a packet, or put it in the line. May block, for as long as the other end reads nothing; a shutdown of the socket
 * ends that. */
void fsx_sender_send(struct fsx_sender *sender, const void *packet, size_t bytes);

#endif
