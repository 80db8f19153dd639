"""Jobs of three nodes that fill directories, for tests of what the others see of that and do there meanwhile.

Most tests of a module share one job, and have directories of their own in it. Use it with
``pytest_plugins = ["jobs", "filled_jobs"]``. (PYTEST_DONT_REWRITE: the test modules import it before pytest could.)
"""

import itertools
import os
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import leftovers
import pytest
from jobs import Job
from mounting import prepare

SIZE = 3
#: Files that a node creates in a row.
SERIES = 8
RANKS = range(SIZE)
#: Who fills a directory, and who else wants something of it: one of them decides (rank 0), or neither.
PAIRS = [(0, 1), (1, 0), (1, 2)]
#: A time that nobody would get by accident.
LONG_AGO_NS = 1_000_000_007_000_000_009


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("filled")
    (base / "source" / "dataset").mkdir(parents=True)
    (base / "source" / "dataset" / "file").write_bytes(b"of the dataset")
    return prepare(base / "source", base / "data.fan")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(scope="module")
def shared_job(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One job for all tests that harm nobody; at its end all that they have left must stand in ``--output``."""
    directory = tmp_path_factory.mktemp("shared")
    job = Job(prepared, directory, SIZE, ["--output", directory / "out"], local=True)
    try:
        job.wait_up()
        yield job
        sizes = sizes_below(job.mount(SIZE - 1))
        del sizes["dataset/file"]
        some = {path: (job.mount(0) / path).read_bytes() for path in list(sizes)[::10]}
        job.stop()
        assert sizes_below(directory / "out") == sizes
        assert {path: (directory / "out" / path).read_bytes() for path in some} == some
    finally:
        job.destroy()
        assert job.shared_memory() == []
        assert leftovers.mounts_below(directory) == []


def sizes_below(directory: Path) -> dict[str, int]:
    """By path, of all files."""
    sizes: dict[str, int] = {}
    for base, _, found in os.walk(directory):
        for name in found:
            path = os.path.join(base, name)
            sizes[os.path.relpath(path, directory)] = os.stat(path).st_size
    return sizes


@pytest.fixture
def job(shared_job: Job) -> Iterator[Job]:
    """The shared job; a warning in a log is charged to the test that has brought it about."""
    yield shared_job
    shared_job.check_logs()


folder_numbers = itertools.count()


def new_folder(job: Job, rank: int = 0) -> str:
    """A new directory that is an output, made by this node; its name."""
    folder = f"folder-{next(folder_numbers)}"
    os.mkdir(job.mount(rank) / folder)
    return folder


def names(directory: Path | int) -> list[str]:
    return sorted(os.listdir(directory))


def content_of(name: str) -> bytes:
    """What a file with this name has: different for each, of up to some pages."""
    return (name.encode() + b"\n") * (1 + zlib.crc32(name.encode()) % 300)


def write(path: Path, content: bytes) -> None:
    """A new file, with as few calls as possible."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    assert os.write(fd, content) == len(content)
    os.close(fd)


def fill(directory: Path, tag: str, count: int) -> dict[str, bytes]:
    """So many new files; their names and contents."""
    files = {name: content_of(name) for name in (f"{tag}-{number}" for number in range(count))}
    for name, content in files.items():
        write(directory / name, content)
    return files


def fill_more(job: Job, rank: int, folder: str, tag: str = "series") -> dict[str, bytes]:
    """Some new files, by this node; their names and contents."""
    return fill(job.mount(rank) / folder, tag, 2 * SERIES)


def filled_folder(job: Job, holder: int) -> tuple[str, dict[str, bytes]]:
    """A new directory that this node has filled and another one has made, and what is in it."""
    folder = new_folder(job, (holder + 1) % SIZE)
    return folder, fill_more(job, holder, folder)


def check(directory: Path, expected: dict[str, bytes], read: Collection[str] = ()) -> None:
    """All ways of looking into a directory agree; the contents of some files are read."""
    assert names(directory) == sorted(expected)
    with os.scandir(directory) as entries:
        assert {entry.name: entry.stat().st_size for entry in entries} == {
            name: len(content) for name, content in expected.items()
        }
    for name in read:
        assert (directory / name).read_bytes() == expected[name], name
