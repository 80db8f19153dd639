"""Whom outputs tell that names have changed: the kernel of this node and the native engine, through the fuse layer.

Owns nothing but the words; fuse/outputoperations.py does what they say. Used by outputs.py. Trio thread only.
"""

from __future__ import annotations

from typing import Protocol

from fanstore.core.namespace import Attributes
from fanstore.core.output import Output, Place


class Kernel(Protocol):
    """What must be told that names have changed: the fuse layer."""

    def appeared(self, place: Place, output: Output) -> None:
        """A name has come."""

    def vanished(self, place: Place) -> None:
        """A name has gone."""

    def changed(self, directory: Attributes) -> None:
        """What stat says of a directory that is an output or holds some."""

    def removed(self, inode: int) -> int:
        """A directory that was an output is none any more, or another node knows more of it; as ``told``."""

    def told(self, inode: int) -> int:
        """How often the kernel was told of a directory without our doing, since this was last asked."""

    def dropped(self, inode: int) -> None:
        """The content of an output is not here any more, or is another one."""

    async def settle(self, inodes: dict[int, bool]) -> None:
        """Until the kernel of this node does not believe what it knew of these any more.

        Attributes; and where it says so listings and contents, too.
        """
