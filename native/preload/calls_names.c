/* calls_names.c: what programs call to ask about names, beside stat: links, paths, attributes, file systems; see preload.h. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "preload/next.h"
#include "preload/outputs.h"
#include "preload/preload.h"

#define BLOCK_BYTES 4096
#define FUSE_MAGIC 0x65735546
/* ST_VALID, and how a mount is made: without set-user-ID programs and devices, relatime, and mostly read-only. */
#define MOUNT_FLAGS (0x20ul | ST_NOSUID | ST_NODEV | 0x1000 | (fsx_outputs_on() ? 0ul : ST_RDONLY))

static int fail(int error) {
    errno = error;
    return -1;
}

/* ---- links --------------------------------------------------------------------------------------------------------------- */

/* A link of /proc that shows what stands for the dataset shows the dataset. */
static ssize_t translated(ssize_t length, char *target, size_t room) {
    char path[FSX_STATE_PATH];
    if (!fsx_unmounted || length <= 0 || (size_t)length >= sizeof path || (size_t)length == room)
        return length;
    memcpy(path, target, (size_t)length);
    path[length] = '\0';
    int64_t entry = fsx_memfd_entry(path);
    if (entry < 0)
        entry = fsx_tree_entry(path);
    if (entry < 0)
        entry = fsx_content_entry(path);
    if (entry < 0 || !fsx_path_of(entry, path))
        return length;
    const size_t bytes = strlen(path) < room ? strlen(path) : room;
    memcpy(target, path, bytes);
    return (ssize_t)bytes;
}

/* -2: the kernel is to say it of way->path. */
static ssize_t read_link(int directory, const char *path, char *target, size_t room, struct fsx_way *way) {
    way->path = path;
    fsx_promote_named(path);
    const int64_t entry = fsx_unmounted ? fsx_look_up(directory, path, false, way) : FSX_ELSEWHERE;
    if (entry == FSX_ELSEWHERE)
        return -2;
    if (entry < 0 || !S_ISLNK(fsx_mode_of(entry)) || room == 0 || room > SSIZE_MAX)
        return fail(entry < 0 ? way->error : EINVAL);
    const char *found;
    char kept[FSX_STATE_PATH];
    const size_t length = fsx_link_target(entry, kept, &found);
    const size_t bytes = length < room ? length : room;
    memcpy(target, found, bytes);
    return (ssize_t)bytes;
}

FSX_CALL ssize_t readlink(const char *path, char *target, size_t room) {
    struct fsx_way way;
    const ssize_t done = read_link(AT_FDCWD, path, target, room, &way);
    return done != -2 ? done : translated(NEXT(readlink)(way.path, target, room), target, room);
}
FSX_CALL ssize_t readlinkat(int directory, const char *path, char *target, size_t room) {
    struct fsx_way way;
    const ssize_t done = read_link(directory, path, target, room, &way);
    return done != -2 ? done : translated(NEXT(readlinkat)(directory, way.path, target, room), target, room);
}
FSX_CALL ssize_t __readlink_chk(const char *path, char *target, size_t bytes, size_t room);
FSX_CALL ssize_t __readlink_chk(const char *path, char *target, size_t bytes, size_t room) {
    if (bytes > room)
        return NEXT_AS(ssize_t (*)(const char *, char *, size_t, size_t), __readlink_chk)(path, target, bytes, room);
    return readlink(path, target, bytes);
}
FSX_CALL ssize_t __readlinkat_chk(int directory, const char *path, char *target, size_t bytes, size_t room);
FSX_CALL ssize_t __readlinkat_chk(int directory, const char *path, char *target, size_t bytes, size_t room) {
    if (bytes > room)
        return NEXT_AS(ssize_t (*)(int, const char *, char *, size_t, size_t), __readlinkat_chk)(directory, path, target,
                                                                                                bytes, room);
    return readlinkat(directory, path, target, bytes);
}

/* ---- paths --------------------------------------------------------------------------------------------------------------- */

/* The working directory, if it is one of the dataset. */
static bool is_within(char path[FSX_STATE_PATH]) {
    const int64_t entry = fsx_unmounted ? fsx_directory_entry(AT_FDCWD) : -1;
    return entry >= 0 && fsx_path_of(entry, path);
}

FSX_CALL char *getcwd(char *target, size_t room) {
    char path[FSX_STATE_PATH];
    if (!is_within(path) || (target != NULL && room == 0))
        return NEXT(getcwd)(target, room);
    const size_t bytes = strlen(path) + 1;
    if (room != 0 && bytes > room) {
        errno = ERANGE;
        return NULL;
    }
    if (target == NULL)
        target = malloc(room != 0 ? room : bytes);
    return target == NULL ? NULL : memcpy(target, path, bytes);
}
FSX_CALL char *__getcwd_chk(char *target, size_t bytes, size_t room);
FSX_CALL char *__getcwd_chk(char *target, size_t bytes, size_t room) {
    char path[FSX_STATE_PATH];
    if (bytes > room || !is_within(path))
        return NEXT_AS(char *(*)(char *, size_t, size_t), __getcwd_chk)(target, bytes, room);
    return getcwd(target, bytes);
}
FSX_CALL char *getwd(char *target) {
    char path[FSX_STATE_PATH];
    return is_within(path) ? strcpy(target, path) : NEXT_AS(char *(*)(char *), getwd)(target);
}
FSX_CALL char *get_current_dir_name(void) {
    char path[FSX_STATE_PATH];
    return is_within(path) ? strdup(path) : NEXT(get_current_dir_name)();
}

