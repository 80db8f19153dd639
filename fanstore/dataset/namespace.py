"""The name space: attributes, look-up, listings, links, extended attributes. All of it is in memory.

Owns the meaning of inode numbers (entry number of the primary name plus one; those of the control directory follow) and
where the control directory appears. Does not read file content (broker.py) and does not know FUSE. Used by the fuse
layer, which maps the exceptions below to errno. Read-only after construction, so any thread may use it.
"""

import logging
import stat
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fanstore.dataset.control import CONTROL_NAME, ControlDirectory
from fanstore.errors import FanstoreError
from fanstore.format.codec_table import CODECS
from fanstore.format.index import Index
from fanstore.ids import Entry, Inode

log = logging.getLogger(__name__)

ROOT_INODE = Inode(1)

#: Unit of ``Totals.blocks``, and what a file system would call its block size.
BLOCK_BYTES = 4096

_XATTR_PREFIX = b"user.fanstore."
_XATTRS = (b"partition", b"codec", b"stored_size", b"checksum")
_XATTR_NAMES = tuple(_XATTR_PREFIX + name for name in _XATTRS)

_CONTROL_DIRECTORY_MODE = stat.S_IFDIR | 0o555
_CONTROL_FILE_MODE = stat.S_IFREG | 0o444


class NamespaceError(FanstoreError):
    """A question to the name space that has no answer."""


class NotFoundError(NamespaceError):
    """There is no such name or inode (ENOENT)."""


class NotDirectoryError(NamespaceError):
    """Only a directory has children (ENOTDIR)."""


class NotSymlinkError(NamespaceError):
    """Only a symbolic link has a target (EINVAL)."""


class NoAttributeError(NamespaceError):
    """There is no such extended attribute (ENODATA)."""


class Attributes(NamedTuple):
    """What stat says. ``blocks`` are of 512 bytes."""

    inode: Inode
    mode: int
    nlink: int
    size: int
    mtime_ns: int
    blocks: int
    uid: int
    gid: int


class Child(NamedTuple):
    """One name in a listing; ``cookie`` is where a listing goes on after it."""

    name: bytes
    inode: Inode
    cookie: int


class Totals(NamedTuple):
    """What statfs says: blocks of BLOCK_BYTES, and inodes."""

    blocks: int
    files: int


