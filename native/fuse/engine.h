/* engine.h: threads between the kernel and pyfuse3, which answer what they can and pass on the rest.
 *
 *   kernel == /dev/fuse ==> worker threads --- fuse_meta.c, outputs.c ---> kernel
 *                              |    |
 *                              |    +-- content of the dataset: chunks/broker.c ---> kernel
 *                              |    +-- of outputs that is not here: a line of upcalls, and an eventfd --> Python
 *                              |    +-- what to list ahead: namesahead.c, and a socket --> programs/names.c
 *                              +------- all other messages: a SOCK_SEQPACKET socket --> pyfuse3 --> pump thread --> kernel
 *
 * Each worker has its own descriptor of the connection (FUSE_DEV_IOC_CLONE); the kernel wants a reply on the descriptor
 * on which the request was read. The worker's number travels in the upper bits of the message's unique number, so that
 * a reply of pyfuse3 finds its way without a table.
 *
 * No Python here, and no GIL: module_engine.c translates. Calls come from one thread (trio) but for those that say so.
 */
#ifndef FANSTORE_FUSE_ENGINE_H
#define FANSTORE_FUSE_ENGINE_H

#include "fuse/ahead.h"
#include "fuse/fuse_meta.h"
#include "chunks/broker.h"
#include "fuse/begun.h"
#include "fuse/upcalls.h"
#include "fuse/namesahead.h"
#include "fuse/operations.h"
#include "fuse/passing.h"
#include "fuse/busy_poll.h"

#define FSX_ENGINE_WORKERS_MAX 64u

/* Sums over all threads; those of a moment, taken while they go on. */
struct fsx_engine_counts {
    struct fsx_latency operations[FSX_OPERATIONS];
    struct fsx_read_counts reads;
    struct fsx_output_counts outputs;
    struct fsx_names_ahead_counts names;
    struct fsx_busy_poll_counts polling;
    uint64_t forwarded, upcalls, interrupted, malformed;
};

struct fsx_engine_settings {
    struct fsx_tree tree;        /* its outputs must outlive the engine */
    struct fsx_broker *broker;   /* the caller's; must outlive the engine */
    struct fsx_names_ahead *names; /* likewise; NULL if no names are listed ahead */
    struct fsx_begun *begun;     /* likewise; NULL if nobody wants to know which files are read */
    int device;                  /* /dev/fuse of the mount; duplicated */
    int socket;                  /* to pyfuse3; duplicated */
    int wake;                    /* an eventfd, readable when there are upcalls or the engine has ended; duplicated */
    uint32_t workers;
    uint16_t max_background;
};

struct fsx_engine;

/* Start all threads. NULL with errno set if that is not possible. */
struct fsx_engine *fsx_engine_start(const struct fsx_engine_settings *settings);

/* Up to `most` upcalls, oldest first, each once; how many there were. */
size_t fsx_engine_take(struct fsx_engine *engine, struct fsx_upcall *upcalls, size_t most);

/* Answer an upcall with `bytes` bytes, or with an errno. Each that has a token must be answered exactly once, with this
 * or with resume. Any thread. */
void fsx_engine_answer(struct fsx_engine *engine, uint64_t token, const void *data, size_t bytes, int error);

/* The output of an upcall of kind FSX_UPCALL_MAKE_LOCAL is here now: do what waits for it, and answer. May block on a
 * disk. Any thread. */
void fsx_engine_resume(struct fsx_engine *engine, uint64_t token);

/* Around a call that may be under way while another thread stops the engine. To enter is the caller's to order with stop:
 * nobody may enter once it was called. */
void fsx_engine_enter(struct fsx_engine *engine);
void fsx_engine_leave(struct fsx_engine *engine);

/* Has the kernel ended the connection (an unmount), or has it failed? `error` is the errno of a failure, 0 if none. */
bool fsx_engine_ended(struct fsx_engine *engine, int *error);

void fsx_engine_count(struct fsx_engine *engine, struct fsx_engine_counts *counts);
struct fsx_kernel fsx_engine_kernel(struct fsx_engine *engine);

/* Whether names that are not there are forwarded, so that Python sees who asks for them. Not of an engine with outputs. */
void fsx_engine_forward_missing(struct fsx_engine *engine, bool wanted);

/* End all threads, and with them the connection, and free everything. False if threads are still in the hands of a disk
 * after `limit_ms`: then they and the engine are left behind for good; the connection has ended all the same. */
bool fsx_engine_stop(struct fsx_engine *engine, uint32_t limit_ms);

#endif
