/* device.c: see device.h. */
#include "fuse/device.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef FUSE_DEV_IOC_CLONE
#define FUSE_DEV_IOC_CLONE _IOR(229, 0, uint32_t)
#endif

int fsx_device_clone(int device) {
    const int clone = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (clone < 0)
        return -1;
    uint32_t source = (uint32_t)device;
    if (ioctl(clone, FUSE_DEV_IOC_CLONE, &source) != 0) {
        const int error = errno;
        close(clone);
        errno = error;
        return -1;
    }
    return clone;
}

void fsx_device_drop(int device) {
    const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (nothing < 0)
        return;
    dup3(nothing, device, O_CLOEXEC);
    close(nothing);
}

void fsx_device_reply(int device, uint64_t unique, const void *data, size_t bytes, int error) {
    const int known = error >= 0 && error < 512 ? error : EIO; /* others the kernel does not take: the reader would wait */
    struct fuse_out_header head = {.len = (uint32_t)(sizeof head + bytes), .error = -known, .unique = unique};
    const struct iovec parts[2] = {{.iov_base = &head, .iov_len = sizeof head},
                                   {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes}};
    while (writev(device, parts, bytes > 0 ? 2 : 1) < 0 && errno == EINTR)
        ;
}

void fsx_device_pass_on(int device, const void *packet, size_t bytes, size_t room, uint64_t unique) {
    ssize_t written = -1;
    errno = EMSGSIZE;
    if (bytes <= room)
        do
            written = write(device, packet, bytes);
        while (written < 0 && errno == EINTR);
    if (written < 0 && errno != ENOENT && unique != 0)
        fsx_device_reply(device, unique, NULL, 0, EIO);
}
