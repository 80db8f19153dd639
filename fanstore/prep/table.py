"""The scanned tree as columns: what fanstore-prep knows of every entry before it reads any content.

A million files are a million rows of about 80 bytes here, not a million Python objects. Filled by scan.py in index
order (breadth first, children sorted), then frozen to numpy arrays, which plan.py, pack.py and the C packer share.
"""

from __future__ import annotations

import itertools
import stat
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

U1 = npt.NDArray[np.uint8]
U4 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint64]
I8 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """A frozen scan. One row per entry; the meaning of the columns is that of docs/format.md, and:

    source: number of the source that has the content; origin: position of the content in a tar source, or of a
    symbolic link's target in ``links``; plain: 1 where the file must not be compressed (docs/format.md, *Partitions*).
    """

    parent: U4
    nameoff: U8
    names: U1
    mode: U4
    mtime: I8
    size: U8
    uid: U4
    gid: U4
    source: U4
    origin: U8
    inode: U4
    plain: U1
    links: U1

    def __len__(self) -> int:
        return len(self.parent)

    def columns(self) -> dict[str, Any]:
        """The columns by name, as the C packer wants them."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def name(self, entry: int) -> bytes:
        """Name of an entry."""
        return self.names[int(self.nameoff[entry]) : int(self.nameoff[entry + 1])].tobytes()

    def path(self, entry: int) -> bytes:
        """Path of an entry relative to the root."""
        parts = []
        while entry:
            parts.append(self.name(entry))
            entry = int(self.parent[entry])
        return b"/".join(reversed(parts))

    def link_target(self, entry: int) -> bytes:
        """Target of a symbolic link."""
        start = int(self.origin[entry])
        return self.links[start : start + int(self.size[entry])].tobytes()

    def is_type(self, kind: int) -> npt.NDArray[np.bool_]:
        """Which entries are of a type, such as stat.S_IFDIR."""
        mask: npt.NDArray[np.bool_] = (self.mode & np.uint32(0o170000)) == np.uint32(kind)
        return mask

    def path_bytes(self) -> I8:
        """Length of every entry's path."""
        lengths = np.diff(self.nameoff).astype(np.int64)
        total = np.zeros(len(self), dtype=np.int64)
        # Breadth-first order: one pass per level of the tree, each over whole slices.
        level = np.array([0])
        is_directory = self.is_type(stat.S_IFDIR)
        counts = np.bincount(self.parent[1:], minlength=len(self))
        firsts = 1 + np.concatenate(([0], np.cumsum(counts)[:-1]))
        while len(level):
            low, high = int(firsts[level[0]]), int(firsts[level[-1]] + counts[level[-1]])
            children = np.arange(low, high)
            total[children] = total[self.parent[children]] + lengths[children] + 1
            level = children[is_directory[children]]
        return total


class TableBuilder:
    """Grows a table row by row; ``add`` must be called in index order.

    Attributes:
        dev, ino: of every entry, if links are followed (``identify``): then any two may be one file.
    """

    def __init__(self, identify: bool = False) -> None:
        self._identify = identify
        self.dev = array("Q")
        self.ino = array("Q")
        self.parent = array("I")
        self.nameoff = array("Q", [0])
        self.names = bytearray()
        self.mode = array("I")
        self.mtime = array("q")
        self.size = array("Q")
        self.uid = array("I")
        self.gid = array("I")
        self.source = array("I")
        self.origin = array("Q")
        self.inode = array("I")
        self.plain = bytearray()
        self.links = bytearray()

    def __len__(self) -> int:
        return len(self.parent)

    def add(
        self,
        parent: int,
        name: bytes,
        mode: int,
        mtime_ns: int,
        size: int,
        uid: int,
        gid: int,
        source: int,
        origin: int,
        inode: int | None,
        plain: bool,
        key: tuple[int, int] | None = None,
    ) -> int:
        """Append an entry and return its number; ``inode`` is the entry of the first name of a further hard link."""
        entry = len(self.parent)
        self.parent.append(parent)
        self.names += name
        self.nameoff.append(len(self.names))
        self.mode.append(mode)
        self.mtime.append(mtime_ns)
        self.size.append(size)
        self.uid.append(uid)
        self.gid.append(gid)
        self.source.append(source)
        self.origin.append(origin)
        self.inode.append(entry if inode is None else inode)
        self.plain.append(plain)
        if self._identify:  # keys of tar members have negative numbers, and are never met by a link
            self.dev.append(key[0] if key is not None and key[0] >= 0 else 0)
            self.ino.append(key[1] if key is not None and key[0] >= 0 else 0)
        return entry

    def add_columns(self, parent: int, source: int, columns: dict[str, bytes]) -> int:
        """Append all rows of a directory listing (native/prep/listing.c); returns the number of the first.

        Every row gets an inode of its own and origin 0; the caller mends those of links.
        """
        first = len(self.parent)
        count = len(columns["plain"])
        ends = itertools.accumulate(memoryview(columns["name_bytes"]).cast("I"), initial=self.nameoff.pop())
        self.nameoff.extend(ends)
        self.names += columns["names"]
        self.parent.extend([parent] * count)
        self.mode.frombytes(columns["mode"])
        self.mtime.frombytes(columns["mtime"])
        self.size.frombytes(columns["size"])
        self.uid.frombytes(columns["uid"])
        self.gid.frombytes(columns["gid"])
        self.source.extend([source] * count)
        self.origin.frombytes(bytes(8 * count))
        self.inode.extend(range(first, first + count))
        self.plain += columns["plain"]
        if self._identify:
            self.dev.frombytes(columns["dev"])
            self.ino.frombytes(columns["ino"])
        return first

    def add_link(self, target: bytes) -> int:
        """Keep the target of a symbolic link; returns its position."""
        position = len(self.links)
        self.links += target
        return position

    def freeze(self) -> Table:
        """The finished table. Files of several names are marked plain, so that unpacking keeps them one file."""
        inode = np.frombuffer(self.inode, np.uint32)
        if self._identify:
            inode = self._shared_inodes(inode)
        plain = np.frombuffer(self.plain, np.uint8).copy()
        plain[np.bincount(inode, minlength=len(inode))[inode] > 1] = 1
        return Table(
            parent=np.frombuffer(self.parent, np.uint32),
            nameoff=np.frombuffer(self.nameoff, np.uint64),
            names=np.frombuffer(self.names, np.uint8),
            mode=np.frombuffer(self.mode, np.uint32),
            mtime=np.frombuffer(self.mtime, np.int64),
            size=np.frombuffer(self.size, np.uint64),
            uid=np.frombuffer(self.uid, np.uint32),
            gid=np.frombuffer(self.gid, np.uint32),
            source=np.frombuffer(self.source, np.uint32),
            origin=np.frombuffer(self.origin, np.uint64),
            inode=inode,
            plain=plain,
            links=np.frombuffer(self.links, np.uint8),
        )

    def _shared_inodes(self, inode: U4) -> U4:
        """The column ``inode``, with all names by which links lead to one file as hard links of the first."""
        dev, ino = np.frombuffer(self.dev, np.uint64), np.frombuffer(self.ino, np.uint64)
        is_file = (np.frombuffer(self.mode, np.uint32) & np.uint32(0o170000)) == np.uint32(stat.S_IFREG)
        files = np.flatnonzero(is_file & (ino != 0))
        order = files[np.lexsort((files, ino[files], dev[files]))]
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = (ino[order[1:]] != ino[order[:-1]]) | (dev[order[1:]] != dev[order[:-1]])
        shared = inode.copy()
        shared[order] = order[is_first][np.cumsum(is_first) - 1]
        return shared
