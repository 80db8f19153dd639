"""The prepared dataset as a source of stored bytes, if it is in an object store: ranges of objects.

Owns how many requests of readers are under way at a time. Used by sources.py, staging.py and restoring.py.
"""

from collections.abc import Generator, Iterable

import trio

from fanstore.dataset.source import PreparedSource
from fanstore.format.objects import RANGE_BYTES, Objects
from fanstore.format.prepared import PreparedDataset
from fanstore.telemetry.statistics import Source

#: Requests of readers at a time, each for 4 MiB at most. With 16, and 12 ranges for staging, a daemon had 205 MiB with
#: 64 MiB of cache, more than it is allowed; with 8 and 8 it had 159 MiB.
REQUESTS = 8


class ObjectStore(PreparedSource):
    """The partitions, where fanstore-prep or the user has put them.

    A request that hangs is left to its thread when nobody waits for it any more: there is no descriptor to give back.
    """

    name = Source.SHARED
    stride = RANGE_BYTES
    abandons = True

    def __init__(self, prepared: PreparedDataset, storage: Objects) -> None:
        super().__init__(trio.CapacityLimiter(REQUESTS))
        self._prepared = prepared
        self._storage = storage

    def read_range(self, partition: int, offset: int, length: int) -> memoryview:
        return self._storage.read_range(self._prepared.manifest.partitions[partition].file, offset, length)

    def label(self, partition: int) -> str:
        return f"object {self._prepared.partition_label(partition)}"

    def stream(
        self, partition: int, ranges: Iterable[tuple[int, int]] | None = None
    ) -> Generator[memoryview, None, None]:
        info = self._prepared.manifest.partitions[partition]
        return self._storage.stream(info.file, info.bytes, ranges)
