"""The tree of outputs that all nodes of a job have alike, with the journal of this node, and those who watch it.

Owns the way of a change: its order among all nodes (sequencer.py), its note in the journal before it happens
(journal.py), its effect on the names (tree.py), and who is told of it then (``Observer``). It is complete before
anybody watches, and knows nothing of what they do. Owns the turns between Python and an engine that creates files by
itself, too (engine.py): what was created since is taken over before anything else changes. Used by outputs.py, and by
recovery.py, where nobody watches. Trio thread only.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fanstore.outputs.engine import Created, Engine
from fanstore.outputs.journal import Journal
from fanstore.outputs.local_contents import Stamp
from fanstore.outputs.output import FIRST_OUTPUT
from fanstore.outputs.path_limit import PathLimit
from fanstore.outputs.sequencer import Sequencer
from fanstore.outputs.tree import Effect, Names, Operation, OutputTree, RefusedError, parents
from fanstore.transport.peers import Peers

#: Operations that are refused when they cannot be noted; others must be possible on a full disk, too.
_NEED_ROOM = ("create", "symlink", "setxattr")


class Observer:
    """Is told what has changed on this node, in the order of the changes. Does nothing about it."""

    def applied(self, operation: Operation, effect: Effect) -> None:
        """An operation was applied."""

    def learned(self, operation: Operation, effect: Effect, stamp: Stamp | None) -> None:
        """The same for one that the engine has done by itself, "create" or "commit" (with the content's stamp)."""

    async def settle(self, effect: Effect) -> None:
        """Until nobody on this node can see what was before."""


class ReplicatedTree:
    """The tree of this node.

    Attributes:
        tree: the names. observers: who is told, in this order.
        _journal: None if nobody will want to know what there was (``--scratch``).
        _noted: directories of the dataset whose paths the journal has.
    """

    def __init__(
        self,
        tree: OutputTree,
        dataset: Names,
        journal: Journal | None,
        peers: Peers | None = None,
        limit: PathLimit | None = None,
    ) -> None:
        self.tree = tree
        self.observers: Sequence[Observer] = ()
        self._dataset = dataset
        self._journal = journal
        self._rank = peers.rank if peers is not None else 0
        self._alone = peers is None
        self._limit = limit
        self._noted: set[int] = set()
        self._engine = Engine()
        self._sequencer = Sequencer(peers, self)

    async def run(self) -> None:
        """For as long as the outputs live."""
        await self._sequencer.run()

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Questions of other nodes, as those of the sequencer."""
        return self._sequencer.handlers()

    def decides(self) -> bool:
        """Is this the node that decides, and that changes names in ``--output``?"""
        return self._alone or self._sequencer.leads

    async def decide(self, operation: Operation) -> int:
        """Have an operation done on all nodes; the inode that it was about. Raises RefusedError."""
        return await self._sequencer.decide(operation)

    # --- Follower: operations, in the order that all nodes have ---

    def admit(self, operation: Operation) -> None:
        if self._limit is not None:
            self._limit.check(operation)

    def apply(self, operation: Operation) -> Effect:
        with self._turn():
            effect = self._note_and_apply(operation)
            for output in effect.removed:
                self._engine.disown(output.inode)
            if operation[0] == "commit":
                self._engine.own(operation[1])
            for observer in self.observers:
                observer.applied(operation, effect)
        return effect

    async def settle(self, effect: Effect) -> None:
        for observer in self.observers:
            await observer.settle(effect)

    def _note_and_apply(self, operation: Operation) -> Effect:
        """In the journal before it happens. A full disk refuses what needs room, and only where it is decided on."""
        if self._journal is None:
            return self.tree.apply(operation)
        must = operation[0] in _NEED_ROOM and self.decides()
        try:
            for directory in parents(operation):
                if directory < FIRST_OUTPUT and directory not in self._noted and self._dataset.is_directory(directory):
                    self._journal.note("dir", (directory, self._dataset.path(directory)), must=must)
                    self._noted.add(directory)
            self._journal.note("op", operation, must=must)
        except OSError as error:
            raise RefusedError(error.errno or errno.EIO) from error
        try:
            return self.tree.apply(operation)
        except RefusedError:
            self._journal.take_back()
            raise

    # --- files that the engine creates by itself ---

    def use_engine(self, engine: Engine) -> None:
        """Who creates files besides us from now on."""
        self.catch_up()
        self._engine = engine
        with self._turn():  # which tells it with which number to begin
            return

    def catch_up(self) -> None:
        """Know what was created up to now: before anything is said of names, or of outputs."""
        if self._engine.has_creates():
            self._learn(self._engine.take_creates())

    def take_back(self, inode: int) -> None:
        """The engine notes the content of this one no more, until we have noted it."""
        if self._alone:
            with self._turn():
                self._engine.disown(inode)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The turn of whoever changes something."""
        created, journal_end = self._engine.begin_turn()
        try:
            if self._journal is not None and journal_end >= 0:
                self._journal.go_on_at(journal_end)
            self._learn(created)
            yield
        finally:
            self._engine.end_turn(self.tree.next_inode, -1 if self._journal is None else self._journal.end)

    def _learn(self, created: Sequence[Created]) -> None:
        """The journal has them already."""
        for inode, parent, name, mode, mtime_ns, closed in created:
            if name:
                effect = self._learn_one(("create", parent, name, mode, mtime_ns, self._rank, True), None)
                assert effect.result == inode
            if closed is not None:
                size, closed_ns, ctime_ns = closed
                stamp = Stamp(size, ctime_ns, closed_ns)
                self._learn_one(("commit", inode, size, closed_ns, self._rank), stamp)

    def _learn_one(self, operation: Operation, stamp: Stamp | None) -> Effect:
        effect = self.tree.apply(operation)
        for observer in self.observers:
            observer.learned(operation, effect, stamp)
        return effect
