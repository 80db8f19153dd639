"""The handlers without a kernel: errors of the core become error numbers, and nothing unforeseen ends the daemon."""

import errno
from collections.abc import Awaitable, Callable
from pathlib import Path

import pyfuse3
import pytest
import trio
from conftest import MakePrepared

from fanstore.dataset.broker import Broker
from fanstore.dataset.control import ControlDirectory
from fanstore.dataset.namespace import Namespace
from fanstore.dataset.sources import Sources, Verify
from fanstore.dataset.store import PartitionStore
from fanstore.format.prepared import PreparedDataset
from fanstore.fuse.operations import ReadOnlyOperations
from fanstore.telemetry.statistics import Statistics

CTX = pyfuse3.RequestContext()


def broken() -> dict[str, object]:
    raise RuntimeError("a bug")


async def build(prepared: Path) -> tuple[ReadOnlyOperations, Broker, Statistics, int]:
    """The handlers over real parts, a file's inode, and a control file whose making fails."""
    dataset = PreparedDataset.open(prepared)
    statistics = Statistics()
    store = PartitionStore(dataset)
    sources = Sources(dataset.index, store, statistics, None, Verify.FIRST)
    broker = Broker(dataset.index, store, sources, statistics, capacity_bytes=1 << 20)
    control = ControlDirectory(dataset.index.entry_count, {"broken.json": broken})
    namespace = Namespace(dataset.index, ["part"], 0, 0, control)
    operations = ReadOnlyOperations(namespace, broker, control, statistics)
    return operations, broker, statistics, dataset.index.resolve(b"file") + 1


def test_errors(make_prepared: MakePrepared, tmp_path: Path, expect_warnings: Callable[..., None]) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_bytes(b"content")
    prepared = make_prepared(tmp_path / "source")
    expect_warnings("unexpected error in lookup, answered with EIO")

    async def number_of(call: Awaitable[object]) -> int:
        with pytest.raises(pyfuse3.FUSEError) as caught:
            await call
        return caught.value.errno

    async def main() -> None:
        operations, broker, statistics, file = await build(prepared)
        control = (await operations.lookup(1, b".fanstore", CTX)).st_ino
        assert await number_of(operations.getattr(99, CTX)) == errno.ENOENT
        assert await number_of(operations.lookup(file, b"below", CTX)) == errno.ENOTDIR
        assert await number_of(operations.lookup(1, b"n" * 256, CTX)) == errno.ENAMETOOLONG
        assert await number_of(operations.readlink(file, CTX)) == errno.EINVAL
        assert await number_of(operations.getxattr(file, b"user.x", CTX)) == errno.ENODATA
        assert await number_of(operations.open(file, 1, CTX)) == errno.EROFS
        assert await number_of(operations.flush(1)) == errno.ENOSYS
        assert await number_of(operations.unlink(1, b"file", CTX)) == errno.EROFS
        # What nobody foresaw: an exception in the making of a control file.
        assert await number_of(operations.lookup(control, b"broken.json", CTX)) == errno.EIO
        missing = await operations.lookup(1, b"absent", CTX)
        assert missing.st_ino == 0 and missing.entry_timeout > 3600

        handle = (await operations.open(file, 0, CTX)).fh
        async with trio.open_nursery() as nursery:
            nursery.start_soon(broker.run)
            assert await operations.read(handle, 3, 100) == b"tent"
            nursery.cancel_scope.cancel()
        await operations.release(handle)
        assert broker.stop()
        counted = {name: (counters.count, counters.errors) for name, counters in statistics.operations.items()}
        assert counted["getxattr"] == (1, 0), "that there is no such thing is an ordinary answer"
        assert counted["lookup"] == (5, 3)
        assert counted["open"] == (2, 1)
        assert counted["refused"] == (1, 1)
        statistics.validate()

    trio.run(main)
