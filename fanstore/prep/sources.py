"""Where a dataset comes from: directories and tar files, each listed one directory at a time.

A source knows its entries and nothing of other sources; scan.py merges them. Sources stay open until close(), because
the packer reads through their descriptors. A source may lie in a folder of its own (``prefix``): all paths that it is
asked for are those of the dataset.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from fanstore import _native
from fanstore.errors import FormatError, SourceError, UsageError
from fanstore.format.storage import is_address
from fanstore.format.tarshard import SHOWN_MAX, clamp_mtime_ns, list_members
from fanstore.units import format_path

#: The kernel takes no path longer than 4,096 bytes at once; deeper directories are reached in steps of this.
_STEP_BYTES = 3800
_TYPE_BITS = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "symlink": stat.S_IFLNK}
#: Columns of native/prep/listing.c that a node is made of, and how a memoryview reads them.
_ROW_CODES: dict[str, Literal["I", "Q", "q"]] = {
    "name_bytes": "I",
    "mode": "I",
    "mtime": "q",
    "size": "Q",
    "uid": "I",
    "gid": "I",
    "target": "Q",
    "dev": "Q",
    "ino": "Q",
    "nlink": "I",
}
#: What is wrong with links that are to be followed.
_LINK_PROBLEMS = {
    errno.ENOENT: "is a symbolic link that leads nowhere",
    errno.ELOOP: "is a symbolic link that leads round in circles",
}
_NAME_MAX = 255
#: Of the names of tar and zip files, and of compressed ones.
_ENDINGS = re.compile(r"\.(tgz|tbz2?|txz|zip|tar(\.\w+)?)$", re.IGNORECASE)
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Node(NamedTuple):
    """One entry as a source sees it."""

    name: bytes
    mode: int
    mtime_ns: int
    size: int
    uid: int
    gid: int
    origin: int  #: position of the content in a tar file
    target: bytes  #: of a symbolic link
    key: tuple[int, int] | None  #: equal for hard links of one file; None where there is one name only


class Listing(NamedTuple):
    """The entries of one directory, and what is wrong with those that are not among them."""

    nodes: list[Node]
    skipped: int  #: sockets, pipes and devices
    problems: list[tuple[bytes, str]]  #: name and reason


class Source(Protocol):
    """A tree that can be listed."""

    label: str  #: as the user wrote it
    prefix: bytes  #: folder of the dataset that the tree is in; empty: the dataset's root
    fd: int
    is_tar: bool
    dereference: bool  #: symbolic links stand for what they point to

    def root(self) -> Node:
        """The root directory."""

    def list_directory(self, path: bytes) -> Listing:
        """Entries of the directory with this relative path; it exists in this source."""

    def forget_names(self) -> None:
        """Let go of what only list_directory needs; content can still be read."""

    def close(self) -> None:
        """Close the descriptor."""


class Columns:
    """A directory as native/prep/listing.c has read it, sorted by name.

    Attributes:
        columns: bytes by name of the column; None if the directory could not be opened.
        identified: every file has a key, since links may lead to it from anywhere.
        special: numbers of the rows that are not files of one name.
        skipped, problems: as in Listing.
    """

    def __init__(
        self,
        columns: dict[str, bytes] | None,
        skipped: int,
        problems: list[tuple[bytes, str]],
        identified: bool = False,
    ) -> None:
        self.columns = columns
        self.identified = identified
        self.skipped = skipped
        self.problems = problems
        self.special: Sequence[int] = memoryview(columns["special"]).cast("I") if columns is not None else ()

    def nodes(self, numbers: Sequence[int] | None = None) -> Iterator[Node]:
        """All rows as nodes, or those with the given ascending numbers."""
        if self.columns is None:
            return
        view = {name: memoryview(self.columns[name]).cast(code) for name, code in _ROW_CODES.items()}
        lengths, names, targets = view["name_bytes"], self.columns["names"], self.columns["targets"]
        position = reached = 0
        for number in range(len(lengths)) if numbers is None else numbers:
            position += sum(lengths[reached:number])
            reached = number
            mode, size, target = view["mode"][number], view["size"][number], view["target"][number]
            shared = (view["nlink"][number] > 1 or self.identified) and not stat.S_ISDIR(mode)
            yield Node(
                name=names[position : position + lengths[number]],
                mode=mode,
                mtime_ns=view["mtime"][number],
                size=size,
                uid=view["uid"][number],
                gid=view["gid"][number],
                origin=0,
                target=targets[target : target + size] if stat.S_ISLNK(mode) else b"",
                key=(view["dev"][number], view["ino"][number]) if shared else None,
            )


class _Placed:
    """What all sources need to lie in a folder of the dataset."""

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix

    def inner(self, path: bytes) -> bytes | None:
        """A path of the dataset below the source's own root; None for a folder on the way to it."""
        if not self.prefix or path == self.prefix:
            return path[len(self.prefix) :]
        return path[len(self.prefix) + 1 :] if path.startswith(self.prefix + b"/") else None

    def _towards(self, path: bytes, own_root: Node) -> Listing:
        """Of a folder on the way to the source's root: the next one."""
        rest = self.prefix[len(path) + 1 if path else 0 :]
        name, _, further = rest.partition(b"/")
        return Listing([self._folder(name, own_root) if further else own_root._replace(name=name)], 0, [])

    @staticmethod
    def _folder(name: bytes, own_root: Node) -> Node:
        return own_root._replace(name=name, mode=stat.S_IFDIR | 0o755)


