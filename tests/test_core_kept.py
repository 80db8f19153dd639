"""Kept copies: found by content alone, checked, shared, made room of, and whole whatever dies."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import oddities
import pytest
from core_parts import Parts, flip_byte, opened
from mounting import needs_root, small_file_system

from fanstore.dataset import capacity, kept_copies
from fanstore.dataset.kept_copies import Keeping, KeptCopies
from fanstore.dataset.sources import Sources, Verify
from fanstore.dataset.staging import local_name, reuse, stage
from fanstore.errors import MountError
from fanstore.format.checksum import xxh3_64
from fanstore.telemetry.statistics import Source, StagingStatistics

MakePrepared = Callable[..., Path]

FILES = 24
CONTENTS = {f"{number:02d}": oddities.incompressible(50_000 + number, number) for number in range(FILES)}
PARTITIONS = 4


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kept") / "tree"
    root.mkdir()
    for name, content in CONTENTS.items():
        (root / name).write_bytes(content)
    return root


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "ssd"
    path.mkdir()
    return path


@contextmanager
def kept_in(base: Path) -> Iterator[KeptCopies]:
    kept = KeptCopies(base, make=True)
    try:
        yield kept
    finally:
        kept.close()


def run_job(
    path: Path, base: Path, kept: KeptCopies, name: str = "job", contents: Mapping[str, bytes] = CONTENTS
) -> tuple[StagingStatistics, Parts]:
    """Reuse and stage as a node does, and compare all contents; the links of the job stay in ``base / name``."""
    directory = base / name
    directory.mkdir(exist_ok=True)
    with opened(path) as parts:
        numbers = range(parts.store.partition_count)
        kept.record(parts.prepared)
        reuse(parts.store, directory, kept, numbers, parts.statistics)
        left = [number for number in numbers if not parts.store.is_local(number)]
        stage(parts.prepared, parts.store, directory, statistics=parts.statistics, partitions=left, kept=kept)
        assert all(parts.store.is_local(number) for number in numbers)
        for entry, content in contents.items():
            assert parts.read(entry) == content
        return parts.statistics.staging(), parts


def end_job(base: Path, name: str = "job") -> None:
    for path in (base / name).iterdir():
        path.unlink()
    (base / name).rmdir()


def check_whole(kept: KeptCopies) -> int:
    """Every copy has the content that its name promises; how many there are."""
    files = list(kept.path.glob("*.tar"))
    for file in files:
        content = file.read_bytes()
        assert file.name.startswith(f"{xxh3_64(content):016x}-{len(content)}-")
    assert {file.name for file in files} == {copy.name for copy in kept.copies()}
    return len(files)


def test_the_second_job_copies_nothing(tree: Path, base: Path, make_prepared: MakePrepared) -> None:
    path = make_prepared(tree, partitions=PARTITIONS)
    with kept_in(base) as kept:
        first, _ = run_job(path, base, kept)
        assert (first.done_partitions, first.reused_partitions) == (PARTITIONS, 0)
        assert all(copy.in_use for copy in kept.copies()), "the job has them"
        end_job(base)
        assert not any(copy.in_use for copy in kept.copies())
        second, parts = run_job(path, base, kept)
        assert (second.partitions, second.done_bytes, second.reused_bytes) == (0, 0, first.done_bytes)
        assert parts.statistics.totals().sources[Source.SHARED].fetched_bytes == 0
        assert parts.statistics.totals().verification.chunks == FILES, "checked when they are first read"
        assert check_whole(kept) == PARTITIONS


def test_found_by_content_wherever_it_was_prepared(tree: Path, base: Path, make_prepared: MakePrepared) -> None:
    with kept_in(base) as kept:
        run_job(make_prepared(tree, partitions=PARTITIONS), base, kept)
        end_job(base)
        again = make_prepared(tree, partitions=PARTITIONS)
        assert run_job(again, base, kept)[0].done_bytes == 0
        assert len(kept.holdings()) == 2, "under either name"


@pytest.mark.parametrize(("how", "reused"), [("force", PARTITIONS - 1), ("update", PARTITIONS)])
def test_another_version_at_the_same_path(
    tree: Path, base: Path, make_prepared: MakePrepared, tmp_path: Path, how: str, reused: int
) -> None:
    """What is the same in both versions is used again, and nothing else."""
    source = tmp_path / "source"
    source.mkdir()
    for name in CONTENTS:
        (source / name).write_bytes(CONTENTS[name])
        os.utime(source / name, ns=(0, (tree / name).stat().st_mtime_ns))
    path = tmp_path / "same.fan"
    make_prepared(source, partitions=PARTITIONS, out=path)
    with kept_in(base) as kept:
        run_job(path, base, kept)
        end_job(base)
        (source / "03").write_bytes(oddities.incompressible(len(CONTENTS["03"]), 99))
        options = {"partitions": PARTITIONS} if how == "force" else {}
        make_prepared(source, out=path, **options, **{how: True})
        contents = {**CONTENTS, "03": (source / "03").read_bytes()}
        second, _ = run_job(path, base, kept, contents=contents)
        assert (second.reused_partitions, second.done_partitions) == (reused, 1)
        assert check_whole(kept) == PARTITIONS + 1


@pytest.mark.parametrize("harm", ["written to", "shorter", "no file"])
def test_what_was_changed_is_not_used(tree: Path, base: Path, make_prepared: MakePrepared, harm: str) -> None:
    path = make_prepared(tree, partitions=PARTITIONS)
    with kept_in(base) as kept:
        run_job(path, base, kept)
        end_job(base)
        victim = kept.path / kept.copies()[0].name
        if harm == "written to":
            victim.chmod(0o600)
            flip_byte(victim, 1000)
        elif harm == "shorter":
            times = victim.stat()
            os.truncate(victim, 5000)
            os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
        else:
            victim.unlink()
            victim.symlink_to(tree / "00")
        staging, _ = run_job(path, base, kept)
        assert (staging.reused_partitions, staging.done_partitions) == (PARTITIONS - 1, 1)
        assert check_whole(kept) == PARTITIONS


def test_damage_is_found_when_it_is_read_and_forgotten(
    tree: Path, base: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    """As a disk does it, without a trace in size and time."""
    path = make_prepared(tree, partitions=PARTITIONS)
    expect_warnings("'07' is read from the prepared dataset: local copy .*part-.* do not match")
    with kept_in(base) as kept, opened(path) as parts:
        run_job(path, base, kept)
        end_job(base)
        index, infos = parts.prepared.index, parts.prepared.manifest.partitions
        entry = parts.entry("07")
        damaged = infos[index.partition[entry]]
        copy = kept.find([damaged])[0]
        (kept.path / copy.name).chmod(0o600)
        flip_byte(kept.path / copy.name, index.offset[entry] + 5)
        os.utime(kept.path / copy.name, ns=(0, copy.changed_ns))
        directory = base / "job"
        directory.mkdir()
        assert reuse(parts.store, directory, kept, range(PARTITIONS), parts.statistics) == PARTITIONS
        sources = Sources(
            index, parts.store, parts.statistics, None, Verify.FIRST, lambda number: kept.discard(infos[number])
        )
        stored, source = parts.run(sources.stored, entry, 0)
        assert source is Source.SHARED
        assert bytes(stored) == CONTENTS["07"]
        assert kept.find([damaged]) == {}
        assert len(kept.copies()) == PARTITIONS - 1


def test_two_jobs_at_once_copy_each_partition_once(tree: Path, base: Path, make_prepared: MakePrepared) -> None:
    path = make_prepared(tree, partitions=PARTITIONS)
    with kept_in(base) as kept:
        results: list[StagingStatistics] = []

        def work(name: str) -> None:
            results.append(run_job(path, base, kept, name)[0])

        threads = [threading.Thread(target=work, args=(f"job{number}",)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(results) == 3
        assert sum(result.done_partitions for result in results) == PARTITIONS
        assert all(result.done_partitions + result.reused_partitions == PARTITIONS for result in results)
        assert check_whole(kept) == PARTITIONS
        assert not list(kept.path.glob("*.copying"))


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_who_copies_is_waited_for_and_taken_over_from(
    tree: Path, base: Path, make_prepared: MakePrepared, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A process that is killed meanwhile, or gives no sign of life, as when its job is suspended."""
    path = make_prepared(tree, partitions=PARTITIONS)
    script = (
        "import sys, time; from pathlib import Path; from fanstore.dataset.kept_copies import KeptCopies;"
        "from fanstore.format.prepared import PreparedDataset\n"
        "kept = KeptCopies(Path(sys.argv[2]), make=True); info = PreparedDataset.open(sys.argv[1]).manifest\n"
        "with kept.copying(info.partitions[1]) as copying: print(copying.alone, flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", script, path, base], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "True\n"
    with kept_in(base) as kept:
        results: list[StagingStatistics] = []
        thread = threading.Thread(target=lambda: results.append(run_job(path, base, kept)[0]))
        thread.start()
        while len(list((base / "job").glob("part-*.tar") if (base / "job").exists() else ())) < PARTITIONS - 1:
            assert thread.is_alive()
            time.sleep(0.01)
        thread.join(0.2)
        assert thread.is_alive() and not (base / "job" / local_name(1)).exists(), "it waits"
        if end == "killed":
            other.kill()
        else:
            monkeypatch.setattr(kept_copies, "_SILENT_S", 0.1)
        thread.join(60)
        other.kill()
        other.wait()
        other.stdout.close()
        assert results[0].done_partitions == PARTITIONS
        assert check_whole(kept) == PARTITIONS


