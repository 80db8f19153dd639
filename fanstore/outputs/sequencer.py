"""The nodes of a job agree on the order of changes to the outputs.

Owns the order: one node, the one with the lowest rank that is alive, decides on every operation in turn, applies it to
its tree (tree.py), has all others apply it, and only then tells who asked. So of two nodes that create a name
exclusively one succeeds, rename and rmdir are atomic although they concern several directories, and what was confirmed
is known to every node. All nodes have the same tree, therefore any of them can go on as the one that decides when the
one before has died. Does not know what an operation means, nor what is done after it (``Follower``). Trio thread only.

Messages between nodes are msgpack behind OUTPUT_QUESTION (docs/protocol.md). An operation carries the rank that wants
it and a number, so that one that is asked for again, because the deciding node died before it answered, is done once.
"""

from __future__ import annotations

import collections
import errno
import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgpack
import trio

from fanstore.outputs.tree import Effect, Operation, RefusedError
from fanstore.transport.peers import PeerError, PeerLostError, PeerRefusedError, Peers, PeerTimeoutError

log = logging.getLogger(__name__)

#: The first byte of a question about outputs; what it is about follows.
OUTPUT_QUESTION = b"o"

#: Seconds that a change may take altogether, deaths of deciding nodes included; then it fails with ETIMEDOUT.
DECIDE_LIMIT_S = 60.0
#: Seconds for another node to apply an operation before it is not waited for: it is stopped, and applies it later.
APPLY_LIMIT_S = 10.0
#: Seconds between two attempts to bring a node up to date that has not applied something in time.
BEHIND_S = 1.0
#: Seconds before a node that cannot decide yet is asked again.
_AGAIN_S = 0.02
#: Bytes of operations in one message, which has at most MESSAGE_BYTES (transport/peers.py).
_MESSAGE_BYTES = 50_000
#: Operations that each node remembers at least, for those who ask again; besides, all that some node may have missed.
_REMEMBERED = 4096

#: Answers.
DONE, REFUSED, NOT_ME = "done", "refused", "not me"

#: Who wants an operation, and the how-manieth of its it is.
Ticket = tuple[int, int]
#: What became of an operation; the inode that it was about, or an errno; how many operations it follows from, or is.
Answer = tuple[str, int, int]


class Follower(Protocol):
    """What is done with an operation on each node."""

    def admit(self, operation: Operation) -> None:
        """May it be wanted? Asked where it is decided on. Raises RefusedError."""

    def apply(self, operation: Operation) -> Effect:
        """Apply it to the tree of this node, and do what follows from it. Raises RefusedError."""

    async def settle(self, effect: Effect) -> None:
        """Until nobody on this node can see what was before."""


