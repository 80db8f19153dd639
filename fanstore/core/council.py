"""The nodes of a job agree on the order of changes to the outputs.

Owns the order: one node, the one with the lowest rank that is alive, decides on every operation in turn, applies it to
its tree (outputtree.py), has all others apply it, and only then tells who asked. So of two nodes that create a name
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

from fanstore.core.outputtree import Effect, Operation, RefusedError
from fanstore.transport.peers import PeerError, PeerLostError, Peers, PeerTimeoutError

log = logging.getLogger(__name__)

#: The first byte of a question about outputs; what it is about follows.
OUTPUT_QUESTION = b"o"

#: Seconds that a change may take altogether, deaths of deciding nodes included; then it fails with ETIMEDOUT.
DECIDE_LIMIT_S = 60.0
#: Seconds for another node to apply an operation before it is not waited for: it is stopped, and applies it later.
APPLY_LIMIT_S = 10.0
#: Seconds before a node that cannot decide yet is asked again.
_AGAIN_S = 0.02
#: Operations that each node remembers, for those who have missed some or ask again.
_REMEMBERED = 4096

#: Answers.
_DONE, _REFUSED, _NOT_ME = "done", "refused", "not me"

#: Who wants an operation, and the how-manieth of its it is.
Ticket = tuple[int, int]


class Follower(Protocol):
    """What is done with an operation on each node."""

    def apply(self, operation: Operation) -> Effect:
        """Apply it to the tree of this node, and do what follows from it. Raises RefusedError."""

    async def settle(self, effect: Effect) -> None:
        """Until nobody on this node can see what was before."""


class Council:
    """This node's part in the decisions.

    Attributes:
        applied: how many operations this node has applied.
        _leader: the rank that decides, as far as is known here; it only ever grows.
        _leads: this node has taken over: it knows everything that was confirmed.
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

    # --- asking ---

    async def decide(self, operation: Operation) -> int:
        """Have an operation done on all nodes; the inode that it was about. Raises RefusedError."""
        if self._peers is None:
            return self._apply((0, 0), operation).result
        self._count += 1
        ticket = (self._rank, self._count)
        with trio.move_on_after(DECIDE_LIMIT_S):
            while True:
                answer = await self._ask_leader(ticket, operation)
                if answer is not None:
                    break
                await trio.sleep(_AGAIN_S)
            kind, value = answer
            if kind == _REFUSED:
                raise RefusedError(value)
            return value
        log.error("a change to the outputs was not decided within %g s", DECIDE_LIMIT_S)
        raise RefusedError(errno.ETIMEDOUT)

    async def _ask_leader(self, ticket: Ticket, operation: Operation) -> tuple[str, int] | None:
        """What the node that decides says; None if there is none at the moment."""
        peers = self._peers
        assert peers is not None
        leader = min([self._rank, *self._others()])
        if leader == self._rank:
            return await self._lead(ticket, operation)
        question = OUTPUT_QUESTION + msgpack.packb(["decide", ticket, list(operation)])
        try:
            kind, value = msgpack.unpackb(await peers.ask(leader, question, DECIDE_LIMIT_S))
        except PeerError as error:
            log.debug("rank %d does not decide: %s", leader, error)
            return None
        return None if kind == _NOT_ME else (kind, value)

    # --- deciding ---

    async def _lead(self, ticket: Ticket, operation: Operation) -> tuple[str, int] | None:
        """Decide on an operation, on the node that decides."""
        if not self._leads:
            await self._take_over()
        if ticket in self._results:
            number, result = self._results[ticket]
            await self._spread(number)
            return (_DONE, result)
        try:
            effect = self._apply(ticket, operation)
        except RefusedError as error:
            return (_REFUSED, error.number)
        number = self.applied
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follower.settle, effect)
            await self._spread(number)
        return (_DONE, effect.result)

    def _apply(self, ticket: Ticket, operation: Operation) -> Effect:
        effect = self._follower.apply(operation)
        self.applied += 1
        if self._peers is not None:
            self._log[self.applied] = (ticket, operation, effect.result)
            self._results[ticket] = (self.applied, effect.result)
            while len(self._log) > _REMEMBERED:
                self._log.popitem(last=False)
                self._results.popitem(last=False)
            self._moved.set()
            self._moved = trio.Event()
        return effect

    async def _spread(self, number: int) -> None:
        """Until all other nodes have applied the operation with this number, and all before it."""
        ticket, operation, _ = self._log[number]
        question = OUTPUT_QUESTION + msgpack.packb(["apply", number, ticket, list(operation)])

        async def tell(rank: int) -> None:
            assert self._peers is not None
            try:
                await self._peers.ask(rank, question, APPLY_LIMIT_S)
            except PeerTimeoutError:
                log.debug("rank %d has not applied operation %d yet", rank, number)
            except PeerLostError:
                log.debug("rank %d is gone", rank)
            except PeerError as error:
                log.warning("rank %d has not applied a change to the outputs: %s", rank, error)

        others = self._others()
        if len(others) == 1:
            await tell(others[0])
            return
        async with trio.open_nursery() as nursery:
            for rank in others:
                nursery.start_soon(tell, rank)

    async def _take_over(self) -> None:
        """All nodes with lower ranks are gone: learn what any node knows, and see to it that all know it."""
        async with self._taking_over:
            if self._leads:
                return
            known: dict[int, int] = {}
            for rank in self._others():
                answer = await self._ask(rank, ["state"], APPLY_LIMIT_S)
                if answer is not None:
                    known[rank] = int(answer[0])
            for rank, applied in known.items():
                if applied > self.applied:
                    await self._learn(rank)
            for rank, applied in known.items():
                for number in range(applied + 1, self.applied + 1):
                    if number in self._log:
                        ticket, operation, _ = self._log[number]
                        await self._ask(rank, ["apply", number, ticket, list(operation)], APPLY_LIMIT_S)
            self._leader = self._rank
            self._leads = True
            log.info("this node decides on changes to the outputs from now on")

    async def _learn(self, rank: int) -> bool:
        """Apply what another node has applied and this one has not; False if nothing came."""
        before = self.applied
        while (answer := await self._ask(rank, ["since", self.applied], APPLY_LIMIT_S)) and answer[0]:
            for number, ticket, operation in answer[0]:
                if number == self.applied + 1:
                    effect = self._apply((ticket[0], ticket[1]), operation)
                    await self._follower.settle(effect)
            if not answer[0] or answer[0][-1][0] > self.applied:
                break
        return self.applied > before

    async def _ask(self, rank: int, words: list[Any], limit_s: float) -> list[Any] | None:
        assert self._peers is not None
        try:
            answer: list[Any] = msgpack.unpackb(
                await self._peers.ask(rank, OUTPUT_QUESTION + msgpack.packb(words), limit_s)
            )
        except PeerError as error:
            log.debug("rank %d: %s", rank, error)
            return None
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
        if min([self._rank, *self._others()]) != self._rank:
            return [_NOT_ME, 0]  # we do not know yet that the one before us is dead
        answer = await self._lead((ticket[0], ticket[1]), operation)
        return [_NOT_ME, 0] if answer is None else list(answer)

    async def _asked_to_apply(self, peer: int, number: int, ticket: list[int], operation: list[Any]) -> list[Any]:
        if peer < self._leader:
            return [_NOT_ME]  # from one that was taken for dead
        self._leader = peer
        with trio.move_on_after(APPLY_LIMIT_S / 2):
            while self.applied + 1 < number:  # those before it are on their way
                await self._moved.wait()
        if self.applied + 1 < number:
            await self._learn(peer)
        if self.applied + 1 == number:
            effect = self._apply((ticket[0], ticket[1]), operation)
            await self._follower.settle(effect)
        return [_DONE]

    async def _asked_for_state(self, peer: int) -> list[Any]:
        self._leader = max(self._leader, peer)
        return [self.applied]

    async def _asked_since(self, peer: int, applied: int) -> list[Any]:
        """Operations after a number, as many as fit into a message."""
        found: list[Any] = []
        size = 0
        for number in range(applied + 1, self.applied + 1):
            if number not in self._log:
                break
            ticket, operation, _ = self._log[number]
            item = [number, ticket, list(operation)]
            size += len(msgpack.packb(item))
            if size > 50_000 and found:
                break
            found.append(item)
        return [found]
