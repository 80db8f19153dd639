"""The virtual directory ``.fanstore`` at the root of a mount: ``stats.json``, ``nodes.json`` and their like.

Owns its names, its inode numbers and the making of its content; does not know what the content says: whoever builds
the mount gives a function per file. Used by the name space (attributes, look-up) and by the fuse layer (open).
Trio thread only.

The directory is reachable by name but never listed in the root, so that an ImageFolder does not take it for a class.
"""

import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from fanstore.ids import Inode

#: Name of the directory, in the root of the mount.
CONTROL_NAME = b".fanstore"

#: Makes the content of one file anew, as something that JSON can say, or as JSON already, where there is much of it;
#: some must ask other nodes first.
Content = Callable[[], Mapping[str, object]] | Callable[[], Awaitable[Mapping[str, object] | bytes]]


class ControlDirectory:
    """Names, inode numbers and content of the control files.

    A file's content is made when it is asked for, and its size is not known before; the fuse layer takes a snapshot at
    each look-up.

    Attributes:
        inode: number of the directory; those of the files and links follow it in the order given. All are above every
            number of the index and depend on nothing but its length and that order, so they are the same in every
            mount.
    """

    def __init__(
        self, index_entries: int, files: Mapping[str, Content], links: Mapping[str, Path] | None = None
    ) -> None:
        """``links``: names that are symbolic links, and where they lead."""
        # Inode numbers of the index are 1 … index_entries.
        self.inode = Inode(index_entries + 1)
        self._contents: Sequence[Content] = tuple(files.values())
        self._targets = [os.fsencode(target) for target in (links or {}).values()]
        self._numbers = {
            os.fsencode(name): Inode(self.inode + 1 + k) for k, name in enumerate([*files, *(links or {})])
        }

    def __contains__(self, inode: int) -> bool:
        """Is this the number of the directory or of something in it?"""
        return self.inode <= inode <= self.inode + len(self._numbers)

    def link_target(self, inode: int) -> bytes | None:
        """Where a symbolic link in it leads; None of anything else."""
        number = inode - self.inode - 1 - len(self._contents)
        return self._targets[number] if 0 <= number < len(self._targets) else None

    @property
    def files(self) -> Inode:
        """The number of the first file; all of them have the same mode and owner."""
        return Inode(self.inode + 1)

    def lookup(self, name: bytes) -> Inode | None:
        """The number of the file with this name."""
        return self._numbers.get(name)

    def names(self) -> list[tuple[bytes, Inode]]:
        """All files and links, in a fixed order."""
        return list(self._numbers.items())

    async def open(self, inode: Inode) -> bytes:
        """The content of a file as it is now."""
        made = self._contents[inode - self.inode - 1]()
        content = await made if isinstance(made, Awaitable) else made
        if isinstance(content, bytes):
            return content
        return json.dumps(content, indent=2).encode() + b"\n"
