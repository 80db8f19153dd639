"""A mount point: whether it can be used, its repair after a crash, and its unmounting.

Owns the directory before the mount and after it. Does not know what is mounted (session.py does). Everything that asks
a mounted file system for something does so in a thread with a time limit, because a FUSE file system whose daemon has
stopped answers nothing at all. Used by session.py and by the command line; the calls block, up to their limits.
"""

import ctypes
import enum
import errno
import fcntl
import logging
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fanstore.errors import MountError
from fanstore.fuse.holders import describe_holders
from fanstore.mounttable import Mount, find_mount, mounts_below
from fanstore.paths import resolve

logger = logging.getLogger(__name__)

FUSE_DEVICE = Path("/dev/fuse")
FUSERMOUNT = "fusermount3"

#: Seconds that a mounted file system may take to answer before it counts as silent. A loaded but healthy one was never
#: seen above 0.2 s; a dead one answers at once (ENOTCONN).
ANSWER_LIMIT_S = 5.0
#: Seconds for fusermount3, which itself may wait for the file system.
FUSERMOUNT_LIMIT_S = 30.0

#: Seconds to try again at the end of a mount before it is detached: processes that are just ending hold it for moments.
BUSY_PATIENCE_S = 1.0

#: Seconds to try again when a user unmounts. Our own fanstore-names has a directory open for 3 ms at a time.
MOMENT_S = 0.25

#: Seconds to try again for a mount point that another process has locked. Who removes one needs a moment, who mounts
#: needs longer, and is reported.
CLAIM_PATIENCE_S = 0.5

# From <sys/mount.h>; the standard library has no umount.
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8

_Result = TypeVar("_Result")


class MountBusyError(MountError):
    """The file system cannot be unmounted now: processes use it."""


class NotAnsweringError(MountError):
    """A mounted file system did not answer within the limit."""


class Condition(enum.Enum):
    """How a mounted file system behaves when it is asked for something."""

    ALIVE = "alive"
    STALE = "stale"  # its daemon is dead: every call gives ENOTCONN until somebody unmounts it
    SILENT = "silent"  # its daemon exists, but does not answer


# --- looking ---


def within_limit(call: Callable[[], _Result], limit_s: float = ANSWER_LIMIT_S) -> _Result:
    """Make a call that may hang; NotAnsweringError when it does not return in time.

    The thread that hangs is left behind. It keeps nothing from ending: a wait for FUSE ends when the process exits.
    """
    outcome: list[_Result | BaseException] = []

    def body() -> None:
        try:
            outcome.append(call())
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=body, name="fanstore-ask", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not outcome:
        raise NotAnsweringError(f"no answer within {limit_s:g} s")
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    return result


def condition(point: Path, limit_s: float = ANSWER_LIMIT_S) -> Condition:
    """Ask what is mounted here for a sign of life.

    statfs, because the kernel passes it on every time; stat is answered from its cache long after the daemon has died.
    """
    try:
        within_limit(lambda: os.statvfs(point), limit_s)
    except NotAnsweringError:
        return Condition.SILENT
    except OSError as error:
        return Condition.STALE if error.errno == errno.ENOTCONN else Condition.ALIVE
    return Condition.ALIVE


def check_fuse() -> None:
    """MountError with what to do, if this machine or this user cannot mount FUSE file systems."""
    try:
        check_device()
        check_fusermount()
    except MountError as error:
        raise MountError(f"{error}; or do without a mount: fanstore-mount --no-fuse (docs/interception.md)") from None


