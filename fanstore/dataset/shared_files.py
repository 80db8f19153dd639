"""The prepared dataset as a source of stored bytes, if it is in a directory: files of a shared file system.

Used by sources.py, staging.py and restoring.py.
"""

import os
from collections.abc import Generator, Iterable

import trio

from fanstore.dataset.source import PreparedSource
from fanstore.dataset.store import PartitionStore
from fanstore.format.storage import BLOCK_BYTES, advise, blocks_of
from fanstore.telemetry.statistics import Source


class SharedFiles(PreparedSource):
    """The partition files, where fanstore-prep has written them."""

    name = Source.SHARED
    stride = BLOCK_BYTES

    def __init__(self, store: PartitionStore, limiter: trio.CapacityLimiter) -> None:
        super().__init__(limiter)
        self._store = store

    def read_range(self, partition: int, offset: int, length: int) -> bytes:
        return self._store.read(partition, offset, length, prepared=True)

    def label(self, partition: int) -> str:
        return f"partition file {self._store.prepared.partition_label(partition)}"

    def stream(
        self, partition: int, ranges: Iterable[tuple[int, int]] | None = None
    ) -> Generator[memoryview, None, None]:
        if ranges is None:
            ranges = ((0, self._store.prepared.manifest.partitions[partition].bytes),)
        # The descriptor of those who read ranges: a file that is opened once more may lose what is in memory of it.
        file = self._store.acquire(partition, prepared=True)
        try:
            yield from blocks_of(file.fd, ranges)
        finally:
            self._store.release(file)

    def forget(self, partition: int) -> None:
        file = self._store.acquire(partition, prepared=True)
        try:
            advise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            self._store.release(file)
