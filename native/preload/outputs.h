/* outputs.h: what programs write where there is no mount: names and attributes come from the daemon, bytes from local files.
 *
 * An output is known by an entry, too: its inode number, and above it what kind it is and its permissions, as they were when it was
 * looked up. Names of outputs are not remembered: each look-up asks. The content of an output is a file of the job
 * (fanstore/outputs/local_contents.py); the daemon opens it, and hands over the descriptor, which is a program's own like any other:
 * reading, writing, mapping, locking and passing it on are the kernel's affair. Its path says which output it is, so
 * that no note of it is needed; when it is closed, the daemon is told, and answers when others can see what was written.
 */
#ifndef FANSTORE_PRELOAD_OUTPUTS_H
#define FANSTORE_PRELOAD_OUTPUTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "preload/preload.h"

#define FSX_OUTPUT_FIRST (INT64_C(1) << 40)
#define FSX_OUTPUT_END (INT64_C(1) << 48)

/* With the path of the job's directory, if there may be outputs. False with errno. */
bool fsx_outputs_start(const char *job);
/* Can outputs be made? */
bool fsx_outputs_on(void);

static inline bool fsx_is_output(int64_t entry) { return entry >= FSX_OUTPUT_FIRST; }
/* The entry of an output of which no more is known than that it is a directory, or a file. */
int64_t fsx_output_entry(uint64_t inode, uint32_t mode);
uint64_t fsx_output_inode(int64_t entry);
uint32_t fsx_output_mode(int64_t entry);
/* The output whose content a path of the kernel's leads to; -1 for none. */
int64_t fsx_content_entry(const char *path);
/* The device of contents. */
bool fsx_is_content_device(dev_t device);

/* ---- names; `way` as in preload.h: errors, attributes ---- */

/* What a directory has under a name (".." of an output, too): an entry, -1 for nothing, FSX_NOTHING with way->error. */
int64_t fsx_output_child(int64_t directory, const char *name, size_t bytes, struct fsx_way *way);
/* Attributes of an output or a directory of the dataset; 0 or an errno. */
int fsx_output_about(int64_t entry, struct fsx_about *about);
/* Where it is, below the mount point, with a slash before it; false if it has no name any more. */
bool fsx_output_path(int64_t entry, char *path, size_t room);
/* Where a symbolic link leads: its length, -1 with errno. */
ssize_t fsx_output_link(int64_t entry, char *target, size_t room);
/* Names in a directory, one after the other as in struct fsx_listed, to be freed; NULL with errno, 0 if there are none. */
struct fsx_listed {
    uint64_t inode;
    uint32_t mode;
    uint16_t bytes;
    char name[];
} __attribute__((packed));
struct fsx_listed *fsx_output_list(int64_t directory, size_t *bytes);

/* ---- changes: 0 or an errno; of a name, way->parent and way->last say where ---- */

/* A directory, link or file, as the mode says; without the bits of the umask. */
int fsx_output_make(const struct fsx_way *way, mode_t mode, const char *target);
int fsx_output_remove(const struct fsx_way *way, bool directory);
int fsx_output_rename(const struct fsx_way *from, const struct fsx_way *to, unsigned flags);

enum { FSX_SET_MODE = 1, FSX_SET_UID = 2, FSX_SET_GID = 4, FSX_SET_SIZE = 8, FSX_SET_MTIME = 16 };
struct fsx_changes {
    unsigned what;
    mode_t mode;
    uid_t uid;
    gid_t gid;
    uint64_t size;
    int64_t mtime_ns;
};
int fsx_output_set(int64_t entry, const struct fsx_changes *changes);
int fsx_output_set_attribute(int64_t entry, const char *name, const void *value, size_t bytes, int flags);
int fsx_output_remove_attribute(int64_t entry, const char *name);
/* A value, or with `name` NULL the names: how long, -1 with errno. */
ssize_t fsx_output_attribute(int64_t entry, const char *name, void *value, size_t room);

/* ---- content ---- */

/* A descriptor of an output; of a new one at way->parent, way->last. -1 with errno. */
int fsx_output_open(int64_t entry, int flags);
int fsx_output_create(const struct fsx_way *way, int flags, mode_t mode);
/* A copy of it in memory, as a program that can be run; -1 with errno. */
int fsx_output_program(int64_t entry);
/* fsync of a file or a directory; 0 or an errno. */
int fsx_output_sync(int64_t entry);
/* This descriptor is about to be closed: 0 or an errno, with which closing it is to fail. Keeps errno. */
int fsx_output_closing(int fd);
/* The program ends. */
void fsx_outputs_end(void);

/* blocks, bfree, bavail, files, ffree, favail; 0 or an errno. */
int fsx_output_statfs(uint64_t numbers[6]);

#endif
