/* preload_names.c: what calls say that look at names, change them and list them, as text: on a mount, with libfanstore-io.so beside one,
 * and without one, it must be the same. Used by test_preload_unmounted.py.
 *
 *   preload_names ROOT OUTSIDE    ROOT is the dataset of that test, OUTSIDE an empty directory that can be written to
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

static const char *root;
static size_t root_bytes;

static void say(const char *what, const char *name, long result) {
    const int error = errno;
    printf("%s %s: %ld %s\n", what, strncmp(name, root, root_bytes) == 0 ? name + root_bytes : name, result,
           result < 0 ? strerrorname_np(error) : "");
    errno = 0;
}

/* What is free changes from one moment to the next. */
static unsigned long free_blocks(unsigned long blocks) { return blocks > 0; }

/* Without the mount point, which has its own name in every run. */
static void say_text(const char *what, const char *text) {
    if (text == NULL)
        printf("%s: %s\n", what, strerrorname_np(errno));
    else if (strncmp(text, root, root_bytes) == 0)
        printf("%s: ROOT%s\n", what, text + root_bytes);
    else
        printf("%s: %s\n", what, text);
    errno = 0;
}

static void say_changes(const char *name, const char *outside) {
    char one[PATH_MAX + 8], other[PATH_MAX + 16];
    struct utimbuf times = {0, 0};
    static const int opens[] = {O_WRONLY, O_RDWR, O_RDONLY | O_TRUNC, O_WRONLY | O_CREAT, O_RDONLY | O_CREAT,
                                O_WRONLY | O_CREAT | O_EXCL, O_RDONLY | O_DIRECTORY, O_RDONLY | O_NOFOLLOW,
                                O_RDWR | O_TMPFILE, O_WRONLY | O_APPEND, O_RDONLY | O_CREAT | O_EXCL, O_RDONLY};
    for (size_t i = 0; i < sizeof opens / sizeof *opens; i++) {
        const int fd = open(name, opens[i], 0600);
        printf("open %x ", (unsigned)opens[i]);
        say("open", name, fd);
        if (fd >= 0)
            close(fd);
    }
    say("mkdir", name, mkdir(name, 0700));
    say("mkfifo", name, mkfifo(name, 0600));
    say("mknod", name, mknod(name, S_IFREG | 0600, 0));
    say("symlink", name, symlink("target", name));
    say("unlink", name, unlink(name));
    say("rmdir", name, rmdir(name));
    say("unlinkat", name, unlinkat(AT_FDCWD, name, AT_REMOVEDIR));
    say("chmod", name, chmod(name, 0600));
    say("fchmodat", name, fchmodat(AT_FDCWD, name, 0600, 0));
    say("chown", name, chown(name, 0, 0));
    say("lchown", name, lchown(name, 0, 0));
    say("utime", name, utime(name, &times));
    say("utimes", name, utimes(name, NULL));
    say("lutimes", name, lutimes(name, NULL));
    say("utimensat", name, utimensat(AT_FDCWD, name, NULL, AT_SYMLINK_NOFOLLOW));
    say("truncate", name, truncate(name, 0));
    say("setxattr", name, setxattr(name, "user.x", "y", 1, 0));
    say("removexattr", name, removexattr(name, "user.x"));
    snprintf(one, sizeof one, "%s/file", outside);
    close(open(one, O_WRONLY | O_CREAT, 0600));
    if (strlen(name) > root_bytes + 2) { /* not the mount point, whose parent is another directory */
        say("rename away", name, rename(name, one));
        say("rename to", name, rename(one, name));
        snprintf(other, sizeof other, "%s/elsewhere", root);
        say("rename inside", name, rename(name, other));
    }
    snprintf(other, sizeof other, "%s/other", outside);
    say("link away", name, link(name, other));
    say("link to", name, link(one, name));
    say("file is still there", "", access(one, F_OK));
    unlink(one);
}

