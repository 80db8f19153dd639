/* nodes.h: a chunk as the broker has it (broker.c), and lists of such; nobody else includes it. Its lock guards all of it. */
#ifndef FANSTORE_CHUNKS_NODES_H
#define FANSTORE_CHUNKS_NODES_H

#include "chunks/broker.h"
#include "chunks/slabs.h"

enum fsx_node_state { LOADING, READY, FAILED };

struct fsx_node {
    uint64_t key;
    uint32_t entry, number;
    struct fsx_stored chunk;
    enum fsx_node_state state;
    enum fsx_keep keep;
    enum fsx_source source;
    bool has_memory;            /* and is counted in used_bytes */
    bool file_tried, peer_tried; /* or need not be */
    bool prefetched;             /* nobody has waited for it so far */
    bool from_line;              /* of chunks that will be wanted (prefetch.h) */
    bool again;                  /* it is read piece by piece from the page cache from now on */
    bool with_python;            /* its stored bytes are awaited */
    bool from_peer, complete;    /* what has arrived */
    int peer;                   /* who has given it, or has not */
    struct fsx_block content;   /* of a plain chunk also what is stored */
    struct fsx_block stored;    /* of a compressed one, while it is LOADING */
    size_t bytes;               /* that count */
    uint64_t stamp;             /* by which programs find it, 0 if they do not */
    uint32_t users;             /* who loads it or is being delivered to */
    struct fsx_waiter *waiters, **last_waiter;
    struct fsx_node *chain;         /* in its bucket */
    struct fsx_node *older, *newer; /* among the idle, or among those that are LOADING */
    struct fsx_node *next;          /* in a queue, or among the dead */
};

/* From the one that came first to the one that came last. */
struct list {
    struct fsx_node *oldest, *newest;
};

struct queue {
    struct fsx_node *first, **last;
};

static inline void enter_list(struct list *list, struct fsx_node *node) {
    node->older = list->newest;
    node->newer = NULL;
    *(list->newest != NULL ? &list->newest->newer : &list->oldest) = node;
    list->newest = node;
}

static inline void leave_list(struct list *list, struct fsx_node *node) {
    *(node->older != NULL ? &node->older->newer : &list->oldest) = node->newer;
    *(node->newer != NULL ? &node->newer->older : &list->newest) = node->older;
}

static inline void push(struct queue *queue, struct fsx_node *node) {
    node->next = NULL;
    *queue->last = node;
    queue->last = &node->next;
}

static inline struct fsx_node *pop(struct queue *queue) {
    struct fsx_node *node = queue->first;
    if (node == NULL)
        return NULL;
    queue->first = node->next;
    if (queue->first == NULL)
        queue->last = &queue->first;
    node->next = NULL;
    return node;
}

#endif
