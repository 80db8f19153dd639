"""The mount itself, for the native engine: /dev/fuse opened and mounted by us instead of by libfuse.

Owns the call of mount(2), as root, and the conversation with fusermount3, for everybody else. Used by kernel.py; blocks
for as long as fusermount3 takes, a few milliseconds.
"""

import ctypes
import errno
import logging
import os
import shutil
import socket
import subprocess
from pathlib import Path

from fanstore.errors import MountError
from fanstore.fuse.mountpoint import FUSE_DEVICE, FUSERMOUNT, FUSERMOUNT_LIMIT_S
from fanstore.mounttable import FILESYSTEM_TYPE, SUBTYPE

log = logging.getLogger(__name__)

# From <sys/mount.h>; the standard library has no mount.
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4


def mount_device(point: Path, source: str, allow_other: bool, writable: bool) -> int:
    """Mount; the descriptor of /dev/fuse on which the kernel's requests arrive. Raises MountError."""
    options = ["default_permissions"]  # the kernel checks modes itself, without asking us
    if allow_other:
        options.append("allow_other")
    if os.geteuid() == 0:
        device, code = _mount_call(point, source, options, writable)
        if code == 0:
            return device
        if code != errno.EPERM or shutil.which(FUSERMOUNT) is None:
            raise MountError(f"cannot mount on {point}: {os.strerror(code)}")
        # Root without the capability, as in a container: fusermount3 may still be able to.
    return _ask_fusermount(point, source, options, writable)


def _mount_call(point: Path, source: str, options: list[str], writable: bool) -> tuple[int, int]:
    """mount(2): the descriptor and 0, or -1 and the error number."""
    device = os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    data = f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}," + ",".join(options)
    library = ctypes.CDLL(None, use_errno=True)
    flags = _MS_NOSUID | _MS_NODEV | (0 if writable else _MS_RDONLY)
    arguments = (os.fsencode(source), os.fsencode(point), FILESYSTEM_TYPE.encode(), flags, data.encode())
    if library.mount(arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[4]) == 0:
        return device, 0
    code = ctypes.get_errno()
    os.close(device)
    return -1, code


def _ask_fusermount(point: Path, source: str, options: list[str], writable: bool) -> int:
    """fusermount3 mounts for us, and sends the descriptor through a socket that it inherits."""
    program = shutil.which(FUSERMOUNT)
    if program is None:
        raise MountError(f"cannot mount on {point}: {FUSERMOUNT} was not found; install the package fuse3")
    name = source.replace("\\", "\\\\").replace(",", "\\,")  # a comma separates options
    wanted = ["rw" if writable else "ro", "nosuid", "nodev", *options, f"subtype={SUBTYPE}", f"fsname={name}"]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        ours.settimeout(FUSERMOUNT_LIMIT_S)
        process = subprocess.Popen(
            [program, "-o", ",".join(wanted), "--", str(point)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "LC_ALL": "C", "_FUSE_COMMFD": str(theirs.fileno())},
        )
        theirs.close()
        descriptors: list[int] = []
        try:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
            said = process.communicate(timeout=FUSERMOUNT_LIMIT_S)[1].decode(errors="replace").strip()
        except (TimeoutError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
            for descriptor in descriptors:
                os.close(descriptor)
            raise MountError(f"cannot mount on {point}: {FUSERMOUNT} gave no answer") from None
    if not descriptors:
        raise MountError(f"cannot mount on {point}: {said or f'{FUSERMOUNT} ended with {process.returncode}'}")
    if said:
        log.debug("%s said: %s", FUSERMOUNT, said)
    return descriptors[0]