class Sequencer:
    """This node's part in the decisions.

    Attributes:
        applied: how many operations this node has applied.
        _leader: the rank that decides, as far as is known here; it only ever grows.
        _leads: this node has taken over: it knows everything that was confirmed.
        _log: operations by number; _results: the same by ticket. _common: every living node has applied so many.
        _light: of so many, the operations themselves are not remembered any more.
        _reached: on the node that decides, how many operations each other one has applied, as far as it has said.
        _lines: one message on its way to each of them at a time.
        _behind: those that have not applied something in time, and may never have been sent it.
    """

    def __init__(self, peers: Peers | None, follower: Follower) -> None:
        self.applied = 0
        self._peers = peers
        self._rank = peers.rank if peers is not None else 0
        self._follower = follower
        self._count = 0
        self._leader = 0
        self._leads = self._rank == 0
        self._taking_over = trio.Lock()
        self._log: collections.OrderedDict[int, tuple[Ticket, Operation, int]] = collections.OrderedDict()
        self._results: collections.OrderedDict[Ticket, tuple[int, int]] = collections.OrderedDict()
        self._common = 0
        self._light = 0
        self._reached: dict[int, int] = {}
        self._lines: dict[int, trio.Lock] = {}
        self._behind: set[int] = set()
        self._deposed = False
        self._moved = trio.Event()

    @property
    def leads(self) -> bool:
        """Does this node decide?"""
        return self._leads

    def _others(self) -> list[int]:
        peers = self._peers
        if peers is None:
            return []
        return [rank for rank in range(peers.size) if rank != self._rank and not peers.is_lost(rank)]

    def _is_first(self) -> bool:
        """Has this node the lowest rank of those that live?"""
        return min([self._rank, *self._others()]) == self._rank

    # --- asking ---

    async def decide(self, operation: Operation) -> int:
        """Have an operation done on all nodes; the inode that it was about. Raises RefusedError."""
        if self._peers is None:
            self._follower.admit(operation)
            return self._apply((0, 0), operation).result
        self._count += 1
        ticket = (self._rank, self._count)
        with trio.move_on_after(DECIDE_LIMIT_S):
            while True:
                answer = await self._ask_leader(ticket, operation)
                if answer is not None:
                    break
                await trio.sleep(_AGAIN_S)
            kind, value, number = answer
            await self.wait_applied(number)  # what it was decided on must be seen here, too
            if kind == REFUSED:
                raise RefusedError(value)
            return value
        log.error("a change to the outputs was not decided within %g s", DECIDE_LIMIT_S)
        raise RefusedError(errno.ETIMEDOUT)

    async def wait_applied(self, number: int) -> None:
        """Until this node has applied so many operations."""
        while self.applied < number:
            await self._moved.wait()

    async def _ask_leader(self, ticket: Ticket, operation: Operation) -> Answer | None:
        """What the node that decides says; None if there is none at the moment."""
        peers = self._peers
        assert peers is not None
        leader = min([self._rank, *self._others()])
        if leader == self._rank:
            return await self._lead(ticket, operation)
        question = OUTPUT_QUESTION + msgpack.packb(["decide", ticket, list(operation)])
        try:
            kind, value, number = msgpack.unpackb(await peers.ask(leader, question, DECIDE_LIMIT_S))
        except PeerError as error:
            log.debug("rank %d does not decide: %s", leader, error)
            return None
        return None if kind == NOT_ME else (kind, value, number)

    # --- deciding ---

    async def _lead(self, ticket: Ticket, operation: Operation) -> Answer:
        """Decide on an operation, on the node that decides."""
        if self._deposed:
            return (REFUSED, errno.EIO, 0)
        if not self._leads:
            await self._take_over()
        if ticket in self._results:
            number, result = self._results[ticket]
            await self._spread(number)
            return (DONE, result, number)
        try:
            self._follower.admit(operation)
            effect = self._apply(ticket, operation)
        except RefusedError as error:
            return (REFUSED, error.number, self.applied)
        number = self.applied
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follower.settle, effect)
            await self._spread(number)
        return (REFUSED, errno.EIO, 0) if self._deposed else (DONE, effect.result, number)

    def _apply(self, ticket: Ticket, operation: Operation) -> Effect:
        effect = self._follower.apply(operation)
        self.applied += 1
        if self._peers is not None:
            self._log[self.applied] = (ticket, operation, effect.result)
            self._results[ticket] = (self.applied, effect.result)
            self._lighten()
            while len(self._log) > _REMEMBERED and next(iter(self._log)) <= self._common:
                self._log.popitem(last=False)
                self._results.popitem(last=False)
            self._moved.set()
            self._moved = trio.Event()
        return effect

    def _lighten(self) -> None:
        """Of operations that every living node has applied, only the results are remembered: some are large."""
        for number in range(self._light + 1, min(self._common, self.applied) + 1):
            if number in self._log:
                ticket, _, result = self._log[number]
                self._log[number] = (ticket, (), result)
        self._light = max(self._light, min(self._common, self.applied))

    async def _spread(self, number: int) -> None:
        """Until all other nodes have applied the operation with this number, and all before it."""
        living = self._others()
        self._common = min((self._reached.get(rank, 0) for rank in living), default=self.applied)
        others = [rank for rank in living if rank not in self._behind]  # who is behind is told later (``run``)
        if len(others) == 1:
            await self._tell(others[0], number)
            return
        async with trio.open_nursery() as nursery:
            for rank in others:
                nursery.start_soon(self._tell, rank, number)

    async def _tell(self, rank: int, number: int) -> None:
        """Have one node apply all operations up to this number; one that does not in time is behind from then on.

        One message at a time, which takes along all that has come up meanwhile: they arrive in order, and many changes
        at once need few messages.
        """
        async with self._lines.setdefault(rank, trio.Lock()):
            while self._reached.get(rank, 0) < number:
                answer = None
                try:
                    answer = await self._ask(rank, ["apply", self._since(self._reached.get(rank, 0)), self._common])
                except PeerLostError:
                    return
                except PeerTimeoutError as error:
                    log.debug("rank %d has not applied operation %d yet: %s", rank, number, error)
                except PeerError as error:
                    log.warning("rank %d has not applied a change to the outputs: %s", rank, error)
                if answer is not None and answer[0] == NOT_ME:
                    self._depose()
                    return
                if answer is None or answer[1] <= self._reached.get(rank, 0):
                    self._behind.add(rank)
                    return
                self._reached[rank] = answer[1]

    def _since(self, applied: int) -> list[Any]:
        """Operations after a number, as many as fit into a message."""
        found: list[Any] = []
        size = 0
        for number in range(applied + 1, self.applied + 1):
            if number not in self._log:
                break
            ticket, operation, _ = self._log[number]
            item = [number, ticket, list(operation)]
            size += len(msgpack.packb(item))
            if size > _MESSAGE_BYTES and found:
                break
            found.append(item)
        return found

    def _depose(self) -> None:
        """Another node decides: we were taken for dead, and must not decide on anything any more."""
        if not self._deposed:
            log.error("the other nodes have taken this one for dead: nothing can be changed here any more")
        self._deposed = True
        self._leads = False

    async def run(self) -> None:
        """For as long as the outputs live: take over when it is our turn, and bring up to date who was stopped."""
        while self._peers is not None:
            await trio.sleep(BEHIND_S)
            if self._is_first() and not self._leads and not self._deposed:
                await self._take_over()
            for rank in sorted(self._behind):
                if not self._leads or self._peers.is_lost(rank):
                    self._behind.discard(rank)
                elif not self._peers.is_silent(rank):
                    await self._bring_up(rank)

    async def _take_over(self) -> None:
        """All nodes with lower ranks are gone: learn what any node knows, and see to it that all know it.

        A node that does not answer is waited for until it does, or is dead: it may know something that was confirmed.
        """
        async with self._taking_over:
            if self._leads:
                return
            self._leader = max(self._leader, self._rank)  # nothing of those before us counts from here on
            asked: set[int] = set()
            while missing := [rank for rank in self._others() if rank not in asked]:
                for rank in missing:
                    try:
                        self._reached[rank] = (await self._ask(rank, ["state"]))[0]
                        await self._learn(rank)
                        asked.add(rank)
                    except PeerError as error:
                        log.debug("rank %d does not say what it knows: %s", rank, error)
                        await trio.sleep(_AGAIN_S)
            self._leads = True
            log.info("this node decides on changes to the outputs from now on")
        for rank in self._others():
            await self._bring_up(rank)

    async def _bring_up(self, rank: int) -> None:
        """See that a node applies all that this one has applied."""
        self._behind.discard(rank)
        await self._tell(rank, self.applied)

    async def _learn(self, rank: int) -> None:
        """Apply what another node has applied and this one has not. Raises PeerError."""
        while self._reached[rank] > self.applied:
            (operations,) = await self._ask(rank, ["since", self.applied])
            effects = self._apply_all(operations, self._rank)
            if not effects:
                raise PeerRefusedError(f"rank {rank} does not remember operation {self.applied + 1}")
            for effect in effects:
                await self._follower.settle(effect)

    def _apply_all(self, operations: list[Any], leader: int) -> list[Effect]:
        """Apply those that come next, unless another node decides by now."""
        effects = []
        for number, ticket, operation in operations:
            if number == self.applied + 1 and self._leader == leader:
                effects.append(self._apply((ticket[0], ticket[1]), operation))
        return effects

    async def _ask(self, rank: int, words: list[Any]) -> list[Any]:
        """Raises PeerError."""
        assert self._peers is not None
        question = OUTPUT_QUESTION + msgpack.packb(words)
        answer: list[Any] = msgpack.unpackb(await self._peers.ask(rank, question, APPLY_LIMIT_S))
        return answer

    # --- answering ---

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Questions of other nodes, by their first word; each is given the asking rank and the other words."""
        return {
            "decide": self._asked_to_decide,
            "apply": self._asked_to_apply,
            "state": self._asked_for_state,
            "since": self._asked_since,
        }

    async def _asked_to_decide(self, peer: int, ticket: list[int], operation: list[Any]) -> list[Any]:
        if not self._is_first():
            return [NOT_ME, 0, 0]  # we do not know yet that the one before us is dead
        return list(await self._lead((ticket[0], ticket[1]), operation))

    async def _asked_to_apply(self, peer: int, operations: list[Any], common: int) -> list[Any]:
        if peer < self._leader:
            return [NOT_ME, 0]  # from one that was taken for dead
        self._leader = peer
        self._common = max(self._common, common)
        for effect in self._apply_all(operations, peer):
            await self._follower.settle(effect)
        return [DONE, self.applied]

    async def _asked_for_state(self, peer: int) -> list[Any]:
        self._leader = max(self._leader, peer)
        return [self.applied]

    async def _asked_since(self, peer: int, applied: int) -> list[Any]:
        return [self._since(applied)]
