/* lookup.c: names without a mount, where nobody else can be asked; see preload.h.
 *
 * Most names are found by fsx_resolve. What that leaves to a mount is looked at here, step by step as the kernel does it: symbolic
 * links, "..", names that are not there, the control directory. A name can leave the dataset on its way (a link to /etc, "..") and
 * come back; then the rest of it is a path of the kernel's.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "preload/outputs.h"
#include "preload/preload.h"

#define CONTROL_NAME ".fanstore"
/* As the kernel has it. */
#define LINKS_MOST 40

/* In the order of fanstore/job/node.py; the last one is a link to a file of the job's directory. */
static const char *const CONTROL_FILES[] = {"stats.json", "nodes.json", "config.json", "report.json", "order"};
#define CONTROL_COUNT (sizeof CONTROL_FILES / sizeof *CONTROL_FILES)

bool fsx_is_control(int64_t entry) { return entry >= fsx_at.index.entries && !fsx_is_output(entry); }

const char *fsx_control_name(int64_t entry) {
    const int64_t number = entry - fsx_at.index.entries - 1;
    return number >= 0 && number < (int64_t)CONTROL_COUNT ? CONTROL_FILES[number] : NULL;
}

uint32_t fsx_mode_of(int64_t entry) {
    if (fsx_is_output(entry))
        return fsx_output_mode(entry);
    if (!fsx_is_control(entry))
        return fsx_at.index.mode[entry];
    if (entry == fsx_at.index.entries)
        return S_IFDIR | 0555;
    return entry - fsx_at.index.entries == CONTROL_COUNT ? S_IFLNK | 0777 : S_IFREG | 0444;
}

bool fsx_may(int64_t entry, uint32_t bit) {
    const uint32_t mode = fsx_mode_of(entry);
    if (fsx_at.state->uid == 0) /* root: all but to run what nobody may run */
        return bit != S_IXUSR || S_ISDIR(mode) || (mode & 0111) != 0;
    return (mode & bit) != 0;
}

/* A child of a directory, -1 if there is none. */
static int64_t child_of(int64_t directory, const char *name, size_t bytes) {
    const struct fsx_index *x = &fsx_at.index;
    if (fsx_is_output(directory))
        return -1;
    if (fsx_is_control(directory)) {
        for (size_t i = 0; i < CONTROL_COUNT; i++)
            if (strlen(CONTROL_FILES[i]) == bytes && memcmp(CONTROL_FILES[i], name, bytes) == 0 &&
                (i + 1 < CONTROL_COUNT || fsx_order_file() != NULL))
                return (int64_t)x->entries + 1 + (int64_t)i;
        return -1;
    }
    if (directory == 0 && bytes == sizeof CONTROL_NAME - 1 && memcmp(name, CONTROL_NAME, bytes) == 0)
        return x->entries;
    return fsx_index_lookup(x, (uint64_t)directory, (const uint8_t *)name, bytes);
}

size_t fsx_link_target(int64_t entry, char room[FSX_STATE_PATH], const char **target) {
    const struct fsx_index *x = &fsx_at.index;
    if (fsx_is_output(entry)) {
        const ssize_t bytes = fsx_output_link(entry, room, FSX_STATE_PATH);
        *target = room;
        return bytes < 0 ? 0 : (size_t)bytes;
    }
    if (fsx_is_control(entry)) {
        const char *order = fsx_order_file();
        *target = order != NULL ? order : "";
        return strlen(*target);
    }
    *target = (const char *)x->links + x->offset[entry];
    return (size_t)x->size[entry];
}

/* A walk under way.
 *   at    where it is: an entry, or FSX_ELSEWHERE: outside, where `rest` is an absolute path
 *   rest  what is left of the name, an end of `room`
 */
struct walk {
    int64_t at;
    char *rest;
    bool moved; /* the rest is not an end of the name that was given any more */
    char room[2 * FSX_STATE_PATH];
};

/* Put `bytes` of text and a slash before what is left; false if it gets longer than the kernel takes. */
static bool put_before(struct walk *walk, const char *text, size_t bytes) {
    char *end = walk->room + sizeof walk->room;
    const size_t left = strlen(walk->rest);
    if (bytes + left + 2 > FSX_STATE_PATH)
        return false;
    char *start = end - (bytes + 1 + left + 1);
    memmove(start + bytes + 1, walk->rest, left + 1);
    memcpy(start, text, bytes);
    start[bytes] = '/';
    walk->rest = start;
    walk->moved = true;
    return true;
}

