"""Control files as the kernel knows them: each look-up makes the content anew, under an inode number of its own.

Owns the content of those snapshots until the kernel forgets them. So ``stat`` tells the true size, a reader sees one
state from beginning to end, and the kernel needs no OPEN for them, which it can only be spared for all files together.
Used by operations.py, on the trio thread.
"""

import time
from dataclasses import dataclass

from fanstore.core.control import ControlDirectory
from fanstore.ids import Inode

#: Snapshots have inode numbers from here on; those of a dataset are below 2^32.
_FIRST = 1 << 48


@dataclass
class Snapshot:
    """One state of a control file.

    Attributes:
        content: the whole file.
        time_ns: when it was made; its mtime.
        lookups: how often the kernel was told of it and has not forgotten; never 0.
    """

    content: bytes
    time_ns: int
    lookups: int


class Snapshots:
    """The snapshots that the kernel knows.

    Attributes:
        _known: by inode number; a number is never used again.
    """

    def __init__(self, control: ControlDirectory) -> None:
        self._control = control
        self._known: dict[Inode, Snapshot] = {}
        self._next = _FIRST

    def __len__(self) -> int:
        return len(self._known)

    async def take(self, file: Inode) -> Inode:
        """Make the content of a control file; the number by which the kernel is told of it, once."""
        content = await self._control.open(file)
        inode = Inode(self._next)
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
