/* next.c: see next.h. */
#include "preload/next.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Not as the system's header has it: that dlsym has version 2.34 of the C library, and this one is for older ones, too. */
#define NEXT_LIBRARY ((void *)-1L)
extern void *fsx_dlsym(void *handle, const char *name);
#if defined __x86_64__
__asm__(".symver fsx_dlsym, dlsym@GLIBC_2.2.5");
#elif defined __aarch64__
__asm__(".symver fsx_dlsym, dlsym@GLIBC_2.17");
#else
#error "which version has dlsym here?"
#endif

/* What pthread_atfork calls, in all versions of the C library. */
extern int __register_atfork(void (*before)(void), void (*after)(void), void (*in_child)(void), void *library);
extern void *__dso_handle __attribute__((visibility("hidden")));

int fsx_at_fork(void (*before)(void), void (*after)(void), void (*in_child)(void)) {
    return __register_atfork(before, after, in_child, &__dso_handle);
}

_Atomic(void *) fsx_next_table[FSX_NEXT_COUNT];

static const char *const NAMES[FSX_NEXT_COUNT] = {
#define FSX_NAME(name) [FSX_NEXT_##name] = #name,
    FSX_NAMES(FSX_NAME)
#undef FSX_NAME
};

/* The thread that searches at the moment, 0 for none. */
static _Atomic long searching;

static int raw_open(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const int mode = va_arg(arguments, int);
    va_end(arguments);
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
static int raw_openat(int directory, const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const int mode = va_arg(arguments, int);
    va_end(arguments);
    return (int)syscall(SYS_openat, directory, path, flags, mode);
}
static ssize_t raw_read(int fd, void *target, size_t bytes) { return syscall(SYS_read, fd, target, bytes); }
static ssize_t raw_write(int fd, const void *source, size_t bytes) { return syscall(SYS_write, fd, source, bytes); }
static int raw_close(int fd) { return (int)syscall(SYS_close, fd); }
static off_t raw_lseek(int fd, off_t offset, int whence) { return syscall(SYS_lseek, fd, offset, whence); }
static void *raw_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}
static ssize_t raw_readlink(const char *path, char *target, size_t bytes) {
    return syscall(SYS_readlinkat, AT_FDCWD, path, target, bytes);
}
static long missing(void) {
    errno = ENOSYS;
    return -1;
}

/* What an allocator may call while it starts. */
static void *raw(enum fsx_name name) {
    switch (name) {
    case FSX_NEXT_open: case FSX_NEXT_open64: return (void *)raw_open;
    case FSX_NEXT_openat: case FSX_NEXT_openat64: return (void *)raw_openat;
    case FSX_NEXT_read: return (void *)raw_read;
    case FSX_NEXT_write: return (void *)raw_write;
    case FSX_NEXT_close: return (void *)raw_close;
    case FSX_NEXT_lseek: case FSX_NEXT_lseek64: return (void *)raw_lseek;
    case FSX_NEXT_mmap: case FSX_NEXT_mmap64: return (void *)raw_mmap;
    case FSX_NEXT_readlink: return (void *)raw_readlink;
    default: return (void *)missing;
    }
}

void *fsx_next_find(enum fsx_name name) {
    const int kept = errno;
    const long self = syscall(SYS_gettid);
    long nobody = 0;
    while (!atomic_compare_exchange_weak(&searching, &nobody, self)) {
        if (nobody == self)
            return raw(name);
        nobody = 0;
        sched_yield();
    }
    void *found = fsx_dlsym(NEXT_LIBRARY, NAMES[name]);
    if (found == NULL)
        found = (void *)missing;
    atomic_store_explicit(&fsx_next_table[name], found, memory_order_release);
    atomic_store(&searching, 0);
    errno = kept;
    return found;
}