static bool is_point(const char *path, size_t bytes) {
    const struct fsx_state *state = fsx_at.state;
    for (uint32_t i = 0; i < state->points; i++)
        if (strlen(state->point[i]) == bytes && memcmp(state->point[i], path, bytes) == 0)
            return true;
    return false;
}

/* From outside: does the path come to the dataset? By its text alone, since the directories on the way need not be there. */
static bool enter(struct walk *walk) {
    char path[FSX_STATE_PATH];
    size_t length = 0;
    for (char *at = walk->rest; *at != '\0';) {
        while (*at == '/')
            at++;
        char *end = strchrnul(at, '/');
        const size_t bytes = (size_t)(end - at);
        if (bytes == 2 && at[0] == '.' && at[1] == '.') {
            while (length > 0 && path[--length] != '/')
                ;
        } else if (bytes > 0 && !(bytes == 1 && at[0] == '.')) {
            if (length + 1 + bytes >= sizeof path)
                return false;
            path[length] = '/';
            memcpy(path + length + 1, at, bytes);
            length += bytes + 1;
        }
        at = end;
        if (is_point(path, length)) {
            walk->at = 0;
            walk->rest = at;
            return true;
        }
    }
    return false;
}

/* Where it begins. False: the kernel's affair. */
static bool begin(struct walk *walk, int directory, const char *path) {
    const size_t bytes = strlen(path);
    walk->rest = walk->room + sizeof walk->room - bytes - 1;
    memcpy(walk->rest, path, bytes + 1);
    walk->at = FSX_ELSEWHERE;
    walk->moved = false;
    if (path[0] == '/')
        return true;
    walk->at = fsx_directory_entry(directory);
    if (fsx_is_output(walk->at)) { /* its permissions are not known yet */
        struct fsx_about about;
        walk->at = fsx_output_entry(fsx_output_inode(walk->at), fsx_output_about(walk->at, &about) == 0 ? about.mode : S_IFDIR);
    }
    if (walk->at >= 0)
        return true;
    if (directory != AT_FDCWD)
        return false;
    char here[FSX_STATE_PATH];
    const long length = syscall(SYS_getcwd, here, sizeof here); /* with its NUL */
    if (length < 2 || here[0] != '/' || !put_before(walk, here, (size_t)length - 1))
        return false;
    walk->moved = false;
    return true;
}

static int64_t fail(struct fsx_way *way, int error) {
    way->error = error;
    return FSX_NOTHING;
}

/* The parent directory of the mount point. */
static size_t above_point(void) {
    const char *point = fsx_at.state->point[0];
    return (size_t)(strrchr(point, '/') - point);
}

static int64_t walk_on(struct walk *walk, bool follow, struct fsx_way *way) {
    const struct fsx_index *x = &fsx_at.index;
    for (int links = 0;;) {
        if (walk->at == FSX_ELSEWHERE && !enter(walk))
            return FSX_ELSEWHERE;
        const bool slash = walk->rest[0] == '/';
        while (walk->rest[0] == '/')
            walk->rest++;
        if (slash && !S_ISDIR(fsx_mode_of(walk->at)))
            return fail(way, ENOTDIR);
        if (walk->rest[0] == '\0')
            return walk->at;
        if (!S_ISDIR(fsx_mode_of(walk->at)))
            return fail(way, ENOTDIR);
        if (!fsx_may(walk->at, S_IXUSR))
            return fail(way, EACCES);
        const char *name = walk->rest;
        char *end = strchrnul(walk->rest, '/');
        const size_t bytes = (size_t)(end - name);
        walk->rest = end;
        if (bytes == 1 && name[0] == '.')
            continue;
        if (bytes == 2 && name[0] == '.' && name[1] == '.') {
            if (fsx_is_output(walk->at)) {
                const int64_t above = fsx_output_child(walk->at, "..", 2, way);
                if (above < 0)
                    return fail(way, way->error != 0 ? way->error : ENOENT);
                walk->at = above;
                continue;
            }
            if (walk->at != 0) {
                walk->at = fsx_is_control(walk->at) ? 0 : x->parent[walk->at];
                continue;
            }
            walk->at = FSX_ELSEWHERE;
            if (!put_before(walk, fsx_at.state->point[0], above_point()))
                return fail(way, ENAMETOOLONG);
            continue;
        }
        if (bytes > FSX_NAME_MAX)
            return fail(way, ENAMETOOLONG);
        const bool last = end[strspn(end, "/")] == '\0';
        int64_t child = child_of(walk->at, name, bytes);
        if (child < 0 && fsx_outputs_on() && !fsx_is_control(walk->at))
            child = fsx_output_child(walk->at, name, bytes, way);
        way->parent = last ? walk->at : -1;
        memcpy(way->last, name, bytes);
        way->last[bytes] = '\0';
        if (child < 0)
            return child == FSX_NOTHING ? FSX_NOTHING : fail(way, ENOENT);
        if (S_ISLNK(fsx_mode_of(child)) && (!last || follow || *end == '/')) {
            const char *target;
            char room[FSX_STATE_PATH];
            const size_t length = fsx_link_target(child, room, &target);
            if (++links > LINKS_MOST)
                return fail(way, ELOOP);
            if (length == 0)
                return fail(way, ENOENT);
            /* Without a slash behind the last name, which would ask for a directory. */
            const bool bare = last && *end == '\0';
            if (!put_before(walk, target, length))
                return fail(way, ENAMETOOLONG);
            if (bare) {
                memmove(walk->rest + 1, walk->rest, length);
                walk->rest++;
            }
            if (target[0] == '/')
                walk->at = FSX_ELSEWHERE;
            continue;
        }
        walk->at = child;
    }
}