def test_the_least_recently_used_make_room(tree: Path, base: Path, make_prepared: MakePrepared) -> None:
    path = make_prepared(tree, partitions=PARTITIONS)
    with kept_in(base) as kept, opened(path) as parts:
        infos = parts.prepared.manifest.partitions
        run_job(path, base, kept)
        (base / "job" / local_name(2)).rename(base / "in use")
        end_job(base)
        for age, number in enumerate((3, 0, 2, 1)):  # 1 was not used for longest
            copy = kept.find(infos)[number]
            os.utime(kept.path / copy.name, ns=((1_000 - age) * 10**9, copy.changed_ns))
        assert kept.room([]) == sum(infos[number].bytes for number in (0, 1, 3))
        kept.make_room(infos[1].bytes + 1)
        assert sorted(kept.find(infos)) == [2, 3], "1 had to go, and then 0: 2 is in use"
        limit = infos[2].bytes + infos[3].bytes
        Keeping(kept, keeps=True, capacity_bytes=limit).make_room(0)
        assert sorted(kept.find(infos)) == [2, 3]
        Keeping(kept, keeps=False, capacity_bytes=0).make_room(0)
        assert sorted(kept.find(infos)) == [2, 3], "--capacity of a job without --keep-local is about its own"
        Keeping(kept, keeps=True, capacity_bytes=limit).make_room(1)
        assert sorted(kept.find(infos)) == [2]
        Keeping(kept, keeps=True, capacity_bytes=0).make_room(0)
        assert sorted(kept.find(infos)) == [2]
        assert check_whole(kept) == 1
        # To take one is to use it. If it just goes, whoever has taken it has it.
        copy = kept.find(infos)[2]
        os.utime(kept.path / copy.name, ns=(10**9, copy.changed_ns))
        assert kept.take(copy, base / "taken")
        assert kept.find(infos)[2].used_s > time.time() - 60
        kept.discard(infos[2])
        assert not kept.take(copy, base / "too late")
        assert (base / "in use").stat().st_size == infos[2].bytes


