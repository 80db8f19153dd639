"""fanstore-prep when things go wrong: files that change, signals, full disks. Nothing silent, nothing left behind.

What happens between the scan and the packing is brought about from the callback that prep calls in between, so that no
test depends on being quick enough.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tars
import zstandard
from commands import BIN, assert_one_error, run_inside, run_inside_as
from materialise import Prepared, materialise
from oddities import CHUNK_BYTES, IS_ROOT, compare_trees, compressible, incompressible

from fanstore.errors import SourceError
from fanstore.prep.build import Outcome, Request, prepare
from fanstore.prep.plan import Limits
from fanstore.prep.scan import scan
from fanstore.prep.sources import DirectorySource
from fanstore.transport.ranks import Solo

needs_root = pytest.mark.skipif(not IS_ROOT, reason="needs root")
NOBODY = 65534
MIB = 1 << 20


def prepare_with(source: Path, out: Path, between: Callable[[], object], codec: str = "none", jobs: int = 2) -> Outcome:
    """Prepare, with something happening after the scan and before the first file is read."""

    def note(sentence: str) -> None:
        if sentence.startswith("found "):
            between()

    request = Request([str(source)], str(out), Limits(1 << 30, None, []), codec, jobs, quiet=True)
    outcome = prepare(request, Solo(), note)
    assert outcome is not None
    return outcome


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "d").mkdir(parents=True)
    for number in range(30):
        (root / "d" / f"file-{number:02d}").write_bytes(compressible(20_000, number))
    os.link(root / "d" / "file-07", root / "linked-07")
    (root / "big").write_bytes(incompressible(2 * CHUNK_BYTES + 5))
    return root


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def same_size(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to("file-01")


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: dict[str, Callable[[Path], object]] = {
    "vanishes": lambda path: path.unlink(),
    "grows": append,
    "shrinks": lambda path: os.truncate(path, 3),
    "becomes empty": lambda path: os.truncate(path, 0),
    "is written with the same size": same_size,
    "becomes a pipe": to_pipe,
    "becomes a symbolic link": to_symlink,
    "becomes a directory": to_directory,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_a_file_that_changes_is_listed_and_left_out(
    change: Callable[[Path], object], codec: str, source: Path, tmp_path: Path
) -> None:
    outcome = prepare_with(source, tmp_path / "out.fan", lambda: change(source / "d" / "file-05"), codec)
    assert [path for path, _ in outcome.problems] == [b"d/file-05"]
    prepared = Prepared(tmp_path / "out.fan")
    assert prepared.index.resolve(b"d/file-05") == -1
    assert prepared.index.resolve(b"d/file-06") > 0
    assert prepared.manifest["totals"]["files"] == 30
    _check_rest(source, prepared, {"d/file-05"}, tmp_path)


def _check_rest(source: Path, prepared: Prepared, without: set[str], tmp_path: Path) -> None:
    """All else is in the dataset, and in its tar files, exactly."""
    expected = tmp_path / "expected"
    subprocess.run(["cp", "-a", source, expected], check=True, timeout=60)
    for name in without:
        path = expected / name
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    back = materialise(prepared, tmp_path / "back")
    # The time of the directory that held the file has changed with it.
    differences = compare_trees(expected, back, root=False)
    assert [line for line in differences if not line.startswith("b'd': mtime")] == []
    if not prepared.compressed():
        unpacked = tmp_path / "unpacked"
        unpacked.mkdir()
        for info in prepared.manifest["partitions"]:
            subprocess.run(["tar", "-xpf", prepared.path / info["file"], "-C", unpacked], check=True, timeout=60)
        assert compare_trees(back, unpacked) == []


LINKED = {
    "big": {"big", "linked-big"},
    "d/file-07": {"d/file-07", "linked-07"},
    "giant": {"giant", "linked-giant", "linked-giant-again"},
}


@pytest.mark.parametrize("path, lost", LINKED.items(), ids=LINKED.keys())
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_large_and_linked_files_that_change(
    path: str, lost: set[str], codec: str, source: Path, tmp_path: Path
) -> None:
    """All names of a file are lost with it, and none of them is in the tar; those of other files are."""
    with open(source / "giant", "wb") as file:  # more than is packed in memory
        file.truncate(70 * MIB)
    for link in ("linked-big", "linked-giant", "linked-giant-again"):
        os.link(source / link.split("-")[1], source / link)
    outcome = prepare_with(source, tmp_path / "out.fan", lambda: append(source / path), codec)
    assert {os.fsdecode(name) for name, _ in outcome.problems} == lost
    _check_rest(source, Prepared(tmp_path / "out.fan"), lost, tmp_path)


@pytest.mark.parametrize("index_only", [False, True])
@pytest.mark.parametrize("change", [append, same_size], ids=["grows", "is written with the same size"])
def test_a_tar_that_changes(change: Callable[[Path], object], index_only: bool, tmp_path: Path) -> None:
    """What its members are is not known any more: an error, and no dataset."""
    tar = tmp_path / "shard.tar"
    tar.write_bytes(
        b"".join(tars.member(b"%d" % number, compressible(9_000, number)) for number in range(9)) + bytes(1024)
    )
    limits = Limits(1 << 30, None, [])
    request = Request([str(tar)], str(tmp_path / "out.fan"), limits, "none", 2, index_only=index_only, quiet=True)

    def note(sentence: str) -> None:
        if sentence.startswith("found "):
            change(tar)

    with pytest.raises(SourceError, match="was changed while it was read"):
        prepare(request, Solo(), note)
    assert os.listdir(tmp_path) == ["shard.tar"]


def test_a_whole_directory_vanishes(source: Path, tmp_path: Path) -> None:
    outcome = prepare_with(source, tmp_path / "out.fan", lambda: shutil.rmtree(source / "d"))
    assert len(outcome.problems) == 29, "all but the file that has another name elsewhere"
    prepared = Prepared(tmp_path / "out.fan")
    assert prepared.paths() == {b"d", b"d/file-07", b"linked-07", b"big"}


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_a_file_of_many_chunks_that_grows_while_it_is_read(codec: str, tmp_path: Path) -> None:
    """Larger than any buffer, so it is streamed; somebody appends to it all the time."""
    source = tmp_path / "source"
    source.mkdir()
    with open(source / "giant", "wb") as file:
        file.truncate(300 * MIB)
    (source / "small").write_bytes(b"small")
    stop = threading.Event()

    def grow() -> None:
        while not stop.is_set():
            append(source / "giant")

    grower = threading.Thread(target=grow)
    try:
        outcome = prepare_with(source, tmp_path / "out.fan", grower.start, codec)
    finally:
        stop.set()
        grower.join()
    assert [path for path, _ in outcome.problems] == [b"giant"]
    prepared = Prepared(tmp_path / "out.fan")
    assert prepared.paths() == {b"small"}
    assert sum(map(len, prepared.parts)) < MIB, "nothing of the failed file is left in the partition"
    subprocess.run(["tar", "-tf", tmp_path / "out.fan" / "part-00000.tar"], check=True, timeout=60, capture_output=True)


def test_a_directory_that_vanishes_during_the_scan(tmp_path: Path) -> None:
    """The scan itself meets a directory that it cannot list; it goes on and says so."""
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a" / "file").write_bytes(b"x")
    (source / "b").mkdir()

    class Vanishing(DirectorySource):
        def open_directory(self, path: bytes, above: list[os.stat_result] | None = None) -> int:
            if path == b"b":
                (source / "b").rmdir()
            return super().open_directory(path, above)

    directory = Vanishing(str(source))
    try:
        found = scan([directory], lambda _: None)
    finally:
        directory.close()
    assert found.problems == [(b"b", "cannot be listed: No such file or directory")]


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that an ordinary user may enter, which pytest's own is not."""
    path = Path(tempfile.mkdtemp(prefix="fanstore-test-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@needs_root
def test_unreadable_files_and_directories(open_place: Path) -> None:
    source = open_place / "source"
    (source / "closed").mkdir(parents=True)
    for name in ("fine", "secret", "closed/inside"):
        (source / name).write_bytes(compressible(1_000))
    (source / "secret").chmod(0o000)
    (source / "closed").chmod(0o000)
    result = run_inside_as(NOBODY, "prep", source, open_place / "out.fan")
    assert result.returncode == 3, result.stderr
    assert "'secret': Permission denied" in result.stderr
    assert "'closed': cannot be listed: Permission denied" in result.stderr
    assert "2 entries could not be read" in result.stderr
    prepared = Prepared(open_place / "out.fan")
    assert prepared.paths() == {b"fine", b"closed"}


@needs_root
def test_an_unreadable_source(open_place: Path) -> None:
    (open_place / "source").mkdir(mode=0o700)
    assert_one_error(run_inside_as(NOBODY, "prep", open_place / "source", open_place / "out.fan"), "prep")
    assert os.listdir(open_place) == ["source"]


@needs_root
def test_a_place_where_nothing_can_be_written(open_place: Path) -> None:
    (open_place / "source").mkdir()
    (open_place / "readonly").mkdir(mode=0o555)
    result = run_inside_as(NOBODY, "prep", open_place / "source", open_place / "readonly" / "out.fan")
    assert "Permission denied" in assert_one_error(result, "prep")


def test_many_problems_are_all_counted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(200):
        (source / f"{number:03d}").write_bytes(b"x")
    outcome = prepare_with(source, tmp_path / "out.fan", lambda: shutil.rmtree(source))
    assert len(outcome.problems) == 200
    assert Prepared(tmp_path / "out.fan").paths() == set()


# Signals


def sparse(root: Path) -> list[Path]:
    """One file of 100 GiB that is not there: it would be streamed for a minute."""
    root.mkdir()
    with open(root / "giant", "wb") as file:
        file.truncate(100 << 30)
    return [root]


def many(root: Path) -> list[Path]:
    """The same 40 MiB under a hundred names in as many directories: no hard links, but no room on disk either."""
    root.mkdir()
    for number in range(400):
        with open(root / f"file-{number}", "wb") as file:
            file.truncate(50 * MIB)
    return [root]


def gzipped(root: Path) -> list[Path]:
    """A tar.gz of gigabytes of zeros in a few kilobytes of many members."""
    root.mkdir()
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = compressor.compress(bytes(64 * MIB)) + compressor.flush()
    (root / "x.tar.gz").write_bytes(zeros * 500)
    return [root / "x.tar.gz"]


def zstd(root: Path) -> list[Path]:
    root.mkdir()
    (root / "x.tar.zst").write_bytes(zstandard.ZstdCompressor().compress(bytes(64 * MIB)) * 500)
    return [root / "x.tar.zst"]


def plain_tar(root: Path) -> list[Path]:
    """For --index-only: one member of 100 GiB, with a hole for its content."""
    root.mkdir()
    with open(root / "x.tar", "wb") as file:
        file.write(tars.block(b"giant", size_field=tars.base256(100 << 30, 12)))
        file.truncate(512 + (100 << 30) + 1024)
    return [root / "x.tar"]


LONG_WORK: dict[str, tuple[Callable[[Path], list[Path]], list[str]]] = {
    "one giant file": (sparse, []),
    "one giant file, lz4": (sparse, ["--codec", "lz4"]),
    "many files": (many, ["--partitions", "3"]),
    "many files, lz4hc": (many, ["--codec", "lz4hc"]),
    "unpacking gzip": (gzipped, []),
    "unpacking zstd": (zstd, []),
    "index only": (plain_tar, ["--index-only"]),
}


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_bytes(pid: int) -> int:
    """Bytes that a process has read so far, with read, pread and so on."""
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])