/* A name of the kernel's that leads nowhere there: perhaps a symbolic link on its way leads to the dataset. */
static int64_t through_links(const char *path, bool follow, struct fsx_way *way) {
    struct walk walk;
    char target[FSX_STATE_PATH];
    if (!begin(&walk, AT_FDCWD, path))
        return FSX_ELSEWHERE;
    for (int links = 0; links < LINKS_MOST;) {
        char *end = walk.rest;
        ssize_t bytes = -1;
        do { /* to the end of the next part */
            end += strspn(end, "/");
            end += strcspn(end, "/");
            const bool last = end[strspn(end, "/")] == '\0';
            if (last && *end == '\0' && !follow)
                return FSX_ELSEWHERE;
            const char kept = *end;
            *end = '\0';
            bytes = syscall(SYS_readlinkat, AT_FDCWD, walk.rest, target, sizeof target - 1);
            const bool gone = bytes < 0 && errno != EINVAL;
            size_t above = (size_t)(strrchr(walk.rest, '/') + 1 - walk.rest);
            *end = kept;
            if (gone || (bytes < 0 && last))
                return FSX_ELSEWHERE;
            if (bytes > 0 && target[0] != '/') { /* relative to where the link is */
                if (above + (size_t)bytes >= sizeof target)
                    return FSX_ELSEWHERE;
                memmove(target + above, target, (size_t)bytes);
                memcpy(target, walk.rest, above);
                bytes += (ssize_t)above;
            }
        } while (bytes < 0);
        const bool bare = *end == '\0';
        walk.rest = end;
        if (!put_before(&walk, target, (size_t)bytes))
            return FSX_ELSEWHERE;
        if (bare) {
            memmove(walk.rest + 1, walk.rest, (size_t)bytes);
            walk.rest++;
        }
        links++;
        struct walk tried = walk;
        tried.rest = tried.room + (walk.rest - walk.room);
        const int64_t found = walk_on(&tried, follow, way);
        if (found != FSX_ELSEWHERE)
            return found;
        way->error = 0;
    }
    return FSX_ELSEWHERE;
}

/* Is it sure that the kernel knows this name? */
static bool is_known(int directory, const char *path) {
    if (path == NULL || (path[0] != '/' && directory != AT_FDCWD) || strlen(path) >= FSX_STATE_PATH)
        return true;
    return syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

int64_t fsx_look_up(int directory, const char *path, bool follow, struct fsx_way *way) {
    way->path = path;
    way->error = 0;
    way->parent = -1;
    way->about.inode = 0;
    const int64_t quick = fsx_resolve(directory, path);
    if (quick >= 0 && !(follow && S_ISLNK(fsx_at.index.mode[quick])))
        return quick;
    const int kept = errno;
    if (quick == FSX_ELSEWHERE && (!fsx_is_open() || path == NULL || strstr(path, "..") == NULL)) {
        const int64_t found = !fsx_is_open() || is_known(directory, path) ? FSX_ELSEWHERE : through_links(path, follow, way);
        errno = kept;
        return found;
    }
    struct walk walk;
    if (strlen(path) >= FSX_STATE_PATH)
        return quick == FSX_ELSEWHERE ? FSX_ELSEWHERE : fail(way, ENAMETOOLONG);
    int64_t found = FSX_ELSEWHERE;
    if (begin(&walk, directory, path))
        found = walk_on(&walk, follow, way);
    if (found == FSX_ELSEWHERE && walk.moved) {
        strcpy(way->room, walk.rest);
        way->path = way->room;
    }
    errno = kept;
    return found;
}
