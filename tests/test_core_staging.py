"""Staging and the partition store: copies that are checked, fallbacks, and reads while it goes on."""

import os
import resource
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import oddities
import pytest
import trio
from core_parts import Parts, flip_byte, opened

from fanstore.dataset.staging import StagingResult, stage
from fanstore.errors import CorruptDataError
from fanstore.format.manifest import PartitionInfo
from fanstore.progress import Progress
from fanstore.telemetry.statistics import Source

MakePrepared = Callable[..., Path]

MIB = 1 << 20
FILES = 40
CONTENTS = {f"{number % 3}/{number:02d}": oddities.incompressible(300_000 + number, number) for number in range(FILES)}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("staging") / "tree"
    for name, content in CONTENTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "local"
    path.mkdir()
    return path


def run(parts: Parts, local: Path, **options: object) -> StagingResult:
    result = stage(parts.prepared, parts.store, local, statistics=parts.statistics, **options)  # type: ignore[arg-type]
    parts.store.validate()
    parts.statistics.validate()
    numbers = [*result.verified, *result.unverified, *result.failed, *result.skipped, *result.stopped]
    assert sorted(numbers) == list(range(parts.store.partition_count)), "exactly one outcome for each"
    assert not list(local.glob("*.partial"))
    return result


def check_contents(parts: Parts, but: str | None = None) -> None:
    for name, content in CONTENTS.items():
        if name != but:
            assert parts.read(name) == content, name


@pytest.mark.parametrize("jobs", [1, 3])
def test_staged_partitions_are_verified_and_used(
    tree: Path, local: Path, make_prepared: MakePrepared, jobs: int
) -> None:
    with opened(make_prepared(tree, partitions=5)) as parts:
        assert parts.store.source(0) is Source.SHARED
        assert not parts.store.verified(0)
        total = sum(info.bytes for info in parts.prepared.manifest.partitions)
        entries = sum(info.entries for info in parts.prepared.manifest.partitions)
        seen: set[int] = set()

        def report(done_bytes: int, done_entries: int) -> None:
            progress.add(done_bytes, done_entries)
            seen.add(progress.done_files)

        with Progress("staging", total, entries, quiet=True) as progress:
            result = run(parts, local, jobs=jobs, report=report)
        assert len(seen) > 2 * 5, "files move while a partition is being copied"
        assert result.verified == (0, 1, 2, 3, 4)
        assert (progress.done_bytes, progress.done_files) == (total, entries)
        assert all(parts.store.source(p) is Source.LOCAL and parts.store.verified(p) for p in range(5))
        assert parts.store.local_bytes() == total
        check_contents(parts)
        sources = parts.statistics.totals().sources
        assert sources[Source.LOCAL].bytes == sum(map(len, CONTENTS.values()))
        assert sources[Source.SHARED].reads == 0
        assert parts.statistics.totals().verification.chunks == 0, "what was verified as a whole is not checked again"
        staging = parts.statistics.staging()
        assert (staging.partitions, staging.done_partitions, staging.bytes, staging.done_bytes) == (5, 5, total, total)
        for partition in range(5):
            copy = local / f"part-{partition:05d}.tar"
            assert copy.read_bytes() == parts.prepared.partition_path(partition).read_bytes()
            assert copy.stat().st_mode & 0o777 == 0o600


