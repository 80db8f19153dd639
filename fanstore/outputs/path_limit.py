"""How long paths in ``--output`` may become: what could never be saved is refused to who makes it.

The kernel takes paths of up to PATH_BYTES. Programs can go deeper under the mount, one directory after the other, and
the path in ``--output`` is another one than that under the mount anyway. Owns the limit; where it is decided on names
it is asked (outputs.py). A directory is only made or renamed where any name in it still fits: then files can be created
in it without asking, by the native engine and by other nodes. Trio thread only.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from fanstore.outputs.output import FIRST_OUTPUT, Output, Place
from fanstore.outputs.tree import NAME_BYTES, PATH_BYTES, Names, Operation, OutputTree, RefusedError

#: Kept free: what recovery puts behind a name (``.unfinished-NN``), and what the path of something parked has more.
RESERVED_BYTES = 64


class PathLimit:
    """The limit of one ``--output``; None for none, with ``--scratch``."""

    def __init__(self, tree: OutputTree, dataset: Names, directory: Path | None) -> None:
        self._tree = tree
        self._dataset = dataset
        # With the slash behind the directory, and the zero at the end.
        self._most = None if directory is None else PATH_BYTES - RESERVED_BYTES - len(os.fsencode(directory)) - 2

    def check(self, operation: Operation) -> None:
        """Raises RefusedError if something gets a path that is too long."""
        if self._most is None:
            return
        match operation:
            case ("create", parent, name, mode, *_):
                self._check_new(Place(parent, name), stat.S_ISDIR(mode))
            case ("symlink", parent, name, *_):
                self._check_new(Place(parent, name), False)
            case ("rename", parent, name, to, to_name, *_):
                self._check_rename(Place(parent, name), Place(to, to_name))

    def has_room(self, directory: int) -> bool:
        """Does any name fit in this directory?"""
        if self._most is None:
            return True
        if directory < FIRST_OUTPUT:
            path = self._dataset.path(directory)
        else:
            place = self._tree.get(directory).place
            path = b"" if place is None else self._tree.path(place)
        return len(path) + 1 + NAME_BYTES <= self._most

    def _check_new(self, place: Place, directory: bool) -> None:
        if self._tree.lookup(*place) is None:
            self._refuse(len(self._tree.path(place)) + (1 + NAME_BYTES if directory else 0))

    def _check_rename(self, old: Place, new: Place) -> None:
        output = self._tree.lookup(*old)
        if output is None:
            return  # it will be refused
        length = len(self._tree.path(new))
        if length > len(self._tree.path(old)):
            self._refuse(length + (self._depth(output) + 1 + NAME_BYTES if output.is_directory else 0))

    def _depth(self, directory: Output) -> int:
        """The longest path from a directory to one in it; 0 if there is none."""
        longest, pending = 0, [(directory, 0)]
        while pending:
            above, length = pending.pop()
            longest = max(longest, length)
            if self._tree.subdirectories(above.inode):
                pending += [
                    (child, length + 1 + len(child.place.name))
                    for child in self._tree.children(above.inode)
                    if child.is_directory and child.place is not None
                ]
        return longest

    def _refuse(self, length: int) -> None:
        assert self._most is not None
        if length > self._most:
            raise RefusedError(errno.ENAMETOOLONG)
