/* next.h: the functions that calls are passed on to: those of the next library, most often the C library's own.
 *
 * Found by name with dlsym when first needed, so that other preloaded libraries are called, too. A function that there is
 * not (statx on an old system) fails with ENOSYS. While the search itself goes on, calls of it (an allocator that opens a
 * file) go straight to the kernel. Any thread.
 */
#ifndef FANSTORE_PRELOAD_NEXT_H
#define FANSTORE_PRELOAD_NEXT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FSX_NAMES(X) \
    X(open) X(open64) X(openat) X(openat64) X(__open_2) X(__open64_2) X(__openat_2) X(__openat64_2) X(close) X(close_range) \
    X(closefrom) X(dup) X(dup2) X(dup3) X(fcntl) X(fcntl64) X(ioctl) X(read) X(pread) X(pread64) X(readv) X(preadv) \
    X(preadv64) X(preadv2) X(preadv64v2) X(__read_chk) X(__pread_chk) X(__pread64_chk) X(lseek) X(lseek64) X(stat) X(stat64) \
    X(lstat) X(lstat64) X(fstat) X(fstat64) X(fstatat) X(fstatat64) X(__xstat) X(__xstat64) X(__lxstat) X(__lxstat64) \
    X(__fxstat) X(__fxstat64) X(__fxstatat) X(__fxstatat64) X(statx) X(access) X(euidaccess) X(eaccess) X(faccessat) \
    X(readlink) X(readlinkat) X(chdir) X(fchdir) X(mmap) X(mmap64) X(fdopen) X(fopen) X(fopen64) X(freopen) X(freopen64) \
    X(fdopendir) X(sendfile) X(sendfile64) X(splice) X(tee) X(copy_file_range) X(readahead) X(posix_fadvise) \
    X(posix_fadvise64) X(fsync) X(fdatasync) X(ftruncate) X(ftruncate64) X(fchmod) X(fchown) X(futimens) X(fgetxattr) \
    X(flistxattr) X(fsetxattr) X(fremovexattr) X(flock) X(lockf) X(lockf64) X(isatty) X(tcgetattr) X(fstatfs) X(fstatfs64) \
    X(fstatvfs) X(fstatvfs64) X(fpathconf) X(poll) X(ppoll) X(select) X(pselect) X(epoll_ctl) X(sendmsg) X(write) \
    X(pwrite) X(pwrite64) X(writev) X(syncfs) X(execve) X(execvp) X(execvpe) X(fexecve) X(execveat) X(posix_spawn) \
    X(posix_spawnp) X(system) X(popen) X(setuid) X(seteuid) X(setreuid) X(setresuid) X(chroot) X(unshare) X(setns) \
    X(creat) X(creat64) X(mkstemp) X(mkstemp64) X(mkostemp) X(mkostemp64) X(mkstemps) X(mkstemps64) X(mkostemps) \
    X(mkostemps64) X(mkdtemp) X(mkdir) X(mkdirat) X(mkfifo) X(mkfifoat) X(mknod) X(mknodat) X(symlink) X(symlinkat) X(unlink) X(rmdir) X(remove) \
    X(unlinkat) X(chmod) X(lchmod) X(fchmodat) X(chown) X(lchown) X(fchownat) X(utime) X(utimes) X(lutimes) X(setxattr) \
    X(lsetxattr) X(removexattr) X(lremovexattr) X(utimensat) X(futimesat) X(futimes) X(truncate) X(truncate64) X(rename) \
    X(renameat) X(renameat2) X(link) X(linkat) X(__readlink_chk) X(__readlinkat_chk) X(getcwd) X(__getcwd_chk) X(getwd) \
    X(get_current_dir_name) X(realpath) X(__realpath_chk) X(canonicalize_file_name) X(getxattr) X(lgetxattr) X(listxattr) \
    X(llistxattr) X(statfs) X(statfs64) X(statvfs) X(statvfs64) X(pathconf) X(scandir) X(scandir64) X(scandirat) \
    X(scandirat64) X(glob) X(glob64) X(nftw) X(nftw64) X(ftw) X(ftw64) \
    X(opendir) X(readdir) X(readdir64) X(readdir_r) X(readdir64_r) X(rewinddir) X(seekdir) X(telldir) X(dirfd) X(closedir) X(fclose) X(_exit)

enum fsx_name {
#define FSX_NAME(name) FSX_NEXT_##name,
    FSX_NAMES(FSX_NAME)
#undef FSX_NAME
    FSX_NEXT_COUNT
};

extern _Atomic(void *) fsx_next_table[FSX_NEXT_COUNT];
void *fsx_next_find(enum fsx_name name);

static inline void *fsx_next(enum fsx_name name) {
    void *found = atomic_load_explicit(&fsx_next_table[name], memory_order_acquire);
    return found != NULL ? found : fsx_next_find(name);
}

/* The next definition of a function whose type the headers have. */
#define NEXT(name) ((__typeof__(&(name)))fsx_next(FSX_NEXT_##name))
/* The same of one that they do not have. */
#define NEXT_AS(type, name) ((type)fsx_next(FSX_NEXT_##name))

/* mmap. Each argument is a whole register: one of type int goes on the stack as half of one. */
static inline void *fsx_map_at(void *at, size_t bytes, int protection, int flags, int fd, uint64_t offset) {
    return (void *)syscall(SYS_mmap, at, bytes, (long)protection, (long)flags, (long)fd, offset);
}
/* The same from the beginning of a file. */
static inline void *fsx_map(size_t bytes, int protection, int flags, int fd) {
    return fsx_map_at(NULL, bytes, protection, flags, fd, 0);
}

/* Of memfd_create and fcntl, which headers of old C libraries do not have. */
#define FSX_MEMFD_CLOEXEC 1u
#define FSX_MEMFD_SEALING 2u
#define FSX_ADD_SEALS 1033L

/* As pthread_atfork, which before version 2.34 of the C library is in libpthread: a program without threads must not get
 * that library from us. Each may be NULL. */
int fsx_at_fork(void (*before)(void), void (*after)(void), void (*in_child)(void));

#endif
