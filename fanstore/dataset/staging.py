"""Staging: copies partitions to this node's disk with large sequential reads, and checks them on the way.

Owns the copying, and its order: what somebody has asked for first comes first, and what is fetched ahead of readers is
asked for in the order in which they will want it. What was brought for somebody already (partial_copies.py) is not read
again. The directory belongs to the caller (job/job_directory.py), what is to be copied is decided by
placement.py or, on a single node, by what fits, and the store serves each copy from the moment it is complete, so that
reads may go on meanwhile. Used by the session of a mount. ``stage`` blocks, so it runs in a thread; it starts threads
of its own, which touch the store, the statistics and the report only through calls that are allowed from any thread.
"""

import contextlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fanstore.dataset.capacity import room_for
from fanstore.dataset.kept_copies import KeptCopies
from fanstore.dataset.partial_copies import NO_ROOM, CopyEndedError, PartialCopy
from fanstore.dataset.source import PreparedSource
from fanstore.dataset.sources import prepared_source
from fanstore.dataset.store import PartitionStore
from fanstore.errors import CorruptDataError
from fanstore.format.checksum import Hasher
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import BLOCK_BYTES, Stored
from fanstore.telemetry.statistics import Statistics
from fanstore.units import format_bytes

log = logging.getLogger(__name__)

#: Seconds between two looks whether another job on this node has finished a partition that we want as well.
_LOOK_S = 0.05


#: Told of what is done: bytes, and entries, as many as the bytes of a partition let expect until all of it is there.
#: Negative if it came to nothing. Called from any thread.
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class StagingResult:
    """What became of each partition; every number of a partition to be staged is in exactly one of these."""

    verified: tuple[int, ...]  #: copied, checksum right
    unverified: tuple[int, ...]  #: copied, checksum wrong: each chunk is checked when it is read
    failed: tuple[int, ...]  #: could not be copied
    skipped: tuple[int, ...]  #: no room
    stopped: tuple[int, ...]  #: not done because ``stop`` was set
    reused: tuple[int, ...]  #: another job on this node has copied it meanwhile, and kept it


def local_name(partition: int) -> str:
    """Name of the copy: made from the number alone, since two external partitions may have the same file name."""
    return f"part-{partition:05d}.tar"


def reuse(
    store: PartitionStore, directory: Path, kept: KeptCopies, partitions: Collection[int], statistics: Statistics
) -> int:
    """Serve these partitions from copies that earlier jobs have kept, as far as there are any; how many there are.

    What cannot be used is left to ``stage``. Their bytes are checked when they are first read, not here.
    """
    infos = store.prepared.manifest.partitions
    wanted = sorted(partitions)
    used = 0
    try:
        found = kept.find([infos[partition] for partition in wanted])
    except OSError as error:
        log.warning("%s cannot be read, so nothing in it is used: %s", kept.path, error.strerror)
        return 0
    for number, copy in found.items():
        partition = wanted[number]
        target = directory / local_name(partition)
        try:
            if kept.take(copy, target):
                store.use_local(partition, target, verified=False)
                statistics.add_staging(reused_partitions=1, reused_bytes=infos[partition].bytes)
                used += 1
        except OSError as error:
            log.warning("the kept copy %s cannot be used: %s", copy.name, error.strerror or error)
            target.unlink(missing_ok=True)
    return used


def begin_copies(
    prepared: PreparedDataset,
    store: PartitionStore,
    directory: Path,
    partitions: Sequence[int],
    kept: KeptCopies | None = None,
) -> None:
    """These partitions will be staged: from now on what is wanted of them is read into their copies.

    There can be less room than at the start, by a quota, which nothing tells before, or others that write to this disk:
    then ``kept`` makes some.
    """
    source = prepared_source(store)
    make_room = kept.make_room if kept is not None else None
    for partition in partitions:
        if store.partial(partition) is None:
            partial = (directory / local_name(partition)).with_suffix(".partial")
            length = prepared.manifest.partitions[partition].bytes
            store.begin_copy(PartialCopy(partition, length, partial, source, make_room))


def stage(
    prepared: PreparedDataset,
    store: PartitionStore,
    directory: Path,
    report: Report | None = None,
    jobs: int = 4,
    stop: threading.Event | None = None,
    statistics: Statistics | None = None,
    partitions: Sequence[int] | None = None,
    kept: KeptCopies | None = None,
) -> StagingResult:
    """Copy partitions into ``directory`` and let the store serve them from there.

    ``partitions`` are copied in the order given (``Placement.staging_order``), but for those that somebody has asked
    for; that there is room for them was decided before. Without it these are all that fit.

    ``kept``: where verified copies are to stay for later jobs. What another job on this node copies at the same time is
    waited for, and used.

    Never raises for a partition that cannot be copied: it is read where it is, and one WARNING says why. ``stop`` ends
    it within one block per thread; partitions that are complete by then stay in use.
    """
    stop, statistics = stop or threading.Event(), statistics or Statistics()
    work = _Staging(prepared, store, directory, report, stop, statistics, kept)
    return work.run(jobs, partitions)


