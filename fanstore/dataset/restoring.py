"""Copies a partition again, after a death: from another node or from the prepared dataset, slowly, and checked.

Owns the copying of one partition to this node's disk; who copies what, and from whom, is decided by copies.py. Unlike
staging (staging.py), which has the job's start for itself, this goes on beside programs that read: one range is under
way at a time, and after each there is a pause. Trio thread; the disk and the shared file system in worker threads.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from fanstore import _native
from fanstore.dataset.capacity import survey
from fanstore.dataset.kept_copies import Keeping
from fanstore.dataset.sources import prepared_source
from fanstore.dataset.staging import local_name, reuse, write_all
from fanstore.dataset.store import PartitionStore
from fanstore.errors import CorruptDataError, SourceError
from fanstore.format.checksum import Hasher
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import Stored
from fanstore.telemetry.statistics import Statistics

#: Bytes that are asked for at once: long enough that a disk and a link are used well, and short enough that a file for
#: which somebody waits, and that comes behind it, does not wait for long.
RANGE_BYTES = 1 << 20

#: Of the time of a node one part in so many is spent on copying, as the one that gives: a range, then a pause that is
#: three times as long. Readers have the rest of whatever is scarce: link, disks or cores. Measured on a busy machine:
#: 0.75 of their speed before the death, 0.80 if nothing is copied, 0.29 without pauses (restore-copies-busy).
PARTS = 4.0

#: Gives bytes of the partition: offset, length. Raises FanstoreError.
Read = Callable[[int, int], Awaitable[Stored]]


class Copier:
    """Brings partitions to the disk of this node.

    Attributes:
        progress_bytes: of the partition that is being copied, what is here. storage: what the prepared dataset is in.
        _directory: where copies go. _outputs: programs write to the same disk.
        _keeping: copies that earlier jobs have kept on this disk.
    """

    def __init__(
        self,
        prepared: PreparedDataset,
        store: PartitionStore,
        directory: Path,
        outputs: Callable[[], bool],
        statistics: Statistics | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        self.progress_bytes = 0
        self.storage = prepared.storage.words
        self._prepared = prepared
        self._store = store
        self._source = prepared_source(store)
        self._directory = directory
        self._outputs = outputs
        self._statistics = statistics or Statistics()
        self._keeping = keeping

    async def take_kept(self, partition: int) -> bool:
        """Serve a partition from a copy that an earlier job has kept here, if there is one."""
        if self._keeping is None or not self._keeping.keeps:
            return False
        parts = (self._store, self._directory, self._keeping.copies, [partition], self._statistics)
        return bool(await trio.to_thread.run_sync(reuse, *parts))

    async def copy(self, partition: int, read: Read, *, crowd: float = 1.0, strict: bool = True) -> bool:
        """Copy a partition and let the store serve it from here; does it match its checksum?

        ``crowd``: how many nodes copy from the same source at a time, which share what there is for copying. With
        ``strict`` one that does not match is CorruptDataError. Raises what ``read`` raises, and OSError if it cannot be
        written. Then nothing is left of it.
        """
        info = self._prepared.manifest.partitions[partition]
        target = self._directory / local_name(partition)
        partial = target.with_suffix(".partial")
        fd = await trio.to_thread.run_sync(self._begin, partial, info.bytes)
        hasher = Hasher()

        def append(block: Stored, offset: int) -> None:
            hasher.update(block)
            write_all(fd, memoryview(block))
            _native.start_writing(fd, offset, len(block))

        def use(verified: bool) -> None:
            os.rename(partial, target)
            try:
                self._store.use_local(partition, target, verified)
            except OSError:
                target.unlink()
                raise
            if verified and self._keeping is not None and self._keeping.keeps:
                self._keeping.copies.add(info, target)

        def end() -> None:
            os.close(fd)
            partial.unlink(missing_ok=True)

        try:
            for offset in range(0, info.bytes, RANGE_BYTES):
                start_s = trio.current_time()
                block = await read(offset, min(RANGE_BYTES, info.bytes - offset))
                await trio.to_thread.run_sync(append, block, offset)
                self.progress_bytes += len(block)
                await trio.sleep(max(0.0, PARTS * crowd - 1) * (trio.current_time() - start_s))
            verified = hasher.intdigest() == info.checksum
            if strict and not verified:
                raise CorruptDataError("it does not match its checksum")
            await trio.to_thread.run_sync(use, verified)
            return verified
        finally:
            self.progress_bytes = 0
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(end)

    def _begin(self, partial: Path, wanted_bytes: int) -> int:
        """In a thread: a descriptor for the copy, if there is room for it."""
        if self._keeping is not None:
            self._keeping.make_room(wanted_bytes)
        # What was free at the start may be in use by now, for outputs or by others.
        if survey(self._directory, outputs=self._outputs()).free_bytes < wanted_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    async def copy_from_prepared(self, partition: int) -> bool:
        """As ``copy``, from the prepared dataset; not strict, as staging. Raises SourceError if it cannot be read."""

        async def read(offset: int, length: int) -> Stored:
            # Abandoned when we are cancelled: a server that hangs must not keep the daemon from its end.
            try:
                return await trio.to_thread.run_sync(
                    self._source.read_range, partition, offset, length, abandon_on_cancel=True
                )
            except OSError as error:
                raise SourceError(error.strerror or str(error)) from error
            except CorruptDataError as error:
                raise SourceError(str(error)) from error

        return await self.copy(partition, read, strict=False)