@pytest.mark.parametrize("make, options", LONG_WORK.values(), ids=LONG_WORK.keys())
def test_interrupted_in_the_middle(make: Callable[[Path], list[Path]], options: list[str], tmp_path: Path) -> None:
    sources = make(tmp_path / "source")
    command = [str(BIN / "fanstore-prep"), *map(str, sources), str(tmp_path / "out.fan"), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def in_the_middle() -> bool:
        if not list(tmp_path.glob(".out.fan.partial-*")):
            return False
        written = sum(path.stat().st_size for path in tmp_path.glob(".out.fan.partial-*/*"))
        return written > MIB or read_bytes(process.pid) > 300 * MIB

    try:
        wait_for(in_the_middle, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)  # all of its work would take much longer
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert errors.rstrip().endswith("fanstore-prep: interrupted")
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == ["source"], "neither the dataset nor anything of it"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_clean_up_too(number: signal.Signals, tmp_path: Path) -> None:
    sparse(tmp_path / "source")
    command = [str(BIN / "fanstore-prep"), str(tmp_path / "source"), str(tmp_path / "out.fan")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: bool(list(tmp_path.glob(".out.fan.partial-*/part*"))), process)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert os.listdir(tmp_path) == ["source"]


def test_a_killed_run_is_swept_by_the_next(tmp_path: Path) -> None:
    sparse(tmp_path / "source")
    command = [str(BIN / "fanstore-prep"), str(tmp_path / "source"), str(tmp_path / "out.fan")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: bool(list(tmp_path.glob(".out.fan.partial-*/part*"))), process)
        (tmp_path / "small").mkdir()
        # Another run for the same name does not touch what a live one is writing.
        assert run_inside("prep", tmp_path / "small", tmp_path / "out.fan").returncode == 0
        assert list(tmp_path.glob(".out.fan.partial-*/part*"))
    finally:
        process.kill()
        process.communicate()
    assert list(tmp_path.glob(".out.fan.partial-*")), "a killed process cannot clean up"
    assert run_inside("prep", tmp_path / "small", tmp_path / "out.fan", "--force").returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["out.fan", "small", "source"]


def test_the_old_dataset_survives_an_interrupted_replacement(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").write_bytes(b"old")
    assert run_inside("prep", tmp_path / "old", tmp_path / "out.fan").returncode == 0
    sparse(tmp_path / "source")
    command = [str(BIN / "fanstore-prep"), str(tmp_path / "source"), str(tmp_path / "out.fan"), "--force"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: bool(list(tmp_path.glob(".out.fan.partial-*/part*"))), process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert sorted(os.listdir(tmp_path)) == ["old", "out.fan", "source"]
    assert Prepared(tmp_path / "out.fan").paths() == {b"file"}


# Full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    point = tmp_path / "disk"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", point], check=True, timeout=60)
    yield point
    subprocess.run(["umount", point], check=True, timeout=60)


FULL: dict[str, tuple[list[int], list[str]]] = {
    "many small files": ([100_000] * 150, []),
    "many small files, several partitions": ([100_000] * 150, ["--partitions", "5"]),
    "one large file": ([12 * MIB], []),
    "a streamed file": ([200 * MIB], []),
    "a streamed file, lz4": ([200 * MIB], ["--codec", "lz4"]),
}


@needs_root
@pytest.mark.parametrize("sizes, options", FULL.values(), ids=FULL.keys())
def test_a_full_disk(sizes: list[int], options: list[str], small_disk: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number, size in enumerate(sizes):
        (source / f"{number:03d}").write_bytes(
            incompressible(min(size, 12 * MIB), number) * (max(1, size // (12 * MIB)))
        )
    result = run_inside("prep", source, small_disk / "out.fan", *options)
    assert "full" in assert_one_error(result, "prep")
    assert os.listdir(small_disk) == []


@needs_root
def test_a_disk_that_is_full_when_the_index_is_written(small_disk: Path, tmp_path: Path) -> None:
    """Empty files with long names: their index is larger than what the partition leaves."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3_300):
        (source / (f"{number:05d}" + "n" * 150)).touch()
    result = run_inside("prep", source, small_disk / "fits.fan")
    assert result.returncode == 0, "the test needs a partition that just fits: " + result.stderr
    used = sum(path.stat().st_size for path in (small_disk / "fits.fan").iterdir())
    part = (small_disk / "fits.fan" / "part-00000.tar").stat().st_size
    shutil.rmtree(small_disk / "fits.fan")
    with open(small_disk / "ballast", "wb") as file:
        file.write(bytes(8 * MIB - part - (used - part) // 2))
    result = run_inside("prep", source, small_disk / "out.fan")
    assert_one_error(result, "prep")
    assert os.listdir(small_disk) == ["ballast"]


@needs_root
@pytest.mark.parametrize("make", [gzipped, zstd])
def test_a_disk_that_is_full_when_a_source_is_unpacked(
    make: Callable[[Path], list[Path]], small_disk: Path, tmp_path: Path
) -> None:
    result = run_inside("prep", *make(tmp_path / "source"), small_disk / "out.fan")
    assert "No space left" in assert_one_error(result, "prep")
    assert os.listdir(small_disk) == []


@needs_root
def test_the_old_dataset_survives_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    for name, size in (("old", 1_000), ("new", 12 * MIB)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(incompressible(size))
    assert run_inside("prep", tmp_path / "old", small_disk / "out.fan").returncode == 0
    assert_one_error(run_inside("prep", tmp_path / "new", small_disk / "out.fan", "--force"), "prep")
    assert os.listdir(small_disk) == ["out.fan"]
    prepared = Prepared(small_disk / "out.fan")
    assert compare_trees(tmp_path / "old", materialise(prepared, tmp_path / "back")) == []
