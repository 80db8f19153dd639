"""Several ranks in one process, for tests of everything above the transport: no MPI, one trio loop, faults on demand.

Owns a ``Network`` and its ``InProcessPeers``, one per rank, which pass the same conformance class as mpi.py
(tests/test_transport.py). Messages are handled in the order of sending per rank, by one system task of trio per rank
that ``serve`` starts; everything happens on the trio thread, ``Host`` calls included.

Faults, all on ``Network``: ``kill`` (the rank is gone at once, as by SIGKILL under ulfm), ``stop``/``cont`` (it handles
nothing in between; afterwards it answers late, as by SIGSTOP/SIGCONT), ``delay`` (each message waits that long),
``damage`` (the bytes that it gives out are wrong).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import trio

from fanstore.errors import FanstoreError
from fanstore.format.storage import Stored
from fanstore.transport.peers import (
    MESSAGE_BYTES,
    NOT_YET,
    Host,
    PeerBusyError,
    PeerLostError,
    PeerRefusedError,
    PeerTimeoutError,
)
from fanstore.transport.window import Window

log = logging.getLogger(__name__)


class _InFlight:
    """A question to one peer.

    Attributes:
        answer_bytes: at most; with as many it has its place in the window.
        given_up: the asker does not wait any more; an answer is counted as late and thrown away.
        outcome: the answer (empty: refused), or what went wrong; set before ``done``.
    """

    __slots__ = ("answer_bytes", "done", "given_up", "outcome")

    def __init__(self, answer_bytes: int) -> None:
        self.answer_bytes = answer_bytes
        self.done = trio.Event()
        self.given_up = False
        self.outcome: bytearray | PeerLostError = bytearray()


class Network:
    """The ranks of one job and what is wrong with each of them. All methods on the trio thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._members = [InProcessPeers(self, rank) for rank in range(size)]
        self._gathered: dict[int, list[bytes | None]] = {}
        self._gathering = trio.Event()

    def peers(self, rank: int) -> InProcessPeers:
        """The transport as this rank sees it."""
        return self._members[rank]

    def kill(self, rank: int) -> None:
        """The rank dies: whoever waits for it gets PeerLostError at once, and every other host is told once."""
        dead = self._members[rank]
        if dead.is_dead:
            return
        dead.is_dead = True
        dead.end()
        for other in self._members:
            if other is not dead:
                other.drop(rank, died=True)

    def stop(self, rank: int) -> None:
        """The rank handles nothing until ``cont``."""
        if self._members[rank].running.is_set():
            self._members[rank].running = trio.Event()

    def cont(self, rank: int) -> None:
        """The rank goes on, and first handles what has come meanwhile."""
        self._members[rank].running.set()

    def damage(self, rank: int, on: bool) -> None:
        """The stored bytes that the rank gives out from now on have a wrong byte in the middle."""
        self._members[rank].damaged = on

    def delay(self, rank: int, seconds: float) -> None:
        """Every message to the rank from now on is handled this much later."""
        self._members[rank].delay_s = seconds

    async def exchange(self, rank: int, step: int, value: bytes) -> list[bytes]:
        """All ranks' values of a collective step, in order of ranks, once all have given theirs."""
        values = self._gathered.setdefault(step, [None] * self.size)
        values[rank] = value
        while any(item is None for item in values):
            dead = [member.rank for member in self._members if member.is_dead and values[member.rank] is None]
            if dead:
                raise FanstoreError(f"rank {dead[0]} has died")
            await self._gathering.wait()
        self.wake_gatherers()
        return [item for item in values if item is not None]

    def wake_gatherers(self) -> None:
        self._gathering.set()
        self._gathering = trio.Event()


