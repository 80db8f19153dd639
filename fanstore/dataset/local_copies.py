"""The source of stored bytes that is closest: copies of partitions on this node's disk. Used by sources.py."""

import trio

from fanstore.dataset.source import BlockingSource
from fanstore.dataset.store import PartitionStore
from fanstore.telemetry.statistics import Source


class LocalCopies(BlockingSource):
    """What was staged here."""

    name = Source.LOCAL

    def __init__(self, store: PartitionStore, limiter: trio.CapacityLimiter) -> None:
        super().__init__(limiter)
        self._store = store

    def has(self, partition: int) -> bool:
        """Is there a copy on this node? Once true, always; from any thread."""
        return self._store.is_local(partition)

    def read_range(self, partition: int, offset: int, length: int) -> bytes:
        return self._store.read(partition, offset, length, prepared=False)

    def label(self, partition: int) -> str:
        return f"local copy {self._store.path(partition)}"
