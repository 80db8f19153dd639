"""The parts of the core put together for a prepared dataset, without a mount; for the tests of core.

Owns nothing but the wiring; a test closes it with the with block and has the invariants of all parts checked by that.
"""

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import trio

from fanstore import _native
from fanstore.dataset.broker import Broker
from fanstore.dataset.control import ControlDirectory
from fanstore.dataset.namespace import Namespace
from fanstore.dataset.sources import Sources, Verify
from fanstore.dataset.store import PartitionStore
from fanstore.format.prepared import PreparedDataset
from fanstore.telemetry.statistics import Statistics

T = TypeVar("T")


@dataclass
class Parts:
    """One of each."""

    prepared: PreparedDataset
    store: PartitionStore
    statistics: Statistics
    broker: Broker
    control: ControlDirectory
    namespace: Namespace

    def entry(self, path: bytes | str) -> int:
        """Entry of a path; it must exist."""
        found = self.prepared.index.resolve(os.fsencode(path))
        assert found >= 0, f"{path!r} is not in the index"
        return found

    def run(self, function: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """Call an async function while the broker is served."""

        async def main() -> T:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.broker.run)
                result = await function(*arguments)
                nursery.cancel_scope.cancel()
            return result

        try:
            return trio.run(main)
        except BaseExceptionGroup as group:
            raise only_error(group) from None

    def read(self, path: bytes | str, offset: int = 0, size: int = 1 << 40) -> bytes:
        """Read from a trio of its own: for tests that need no concurrency."""
        return self.run(self.broker.read, self.entry(path), offset, size)


def native_broker(dataset: PreparedDataset, capacity_bytes: int = 64 << 20) -> _native.Broker:
    """The broker in C alone, not started; nobody serves it."""
    index = dataset.index
    marks = bytearray(index.entry_count + len(index.column("chunks")))
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        return _native.Broker(index.native, marks, 0, capacity_bytes, 1, 1, wake)
    finally:
        os.close(wake)


def only_error(group: BaseExceptionGroup) -> BaseException:
    """What a nursery has wrapped."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@contextmanager
def opened(
    path: Path,
    *,
    cache_bytes: int = 64 << 20,
    verify: Verify | str = Verify.FIRST,
    open_limit: int | None = None,
    workers: int = 8,
) -> Iterator[Parts]:
    """The core for a prepared dataset; checks all invariants at the end."""
    prepared = PreparedDataset.open(path)
    store = PartitionStore(prepared, open_limit)
    statistics = Statistics()
    sources = Sources(prepared.index, store, statistics, None, Verify(verify))
    broker = Broker(prepared.index, store, sources, statistics, capacity_bytes=cache_bytes, loaders=workers)

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
        yield Parts(prepared, store, statistics, broker, control, namespace)
        for part in (store, statistics, broker):
            part.validate()
    finally:
        assert broker.stop()
        store.close()
        store.validate()


def flip_byte(path: Path, position: int) -> None:
    """Damage one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(position)
        old = file.read(1)[0]
        file.seek(position)
        file.write(bytes([old ^ 0x40]))