/* As realpath says it: true if it is said, in `target`. */
static bool say_real(const char *path, char **target, struct fsx_way *way) {
    char found[FSX_STATE_PATH];
    way->path = path;
    const int64_t entry = fsx_unmounted && path != NULL ? fsx_look_up(AT_FDCWD, path, true, way) : FSX_ELSEWHERE;
    if (entry == FSX_ELSEWHERE)
        return false;
    if (entry < 0) {
        errno = way->error;
        *target = NULL;
        return true;
    }
    const char *name = fsx_control_name(entry);
    const bool fits = fsx_path_of(fsx_is_control(entry) ? fsx_at.index.entries : entry, found) &&
                      strlen(found) + (name != NULL ? strlen(name) + 1 : 0) < sizeof found;
    if (!fits) {
        errno = ENAMETOOLONG;
        *target = NULL;
        return true;
    }
    if (name != NULL)
        strcat(strcat(found, "/"), name);
    *target = *target != NULL ? strcpy(*target, found) : strdup(found);
    return true;
}

FSX_CALL char *realpath(const char *restrict path, char *restrict target) {
    struct fsx_way way;
    char *found = target;
    return say_real(path, &found, &way) ? found : NEXT(realpath)(way.path, target);
}
FSX_CALL char *__realpath_chk(const char *path, char *target, size_t room);
FSX_CALL char *__realpath_chk(const char *path, char *target, size_t room) {
    struct fsx_way way = {.path = path};
    char *found = target;
    if (room >= PATH_MAX && say_real(path, &found, &way))
        return found;
    return NEXT_AS(char *(*)(const char *, char *, size_t), __realpath_chk)(way.path, target, room);
}
FSX_CALL char *canonicalize_file_name(const char *path) {
    struct fsx_way way;
    char *found = NULL;
    return say_real(path, &found, &way) ? found : NEXT(canonicalize_file_name)(way.path);
}

/* ---- extended attributes: how and where a file is stored ---------------------------------------------------------------- */

static const char XATTRS[] = "user.fanstore.partition\0user.fanstore.codec\0user.fanstore.stored_size\0user.fanstore.checksum";

/* Values that the index does not have: the daemon says them. */
static ssize_t ask_value(int64_t entry, const char *name, void *value, size_t room) {
    char content[256];
    const ssize_t bytes = fsx_ask_attribute((uint32_t)entry, name, content, sizeof content);
    if (bytes < 0 || room == 0)
        return bytes;
    if ((size_t)bytes > room)
        return fail(ERANGE);
    memcpy(value, content, (size_t)bytes);
    return bytes;
}

static ssize_t get_attribute(int64_t entry, const char *name, void *value, size_t room) {
    bool known = false;
    if (fsx_is_output(entry))
        return fsx_output_attribute(entry, name, value, room);
    for (const char *each = XATTRS; each < XATTRS + sizeof XATTRS && name != NULL; each += strlen(each) + 1)
        known = known || strcmp(each, name) == 0;
    if (!known || fsx_is_control(entry) || !S_ISREG(fsx_mode_of(entry)))
        return fail(ENODATA);
    return ask_value(entry, name, value, room);
}

static ssize_t list_attributes(int64_t entry, char *names, size_t room) {
    if (fsx_is_output(entry))
        return fsx_output_attribute(entry, NULL, names, room);
    if (fsx_is_control(entry) || !S_ISREG(fsx_mode_of(entry)))
        return 0;
    if (room != 0 && room < sizeof XATTRS)
        return fail(ERANGE);
    if (room != 0)
        memcpy(names, XATTRS, sizeof XATTRS);
    return sizeof XATTRS;
}

/* The entry that a name leads to; FSX_NOTHING with errno. */
static int64_t named(const char *path, bool follow, struct fsx_way *way) {
    way->path = path;
    fsx_promote_named(path);
    const int64_t entry = fsx_unmounted ? fsx_look_up(AT_FDCWD, path, follow, way) : FSX_ELSEWHERE;
    if (entry == FSX_NOTHING)
        errno = way->error;
    return entry;
}

#define ATTRIBUTE(name, follow)                                                            \
    FSX_CALL ssize_t name(const char *path, const char *which, void *value, size_t room) { \
        struct fsx_way way;                                                                \
        const int64_t entry = named(path, follow, &way);                                   \
        if (entry == FSX_ELSEWHERE)                                                        \
            return NEXT(name)(way.path, which, value, room);                               \
        return entry < 0 ? -1 : get_attribute(entry, which, value, room);                  \
    }
