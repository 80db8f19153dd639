/* table.c: descriptors of files that are read here; see preload.h.
 *
 * A descriptor of ours is a real one: a duplicate of a path-only descriptor of a socket (state.h). The kernel gives it its
 * number, counts it and closes it; whatever is done with it that this library does not see fails, and never gives wrong
 * bytes. The table says what it stands for.
 *
 * slots[fd], one word: kind, a busy bit, the number of the object, and a generation, by which a reader sees that the number
 * was used again. objects[n]: an open file description, which duplicates share: offset, entry, flags, how many refer to it.
 * An object has the number of the descriptor for which it was made, or the next that is free: duplicates of an earlier one may be
 * there for long, as Python's mmap keeps one as long as the map.
 *
 * Opening, reading, seeking and closing take no lock. `lock` guards duplication, promotion and fork against each other, and is
 * held with all signals blocked. Promotion first sets the busy bit of all slots concerned: whoever closes or uses one of
 * them waits; then it takes the offset away (TAKEN), so that no reader can move on; then it puts the real file in place.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "preload/next.h"
#include "preload/outputs.h"
#include "preload/preload.h"
#include "preload/sockets.h"

#define SLOTS 65536
#define TAKEN INT64_C(-1)

#define KIND UINT64_C(3)
#define OWN UINT64_C(1)  /* a descriptor of the library itself */
#define FILE_ UINT64_C(2) /* a placeholder */
#define BUSY UINT64_C(4)
#define OBJECT(slot) ((uint32_t)((slot) >> 8) & 0xffffffu)

struct object {
    _Atomic int64_t offset;
    _Atomic uint32_t references;
    _Atomic uint32_t entry;
    _Atomic int flags;
};

static _Atomic uint64_t *slots;
static struct object *objects;
static _Atomic int top;       /* no slot from here on is in use */
static _Atomic int files;     /* slots of placeholders */
static _Atomic uint32_t generations;
static _Atomic int placeholder = -1;
/* Descriptors for the case that there is no other: content takes two for a moment. */
static _Atomic int spares[2] = {-1, -1};
static uint64_t placeholder_inode;
static _Atomic int lock;

/* ---- small things ----------------------------------------------------------------------------------------------------- */

/* Signals as the kernel has them: pthread_sigmask has a version of its own since glibc 2.32. */
typedef uint64_t signals_t;
#define ALL_SIGNALS (~(UINT64_C(3) << 31)) /* but 32 and 33, which are the C library's */

static void mask(signals_t wanted, signals_t *before) {
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &wanted, before, sizeof wanted);
}

static void acquire(signals_t *signals) {
    mask(ALL_SIGNALS, signals);
    while (atomic_exchange_explicit(&lock, 1, memory_order_acquire) != 0)
        sched_yield();
}

static void release(signals_t signals) {
    atomic_store_explicit(&lock, 0, memory_order_release);
    mask(signals, NULL);
}

static void raise_top(int fd) {
    int old = atomic_load_explicit(&top, memory_order_relaxed);
    while (old <= fd && !atomic_compare_exchange_weak(&top, &old, fd + 1))
        ;
}

/* An object for a new descriptor, with one reference; -1 if there is none. */
static int take_object(int fd) {
    for (int i = 0; i < SLOTS; i++) {
        const int number = (fd + i) % SLOTS;
        uint32_t none = 0;
        if (atomic_load_explicit(&objects[number].references, memory_order_relaxed) == 0 &&
            atomic_compare_exchange_strong(&objects[number].references, &none, 1)) {
            raise_top(number); /* which a fork goes by */
            return number;
        }
    }
    return -1;
}

static uint64_t load(int fd) {
    if (slots == NULL || fd < 0 || fd >= SLOTS)
        return 0;
    return atomic_load_explicit(&slots[fd], memory_order_acquire);
}

/* The same, once nobody promotes it. */
static uint64_t load_settled(int fd) {
    uint64_t slot;
    while (((slot = load(fd)) & BUSY) != 0)
        sched_yield();
    return slot;
}

