"""Peers over MPI: one thread that makes every MPI call from initialisation to the end.

MPI has no descriptor to wait on, so the thread polls: without pause while there is traffic and for SPIN_NS after it,
then with sleeps that grow to IDLE_S. It sleeps on a descriptor, so that a request of our own wakes it at once; a peer's
request waits at most IDLE_S. MPI_THREAD_FUNNELED is enough: one thread makes all calls, that of MPI_Init included.

Hand-overs: trio → MPI thread through ``_inbox`` (a deque), ``_interrupt`` (a byte that ends a spin) and ``_wake`` (an
eventfd that ends a sleep); MPI thread → trio through TrioToken.run_sync_soon, once per round for everything that has
completed in it. Nothing else is shared, but for the per-peer flags in ``Peer`` (flight.py), which are single
assignments.

Memory: the receive of a fetch is posted in its final memory before the request leaves. If the caller gives up, the
receive stays posted with its memory and its tag until the answer comes or the peer dies: a late answer can never land
in memory that is used again. Such a fetch keeps its place in the window, so that a silent peer costs at most WINDOW
answers of memory. The owner sends straight from its mapped partition; pages that are not in memory are brought in by a
worker thread first, so that a slow disk does not stop the MPI thread.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import outcome
import trio

from fanstore import _native
from fanstore.errors import FanstoreError
from fanstore.transport import library
from fanstore.transport.deadlines import Deadlines
from fanstore.transport.flight import Counters, Flight, Peer, Sent
from fanstore.transport.gathering import Finish, Gatherings
from fanstore.transport.peers import MESSAGE_BYTES, Host, PeerLostError, PeerRefusedError, PeerTimeoutError
from fanstore.transport.pending import FAILED, Pending
from fanstore.transport.wire import HEADER, TAG_MESSAGE, Kind

log = logging.getLogger(__name__)

#: Polling without pause after traffic. Answers on one machine come within 50 µs, so a reader that asks for file after
#: file never finds the other side asleep, and a pause of the reader does not burn a core for long.
SPIN_NS = 500_000
#: Then a sleep is this part of the time since the last traffic: after a pause, that is what the first request may wait.
SLEEP_PART = 0.1
#: But not longer. To wake and let MPI work costs 80 to 120 µs on a busy virtual machine: every 5 ms 1.5 to 3 % of a
#: core, every 20 ms 0.6 %.
IDLE_S = 20e-3
#: Replies being sent at once; further requests wait in line, a few bytes each.
SENDS = 32
#: Start-up: what a collective step may take before the job is given up.
START_LIMIT_S = 120.0

T = TypeVar("T")


_MESSAGE = Sent(0)
_REPLY = Sent(1)
_FAREWELL = Sent(0)  #: goes to those as well that have said BYE themselves, and wait for ours
_FETCH, _ASK, _TELL, _BYE, _GATHER = (int(k) for k in (Kind.FETCH, Kind.ASK, Kind.TELL, Kind.BYE, Kind.GATHER))
_FOR_THE_HOST = (_FETCH, _ASK, _TELL)


class MpiPeers:
    """The daemons of MPI_COMM_WORLD.

    Attributes:
        rank, size: as in MPI.
        survives: whether the launcher lets the job go on when a process dies (Open MPI with --with-ft ulfm).
    """

    def __init__(self) -> None:
        """Start the MPI thread and initialise MPI in it. Collective: all ranks must do it. On the trio thread."""
        library.keep_freed_memory()
        self._trio = trio.lowlevel.current_trio_token()
        self._inbox: collections.deque[Flight | Callable[[], None]] = collections.deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._interrupt = bytearray(1)  #: set to end a spin of the MPI thread
        self._sleeping = False
        self._ended = threading.Event()
        self._end_limit_s: float | None = None  #: when to stop waiting for the others; set when the end has begun
        self._said_bye = False
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._host: Host | None = None
        self._counters = Counters()
        self._deadlines = Deadlines()
        self._steps = 0  #: collective steps that this rank has taken part in; trio only
        self._sending = 0  #: replies on their way
        self._waiting: collections.deque[tuple[Peer, int, memoryview]] = collections.deque()
        self._landed: list[Flight] = []
        self._calls: list[Callable[[], None]] = []
        self._pages = ThreadPoolExecutor(4, thread_name_prefix="pages")
        self.rank = 0
        self.size = 1
        # Open MPI's own variable is spelt like this.
        self.survives = os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112
        self._peers: dict[int, Peer] = {}
        self._thread = threading.Thread(target=self._run, name="mpi", daemon=True)
        self._thread.start()

    # --- trio side ---

    async def wait_started(self) -> None:
        """Until MPI is up. Raises FanstoreError if it cannot be used."""
        await trio.to_thread.run_sync(self._started.wait, START_LIMIT_S, abandon_on_cancel=True)
        if not self._started.is_set():
            raise FanstoreError(f"MPI was not up after {START_LIMIT_S:.0f} s; does every node of the job run?")
        if self._start_error is not None:
            if isinstance(self._start_error, FanstoreError):
                raise self._start_error
            raise FanstoreError(f"MPI cannot be used: {self._start_error}") from self._start_error
        trio.lowlevel.spawn_system_task(self._deadlines.watch)

    def serve(self, host: Host) -> None:
        self._submit(lambda: self._set_host(host))

    async def fetch(self, peer: int, partition: int, offset: int, length: int, timeout_s: float) -> memoryview:
        data = await self._request(self._peers[peer], _FETCH, partition, offset, length, b"", length, timeout_s)
        if data.size != length:
            raise PeerRefusedError(f"rank {peer} does not have these bytes of partition {partition}")
        return data.data

    async def ask(self, peer: int, question: bytes, timeout_s: float) -> bytes:
        assert len(question) <= MESSAGE_BYTES
        data = await self._request(self._peers[peer], _ASK, 0, 0, len(question), question, MESSAGE_BYTES, timeout_s)
        if data.size == 0:
            raise PeerRefusedError(f"rank {peer} does not answer that question")
        return data.tobytes()

    async def _request(
        self,
        peer: Peer,
        kind: int,
        partition: int,
        offset: int,
        length: int,
        text: bytes,
        answer_bytes: int,
        timeout_s: float,
    ) -> np.ndarray[Any, Any]:
        """Send a request and wait for its answer, of at most ``answer_bytes``; what was received."""
        deadline_s = time.monotonic() + timeout_s
        if not peer.window.enter_nowait():
            await self._wait_for_place(peer, timeout_s)
        if peer.lost or peer.said_bye:
            peer.window.leave()
            raise PeerLostError(f"rank {peer.rank} is gone")
        # Not before there is a place in the window, which bounds the memory. Not zeroed: every byte is received.
        data = np.empty(answer_bytes, np.uint8)
        task = trio.lowlevel.current_task()
        flight = Flight(peer, kind, partition, offset, length, text, data, task, deadline_s)

        def give_up(_: object) -> trio.lowlevel.Abort:
            # The reader has gone. The memory belongs to MPI until the answer comes.
            flight.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._submit(flight)
        self._deadlines.add(flight)
        got: int = await trio.lowlevel.wait_task_rescheduled(give_up)
        if got >= 0:
            return data[:got]
        if got == FAILED:
            raise PeerLostError(f"rank {peer.rank} is gone")
        raise self._time_out(peer, timeout_s)

    async def _wait_for_place(self, peer: Peer, timeout_s: float) -> None:
        if peer.silent:
            raise PeerTimeoutError(f"rank {peer.rank} has not answered {peer.window.under_way} requests")
        with trio.move_on_after(timeout_s):
            await peer.window.wait()
            return
        raise self._time_out(peer, timeout_s)

    def _time_out(self, peer: Peer, timeout_s: float) -> PeerTimeoutError:
        peer.silent = True
        self._counters.timeouts += 1
        return PeerTimeoutError(f"rank {peer.rank} did not answer within {timeout_s:g} s")

    def _deliver(self, landed: list[Flight], calls: list[Callable[[], None]]) -> None:
        """What the MPI thread has handed over."""
        for flight in landed:
            flight.peer.window.leave()
            self._deadlines.discard(flight)
            if flight.task is not None:
                trio.lowlevel.reschedule(flight.task, outcome.Value(flight.got))
            else:
                self._counters.late_answers += flight.got != FAILED
        for call in calls:
            try:
                call()
            except Exception:
                log.exception("a message of a peer could not be handled")

    def tell(self, word: bytes) -> None:
        assert len(word) <= MESSAGE_BYTES
        self._submit(lambda: self._tell_all(Kind.TELL, word))

    def is_lost(self, peer: int) -> bool:
        return self._peers[peer].lost or self._peers[peer].said_bye

    def is_silent(self, peer: int) -> bool:
        return self._peers[peer].silent

    def statistics(self) -> dict[str, object]:
        lost = [peer.rank for peer in self._peers.values() if peer.lost]
        silent = [peer.rank for peer in self._peers.values() if peer.silent and not peer.lost]
        return {**vars(self._counters), "peers_lost": lost, "peers_silent": silent}

    def close(self, timeout_s: float) -> None:
        """Leave the job: waits for the others to do so too, but not for dead ones, and no longer than ``timeout_s``."""
        self._submit(lambda: self._begin_end(time.monotonic() + timeout_s * 0.8))
        if not self._ended.wait(timeout_s):
            log.warning("the MPI library did not end within %.0f s", timeout_s)
        self._pages.shutdown(wait=False)

    async def broadcast(self, value: bytes | None) -> memoryview:
        """Rank 0's bytes on every rank, received in page-aligned memory. Collective; only before ``serve``."""
        # First all meet: MPI_Bcast keeps the MPI thread until it is through, and does not end if a rank is missing.
        lengths = await self.gather_all(b"%d" % len(value or b""))
        finished = trio.Event()
        result: list[memoryview | FanstoreError] = []

        def run() -> None:
            try:
                result.append(library.broadcast(self._world, value, int(lengths[0])))
            except self._mpi.Exception as error:
                result.append(FanstoreError(f"a node of the job failed while it started ({error})"))
            self._calls.append(finished.set)

        self._submit(run)
        with trio.move_on_after(START_LIMIT_S):
            await finished.wait()
        if not result:
            raise FanstoreError(f"the broadcast to all nodes did not end within {START_LIMIT_S:.0f} s")
        if isinstance(result[0], FanstoreError):
            raise result[0]
        return result[0]

    async def gather_all(self, value: bytes) -> list[bytes]:
        """Every rank's bytes, in order of ranks, on every rank. Collective, also after ``serve``; others are served."""
        assert len(value) <= MESSAGE_BYTES
        self._steps += 1
        step = self._steps
        finished = trio.Event()
        result: list[list[bytes] | FanstoreError] = []

        def finish(values: list[bytes] | FanstoreError) -> None:
            result.append(values)
            finished.set()

        self._submit(lambda: self._begin_gathering(step, value, finish))
        if self._ended.is_set():
            raise FanstoreError("the MPI library of this node failed")
        with trio.move_on_after(START_LIMIT_S):
            await finished.wait()
        if not result:
            raise FanstoreError(f"a node of the job was not ready within {START_LIMIT_S:.0f} s")
        if isinstance(result[0], FanstoreError):
            raise result[0]
        return result[0]

    def _submit(self, work: Flight | Callable[[], None]) -> None:
        self._inbox.append(work)
        self._interrupt[0] = 1
        if self._sleeping:
            os.eventfd_write(self._wake, 1)

    # --- MPI thread: life ---

    def _run(self) -> None:
        try:
            self._initialise()
        except BaseException as error:  # noqa: BLE001  # raised on the trio side by wait_started
            self._start_error = error
            self._started.set()
            self._ended.set()
            return
        self._started.set()
        try:
            for peer in self._peers.values():
                got = self._listen(peer)
                if got is not None:
                    self._hear(peer, got)
            self._poll_until_ended()
            if all(peer.said_bye for peer in self._peers.values()):
                library.finalise(self._mpi)
        except Exception:
            log.exception("the MPI thread failed; peers cannot be reached any more")
            self._fail_everything()
        finally:
            self._ended.set()

    def _initialise(self) -> None:
        self._mpi, self._world = library.initialise()
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self._status: Any = self._mpi.Status()
        self._pending: Pending[Peer | Flight | Sent] = Pending(self._mpi, self._interrupt)
        self._gatherings = Gatherings(self.size)
        self._peers = {rank: Peer(rank) for rank in range(self.size) if rank != self.rank}

    def _set_host(self, host: Host) -> None:
        self._host = host
        self._hear_held()

    def _hear_held(self) -> None:
        for peer in self._peers.values():
            if peer.held is not None:
                got, peer.held = peer.held, None
                self._hear(peer, got)

    def _poll_until_ended(self) -> None:
        inbox = self._inbox
        interrupt = self._interrupt
        last_traffic_s = time.monotonic()
        busy = False
        while True:
            interrupt[0] = 0  # first: what comes from now on sets it again
            spin_ns = SPIN_NS if busy or inbox else 0
            busy = bool(inbox)
            while inbox:
                work = inbox.popleft()
                if type(work) is Flight:
                    self._start_flight(work)
                else:
                    work()  # type: ignore[operator]  # mypy does not narrow by type(x) is
            busy |= self._progress(spin_ns)
            if self._landed or self._calls or self._gatherings.finished:
                self._hand_over()
            now_s = time.monotonic()
            if self._end_limit_s is not None and self._may_end(now_s):
                return
            if busy:
                last_traffic_s = now_s
            elif not inbox:
                self._sleep(min(IDLE_S, SLEEP_PART * (now_s - last_traffic_s)))

    def _sleep(self, seconds: float) -> None:
        self._sleeping = True
        # What was submitted just before the flag was set has woken nobody.
        if not self._inbox:
            select.select([self._wake], [], [], seconds)
        self._sleeping = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _hand_over(self) -> None:
        """Wake the trio side, once for everything."""
        landed, self._landed = self._landed, []
        calls, self._calls = self._calls + self._gatherings.finished, []
        self._gatherings.finished = []
        with contextlib.suppress(trio.RunFinishedError):  # the daemon is ending, and nobody waits any more
            self._trio.run_sync_soon(self._deliver, landed, calls)

    def _begin_end(self, limit_s: float) -> None:
        self._end_limit_s = limit_s
        self._hear_held()

    def _may_end(self, now_s: float) -> bool:
        """BYE is said when the last reply is through, so that it is the last word; the end is when all have said it.

        Finalising MPI waits for every process that lives: right only if all are on their way to it.
        """
        assert self._end_limit_s is not None
        if now_s > self._end_limit_s:
            return True
        if not self._said_bye:
            if self._sending or self._waiting:
                return False
            self._said_bye = True
            self._tell_all(Kind.BYE, b"")
        return len(self._pending) == 0 and all(peer.said_bye or peer.lost for peer in self._peers.values())

    def _fail_everything(self) -> None:
        """Whoever waits learns that no peer can be reached any more. Whoever comes later sees that they are lost."""
        for peer in self._peers.values():
            peer.lost = True
            self._gatherings.leave(peer.rank, "cannot be reached any more")
        self._ended.set()
        self._landed += [owner for owner in self._pending.owners() if isinstance(owner, Flight)]
        while self._inbox:
            work = self._inbox.popleft()
            if isinstance(work, Flight):
                self._landed.append(work)
            else:
                work()
        self._hand_over()

    def _begin_gathering(self, step: int, value: bytes, finish: Finish) -> None:
        self._tell_all(Kind.GATHER, value, step)
        self._gatherings.take_part(step, finish)
        self._gatherings.give(self.rank, step, value)

    # --- MPI thread: traffic ---

    def _progress(self, spin_ns: int) -> bool:
        """Let MPI work and take what has completed; wait for it up to ``spin_ns``. Was there anything?"""
        completed = self._pending.take_completed(spin_ns)
        for owner, got in completed:
            if type(owner) is Flight:
                self._land(owner, got)
            elif type(owner) is Sent:
                self._sending -= owner.weight
            elif type(owner) is Peer:
                self._hear(owner, got)
        while self._waiting and self._sending < SENDS:
            self._send(*self._waiting.popleft(), _REPLY)
        return bool(completed)

    def _lose(self, peer: Peer, reason: object) -> None:
        """A peer has died: whoever waits for it learns it now.

        MPI completes receives from a dead process by itself, but not all: one that was posted in the very moment in
        which the death was noticed may stay for ever. So they are given up here; their memory stays with MPI.
        """
        if peer.lost or peer.said_bye:
            return
        peer.lost = True
        for owner in self._pending.owners():
            if isinstance(owner, Flight) and owner.peer is peer:
                self._pending.abandon(owner)
                self._landed.append(owner)
        log.debug("rank %d: %s", peer.rank, reason)
        host = self._host
        if host is not None:
            self._calls.append(lambda: host.lost(peer.rank))
        self._gatherings.leave(peer.rank, "has died")

    def _listen(self, peer: Peer) -> int | None:
        """Receive the next message: its bytes if it is here already."""
        try:
            request = self._world.Irecv(peer.buffer, peer.rank, TAG_MESSAGE)
            if request.Test(self._status):
                return int(self._status.count)
        except self._mpi.Exception as error:
            self._lose(peer, error)
            return None
        self._pending.add(request, peer)
        return None

    def _hear(self, peer: Peer, bytes_received: int) -> None:
        """A message is here; take it and those behind it."""
        got: int | None = bytes_received
        while got is not None:
            if got == FAILED:
                self._lose(peer, "its messages cannot be received any more")
                return
            peer.silent = False
            kind, tag, partition, length, offset = HEADER.unpack_from(peer.buffer)
            if self._host is None and kind in _FOR_THE_HOST:
                if self._end_limit_s is None:
                    peer.held = got
                    return
            elif kind == _FETCH:
                self._serve_fetch(peer, tag, partition, length, offset)
            elif kind == _GATHER:
                self._gatherings.give(peer.rank, partition, bytes(peer.buffer[HEADER.size : got]))
            elif kind == _BYE:
                self._part(peer)
                return
            else:
                self._take_text(peer, kind, tag, bytes(peer.buffer[HEADER.size : got]))
            got = self._listen(peer)

    def _take_text(self, peer: Peer, kind: int, tag: int, text: bytes) -> None:
        host = self._host
        assert host is not None
        if kind == _ASK:
            self._calls.append(lambda: self._answer(peer, tag, text))
        elif kind == _TELL:
            self._calls.append(lambda: host.heard(peer.rank, text))
        else:
            log.error("rank %d sent a message of unknown kind %d; is its FanStore of another version?", peer.rank, kind)

    def _part(self, peer: Peer) -> None:
        """A peer has said BYE: what it has not answered by now it will not answer."""
        peer.said_bye = True
        self._gatherings.leave(peer.rank, "has left the job")
        for owner in self._pending.owners():
            if isinstance(owner, Flight) and owner.peer is peer:
                self._pending.cancel(owner)

    def _answer(self, peer: Peer, tag: int, question: bytes) -> None:
        """On the trio thread: answers are made from state that belongs to it."""
        assert self._host is not None
        answer = b""
        try:
            answer = self._host.answer(peer.rank, question)[:MESSAGE_BYTES]
        finally:  # a question that cannot be answered is refused
            self._submit(lambda: self._reply(peer, tag, memoryview(answer)))

    def _serve_fetch(self, peer: Peer, tag: int, partition: int, length: int, offset: int) -> None:
        assert self._host is not None
        try:
            data = self._host.stored_bytes(partition, offset, length)
        except Exception:
            log.exception("rank %d asked for bytes %d+%d of partition %d", peer.rank, offset, length, partition)
            data = None
        if data is None or data.nbytes != length:
            self._counters.refused += 1
            self._reply(peer, tag, memoryview(b""))
            return
        self._counters.served += 1
        self._counters.served_bytes += length
        if _native.pages_resident(data):
            self._reply(peer, tag, data)
            return
        self._counters.slow_pages += 1
        kept = data

        def bring_in() -> None:
            # An error of the disk must not become a SIGBUS in the MPI library: such bytes are refused.
            ready = kept if _native.populate_pages(kept) else memoryview(b"")
            self._submit(lambda: self._reply(peer, tag, ready))

        self._pages.submit(bring_in)

    def _reply(self, peer: Peer, tag: int, data: memoryview) -> None:
        if self._said_bye:
            return  # the asker knows
        if self._sending < SENDS:
            self._send(peer, tag, data, _REPLY)
        else:
            self._waiting.append((peer, tag, data))

    def _send(self, peer: Peer, tag: int, data: memoryview | bytes, owner: Sent) -> None:
        if peer.lost or (peer.said_bye and owner is not _FAREWELL):
            return
        try:
            request = self._world.Isend(data, peer.rank, tag)
            # A small message is on its way at once.
            if owner.weight == 0 and request.Test():
                return
        except self._mpi.Exception as error:
            self._lose(peer, error)
            return
        self._sending += owner.weight
        self._pending.add(request, owner)

    def _tell_all(self, kind: Kind, word: bytes, step: int = 0) -> None:
        message = HEADER.pack(kind, 0, step, len(word), 0) + word
        for peer in self._peers.values():
            self._send(peer, TAG_MESSAGE, message, _FAREWELL if kind is Kind.BYE else _MESSAGE)

    def _start_flight(self, flight: Flight) -> None:
        peer = flight.peer
        if peer.lost or peer.said_bye or self._said_bye:
            self._landed.append(flight)
            return
        # There is one: a question has a place in the window, and keeps it as long as its tag.
        tag = flight.tag = peer.free_tags.pop()
        try:
            request = self._world.Irecv(flight.data, peer.rank, tag)
        except self._mpi.Exception as error:
            self._lose(peer, error)
            self._landed.append(flight)
            return
        self._pending.add(request, flight)
        header = HEADER.pack(flight.kind, tag, flight.partition, flight.length, flight.offset)
        self._send(peer, TAG_MESSAGE, header + flight.text if flight.text else header, _MESSAGE)

    def _land(self, flight: Flight, got: int) -> None:
        """A flight's receive has completed."""
        flight.got = got
        peer = flight.peer
        peer.free_tags.append(flight.tag)
        if got == FAILED:
            self._lose(peer, "a request was not answered")
        else:
            peer.silent = False
            self._counters.fetches += 1
            self._counters.fetched_bytes += got
        self._landed.append(flight)
