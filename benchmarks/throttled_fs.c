/* A view of a directory that is as slow as a shared file system: one metadata server, one pipe for the data.
 *
 * Usage: throttled_fs [options] SOURCE MOUNTPOINT...
 *   Every mount point is a client of its own (caches of its own in the kernel); all share the two servers:
 *   --metadata-latency-us N   a lookup, getattr, open, readlink or readdir takes so long after its turn has come
 *   --metadata-rate N         turns per second, for all clients together; 0: no limit
 *   --read-latency-us N       a read takes so long in addition to the time of its bytes
 *   --bandwidth N             bytes per second, for all clients together; 0: no limit
 *   --slice N                 bytes of a request that are served before others get their turn (0: all)
 *   --timeout SECONDS         how long a client may believe a name and its attributes (a float)
 *   --keep-data               a client keeps data when a file is opened again; otherwise opening drops it
 *   --writable                files and directories can be made, written and removed; otherwise it is read-only
 * Prints "ready" when all are mounted, stays in the foreground, and ends with SIGTERM, SIGINT, or when all are unmounted
 * by others. At the end one line of JSON on standard output: how often the servers were asked. On SIGUSR1 the same line.
 *
 * What costs nothing: close, statfs, opendir, and everything that the kernel answers from its caches. A lookup and an
 * open are one operation each; a Lustre client joins these two, but asks the server again at close. What is written takes
 * the same pipe as what is read; making and removing are operations.
 *
 * Used by harness/throttled.py, which compiles it and has the profiles. The source must not change beside it while it is
 * mounted: names are remembered for ever. A client does not learn what another one has changed of what it knows already. Locks: `clock_lock` (the two servers), `node_lock` (the table of names); neither is held
 * while another is taken, nor in a system call.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 312
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <getopt.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { CLIENTS_MAX = 64, THREADS = 64, READ_BYTES = 1 << 20, BUCKETS = 1 << 16 };

static struct {
    uint64_t metadata_latency_ns, metadata_turn_ns, read_latency_ns;
    double ns_per_byte;
    size_t slice;
    double timeout_s;
    int keep_data;
    int writable;
    int root;
} options = {.slice = SIZE_MAX, .timeout_s = 1.0, .root = -1};

/* --- The two servers -------------------------------------------------------------------------------------------------- */