class Namespace:
    """The tree of one mount: the index, and the control directory in its root.

    Attributes:
        uid, gid: to whom everything belongs: the user who mounts.
        _hidden: entry of the dataset that the control directory hides; -1 for none.
    """

    def __init__(
        self, index: Index, partition_files: Sequence[str], uid: int, gid: int, control: ControlDirectory
    ) -> None:
        """``partition_files``: name of the file of each partition, for the extended attribute."""
        self.uid = uid
        self.gid = gid
        self._index = index
        self._partition_files = [name.encode(errors="surrogateescape") for name in partition_files]
        self._control = control
        self._entry_count = index.entry_count
        # Memoryview columns: plain ints without the cost of numpy scalars.
        self._mode = index.mode
        self._nlink = index.nlink
        self._size = index.size
        self._mtime_ns = index.mtime_ns
        self._primary = index.inode
        self._parent = index.parent
        self._totals = _count(index)
        self._started_ns = time.time_ns()
        self._hidden = index.lookup(0, CONTROL_NAME)
        if self._hidden >= 0:
            name = CONTROL_NAME.decode()
            log.warning("the dataset's own '%s' is hidden by the control directory of the mount", name)

    def entry(self, inode: Inode) -> Entry:
        """The entry of the index behind an inode number that is not of the control directory."""
        if not 1 <= inode <= self._entry_count:
            raise NotFoundError(f"there is no inode {inode}")
        return Entry(inode - 1)

    def is_control(self, inode: Inode) -> bool:
        """Is this the control directory or one of its files?"""
        return inode in self._control

    def attributes(self, inode: Inode) -> Attributes:
        """What stat says of an inode."""
        entry = inode - 1
        if not 0 <= entry < self._entry_count:
            return self._control_attributes(inode)
        size = self._size[entry]
        return Attributes(
            inode,
            self._mode[entry],
            self._nlink[entry],
            size,
            self._mtime_ns[entry],
            (size + 511) >> 9,
            self.uid,
            self.gid,
        )

    def lookup(self, parent: Inode, name: bytes) -> Inode:
        """The inode with this name in a directory."""
        if name == b".":
            return parent
        if name == b"..":
            return self.parent(parent)
        if inode := self._control_lookup(parent, name):
            return inode
        entry = self.entry(parent)
        child = self._index.lookup(entry, name)
        if child < 0:
            if not stat.S_ISDIR(self._mode[entry]):
                raise NotDirectoryError(f"inode {parent} is not a directory")
            raise NotFoundError("there is no such name")
        return Inode(self._primary[child] + 1)

    def parent(self, inode: Inode) -> Inode:
        """The directory that holds a directory; the root holds itself. What ``..`` means."""
        if inode in self._control:
            return ROOT_INODE if inode == self._control.inode else self._control.inode
        return Inode(self._parent[self.entry(inode)] + 1)

    def child(self, parent: int, name: bytes) -> Inode | None:
        """The inode with this name in a directory of the dataset; None if the name is free there."""
        try:
            return self.lookup(Inode(parent), name)
        except NamespaceError:
            return None

    def is_directory(self, inode: int) -> bool:
        """Is this a directory of the dataset?"""
        return 1 <= inode <= self._entry_count and stat.S_ISDIR(self._mode[inode - 1])

    def path(self, inode: int) -> bytes:
        """Where a directory of the dataset is, relative to the root, which is the empty path."""
        parts = []
        while inode != ROOT_INODE:
            parts.append(self._index.name(Entry(inode - 1)))
            inode = self.parent(Inode(inode))
        return b"/".join(reversed(parts))

    def children(self, inode: Inode, cookie: int = 0) -> Iterator[Child]:
        """The listing of a directory, from its start or from the cookie of an earlier child.

        Begins with ``.`` and ``..``. A cookie is one more than a position in the listing and never changes its meaning,
        so a listing can be taken up again anywhere, at any time, from any handle. The control directory is not listed.
        """
        if inode == self._control.inode:
            names = [(b".", inode), (b"..", ROOT_INODE), *self._control.names()]
            for position in range(max(cookie, 0), len(names)):
                yield Child(*names[position], position + 1)
            return
        entry = self.entry(inode)
        if not stat.S_ISDIR(self._mode[entry]):
            raise NotDirectoryError(f"inode {inode} is not a directory")
        if cookie <= 0:
            yield Child(b".", inode, 1)
        if cookie <= 1:
            yield Child(b"..", self.parent(inode), 2)
        children = self._index.children(entry)
        for child in children[max(cookie - 2, 0) :]:
            if child != self._hidden:
                yield Child(self._index.name(child), Inode(self._primary[child] + 1), child - children.start + 3)

    def readlink(self, inode: Inode) -> bytes:
        """The target of a symbolic link."""
        if (target := self._control.link_target(inode)) is not None:
            return target
        if inode in self._control or not stat.S_ISLNK(self._mode[self.entry(inode)]):
            raise NotSymlinkError(f"inode {inode} is not a symbolic link")
        return self._index.link_target(self.entry(inode))

    def list_xattrs(self, inode: Inode) -> tuple[bytes, ...]:
        """Names of the extended attributes; only regular files of the dataset have any."""
        if inode in self._control or not stat.S_ISREG(self._mode[self.entry(inode)]):
            return ()
        return _XATTR_NAMES

    def get_xattr(self, inode: Inode, name: bytes) -> bytes:
        """The value of an extended attribute: how and where a file is stored."""
        if name not in self.list_xattrs(inode):
            raise NoAttributeError("there is no such extended attribute")
        entry = self.entry(inode)
        match name.removeprefix(_XATTR_PREFIX):
            case b"partition":
                return self._partition_files[self._index.partition[entry]]
            case b"codec":
                return CODECS[self._index.codec[entry]].name.encode()
            case b"stored_size":
                return b"%d" % self._index.stored_size[entry]
            case _:
                return b"%016x" % self._index.checksum[entry]

    def statfs(self) -> Totals:
        """Size of the dataset: content of every file once, and the number of inodes."""
        return self._totals

    def _control_lookup(self, parent: Inode, name: bytes) -> Inode | None:
        if parent == ROOT_INODE:
            return self._control.inode if name == CONTROL_NAME else None
        if parent not in self._control:
            return None
        if parent != self._control.inode:
            raise NotDirectoryError(f"inode {parent} is not a directory")
        inode = self._control.lookup(name)
        if inode is None:
            raise NotFoundError("there is no such name")
        return inode

    def _control_attributes(self, inode: Inode) -> Attributes:
        if inode not in self._control:
            raise NotFoundError(f"there is no inode {inode}")
        if (target := self._control.link_target(inode)) is not None:
            mode = stat.S_IFLNK | 0o777
            return Attributes(inode, mode, 1, len(target), self._started_ns, 0, self.uid, self.gid)
        directory = inode == self._control.inode
        mode, nlink = (_CONTROL_DIRECTORY_MODE, 2) if directory else (_CONTROL_FILE_MODE, 1)
        return Attributes(inode, mode, nlink, 0, time.time_ns(), 0, self.uid, self.gid)

    def validate(self) -> None:
        """Check that listings, look-up and parents agree, for every directory; for tests on small trees."""
        reached = set()
        for entry in range(self._entry_count):
            inode = Inode(entry + 1)
            if self._primary[entry] != entry or not stat.S_ISDIR(self._mode[entry]):
                continue
            listing = list(self.children(inode))
            assert [child.name for child in listing[:2]] == [b".", b".."]
            assert CONTROL_NAME not in {child.name for child in listing} or inode != ROOT_INODE
            for child in listing[2:]:
                assert self.lookup(inode, child.name) == child.inode
                assert self.attributes(child.inode).inode == child.inode
                assert list(self.children(inode, child.cookie)) == listing[listing.index(child) + 1 :]
                if stat.S_ISDIR(self.attributes(child.inode).mode):
                    assert self.parent(child.inode) == inode
                reached.add(child.inode)
        hidden = self._hidden >= 0
        assert hidden or reached | {ROOT_INODE} == {Inode(primary + 1) for primary in self._primary}


def _count(index: Index) -> Totals:
    mode = index.column("mode").astype(np.uint32, copy=False)
    size = index.column("size").astype(np.uint64, copy=False)
    own = index.column("inode") == np.arange(index.entry_count, dtype=np.uint32)
    regular = own & ((mode & 0o170000) == stat.S_IFREG)
    # Per file, as a file system would count; uint64 cannot overflow here: a partition's length is a 64-bit offset.
    blocks = (size[regular] + np.uint64(BLOCK_BYTES - 1)) // np.uint64(BLOCK_BYTES)
    return Totals(blocks=int(blocks.sum()), files=int(np.count_nonzero(own)))
