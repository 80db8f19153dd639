"""Jobs in which directories are lent to the node that fills them (fanstore/core/leases.py), for the tests of that.

A node that creates one file after another in a directory asks nobody any more, so others could see an old state, win a
name that is taken, or lose what the node had created when it dies. Each test has a directory lent first (``borrow``),
and sees that it is: otherwise it would test nothing. Most tests of a module share one job, and have directories of
their own in it. Use it with ``pytest_plugins = ["jobs", "lease_jobs"]``. (PYTEST_DONT_REWRITE: the test modules import
it before pytest could.)
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

from fanstore.core.leases import SERIES, SERIES_MOST

SIZE = 3
RANKS = range(SIZE)
#: Who has a directory, and who else wants something of it: one of them decides (rank 0), or neither.
PAIRS = [(0, 1), (1, 0), (1, 2)]
#: A time that nobody would get by accident.
LONG_AGO_NS = 1_000_000_007_000_000_009


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("leases")
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


def asked(job: Job, rank: int) -> int:
    """How many requests Python has answered on this node; to ask for it adds up to five."""
    return int(job.statistics(rank)["engine"]["answered_python"])


def borrow(job: Job, rank: int, folder: str, tag: str = "series") -> dict[str, bytes]:
    """Create files until Python is not asked any more: the node has the directory. Their names and contents."""
    files: dict[str, bytes] = {}
    before = asked(job, rank)
    for turn in range(2 + 2 * SERIES_MOST // SERIES):
        files |= fill(job.mount(rank) / folder, f"{tag}-{turn}", SERIES)
        now = asked(job, rank)
        if now - before < SERIES:  # of a file that is decided on together, at least CREATE and FLUSH
            return files
        before = now
    pytest.fail(f"rank {rank} does not borrow {folder}\n{job.evidence()}", pytrace=False)


def lent_folder(job: Job, holder: int) -> tuple[str, dict[str, bytes]]:
    """A new directory that this node has borrowed, and what is in it."""
    folder = new_folder(job, (holder + 1) % SIZE)
    return folder, borrow(job, holder, folder)


def check(directory: Path, expected: dict[str, bytes], read: Collection[str] = ()) -> None:
    """All ways of looking into a directory agree; the contents of some files are read."""
    assert names(directory) == sorted(expected)
    with os.scandir(directory) as entries:
        assert {entry.name: entry.stat().st_size for entry in entries} == {
            name: len(content) for name, content in expected.items()
        }
    for name in read:
        assert (directory / name).read_bytes() == expected[name], name
