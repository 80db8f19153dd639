/* drive_fetchers.h: see drive_fetchers.c. */
#ifndef FANSTORE_DRIVE_FETCHERS_H
#define FANSTORE_DRIVE_FETCHERS_H

#include "clients/fetchers.h"
#include "drive_world.h"

struct drive_fetching {
    struct fsx_broker *broker;
    struct fsx_fetchers *fetchers;
    uint64_t seed;
    uint32_t rounds; /* at least; until it is over */
    const atomic_bool *over;
    uint64_t found, asked, failed; /* in the table; with an answer; without one */
};
/* A thread's main function; its argument is a struct drive_fetching. */
void *drive_fetching(void *argument);

#endif
