"""Chunks from the disks of other nodes: whom to ask, in which order, and what to remember of the answers.

Owns the order of peers and the counters per peer; the bytes travel through the transport (transport/peers.py). Used by
sources.py. Trio thread only.

The chunk broker fetches the common case by itself (``Fetcher``, native/chunks/peers.h). It is told here whom it may ask
for what, and whatever goes wrong there is noted here, before the same chunk is asked for here.

A peer is not asked while there is a reason to think that it costs time for nothing: never again once it is dead; while
it is silent only as the last resort, or by ``watch``; for a second after it has said that it does not have a partition.
One that is still copying it brings first what it is asked for, and says so if that takes long (PeerBusyError): then it
is asked again. One that gave damaged bytes is asked last for that partition. So a reader waits for a time-out only if a
peer falls silent while it is being asked.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import trio

from fanstore import _native
from fanstore.dataset.placement import Placement
from fanstore.dataset.source import Check
from fanstore.errors import CorruptDataError
from fanstore.format.storage import Stored
from fanstore.telemetry.events import NOTABLE
from fanstore.telemetry.statistics import OperationStatistics, Source, Statistics
from fanstore.transport.peers import PeerBusyError, PeerError, PeerLostError, PeerRefusedError, Peers, PeerTimeoutError

log = logging.getLogger(__name__)

#: How long a peer's word that it does not have a partition counts. Staging takes seconds per partition.
REFUSAL_NS = 1_000_000_000

#: Refusals after which a read goes to the shared file system. Of a partition that belongs on every node there are many
#: holders, and while all of them are copying it, none has it.
MAX_REFUSALS = 2

#: Larger chunks are fetched at most so many at a time. That bounds the memory of what is under way (4 MiB each, twice
#: that while it is decompressed), and the time that the last of them waits for its turn on a slow link.
LARGE_BYTES = 256 << 10
LARGE_FETCHES = 8

#: How often ``watch`` looks for silent peers, and how long it waits at most before it asks the same one again. Each
#: question to a stopped process stays with the transport until it is answered, so there must not be many.
WATCH_S = 1.0
WATCH_LONGEST_S = 60.0

#: Seconds for a peer to give a range that is copied (restoring.py). Nobody waits for it, and who is asked for less by a
#: reader must not be called silent because its disk is busy with this.
COPY_LIMIT_S = 30.0

#: Seconds for which a peer is asked that says that it is bringing these bytes from the shared file system.
BRING_LIMIT_S = 60.0


@dataclass
class PeerCounters:
    """What one peer was asked for by this node, and how it went."""

    fetches: int = 0  #: chunks that it gave and that were right
    fetched_bytes: int = 0  #: stored bytes of these
    refused: int = 0  #: it did not have them
    timeouts: int = 0  #: it did not answer in time
    lost: int = 0  #: it died while it was asked
    damaged: int = 0  #: its bytes did not match their checksum


class Failure(enum.IntEnum):
    """What a fetch of the native engine came to: enum fsx_failure_kind of native/chunks/peers.h."""

    LOST = 0
    SILENT = 1
    REFUSED = 2
    DAMAGED = 3


class Fetcher(Protocol):
    """Whoever fetches chunks beside Python: asks once, and leaves what fails to us."""

    def route(self, partition: int, ranks: Sequence[int]) -> None:
        """From now on ask these for the partition, as far as they are neither lost nor silent."""

    def fetched(self) -> tuple[Sequence[tuple[int, int]], tuple[int, int, int, int, bytes]]:
        """By rank, chunks that it gave and their stored bytes; and the latency, as OperationStatistics.add takes it."""


class Remote:
    """The partitions on other nodes: a source (source.py) of those that are worth asking.

    Attributes:
        last_resort: the same source, which asks all that are not dead.
        _others: per partition the ranks that keep it, without ourselves.
        _refused_ns: by (peer, partition), when it said last that it does not have it, or in the future:
            when it may be asked again, since it took too long. Only what may still count.
        _damaged: (peer, partition) of all damaged answers.
        _quiet: silent peers that the log has told of.
        _latency: from the question to the arrival of all bytes; failures are its errors.
        _fetcher: who fetches beside us; None for nobody.
        rank: our own; timeout_s: how long an answer may take.
    """

    name = Source.REMOTE

    def __init__(
        self, peers: Peers, placement: Placement, hosts: Sequence[str], statistics: Statistics, timeout_s: float
    ) -> None:
        """``hosts`` are the names of all ranks' nodes, for people; ``statistics`` get the section ``peers``."""
        self._peers = peers
        self._hosts = hosts
        self.rank = peers.rank
        self.timeout_s = timeout_s
        self._others = [tuple(rank for rank in ranks if rank != peers.rank) for ranks in placement.holders]
        self._counters = {rank: PeerCounters() for rank in range(peers.size) if rank != peers.rank}
        self._refused_ns: dict[tuple[int, int], int] = {}
        self._damaged: set[tuple[int, int]] = set()
        self._quiet: set[int] = set()
        self._latency = OperationStatistics()
        self._large = trio.Semaphore(LARGE_FETCHES)
        self._fetcher: Fetcher | None = None
        self.last_resort = _AnyPeer(self)
        statistics.add_section("peers", self.statistics)

    def has(self, partition: int) -> bool:
        """Is there a peer worth asking for this partition now?"""
        for peer in self._others[partition]:  # noqa: SIM110 (any() takes three times as long, and this is in each read)
            if self._is_worth_asking(peer, partition):
                return True
        return False

    def has_holders(self, partition: int) -> bool:
        """Are there other nodes that should have this partition, or had it? Once true, always; from any thread."""
        return bool(self._others[partition])

    def add_holder(self, partition: int, peer: int) -> None:
        """A peer has got a copy of this partition."""
        self._refused_ns.pop((peer, partition), None)
        if peer not in self._others[partition]:
            self._others[partition] = tuple(sorted((*self._others[partition], peer)))
        self._route(partition)

    def answers(self, peer: int) -> bool:
        """Is there no reason not to ask this peer?"""
        return not (self._peers.is_lost(peer) or self._peers.is_silent(peer))

    def is_damaged(self, peer: int, partition: int) -> bool:
        """Has this peer given damaged bytes of the partition?"""
        return (peer, partition) in self._damaged

    async def fetch_range(self, peer: int, partition: int, offset: int, length: int) -> memoryview:
        """Bytes of a partition from this peer, as they are stored and not checked: to be copied. Raises PeerError."""
        limit_s = trio.current_time() + BRING_LIMIT_S
        while True:
            try:
                data = await self._ask(peer, partition, offset, length, COPY_LIMIT_S)
                break
            except PeerBusyError:
                if trio.current_time() > limit_s:
                    raise
        self._counters[peer].fetches += 1
        self._counters[peer].fetched_bytes += length
        return data

    @property
    def exchange(self) -> _native.Exchange | None:
        """With which somebody else can fetch; None if the transport has none."""
        return self._peers.exchange

    def share_with(self, fetcher: Fetcher) -> None:
        """From now on somebody else fetches as well."""
        self._fetcher = fetcher
        for partition in range(len(self._others)):
            self._route(partition)

    def _route(self, partition: int) -> None:
        """What is known of this partition has changed."""
        if self._fetcher is not None:
            self._fetcher.route(
                partition,
                [
                    peer
                    for peer in self._others[partition]
                    if (peer, partition) not in self._refused_ns and (peer, partition) not in self._damaged
                ],
            )

    def note_failure(self, failure: Failure, peer: int, partition: int) -> None:
        """A fetch of the fetcher has failed; whoever waits for it comes here next."""
        counters = self._counters[peer]
        match failure:
            case Failure.SILENT:
                counters.timeouts += 1
                self._report_silence(peer, self.timeout_s)
            case Failure.LOST:
                counters.lost += 1
            case Failure.REFUSED:
                self._note_refusal(peer, partition)
            case Failure.DAMAGED:
                self._report_damage(peer, partition, CorruptDataError("they do not match their checksum"))

    def _note_refusal(self, peer: int, partition: int) -> None:
        self._counters[peer].refused += 1
        self._refused_ns[peer, partition] = time.monotonic_ns()
        self._route(partition)

    async def read(
        self, partition: int, offset: int, length: int, check: Check, *, last_resort: bool = False
    ) -> Stored:
        """As PartitionSource has it: from the first peer whose bytes pass the check.

        ``last_resort``: ask also those that are not worth asking, since there is no other source left.
        """
        if length > LARGE_BYTES:
            async with self._large:
                return await self._read(partition, offset, length, check, last_resort)
        return await self._read(partition, offset, length, check, last_resort)

    async def _read(self, partition: int, offset: int, length: int, check: Check, last_resort: bool) -> Stored:
        limit_s = trio.current_time() + BRING_LIMIT_S
        while True:
            try:
                return await self._read_now(partition, offset, length, check, last_resort, limit_s)
            except PeerBusyError:
                if trio.current_time() > limit_s:
                    raise

    async def _read_now(
        self, partition: int, offset: int, length: int, check: Check, last_resort: bool, limit_s: float
    ) -> Stored:
        """Each peer once; ``limit_s``: when whoever says that it brings the bytes has taken too long."""
        refusals = 0
        busy: PeerBusyError | None = None
        for peer in self._candidates(partition, offset, last_resort):
            counters = self._counters[peer]
            start_ns = time.perf_counter_ns()
            try:
                stored = await self._ask(peer, partition, offset, length, self.timeout_s)
            except PeerBusyError as error:
                busy = error  # another one may have it
                if trio.current_time() > limit_s:  # its file server hangs, perhaps: others do not wait as long again
                    self._refused_ns[peer, partition] = time.monotonic_ns() + int(BRING_LIMIT_S * 1e9)
                    self._route(partition)
                continue
            except PeerError as error:
                self._latency.record(time.perf_counter_ns() - start_ns, failed=True)
                refusals += isinstance(error, PeerRefusedError)
                if refusals == MAX_REFUSALS and not last_resort:
                    break
                continue
            self._latency.record(time.perf_counter_ns() - start_ns)
            try:
                checked = check(stored)  # here: 4 MiB take 0.1 ms, as long as to hand them to a worker and back
            except CorruptDataError as error:
                self._report_damage(peer, partition, error)
                continue
            counters.fetches += 1
            counters.fetched_bytes += length
            return checked
        if busy is not None:
            raise busy
        raise PeerError(f"no other node could give these bytes of partition {partition}")

    async def _ask(self, peer: int, partition: int, offset: int, length: int, timeout_s: float) -> memoryview:
        """One peer, once; what goes wrong is noted. Raises PeerError."""
        try:
            stored = await self._peers.fetch(peer, partition, offset, length, timeout_s)
        except PeerTimeoutError:
            self._counters[peer].timeouts += 1
            self._report_silence(peer, timeout_s)
            raise
        except PeerLostError:
            self._counters[peer].lost += 1
            raise
        except PeerRefusedError:
            self._note_refusal(peer, partition)
            raise
        if self._quiet:
            self._report_life(peer)
        return stored

    async def watch(self) -> None:
        """Ask silent peers for a sign of life now and then, so that no reader has to. Runs until it is cancelled.

        Most come back by themselves, with their late answers; this is for those that nobody waits for any more.
        """
        wait_s: dict[int, float] = {}
        due_s: dict[int, float] = {}
        while True:
            await trio.sleep(WATCH_S)
            for peer in self._counters:
                if self._peers.is_lost(peer) or not self._peers.is_silent(peer):
                    wait_s.pop(peer, None)
                    due_s.pop(peer, None)
                    if peer in self._quiet:
                        self._report_life(peer)
                elif trio.current_time() >= due_s.get(peer, 0.0):
                    await self._ask_for_life(peer)
                    wait_s[peer] = min(2 * wait_s.get(peer, WATCH_S / 2), WATCH_LONGEST_S)
                    due_s[peer] = trio.current_time() + wait_s[peer]

    async def _ask_for_life(self, peer: int) -> None:
        try:
            await self._peers.fetch(peer, 0, 0, 1, self.timeout_s)
        except PeerError as error:
            log.debug("rank %d: %s", peer, error)  # a refusal is a sign of life, too, and the transport knows it

    def _is_worth_asking(self, peer: int, partition: int) -> bool:
        if self._peers.is_lost(peer) or self._peers.is_silent(peer):
            return False
        if not self._refused_ns:
            return True
        refused_ns = self._refused_ns.get((peer, partition))
        if refused_ns is None:
            return True
        if time.monotonic_ns() - refused_ns < REFUSAL_NS:
            return False
        del self._refused_ns[peer, partition]
        self._route(partition)
        return True

    def _candidates(self, partition: int, offset: int, last_resort: bool) -> Sequence[int]:
        """The peers to ask, the best first."""
        others = self._others[partition]
        if last_resort:
            # What is known of silent peers and refusals must not keep the last copy from being found.
            found = [
                peer for peer in others if not self._peers.is_lost(peer) and (peer, partition) not in self._damaged
            ]
            return sorted(found, key=self._peers.is_silent)
        candidates = [peer for peer in others if self._is_worth_asking(peer, partition)]
        if len(candidates) > 1:
            # Neighbouring files and neighbouring ranks begin with different holders. Offsets are multiples of 512, and
            # those of large files of 4 MiB, so all of their bits are mixed (Knuth's multiplicative hash).
            start = (((offset >> 9) * 0x9E3779B1 >> 16) + partition + self._peers.rank) % len(candidates)
            candidates = candidates[start:] + candidates[:start]
            if self._damaged:
                candidates.sort(key=lambda peer: (peer, partition) in self._damaged)
        return candidates

    def _report_silence(self, peer: int, timeout_s: float) -> None:
        if peer not in self._quiet:
            self._quiet.add(peer)
            log.warning(
                "rank %d (%s) did not answer within %g s; others are asked until it does",
                peer,
                self._hosts[peer],
                timeout_s,
            )

    def _report_life(self, peer: int) -> None:
        if peer in self._quiet:
            self._quiet.remove(peer)
            if not self._peers.is_lost(peer):
                log.info("rank %d (%s) answers again", peer, self._hosts[peer], extra=NOTABLE)

    def _report_damage(self, peer: int, partition: int, error: CorruptDataError) -> None:
        """One line per peer and partition, not one per chunk."""
        self._counters[peer].damaged += 1
        if (peer, partition) not in self._damaged:
            self._damaged.add((peer, partition))
            self._route(partition)
            log.warning(
                "rank %d (%s) gave damaged bytes of partition %d: %s; other copies are preferred from now on",
                peer,
                self._hosts[peer],
                partition,
                error,
            )

    def statistics(self) -> dict[str, object]:
        """What stats.json says of the peers."""
        all_counters = {peer: replace(counters) for peer, counters in self._counters.items()}
        if self._fetcher is not None:
            by_rank, _ = self._fetcher.fetched()
            for peer, counters in all_counters.items():
                counters.fetches += by_rank[peer][0]
                counters.fetched_bytes += by_rank[peer][1]
        nodes: list[Mapping[str, object]] = [
            {"rank": peer, "host": self._hosts[peer], "state": self._state(peer), **asdict(counters)}
            for peer, counters in all_counters.items()
        ]
        return {"nodes": nodes, "latency_us": self.latency().latency_us(), "transport": self._peers.statistics()}

    def latency(self) -> OperationStatistics:
        """From the question to the arrival of all bytes, or to the failure."""
        latency = self._latency.copy()
        if self._fetcher is not None:
            latency.add(*self._fetcher.fetched()[1])
        return latency

    def _state(self, peer: int) -> str:
        if self._peers.is_lost(peer):
            return "lost"
        return "silent" if self._peers.is_silent(peer) else "alive"

    def validate(self) -> None:
        """Check the invariants when nothing is being fetched; for tests."""
        self._latency.validate()
        assert self._large.value == LARGE_FETCHES
        assert all(self._peers.rank not in others for others in self._others)
        assert all(peer in self._others[partition] for peer, partition in self._refused_ns)
        assert all(peer in self._others[partition] for peer, partition in self._damaged)


class _AnyPeer:
    """The last source that is left."""

    name = Source.REMOTE

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def read(self, partition: int, offset: int, length: int, check: Check) -> Stored:
        return await self._remote.read(partition, offset, length, check, last_resort=True)