def test_a_full_disk_drops_copies(
    tree: Path, base: Path, make_prepared: MakePrepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_prepared(tree, partitions=PARTITIONS)
    with kept_in(base) as kept, opened(path) as parts:
        run_job(path, base, kept)
        end_job(base)
        size = parts.prepared.manifest.partitions[0].bytes
        usage = os.statvfs(base)
        monkeypatch.setattr(capacity, "RESERVE_BYTES", usage.f_bavail * usage.f_frsize - size // 2)
        monkeypatch.setattr(os, "statvfs", lambda path: usage)  # others write to this disk as well
        reserve = max(capacity.RESERVE_BYTES, usage.f_blocks * usage.f_frsize // 100)
        if reserve != capacity.RESERVE_BYTES:
            pytest.skip("this disk is nearly full")
        disk = capacity.survey(kept.path, kept_bytes=kept.room([]))
        assert disk.kept_bytes == kept.room([]) and size // 2 - 4096 <= disk.free_bytes <= size // 2
        Keeping(kept, keeps=False).make_room(size)
        assert len(kept.copies()) == PARTITIONS - 1
        Keeping(kept, keeps=False, disk_ranks=2).make_room(size)
        assert len(kept.copies()) == PARTITIONS - 3


@needs_root
def test_copies_make_room_when_the_disk_is_full_before_it_was_said(
    tree: Path, tmp_path: Path, make_prepared: MakePrepared
) -> None:
    """As with a quota, of which nothing tells."""
    numbers = random.Random(3)
    contents = {f"{number}": numbers.randbytes(2_000_000) for number in range(3)}
    (tmp_path / "large").mkdir()
    for name, content in contents.items():
        (tmp_path / "large" / name).write_bytes(content)
    large, path = make_prepared(tmp_path / "large", partitions=3), make_prepared(tree, partitions=PARTITIONS)
    with small_file_system(tmp_path / "small", "6500k") as base, kept_in(base) as kept:
        run_job(path, base, kept)
        end_job(base)
        staging, _ = run_job(large, base, kept, contents=contents)
        assert (staging.done_partitions, staging.failed_partitions, staging.skipped_partitions) == (3, 0, 0)
        assert staging.done_bytes == staging.bytes
        assert check_whole(kept) >= 3


def test_a_directory_that_is_not_ours_alone(base: Path, tmp_path: Path) -> None:
    name = base / f"fanstore-kept-{os.geteuid()}"
    (tmp_path / "elsewhere").mkdir(0o700)
    name.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MountError, match=r"cannot use .*fanstore-kept-"):
        KeptCopies(base, make=True)
    name.unlink()
    name.mkdir()
    name.chmod(0o755)
    with pytest.raises(MountError, match="is not yours alone"):
        KeptCopies(base, make=True)
    name.rmdir()
    with pytest.raises(FileNotFoundError):
        KeptCopies(base, make=False)


def test_the_directory_goes_when_nobody_has_it(base: Path) -> None:
    with kept_in(base) as kept, kept_in(base) as other:
        assert not kept.remove_directory()
        other.close()
        assert kept.remove_directory()
        assert list(base.iterdir()) == []


def test_records_and_rests_that_mean_nothing_are_removed(tree: Path, base: Path, make_prepared: MakePrepared) -> None:
    path = make_prepared(tree, partitions=PARTITIONS)
    with kept_in(base) as kept, opened(path) as parts:
        run_job(path, base, kept)
        end_job(base)
        for name in ("0123456789abcdef.json", "x.copying", "probe-1", "y.new"):
            (kept.path / name).write_text("{}")
        (record,) = (json.loads(file.read_bytes()) for file in kept.path.glob("*.json") if file.stat().st_size > 2)
        assert record["dataset"] == str(path)
        (holding,) = kept.holdings()
        assert holding.dataset is not None and holding.dataset.dataset == str(path)
        kept.make_room(0)
        assert len(list(kept.path.iterdir())) == PARTITIONS + 5, "a job that begins may need them"
        with kept.copying(parts.prepared.manifest.partitions[0]):
            kept.remove(kept.copies()[:1])
            left = {file.name for file in kept.path.iterdir()} - {copy.name for copy in kept.copies()}
            assert {Path(name).suffix for name in left} == {".json", ".copying"}, "of a live job, and of the copies"
        kept.remove(kept.copies())
        assert list(kept.path.iterdir()) == []


def test_killed_at_any_moment(tmp_path: Path, base: Path, make_prepared: MakePrepared) -> None:
    """A process that stages is killed, again and again; what it leaves is whole, and serves the next one."""
    numbers = random.Random(7)
    contents = {f"{number}": numbers.randbytes(4_000_000) for number in range(6)}  # many blocks each
    (tmp_path / "large").mkdir()
    for name, content in contents.items():
        (tmp_path / "large" / name).write_bytes(content)
    path = make_prepared(tmp_path / "large", partitions=6)
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[3]);"
        "from core_parts import opened; from fanstore.dataset.kept_copies import KeptCopies;"
        "from fanstore.dataset.staging import reuse, stage\n"
        "kept = KeptCopies(Path(sys.argv[2]), make=True); directory = Path(sys.argv[2], sys.argv[4])\n"
        "directory.mkdir()\n"
        "with opened(Path(sys.argv[1])) as parts:\n"
        "    print('begins', flush=True); sys.stdin.readline()\n"
        "    for round in range(1000):\n"
        "        for copy in kept.copies()[round % 5 :: 5]: kept.remove([copy])\n"
        "        for file in directory.iterdir(): file.unlink()\n"
        "        parts.store._local.clear(); numbers = range(6)\n"
        "        reuse(parts.store, directory, kept, numbers, parts.statistics)\n"
        "        left = [number for number in numbers if not parts.store.is_local(number)]\n"
        "        stage(parts.prepared, parts.store, directory, partitions=left, kept=kept)\n"
    )
    arguments = [sys.executable, "-c", script, str(path), str(base), str(Path(__file__).parent)]
    # Two at a time, which disturb each other.
    for number in range(4):
        jobs = [
            subprocess.Popen([*arguments, f"job{number}-{each}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for each in range(2)
        ]
        for job in jobs:
            assert job.stdout is not None and job.stdin is not None
            assert job.stdout.readline() == b"begins\n"
        for job in jobs:
            assert job.stdin is not None
            job.stdin.write(b"\n")
            job.stdin.flush()
        for job in jobs:
            time.sleep(numbers.uniform(0.0, 0.05))
            assert job.poll() is None
            job.kill()
            job.communicate()
        with kept_in(base) as kept:
            check_whole(kept)
            run_job(path, base, kept, contents=contents)
            assert check_whole(kept) == 6
            end_job(base)
            kept.remove(copy for copy in kept.copies() if numbers.random() < 0.7)