/* One more descriptor of this object; false if there is none any more. With the lock held. */
static bool refer(uint64_t slot, int fd) {
    struct object *object = &objects[OBJECT(slot)];
    uint32_t now = atomic_load(&object->references);
    while (now > 0 && !atomic_compare_exchange_weak(&object->references, &now, now + 1))
        ;
    if (now == 0)
        return false;
    atomic_fetch_add(&files, 1);
    raise_top(fd);
    atomic_store_explicit(&slots[fd], slot, memory_order_release);
    return true;
}

static void unrefer(struct object *object) {
    atomic_fetch_sub_explicit(&object->references, 1, memory_order_release);
    atomic_fetch_sub_explicit(&files, 1, memory_order_relaxed);
}

/* Take the slot out of the table, if it is a placeholder. */
static void forget(int fd) {
    for (;;) {
        uint64_t slot = load_settled(fd);
        if ((slot & KIND) != FILE_)
            return;
        if (atomic_compare_exchange_strong(&slots[fd], &slot, 0)) {
            unrefer(&objects[OBJECT(slot)]);
            return;
        }
    }
}

static int descriptor_flags(int fd) { return (int)syscall(SYS_fcntl, fd, F_GETFD); }

/* ---- start and our own descriptors ------------------------------------------------------------------------------------ */

int fsx_keep_descriptor(int fd) {
    if (fd < 0)
        return -1;
    struct rlimit limit = {0};
    syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, NULL, &limit);
    /* Out of the way, but not so far that the kernel's table gets large. */
    const rlim_t lowest = limit.rlim_cur < 1024 ? limit.rlim_cur / 2 : 512;
    const int high = (int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, (long)lowest);
    syscall(SYS_close, fd);
    if (high < 0 || high >= SLOTS) {
        if (high >= 0)
            syscall(SYS_close, high);
        return -1;
    }
    atomic_store(&slots[high], OWN);
    raise_top(high);
    return high;
}

void fsx_drop_descriptor(int fd) {
    uint64_t own = OWN;
    syscall(SYS_close, fd);
    atomic_compare_exchange_strong(&slots[fd], &own, 0);
}

static void before_fork(void);
static void after_fork(void);
static void after_fork_in_child(void);

static void *memory(size_t bytes) {
    void *got = fsx_map(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    return got == MAP_FAILED ? NULL : got;
}

static void keep_spares(void) {
    for (int i = 0; i < 2; i++)
        if (atomic_load(&spares[i]) < 0)
            atomic_store(&spares[i],
                         fsx_keep_descriptor((int)syscall(SYS_fcntl, atomic_load(&placeholder), F_DUPFD_CLOEXEC, 0)));
}

/* This one is lost; true if it was a spare one. */
static bool lose_spare(int fd) {
    int lost = fd, other = fd;
    return atomic_compare_exchange_strong(&spares[0], &lost, -1) || atomic_compare_exchange_strong(&spares[1], &other, -1);
}

bool fsx_table_start(const char *path) {
    slots = memory(SLOTS * sizeof *slots);
    objects = memory(SLOTS * sizeof *objects);
    if (slots == NULL || objects == NULL)
        return false;
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_PATH | O_CLOEXEC | O_NOFOLLOW, 0);
    struct stat about;
    if (fd < 0)
        return false;
    if (syscall(SYS_fstat, fd, &about) != 0 || !S_ISSOCK(about.st_mode)) {
        syscall(SYS_close, fd);
        errno = EINVAL;
        return false;
    }
    placeholder_inode = about.st_ino;
    atomic_store(&placeholder, fsx_keep_descriptor(fd));
    if (atomic_load(&placeholder) < 0) {
        errno = EMFILE;
        return false;
    }
    keep_spares();
    return fsx_at_fork(before_fork, after_fork, after_fork_in_child) == 0;
}