static void say_looks(const char *name) {
    char text[PATH_MAX];
    struct stat about;
    struct statfs system;
    struct statvfs other;
    say("stat", name, stat(name, &about));
    printf("inode %lu mode %o\n", about.st_ino, about.st_mode);
    say("lstat", name, lstat(name, &about));
    printf("inode %lu mode %o size %ld\n", about.st_ino, about.st_mode, about.st_size);
    for (int mode = 0; mode < 8; mode++)
        say("access", name, access(name, mode));
    say("faccessat", name, faccessat(AT_FDCWD, name, R_OK, AT_SYMLINK_NOFOLLOW));
    ssize_t length = readlink(name, text, 5);
    printf("%.*s ", (int)(length < 0 ? 0 : length), text);
    say("readlink", name, length);
    say_text("realpath", realpath(name, NULL));
    say("getxattr", name, getxattr(name, "user.fanstore.codec", text, sizeof text));
    length = getxattr(name, "user.fanstore.partition", text, sizeof text);
    printf("%.*s ", (int)(length < 0 ? 0 : length), text);
    say("getxattr", name, length);
    say("getxattr size", name, getxattr(name, "user.fanstore.checksum", NULL, 0));
    say("getxattr short", name, getxattr(name, "user.fanstore.checksum", text, 1));
    say("getxattr none", name, lgetxattr(name, "user.nothing", text, sizeof text));
    say("getxattr other", name, lgetxattr(name, "security.capability", text, sizeof text));
    say("listxattr", name, length = listxattr(name, text, sizeof text));
    for (const char *each = text; each < text + length; each += strlen(each) + 1)
        printf("  %s\n", each);
    say("listxattr short", name, llistxattr(name, text, 3));
    memset(&system, 0, sizeof system);
    say("statfs", name, statfs(name, &system));
    printf("%lx %lx %lu %lu %lu %lu %lu %ld %ld %lx\n", (unsigned long)system.f_type, (unsigned long)system.f_bsize,
           system.f_blocks, free_blocks(system.f_bfree), free_blocks(system.f_bavail), system.f_files,
           free_blocks(system.f_ffree), (long)system.f_namelen,
           (long)system.f_frsize, (unsigned long)system.f_flags);
    memset(&other, 0, sizeof other);
    say("statvfs", name, statvfs(name, &other));
    printf("%lu %lu %lu %lu %lu %lx\n", other.f_bsize, other.f_frsize, other.f_blocks, other.f_files, other.f_namemax,
           other.f_flag);
    say("pathconf", name, pathconf(name, _PC_NAME_MAX));
    say("chdir", name, chdir(name));
    say_text("getcwd", getcwd(text, sizeof text));
    char *again = get_current_dir_name();
    say_text("current", again);
    free(again);
    say("stat above", "", stat("..", &about));
    printf("%u\n", about.st_mode);
    say("getcwd short", "", getcwd(text, 3) == NULL ? -1 : 0);
    chdir("/");
}

static void say_glob(const char *pattern, int flags) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, pattern[0] == '/' ? "%s%s" : "%.0s%s", root, pattern);
    glob_t found;
    const int result = glob(path, flags, NULL, &found);
    printf("glob %s: %d\n", pattern, result);
    for (size_t i = 0; result == 0 && i < found.gl_pathc; i++)
        say_text("", found.gl_pathv[i]);
    if (result == 0)
        globfree(&found);
}

/* Of a name that leads out of the dataset. */
static void say_away(const char *name) {
    char text[PATH_MAX];
    struct stat about;
    say("stat", name, stat(name, &about));
    printf("inode %lu mode %o\n", about.st_ino, about.st_mode);
    say("access", name, access(name, R_OK));
    say_text("realpath", realpath(name, NULL));
    say("getxattr", name, getxattr(name, "user.fanstore.codec", text, sizeof text));
    const int fd = open(name, O_RDONLY);
    say("open", name, fd);
    say("close", name, close(fd));
    FILE *stream = fopen(name, "r");
    say("fopen", name, stream == NULL ? -1 : fclose(stream));
    say("chdir", name, chdir(name));
    say_text("getcwd", getcwd(text, sizeof text));
    chdir("/");
    snprintf(text, sizeof text, "%s*", name);
    say_glob(text + root_bytes, 0);
}

