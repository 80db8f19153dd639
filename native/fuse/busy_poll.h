/* busy_poll.h: how engine threads wait for requests: all of them asleep, or one of them awake.
 *
 * A thread that sleeps in read(2) has to be woken for a request, on a core that has gone to sleep as well; where that goes
 * through a hypervisor it takes longer than most answers do. So while requests come one after the other and each is
 * answered at once (a program that writes many small files, or opens files that the kernel has in memory), one thread
 * asks the device again and again instead. That is of use only if no other waits in read(2), or the kernel would
 * wake that one for each request. So there are two ways to wait:
 *
 *   sleeping  all threads that have nothing to do sleep in read(2);
 *   polling   one asks, and all others are parked: asleep on a condition of ours, of which the kernel knows nothing.
 *
 * A polling phase begins after a number of requests in a row of one thread of a program that were quick, which the caller says of
 * each, and came close together. Whoever comes back from a request then is parked if another thread is there to take the next
 * one, and asks if not: so threads leave read(2) one by one, each with a last request. A polling phase ends, for all at once, before a
 * request is handled that may take long, or is another program's (with as many programs as cores, the one that asks takes the
 * core of one of them); when nothing came for a moment; and when the one that asks is held up. If polling phases end before
 * they have paid for the change, more requests are needed for the next.
 *
 * Never is everybody parked: a thread parks only if it has seen that another is *free*, which is to say in read(2), asking, or
 * about to, and that one, when it has taken a request, is either free again or the next to ask (`free` goes from 0 to 1
 * in one step, and who makes that step asks). What can still happen is that it does not come back: a request that was
 * thought quick waits for a disk, or the thread is not given a processor. So one of those that are parked is the guard, and looks
 * every millisecond whether anybody has asked or taken a request since; if not, it ends the polling phase. There is a guard as
 * soon as anybody is parked. Outside of a polling phase nobody is parked, and nothing here runs on its own: idle costs nothing.
 *
 * The one that asks reads with O_NONBLOCK, which is a property of its own clone of the device (or of the mount's own
 * descriptor, which only one thread reads), so that nobody else is concerned, and takes one call for a question and for its
 * request. (With poll(2) and read(2) it would be two, and somebody who is faster could leave it asleep.) It takes the
 * flag back before it sleeps in read(2) again.
 *
 * Owns who is parked, and when; not the threads, nor what is read. Any thread of the engine. `lock` guards beginning and
 * end, for a few assignments and the waking of all.
 */
#ifndef FANSTORE_FUSE_BUSY_POLL_H
#define FANSTORE_FUSE_BUSY_POLL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct fsx_busy_poll;

/* One thread that waits; zeros, but for its device, which nobody else reads. */
struct fsx_poller {
    int device;
    bool asks; /* the device has O_NONBLOCK */
};

struct fsx_busy_poll_counts {
    uint64_t times, time_ns, requests; /* polling phases, how long they were, and what was taken in them */
};

/* For so many threads. With one, or on a machine with one processor, nobody ever polls. NULL without memory. */
struct fsx_busy_poll *fsx_busy_poll_new(uint32_t threads);
/* When no thread uses it. NULL is allowed. */
void fsx_busy_poll_free(struct fsx_busy_poll *polling);

/* Wait for a request: as read(2) of the device. EAGAIN if the caller is to look whether it must end, and to come back. */
ssize_t fsx_busy_poll_read(struct fsx_busy_poll *polling, struct fsx_poller *poller, void *request, size_t bytes);

/* What the caller is about to do for its request, before it does it: something that is done at once, for this thread of a
 * program (0: not known), at this time; or that may wait for a disk, another node or Python. */
void fsx_busy_poll_quick(struct fsx_busy_poll *polling, uint32_t thread, uint64_t now_ns);
void fsx_busy_poll_slow(struct fsx_busy_poll *polling);

/* Nobody is parked from now on. */
void fsx_busy_poll_end(struct fsx_busy_poll *polling);

struct fsx_busy_poll_counts fsx_busy_poll_count(struct fsx_busy_poll *polling);

#endif