/* The program wants this number, which is one of our own. With the lock held. */
static void make_way(int fd) {
    if ((load(fd) & KIND) != OWN)
        return;
    if (lose_spare(fd))
        ;
    else if (fd == atomic_load(&placeholder))
        atomic_store(&placeholder, fsx_keep_descriptor((int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 3)));
    else if (!fsx_bytes_move(fd) && !fsx_cache_move(fd))
        fsx_sockets_move(fd);
    atomic_store(&slots[fd], 0);
}

/* ---- opening and looking up ------------------------------------------------------------------------------------------- */

int fsx_open_entry(uint32_t entry, int flags) {
    if (fsx_in_vfork())
        return -2;
    const int fd = (int)syscall(SYS_fcntl, atomic_load_explicit(&placeholder, memory_order_relaxed),
                                (flags & O_CLOEXEC) != 0 ? F_DUPFD_CLOEXEC : F_DUPFD, 0);
    if (fd < 0)
        return errno == EMFILE ? -1 : -2;
    /* Standard streams are for others, too. */
    const int number = fd <= 2 || fd >= SLOTS ? -1 : take_object(fd);
    if (number < 0) {
        syscall(SYS_close, fd);
        return -2;
    }
    struct object *object = &objects[number];
    atomic_store_explicit(&object->offset, 0, memory_order_relaxed);
    atomic_store_explicit(&object->entry, entry, memory_order_relaxed);
    atomic_store_explicit(&object->flags, flags, memory_order_relaxed);
    const uint64_t generation = atomic_fetch_add_explicit(&generations, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&files, 1, memory_order_relaxed);
    raise_top(fd);
    atomic_store_explicit(&slots[fd], generation << 32 | (uint64_t)number << 8 | FILE_, memory_order_release);
    return fd;
}

int fsx_foreign(int fd) {
    const uint64_t kind = load(fd) & KIND;
    if (kind == 0 || fsx_in_vfork())
        return fd;
    if (kind == OWN) { /* without a placeholder, files are opened on the mount; partitions notice by themselves */
        int lost = fd;
        atomic_compare_exchange_strong(&placeholder, &lost, -1);
        lose_spare(fd);
        atomic_store(&slots[fd], 0);
    } else {
        forget(fd);
    }
    return fd;
}

bool fsx_is_known(int fd) { return (load(fd) & KIND) != 0; }

bool fsx_is_ours(int fd) { return (load(fd) & KIND) == FILE_; }

bool fsx_find(int fd, struct fsx_file *file) {
    for (;;) {
        const uint64_t slot = load_settled(fd);
        if ((slot & KIND) != FILE_)
            return false;
        const struct object *object = &objects[OBJECT(slot)];
        file->slot = slot;
        file->entry = atomic_load_explicit(&object->entry, memory_order_relaxed);
        file->flags = atomic_load_explicit(&object->flags, memory_order_relaxed);
        atomic_thread_fence(memory_order_acquire);
        if (load(fd) == slot) /* or it was closed, and the number used again */
            return true;
    }
}

/* The object of a file that was found, if its offset is in it. */
static struct object *object_of(const struct fsx_file *file) { return &objects[OBJECT(file->slot)]; }

int64_t fsx_take(int fd, const struct fsx_file *file, uint64_t count, uint64_t size, uint64_t *from) {
    struct object *object = object_of(file);
    int64_t offset = atomic_load_explicit(&object->offset, memory_order_relaxed);
    for (;;) {
        if (offset == TAKEN) {
            load_settled(fd);
            return -1;
        }
        const uint64_t left = (uint64_t)offset < size ? size - (uint64_t)offset : 0;
        const uint64_t taken = count < left ? count : left;
        if (taken == 0 || atomic_compare_exchange_weak(&object->offset, &offset, offset + (int64_t)taken)) {
            *from = (uint64_t)offset;
            return (int64_t)taken;
        }
    }
}

void fsx_untake(int fd, const struct fsx_file *file, uint64_t from, uint64_t count) {
    (void)fd;
    int64_t now = (int64_t)(from + count);
    atomic_compare_exchange_strong(&object_of(file)->offset, &now, (int64_t)from);
}

