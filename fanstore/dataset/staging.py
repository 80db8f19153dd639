"""Staging: copies partitions to this node's disk with large sequential reads, and checks them on the way.

Owns the copying; the directory belongs to the caller (job/job_directory.py), what is to be copied is decided by
placement.py or, on a single node, by what fits, and the store serves each copy from the moment it is complete, so that
reads may go on meanwhile. Used by the session of a mount. ``stage`` blocks, so it runs in a thread; it starts threads
of its own, which touch the store, the statistics and the report only through calls that are allowed from any thread.
"""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fanstore import _native
from fanstore.dataset.capacity import room_for
from fanstore.dataset.kept_copies import KeptCopies
from fanstore.dataset.sources import prepared_source
from fanstore.dataset.store import PartitionStore
from fanstore.format.checksum import Hasher
from fanstore.format.prepared import PreparedDataset
from fanstore.telemetry.statistics import Statistics
from fanstore.units import format_bytes

log = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

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

    ``partitions`` are copied in the order given (``Placement.staging_order``); that there is room for them was decided
    before. Without it these are all that fit.

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
        _outcome: what became of each partition so far, by field of StagingResult; guarded by ``_lock``.
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
        self._outcome: dict[str, list[int]] = {name: [] for name in StagingResult.__dataclass_fields__}

    def run(self, jobs: int, partitions: Sequence[int] | None) -> StagingResult:
        chosen = partitions if partitions is not None else self._choose()
        infos = self._prepared.manifest.partitions
        self._statistics.add_staging(partitions=len(chosen), bytes=sum(infos[p].bytes for p in chosen))
        with ThreadPoolExecutor(max(1, jobs), thread_name_prefix="staging") as pool:
            try:
                while chosen:
                    for future in [pool.submit(self._stage_one, partition) for partition in chosen]:
                        future.result()
                    chosen, self._busy = self._busy, []
                    if chosen:
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
        target = self._directory / local_name(partition)
        partial = target.with_suffix(".partial")
        try:
            verified = self._copy_making_room(partition, partial, go_on)
            if verified is None:
                self._settle("stopped", partition)
                return False
            os.rename(partial, target)
            self._store.use_local(partition, target, verified)
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._full.set()
            self._settle("failed", partition)
            self._statistics.add_staging(failed_partitions=1)
            log.warning(
                "partition %s cannot be copied to %s, it is read where it is: %s",
                self._prepared.partition_label(partition),
                self._directory,
                error.strerror or error,
            )
            target.unlink(missing_ok=True)
            return False
        finally:
            partial.unlink(missing_ok=True)
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
        with self._lock:
            self._outcome[outcome].append(partition)

    def _copy_making_room(self, partition: int, partial: Path, go_on: Callable[[], None]) -> bool | None:
        """As ``_copy``; if there is no room, once more when kept copies have made some.

        There can be less than at the start: a quota, which nothing tells before, or others that write to this disk.
        """
        try:
            return self._copy(partition, partial, go_on)
        except OSError as error:
            size = self._prepared.manifest.partitions[partition].bytes
            if error.errno not in _NO_ROOM or self._kept is None or not self._kept.make_room(size):
                raise
        partial.unlink(missing_ok=True)
        return self._copy(partition, partial, go_on)

    def _copy(self, partition: int, partial: Path, go_on: Callable[[], None]) -> bool | None:
        """Copy the bytes of a partition; is the checksum right? None if it was stopped. Raises OSError.

        What had been done does not count then.
        """
        info = self._prepared.manifest.partitions[partition]
        hasher = Hasher()
        done = entries = 0
        try:
            with (
                open(partial, "xb", buffering=0, opener=_private) as copy,
                contextlib.closing(self._source.stream(partition)) as blocks,
            ):
                for block in blocks:
                    if self._stop.is_set():
                        return None
                    hasher.update(block)
                    write_all(copy.fileno(), block)
                    # To the disk meanwhile, not during the first epoch; and only clean pages can be forgotten then.
                    _native.start_writing(copy.fileno(), done, len(block))
                    done += len(block)
                    go_on()
                    more = info.entries * done // info.bytes - entries
                    entries += more
                    self._count(len(block), more)
        except OSError:
            self._count(-done, -entries)
            raise
        self._count(0, info.entries - entries)
        # One that is shorter: the checksum cannot be right, and reads of what is missing say so.
        return done == info.bytes and hasher.intdigest() == info.checksum

    def _count(self, copied_bytes: int, entries: int) -> None:
        self._statistics.add_staging(done_bytes=copied_bytes)
        if self._report is not None:
            self._report(copied_bytes, entries)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def write_all(fd: int, block: memoryview) -> None:
    """Write a block to the end of it. Raises OSError."""
    while block:
        block = block[os.write(fd, block) :]
