"""The parts of the core put together for a prepared dataset, without a mount; for the tests of core.

Owns nothing but the wiring; a test closes it with the with block and has the invariants of all parts checked by that.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import trio

from fanstore.core.cache import ChunkCache
from fanstore.core.control import ControlDirectory
from fanstore.core.namespace import Namespace
from fanstore.core.reader import Reader, Verify
from fanstore.core.statistics import Statistics
from fanstore.core.store import PartitionStore
from fanstore.format.prepared import PreparedDataset


@dataclass
class Parts:
    """One of each."""

    prepared: PreparedDataset
    store: PartitionStore
    cache: ChunkCache
    statistics: Statistics
    reader: Reader
    control: ControlDirectory
    namespace: Namespace

    def entry(self, path: bytes | str) -> int:
        """Entry of a path; it must exist."""
        found = self.prepared.index.resolve(os.fsencode(path))
        assert found >= 0, f"{path!r} is not in the index"
        return found

    def read(self, path: bytes | str, offset: int = 0, size: int = 1 << 40) -> bytes:
        """Read from a trio of its own: for tests that need no concurrency."""

        async def main() -> bytes:
            return bytes(await self.reader.read(self.entry(path), offset, size))

        return trio.run(main)


@contextmanager
def opened(
    path: Path,
    *,
    cache_bytes: int = 64 << 20,
    verify: Verify | str = Verify.FIRST,
    open_limit: int | None = None,
    workers: int = 8,
    drop_behind: bool = False,
) -> Iterator[Parts]:
    """The core for a prepared dataset; checks all invariants at the end."""
    prepared = PreparedDataset.open(path)
    store = PartitionStore(prepared, open_limit)
    cache = ChunkCache(cache_bytes)
    statistics = Statistics()
    statistics.add_section("cache", lambda: asdict(cache.statistics()))
    reader = Reader(prepared.index, store, cache, statistics, verify=verify, workers=workers, drop_behind=drop_behind)

    async def describe_nodes() -> dict[str, object]:
        await trio.lowlevel.checkpoint()
        return {"nodes": [{"rank": 0}]}

    control = ControlDirectory(
        prepared.index.entry_count,
        {
            "stats.json": statistics.snapshot,
            "nodes.json": describe_nodes,
            "config.json": lambda: {"prepared": str(path)},
        },
    )
    files = [info.file for info in prepared.manifest.partitions]
    namespace = Namespace(prepared.index, files, os.getuid(), os.getgid(), control)
    try:
        yield Parts(prepared, store, cache, statistics, reader, control, namespace)
        for part in (store, cache, statistics, reader):
            part.validate()
    finally:
        store.close()
        store.validate()


def flip_byte(path: Path, position: int) -> None:
    """Damage one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(position)
        old = file.read(1)[0]
        file.seek(position)
        file.write(bytes([old ^ 0x40]))
