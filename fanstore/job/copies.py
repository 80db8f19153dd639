"""Which node has a copy of which partition, and the restoring of copies when nodes have died.

Owns what this node knows of the copies of all nodes, what it has taken upon itself to copy again, and from whom. Who
copies what is a pure function of that (``restore`` of placement.py), the copying itself is restoring.py's. Used by
node.py and, for what other nodes say, by job.py. Trio thread only.

Nobody is in charge: each node computes who copies what from what it knows, and does its own part. It tells all others
what it takes upon itself (``take``), what it then has (``have``), and what it cannot have (``drop``). A node speaks of
itself only, so what was said by those that are alive reaches all of them, in whatever order they learn of deaths; what
was said by the dead does not count. Until then two nodes may differ. Then a copy too many is made, which harms nobody,
or each thinks that another one makes it: what nobody has taken after a while has all compute anew, and so has whatever
makes copies fewer, a death or a ``drop``.

A copy comes from the nodes that have one. Only if no node has any more, it comes from the shared file system.
"""

from __future__ import annotations

import errno
import functools
import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import trio

from fanstore.dataset.placement import Placement, restore
from fanstore.dataset.remote import Remote
from fanstore.dataset.restoring import Copier
from fanstore.errors import CorruptDataError, SourceError
from fanstore.telemetry.events import NOTABLE
from fanstore.transport.peers import PeerError, Peers
from fanstore.units import format_bytes, format_count, format_duration

log = logging.getLogger(__name__)

#: Seconds from a death to the plan what to copy: deaths that have one cause come one after the other, and all nodes
#: hear of each within a fraction of that (docs/protocol.md, Death).
SETTLE_S = 1.0

#: Seconds until a partition is tried again that those who should have it do not give now: they are still staging it, or
#: are silent.
RETRY_S = 1.0

#: Partitions in one word to all; their numbers have at most 10 digits.
_WORD_PARTITIONS = 5000

TAKE, HAVE, DROP = b"take", b"have", b"drop"


@dataclass
class CopyStatistics:
    """What this node has copied again, and what all nodes have still to copy, as far as is known here."""

    partitions: int = 0  #: that this node has taken upon itself so far
    bytes: int = 0  #: of these
    done_partitions: int = 0  #: of these, on its disk
    done_bytes: int = 0  #: copied so far
    failed_partitions: int = 0  #: could not be copied here: no room, or no source
    shared_bytes: int = 0  #: of ``done_bytes``, from the shared file system
    missing_copies: int = 0  #: on all nodes, still to be made
    missing_bytes: int = 0  #: of these
    unplaced_partitions: int = 0  #: with fewer copies than before, for which no disk has room