class _Staging:
    """One run of ``stage``.

    Attributes:
        _waiting: partitions that were not begun; _outcome: what became of each so far, by field of StagingResult. Both
            guarded by ``_lock``.
        _busy: what another job is copying to ``_kept``, to be looked at again; guarded by ``_lock``.
        _full: set when the disk turned out to be full: what was not begun yet is not tried.
    """

    def __init__(
        self,
        prepared: PreparedDataset,
        store: PartitionStore,
        directory: Path,
        report: Report | None,
        stop: threading.Event,
        statistics: Statistics,
        kept: KeptCopies | None,
    ) -> None:
        self._prepared = prepared
        self._store = store
        self._source = prepared_source(store)
        self._directory = directory
        self._report = report
        self._stop = stop
        self._statistics = statistics
        self._kept = kept
        self._busy: list[int] = []
        self._full = threading.Event()
        self._lock = threading.Lock()
        self._waiting: list[int] = []
        self._outcome: dict[str, list[int]] = {name: [] for name in StagingResult.__dataclass_fields__}

    def run(self, jobs: int, partitions: Sequence[int] | None) -> StagingResult:
        chosen = partitions if partitions is not None else self._choose()
        begin_copies(self._prepared, self._store, self._directory, chosen, self._kept)
        self._waiting = list(chosen)
        infos = self._prepared.manifest.partitions
        self._statistics.add_staging(partitions=len(chosen), bytes=sum(infos[p].bytes for p in chosen))
        with ThreadPoolExecutor(max(1, jobs), thread_name_prefix="staging") as pool:
            try:
                while self._waiting:
                    for future in [pool.submit(self._work) for _ in range(max(1, jobs))]:
                        future.result()
                    self._waiting, self._busy = self._busy, []
                    if self._waiting:
                        self._stop.wait(_LOOK_S)
            except BaseException:
                self._stop.set()  # Ctrl-C, or a bug: the threads end at their next block, and the pool waits for them
                raise
        return StagingResult(**{name: tuple(sorted(numbers)) for name, numbers in self._outcome.items()})

    def _choose(self) -> list[int]:
        """The partitions that fit on the disk, those for every node first."""
        infos = self._prepared.manifest.partitions
        room = limit = room_for(self._directory)
        chosen = []
        for partition in sorted(range(len(infos)), key=lambda p: not infos[p].everywhere):
            if infos[partition].bytes <= room:
                room -= infos[partition].bytes
                chosen.append(partition)
            else:
                self._outcome["skipped"].append(partition)
        skipped = self._outcome["skipped"]
        if skipped:
            self._statistics.add_staging(skipped_partitions=len(skipped))
            log.warning(
                "%d of %d partitions (%s) do not fit in %s, which has room for %s; they are read where they are",
                len(skipped),
                len(infos),
                format_bytes(sum(infos[p].bytes for p in skipped)),
                self._directory,
                format_bytes(limit),
            )
        return chosen

    def _work(self) -> None:
        """One thread: copy what is wanted most, until nothing is left."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                partition = min(self._waiting, key=self._asked_s)  # of those that nobody has asked for, the first
                self._waiting.remove(partition)
            self._stage_one(partition)

    def _asked_s(self, partition: int) -> float:
        copy = self._store.partial(partition)
        return math.inf if copy is None or copy.asked_s is None else copy.asked_s

    def _stage_one(self, partition: int) -> None:
        """Copy one partition and use it; whatever happens, exactly one outcome."""
        if self._stop.is_set():
            self._settle("stopped", partition)
            return
        if self._full.is_set():
            self._settle("skipped", partition)
            self._statistics.add_staging(partitions=-1, skipped_partitions=1)
            return
        if self._kept is None:
            self._copy_one(partition)
            return
        info = self._prepared.manifest.partitions[partition]
        with self._kept.copying(info) as copying:
            if not copying.alone:
                with self._lock:
                    self._busy.append(partition)
            elif reuse(self._store, self._directory, self._kept, [partition], self._statistics):
                self._settle("reused", partition)
                self._statistics.add_staging(partitions=-1, bytes=-info.bytes)
                if self._report is not None:
                    self._report(info.bytes, info.entries)
            elif self._copy_one(partition, copying.go_on):
                self._kept.add(info, self._directory / local_name(partition))

    def _copy_one(self, partition: int, go_on: Callable[[], None] = lambda: None) -> bool:
        """Copy one partition and use it; is it verified? Whatever happens, exactly one outcome.

        ``go_on`` is called after each block.
        """
        copy = self._store.partial(partition)
        assert copy is not None
        target = self._directory / local_name(partition)
        try:

            def count(length: int, entries: int) -> None:
                go_on()
                self._count(length, entries)

            filled = Filling(copy, self._prepared, self._source, self._stop, count).run()
            if filled is None:
                self._settle("stopped", partition)
                return False
            length, verified = filled
            copy.finish(target, length)
            self._store.use_local(partition, target, verified)
        except OSError as error:
            if error.errno in NO_ROOM:
                self._full.set()
            self._settle("failed", partition)
            self._statistics.add_staging(failed_partitions=1)
            log.warning(
                "partition %s cannot be copied to %s, it is read where it is: %s",
                self._prepared.partition_label(partition),
                self._directory,
                error.strerror or error,
            )
            return False
        if verified:
            self._settle("verified", partition)
            self._statistics.add_staging(done_partitions=1)
        else:
            self._settle("unverified", partition)
            self._statistics.add_staging(unverified_partitions=1)
            log.warning(
                "partition %s does not match its checksum; each of its files is checked when it is read",
                self._prepared.partition_label(partition),
            )
        return verified

    def _settle(self, outcome: str, partition: int) -> None:
        self._store.end_copy(partition)  # unless it is in use by now
        with self._lock:
            self._outcome[outcome].append(partition)

    def _count(self, copied_bytes: int, entries: int) -> None:
        self._statistics.add_staging(done_bytes=copied_bytes)
        if self._report is not None:
            self._report(copied_bytes, entries)


class Filling:
    """The filling of one copy: what is missing of it, in order, and the checksum of all.

    Attributes:
        _done: up to where the copy is here, checked and counted; _entries: as many as that lets expect, counted.
        _taken: what this has taken on and was not written yet, in order.
    """

    def __init__(
        self,
        copy: PartialCopy,
        prepared: PreparedDataset,
        source: PreparedSource,
        stop: threading.Event,
        count: Callable[[int, int], None],
    ) -> None:
        self._copy = copy
        self._info = prepared.manifest.partitions[copy.partition]
        self._source = source
        self._stop = stop
        self._count = count
        self._hasher = Hasher()
        self._done = 0
        self._entries = 0
        self._taken: deque[tuple[int, int]] = deque()

    def run(self) -> tuple[int, bool] | None:
        """The bytes of the copy, and whether their checksum is right; None if it was stopped. Raises OSError."""
        try:
            with contextlib.closing(self._source.stream(self._copy.partition, self._take())) as blocks:
                if not self._put(blocks):
                    return None
        except CorruptDataError as error:  # likewise the end of one that is shorter
            log.debug("partition %d: %s", self._copy.partition, error)
        except CopyEndedError as error:
            if self._copy.problem is None:
                return None  # the node gives it up
            self._count(-self._done, -self._entries)
            raise self._copy.problem from error
        except OSError:
            self._count(-self._done, -self._entries)  # what had been done does not count
            raise
        finally:
            for offset, length in self._taken:
                self._copy.let_go(offset, length)
        self._source.forget(self._copy.partition)
        self._count(0, self._info.entries - self._entries)
        # One that is shorter: the checksum cannot be right, and reads of what is missing say so.
        return self._done, self._done == self._info.bytes and self._hasher.intdigest() == self._info.checksum

    def _take(self) -> Iterator[tuple[int, int]]:
        for missing in self._copy.take_missing(self._source.stride):
            self._taken.append(missing)
            yield missing

    def _put(self, blocks: Iterable[memoryview]) -> bool:
        """Write what comes, and look at all that is here; false if it was stopped."""
        written = 0
        for block in blocks:
            offset, length = self._taken[0]
            if not self._pass_over(offset):
                return False
            self._copy.write(offset + written, block)
            self._note(block)
            written += len(block)
            if written == length:
                self._taken.popleft()
                self._copy.settle(offset, length)
                written = 0
        # If something taken on did not come, the file ends there.
        return self._pass_over(self._taken[0][0] if self._taken else self._info.bytes)

    def _pass_over(self, end: int) -> bool:
        """What others have brought, or are bringing, or could not bring; false if it was stopped."""
        while self._done < end and not self._stop.is_set():
            self._note(self._copy.gather(self._done, min(BLOCK_BYTES, end - self._done)))
        return not self._stop.is_set()

    def _note(self, block: Stored) -> None:
        self._hasher.update(block)
        self._done += len(block)
        more = self._info.entries * self._done // self._info.bytes - self._entries
        self._entries += more
        self._count(len(block), more)


def write_all(fd: int, block: memoryview) -> None:
    """Write a block to the end of it. Raises OSError."""
    while block:
        block = block[os.write(fd, block) :]
