/* device.h: one descriptor of /dev/fuse, and replies on it.
 *
 * No state. A reply must go to the descriptor on which its request was read. Any thread.
 */
#ifndef FANSTORE_FUSE_DEVICE_H
#define FANSTORE_FUSE_DEVICE_H

#include <stddef.h>
#include <stdint.h>

/* A further descriptor of the same connection; -1 with errno set. */
int fsx_device_clone(int device);

/* The descriptor stands for nothing from now on; its number stays taken, for threads that will still use it. */
void fsx_device_drop(int device);

/* One reply, with data or an errno. It may fail: ENOENT means that the request was taken back, its process was killed;
 * other errors mean that the connection is at its end, and the next read tells. */
void fsx_device_reply(int device, uint64_t unique, const void *data, size_t bytes, int error);

/* A reply of pyfuse3, of `bytes` bytes of which `room` at most are at `packet`. One that is cut, or that the kernel does
 * not take, must not leave somebody waiting: then it is EIO. */
void fsx_device_pass_on(int device, const void *packet, size_t bytes, size_t room, uint64_t unique);

#endif
