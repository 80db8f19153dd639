/* fetchers.h: a face of the broker: programs on this node that ask for chunks and copy them from shared memory.
 *
 * Each asks over a socket of its own (format/sharedcache.h has the packets), one request at a time. The chunk is wanted of the
 * broker, and leased until the program asks for the next one, for a second, or, if it says so, until it closes the socket: so
 * nothing is kept for a program that has died, or stands still. What a program sends may be anything; it costs it the socket.
 *
 * Owns the sockets and the threads that wait for requests, which read files of this node themselves. `lock` guards the list of
 * fetchers and all leases; it comes before that of the broker, and is not held while anything is read or sent.
 */
#ifndef FANSTORE_CLIENTS_FETCHERS_H
#define FANSTORE_CLIENTS_FETCHERS_H

#include "chunks/broker.h"

/* Of what is held until a socket is closed, at most this part of the cache. */
#define FSX_HELD_PART 2u

struct fsx_fetchers;

/* Makes the broker share its memory. NULL with errno. */
struct fsx_fetchers *fsx_fetchers_new(struct fsx_broker *broker, uint32_t threads, uint32_t most, uint64_t cache_bytes);
/* A new socket, its other end: the caller's. -1 with errno, EUSERS if there are `most` already. */
int fsx_fetchers_add(struct fsx_fetchers *fetchers);
/* From now on nobody is answered. The threads end soon: how many have not. */
uint32_t fsx_fetchers_end(struct fsx_fetchers *fetchers);
/* After their end, and that of the broker's threads, before the broker is freed. */
void fsx_fetchers_free(struct fsx_fetchers *fetchers);

struct fsx_fetcher_counts {
    uint64_t fetchers, requests, refused, leases, held_bytes;
};
struct fsx_fetcher_counts fsx_fetchers_count(struct fsx_fetchers *fetchers);

#endif
