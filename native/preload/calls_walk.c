/* calls_walk.c: functions that list directories inside the C library, without a mount; see preload.h.
 *
 * scandir, nftw and ftw are done here, with opendir of calls_dir.c; glob is told to use it. What has nothing to do with the dataset is
 * passed on.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "preload/next.h"
#include "preload/preload.h"

_Static_assert(sizeof(struct dirent) == sizeof(struct dirent64) && sizeof(glob_t) == sizeof(glob64_t) &&
                   sizeof(struct stat) == sizeof(struct stat64),
               "one layout on 64 bits");

/* Does a name lead to the dataset, or would it, if it were there? Otherwise `way` says where. */
static bool concerns(int directory, const char *path, struct fsx_way *way) {
    way->path = path;
    return fsx_unmounted && fsx_look_up(directory, path, true, way) != FSX_ELSEWHERE;
}

/* ---- scandir ------------------------------------------------------------------------------------------------------------- */

typedef int filter_t(const struct dirent *);
typedef int order_t(const struct dirent **, const struct dirent **);

static int list_all(DIR *stream, struct dirent ***names, filter_t *wanted, order_t *order) {
    struct dirent **list = NULL;
    size_t count = 0, room = 0;
    int error = stream == NULL ? errno : 0;
    const int kept = errno;
    while (error == 0) {
        errno = 0;
        const struct dirent *found = readdir(stream);
        if (found == NULL) {
            error = errno;
            break;
        }
        if (wanted != NULL && wanted(found) == 0)
            continue;
        if (count == room) {
            struct dirent **longer = realloc(list, (room = room * 2 + 16) * sizeof *list);
            error = longer == NULL ? ENOMEM : 0;
            list = longer == NULL ? list : longer;
        }
        struct dirent *copy = error == 0 ? malloc(found->d_reclen) : NULL;
        error = copy == NULL ? ENOMEM : 0;
        if (copy != NULL)
            list[count++] = memcpy(copy, found, found->d_reclen);
    }
    if (stream != NULL)
        closedir(stream);
    if (error != 0) {
        while (count > 0)
            free(list[--count]);
        free(list);
        errno = error;
        return -1;
    }
    if (order != NULL && count > 1)
        qsort(list, count, sizeof *list, (int (*)(const void *, const void *))order);
    *names = list != NULL ? list : malloc(1); /* as the C library: to be freed in any case */
    errno = kept;
    return (int)count;
}

