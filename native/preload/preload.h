/* preload.h: the parts of libfanstore-io.so, and what each of them promises.
 *
 * The library is loaded into programs by LD_PRELOAD. It answers calls on regular files of the dataset from the index and
 * from partition files of this node, and passes everything else on to the next definition of the same function (next.c).
 * It starts no thread, changes no code, allocates no memory on the way of a call, and never ends the program.
 *
 *   attach.c   the start: finds the state of the mount, or decides to pass everything on
 *   names.c    paths to entries of the index, and back
 *   bytes.c    content of files from partition files
 *   ask.c      requests to the daemon (ask.h), over connections that are kept (sockets.c)
 *   cache.c    content that is not in a file of this node as it is, from the daemon's memory
 *   table.c    descriptors: placeholders, what they stand for, promotion to real ones
 *   vfork.c    vfork, so that its child is known
 *   lookup.c, unmounted.c    what a mount would answer, where there is none: names, directories, content
 *   outputs.c  and what programs write there (outputs.h)
 *   calls_*.c  the functions that programs call
 *
 * All of it may run on any thread and in signal handlers. There is one lock, in table.c, for what is rare (dup, promotion,
 * fork); it is held with all signals blocked.
 */
#ifndef FANSTORE_PRELOAD_PRELOAD_H
#define FANSTORE_PRELOAD_PRELOAD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "format/index.h"
#include "preload/state.h"

#if __SIZEOF_LONG__ != 8 || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for 64 bits, little-endian"
#endif

#define FSX_CALL __attribute__((visibility("default")))

/* ---- attach.c ------------------------------------------------------------------------------------------------------ */

/* What the start has found; does not change any more, but for what the mappings show. */
struct fsx_attached {
    const struct fsx_state *state;
    const struct fsx_state_part *parts;
    struct fsx_index index;
    _Atomic uint8_t *marks;
};
extern struct fsx_attached fsx_at;
/* Is this program attached to a mount? False: pass everything on. */
extern _Atomic bool fsx_on;

/* For whole programs that change who they are or what paths mean (setuid, chroot): from now on open nothing. */
void fsx_retire(void);

enum fsx_count { FSX_OPENS, FSX_READS, FSX_BYTES, FSX_STATS, FSX_PROMOTIONS, FSX_PASSED, FSX_LISTINGS };
void fsx_count(enum fsx_count what, uint64_t more);

/* A line of FANSTORE_PRELOAD_LOG; `path` may be NULL. Keeps errno. */
extern bool fsx_logs;
void fsx_log_line(const char *call, const char *path, int64_t number, const char *what);
#define FSX_LOG(...) ((void)(fsx_logs && (fsx_log_line(__VA_ARGS__), true)))

/* ---- names.c ------------------------------------------------------------------------------------------------------- */

#define FSX_ELSEWHERE (-1) /* not below the mount point, as far as can be told from the name */
#define FSX_PASS (-2)      /* below it, but for the mount to answer */

/* The entry that a path leads to, without a symbolic link and with every directory on its way open to its owner; or one of
 * the above. `directory` as for openat. */
int64_t fsx_resolve(int directory, const char *path);
/* The working directory may have changed. */
void fsx_forget_directory(void);
/* The absolute path of an entry, on the mount; false if it is longer than the kernel takes. */
bool fsx_path_of(int64_t entry, char path[FSX_STATE_PATH]);
/* A path like /proc/self/fd/5: promotes that descriptor, because the kernel will look at it. Keeps errno. */
void fsx_promote_named(const char *path);

/* Is this program attached, and has its job not ended? */
bool fsx_is_open(void);

/* ---- lookup.c: names without a mount ------------------------------------------------------------------------------------ */

#define FSX_NOTHING (-3) /* an error */

/* What the daemon says of an output, or of a directory that may hold some. */
struct fsx_about {
    uint64_t inode, size, blocks;
    int64_t mtime_ns;
    uint32_t mode, nlink;
};

/* What else is known of a name. */
struct fsx_way {
    const char *path; /* FSX_ELSEWHERE: what the kernel is to be asked for; the name that was given, or `room` */
    int error;        /* FSX_NOTHING: an errno */
    int64_t parent;   /* the directory in which it is, or with ENOENT could be made; -1 if that is not there or was not looked for */
    char last[FSX_NAME_MAX + 1]; /* its name there */
    struct fsx_about about;      /* of the output that was looked up last */
    char room[FSX_STATE_PATH];
};

/* The entry that a name leads to, FSX_ELSEWHERE or FSX_NOTHING. Numbers from that of entries on are the control directory and what
 * is in it. `follow`: a symbolic link at the end, too. Keeps errno. */
int64_t fsx_look_up(int directory, const char *path, bool follow, struct fsx_way *way);
bool fsx_is_control(int64_t entry);
/* The name of a control file; NULL of the directory, and behind the last one. */
const char *fsx_control_name(int64_t entry);
uint32_t fsx_mode_of(int64_t entry);
/* May the user do this: S_IRUSR, S_IWUSR, S_IXUSR? What is of the dataset may not be written all the same. */
bool fsx_may(int64_t entry, uint32_t bit);
/* Where a symbolic link leads: its length; without a NUL. `room`: for that of an output, which is 0 long if it has gone. */
size_t fsx_link_target(int64_t entry, char room[FSX_STATE_PATH], const char **target);

/* ---- unmounted.c: directories and files of the kernel's that stand for those of the dataset ------------------------------ */