int64_t fsx_tell(int fd, const struct fsx_file *file) {
    const int64_t offset = atomic_load(&object_of(file)->offset);
    if (offset == TAKEN)
        load_settled(fd);
    return offset;
}

bool fsx_seek(int fd, const struct fsx_file *file, int64_t from, int64_t to) {
    (void)fd;
    return atomic_compare_exchange_strong(&object_of(file)->offset, &from, to);
}

/* ---- promotion -------------------------------------------------------------------------------------------------------- */

/* The file of an entry, opened on the mount or what stands for it, at `offset`; -1 with errno. */
static int open_on_mount(uint32_t entry, int flags, int64_t offset) {
    char path[FSX_STATE_PATH];
    if (fsx_unmounted) {
        const int content = fsx_open_content(entry, flags | O_CLOEXEC);
        if (content >= 0 && offset != 0)
            syscall(SYS_lseek, content, offset, SEEK_SET);
        return content;
    }
    if (!fsx_path_of(entry, path)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    struct stat about;
    const bool right = syscall(SYS_fstat, fd, &about) == 0 && about.st_dev == fsx_at.state->device &&
                       about.st_ino == (uint64_t)fsx_at.index.inode[entry] + 1 &&
                       (offset == 0 || syscall(SYS_lseek, fd, offset, SEEK_SET) == offset);
    if (!right) { /* something else is mounted there now */
        syscall(SYS_close, fd);
        errno = EIO;
        return -1;
    }
    return fd;
}

static bool is_exhausted(void) {
    const int fd = (int)syscall(SYS_fcntl, atomic_load(&placeholder), F_DUPFD_CLOEXEC, 0);
    if (fd >= 0)
        syscall(SYS_close, fd);
    return fd < 0;
}

/* The same, with the descriptors that were kept. */
static int open_with_spare(uint32_t entry, int flags, int64_t offset) {
    int fd = open_on_mount(entry, flags, offset);
    const int error = errno;
    if (fd >= 0 || (error != EMFILE && (!fsx_unmounted || !is_exhausted()))) {
        errno = error;
        return fd;
    }
    for (int i = 0; i < 2; i++) {
        const int kept = atomic_exchange(&spares[i], -1);
        if (kept < 0)
            continue;
        atomic_store(&slots[kept], 0);
        syscall(SYS_close, kept);
    }
    return open_on_mount(entry, flags, offset);
}

/* With the lock held. `ready`: content of `expected` that was fetched before, so that nobody waits for it here, or -1; it is closed. */
static int promote(int fd, int ready, uint64_t expected) {
    const uint64_t slot = load(fd);
    if (ready >= 0 && slot != expected) { /* closed meanwhile */
        syscall(SYS_close, ready);
        ready = -1;
    }
    if ((slot & KIND) != FILE_)
        return 0;
    struct object *object = &objects[OBJECT(slot)];
    const int end = atomic_load(&top);
    int marked = 0;
    for (int other = 3; other < end; other++) {
        uint64_t its = load(other);
        if ((its & KIND) == FILE_ && OBJECT(its) == OBJECT(slot) &&
            atomic_compare_exchange_strong(&slots[other], &its, its | BUSY))
            marked++;
    }
    if (marked == 0) { /* closed meanwhile */
        if (ready >= 0)
            syscall(SYS_close, ready);
        return 0;
    }
    const uint32_t entry = atomic_load(&object->entry);
    const int64_t offset = atomic_exchange(&object->offset, TAKEN);
    if (ready >= 0 && offset != 0)
        syscall(SYS_lseek, ready, offset, SEEK_SET);
    const int real = ready >= 0 ? ready : open_with_spare(entry, atomic_load(&object->flags), offset);
    const int error = real < 0 ? errno : 0;
    if (error != 0)
        atomic_store(&object->offset, offset);
    for (int other = 3; other < end; other++) {
        const uint64_t its = load(other);
        if ((its & BUSY) == 0 || OBJECT(its) != OBJECT(slot))
            continue;
        if (error != 0) {
            atomic_store_explicit(&slots[other], its & ~BUSY, memory_order_release);
            continue;
        }
        syscall(SYS_dup3, real, other, (descriptor_flags(other) & FD_CLOEXEC) != 0 ? O_CLOEXEC : 0);
        unrefer(object);
        atomic_store_explicit(&slots[other], 0, memory_order_release);
    }
    if (error == 0) {
        syscall(SYS_close, real);
        fsx_count(FSX_PROMOTIONS, 1);
    }
    keep_spares();
    FSX_LOG("promote", NULL, fd, error == 0 ? "opened on the mount" : strerror(error));
    return error;
}

/* In the child of a vfork, whose descriptors are its own: is this still the placeholder that the table tells of? */
static bool is_placeholder(int fd) {
    struct stat about;
    return syscall(SYS_fstat, fd, &about) == 0 && S_ISSOCK(about.st_mode) && about.st_ino == placeholder_inode;
}

/* There, too: put the real file in its place, without a note. */
static int promote_in_vfork(int fd, int target, int flags) {
    struct fsx_file file;
    if (!fsx_find(fd, &file) || !is_placeholder(fd))
        return (int)syscall(SYS_dup3, fd, target, flags);
    const int64_t offset = fsx_tell(fd, &file);
    const int real = open_on_mount(file.entry, file.flags, offset < 0 ? 0 : offset);
    if (real < 0 || real == target)
        return real;
    const int result = (int)syscall(SYS_dup3, real, target, flags);
    syscall(SYS_close, real);
    return result;
}

int fsx_promote(int fd) {
    if (!fsx_is_ours(fd))
        return 0;
    const int kept = errno;
    if (fsx_in_vfork()) {
        const int flags = (descriptor_flags(fd) & FD_CLOEXEC) != 0 ? O_CLOEXEC : 0;
        const int error = promote_in_vfork(fd, fd, flags) < 0 ? errno : 0;
        errno = kept;
        return error;
    }
    struct fsx_file file = {0};
    int ready = -1;
    if (fsx_unmounted && fsx_find(fd, &file)) {
        ready = fsx_open_content(file.entry, file.flags | O_CLOEXEC);
        const int error = errno;
        if (ready < 0 && error != EMFILE && !is_exhausted()) {
            errno = kept;
            return error;
        }
    }
    signals_t signals;
    acquire(&signals);
    const int error = promote(fd, ready, file.slot);
    release(signals);
    errno = kept;
    return error;
}

void fsx_promote_all(bool inherited_only) {
    if (slots == NULL || atomic_load(&files) == 0)
        return;
    for (int fd = 3; fd < atomic_load(&top); fd++)
        if (fsx_is_ours(fd)) {
            const int flags = descriptor_flags(fd);
            if (flags >= 0 && (!inherited_only || (flags & FD_CLOEXEC) == 0))
                fsx_promote(fd);
        }
}

/* ---- fork ------------------------------------------------------------------------------------------------------------- */

static signals_t fork_signals; /* guarded by the lock */

/* Without a mount, larger files are not copied to memory for a fork: parent and child then have offsets of their own. */
#define FORK_BYTES (UINT64_C(64) << 20)

static bool is_too_large(int fd) {
    const uint64_t slot = load(fd);
    return fsx_unmounted && (slot & KIND) == FILE_ && fsx_at.index.size[atomic_load(&objects[OBJECT(slot)].entry)] > FORK_BYTES;
}

/* Parent and child share offsets, which only the kernel can do. */
static void before_fork(void) {
    signals_t signals;
    acquire(&signals);
    fork_signals = signals;
    for (int fd = 3; atomic_load(&files) > 0 && fd < atomic_load(&top); fd++)
        if (!is_too_large(fd))
            promote(fd, -1, 0);
}

static void after_fork(void) {
    release(fork_signals);
}

/* The kernel copies descriptors first and memory later, and other threads open and close in between: what the table has of
 * those need not be true here. */
static void after_fork_in_child(void) {
    const int end = atomic_load(&top);
    for (int fd = 0; fd < end; fd++)
        atomic_store(&objects[fd].references, 0);
    atomic_store(&files, 0);
    for (int fd = 3; fd < end; fd++) {
        const uint64_t slot = load(fd);
        if ((slot & KIND) != FILE_)
            continue;
        if (is_placeholder(fd)) {
            atomic_fetch_add(&objects[OBJECT(slot)].references, 1);
            atomic_fetch_add(&files, 1);
        } else {
            atomic_store(&slots[fd], 0);
        }
    }
    fsx_vfork_forked();
    fsx_bytes_forked();
    fsx_cache_forked();
    fsx_sockets_forked();
    after_fork();
}

/* ---- closing and duplicating ------------------------------------------------------------------------------------------ */

int fsx_close(int fd) {
    const uint64_t slot = load(fd);
    if ((slot & KIND) == 0 || fsx_in_vfork()) {
        const int error = fsx_output_closing(fd);
        const int result = NEXT(close)(fd);
        if (error == 0 || result != 0)
            return result;
        errno = error;
        return -1;
    }
    if ((slot & KIND) == OWN) {
        errno = EBADF;
        return -1;
    }
    forget(fd); /* before the number can be used again */
    return NEXT(close)(fd);
}

int fsx_duplicate(int fd, int lowest, bool close_on_exec) {
    if (fsx_in_vfork()) {
        const int made = (int)syscall(SYS_fcntl, fd, close_on_exec ? F_DUPFD_CLOEXEC : F_DUPFD, (long)lowest);
        return made < 0 ? made : promote_in_vfork(fd, made, close_on_exec ? O_CLOEXEC : 0);
    }
    signals_t signals;
    acquire(&signals);
    const uint64_t slot = load(fd);
    const int made = (int)syscall(SYS_fcntl, fd, close_on_exec ? F_DUPFD_CLOEXEC : F_DUPFD, (long)lowest);
    if (made >= 0 && (slot & KIND) == FILE_) {
        if (made > 2 && made < SLOTS)
            refer(slot, made);
        else if (promote(fd, -1, 0) == 0)
            syscall(SYS_dup3, fd, made, close_on_exec ? O_CLOEXEC : 0);
    }
    release(signals);
    return made;
}

int fsx_duplicate_to(int fd, int target, int flags, bool same) {
    if (fd == target && same) { /* dup2: nothing, if it is open */
        return descriptor_flags(fd) < 0 ? -1 : fd;
    }
    if (fsx_in_vfork())
        return promote_in_vfork(fd, target, flags);
    if (fd == target || (flags & ~O_CLOEXEC) != 0 || target < 0 || descriptor_flags(fd) < 0)
        return (int)syscall(SYS_dup3, fd, target, flags); /* says what is wrong */
    signals_t signals;
    acquire(&signals);
    make_way(target);
    /* Standard streams are used by everybody, seen or not. */
    if ((load(fd) & KIND) == FILE_ && (target <= 2 || target >= SLOTS))
        promote(fd, -1, 0);
    forget(target);
    const uint64_t slot = load(fd);
    const int made = (int)syscall(SYS_dup3, fd, target, flags);
    if (made >= 0 && (slot & KIND) == FILE_ && target > 2 && target < SLOTS)
        refer(slot, target);
    release(signals);
    return made;
}

int fsx_close_range(unsigned first, unsigned last, int flags) {
    if (slots == NULL || fsx_in_vfork() || (flags & ~(1 << 1)) != 0 || first > last) /* 1 << 1: CLOSE_RANGE_UNSHARE */
        return (int)syscall(SYS_close_range, first, last, flags);
    /* Around our own descriptors. */
    const unsigned end = (unsigned)atomic_load(&top);
    unsigned start = first;
    for (unsigned fd = first; fd <= last && fd < end; fd++) {
        forget((int)fd);
        if ((load((int)fd) & KIND) != OWN)
            continue;
        if (fd > start && syscall(SYS_close_range, start, fd - 1, flags) != 0)
            return -1;
        start = fd + 1;
    }
    return start > last ? 0 : (int)syscall(SYS_close_range, start, last, flags);
}
