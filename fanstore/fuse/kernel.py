"""What is asked of the kernel for one mount: the mount itself, its limits, and a cure for a stall in pyfuse3's loop.

Owns the mount options. Used by session.py, on the trio thread in the main thread.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pyfuse3

from fanstore.errors import MountError
from fanstore.fuse.device import mount_device
from fanstore.fuse.mountpoint import unmount
from fanstore.fuse.native import NativeEngine
from fanstore.fuse.operations import FanstoreOperations
from fanstore.mounttable import SUBTYPE, Mount, find_mount

log = logging.getLogger(__name__)

#: Largest read request: what libfuse's buffers and the kernel agree on (256 pages). With the kernel's own read-ahead of
#: 128 KiB a sequential reader sends requests of 128 KiB; with this, 1 MiB, and 64 MiB took 33 ms instead of 58 ms.
READ_AHEAD_KIB = 1024

#: Read requests that the kernel keeps under way at once; its default of 12 starves a node with many loader processes.
MAX_BACKGROUND = 128

#: See woken_regularly. Ten wake-ups a second of an idle daemon cost 0.3 % of a core (60 ms in 20 s).
WAKE_INTERVAL_S = 0.1


@dataclass(frozen=True)
class MountOptions:
    """What the mount table says.

    Attributes:
        source: what is mounted. allow_other: whether other users see it. writable: whether it can be written to.
    """

    source: str
    allow_other: bool
    writable: bool


def mount_kernel(operations: FanstoreOperations, point: Path, wanted: MountOptions) -> Mount:
    """Mount; the kernel's requests wait until pyfuse3.main runs. MountError says why it was not possible."""
    options = {
        f"fsname={_escape(wanted.source)}",
        f"subtype={SUBTYPE}",
        "rw" if wanted.writable else "ro",
        "nosuid",
        "nodev",
        "default_permissions",  # the kernel checks modes itself, without asking us
        # No max_read: libfuse wants it confirmed in its init callback, which pyfuse3 does not offer. Without it, the
        # limit is the size of libfuse's buffer, 1 MiB, and that is what we want.
    }
    if wanted.allow_other:
        options.add("allow_other")
    with _standard_error() as said:
        try:
            pyfuse3.init(operations, str(point), options)
        except RuntimeError as error:
            raise MountError(f"cannot mount on {point}: {said() or error}") from None
    mount = find_mount(point)
    if mount is None:
        pyfuse3.close(unmount=True)
        raise MountError(f"the mount on {point} has disappeared at once")
    return mount


def mount_native(operations: FanstoreOperations, engine: NativeEngine, point: Path, wanted: MountOptions) -> Mount:
    """Mount with the engine between the kernel and pyfuse3, and start it. MountError; OSError if it is the engine's."""
    device = mount_device(point, wanted.source, wanted.allow_other, wanted.writable)
    try:
        mount = find_mount(point)
        if mount is None:
            raise MountError(f"the mount on {point} has disappeared at once")
        try:
            # libfuse takes such a path for a descriptor that is connected to the kernel already.
            try:
                pyfuse3.init(operations, f"/dev/fd/{engine.socket.fileno()}", set())
            except RuntimeError as error:
                raise MountError(f"cannot mount on {point}: {error}") from None
            engine.socket.detach()  # libfuse closes it
            try:
                engine.start(device)
            except OSError:
                pyfuse3.close(unmount=False)
                raise
        except BaseException:
            unmount(point, lazy=True)
            raise
    finally:
        os.close(device)  # the engine has its own
    return mount


def raise_kernel_limits(device: str) -> None:
    """Larger read-ahead and more requests at once, where we may: root everywhere, others as their system lets them."""
    minor = device.partition(":")[2]
    wishes = {
        f"/sys/class/bdi/{device}/read_ahead_kb": READ_AHEAD_KIB,
        f"/sys/fs/fuse/connections/{minor}/max_background": MAX_BACKGROUND,
        f"/sys/fs/fuse/connections/{minor}/congestion_threshold": MAX_BACKGROUND * 3 // 4,
    }
    for path, value in wishes.items():
        try:
            Path(path).write_text(str(value))
        except OSError as error:
            log.debug("%s stays as it is: %s", path, error.strerror)


@contextlib.contextmanager
def woken_regularly() -> Iterator[None]:
    """Interrupt the main thread now and then, so that a read of /dev/fuse cannot hold it for long.

    pyfuse3 waits until the device is readable and then reads it, blocking. If the process that made the request is
    killed in between, the kernel takes the request back, and the read blocks the whole trio loop until the next
    request comes: with it answers that worker threads have ready, perhaps the very ones that all readers wait for.
    Seen 18 times in 405 kills of a process that makes look-ups, on a busy daemon. A signal ends the read with EINTR,
    which pyfuse3 takes as a reason to wait again. (A device that does not block is no way out: EAGAIN ends the daemon.)
    """

    def ignore(number: int, frame: FrameType | None) -> None:
        """That the signal was delivered is all that is needed."""

    before = signal.signal(signal.SIGALRM, ignore)
    signal.setitimer(signal.ITIMER_REAL, WAKE_INTERVAL_S, WAKE_INTERVAL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _escape(source: str) -> str:
    """For libfuse, where a comma separates options, and for pyfuse3, which takes only ASCII."""
    text = source.encode("ascii", "backslashreplace").decode("ascii")
    return text.replace("\\", "\\\\").replace(",", "\\,")


@contextlib.contextmanager
def _standard_error() -> Iterator[Callable[[], str]]:
    """Catch what libfuse and fusermount3 write to standard error: it is the only place where they say what is wrong."""
    with open(os.memfd_create("standard error"), "r+b") as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)

        def said() -> str:
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
            return "; ".join(line.strip() for line in lines if line.strip())

        try:
            yield said
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            if text := said():
                log.debug("libfuse said: %s", text)