def test_a_partition_with_a_wrong_checksum_is_used_and_each_file_checked(
    tree: Path, local: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    with opened(make_prepared(tree, partitions=3)) as parts:
        index = parts.prepared.index
        entry = parts.entry("1/07")
        damaged = index.partition[entry]
        path = parts.prepared.partition_path(damaged)
        flip_byte(path, index.offset[entry] + 5)
        expect_warnings(rf"partition {path} does not match its checksum", rf"cannot read '1/07' .*{path}")
        result = run(parts, local)
        assert result.unverified == (damaged,)
        assert len(result.verified) == 2
        assert parts.store.source(damaged) is Source.LOCAL
        check_contents(parts, but="1/07")
        with pytest.raises(CorruptDataError):
            parts.read("1/07")
        assert parts.statistics.totals().verification.chunks > 0
        assert parts.statistics.totals().sources[Source.SHARED].reads == 0


def test_a_truncated_partition(
    tree: Path, local: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    with opened(make_prepared(tree, partitions=2)) as parts:
        index = parts.prepared.index
        last = max((parts.entry(name) for name in CONTENTS), key=lambda e: (index.partition[e], index.offset[e]))
        name = os.fsdecode(index.path(last))
        os.truncate(parts.prepared.partition_path(index.partition[last]), index.offset[last] + 100)
        expect_warnings("does not match its checksum", rf"cannot read '{name}' .*truncated")
        assert run(parts, local).unverified == (index.partition[last],)
        check_contents(parts, but=name)
        with pytest.raises(CorruptDataError):
            parts.read(name)


def test_what_was_checked_in_the_prepared_file_does_not_count_for_an_unverified_copy(
    tree: Path, local: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    with opened(make_prepared(tree, partitions=1)) as parts:
        assert parts.read("0/00") == CONTENTS["0/00"]
        flip_byte(parts.prepared.partition_path(0), parts.prepared.index.offset[parts.entry("0/00")])
        expect_warnings("does not match its checksum", "cannot read '0/00'")
        run(parts, local)
        with pytest.raises(CorruptDataError):
            parts.read("0/00")


def test_a_copy_that_goes_bad_is_replaced_by_the_prepared_file(
    tree: Path, local: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    with opened(make_prepared(tree, partitions=2)) as parts:
        run(parts, local)
        for partition in range(2):
            os.truncate(local / f"part-{partition:05d}.tar", 1000)
        expect_warnings("is read from the prepared dataset: local copy .*truncated")
        check_contents(parts)
        errors = parts.statistics.errors
        assert (errors.damaged_files, errors.failed_reads) == (0, 0)
        assert errors.fallbacks == FILES
        assert parts.statistics.totals().sources[Source.SHARED].reads == FILES


def test_what_does_not_fit_stays_where_it_is(
    tree: Path, local: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    with opened(make_prepared(tree, partitions=4)) as parts:
        manifest = parts.prepared.manifest
        # Nothing but the length is looked at before a partition is left out.
        giant: PartitionInfo = replace(manifest.partitions[1], bytes=1 << 60)
        partitions = (manifest.partitions[0], giant, *manifest.partitions[2:])
        parts.prepared = replace(parts.prepared, manifest=replace(manifest, partitions=partitions))
        expect_warnings(r"1 of 4 partitions \(.*\) do not fit in .*read where they are")
        result = run(parts, local)
        assert result.skipped == (1,)
        assert result.verified == (0, 2, 3)
        assert parts.store.source(1) is Source.SHARED
        assert parts.statistics.staging().skipped_partitions == 1
        check_contents(parts)


def test_a_copy_that_fails_is_removed(
    tree: Path, local: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    """A limit on the length of files stands in for a disk that fails in the middle of a write."""
    with opened(make_prepared(tree, partitions=2)) as parts:
        expect_warnings(r"partition .*part-00000.tar cannot be copied .*File too large", r"part-00001.tar cannot")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
        try:
            result = run(parts, local)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert result.failed == (0, 1)
        assert list(local.iterdir()) == []
        check_contents(parts)
        assert parts.statistics.staging().failed_partitions == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 80 MiB: room for 16 MiB beyond the reserve."""
    path = tmp_path / "small-disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(path)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("only root can mount a file system that is full soon")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_full_all_of_a_sudden(
    tree: Path, small_disk: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    class Filler(Progress):
        """Somebody else takes the rest of the disk as soon as the first partition is there."""

        def add(self, done_bytes: int, done_files: int = 0) -> None:
            super().add(done_bytes, done_files)
            if (small_disk / "part-00000.tar").exists():
                with open(small_disk / "somebody-else", "ab") as file:
                    file.write(bytes(os.statvfs(small_disk).f_bavail * 4096))

    with opened(make_prepared(tree, partitions=3)) as parts, Filler("staging", 1, 1, quiet=True) as progress:
        expect_warnings(r"part-00001.tar cannot be copied .*No space left")
        result = run(parts, small_disk, jobs=1, report=progress.add)
        assert (result.verified, result.failed, result.skipped) == ((0,), (1,), (2,))
        assert sorted(path.name for path in small_disk.iterdir()) == ["part-00000.tar", "somebody-else"]
        check_contents(parts)


def test_a_partition_that_is_gone(
    tree: Path, local: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    with opened(make_prepared(tree, partitions=3)) as parts:
        parts.prepared.partition_path(1).unlink()
        expect_warnings("part-00001.tar cannot be copied .*No such file")
        result = run(parts, local)
        assert (result.verified, result.failed) == ((0, 2), (1,))


def test_stop_before_the_start(tree: Path, local: Path, make_prepared: MakePrepared) -> None:
    stop = threading.Event()
    stop.set()
    with opened(make_prepared(tree, partitions=3)) as parts:
        assert run(parts, local, stop=stop).stopped == (0, 1, 2)
        assert list(local.iterdir()) == []


def test_stop_between_two_blocks(tmp_path: Path, local: Path, make_prepared: MakePrepared) -> None:
    """A partition of several blocks, stopped after the first: nothing of it is left."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(oddities.incompressible(20 * MIB))
    stop = threading.Event()

    class Stopper(Progress):
        def add(self, done_bytes: int, done_files: int = 0) -> None:
            super().add(done_bytes, done_files)
            stop.set()

    with opened(make_prepared(tree)) as parts, Stopper("staging", 20 * MIB, 1, quiet=True) as progress:
        assert run(parts, local, stop=stop, report=progress.add).stopped == (0,)
        assert 0 < progress.done_bytes < 20 * MIB
        assert list(local.iterdir()) == []
        assert parts.store.source(0) is Source.SHARED


def test_external_partitions_with_the_same_name(tmp_path: Path, local: Path, make_prepared: MakePrepared) -> None:
    shards = []
    for number in range(2):
        directory = tmp_path / f"shards-{number}"
        directory.mkdir()
        (directory / f"{number}.bin").write_bytes(oddities.incompressible(50_000, number))
        shards.append(directory / "train.tar")
        with tarfile.open(shards[-1], "w", format=tarfile.USTAR_FORMAT) as tar:
            tar.add(directory / f"{number}.bin", f"{number}.bin")
    with opened(make_prepared(shards, index_only=True)) as parts:
        assert all(info.external for info in parts.prepared.manifest.partitions)
        for _ in range(2):
            for number in range(2):
                assert parts.read(f"{number}.bin") == oddities.incompressible(50_000, number)
            if not list(local.iterdir()):
                assert run(parts, local).verified == (0, 1)
        assert parts.statistics.totals().sources[Source.LOCAL].reads == 2
        assert len(list(local.iterdir())) == 2


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_reads_go_on_while_partitions_are_staged(
    tree: Path, local: Path, make_prepared: MakePrepared, codec: str
) -> None:
    async def read(parts: Parts, done: trio.Event, start: int) -> None:
        names = list(CONTENTS)
        number = start
        while not done.is_set():
            name = names[number % len(names)]
            offset = number * 997 % 300_000
            data = await parts.broker.read(parts.entry(name), offset, 4096)
            assert data == CONTENTS[name][offset : offset + 4096]
            number += 1
            await trio.lowlevel.checkpoint()

    async def main(parts: Parts) -> StagingResult:
        done = trio.Event()
        async with trio.open_nursery() as nursery:
            for start in range(4):
                nursery.start_soon(read, parts, done, start * 10)
            result = await trio.to_thread.run_sync(lambda: run(parts, local, jobs=2))
            done.set()
        return result

    with opened(make_prepared(tree, codec=codec, partitions=6)) as parts:
        assert parts.run(main, parts).verified == (0, 1, 2, 3, 4, 5)
        check_contents(parts)


def test_more_partitions_than_descriptors(tree: Path, local: Path, make_prepared: MakePrepared) -> None:
    with opened(make_prepared(tree, partitions=10), open_limit=3) as parts:
        check_contents(parts)
        assert run(parts, local).verified == tuple(range(10))
        check_contents(parts)
        parts.store.validate()


def test_a_file_in_use_outlives_its_replacement_and_the_store(
    tree: Path, local: Path, make_prepared: MakePrepared
) -> None:
    with opened(make_prepared(tree, partitions=2)) as parts:
        store = parts.store
        assert store.acquire_nowait(0) is None, "nothing is opened before it is needed"
        before = store.acquire(0)
        run(parts, local)
        assert os.fstat(before.fd).st_size == parts.prepared.manifest.partitions[0].bytes
        after = store.acquire_nowait(0)
        assert after is not None
        assert (before.source, after.source) == (Source.SHARED, Source.LOCAL)
        store.release(before)
        assert before.fd == -1
        store.close()
        assert os.fstat(after.fd).st_size > 0
        assert store.acquire_nowait(0) is None
        with pytest.raises(ValueError, match="closed"):
            store.acquire(0)
        store.release(after)
        assert after.fd == -1