static void say_descriptor(const char *name) {
    char text[256];
    struct statfs system;
    struct stat about;
    const int fd = open(name, O_RDONLY);
    say("open", name, fd);
    if (fd < 0)
        return;
    say("fchmod", name, fchmod(fd, 0600));
    say("fchown", name, fchown(fd, 0, 0));
    say("futimens", name, futimens(fd, NULL));
    say("fsetxattr", name, fsetxattr(fd, "user.x", "y", 1, 0));
    say("fgetxattr", name, fgetxattr(fd, "user.fanstore.codec", text, sizeof text));
    say("flistxattr", name, flistxattr(fd, text, sizeof text));
    say("fstatfs", name, fstatfs(fd, &system));
    printf("%lx\n", (unsigned long)system.f_type);
    say("openat", name, openat(fd, "nothing", O_RDONLY));
    say("openat itself", name, close(openat(fd, ".", O_RDONLY)));
    say("mkdirat", name, mkdirat(fd, "new", 0700));
    say("unlinkat", name, unlinkat(fd, "one", 0));
    say("fstatat", name, fstatat(fd, "one", &about, 0));
    say("readlinkat", name, readlinkat(fd, "up", text, sizeof text));
    say("fchdir", name, fchdir(fd));
    char here[PATH_MAX];
    say_text("getcwd", getcwd(here, sizeof here));
    say("one is here", "", access("one", R_OK));
    say("and above", "", access("../small.txt", R_OK));
    say("far above", "", access("../../../../../../../../../../../../etc/passwd", R_OK));
    snprintf(here, sizeof here, "../../%s/small.txt", strrchr(root, '/') + 1);
    say("around", "", access(here, R_OK));
    const int there = open("..", O_RDONLY | O_DIRECTORY); /* only looked at */
    say("open above", "", there);
    if (there >= 0) {
        say("its stat", "", fstat(there, &about));
        printf("%u\n", about.st_mode);
        close(there);
    }
    chdir("/");
    say("ftruncate", name, ftruncate(fd, 0));
    DIR *stream = fdopendir(dup(fd));
    say("fdopendir", name, stream == NULL ? -1 : 0);
    for (const struct dirent *found; stream != NULL && (found = readdir(stream)) != NULL;)
        printf("  %lu %d %s\n", strcmp(found->d_name, "..") == 0 ? 0 : found->d_ino, found->d_type, found->d_name);
    if (stream != NULL)
        closedir(stream);
    close(fd);
}

static int visit(const char *path, const struct stat *about, int kind, struct FTW *place) {
    printf("  %s %d %d %d %o\n", path + root_bytes, kind, place->base - (int)root_bytes, place->level,
           kind == FTW_NS ? 0 : about->st_mode);
    return strstr(path, "/stop") != NULL;
}

static int visit_old(const char *path, const struct stat *about, int kind) {
    printf("  %s %d %o\n", path + root_bytes, kind, kind == FTW_NS ? 0 : about->st_mode);
    return 0;
}

static int not_hidden(const struct dirent *found) { return found->d_name[0] != '.'; }

static void say_walks(void) {
    char path[PATH_MAX];
    struct dirent **list = NULL;
    int count = scandir(root, &list, not_hidden, alphasort);
    say("scandir", root, count);
    for (int i = 0; i < count; i++) {
        printf("  %s %lu\n", list[i]->d_name, list[i]->d_ino);
        free(list[i]);
    }
    free(list);
    const int fd = open(root, O_RDONLY | O_DIRECTORY);
    count = scandirat(fd, "a", &list, NULL, NULL);
    say("scandirat", "a", count);
    for (int i = 0; i < count; i++) {
        printf("  %s\n", list[i]->d_name);
        free(list[i]);
    }
    free(list);
    close(fd);
    snprintf(path, sizeof path, "%s/small.txt", root);
    say("scandir of a file", "", scandir(path, &list, NULL, NULL));
    snprintf(path, sizeof path, "%s/nothing", root);
    say("scandir of nothing", "", scandir(path, &list, NULL, NULL));
    say_glob("/*", 0);
    say_glob("/a/*", GLOB_MARK);
    say_glob("/*/*/t*", 0);
    say_glob("/nothing*", 0);
    say_glob("/a/o[mn]e", GLOB_NOSORT);
    chdir(root);
    say_glob("*.txt", 0);
    say_glob("a/b/*", 0);
    chdir("/");
    printf("nftw %d\n", nftw(root, visit, 10, FTW_PHYS));
    printf("nftw depth %d\n", nftw(root, visit, 10, FTW_PHYS | FTW_DEPTH));
    snprintf(path, sizeof path, "%s/walk", root);
    printf("nftw following %d\n", nftw(path, visit, 10, 0));
    snprintf(path, sizeof path, "%s/a/", root);
    printf("nftw with change of directory %d\n", nftw(path, visit, 10, FTW_PHYS | FTW_CHDIR));
    snprintf(path, sizeof path, "%s/small.txt", root);
    printf("nftw of a file %d\n", nftw(path, visit, 10, FTW_PHYS));
    snprintf(path, sizeof path, "%s/nothing", root);
    say("nftw of nothing", "", nftw(path, visit, 10, FTW_PHYS));
    snprintf(path, sizeof path, "%s/walk", root);
    printf("ftw %d\n", ftw(path, visit_old, 10));
    snprintf(path, sizeof path, "%s/loops", root);
    printf("nftw of loops %d\n", nftw(path, visit, 10, 0));
}

