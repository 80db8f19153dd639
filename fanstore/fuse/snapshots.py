"""Control files as the kernel knows them: a look-up makes the content anew, under an inode number of its own.

Owns the content of those snapshots until the kernel forgets them. So ``stat`` tells the true size, a reader sees one
state from beginning to end, and the kernel needs no OPEN for them, which it can only be spared for all files together.
Used by operations.py, on the trio thread.

A snapshot that nobody has read yet serves the look-ups of the next moment as well: cp(1) and tar(1) look at a file,
open it, and refuse it if it is another one then.
"""

import time
from dataclasses import dataclass

from fanstore.dataset.control import ControlDirectory
from fanstore.ids import Inode

#: Snapshots have inode numbers from here on; those of a dataset are below 2^32.
_FIRST = 1 << 48

#: How long an unread snapshot is as good as a new one.
_FRESH_NS = 250_000_000


@dataclass
class Snapshot:
    """One state of a control file.

    Attributes:
        content: the whole file.
        time_ns: when it was made; its mtime.
        lookups: how often the kernel was told of it and has not forgotten; never 0.
        read: somebody has read from it.
    """

    content: bytes
    time_ns: int
    lookups: int
    read: bool = False


class Snapshots:
    """The snapshots that the kernel knows.

    Attributes:
        _known: by inode number; a number is never used again.
        _latest: per control file, the number of its last snapshot, which may be forgotten.
    """

    def __init__(self, control: ControlDirectory) -> None:
        self._control = control
        self._known: dict[Inode, Snapshot] = {}
        self._latest: dict[Inode, Inode] = {}
        self._next = _FIRST

    def __len__(self) -> int:
        return len(self._known)

    async def take(self, file: Inode) -> Inode:
        """A snapshot of a control file: the number by which the kernel is told of it, once."""
        latest = self._known.get(self._latest.get(file, Inode(0)))
        if latest is not None and not latest.read and time.time_ns() - latest.time_ns < _FRESH_NS:
            latest.lookups += 1
            return self._latest[file]
        content = await self._control.open(file)
        inode = self._latest[file] = Inode(self._next)
        self._next += 1
        self._known[inode] = Snapshot(content, time.time_ns(), 1)
        return inode

    def get(self, inode: int) -> Snapshot | None:
        """The snapshot with this number; None if it is not one."""
        return self._known.get(Inode(inode)) if inode >= _FIRST else None

    def forget(self, inode: int, lookups: int) -> None:
        """The kernel has forgotten so many of its look-ups of any inode."""
        snapshot = self.get(inode)
        if snapshot is not None:
            snapshot.lookups -= lookups
            if snapshot.lookups <= 0:
                del self._known[Inode(inode)]