/* Each is a queue: whoever comes gets the next free turn, and the answer arrives a latency later. */
static pthread_mutex_t clock_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t metadata_free_ns, data_free_ns; /* when the next turn begins; guarded by clock_lock */
static _Atomic uint64_t metadata_count, read_count, read_bytes;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_until(uint64_t time_ns) {
    struct timespec until = {.tv_sec = (time_t)(time_ns / 1000000000u), .tv_nsec = (long)(time_ns % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {
    }
}

/* Take a turn of `length_ns`; returns when it begins. */
static uint64_t take_turn(uint64_t *free_ns, uint64_t length_ns) {
    uint64_t now = now_ns();
    pthread_mutex_lock(&clock_lock);
    uint64_t begin = *free_ns > now ? *free_ns : now;
    *free_ns = begin + length_ns;
    pthread_mutex_unlock(&clock_lock);
    return begin;
}

static void wait_for_metadata(void) {
    atomic_fetch_add_explicit(&metadata_count, 1, memory_order_relaxed);
    sleep_until(take_turn(&metadata_free_ns, options.metadata_turn_ns) + options.metadata_latency_ns);
}

static void wait_for_data(size_t bytes) {
    atomic_fetch_add_explicit(&read_count, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&read_bytes, bytes, memory_order_relaxed);
    while (bytes > options.slice) {
        uint64_t slice_ns = (uint64_t)((double)options.slice * options.ns_per_byte);
        sleep_until(take_turn(&data_free_ns, slice_ns) + slice_ns);
        bytes -= options.slice;
    }
    uint64_t length_ns = (uint64_t)((double)bytes * options.ns_per_byte);
    sleep_until(take_turn(&data_free_ns, length_ns) + length_ns + options.read_latency_ns);
}

static void print_counts(void) {
    printf("{\"metadata_operations\": %" PRIu64 ", \"reads\": %" PRIu64 ", \"bytes\": %" PRIu64 "}\n",
           atomic_load(&metadata_count), atomic_load(&read_count), atomic_load(&read_bytes));
    fflush(stdout);
}

/* --- Names ------------------------------------------------------------------------------------------------------------ */

/* A path below the source. Its address is its inode number; it lives as long as the process. */
struct node {
    struct node *next; /* of the same bucket; guarded by node_lock */
    char path[];
};
static pthread_mutex_t node_lock = PTHREAD_MUTEX_INITIALIZER;
static struct node *nodes[BUCKETS]; /* guarded by node_lock */

static const char *path_of(fuse_ino_t inode) {
    return inode == FUSE_ROOT_ID ? "." : ((struct node *)(uintptr_t)inode)->path;
}

static size_t bucket_of(const char *path) {
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (; *path != '\0'; path++) {
        hash = (hash ^ (unsigned char)*path) * 1099511628211u;
    }
    return (size_t)(hash % BUCKETS);
}

/* NULL when there is no memory. */
static struct node *node_of(const char *path) {
    struct node **bucket = &nodes[bucket_of(path)];
    pthread_mutex_lock(&node_lock);
    struct node *node = *bucket;
    while (node != NULL && strcmp(node->path, path) != 0) {
        node = node->next;
    }
    if (node == NULL) {
        size_t length = strlen(path) + 1;
        node = malloc(sizeof *node + length);
        if (node != NULL) {
            memcpy(node->path, path, length);
            node->next = *bucket;
            *bucket = node;
        }
    }
    pthread_mutex_unlock(&node_lock);
    return node;
}

/* The path of a name in a directory; 0, or an error. */
static int path_in(char path[PATH_MAX], fuse_ino_t parent, const char *name) {
    int length = snprintf(path, PATH_MAX, "%s/%s", path_of(parent), name);
    return length < 0 || length >= PATH_MAX ? ENAMETOOLONG : 0;
}

/* --- Requests --------------------------------------------------------------------------------------------------------- */

static void do_init(void *data, struct fuse_conn_info *connection) {
    (void)data;
    connection->max_read = READ_BYTES; /* must be what the mount option says */
}

/* What is known of a path, and the number by which it is asked for from now on; 0, or an error. */
static int describe(const char *path, struct fuse_entry_param *entry) {
    *entry = (struct fuse_entry_param){.attr_timeout = options.timeout_s, .entry_timeout = options.timeout_s};
    if (fstatat(options.root, path, &entry->attr, AT_SYMLINK_NOFOLLOW) != 0) {
        return errno;
    }
    struct node *node = node_of(path);
    entry->ino = (fuse_ino_t)(uintptr_t)node;
    return node == NULL ? ENOMEM : 0;
}

static void do_lookup(fuse_req_t request, fuse_ino_t parent, const char *name) {
    wait_for_metadata();
    char path[PATH_MAX];
    struct fuse_entry_param entry;
    int error = path_in(path, parent, name);
    error = error != 0 ? error : describe(path, &entry);
    if (error != 0) {
        fuse_reply_err(request, error);
    } else {
        fuse_reply_entry(request, &entry);
    }
}

static void do_forget(fuse_req_t request, fuse_ino_t inode, uint64_t count) {
    (void)inode;
    (void)count;
    fuse_reply_none(request);
}

static void do_forget_multi(fuse_req_t request, size_t count, struct fuse_forget_data *forgotten) {
    (void)count;
    (void)forgotten;
    fuse_reply_none(request);
}

static void do_getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file) {
    (void)file;
    wait_for_metadata();
    struct stat status;
    if (fstatat(options.root, path_of(inode), &status, AT_SYMLINK_NOFOLLOW) != 0) {
        fuse_reply_err(request, errno);
        return;
    }
    fuse_reply_attr(request, &status, options.timeout_s);
}

static void do_readlink(fuse_req_t request, fuse_ino_t inode) {
    wait_for_metadata();
    char target[PATH_MAX];
    ssize_t length = readlinkat(options.root, path_of(inode), target, sizeof target - 1);
    if (length < 0) {
        fuse_reply_err(request, errno);
        return;
    }
    target[length] = '\0';
    fuse_reply_readlink(request, target);
}

static void do_open(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file) {
    wait_for_metadata();
    if (!options.writable && (file->flags & O_ACCMODE) != O_RDONLY) {
        fuse_reply_err(request, EROFS);
        return;
    }
    int fd = openat(options.root, path_of(inode), (file->flags & (O_ACCMODE | O_TRUNC)) | O_CLOEXEC);
    if (fd < 0) {
        fuse_reply_err(request, errno);
        return;
    }
    file->fh = (uint64_t)fd;
    file->keep_cache = options.keep_data != 0;
    if (fuse_reply_open(request, file) != 0) {
        close(fd); /* who asked is gone */
    }
}

static void do_create(
    fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *file) {
    wait_for_metadata();
    char path[PATH_MAX];
    int error = options.writable ? path_in(path, parent, name) : EROFS;
    int flags = (file->flags & (O_ACCMODE | O_EXCL)) | O_CREAT | O_CLOEXEC;
    int fd = error != 0 ? -1 : openat(options.root, path, flags, mode);
    struct fuse_entry_param entry;
    error = error != 0 ? error : fd < 0 ? errno : describe(path, &entry);
    file->fh = (uint64_t)fd;
    if ((error != 0 ? fuse_reply_err(request, error) : fuse_reply_create(request, &entry, file)) != 0 || error != 0) {
        if (fd >= 0) {
            close(fd);
        }
    }
}

static void do_mkdir(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode) {
    wait_for_metadata();
    char path[PATH_MAX];
    struct fuse_entry_param entry;
    int error = options.writable ? path_in(path, parent, name) : EROFS;
    error = error == 0 && mkdirat(options.root, path, mode) != 0 ? errno : error;
    error = error != 0 ? error : describe(path, &entry);
    if (error != 0) {
        fuse_reply_err(request, error);
    } else {
        fuse_reply_entry(request, &entry);
    }
}

static void remove_name(fuse_req_t request, fuse_ino_t parent, const char *name, int flags) {
    wait_for_metadata();
    char path[PATH_MAX];
    int error = options.writable ? path_in(path, parent, name) : EROFS;
    fuse_reply_err(request, error == 0 && unlinkat(options.root, path, flags) != 0 ? errno : error);
}

static void do_unlink(fuse_req_t request, fuse_ino_t parent, const char *name) {
    remove_name(request, parent, name, 0);
}

static void do_rmdir(fuse_req_t request, fuse_ino_t parent, const char *name) {
    remove_name(request, parent, name, AT_REMOVEDIR);
}

static void do_write(
    fuse_req_t request, fuse_ino_t inode, const char *data, size_t size, off_t offset, struct fuse_file_info *file) {
    (void)inode;
    ssize_t put = pwrite((int)file->fh, data, size, offset);
    if (put < 0) {
        fuse_reply_err(request, errno);
        return;
    }
    wait_for_data((size_t)put);
    fuse_reply_write(request, (size_t)put);
}

/* What was written is on the servers already. */
static void do_fsync(fuse_req_t request, fuse_ino_t inode, int data_only, struct fuse_file_info *file) {
    (void)inode;
    (void)data_only;
    (void)file;
    fuse_reply_err(request, 0);
}

static void do_read(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *file) {
    (void)inode;
    /* Page-aligned, one for each thread; freed with the process. */
    static _Thread_local char *buffer;
    if (buffer == NULL) {
        buffer = aligned_alloc(4096, READ_BYTES);
    }
    if (buffer == NULL || size > READ_BYTES) {
        fuse_reply_err(request, ENOMEM);
        return;
    }
    ssize_t got = pread((int)file->fh, buffer, size, offset);
    if (got < 0) {
        fuse_reply_err(request, errno);
        return;
    }
    wait_for_data((size_t)got);
    fuse_reply_buf(request, buffer, (size_t)got);
}

static void do_release(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file) {
    (void)inode;
    close((int)file->fh);
    fuse_reply_err(request, 0);
}

static void do_opendir(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file) {
    int fd = openat(options.root, path_of(inode), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (directory == NULL) {
        fuse_reply_err(request, errno);
        if (fd >= 0) {
            close(fd);
        }
        return;
    }
    file->fh = (uint64_t)(uintptr_t)directory;
    if (fuse_reply_open(request, file) != 0) {
        closedir(directory);
    }
}

static void do_readdir(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *file) {
    (void)inode;
    wait_for_metadata();
    DIR *directory = (DIR *)(uintptr_t)file->fh;
    char *buffer = malloc(size);
    if (buffer == NULL) {
        fuse_reply_err(request, ENOMEM);
        return;
    }
    seekdir(directory, offset);
    size_t used = 0;
    for (;;) {
        errno = 0;
        struct dirent *entry = readdir(directory);
        if (entry == NULL) {
            break;
        }
        struct stat status = {.st_ino = entry->d_ino, .st_mode = (mode_t)entry->d_type << 12};
        size_t needed =
            fuse_add_direntry(request, buffer + used, size - used, entry->d_name, &status, telldir(directory));
        if (needed > size - used) {
            break;
        }
        used += needed;
    }
    if (errno != 0 && used == 0) {
        fuse_reply_err(request, errno);
    } else {
        fuse_reply_buf(request, buffer, used);
    }
    free(buffer);
}

static void do_releasedir(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file) {
    (void)inode;
    closedir((DIR *)(uintptr_t)file->fh);
    fuse_reply_err(request, 0);
}

static void do_statfs(fuse_req_t request, fuse_ino_t inode) {
    (void)inode;
    struct statvfs status;
    if (fstatvfs(options.root, &status) != 0) {
        fuse_reply_err(request, errno);
        return;
    }
    fuse_reply_statfs(request, &status);
}

static const struct fuse_lowlevel_ops operations = {
    .init = do_init,
    .lookup = do_lookup,
    .forget = do_forget,
    .forget_multi = do_forget_multi,
    .getattr = do_getattr,
    .readlink = do_readlink,
    .open = do_open,
    .create = do_create,
    .mkdir = do_mkdir,
    .unlink = do_unlink,
    .rmdir = do_rmdir,
    .read = do_read,
    .write = do_write,
    .fsync = do_fsync,
    .release = do_release,
    .opendir = do_opendir,
    .readdir = do_readdir,
    .releasedir = do_releasedir,
    .statfs = do_statfs,
};

/* --- Clients ---------------------------------------------------------------------------------------------------------- */

static struct fuse_session *clients[CLIENTS_MAX];
static atomic_int clients_left;

static void *client_main(void *argument) {
    struct fuse_session *session = argument;
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    fuse_loop_cfg_set_max_threads(config, THREADS);
    fuse_loop_cfg_set_idle_threads(config, THREADS);
    fuse_loop_cfg_set_clone_fd(config, 1);
    fuse_session_loop_mt(session, config);
    fuse_loop_cfg_destroy(config);
    if (atomic_fetch_sub(&clients_left, 1) == 1) {
        kill(getpid(), SIGTERM); /* the last one was unmounted by somebody else */
    }
    return NULL;
}

static _Noreturn void fail(const char *what) {
    fprintf(stderr, "throttled_fs: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double number(const char *text) {
    char *end;
    errno = 0;
    double value = strtod(text, &end);
    if (errno != 0 || end == text || *end != '\0' || !(value >= 0)) {
        fprintf(stderr, "throttled_fs: %s is not a number that is 0 or more\n", text);
        exit(2);
    }
    return value;
}

static void parse(int argc, char **argv) {
    static const struct option known[] = {
        {"metadata-latency-us", required_argument, NULL, 'm'}, {"metadata-rate", required_argument, NULL, 'r'},
        {"read-latency-us", required_argument, NULL, 'l'},     {"bandwidth", required_argument, NULL, 'b'},
        {"timeout", required_argument, NULL, 't'},             {"keep-data", no_argument, NULL, 'k'},
        {"writable", no_argument, NULL, 'w'},                  {"slice", required_argument, NULL, 's'},
        {NULL, 0, NULL, 0},
    };
    for (int option; (option = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        double value = optarg != NULL ? number(optarg) : 0.0;
        switch (option) {
        case 'm': options.metadata_latency_ns = (uint64_t)(value * 1e3); break;
        case 'r': options.metadata_turn_ns = value > 0 ? (uint64_t)(1e9 / value) : 0; break;
        case 'l': options.read_latency_ns = (uint64_t)(value * 1e3); break;
        case 'b': options.ns_per_byte = value > 0 ? 1e9 / value : 0; break;
        case 't': options.timeout_s = value; break;
        case 'k': options.keep_data = 1; break;
        case 's': options.slice = value >= 1 ? (size_t)value : SIZE_MAX; break;
        case 'w': options.writable = 1; break;
        default: exit(2);
        }
    }
    if (argc - optind < 2 || argc - optind - 1 > CLIENTS_MAX) {
        fprintf(stderr, "usage: throttled_fs [options] SOURCE MOUNTPOINT... (at most %d)\n", CLIENTS_MAX);
        exit(2);
    }
}

int main(int argc, char **argv) {
    parse(argc, argv);
    options.root = open(argv[optind], O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (options.root < 0) {
        fail(argv[optind]);
    }
    prctl(PR_SET_TIMERSLACK, 1UL); /* threads inherit it; otherwise each sleep is up to 50 us too long */
    /* Signals are for the main thread alone; the others inherit that they are blocked. */
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGHUP);
    sigaddset(&signals, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);

    int count = argc - optind - 1;
    char *access_option = options.writable ? "rw" : "ro";
    char *arguments[] = {
        argv[0], "-o", access_option, "-o", "fsname=throttled_fs,subtype=throttled_fs,max_read=1048576"};
    for (int i = 0; i < count; i++) {
        struct fuse_args given = FUSE_ARGS_INIT(5, arguments);
        clients[i] = fuse_session_new(&given, &operations, sizeof operations, NULL);
        if (clients[i] == NULL || fuse_session_mount(clients[i], argv[optind + 1 + i]) != 0) {
            fprintf(stderr, "throttled_fs: cannot mount on %s\n", argv[optind + 1 + i]);
            while (--i >= 0) {
                fuse_session_unmount(clients[i]);
            }
            return 1;
        }
    }
    atomic_store(&clients_left, count);
    for (int i = 0; i < count; i++) {
        pthread_t thread;
        errno = pthread_create(&thread, NULL, client_main, clients[i]);
        if (errno != 0) {
            fail("start a thread");
        }
    }
    printf("ready\n");
    fflush(stdout);
    for (int signal_number; sigwait(&signals, &signal_number) == 0 && signal_number == SIGUSR1;) {
        print_counts();
    }
    for (int i = 0; i < count; i++) {
        fuse_session_unmount(clients[i]);
    }
    print_counts();
    _exit(0); /* requests that still sleep end with the process */
}
