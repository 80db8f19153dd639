"""The prepared dataset as a source of stored bytes, if it is in a directory: files of a shared file system.

Used by sources.py, staging.py and restoring.py.
"""

from collections.abc import Generator

import trio

from fanstore.dataset.source import PreparedSource
from fanstore.dataset.store import PartitionStore
from fanstore.telemetry.statistics import Source


class SharedFiles(PreparedSource):
    """The partition files, where fanstore-prep has written them."""

    name = Source.SHARED

    def __init__(self, store: PartitionStore, limiter: trio.CapacityLimiter) -> None:
        super().__init__(limiter)
        self._store = store

    def read_range(self, partition: int, offset: int, length: int) -> bytes:
        return self._store.read(partition, offset, length, prepared=True)

    def label(self, partition: int) -> str:
        return f"partition file {self._store.prepared.partition_label(partition)}"

    def stream(self, partition: int) -> Generator[memoryview, None, None]:
        info = self._store.prepared.manifest.partitions[partition]
        return self._store.prepared.storage.stream(info.file, info.bytes)
