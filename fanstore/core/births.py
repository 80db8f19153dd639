"""Files that the native engine has created by itself, and how Python gets to know of them.

Owns the order of changes between the two (native/outputbirths.h): who changes names has a turn, the engine for one
creation, Python for one operation (``with births``), before which what was created since is taken over, in order. In a
job of one node the engine creates anywhere, with the numbers that the tree would give. In one of several nodes it does
so in directories that were lent to this node (leases.py), with numbers that were given to it, and what it has created
is in the tree of this node at once, and in those of others when they were told (``untold``). Used by outputs.py. Trio
thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol

from fanstore.core.journal import Journal
from fanstore.core.objects import Objects, Stamp
from fanstore.core.output import END_OUTPUT
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
        """In a turn: this one is closed by us, or gone; 0 for all that there are."""

    def lend(self, directory: int, lent: bool) -> None:
        """In a turn, in a job of several nodes: it may create files in this directory, or not any more."""

    def end_turn(self, next_inode: int, end_inode: int, journal_end: int) -> None:
        """Go on, with these numbers. Nothing is created while the end of the journal is not known."""


class Births:
    """What this node knows of them.

    Attributes:
        untold: what other nodes do not know yet, as operation "born" has it (outputtree.py); grows at its end.
        _numbers: those that the engine gives next, in a job of several nodes, from the first to below the last.
    """

    def __init__(
        self,
        tree: OutputTree,
        objects: Objects,
        journal: Journal | None,
        saver: Saver | None,
        rank: int,
        looked_up: Callable[[int], None],
        alone: bool,
    ) -> None:
        self.untold: list[list[Any]] = []
        self._tree = tree
        self._objects = objects
        self._journal = journal
        self._saver = saver
        self._rank = rank
        self._looked_up = looked_up
        self._alone = alone
        self._numbers = range(0)
        self._creator: Creator | None = None

    def use(self, creator: Creator | None) -> None:
        """Who creates files besides us from now on; None for nobody."""
        self.take_over()
        self._creator = creator
        with self:  # which tells it with which number to begin
            return

    @property
    def possible(self) -> bool:
        """Is there anybody who could create files besides us?"""
        return self._creator is not None

    @property
    def numbers_left(self) -> int:
        """How many files can be created before new numbers are needed, in a job of several nodes."""
        return len(self._numbers)

    def give(self, numbers: range) -> None:
        """Numbers for those that are created from now on, instead of those that were given before."""
        with self:
            self._numbers = numbers

    def lend(self, directory: int, lent: bool) -> None:
        """Files may be created in a directory, or not any more. Then all that are open are closed by us."""
        with self:
            if self._creator is not None:
                self._creator.lend(directory, lent)
                if not lent:
                    self._creator.disown(0)

    def take_back(self, inode: int) -> None:
        """This one is closed by us from now on, if it was not closed before."""
        with self:
            self.disown((inode,))

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
            numbers = range(self._tree.next_inode, END_OUTPUT) if self._alone else self._numbers
            journal_end = -1 if self._journal is None else self._journal.end
            self._creator.end_turn(numbers.start, numbers.stop, journal_end)

    def disown(self, inodes: Iterable[int]) -> None:
        """In a turn: these were closed by us, or are gone, or are to be closed by us."""
        if self._creator is not None:
            for inode in inodes:
                self._creator.disown(inode)

    def _add(self, births: Sequence[Birth]) -> None:
        """The journal has them already."""
        for inode, parent, name, mode, mtime_ns, closed in births:
            if not self._alone:
                self.untold.append([inode, parent, name, mode, mtime_ns, None if closed is None else closed[:2]])
                if name:
                    self._numbers = range(inode + 1, self._numbers.stop)
            if name:
                self._tree.apply(("born", self._rank, ((inode, parent, name, mode, mtime_ns, None),)))
                assert inode in self._tree.outputs
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