class DirectorySource(_Placed):
    """A directory tree on a file system.

    Attributes:
        nofollow: flag to open files with, so that none is taken for what has become a symbolic link meanwhile.
    """

    is_tar = False

    def __init__(self, path: str, dereference: bool = False, prefix: bytes = b"") -> None:
        super().__init__(prefix)
        self.label = path
        self.dereference = dereference
        self.nofollow = 0 if dereference else os.O_NOFOLLOW
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"cannot read the source '{path}': {error.strerror}") from error

    def root(self) -> Node:
        own = self._own_root()
        return self._folder(b"", own) if self.prefix else own

    def _own_root(self) -> Node:
        status = os.fstat(self.fd)
        mtime_ns = clamp_mtime_ns(status.st_mtime_ns)
        return Node(b"", status.st_mode, mtime_ns, 0, status.st_uid, status.st_gid, 0, b"", None)

    def open_directory(self, path: bytes, above: list[os.stat_result] | None = None) -> int:
        """A descriptor of a directory of the source, however deep it is; ``above`` gets all on the way, and itself."""
        own = self.inner(path)
        assert own is not None
        fd = os.dup(self.fd)
        rest = own
        try:
            if above is not None:
                above.append(os.fstat(fd))
            while rest:
                if above is not None:
                    cut = len(rest.partition(b"/")[0])
                else:
                    cut = len(rest) if len(rest) <= _STEP_BYTES else rest.rindex(b"/", 0, _STEP_BYTES)
                deeper = os.open(rest[:cut], _OPEN_DIRECTORY | self.nofollow, dir_fd=fd)
                os.close(fd)
                fd = deeper
                rest = rest[cut + 1 :]
                if above is not None:
                    above.append(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd if own else self._reopen(fd)

    def _reopen(self, fd: int) -> int:
        # A duplicate shares its position with the root's descriptor; listing needs one of its own.
        own = os.open(".", _OPEN_DIRECTORY, dir_fd=fd)
        os.close(fd)
        return own

    def list_columns(self, path: bytes) -> Columns:
        """Entries of a directory as columns: the quick way, for a million files."""
        above: list[os.stat_result] = []
        try:
            fd = self.open_directory(path, above if self.dereference else None)
        except OSError as error:
            return Columns(None, 0, [(b"", f"cannot be listed: {error.strerror}")])
        try:
            ids = array("Q", [number for one in above for number in (one.st_dev, one.st_ino)])
            columns, failed, skipped, code = _native.list_directory(fd, self.dereference, ids)
        finally:
            os.close(fd)
        reasons = _LINK_PROBLEMS if self.dereference else {}
        problems = [(name, reasons.get(error, f"cannot be read: {os.strerror(error)}")) for name, error in failed]
        if code:
            problems.append((b"", f"cannot be listed to its end: {os.strerror(code)}"))
        return Columns(columns, skipped, problems, self.dereference)

    def list_directory(self, path: bytes) -> Listing:
        if self.inner(path) is None:
            return self._towards(path, self._own_root())
        listed = self.list_columns(path)
        return Listing(list(listed.nodes()), listed.skipped, listed.problems)

    def forget_names(self) -> None:
        """A directory keeps no names in memory."""

    def close(self) -> None:
        os.close(self.fd)


class _Folder:
    """One directory of a tar: its entries, and the folders among them."""

    __slots__ = ("folders", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.folders: dict[bytes, _Folder] = {}


class TarSource(_Placed):
    """A plain tar file, listed once and kept as a tree of names.

    Attributes:
        spooled: checksum of all of it, if it was fetched or unpacked for this run; otherwise 0.
    """

    is_tar = True
    dereference = False

    def __init__(self, path: str, label: str, prefix: bytes = b"", spooled: int = 0) -> None:
        """Open the file; read_members() must follow before it can be listed."""
        super().__init__(prefix)
        self.spooled = spooled
        self.label = label
        self.path = path
        self.skipped = 0
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"cannot read the source '{label}': {error.strerror}") from error
        status = os.fstat(self.fd)
        self.bytes = status.st_size
        self._mtime_ns = status.st_mtime_ns
        self.entries = 0
        # Directories that the tar does not name get its own time and the usual mode.
        mtime_ns = clamp_mtime_ns(status.st_mtime_ns)
        self._implied = Node(b"", stat.S_IFDIR | 0o755, mtime_ns, 0, os.getuid(), os.getgid(), 0, b"", None)
        self._root = self._implied
        self._tree = _Folder()

    def check_unchanged(self) -> None:
        """SourceError if somebody has written to the file since it was opened: then no member can be trusted."""
        status = os.fstat(self.fd)
        if (status.st_size, status.st_mtime_ns) != (self.bytes, self._mtime_ns):
            raise SourceError(f"'{self.label}' was changed while it was read; nothing was written")

    def read_members(self, number: int, tick: Callable[[int], None] = lambda _: None) -> None:
        """Read all headers. ``number`` tells the hard links of different sources apart; ``tick`` gets the count."""
        with open(self.fd, "rb", closefd=False) as file:
            for member in list_members(file, self.bytes, f"'{self.label}'"):
                self.entries += 1
                tick(self.entries)
                if member.kind == "special":
                    self.skipped += 1
                    continue
                if member.kind == "hardlink":
                    node = self._linked(member.link_path, member.path, number)
                else:
                    node = Node(
                        name=member.path[-1] if member.path else b"",
                        mode=_TYPE_BITS[member.kind] | member.mode,
                        mtime_ns=member.mtime_ns,
                        size=0 if member.kind == "directory" else member.size,
                        uid=member.uid,
                        gid=member.gid,
                        origin=member.offset,
                        target=member.link,
                        key=None,
                    )
                self._insert(member.path, node)

    def _shown(self, path: tuple[bytes, ...]) -> str:
        return f"{format_path(b'/'.join(path), SHOWN_MAX)} in '{self.label}'"

    def _linked(self, target: tuple[bytes, ...], path: tuple[bytes, ...], number: int) -> Node:
        """A further name of a member seen before: the same node, with a key that both names share."""
        folder: _Folder | None = self._tree
        for name in target[:-1]:
            folder = folder.folders.get(name) if folder is not None else None
        first = folder.nodes.get(target[-1]) if folder is not None and target else None
        if folder is None or first is None or stat.S_ISDIR(first.mode):
            raise FormatError(
                f"{self._shown(path)} is a hard link to {self._shown(target)}, which is no file before it"
            )
        # -1 - number cannot be a device number, so keys of tar files and of directories never meet.
        keyed = first._replace(key=(-1 - number, first.origin))
        folder.nodes[target[-1]] = keyed
        return keyed._replace(name=path[-1] if path else b"")

    def _insert(self, path: tuple[bytes, ...], node: Node) -> None:
        if not path:
            if not stat.S_ISDIR(node.mode):
                raise FormatError(f"the root of '{self.label}' is not a directory")
            self._root = node
            return
        folder = self._tree
        for depth in range(len(path) - 1):
            folder = self._enter(folder, path, depth)
        if stat.S_ISDIR(node.mode):
            self._enter(folder, path, len(path) - 1)
        elif path[-1] in folder.folders:
            raise FormatError(f"{self._shown(path)} is both a directory and a file")
        folder.nodes[path[-1]] = node

    def _enter(self, folder: _Folder, path: tuple[bytes, ...], depth: int) -> _Folder:
        """The folder ``path[depth]`` in ``folder``; made if the tar has not named it yet."""
        name = path[depth]
        inner = folder.folders.get(name)
        if inner is None:
            if name in folder.nodes:
                raise FormatError(f"{self._shown(path[: depth + 1])} is both a file and a directory")
            folder.nodes[name] = self._implied._replace(name=name)
            inner = folder.folders[name] = _Folder()
        return inner

    def root(self) -> Node:
        return self._folder(b"", self._root) if self.prefix else self._root

    def list_directory(self, path: bytes) -> Listing:
        own = self.inner(path)
        if own is None:
            return self._towards(path, self._root)
        folder = self._tree
        for name in own.split(b"/") if own else ():
            folder = folder.folders[name]
        # Special members have no place in the tree; they are all counted with the root.
        return Listing(list(folder.nodes.values()), 0 if own else self.skipped, [])

    def forget_names(self) -> None:
        self._tree = _Folder()

    def close(self) -> None:
        os.close(self.fd)


def looks_like_directory(path: str) -> bool:
    """Whether a source on the command line is a directory; SourceError if it is neither directory nor file."""
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise SourceError(f"cannot read the source '{path}': {error.strerror}") from error
    if stat.S_ISDIR(mode):
        return True
    if stat.S_ISREG(mode):
        return False
    raise SourceError(f"the source '{path}' is neither a directory nor a tar file")


class Given(NamedTuple):
    """A source as it is named on a command line: ``path`` (or an address), below ``prefix`` in the dataset."""

    path: str
    prefix: bytes


def read_name(text: str) -> Given:
    """A SRC, perhaps with a prefix (``train=/data/a``); one that exists as it is has none. Raises UsageError."""
    prefix, equals, path = text.partition("=")
    if not equals or is_address(text) or os.path.lexists(text):
        return Given(text, b"")
    parts = os.fsencode(prefix).strip(b"/").split(b"/")
    if prefix.startswith("/") or any(part in (b"", b".", b"..") or len(part) > _NAME_MAX for part in parts):
        raise UsageError(f"'{prefix}' in the source '{text}' is no name of a folder in the dataset, such as 'train'")
    if not path:
        raise UsageError(f"the source '{text}' has no path behind '='")
    return Given(path, b"/".join(parts))


def in_own_folder(given: Given) -> Given:
    """A tar file below a folder that is called like it: ``shards/a-001.tar.gz`` in ``a-001``."""
    name = given.path.rstrip("/").rpartition("/")[2].partition("?")[0]
    stem = os.fsencode(_ENDINGS.sub("", name))
    if stem in (b"", b".", b".."):  # no names of folders
        stem = os.fsencode(name)
    return given._replace(prefix=given.prefix + b"/" + stem if given.prefix else stem)
