"""Peers over MPI: one thread that makes every MPI call from initialisation to the end.

MPI has no descriptor to wait on, so the thread polls: without pause while there is traffic and for SPIN_NS after it
(less where links are slow, `learn` in exchange.c), then with sleeps that grow to IDLE_S. It sleeps on a descriptor, so
that a request of our own wakes it at once; a peer's request waits at most IDLE_S. MPI_THREAD_FUNNELED is enough: one
thread makes all calls, that of MPI_Init included.

What there is much of, fetching and being fetched from, runs in C without the GIL (``_native.Exchange``,
native/mpi/exchange.h): the trio thread submits questions to it and takes over what is completed. Everything else, all
other messages, losses, pages that are not in memory, the end, is here, on the same MPI thread between two runs of the
Exchange. Why: see Exchange.

Hand-overs: trio → MPI thread through the Exchange and, for what is done in Python, ``_inbox`` (a deque) and
``Exchange.interrupt``; MPI thread → trio through the Exchange, whose descriptor becomes readable, and for calls through
TrioToken.run_sync_soon. Nothing else is shared, but for the per-peer flags in ``Peer`` (inflight.py), which are single
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
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import outcome
import trio

from fanstore import _native
from fanstore.errors import FanstoreError
from fanstore.format.storage import Stored
from fanstore.transport import library
from fanstore.transport.deadlines import Deadlines
from fanstore.transport.gathering import Finish, Gatherings
from fanstore.transport.inflight import FAILED, Counters, InFlight, Peer
from fanstore.transport.peers import (
    MESSAGE_BYTES,
    NOT_YET,
    Host,
    PeerBusyError,
    PeerError,
    PeerLostError,
    PeerRefusedError,
    PeerTimeoutError,
)
from fanstore.transport.wire import HEADER, Kind

log = logging.getLogger(__name__)

#: Polling without pause after traffic. Answers on one machine come within 50 µs, so a reader that asks for file after
#: file never finds the other side asleep, and a pause of the reader does not burn a core for long.
SPIN_NS = 500_000
#: Then a sleep is this part of the time since the last traffic: after a pause, that is what the first request may wait.
SLEEP_PART = 0.1
#: But not longer. To wake and let MPI work costs 80 to 120 µs on a busy virtual machine: every 5 ms 1.5 to 3 % of a
#: core, every 20 ms 0.6 %.
IDLE_S = 20e-3
#: Start-up: what a collective step may take before the job is given up.
START_LIMIT_S = 120.0

T = TypeVar("T")


_FETCH, _ASK, _TELL, _BYE, _GATHER = (int(k) for k in (Kind.FETCH, Kind.ASK, Kind.TELL, Kind.BYE, Kind.GATHER))
_FOR_THE_HOST = (_FETCH, _ASK, _TELL)
#: MPI counts bytes with an int. Chunks are much shorter.
_LONGEST_ANSWER = (1 << 31) - 1


class MpiPeers:
    """The daemons of MPI_COMM_WORLD.

    Attributes:
        rank, size: as in MPI.
        survives: whether the launcher lets the job go on when a process dies (Open MPI with --with-ft ulfm).
    """

    def __init__(self) -> None:
        """Start the MPI thread and initialise MPI in it. Collective: all ranks must do it. On the trio thread."""
        self._trio = trio.lowlevel.current_trio_token()
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._ended = threading.Event()
        self._end_limit_s: float | None = None  #: when to stop waiting for the others; set when the end has begun
        self._said_bye = False
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._host: Host | None = None
        self._counters = Counters()
        self._deadlines = Deadlines()
        self._steps = 0  #: collective steps that this rank has taken part in; trio only
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
        trio.lowlevel.spawn_system_task(self._deliver_completions)

    @property
    def exchange(self) -> _native.Exchange:
        """Once MPI is up."""
        return self._exchange

    def serve(self, host: Host) -> None:
        self._submit(lambda: self._set_host(host))

    async def fetch(self, peer: int, partition: int, offset: int, length: int, timeout_s: float) -> memoryview:
        to = self._peers[peer]
        deadline_s = time.monotonic() + timeout_s
        if not to.window.enter_nowait(length):
            await self._wait_for_place(to, length, timeout_s)
        request, answer = self._begin(to, deadline_s, _FETCH, partition, offset, length, b"", length)
        got: int = await trio.lowlevel.wait_task_rescheduled(request.give_up)
        if got == length:
            return memoryview(answer)
        if got == len(NOT_YET):
            raise PeerBusyError(f"rank {peer} is bringing these bytes of partition {partition}")
        if got >= 0:
            raise PeerRefusedError(f"rank {peer} does not have these bytes of partition {partition}")
        raise self._failure(to, got, timeout_s)

    async def ask(self, peer: int, question: bytes, timeout_s: float) -> bytes:
        assert len(question) <= MESSAGE_BYTES
        to = self._peers[peer]
        deadline_s = time.monotonic() + timeout_s
        if not to.window.enter_nowait(MESSAGE_BYTES):
            await self._wait_for_place(to, MESSAGE_BYTES, timeout_s)
        request, answer = self._begin(to, deadline_s, _ASK, 0, 0, len(question), question, MESSAGE_BYTES)
        got: int = await trio.lowlevel.wait_task_rescheduled(request.give_up)
        if got > 0:
            return bytes(memoryview(answer)[:got])
        if got == 0:
            raise PeerRefusedError(f"rank {peer} does not answer that question")
        raise self._failure(to, got, timeout_s)

    def _begin(
        self,
        peer: Peer,
        deadline_s: float,
        kind: int,
        partition: int,
        offset: int,
        length: int,
        text: bytes,
        answer_bytes: int,
    ) -> tuple[InFlight, _native.Answer]:
        """Send a question for which there is a place in the window, and whose answer has at most so many bytes."""
        if peer.lost or peer.said_bye:
            peer.window.leave(answer_bytes)
            raise PeerLostError(f"rank {peer.rank} is gone")
        request = InFlight(peer, trio.lowlevel.current_task(), deadline_s, answer_bytes)
        # Memory is taken only now: there is a place in the window, which bounds it.
        answer = self._exchange.submit(request, peer.rank, kind, partition, offset, length, text, answer_bytes)
        self._deadlines.add(request)
        return request, answer

    def _failure(self, peer: Peer, got: int, timeout_s: float) -> PeerError:
        if got == FAILED:
            return PeerLostError(f"rank {peer.rank} is gone")
        return self._time_out(peer, timeout_s)

    async def _wait_for_place(self, peer: Peer, answer_bytes: int, timeout_s: float) -> None:
        if self._exchange.is_silent(peer.rank):
            raise PeerTimeoutError(f"rank {peer.rank} has not answered {peer.window.under_way} requests")
        with trio.move_on_after(timeout_s):
            await peer.window.wait(answer_bytes)
            return
        raise self._time_out(peer, timeout_s)

    def _time_out(self, peer: Peer, timeout_s: float) -> PeerTimeoutError:
        self._exchange.set_silent(peer.rank)
        self._counters.timeouts += 1
        return PeerTimeoutError(f"rank {peer.rank} did not answer within {timeout_s:g} s")

    async def _deliver_completions(self) -> None:
        """For ever: wake those whose answers are here."""
        exchange, discard = self._exchange, self._deadlines.discard
        while True:
            completions = exchange.take_completions()
            if not completions:
                await trio.lowlevel.wait_readable(exchange.fileno())
                continue
            for request, got in completions:
                request.peer.window.leave(request.answer_bytes)
                discard(request)
                if request.task is not None:
                    trio.lowlevel.reschedule(request.task, outcome.Value(got))
                else:
                    self._counters.late_answers += got != FAILED
            # Those who were woken run now; more may land meanwhile, and need no system call to be found.
            await trio.lowlevel.cancel_shielded_checkpoint()

    def _make_calls(self, calls: list[Callable[[], None]]) -> None:
        """What the MPI thread has handed over."""
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
        return self._exchange.is_silent(peer)

    def statistics(self) -> dict[str, object]:
        lost = [peer.rank for peer in self._peers.values() if peer.lost]
        silent = [rank for rank, peer in self._peers.items() if self._exchange.is_silent(rank) and not peer.lost]
        counters: dict[str, int] = dict(vars(self._counters))
        for name, count in self._exchange.counters().items():
            counters[name] += count
        return {**counters, "peers_lost": lost, "peers_silent": silent}

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

    def _submit(self, work: Callable[[], None]) -> None:
        """Have the MPI thread do this."""
        self._inbox.append(work)
        if self._started.is_set() and self._start_error is None:
            self._exchange.interrupt()

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
            for rank in self._peers:
                self._exchange.listen(rank)
            self._poll_until_ended()
            # Not after a loss: if it begins in the moment of a death, Open MPI 5.0 waits for the dead one for ever (2
            # of 28 trials), and mpirun --with-ft ulfm does not mind that it is left out.
            if all(peer.said_bye for peer in self._peers.values()):
                library.finalize(self._mpi)
        except Exception:
            log.exception("the MPI thread failed; peers cannot be reached any more")
            self._fail_everything()
        finally:
            self._ended.set()

    def _initialise(self) -> None:
        self._mpi, self._world = library.initialise()
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self._exchange = library.make_exchange(self._mpi, self._world, MESSAGE_BYTES)
        self._gatherings = Gatherings(self.size)
        self._peers = {rank: Peer(rank) for rank in range(self.size) if rank != self.rank}

    def _set_host(self, host: Host) -> None:
        self._host = host
        self._exchange.set_serving()
        self._hear_held()

    def _hear_held(self) -> None:
        for peer in self._peers.values():
            if peer.held is not None:
                message, peer.held = peer.held, None
                self._take_message(peer, message)

    def _poll_until_ended(self) -> None:
        exchange = self._exchange
        inbox = self._inbox
        while True:
            exchange.clear_interrupt()  # first: what comes from now on sets it again
            while inbox:
                inbox.popleft()()
                exchange.touch()
            quiet = exchange.run(SPIN_NS)
            while (event := exchange.take_event()) is not None:
                is_message, rank, value = event
                if is_message:
                    self._take_message(self._peers[rank], exchange.message(rank, value))
                else:
                    self._lose(self._peers[rank], f"MPI reports error {value}" if value != FAILED else "no answer")
            if self._calls or self._gatherings.finished:
                self._hand_over()
            if self._end_limit_s is not None and self._may_end(time.monotonic()):
                return
            if quiet:
                exchange.sleep(min(IDLE_S, SLEEP_PART * exchange.idle_s()))

    def _hand_over(self) -> None:
        """Wake the trio side, once for everything."""
        calls, self._calls = self._calls + self._gatherings.finished, []
        self._gatherings.finished = []
        with contextlib.suppress(trio.RunFinishedError):  # the daemon is ending, and nobody waits any more
            self._trio.run_sync_soon(self._make_calls, calls)

    def _begin_end(self, limit_s: float) -> None:
        self._end_limit_s = limit_s
        self._hear_held()

    def _may_end(self, now_s: float) -> bool:
        """BYE is said when the last reply is through, so that it is the last word; the end is when all have said it.

        Finalising MPI waits for every process: right only if all are on their way to it.
        """
        assert self._end_limit_s is not None
        if now_s > self._end_limit_s:
            return True
        if not self._said_bye:
            if self._exchange.replies():
                return False
            self._said_bye = True
            self._exchange.set_closing()
            self._tell_all(Kind.BYE, b"")
        return self._exchange.pending() == 0 and all(peer.said_bye or peer.lost for peer in self._peers.values())

    def _fail_everything(self) -> None:
        """Whoever waits learns that no peer can be reached any more. Whoever comes later sees that they are lost."""
        for peer in self._peers.values():
            peer.lost = True
            self._gatherings.leave(peer.rank, "cannot be reached any more")
        self._ended.set()
        self._exchange.give_up()
        while self._inbox:
            self._inbox.popleft()()
        self._hand_over()

    def _begin_gathering(self, step: int, value: bytes, finish: Finish) -> None:
        self._tell_all(Kind.GATHER, value, step)
        self._gatherings.take_part(step, finish)
        self._gatherings.give(self.rank, step, value)

    # --- MPI thread: traffic ---

    def _lose(self, peer: Peer, reason: object) -> None:
        """A peer has died: whoever waits for it learns it now.

        MPI completes receives from a dead process by itself, but not all: one that was posted in the very moment in
        which the death was noticed may stay for ever. So they are given up here; their memory stays with MPI.
        """
        if peer.lost or peer.said_bye:
            return
        peer.lost = True
        self._exchange.lose(peer.rank)
        log.debug("rank %d: %s", peer.rank, reason)
        host = self._host
        if host is not None:
            self._calls.append(lambda: host.lost(peer.rank))
        self._gatherings.leave(peer.rank, "has died")

    def _take_message(self, peer: Peer, message: bytes) -> None:
        """A message that the Exchange has left to us; afterwards the next one of this peer can come."""
        kind, tag, partition, length, offset = HEADER.unpack_from(message)
        if self._host is None and kind in _FOR_THE_HOST:
            if self._end_limit_s is None:
                peer.held = message
                return
        elif kind == _FETCH:
            self._serve_fetch(peer, tag, partition, length, offset)
        elif kind == _GATHER:
            self._gatherings.give(peer.rank, partition, message[HEADER.size :])
        elif kind == _BYE:
            self._part(peer)
            return
        else:
            self._take_text(peer, kind, tag, message[HEADER.size :])
        self._exchange.listen(peer.rank)

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
        self._exchange.part(peer.rank)

    def _answer(self, peer: Peer, tag: int, question: bytes) -> None:
        """On the trio thread: answers are made from state that belongs to it."""
        trio.lowlevel.spawn_system_task(self._answer_in_time, peer, tag, question)

    async def _answer_in_time(self, peer: Peer, tag: int, question: bytes) -> None:
        assert self._host is not None
        answer = b""
        try:
            answer = (await self._host.answer(peer.rank, question))[:MESSAGE_BYTES]
        except Exception:
            log.exception("a question of rank %d could not be answered", peer.rank)
        finally:  # a question that cannot be answered is refused
            self._submit(lambda: self._exchange.reply(peer.rank, tag, answer))

    def _serve_fetch(self, peer: Peer, tag: int, partition: int, length: int, offset: int) -> None:
        """Pages that are not in memory or not known to the Exchange yet, or a partition that is not here as a whole."""
        assert self._host is not None
        partition_data: memoryview | None = None
        try:
            partition_data = self._host.mapped_partition(partition)
        except Exception:
            log.exception("rank %d asked for bytes %d+%d of partition %d", peer.rank, offset, length, partition)
        if partition_data is None:
            self._calls.append(lambda: self._bring(peer, tag, partition, offset, length))
            return
        if offset + length > partition_data.nbytes or length > _LONGEST_ANSWER:
            self._give(peer, tag, b"")
            return
        self._exchange.add_map(partition, partition_data)
        self._counters.served += 1
        self._counters.served_bytes += length
        data = partition_data[offset : offset + length]
        if _native.pages_resident(data):
            self._exchange.reply(peer.rank, tag, data)
            return
        self._counters.slow_pages += 1

        def bring_in() -> None:
            # An error of the disk must not become a SIGBUS in the MPI library: such bytes are refused.
            ready = data if _native.populate_pages(data) else b""
            self._submit(lambda: self._exchange.reply(peer.rank, tag, ready))

        self._pages.submit(bring_in)

    def _bring(self, peer: Peer, tag: int, partition: int, offset: int, length: int) -> None:
        """On the trio thread, as ``_answer``."""
        trio.lowlevel.spawn_system_task(self._bring_in_time, peer, tag, partition, offset, length)

    async def _bring_in_time(self, peer: Peer, tag: int, partition: int, offset: int, length: int) -> None:
        assert self._host is not None
        brought: Stored = b""
        try:
            brought = await self._host.bring(partition, offset, length)
        except Exception:
            log.exception("rank %d asked for bytes %d+%d of partition %d", peer.rank, offset, length, partition)
        finally:
            self._submit(lambda: self._give(peer, tag, brought))

    def _give(self, peer: Peer, tag: int, brought: Stored) -> None:
        """On the MPI thread."""
        if not brought:
            self._counters.refused += 1
        elif brought is not NOT_YET:
            self._counters.served += 1
            self._counters.served_bytes += len(brought)
        self._exchange.reply(peer.rank, tag, brought)

    def _tell_all(self, kind: Kind, word: bytes, step: int = 0) -> None:
        message = HEADER.pack(kind, 0, step, len(word), 0) + word
        # BYE goes to those as well that have said it themselves, and wait for ours.
        farewell = kind is Kind.BYE
        for peer in self._peers.values():
            if not peer.lost:
                self._exchange.send(peer.rank, message, farewell)
