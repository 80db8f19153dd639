/* drive_rig.h: an engine with the two threads that stand for Python, for engine_drive.
 *
 * The device is one end of a socket pair, on whose other end a scenario plays the kernel, or a real /dev/fuse.
 */
#ifndef FANSTORE_DRIVE_RIG_H
#define FANSTORE_DRIVE_RIG_H

#include "drive_world.h"

#include <pthread.h>

/* Which files the engine may read by itself. */
enum files { NO_FILES, SHARED_FILES, LOCAL_FILES, DAMAGED_FILES, MIXED_FILES };

struct rig {
    struct fsx_broker *broker;
    struct fsx_engine *engine;
    struct fsx_outputs *outputs; /* the caller's; NULL for none */
    int folder;                  /* of their content */
    uint8_t *marks;
    int kernel; /* our end of the device; -1 if it is a real one */
    int python; /* pyfuse3's end of the socket */
    int wake;
    pthread_t pyfuse3, answering;
    atomic_bool deaf;   /* pyfuse3 does not read its socket */
    atomic_bool idle;   /* upcalls are not taken */
    atomic_bool ending; /* both threads end */
    uint32_t delay_us;  /* of each upcall */
    _Atomic(uint64_t) upcalls, forwarded, made_local;
};

/* Start everything. `device` is a real one, which the engine duplicates, or -1. */
void rig_start(struct rig *rig, int device, uint32_t workers, enum files files, enum fsx_verify verify,
               uint64_t cache_bytes, uint32_t delay_us);

/* The same, with outputs: one that is not in the folder is empty, and made there when it is written. */
void rig_start_with(struct rig *rig, struct fsx_outputs *outputs, int folder, int device, uint32_t workers,
                    enum files files, enum fsx_verify verify, uint64_t cache_bytes, uint32_t delay_us);

/* The stored bytes of a chunk, as Python brings them. */
void bring(struct fsx_broker *broker, struct fsx_chunk_upcall upcall);

/* Stop the engine, which must work within two seconds, and free everything. */
void rig_stop(struct rig *rig);
/* What is left to do for it once the engine was stopped. */
void rig_free(struct rig *rig);

#endif