/* Links elsewhere that lead to the dataset. */
static void say_links(const char *outside) {
    char data[PATH_MAX], name[PATH_MAX + 32], text[PATH_MAX];
    struct stat about;
    static const char *const ends[] = {"", "/", "/small.txt", "/a/one", "/nothing", "/a/up/small.txt", "/small.txt/x"};
    snprintf(data, sizeof data, "%s/data", outside);
    say("symlink", "data", symlink(root, data));
    snprintf(name, sizeof name, "%s/second", outside);
    say("symlink", "second", symlink("data", name));
    for (size_t i = 0; i < 2 * sizeof ends / sizeof *ends; i++) {
        snprintf(name, sizeof name, "%s/%s%s", outside, i % 2 == 0 ? "data" : "second", ends[i / 2]);
        const char *shown = ends[i / 2];
        say("stat", shown, stat(name, &about));
        say("lstat", shown, lstat(name, &about));
        printf("mode %o\n", about.st_mode);
        say("access", shown, access(name, R_OK));
        const int fd = open(name, O_RDONLY);
        say("open", shown, fd);
        say("read", shown, read(fd, text, 100));
        close(fd);
        say("open to write", shown, open(name, O_WRONLY | O_CREAT, 0600));
        say("mkdir", shown, mkdir(name, 0700));
        say_text("realpath", realpath(name, NULL));
        DIR *stream = opendir(name);
        say("opendir", shown, stream == NULL ? -1 : closedir(stream));
        say("chdir", shown, chdir(name));
        say_text("getcwd", getcwd(text, sizeof text));
        chdir("/");
    }
    chdir(outside);
    say("relative", "", access("second/small.txt", R_OK));
    chdir("/");
    unlink(data);
    snprintf(name, sizeof name, "%s/second", outside);
    unlink(name);
}

static void say_streams(void) {
    static const char *const modes[] = {"r", "rb", "re", "r+", "w", "a", "wx", "nonsense"};
    static const char *const names[] = {"a/one", "a", "nothing", "a/nothing/x", "link", "dangling"};
    char path[PATH_MAX], line[64];
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
            snprintf(path, sizeof path, "%s/%s", root, names[k]);
            FILE *stream = fopen(path, modes[i]);
            printf("fopen %s ", modes[i]);
            say("fopen", path, stream == NULL ? -1 : (long)fread(line, 1, sizeof line, stream));
            if (stream != NULL && k != 1) { /* of a directory it is the file system's own */
                say("seek", path, fseek(stream, -1, SEEK_END));
                say("where", path, ftell(stream));
            }
            if (stream != NULL)
                fclose(stream);
        }
    snprintf(path, sizeof path, "%s/small.txt", root);
    FILE *stream = freopen(path, "r", stdin);
    say("freopen", path, stream == NULL ? -1 : 0);
    printf("stdin: %s", stream == NULL ? "nothing\n" : fgets(line, sizeof line, stdin));
}

int main(int argc, char **argv) {
    static const char *const names[] = {"",      "/",         "/a",        "/a/one",  "/small.txt", "/nothing",    "/a/nothing",
                                        "/nothing/below", "/small.txt/below", "/link", "/dangling", "/a/up",
                                        "/a/up/small.txt", "/a/../small.txt", "/loops/loop", "/loops/loop/x", "/empty",
                                        "/a/one/", "/link/", "/nothing/", "/a/.", "/a/..", "/a//b/./large", "/dirlink",
                                        "/dirlink/one", "/dirlink/../small.txt", "/.", "/run.sh", "/walk/tosub/.."};
    /* These lead to files of the system: nothing is changed there, nor by other tests, which make users meanwhile. */
    static const char *const away[] = {"/abs", "/out", "/out/hostname",
                                       "/a/../../../../../../../../../../etc/hostname"};
    if (argc != 3)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    root = argv[1];
    root_bytes = strlen(root);
    char path[PATH_MAX];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s%s", root, names[i]);
        printf("--- %s\n", names[i]);
        say_looks(path);
        say_descriptor(path);
        say_changes(path, argv[2]);
    }
    for (size_t i = 0; i < sizeof away / sizeof *away; i++) {
        snprintf(path, sizeof path, "%s%s", root, away[i]);
        printf("--- %s\n", away[i]);
        say_away(path);
    }
    char longer[300];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    snprintf(path, sizeof path, "%s/%s", root, longer);
    say("too long", "", access(path, F_OK));
    say_walks();
    say_links(argv[2]);
    say_streams();
    return 0;
}