/* There is no mount. Does not change after the start. */
extern bool fsx_unmounted;
/* With the directory of the state; false with errno. */
bool fsx_unmounted_start(const char *state);
/* The file to which programs write what they will read; NULL if there is none. */
const char *fsx_order_file(void);

/* The directory of the dataset that is open as this descriptor (AT_FDCWD: the working directory); -1 for none. Keeps errno. */
int64_t fsx_directory_entry(int fd);
/* The same of a directory or a file; a placeholder is neither. Keeps errno. */
int64_t fsx_real_entry(int fd);
/* What a path stands for: that of a directory, and what the kernel shows of content. */
int64_t fsx_tree_entry(const char *path);
int64_t fsx_memfd_entry(const char *shown_name);
/* The path of the directory that stands for one; false with errno. */
bool fsx_tree_path(int64_t entry, char path[FSX_STATE_PATH]);

/* Descriptors; -1 with errno. */
int fsx_open_directory(int64_t entry, int flags);
int fsx_open_content(uint32_t entry, int flags);
int fsx_open_control(int64_t entry, int flags);
/* The value of an extended attribute, which the daemon knows; -1 with errno. */
ssize_t fsx_ask_attribute(uint32_t entry, const char *name, char *value, size_t room);
/* As openat for a name that may be of the dataset; -2: the kernel is to open way->path. `real`: no placeholder. */
int fsx_open_unmounted(int directory, const char *path, int flags, mode_t mode, bool real, struct fsx_way *way);

/* ---- bytes.c ------------------------------------------------------------------------------------------------------- */

/* Before anything else of this part; false without memory. */
bool fsx_bytes_start(void);
/* Can this regular file be read here, as far as is known now? */
bool fsx_bytes_here(uint32_t entry);
/* `length` bytes from `offset`, all inside the file, checked as the mount promises. False: ask the mount. */
bool fsx_bytes_read(uint32_t entry, uint64_t offset, void *target, size_t length);
/* What mmap is to return for this file: a map of the partition, checked, with zeros behind the end of the file; NULL: it cannot be
 * had in this way, or not as mmap is asked. Keeps errno. */
void *fsx_bytes_map(uint32_t entry, void *at, size_t bytes, int protection, int flags, off_t offset);
/* In the child of a fork. */
void fsx_bytes_forked(void);
/* A descriptor of ours has to make room; true if it was one of these. */
bool fsx_bytes_move(int fd);

/* ---- cache.c ------------------------------------------------------------------------------------------------------- */

/* Can chunks be had from the daemon, as far as is known now? */
bool fsx_cache_here(void);
/* As fsx_bytes_read. `again`: this process has read it before. */
bool fsx_cache_read(uint32_t entry, uint64_t offset, void *target, size_t length, bool again);
/* In the child of a fork. */
void fsx_cache_forked(void);
/* A descriptor of ours has to make room; true if it was one of these. */
bool fsx_cache_move(int fd);

/* ---- table.c ------------------------------------------------------------------------------------------------------- */

/* Make the table; false if there is no memory or no descriptor. Once. */
bool fsx_table_start(const char *placeholder);

/* A copy of `fd` with a high number, which programs do not see; -1 if there is none. `fd` is closed. */
int fsx_keep_descriptor(int fd);
/* Close one of these. */
void fsx_drop_descriptor(int fd);

/* A descriptor for this file, its number, or -1 with errno; -2: open it on the mount. */
int fsx_open_entry(uint32_t entry, int flags);

/* What stands behind a descriptor. */
struct fsx_file {
    uint64_t slot; /* as it was when this was looked up */
    uint32_t entry;
    int flags; /* of open */
};
/* False: none of ours. */
bool fsx_find(int fd, struct fsx_file *file);
/* Is this a placeholder? Cheap, for calls that then do more. */
bool fsx_is_ours(int fd);
/* The kernel has given out this number for something else (or it is -1): if there is a note of it, what that told of was closed
 * unseen. Returns it. */
int fsx_foreign(int fd);
/* Or a descriptor of the library itself? */
bool fsx_is_known(int fd);

/* Take up to `count` bytes from the offset on, at most up to `size`: how many, and from where; -1 if the descriptor has
 * been promoted meanwhile. */
int64_t fsx_take(int fd, const struct fsx_file *file, uint64_t count, uint64_t size, uint64_t *from);
/* Give them back, after an error. */
void fsx_untake(int fd, const struct fsx_file *file, uint64_t from, uint64_t count);
/* The offset, or set it (if `from` is still right); -1 as above. */
int64_t fsx_tell(int fd, const struct fsx_file *file);
bool fsx_seek(int fd, const struct fsx_file *file, int64_t from, int64_t to);

/* Put a real file of the mount in the place of a placeholder, at the same offset, and of all its duplicates. 0 or an errno;
 * 0 as well if there is nothing of ours. */
int fsx_promote(int fd);
/* Promote all; or only those that an exec would pass on. */
void fsx_promote_all(bool inherited_only);

int fsx_close(int fd);
int fsx_duplicate(int fd, int lowest, bool close_on_exec);
/* As dup3, which with `same` may be used on itself. */
int fsx_duplicate_to(int fd, int target, int flags, bool same);
int fsx_close_range(unsigned first, unsigned last, int flags);

/* ---- vfork.c ------------------------------------------------------------------------------------------------------- */

/* How many threads wait for the child of a vfork. */
extern _Atomic int fsx_vforks;
/* Is this such a child? It has its own descriptors, but the memory of its parent: the table is not to be changed. */
bool fsx_in_vfork(void);
/* In the child of a fork, whose memory is its own. */
void fsx_vfork_forked(void);

#endif
