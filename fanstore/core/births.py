"""Files that the native engine has created by itself, in a job of one node, and how Python gets to know of them.

Owns the order of changes between the two (native/outputbirths.h): who changes names has a turn, the engine for one
creation, Python for one operation (``with births``), before which what was created since is taken over, in order, so
that the tree gives it the numbers that it has. Used by outputs.py. Trio thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol

from fanstore.core.journal import Journal
from fanstore.core.objects import Objects, Stamp
from fanstore.core.outputtree import OutputTree
from fanstore.core.saver import Saver

#: An output that was created: inode, parent, name, mode, time; and if it was closed, its size, mtime and ctime then.
#: One that was taken before and is closed for the first time has no name.
Birth = tuple[int, int, bytes, int, int, tuple[int, int, int] | None]


class Creator(Protocol):
    """The native engine."""

    def has_births(self) -> bool:
        """Are there any that were not taken?"""

    def take_births(self) -> Sequence[Birth]:
        """Those that were not taken yet."""

    def begin_turn(self) -> tuple[Sequence[Birth], int]:
        """The same, and where the journal ends, if it is known; nothing is created from now on."""

    def disown(self, inode: int) -> None:
        """In a turn: this one is closed by us, or gone."""

    def end_turn(self, next_inode: int, journal_end: int) -> None:
        """Go on, with these. Nothing is created while the end of the journal is not known."""


class Births:
    """What this node knows of them."""

    def __init__(
        self,
        tree: OutputTree,
        objects: Objects,
        journal: Journal | None,
        saver: Saver | None,
        rank: int,
        looked_up: Callable[[int], None],
    ) -> None:
        self._tree = tree
        self._objects = objects
        self._journal = journal
        self._saver = saver
        self._rank = rank
        self._looked_up = looked_up
        self._creator: Creator | None = None

    def use(self, creator: Creator | None) -> None:
        """Who creates files besides us from now on; None for nobody."""
        self.take_over()
        self._creator = creator
        with self:  # which tells it with which number to begin
            return

    def take_over(self) -> None:
        """Know what was created up to now: before anything is said of names, or of outputs."""
        if self._creator is not None and self._creator.has_births():
            self._add(self._creator.take_births())

    def __enter__(self) -> None:
        """The turn of whoever changes something."""
        if self._creator is None:
            return
        births, journal_end = self._creator.begin_turn()
        try:
            if self._journal is not None and journal_end >= 0:
                self._journal.go_on_at(journal_end)
            self._add(births)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._creator is not None:
            self._creator.end_turn(self._tree.next_inode, -1 if self._journal is None else self._journal.end)

    def disown(self, inodes: Iterable[int]) -> None:
        """In a turn: these were closed by us, or are gone."""
        if self._creator is not None:
            for inode in inodes:
                self._creator.disown(inode)

    def _add(self, births: Sequence[Birth]) -> None:
        """The journal has them already."""
        for inode, parent, name, mode, mtime_ns, closed in births:
            if name:
                made = self._tree.apply(("create", parent, name, mode, mtime_ns, self._rank, True))
                assert made.result == inode
                self._looked_up(inode)
            if closed is not None:
                self._close(inode, *closed)

    def _close(self, inode: int, size: int, mtime_ns: int, ctime_ns: int) -> None:
        stamp = Stamp(size, ctime_ns)
        if self._saver is not None:
            self._saver.expect(inode, stamp, urgent=False)
        known = self._tree.apply(("commit", inode, size, mtime_ns, self._rank))
        self._objects.set_clean(inode, stamp)
        if self._saver is not None:
            self._saver.notice(known)