def check_device() -> None:
    """MountError with what to do, if there is no FUSE, or not for this user."""
    try:
        os.close(os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise MountError(
            f"there is no {FUSE_DEVICE} on this machine: load the kernel module as root (modprobe fuse), "
            "or start the container with --device /dev/fuse"
        ) from None
    except PermissionError:
        mode = stat.filemode(FUSE_DEVICE.stat().st_mode)
        raise MountError(
            f"no permission to open {FUSE_DEVICE} (its mode is {mode}): ask the administrator to give it mode 0666"
        ) from None
    except OSError as error:
        raise MountError(
            f"cannot open {FUSE_DEVICE} ({error.strerror}): load the kernel module as root (modprobe fuse)"
        ) from None


def check_fusermount() -> None:
    """MountError with what to do, if an ordinary user has no program that mounts for them."""
    if os.geteuid() != 0 and shutil.which(FUSERMOUNT) is None:
        raise MountError(
            f"{FUSERMOUNT} was not found: an ordinary user needs it to mount; install the package fuse3 "
            "(apt install fuse3, dnf install fuse3) or load your cluster's module for it"
        )


# --- before the mount ---


class MountPoint:
    """A directory claimed for a mount: exists, empty, nothing mounted on it, and nobody else is about to use it.

    Attributes:
        path: absolute, without symbolic links.
        created: whether the directory is ours and goes away with us.
        _lock: descriptor of the directory below the mount with a flock, or -1. It keeps two commands that start at the
            same moment (ranks on one machine, without {rank} in the path) from mounting on top of each other.
    """

    def __init__(self, path: Path) -> None:
        self.path = resolve(path)
        self.created = False
        self._lock = -1

    def claim(self) -> None:
        """Repair what a crash has left, create the directory if its parent exists, check it; MountError if unusable."""
        deadline_s = time.monotonic() + CLAIM_PATIENCE_S
        while not self._try_claim(is_last=time.monotonic() > deadline_s):
            time.sleep(0.01)

    def _try_claim(self, is_last: bool) -> bool:
        """False if somebody else is at it, perhaps to remove it (``remove_unused``); an error if it is the last try."""
        _clear_mounts(self.path)
        try:
            os.mkdir(self.path)
            self.created = True
        except FileExistsError:
            pass  # the usual case: checked below
        except FileNotFoundError:
            raise MountError(
                f"mount point {self.path} cannot be created: the directory {self.path.parent} does not exist"
            ) from None
        except OSError as error:
            raise MountError(f"mount point {self.path} cannot be created: {error.strerror}") from None
        try:
            self._check()
        except (BlockingIOError, FileNotFoundError):
            self.release()
            self.created = False  # it is, or was, that of somebody else
            if not is_last:
                return False
            raise MountError(
                f"another fanstore-mount is just starting on {self.path}: give each its own mount point, "
                "for several on one machine with {rank} in the path"
            ) from None
        except BaseException:
            self.remove()
            raise
        return True

    def _check(self) -> None:
        if not stat.S_ISDIR(self.path.lstat().st_mode):
            raise MountError(f"mount point {self.path} is not a directory")
        try:
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._lock).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "removed before it was locked")
            present = os.listdir(self._lock)
        except (BlockingIOError, FileNotFoundError):
            raise
        except OSError as error:
            raise MountError(f"mount point {self.path} cannot be read: {error.strerror}") from None
        _clear_mounts(self.path)  # again: somebody may have mounted before we had the lock
        if present:
            raise MountError(
                f"mount point {self.path} is not empty (it holds '{min(present)}'): name an empty or a new directory"
            )
        if os.geteuid() != 0 and not os.access(self.path, os.W_OK):
            raise MountError(f"mount point {self.path} is not writable for you, so {FUSERMOUNT} will not mount on it")

    def release(self) -> None:
        """The mount is in the kernel's table now, which tells everybody: give up the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """After the end: remove the directory if it is ours."""
        self.release()
        if not self.created:
            return
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            pass  # somebody was faster; it is gone, which is all we want
        except OSError as error:
            logger.warning("mount point %s cannot be removed: %s", self.path, error.strerror)
        self.created = False


def remove_unused(point: Path) -> None:
    """Remove a mount point that a killed daemon had created, unless somebody uses it again or is about to."""
    try:
        lock = os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # gone
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rmdir(point)
    except OSError as error:
        logger.debug("%s stays: %s", point, error.strerror)
    finally:
        os.close(lock)


def _clear_mounts(point: Path) -> None:
    """Unmount what dead daemons have left here (also several on top of each other); refuse anything that lives."""
    while (mount := find_mount(point)) is not None:
        if not mount.is_fanstore:
            raise MountError(f"something else is mounted on {point} already ({mount.kind}, {mount.source})")
        match condition(point):
            case Condition.STALE:
                unmount(point, lazy=True)
                logger.info("unmounted the dead mount of %s that an earlier job left at %s", mount.source, point)
            case Condition.SILENT:
                raise MountError(
                    f"a FanStore mount of {mount.source} at {point} does not answer: look at its daemon, or remove it "
                    f"with: fanstore-umount --lazy {point}"
                )
            case Condition.ALIVE:
                if find_mount(point) != mount:
                    continue  # another process has just unmounted it, and it was the directory that answered
                raise MountError(
                    f"{mount.source} is mounted on {point} already: unmount it first with: fanstore-umount {point}"
                )


# --- after it ---


def unmount(point: Path, *, lazy: bool = False) -> None:
    """Unmount what is at this path; MountBusyError when it is in use and ``lazy`` is false.

    Lazy takes it out of the directory tree at once; processes that hold it keep what they have until they let go.
    """
    if os.geteuid() == 0:
        code = _umount_call(point, lazy)
        if code != errno.EPERM:
            _raise_unmount_error(point, code)
            return
        # Root without the capability, as in a container: fusermount3 may still be able to.
    _fusermount(point, lazy)


def _umount_call(point: Path, lazy: bool) -> int:
    """umount2(2): 0 or the error number."""
    library = ctypes.CDLL(None, use_errno=True)
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    return ctypes.get_errno() if library.umount2(os.fsencode(point), flags) != 0 else 0


def _raise_unmount_error(point: Path, code: int) -> None:
    if code == errno.EBUSY:
        raise busy_error(point)
    if code in (errno.EINVAL, errno.ENOENT) and find_mount(point) is None:
        return  # somebody was faster, and has perhaps removed the directory, too
    if code != 0:
        raise MountError(f"cannot unmount {point}: {os.strerror(code)}")


def _fusermount(point: Path, lazy: bool) -> None:
    program = shutil.which(FUSERMOUNT)
    if program is None:
        raise MountError(f"cannot unmount {point}: {FUSERMOUNT} was not found; install the package fuse3")
    command = [program, "-u", *(["-z"] if lazy else []), "--", str(point)]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FUSERMOUNT_LIMIT_S,
            env={**os.environ, "LC_ALL": "C"},  # its messages are looked at below
        )
    except subprocess.TimeoutExpired:
        raise MountError(f"cannot unmount {point}: {FUSERMOUNT} gave no answer in {FUSERMOUNT_LIMIT_S:g} s") from None
    if result.returncode == 0 or find_mount(point) is None:
        return
    said = result.stderr.decode(errors="replace").strip()
    if "busy" in said.lower():
        raise busy_error(point)
    raise MountError(f"cannot unmount {point}: {said or f'{FUSERMOUNT} ended with {result.returncode}'}")


def busy_error(point: Path) -> MountBusyError:
    """The error that names who holds the mount, as far as it can be seen."""
    inner = mounts_below(point)
    who = f"{inner[0].point} is mounted inside it" if inner else describe_holders(point)
    return MountBusyError(f"{point} is busy" + (f": {who}" if who else ""))


def unmount_patiently(point: Path) -> None:
    """As ``unmount``; what holds it only for a moment is waited for."""
    deadline = time.monotonic() + MOMENT_S
    while True:
        try:
            return unmount(point)
        except MountBusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def unmount_or_detach(mount: Mount) -> str | None:
    """Take this very mount away, not another at its place, whatever holds it; the sentence about who did, or None."""
    deadline = time.monotonic() + BUSY_PATIENCE_S
    while is_mounted(mount):
        try:
            unmount(mount.point)
        except MountBusyError as error:
            if time.monotonic() > deadline:
                unmount(mount.point, lazy=True)
                return str(error)
            time.sleep(0.05)
    return None


def is_mounted(mount: Mount) -> bool:
    """Whether this very mount is still the one at its place."""
    current = find_mount(mount.point)
    return current is not None and current.device == mount.device