ATTRIBUTE(getxattr, true)
ATTRIBUTE(lgetxattr, false)
#define ATTRIBUTES(name, follow)                                       \
    FSX_CALL ssize_t name(const char *path, char *names, size_t room) { \
        struct fsx_way way;                                            \
        const int64_t entry = named(path, follow, &way);               \
        if (entry == FSX_ELSEWHERE)                                    \
            return NEXT(name)(way.path, names, room);                  \
        return entry < 0 ? -1 : list_attributes(entry, names, room);   \
    }
ATTRIBUTES(listxattr, true)
ATTRIBUTES(llistxattr, false)

/* The entry of a descriptor, without a mount; -1: the kernel says it, -2 with errno. */
static int64_t described(int fd) {
    struct fsx_file file;
    if (fsx_is_ours(fd) && fsx_unmounted && fsx_find(fd, &file))
        return file.entry;
    const int error = fsx_is_ours(fd) ? fsx_promote(fd) : 0;
    if (error != 0) {
        errno = error;
        return -2;
    }
    return fsx_real_entry(fd);
}

#define DESCRIBED(result, name, parameters, answer, arguments) \
    FSX_CALL result name parameters {                          \
        const int64_t entry = described(fd);                   \
        if (entry == -1)                                       \
            return NEXT(name) arguments;                       \
        return entry < 0 ? -1 : answer;                        \
    }
DESCRIBED(ssize_t, fgetxattr, (int fd, const char *which, void *value, size_t room),
          get_attribute(entry, which, value, room), (fd, which, value, room))
DESCRIBED(ssize_t, flistxattr, (int fd, char *names, size_t room), list_attributes(entry, names, room), (fd, names, room))

/* ---- file systems -------------------------------------------------------------------------------------------------------- */

_Static_assert(sizeof(struct statfs) == sizeof(struct statfs64) && sizeof(struct statvfs) == sizeof(struct statvfs64),
               "one layout on 64 bits");

static int fill_statfs(void *target) {
    struct statfs *about = target;
    memset(about, 0, sizeof *about);
    about->f_type = FUSE_MAGIC;
    about->f_bsize = about->f_frsize = BLOCK_BYTES;
    about->f_blocks = fsx_at.state->blocks;
    about->f_files = fsx_at.state->files;
    about->f_namelen = FSX_NAME_MAX;
    about->f_flags = (long)MOUNT_FLAGS;
    uint64_t numbers[6];
    const int error = fsx_outputs_on() ? fsx_output_statfs(numbers) : 0;
    if (error == 0 && fsx_outputs_on()) {
        about->f_blocks = numbers[0];
        about->f_bfree = numbers[1];
        about->f_bavail = numbers[2];
        about->f_files = numbers[3];
        about->f_ffree = numbers[4];
    }
    return error == 0 ? 0 : fail(error);
}

static int fill_statvfs(void *target) {
    struct statvfs *about = target;
    memset(about, 0, sizeof *about);
    about->f_bsize = about->f_frsize = BLOCK_BYTES;
    about->f_blocks = fsx_at.state->blocks;
    about->f_files = fsx_at.state->files;
    about->f_namemax = FSX_NAME_MAX;
    about->f_flag = MOUNT_FLAGS & ~0x20ul;
    uint64_t numbers[6];
    const int error = fsx_outputs_on() ? fsx_output_statfs(numbers) : 0;
    if (error == 0 && fsx_outputs_on()) {
        about->f_blocks = numbers[0];
        about->f_bfree = numbers[1];
        about->f_bavail = numbers[2];
        about->f_files = numbers[3];
        about->f_ffree = about->f_favail = numbers[4];
    }
    return error == 0 ? 0 : fail(error);
}

#define FILE_SYSTEM(name, type, fill)                      \
    FSX_CALL int name(const char *path, struct type *about) { \
        struct fsx_way way;                                \
        const int64_t entry = named(path, true, &way);     \
        if (entry == FSX_ELSEWHERE)                        \
            return NEXT(name)(way.path, about);            \
        return entry < 0 ? -1 : fill(about);               \
    }
FILE_SYSTEM(statfs, statfs, fill_statfs)
FILE_SYSTEM(statfs64, statfs64, fill_statfs)
FILE_SYSTEM(statvfs, statvfs, fill_statvfs)
FILE_SYSTEM(statvfs64, statvfs64, fill_statvfs)
DESCRIBED(int, fstatfs, (int fd, struct statfs *about), fill_statfs(about), (fd, about))
DESCRIBED(int, fstatfs64, (int fd, struct statfs64 *about), fill_statfs(about), (fd, about))
DESCRIBED(int, fstatvfs, (int fd, struct statvfs *about), fill_statvfs(about), (fd, about))
DESCRIBED(int, fstatvfs64, (int fd, struct statvfs64 *about), fill_statvfs(about), (fd, about))

/* The same for all file systems, but for a few that no program asks about here. */
FSX_CALL long pathconf(const char *path, int name) {
    struct fsx_way way;
    const int64_t entry = named(path, true, &way);
    if (entry == FSX_ELSEWHERE)
        return NEXT(pathconf)(way.path, name);
    return entry < 0 ? -1 : NEXT(pathconf)("/", name);
}