static DIR *open_at(int directory, const char *path) {
    const int fd = openat(directory, path, O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    if (stream == NULL && fd >= 0)
        close(fd);
    return stream;
}

#define SCANDIR(name, type)                                                                                              \
    FSX_CALL int name(const char *path, struct type ***names, int (*wanted)(const struct type *),                        \
                      int (*order)(const struct type **, const struct type **)) {                                        \
        struct fsx_way way;                                                                                              \
        if (!concerns(AT_FDCWD, path, &way))                                                                             \
            return NEXT(name)(way.path, names, wanted, order);                                                           \
        return list_all(opendir(path), (struct dirent ***)(void *)names, (filter_t *)wanted, (order_t *)order);          \
    }
SCANDIR(scandir, dirent)
SCANDIR(scandir64, dirent64)
#define SCANDIRAT(name, type)                                                                                            \
    FSX_CALL int name(int directory, const char *path, struct type ***names, int (*wanted)(const struct type *),         \
                      int (*order)(const struct type **, const struct type **)) {                                        \
        struct fsx_way way;                                                                                              \
        if (!concerns(directory, path, &way))                                                                            \
            return NEXT(name)(directory, way.path, names, wanted, order);                                                \
        return list_all(open_at(directory, path), (struct dirent ***)(void *)names, (filter_t *)wanted, (order_t *)order); \
    }
SCANDIRAT(scandirat, dirent)
SCANDIRAT(scandirat64, dirent64)

/* ---- glob ---------------------------------------------------------------------------------------------------------------- */

static void *glob_open(const char *path) { return opendir(path); }
static struct dirent *glob_read(void *stream) { return readdir(stream); }
static void glob_close(void *stream) { closedir(stream); }
static int glob_stat(const char *restrict path, struct stat *restrict about) { return stat(path, about); }
static int glob_lstat(const char *restrict path, struct stat *restrict about) { return lstat(path, about); }

static int glob_with(const char *pattern, int flags, int (*fail)(const char *, int), glob_t *found,
                     int (*next)(const char *, int, int (*)(const char *, int), glob_t *)) {
    if (!fsx_unmounted || found == NULL || (flags & GLOB_ALTDIRFUNC) != 0)
        return next(pattern, flags, fail, found);
    found->gl_opendir = glob_open;
    found->gl_readdir = glob_read;
    found->gl_closedir = glob_close;
    found->gl_stat = glob_stat;
    found->gl_lstat = glob_lstat;
    const int result = next(pattern, flags | GLOB_ALTDIRFUNC, fail, found);
    found->gl_flags &= ~GLOB_ALTDIRFUNC;
    return result;
}
FSX_CALL int glob(const char *restrict pattern, int flags, int (*fail)(const char *, int), glob_t *restrict found) {
    return glob_with(pattern, flags, fail, found, NEXT(glob));
}
FSX_CALL int glob64(const char *restrict pattern, int flags, int (*fail)(const char *, int), glob64_t *restrict found) {
    return glob_with(pattern, flags, fail, (glob_t *)(void *)found,
                     (int (*)(const char *, int, int (*)(const char *, int), glob_t *))(void (*)(void))NEXT(glob64));
}

/* ---- nftw and ftw -------------------------------------------------------------------------------------------------------- */

typedef int visit_t(const char *, const struct stat *, int, struct FTW *);
typedef int old_visit_t(const char *, const struct stat *, int);

/* A directory that a walk has come through. */
struct known {
    ino_t inode;
    dev_t device;
};

static int compare_known(const void *a, const void *b) {
    const struct known *one = a, *other = b;
    if (one->inode != other->inode)
        return one->inode < other->inode ? -1 : 1;
    return one->device < other->device ? -1 : one->device > other->device;
}

/* A walk under way. `path`: where it is, as the program named it; `known`: a tree of tsearch, if links are followed: no directory is
 * walked through twice. */
struct tour {
    void *known;
    visit_t *visit;
    old_visit_t *old; /* of ftw */
    int flags;
    dev_t device;
    char path[FSX_STATE_PATH];
};

static int tell(const struct tour *tour, const struct stat *about, int kind, struct FTW *place) {
    if (tour->visit != NULL)
        return tour->visit(tour->path, about, kind, place);
    return tour->old(tour->path, about, kind == FTW_SL || kind == FTW_SLN ? FTW_NS : kind);
}

static int tour_from(struct tour *tour, int level, int base);

/* The children of the directory at tour->path, which is `length` long. */
static int tour_children(struct tour *tour, DIR *stream, size_t length, int level) {
    int result = 0;
    const struct dirent *found;
    while (result == 0 && (found = readdir(stream)) != NULL) {
        if (strcmp(found->d_name, ".") == 0 || strcmp(found->d_name, "..") == 0)
            continue;
        const char *slash = tour->path[length - 1] == '/' ? "" : "/";
        if (snprintf(tour->path + length, sizeof tour->path - length, "%s%s", slash, found->d_name) >=
            (int)(sizeof tour->path - length)) {
            errno = ENAMETOOLONG;
            return -1;
        }
        result = tour_from(tour, level + 1, (int)(length + strlen(slash)));
        tour->path[length] = '\0';
        if ((tour->flags & FTW_ACTIONRETVAL) != 0 && result == FTW_SKIP_SIBLINGS)
            return 0;
    }
    return result;
}

static int tour_from(struct tour *tour, int level, int base) {
    struct FTW place = {.base = base, .level = level};
    struct stat about = {0};
    const bool physical = (tour->flags & FTW_PHYS) != 0;
    int kind = FTW_F;
    if ((physical ? lstat(tour->path, &about) : stat(tour->path, &about)) != 0) {
        if (level == 0 || (errno != ENOENT && errno != EACCES))
            return -1;
        kind = !physical && lstat(tour->path, &about) == 0 && S_ISLNK(about.st_mode) ? FTW_SLN : FTW_NS;
    } else if (S_ISLNK(about.st_mode)) {
        kind = FTW_SL;
    }
    if ((tour->flags & FTW_MOUNT) != 0 && kind != FTW_NS && level > 0 && about.st_dev != tour->device)
        return 0;
    tour->device = level == 0 ? about.st_dev : tour->device;
    if (!S_ISDIR(about.st_mode) || kind == FTW_NS)
        return tell(tour, &about, kind, &place);
    if (!physical) {
        struct known *here = malloc(sizeof *here);
        if (here == NULL)
            return -1;
        *here = (struct known){about.st_ino, about.st_dev};
        struct known *const *there = tsearch(here, &tour->known, compare_known);
        if (there == NULL || *there != here) {
            free(here);
            return there == NULL ? -1 : 0;
        }
    }
    DIR *stream = opendir(tour->path);
    if (stream == NULL)
        return errno == EACCES ? tell(tour, &about, FTW_DNR, &place) : -1;
    const bool depth = (tour->flags & FTW_DEPTH) != 0;
    int result = depth ? 0 : tell(tour, &about, FTW_D, &place);
    if (!depth && (tour->flags & FTW_ACTIONRETVAL) != 0 && result == FTW_SKIP_SUBTREE) {
        closedir(stream);
        return 0;
    }
    const int before = (tour->flags & FTW_CHDIR) != 0 ? open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (result == 0 && before >= 0)
        result = fchdir(dirfd(stream));
    if (result == 0)
        result = tour_children(tour, stream, strlen(tour->path), level);
    closedir(stream);
    if (before >= 0) {
        const int kept = errno;
        result = fchdir(before) != 0 && result == 0 ? -1 : result;
        close(before);
        errno = kept;
    }
    return result == 0 && depth ? tell(tour, &about, FTW_DP, &place) : result;
}

static int start_tour(const char *path, visit_t *visit, old_visit_t *old, int flags) {
    struct tour *tour = malloc(sizeof *tour);
    if (tour == NULL)
        return -1;
    *tour = (struct tour){.visit = visit, .old = old, .flags = flags};
    size_t length = strlen(path);
    int result = -1;
    if (length >= sizeof tour->path)
        errno = ENAMETOOLONG;
    else {
        memcpy(tour->path, path, length + 1);
        while (length > 1 && tour->path[length - 1] == '/')
            tour->path[--length] = '\0';
        if ((flags & FTW_CHDIR) != 0 && realpath(path, tour->path) == NULL) {
            free(tour);
            return -1;
        }
        const char *name = strrchr(tour->path, '/');
        result = tour_from(tour, 0, name == NULL || name[1] == '\0' ? 0 : (int)(name + 1 - tour->path));
        if ((flags & FTW_ACTIONRETVAL) != 0 && (result == FTW_SKIP_SUBTREE || result == FTW_SKIP_SIBLINGS))
            result = 0;
    }
    tdestroy(tour->known, free);
    free(tour);
    return result;
}

#define NFTW(name, type)                                                                                           \
    FSX_CALL int name(const char *path, int (*visit)(const char *, const struct type *, int, struct FTW *), int most, \
                      int flags) {                                                                                 \
        struct fsx_way way;                                                                                        \
        if (!concerns(AT_FDCWD, path, &way))                                                                       \
            return NEXT(name)(way.path, visit, most, flags);                                                       \
        return start_tour(path, (visit_t *)visit, NULL, flags);                                                    \
    }
NFTW(nftw, stat)
NFTW(nftw64, stat64)
#define FTW(name, type)                                                                                    \
    FSX_CALL int name(const char *path, int (*visit)(const char *, const struct type *, int), int most) {  \
        struct fsx_way way;                                                                                \
        if (!concerns(AT_FDCWD, path, &way))                                                               \
            return NEXT(name)(way.path, visit, most);                                                      \
        return start_tour(path, NULL, (old_visit_t *)visit, 0);                                            \
    }
FTW(ftw, stat)
FTW(ftw64, stat64)
