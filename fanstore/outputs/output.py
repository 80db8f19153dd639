"""What an output is: a file, directory or symbolic link that was made under the mount, and what stands of it.

Owns the words only; how they change is for tree.py, whose records these are. Used by everything about outputs.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from typing import NamedTuple

from fanstore.ids import Inode

#: Inode numbers of outputs begin here and end below those of snapshots (fuse/snapshots.py): OUTPUT_FIRST and
#: OUTPUT_END of native/fuse/engine.h.
FIRST_OUTPUT, END_OUTPUT = 1 << 40, 1 << 48

#: ``Output.holder`` of a file that no node has: it is where ``--output`` is.
SHARED = -1


class Place(NamedTuple):
    """A name in a directory."""

    parent: int
    name: bytes


@dataclass(slots=True)
class Standing:
    """What stands in ``--output`` of one output: where, which content, which attributes."""

    place: Place
    version: int
    meta: int


@dataclass(slots=True)
class Going:
    """What is about to stand in ``--output``, and ``file``, the copy that gets the name; empty if there is none.

    Noted before it is done: whoever goes on after a death looks whether it was (saver.py).
    """

    standing: Standing
    file: str


@dataclass(slots=True)
class Output:
    """A file, directory or symbolic link that was made under the mount.

    Attributes:
        place: its name; None once it was removed.
        mode: type and permissions, as in st_mode.
        size, mtime_ns: of the content that was last made known (``commit``); whoever has the bytes knows better.
        version: counts contents; 0 before the first. meta: counts changes of mode, time and extended attributes.
        holder: rank of the node that has the content, or SHARED.
        standing: what there is of it in ``--output``; ready: version and name of a copy there that awaits its name.
        going: what is being done about it there.
        last: the name that it had when another output took it by a rename.
        moved: when it got or lost its name, for comparison with others. written: when it got its content.
        since: when its name was taken for the first time by those that have replaced each other there up to this one.
        trail: the names that it has had since it left the place at which it stands in ``--output``, and when it got
            them, the last one last; None for when it was removed. Empty if it stands where it belongs, or nowhere.
    """

    inode: Inode
    place: Place | None
    mode: int
    mtime_ns: int
    size: int = 0
    version: int = 0
    meta: int = 0
    holder: int = SHARED
    target: bytes = b""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    standing: Standing | None = None
    ready: tuple[int, str] | None = None
    going: Going | None = None
    last: Place | None = None
    moved: int = 0
    written: int = 0
    since: int = 0
    trail: list[tuple[int, Place | None]] = field(default_factory=list)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    def is_saved(self) -> bool:
        """Does it stand in ``--output`` just as it is here?"""
        if self.place is None:
            return self.standing is None and self.going is None
        return self.standing == Standing(self.place, self.version, self.meta)

    def is_copied(self) -> bool:
        """Is the content of now in ``--output``, under whatever name?"""
        standing = self.standing.version if self.standing is not None else 0
        return self.version > 0 and self.version in (standing, self.ready[0] if self.ready is not None else 0)
