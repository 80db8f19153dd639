"""Copies that are being made: each byte is read once where the dataset is, whoever wants it, and however early."""

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trio
from commands import run_inside
from core_cluster import Cluster, Member, cluster
from core_parts import opened
from object_servers import Nginx, needs_nginx

from fanstore.dataset import remote
from fanstore.dataset.partial_copies import PIECE_BYTES, CopyEndedError, PartialCopy
from fanstore.dataset.shared_files import SharedFiles
from fanstore.dataset.staging import Filling, begin_copies, stage
from fanstore.dataset.store import PartitionStore
from fanstore.errors import CorruptDataError
from fanstore.format.prepared import PreparedDataset
from fanstore.telemetry.statistics import Source

pytest_plugins = ["object_servers"]

FILES = 60
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of files that end within pieces, ``src``, and its dataset of 6 partitions, ``x.fan``."""
    base = tmp_path_factory.mktemp("partial")
    (base / "src").mkdir()
    for number in range(FILES):
        (base / "src" / f"{number:02d}").write_bytes(os.urandom(90_000 + 1000 * number))
    result = run_inside("prep", base / "src", base / "x.fan", "--partitions", "6", "--quiet")
    assert result.returncode == 0, result.stderr
    return base


class Counted(SharedFiles):
    """Partition files; each byte that is read of them is counted. ``fails``: ranges cannot be read, streams can."""

    total = 0
    fails = False
    _lock = threading.Lock()

    def _count(self, length: int) -> None:
        with self._lock:
            self.total += length

    def read_range(self, partition: int, offset: int, length: int) -> bytes:
        if self.fails:
            raise OSError(errno.EIO, "a test")
        data = super().read_range(partition, offset, length)
        self._count(length)
        return data

    def stream(
        self, partition: int, ranges: Iterable[tuple[int, int]] | None = None
    ) -> Generator[memoryview, None, None]:
        for block in super().stream(partition, ranges):
            self._count(len(block))
            yield block


class One:
    """The copy of partition 0."""

    def __init__(self, dataset: Path, directory: Path) -> None:
        self.prepared = PreparedDataset.open(dataset)
        self.content = self.prepared.partition_path(0).read_bytes()
        self.store = PartitionStore(self.prepared)
        self.source = Counted(self.store, trio.CapacityLimiter(1))
        self.path = directory / "copy.partial"
        self.copy = PartialCopy(0, len(self.content), self.path, self.source)

    def fill(self) -> tuple[int, bool] | None:
        return Filling(self.copy, self.prepared, self.source, threading.Event(), lambda length, entries: None).run()

    def check(self, offset: int, length: int) -> None:
        assert self.copy.read(offset, length) == self.content[offset : offset + length]


@pytest.fixture
def one(original: Path, tmp_path: Path) -> Iterator[One]:
    made = One(original / "x.fan", tmp_path)
    yield made
    made.store.close()
    made.store.validate()


def test_what_is_wanted_early_is_read_once(one: One, tmp_path: Path) -> None:
    total = len(one.content)
    one.check(PIECE_BYTES + 5, 10)
    assert one.source.total == PIECE_BYTES
    one.check(PIECE_BYTES - 1, 2)
    assert one.source.total == 2 * PIECE_BYTES
    one.check(total - 1, 1)  # the last piece is shorter
    assert one.source.total == 2 * PIECE_BYTES + (total % PIECE_BYTES or PIECE_BYTES)
    one.check(0, 2 * PIECE_BYTES)
    assert one.source.total < 4 * PIECE_BYTES
    assert one.fill() == (total, True)
    assert one.source.total == total
    one.copy.finish(tmp_path / "copy", total)
    one.check(0, total)
    assert (tmp_path / "copy").read_bytes() == one.content
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
    assert one.source.total == total


def test_readers_while_it_is_filled(one: One) -> None:
    chance = random.Random(1)
    total = len(one.content)
    ranges = [
        (start, min(chance.randrange(1, 200_000), total - start)) for start in chance.choices(range(total), k=200)
    ]
    with ThreadPoolExecutor(6) as pool:
        filled = pool.submit(one.fill)
        readers = [pool.submit(one.check, *each) for each in ranges]
        for reader in readers:
            reader.result(LIMIT_S)
        assert filled.result(LIMIT_S) == (total, True)
    assert one.source.total == total


def test_a_read_that_fails_leaves_the_bytes_to_others(one: One) -> None:
    one.source.fails = True
    with pytest.raises(OSError, match="a test"):
        one.copy.read(0, 10)
    one.source.fails = False
    one.check(0, 10)
    one.source.fails = True
    assert one.fill() == (len(one.content), True)


def test_a_file_that_is_too_short(original: Path, tmp_path: Path) -> None:
    """What there is of it is copied and read; the rest is an error."""
    one = One(Path(shutil.copytree(original / "x.fan", tmp_path / "x.fan")), tmp_path)
    end = 3 * PIECE_BYTES + 700
    os.truncate(one.prepared.partition_path(0), end)
    one.check(end - 100, 100)
    with pytest.raises(CorruptDataError, match="truncated"):
        one.copy.read(end - 100, 101)
    assert one.fill() == (end, False)
    assert one.path.read_bytes()[:end] == one.content[:end]
    one.store.close()


def test_a_file_that_ends_behind_what_was_brought(original: Path, tmp_path: Path) -> None:
    """What readers have brought is part of the copy, though nothing behind it comes."""
    one = One(Path(shutil.copytree(original / "x.fan", tmp_path / "x.fan")), tmp_path)
    os.truncate(one.prepared.partition_path(0), 3 * PIECE_BYTES)
    one.check(PIECE_BYTES, 2 * PIECE_BYTES)
    assert one.fill() == (3 * PIECE_BYTES, False)
    one.store.close()


def test_a_file_that_becomes_shorter(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader could not bring is not there any more when staging looks for it: the copy ends there."""
    first = next(one.copy.take_missing(PIECE_BYTES))
    stream = one.source.stream

    def letting_go(partition: int, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        for block in stream(partition, ranges):
            one.copy.let_go(*first)
            yield block

    def short(*arguments: int) -> bytes:
        raise CorruptDataError("it ends here")

    monkeypatch.setattr(one.source, "stream", letting_go)
    monkeypatch.setattr(one.source, "read_range", short)
    assert one.fill() == (0, False)


def test_a_copy_that_ends_while_it_is_read(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads hears that, and not that a file is missing."""
    take_on = one.copy._take_on

    def ending(first: int, last: int) -> tuple[int, int] | None:
        missing = take_on(first, last)
        if missing is None:
            one.copy.end()
        return missing

    monkeypatch.setattr(one.copy, "_take_on", ending)
    with pytest.raises(CopyEndedError):
        one.copy.read(0, 10)


def test_a_full_disk(one: One, monkeypatch: pytest.MonkeyPatch, original: Path, tmp_path: Path) -> None:
    """Nothing is left of the copy, and who wants bytes gets them where the dataset is."""

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    local = tmp_path / "local"
    local.mkdir()
    with opened(original / "x.fan") as parts:
        begin_copies(parts.prepared, parts.store, local, range(6))
        assert parts.read("01") == (original / "src" / "01").read_bytes()
        assert parts.statistics.totals().sources[Source.LOCAL].fetches == 1
        assert list(local.iterdir())
        monkeypatch.setattr(os, "pwrite", full)
        assert parts.read("30") == (original / "src" / "30").read_bytes()
        monkeypatch.undo()
        for number in range(FILES):
            assert parts.read(f"{number:02d}") == (original / "src" / f"{number:02d}").read_bytes()
        assert parts.statistics.errors.failed_reads == 0


def test_what_somebody_waits_for_is_staged_first(original: Path, tmp_path: Path) -> None:
    done: list[int] = []
    with opened(original / "x.fan") as parts:
        begin_copies(parts.prepared, parts.store, tmp_path, range(6))
        asked = [parts.prepared.index.partition[parts.entry(name)] for name in ("40", "20")]
        for name in ("40", "20"):
            parts.read(name)
        parts.store.tell_of_files(lambda file: done.append(file.partition) if file.source is Source.LOCAL else None)
        stage(parts.prepared, parts.store, tmp_path, jobs=1, partitions=range(6))
    assert done == asked + [number for number in range(6) if number not in asked]


# --- several nodes ---


async def read_all(node: Member, tree: Path, seed: int, stop: Callable[[], bool] = lambda: False) -> None:
    """In a random order, several at a time."""
    names = [f"{number:02d}" for number in range(FILES)]
    random.Random(seed).shuffle(names)

    async def reader(mine: list[str]) -> None:
        for name in mine:
            if not stop():
                assert await node.read(name) == (tree / name).read_bytes()

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(reader, names[number::4])


@needs_nginx
def test_an_epoch_during_staging_reads_each_byte_once(original: Path, nginx: Nginx, tmp_path: Path) -> None:
    """Three nodes read everything, and stage meanwhile: the web server's log has each byte of each partition once."""
    (tmp_path / "x.fan").symlink_to(original / "x.fan")

    async def main() -> None:
        async with cluster(f"{nginx.url}/x.fan", tmp_path, staged=False, copying=True) as job:
            with trio.fail_after(LIMIT_S):
                for rank, node in enumerate(job.nodes):
                    await node.read(f"{rank:02d}")  # before any of them stages
                async with trio.open_nursery() as nursery:
                    for rank, node in enumerate(job.nodes):
                        nursery.start_soon(read_all, node, original / "src", rank)
                        nursery.start_soon(trio.to_thread.run_sync, job.stage, rank)
            assert all(node.reads(Source.SHARED) == 0 for node in job.nodes)
            assert all(node.store.is_local(p) for node in job.nodes for p in job.placement.of_rank(node.rank))

    trio.run(main)
    parts = PreparedDataset.open(original / "x.fan").manifest.partitions
    sent = nginx.sent()
    assert {part.file: sent[part.file] for part in parts} == {part.file: part.bytes for part in parts}


def test_the_home_dies_while_it_brings(original: Path, tmp_path: Path) -> None:
    """Reads go on with what there is, none of them fails, and what is here stays local."""

    async def main() -> None:
        async with cluster(original / "x.fan", tmp_path, staged=False, copying=True, cache_bytes=0) as job:
            with trio.fail_after(LIMIT_S):
                async with trio.open_nursery() as nursery:
                    for rank in (0, 2):
                        nursery.start_soon(read_all, job.nodes[rank], original / "src", rank)
                    await job.nodes[0].read("50")
                    job.network.kill(1)
                await trio.to_thread.run_sync(job.stage, 0)
                before = job.nodes[0].reads(Source.SHARED)
                await read_all(job.nodes[0], original / "src", 7)
            check_local(job, before)

    def check_local(job: Cluster, before: int) -> None:
        node = job.nodes[0]
        lost = {p for p, ranks in enumerate(job.placement.holders) if ranks == (1,)}
        index = node.prepared.index
        gone = sum(index.partition[node.entry(f"{number:02d}")] in lost for number in range(FILES))
        assert node.reads(Source.SHARED) - before == gone, "only what the dead node had"
        assert all(member.statistics.errors.failed_reads == 0 for member in job.nodes)

    trio.run(main)


def test_a_home_that_takes_its_time_is_asked_again(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not taken for dead: it says that the bytes will come."""
    slow = threading.Event()
    read_range = SharedFiles.read_range

    def wait(self: SharedFiles, *arguments: int) -> bytes:
        assert slow.wait(LIMIT_S)
        return read_range(self, *arguments)

    monkeypatch.setattr(SharedFiles, "read_range", wait)

    async def main() -> None:
        async with cluster(
            original / "x.fan", tmp_path, size=2, room=[0, 1 << 40], staged=False, copying=True, timeout_s=2.0
        ) as job:
            with trio.fail_after(LIMIT_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read_all, job.nodes[0], original / "src", 1)
                    await trio.sleep(2.5)
                    slow.set()
            node = job.nodes[0]
            assert node.reads(Source.REMOTE) == FILES
            assert node.reads(Source.SHARED) == 0

    trio.run(main)


def test_a_home_that_hangs_is_waited_for_once(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each file of a partition."""
    hangs = threading.Event()
    homes: list[PartitionStore] = []
    read_range = SharedFiles.read_range

    def wait(self: SharedFiles, *arguments: int) -> bytes:
        if self._store in homes:
            assert hangs.wait(LIMIT_S)
        return read_range(self, *arguments)

    monkeypatch.setattr(SharedFiles, "read_range", wait)
    monkeypatch.setattr(remote, "BRING_LIMIT_S", 3.0)

    async def main() -> None:
        async with cluster(
            original / "x.fan", tmp_path, size=2, room=[0, 1 << 40], staged=False, copying=True, timeout_s=0.4
        ) as job:
            node, home = job.nodes
            homes.append(home.store)
            names = [f"{number:02d}" for number in range(FILES)]
            mine = [name for name in names if node.prepared.index.partition[node.entry(name)] == 0]
            with trio.fail_after(LIMIT_S):
                await node.read(mine[0])
                with trio.fail_after(2.0):
                    for name in mine[1:]:
                        assert await node.read(name) == (original / "src" / name).read_bytes()
            hangs.set()
            assert node.reads(Source.SHARED) == len(mine) > 1

    trio.run(main)
