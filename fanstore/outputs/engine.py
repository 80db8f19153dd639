"""What answers the kernel of this node, as outputs see it: the one protocol between the two.

An engine is told of names, directories and contents, before the kernel is. If it creates files by itself, as the native
one does in a job of one node (native/outputs/engine_creates.h), it has them taken over: who changes names has a turn,
the engine for one creation, Python for one operation. Of a file that is its own it may note
the content, too, when that is closed or synced. ``Engine`` itself keeps no tables and creates nothing: each
request comes to Python. Used by replicated_tree.py and kernel_notify.py; the fuse layer has the real ones. Trio thread
only.
"""

from __future__ import annotations

from collections.abc import Sequence

from fanstore.dataset.namespace import Attributes

#: A file that was created: inode, parent, name, mode, time; and if it was closed or synced, its size, mtime and ctime
#: then. One that was known before and is closed or synced has no name.
Created = tuple[int, int, bytes, int, int, tuple[int, int, int] | None]


class Engine:
    """An engine without tables, and without a kernel."""

    # --- names, directories and contents ---

    def add_name(self, parent: int, name: bytes, directory: int) -> None:
        """There is an output of this name; ``directory``: its inode if it is a directory, 0 otherwise."""

    def remove_name(self, parent: int, name: bytes) -> None:
        """There is none any more."""

    def mix(self, entry: int) -> None:
        """This directory of the dataset has outputs in it: from now on Python answers for it."""

    def set_directory(self, attributes: Attributes) -> None:
        """What stat says of a directory that is an output or holds some, until it is said anew."""

    def drop_directory(self, inode: int) -> int:
        """The directory has no name any more; as ``take_told``."""
        return 0

    def take_told(self, inode: int) -> int:
        """How often the kernel was told of a directory without our doing, since this was last asked."""
        return 0

    def open(self, inode: int, flags: int) -> int:
        """A new output is open; its handle. That is not the inode if it is written with direct I/O."""
        return inode

    def is_written(self, inode: int) -> bool:
        """Does a program have the content open that writes without asking?"""
        return False

    def drop(self, inode: int) -> None:
        """The content of an output is not here any more, or is another one: to be called after that, not before."""

    async def settle(self, inodes: dict[int, bool]) -> None:
        """Until the kernel of this node does not believe what it knew of these any more.

        Attributes; and where it says so listings and contents, too.
        """

    # --- files that it has created ---

    def has_creates(self) -> bool:
        """Are there any that were not taken?"""
        return False

    def take_creates(self) -> Sequence[Created]:
        """Those that were not taken yet."""
        return ()

    def begin_turn(self) -> tuple[Sequence[Created], int]:
        """The same, and where the journal ends, -1 if it is not known; nothing is created from now on."""
        return (), -1

    def disown(self, inode: int) -> None:
        """In a turn: the content of this one is ours to note, or it is gone."""

    def own(self, inode: int) -> None:
        """In a turn: we have noted the content of this one; when it is synced next, the engine may."""

    def end_turn(self, next_inode: int, journal_end: int) -> None:
        """Go on, from this number. Nothing is created while the end of the journal is not known (-1)."""
