"""A dataset without a mount: its path, which exists for preloaded programs only, and how commands find who serves it.

Owns what ``mount.json`` in the directory of a job says of such a path (mountrecord.py), and the second directory among
temporary files that points to the first one if that is in ``--local``: from a path alone nobody knows where ``--local``
was. Used by claim.py and session.py, and by the commands that are given a path; the calls block.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fanstore.client.connection import ControlClient, connect
from fanstore.client.preload import STATE_VARIABLE
from fanstore.client.protocol import SOCKET_NAME
from fanstore.errors import MountError
from fanstore.fuse.mountpoint import MountPoint
from fanstore.fuse.mountrecord import read_record, record_mount
from fanstore.job.job_directory import JobDirectory
from fanstore.mounttable import Mount, find_mount

log = logging.getLogger(__name__)

#: ``st_dev`` for programs: major 0 as of all file systems without a device, and minors that the kernel, which begins at
#: 0, does not come to.
_FIRST_MINOR = 0xF0000
#: Where other shells of the user may look, whatever their TMPDIR is.
_COMMON = Path("/tmp")


class UnmountedPoint(MountPoint):
    """A path at which nothing is mounted. It needs not be there, and is not made."""

    def claim(self) -> None:
        """MountError if something is there that the dataset would hide from some programs, or another job's."""
        if find_mount(self.path) is not None:
            raise MountError(f"something is mounted on {self.path} already: name another path")
        try:
            present = os.listdir(self.path)
        except FileNotFoundError:
            present = []
        except NotADirectoryError:
            raise MountError(f"{self.path} is not a directory: name another path") from None
        except OSError as error:
            raise MountError(f"{self.path} cannot be read: {error.strerror}") from None
        if present:
            raise MountError(f"{self.path} is not empty (it holds '{min(present)}'): name an empty or a new directory")
        other = find_directory(self.path)
        if other is not None:
            raise MountError(f"another fanstore-mount --no-fuse serves {self.path} already (its directory is {other})")

    def release(self) -> None:
        """There is nothing that others could see."""


def describe_unmounted(point: Path, source: str) -> Mount:
    """What stands for a line of the kernel's table."""
    minor = _FIRST_MINOR | os.getpid() & 0xFFFF
    return Mount(point, f"0:{minor}", "none", source, os.geteuid(), Path("/"))


def record_unmounted(directory: Path, point: MountPoint, cleanup: contextlib.ExitStack) -> None:
    """Have the job of this directory found by its path."""
    record_mount(directory, point.path, False, unmounted=True)
    if directory.parent.resolve() in (base.resolve() for base in _bases()):
        return
    try:
        pointer = JobDirectory(Path(tempfile.gettempdir()))
    except MountError as error:
        log.info("fanstore-stat, fanstore-umount and fanstore-run find this job only from inside: %s", error)
        return
    cleanup.callback(pointer.remove)
    record_mount(pointer.path, point.path, False, unmounted=True, serves=str(directory))


def find_directory(point: Path) -> Path | None:
    """The directory of the living job on this node that serves this path without a mount; None if there is none."""
    own = os.environ.get(STATE_VARIABLE)
    if own and _served(Path(own).parent) == (point, Path(own).parent):
        return Path(own).parent
    for base in _bases():
        with contextlib.suppress(OSError):  # no such directory, or of somebody else
            for directory in JobDirectory.living(base):
                served = _served(directory)
                if served is not None and served[0] == point:
                    return served[1]
    return None


def _bases() -> Iterator[Path]:
    yield from dict.fromkeys((Path(tempfile.gettempdir()), _COMMON))


def _served(directory: Path) -> tuple[Path, Path] | None:
    """The path that a job serves without a mount, and its directory."""
    try:
        noted = read_record(directory)
        return (Path(noted["path"]), Path(noted.get("serves", directory))) if noted.get("unmounted") else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def connect_to(point: Path, program: str) -> ControlClient | None:
    """A connection to the daemon that serves this path without a mount; None if there is none. Raises MountError."""
    directory = find_directory(point)
    if directory is None:
        return None
    client = connect({"control_socket": str(directory / SOCKET_NAME)}, program)
    if client is None:
        raise MountError(
            f"the daemon of {point} (in {directory}) cannot be asked: it has just ended, or is of another version"
        )
    return client