class InProcessPeers:
    """Peers of one rank of a Network.

    Attributes:
        rank, size, exchange: as in Peers.
        survives: as in MpiPeers; always, here.
        is_dead, running, damaged, delay_s: what is wrong with this rank; set by Network only.
    """

    def __init__(self, network: Network, rank: int) -> None:
        self.rank = rank
        self.size = network.size
        self.exchange = None
        self.survives = True
        self.is_dead = False
        self.running = trio.Event()
        self.running.set()
        self.damaged = False
        self.delay_s = 0.0
        self._network = network
        self._host: Host | None = None
        self._ended = False
        self._step = 0
        self._send, self._receive = trio.open_memory_channel[tuple[float, Callable[[], None]]](math.inf)
        others = [other for other in range(network.size) if other != rank]
        self._window = {other: Window() for other in others}
        self._in_flight: dict[int, set[_InFlight]] = {other: set() for other in others}
        self._lost: set[int] = set()  #: died
        self._left: set[int] = set()  #: said BYE
        self._silent: set[int] = set()
        self._counters = dict.fromkeys(
            ("fetches", "fetched_bytes", "served", "served_bytes", "refused", "timeouts", "late_answers", "slow_pages"),
            0,
        )

    # --- before serving, as MpiPeers ---

    async def wait_started(self) -> None:
        await trio.lowlevel.checkpoint()

    async def broadcast(self, value: bytes | None) -> memoryview:
        """Rank 0's bytes on every rank, in memory of its own. Collective."""
        return memoryview(bytearray((await self.gather_all(value or b""))[0]))

    async def gather_all(self, value: bytes) -> list[bytes]:
        """Every rank's bytes, in order of ranks, on every rank. Collective."""
        self._step += 1
        return await self._network.exchange(self.rank, self._step, value)

    # --- Peers ---

    def serve(self, host: Host) -> None:
        self._host = host
        trio.lowlevel.spawn_system_task(self._handle_messages)

    async def fetch(self, peer: int, partition: int, offset: int, length: int, timeout_s: float) -> memoryview:
        other = self._network.peers(peer)
        answer = await self._request(
            peer, lambda complete: other.give(self.rank, partition, offset, length, complete), length, timeout_s
        )
        if len(answer) != length and answer == NOT_YET:
            raise PeerBusyError(f"rank {peer} is bringing these bytes of partition {partition}")
        if len(answer) != length:
            raise PeerRefusedError(f"rank {peer} does not have these bytes of partition {partition}")
        self._counters["fetches"] += 1
        self._counters["fetched_bytes"] += length
        return memoryview(answer)

    async def ask(self, peer: int, question: bytes, timeout_s: float) -> bytes:
        assert len(question) <= MESSAGE_BYTES
        other = self._network.peers(peer)
        answer = await self._request(
            peer, lambda complete: other.reply(self.rank, question, complete), MESSAGE_BYTES, timeout_s
        )
        if not answer:
            raise PeerRefusedError(f"rank {peer} does not answer that question")
        return bytes(answer)

    def tell(self, word: bytes) -> None:
        assert len(word) <= MESSAGE_BYTES
        for other in self._others():
            other.deliver(functools.partial(other.hear, self.rank, word))

    def is_lost(self, peer: int) -> bool:
        return peer in self._lost or peer in self._left

    def is_silent(self, peer: int) -> bool:
        return peer in self._silent

    def statistics(self) -> dict[str, object]:
        silent = sorted(self._silent - self._lost)
        return {**self._counters, "peers_lost": sorted(self._lost), "peers_silent": silent}

    def close(self, timeout_s: float) -> None:
        """Say BYE. There is nothing to wait for."""
        if self._ended:
            return
        for other in self._others():
            other.deliver(functools.partial(other.drop, self.rank, died=False))
        self.end()

    def _others(self) -> list[InProcessPeers]:
        return [self._network.peers(rank) for rank in self._window]

    # --- asking ---

    async def _request(
        self, peer: int, question: Callable[[Callable[[bytearray], None]], None], answer_bytes: int, timeout_s: float
    ) -> bytearray:
        """``question`` is given what to call with the answer."""
        other = self._network.peers(peer)
        request = _InFlight(answer_bytes)

        def handle() -> None:  # by the peer's task
            question(lambda answer: self.complete(peer, request, answer))

        window = self._window[peer]
        with trio.move_on_after(timeout_s):
            if not window.enter_nowait(answer_bytes):
                if peer in self._silent:
                    raise PeerTimeoutError(f"rank {peer} has not answered {window.under_way} requests")
                await window.wait(answer_bytes)
            if self._ended or self.is_lost(peer):
                window.leave(answer_bytes)
                raise PeerLostError(f"rank {peer} is gone")
            self._in_flight[peer].add(request)
            other.deliver(handle)
            try:
                await request.done.wait()
            except trio.Cancelled:
                request.given_up = True  # it keeps its place until it is answered
                raise
            if isinstance(request.outcome, PeerLostError):
                raise request.outcome
            return request.outcome
        self._silent.add(peer)
        self._counters["timeouts"] += 1
        raise PeerTimeoutError(f"rank {peer} did not answer within {timeout_s:g} s")

    def complete(self, peer: int, request: _InFlight, answer: bytearray) -> None:
        """The peer's answer is here; nobody may wait for it any more."""
        if request not in self._in_flight[peer]:
            return  # dropped when the peer was lost
        self._in_flight[peer].discard(request)
        self._window[peer].leave(request.answer_bytes)
        self._silent.discard(peer)
        if request.given_up:
            self._counters["late_answers"] += 1
            return
        request.outcome = answer
        request.done.set()

    def drop(self, peer: int, *, died: bool) -> None:
        """The peer is gone: everybody who waits for it is told."""
        if self._ended or self.is_lost(peer):
            return
        (self._lost if died else self._left).add(peer)
        self._silent.discard(peer)
        self._fail_requests(peer, f"rank {peer} is gone")
        if died:
            self._network.wake_gatherers()
            if self._host is not None:
                self._host.lost(peer)

    # --- answering ---

    async def _handle_messages(self) -> None:
        async with self._receive:
            async for due_s, handle in self._receive:
                await trio.sleep_until(due_s)
                await self.running.wait()
                if self._ended:
                    return
                handle()

    def deliver(self, handle: Callable[[], None]) -> None:
        """A message for this rank; nothing happens if it has gone."""
        if not self._ended:
            self._send.send_nowait((trio.current_time() + self.delay_s, handle))

    def end(self) -> None:
        """This rank sends and handles nothing more; its own fetches fail."""
        self._ended = True
        self._send.close()
        self.running.set()
        for peer in self._in_flight:
            self._fail_requests(peer, "this node has left the job")

    def _fail_requests(self, peer: int, reason: str) -> None:
        requests, self._in_flight[peer] = self._in_flight[peer], set()
        for request in requests:
            request.outcome = PeerLostError(reason)
            request.done.set()
            self._window[peer].leave(request.answer_bytes)

    def give(self, asker: int, partition: int, offset: int, length: int, complete: Callable[[bytearray], None]) -> None:
        """A copy of stored bytes; empty if they are not here."""
        assert self._host is not None
        self._silent.discard(asker)
        data = self._host.mapped_partition(partition)
        if data is None:
            trio.lowlevel.spawn_system_task(self._bring, partition, offset, length, complete)
        else:
            complete(self._count(data[offset : offset + length] if offset + length <= len(data) else b""))

    async def _bring(self, partition: int, offset: int, length: int, complete: Callable[[bytearray], None]) -> None:
        assert self._host is not None
        answer = self._count(await self._host.bring(partition, offset, length))
        if not self._ended:
            complete(answer)

    def _count(self, stored: Stored) -> bytearray:
        if not stored:
            self._counters["refused"] += 1
        elif stored is not NOT_YET:
            self._counters["served"] += 1
            self._counters["served_bytes"] += len(stored)
        copy = bytearray(stored)
        if self.damaged and copy:
            copy[len(copy) // 2] ^= 0xFF
        return copy

    def reply(self, asker: int, question: bytes, complete: Callable[[bytearray], None]) -> None:
        """The host's answer to a question, when it has one."""
        self._silent.discard(asker)
        trio.lowlevel.spawn_system_task(self._reply_in_time, asker, question, complete)

    async def _reply_in_time(self, asker: int, question: bytes, complete: Callable[[bytearray], None]) -> None:
        assert self._host is not None
        answer = bytearray()
        try:
            answer = bytearray((await self._host.answer(asker, question))[:MESSAGE_BYTES])
        except Exception:
            log.exception("a question of rank %d could not be answered", asker)
        if not self._ended:
            complete(answer)

    def hear(self, teller: int, word: bytes) -> None:
        """Another rank has told something to all."""
        assert self._host is not None
        self._silent.discard(teller)
        self._host.heard(teller, word)