class Copies:
    """The copies of all partitions, as one node knows them.

    Attributes:
        _have: per partition, the ranks that have it, or are staging it; those that have died included.
        _taken: per partition, the ranks that have said that they copy it, and have not done so yet.
        _barred: (rank, partition) of those that have said that they cannot have it.
        _bad: (rank, partition) of copies that did not match their checksum.
        _lost: ranks that have died; _planned: those of which the last plan knew; _planned_s: when it was made.
        _is_stale: copies have become fewer since the last plan.
        _is_restoring: the log has told of copies that are to be made, and not of their end.
        _targets: by partition, how many copies the last plan wants of it; only of those that have fewer.
        _own: what is to be copied here, the next one first.
        _copier: None if nothing is kept here.
    """

    def __init__(
        self, peers: Peers, remote: Remote, placement: Placement, hosts: Sequence[str], copier: Copier | None
    ) -> None:
        self._peers = peers
        self._rank = peers.rank
        self._remote = remote
        self._placement = placement
        self._hosts = hosts
        self._copier = copier
        self._have = [set(ranks) for ranks in placement.holders]
        self._taken: list[set[int]] = [set() for _ in placement.holders]
        self._barred: set[tuple[int, int]] = set()
        self._bad: set[tuple[int, int]] = set()
        self._lost: set[int] = set()
        self._planned: set[int] = set()
        self._planned_s = 0.0
        self._is_stale = False
        self._is_restoring = False
        self._targets: dict[int, int] = {}
        self._own: deque[int] = deque()
        self._changed = trio.Event()
        self._unplaced: list[int] = []
        self._has_said_full = False
        self._counters = CopyStatistics()

    # --- what others say ---

    def lost(self, rank: int) -> None:
        """A node has died."""
        self._lost.add(rank)
        self._note_fewer()

    def heard(self, rank: int, word: bytes) -> bool:
        """A node has said something of its copies; false if it was something else."""
        what, *numbers = word.split()
        if what not in (TAKE, HAVE, DROP):
            return False
        self._note(rank, what, map(int, numbers))
        return True

    def _tell(self, what: bytes, partitions: Sequence[int]) -> None:
        """Note something of our own copies, and tell all others."""
        self._note(self._rank, what, partitions)
        for start in range(0, len(partitions), _WORD_PARTITIONS):
            numbers = partitions[start : start + _WORD_PARTITIONS]
            self._peers.tell(b" ".join([what, *(b"%d" % number for number in numbers)]))

    def _note(self, rank: int, what: bytes, partitions: Iterable[int]) -> None:
        for partition in partitions:
            if what == TAKE:
                self._taken[partition].add(rank)
                continue
            self._taken[partition].discard(rank)
            if what == HAVE:
                self._have[partition].add(rank)
                if self._missing(partition) <= 0:
                    self._targets.pop(partition, None)
                if rank != self._rank:
                    self._remote.add_holder(partition, rank)
            else:
                self._have[partition].discard(rank)
                self._barred.add((rank, partition))
        if what == DROP:
            self._note_fewer()
        elif what == HAVE:
            self._report_end()

    def _note_fewer(self) -> None:
        self._is_stale = True
        self._changed.set()
        self._changed = trio.Event()

    # --- life ---

    async def run(self, lacking: Sequence[int]) -> None:
        """Restore copies, until it is cancelled. Once staging has ended here; ``lacking`` is what it could not copy."""
        if lacking:
            self._tell(DROP, lacking)
        while True:
            changed = self._changed
            if self._lost != self._planned:
                await trio.sleep(SETTLE_S)
            self._plan()
            if not self._own:
                with trio.move_on_after(RETRY_S if self._targets else math.inf):
                    await changed.wait()
            elif not await self._restore(self._own[0]):
                self._own.rotate(-1)
                await trio.sleep(RETRY_S)

    def _missing(self, partition: int) -> int:
        """Copies of it that are still to be made."""
        return self._targets.get(partition, 0) - len(self._have[partition] - self._lost)

    def _copies(self) -> list[set[int]]:
        """Per partition, the ranks alive that have it or copy it."""
        return [(have | taken) - self._lost for have, taken in zip(self._have, self._taken, strict=True)]

    def _plan(self) -> None:
        """See to it that this node copies what falls to it."""
        if not self._lost or not (self._is_stale or self._is_left_undone()):
            return
        self._is_stale = False
        self._planned_s = trio.current_time()
        died = self._lost - self._planned
        self._planned |= died
        copies = self._copies()
        more = restore(self._placement, copies, self._lost, self._barred)
        self._targets = {p: len(now) + len(ranks) for p, (now, ranks) in enumerate(zip(copies, more, strict=True))}
        self._targets = {p: target for p, target in self._targets.items() if self._missing(p) > 0}
        own = [partition for partition, ranks in enumerate(more) if self._rank in ranks]
        if own:
            self._own.extend(own)
            self._counters.partitions += len(own)
            self._counters.bytes += self._bytes(own)
            self._tell(TAKE, own)
        before = len(self._unplaced)
        able = sum(limit > 0 and rank not in self._lost for rank, limit in enumerate(self._placement.room))
        self._unplaced = [
            partition
            for partition, holders in enumerate(self._placement.holders)
            if len(copies[partition]) + len(more[partition]) < min(len(holders), able)
        ]
        busy = set().union(*more, *self._taken) - self._lost
        self._report_plan(sorted(died), len(busy), before)
        self._report_end()

    def _is_left_undone(self) -> bool:
        """Is there something that nobody has taken, well after the plan? Plans of nodes that knew of different deaths
        can each have given it to another one."""
        if trio.current_time() < self._planned_s + SETTLE_S:
            return False
        return any(
            len((self._have[partition] | self._taken[partition]) - self._lost) < target
            for partition, target in self._targets.items()
        )

    async def _restore(self, partition: int) -> bool:
        """Copy a partition here, which is the first of our own; false if that must be tried again later."""
        assert self._copier is not None
        start_s = trio.current_time()
        try:
            source = await self._copy(self._copier, partition)
        except (OSError, SourceError) as error:
            self._own.popleft()
            self._counters.failed_partitions += 1
            self._report_failure(partition, error)
            self._tell(DROP, [partition])
            return True
        if source is None:
            return False
        self._own.popleft()
        self._counters.done_partitions += 1
        self._counters.done_bytes += self._bytes([partition])
        took = format_duration(trio.current_time() - start_s)
        log.info("partition %d was copied again, from %s, in %s", partition, source, took)
        self._tell(HAVE, [partition])
        return True

    async def _copy(self, copier: Copier, partition: int) -> str | None:
        """From where the partition was copied; None if nobody gives it now. Raises OSError, SourceError."""
        if await copier.take_kept(partition):
            return "what an earlier job had kept here"
        for peer in self._sources(partition):
            if not self._remote.answers(peer):
                continue
            try:
                fetch = functools.partial(self._remote.fetch_range, peer, partition)
                await copier.copy(partition, fetch, crowd=self._crowd())
            except PeerError as error:
                log.debug("partition %d: %s", partition, error)  # it has died, is silent, or has it not yet
            except CorruptDataError as error:
                self._bad.add((peer, partition))
                log.warning("partition %d is not copied from rank %d: %s", partition, peer, error)
            else:
                return f"rank {peer} on {self._hosts[peer]}"
        # The shared file system is read once: by the lowest rank of those who copy it, which gives it to the others.
        # Who they are is known a while after the plan.
        is_chosen = min(self._taken[partition] - self._lost) == self._rank
        if self._sources(partition) or not is_chosen or trio.current_time() < self._planned_s + SETTLE_S:
            return None
        if not await copier.copy_from_prepared(partition):
            log.warning("partition %d does not match its checksum; each of its files is checked when read", partition)
        self._counters.shared_bytes += self._bytes([partition])
        return f"the {copier.storage}"

    def _sources(self, partition: int) -> list[int]:
        """The nodes that have a good copy, or will have it; not all begin with the same one."""
        ranks = sorted(
            rank
            for rank in self._have[partition] - self._lost
            if (rank, partition) not in self._bad and not self._remote.is_damaged(rank, partition)
        )
        start = (partition + self._rank) % max(1, len(ranks))
        return ranks[start:] + ranks[:start]

    def _crowd(self) -> float:
        """How many nodes copy from one source now, on average. All that a dead node had may be on one other node."""
        takers: set[int] = set()
        sources: set[int] = set()
        for have, taken in zip(self._have, self._taken, strict=True):
            if alive := taken - self._lost:
                takers |= alive
                sources |= have - self._lost
        return max(1.0, len(takers) / max(1, len(sources)))

    # --- for people ---

    def _bytes(self, partitions: Iterable[int]) -> int:
        return sum(self._placement.partition_bytes[partition] for partition in partitions)

    def _report_plan(self, died: Sequence[int], busy: int, unplaced_before: int) -> None:
        if died and self._targets:
            self._is_restoring = True
            who = f"rank {died[0]} on {self._hosts[died[0]]}"
            if len(died) > 1:
                who = f"ranks {', '.join(map(str, died))}"
            log.info(
                "%s (%s) of %s are copied again, to %s",
                format_count(len(self._targets), "partition"),
                format_bytes(self._bytes(self._targets)),
                who,
                format_count(busy, "node"),
                extra=NOTABLE,
            )
        if len(self._unplaced) > unplaced_before:
            log.warning(
                "%s (%s) have fewer copies than before, and there is no room for more on the local disks",
                format_count(len(self._unplaced), "partition"),
                format_bytes(self._bytes(self._unplaced)),
            )

    def _report_end(self) -> None:
        """If that was the last copy."""
        if self._targets or self._is_stale or not self._is_restoring:
            return
        self._is_restoring = False
        if self._unplaced:
            log.info("all copies are made again for which there is room", extra=NOTABLE)
            return
        fewest = min(len(ranks) for ranks, had in zip(self._copies(), self._placement.holders, strict=True) if had)
        log.info("all partitions have %s again", format_count(fewest, "copy", "copies"), extra=NOTABLE)

    def _report_failure(self, partition: int, error: OSError | SourceError) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            if not self._has_said_full:
                log.warning("there is no room on the disk of this node to copy partitions again")
            self._has_said_full = True
            return
        reason = error.strerror or error if isinstance(error, OSError) else error
        log.warning("partition %d cannot be copied again to this node: %s", partition, reason)

    def statistics(self) -> dict[str, object]:
        """The section ``copies`` of stats.json."""
        counters = asdict(self._counters)
        counters["done_bytes"] += 0 if self._copier is None else self._copier.progress_bytes
        missing = {partition: max(0, self._missing(partition)) for partition in self._targets}
        counters["missing_copies"] = sum(missing.values())
        counters["missing_bytes"] = sum(count * self._bytes([partition]) for partition, count in missing.items())
        counters["unplaced_partitions"] = len(self._unplaced)
        return counters

    def validate(self) -> None:
        """Check the invariants; for tests."""
        assert all(self._rank in self._taken[partition] for partition in self._own)
        assert not any(have & taken for have, taken in zip(self._have, self._taken, strict=True))
        assert self._is_stale or all(self._missing(partition) > 0 for partition in self._targets)
