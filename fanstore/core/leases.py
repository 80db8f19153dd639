"""Directories that are lent to the node that fills them, in a job of several nodes.

A change of names is decided on by one node and applied by all before whoever wants it goes on (council.py), which takes
as long as writing twenty small files. So a node that creates one file after another in a directory has it lent: from
then on its native engine creates files there by itself (births.py). Nobody else may answer for names there meanwhile:
who wants to look into the directory, or to change a name in it, has it given back first (``clear``), and the node that
has it tells all that was created before it does (``tell``). So no node ever sees an old state, and exclusive creation
has one winner. Who has which directory is decided like a change of names, and known to all; what a dead node had is
revoked by whoever meets with it. Only directories that are outputs are lent: those of the dataset are looked at by all.

Owns when a directory is borrowed, given back and asked for, and what others are told when. Used by outputs.py. Trio
thread only.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import trio

from fanstore.core.births import Births
from fanstore.core.council import DECIDE_LIMIT_S, OUTPUT_QUESTION, Council
from fanstore.core.output import FIRST_OUTPUT
from fanstore.core.outputtree import Operation, OutputTree, RefusedError, concerned
from fanstore.transport.peers import PeerError, Peers

log = logging.getLogger(__name__)

#: The operation concerns a directory that is lent to another node. No program is ever told.
LENT = errno.EUSERS

#: Files that a node creates in a directory, none of them SERIES_S after the one before, until it borrows it; each time
#: that it was given back, twice as many, up to the second figure.
SERIES, SERIES_MOST = 8, 1024
SERIES_S = 1.0
#: Directories whose series are remembered.
_SERIES_KEPT = 256
#: Numbers for new files that are given to a node at a time, and when it wants others.
NUMBERS, NUMBERS_FEW = 1 << 20, 1 << 16
#: Seconds until other nodes are told of what was created, if nobody asks before.
TELL_S = 0.3
#: Seconds for a node to give a directory back before it is asked again, and between two attempts.
GIVE_LIMIT_S = 10.0
#: Seconds for a node to tell what it has created, for those who only want to know.
HEAR_LIMIT_S = 2.0
_AGAIN_S = 0.02
#: Bytes of births in one operation: it must fit into a message, with what is around it.
_TELL_BYTES = 40_000
_ROW_BYTES = 64


@dataclass(slots=True)
class _Series:
    """Files that this node has created in a directory by asking: how many in a row, the last when, enough when."""

    count: int = 0
    last_s: float = 0.0
    enough: int = SERIES


class Leases:
    """What this node has borrowed, and what it wants of others.

    Attributes:
        _turn: guards borrowing and giving back, one at a time. _telling: one "born" at a time, in the order of birth.
        _filled: directories in which the engine of this node creates files; they are lent to it, or were removed.
    """

    def __init__(self, tree: OutputTree, council: Council, births: Births, peers: Peers | None) -> None:
        self._tree = tree
        self._council = council
        self._births = births
        self._peers = peers
        self._rank = peers.rank if peers is not None else 0
        self._turn = trio.Lock()
        self._telling = trio.Lock()
        self._clearing: dict[int, trio.Lock] = {}
        self._series: dict[int, _Series] = {}
        self._filled: set[int] = set()
        self._is_told = True

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Questions of other nodes, as those of the council."""
        return {"give": self._asked_to_give, "tell": self._asked_to_tell}

    # --- changes of names ---

    async def decide(self, operation: Operation) -> int:
        """As Council.decide, with what was created here before, and without anybody who fills the directories."""
        if self._peers is None:
            return await self._council.decide(operation)
        if operation[0] in ("commit", "setattr"):
            self._births.take_back(operation[1])  # closed by the engine meanwhile, it would be told in another order
        try:
            with trio.move_on_after(DECIDE_LIMIT_S):
                return await self._decide(operation)
            raise RefusedError(errno.ETIMEDOUT)
        except RefusedError as error:
            if error.number == errno.ETIMEDOUT:
                self._leave(concerned(self._tree, operation))
            raise

    async def _decide(self, operation: Operation) -> int:
        while True:
            await self.tell()
            try:
                return await self._council.decide(operation)
            except RefusedError as error:
                if error.number != LENT:
                    raise
            for directory in concerned(self._tree, operation):
                await self.clear(directory)

    def _leave(self, directories: set[int]) -> None:
        """An operation may still be done, at any time: nothing is created there until it is lent anew."""
        for directory in directories & self._filled:
            self._births.lend(directory, False)
            self._filled.discard(directory)

    def admit(self, rank: int, operation: Operation) -> None:
        """On the node that decides: may this node want that? Raises RefusedError."""
        tree = self._tree
        if operation[0] == "revoke":
            if self._peers is None or not self._peers.is_lost(operation[1]):
                raise RefusedError(errno.EBUSY)
        elif tree.lent and any(tree.lent.get(directory, rank) != rank for directory in concerned(tree, operation)):
            raise RefusedError(LENT)

    # --- what others have ---

    def is_elsewhere(self, directory: int) -> bool:
        """Is it lent to another node, which knows more of it?"""
        return self._holder(directory) is not None

    async def clear(self, directory: int) -> None:
        """Until no other node creates files in a directory, and all that were created are known here.

        Raises RefusedError.
        """
        if self._holder(directory) is None:
            return
        with trio.move_on_after(DECIDE_LIMIT_S):
            while self._holder(directory) is not None:
                async with self._clearing.setdefault(directory, trio.Lock()):
                    holder = self._holder(directory)
                    if holder is not None and not await self._ask_for(directory, holder):
                        await trio.sleep(_AGAIN_S)
            self._clearing.pop(directory, None)
            return
        log.error(
            "rank %s writes to %s and has not told the others what is in it within %g s: its node is stopped, or its "
            "disk hangs; look at its log. If it is ended, the others can go on",
            self._holder(directory),
            self._tree.title(self._tree.get(directory)),
            DECIDE_LIMIT_S,
        )
        raise RefusedError(errno.ETIMEDOUT)

    async def clear_name(self, parent: int, name: bytes) -> None:
        """The same for a directory, and for the one in it that has this name, if it is one."""
        while True:
            await self.clear(parent)
            output = self._tree.lookup(parent, name)
            if output is None or self._holder(output.inode) is None:
                return
            await self.clear(output.inode)

    async def hear(self) -> bool:
        """Know what other nodes have created up to now, in directories that they keep; whether all have told."""
        told = True
        for rank in {*self._tree.lent.values()} - {self._rank}:
            told &= self._is_lost(rank) or await self._ask(rank, ["tell"], HEAR_LIMIT_S)
        return told

    def _is_lost(self, rank: int) -> bool:
        return self._peers is not None and self._peers.is_lost(rank)

    def _holder(self, directory: int) -> int | None:
        """The other node that has a directory."""
        rank = self._tree.lent.get(directory, self._rank)
        return None if rank == self._rank else rank

    async def _ask_for(self, directory: int, holder: int) -> bool:
        """Whether it was given back, or is not lent any more."""
        if self._is_lost(holder):
            try:
                await self._council.decide(("revoke", holder))
            except RefusedError as error:
                log.debug("rank %d is not dead for all: %s", holder, error)
                return False
            return True
        return await self._ask(holder, ["give", directory], GIVE_LIMIT_S)

    async def _ask(self, rank: int, words: list[Any], limit_s: float) -> bool:
        """Have a node do something, and know here what it has told by that."""
        assert self._peers is not None
        try:
            answer = await self._peers.ask(rank, OUTPUT_QUESTION + msgpack.packb(words), limit_s)
        except PeerError as error:
            log.debug("rank %d does not %s: %s", rank, words[0], error)
            return False
        done, applied = msgpack.unpackb(answer)
        await self._council.wait_applied(applied)
        return bool(done)

    async def _asked_to_give(self, peer: int, directory: int) -> list[Any]:
        return await self._answer(self._give_back(directory))

    async def _asked_to_tell(self, peer: int) -> list[Any]:
        return await self._answer(self.tell())

    async def _answer(self, doing: Awaitable[None]) -> list[Any]:
        try:
            await doing
        except RefusedError as error:
            log.debug("it cannot be given or told: %s", error)
            return [False, 0]
        return [True, self._council.applied]

    # --- what this node has ---

    async def created(self, directory: int) -> None:
        """This node has created a file there by asking; after some of them it borrows the directory."""
        if self._peers is None or directory < FIRST_OUTPUT or not self._births.possible:
            return
        try:
            await self._created(directory)
        except RefusedError as error:
            log.debug("directory %x is not lent to us: %s", directory, error)

    async def _created(self, directory: int) -> None:
        """Raises RefusedError."""
        if directory in self._tree.lent:
            fills = directory in self._filled and self._births.numbers_left > 0
            if not fills and self._holder(directory) is None:
                await self._give_back(directory)
                await self._borrow(directory)
            return
        series = self._series.pop(directory, None) or _Series()
        self._series[directory] = series  # the last one used is the last one to go
        if len(self._series) > _SERIES_KEPT:
            del self._series[next(iter(self._series))]
        now_s = trio.current_time()
        series.count = series.count + 1 if now_s - series.last_s <= SERIES_S else 1
        series.last_s = now_s
        if series.count >= series.enough:
            await self._borrow(directory)

    async def _borrow(self, directory: int) -> None:
        """Raises RefusedError."""
        async with self._turn:
            numbers = NUMBERS if self._births.numbers_left < NUMBERS_FEW else 0
            first = await self.decide(("lend", directory, self._rank, numbers))
            if numbers:
                self._births.give(range(first, first + numbers))
            if self._tree.lent.get(directory) == self._rank:
                self._births.lend(directory, True)
                self._filled.add(directory)

    async def _give_back(self, directory: int) -> None:
        """Raises RefusedError."""
        async with self._turn:
            self._filled.discard(directory)
            if self._tree.lent.get(directory) != self._rank:
                return
            self._births.lend(directory, False)
            series = self._series.get(directory)
            if series is not None:
                series.count, series.enough = 0, min(2 * series.enough, SERIES_MOST)
            await self.decide(("return", directory, self._rank))

    # --- what others are told ---

    async def tell(self) -> None:
        """Until all nodes know what was created here up to now. Raises RefusedError."""
        self._births.take_over()
        if not self._births.untold and not self._telling.locked():
            return
        async with self._telling:
            left = len(self._births.untold)
            while left > 0:
                rows = self._first_rows(left)
                await self._council.decide(("born", self._rank, rows))
                del self._births.untold[: len(rows)]
                left -= len(rows)

    def _first_rows(self, most: int) -> list[list[Any]]:
        rows: list[list[Any]] = []
        size = 0
        for row in self._births.untold[:most]:
            size += _ROW_BYTES + len(row[2])
            if size > _TELL_BYTES:
                break
            rows.append(row)
        return rows

    async def run(self) -> None:
        """For as long as the outputs live: tell others now and then."""
        while self._peers is not None:
            await trio.sleep(TELL_S)
            if not self._births.untold:
                continue
            try:
                await self.tell()
                self._is_told = True
            except RefusedError as error:
                if self._is_told:  # once
                    log.warning("other nodes do not know yet what was created here: %s", error)
                self._is_told = False
