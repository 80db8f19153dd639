"""Outputs that several have open at once: what one writes, the others read, whether with direct I/O or not.

Who only writes does so with direct I/O, with the native engine (native/outputs/opens.h); a page that is read while
it is written must not stay there as it was.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import mounting
import pytest
from conftest import BOTH_ENGINES
from mounting import LIMIT_S, Mount, Mounted, needs_fuse

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse

RECORDS = 3_000


@pytest.fixture(scope="module")
def scratch(module_mount: Mount, tmp_path_factory: pytest.TempPathFactory, engine: str) -> Mounted:
    directory = tmp_path_factory.mktemp("open")
    (directory / "source").mkdir()
    (directory / "source/file").write_text("content\n")
    prepared = mounting.prepare(directory / "source", directory / "d.fan")
    mounted = mounting.Given() if mounting.GIVEN else module_mount(prepared, "--scratch")
    assert mounted.statistics()["engine"]["name"] == engine
    return mounted


@pytest.fixture
def path(scratch: Mounted, request: pytest.FixtureRequest) -> Path:
    return scratch.path / f"test-{abs(hash(request.node.name)):x}"


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def repeated(call: Callable[[], object]) -> Iterator[None]:
    """Something is done by another thread, again and again."""
    ending = threading.Event()

    def repeat() -> None:
        while not ending.is_set():
            call()

    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(repeat)
        try:
            yield
        finally:
            ending.set()
            thread.result(LIMIT_S)


def check_end(fd: int) -> None:
    """At the end of a log there is nothing but records."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, 200, max(0, size - 100))
    assert not tail[: min(size, 100)].strip(b"\n0123456789 "), "bytes that nobody has written"


def record(number: int) -> bytes:
    return b"%098d \n" % number


@pytest.mark.parametrize("first", ["reader", "writer"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_a_log_is_read_while_it_grows(path: Path, first: str, flags: int) -> None:
    path.touch()
    with (
        opened(path, flags if first == "reader" else os.O_WRONLY) as one,
        opened(path, os.O_WRONLY if first == "reader" else flags) as other,
    ):
        reader, writer = (one, other) if first == "reader" else (other, one)
        with repeated(lambda: check_end(reader)):
            for number in range(RECORDS):
                assert os.write(writer, record(number)) == 100
                assert os.pread(reader, 101, 100 * number) == record(number)
    assert path.read_bytes() == b"".join(map(record, range(RECORDS)))


@pytest.mark.parametrize("first", ["reader", "writer"])
def test_a_record_is_read_while_it_is_written_again(path: Path, first: str) -> None:
    path.write_bytes(bytes(4_096))
    with (
        opened(path, os.O_RDONLY if first == "reader" else os.O_WRONLY) as one,
        opened(path, os.O_WRONLY if first == "reader" else os.O_RDONLY) as other,
    ):
        reader, writer = (one, other) if first == "reader" else (other, one)
        with repeated(lambda: os.pread(reader, 4_096, 0)):
            for number in range(RECORDS):
                content = bytes([number % 251]) * 4_096
                os.pwrite(writer, content, 0)
                assert os.pread(reader, 4_096, 0) == content


def test_a_map_of_what_is_written(path: Path) -> None:
    """A map is of pages; who opens the file later must not find old ones."""
    with opened(path, os.O_WRONLY | os.O_CREAT) as writer:
        os.write(writer, bytes(8_192))
        with (
            opened(path, os.O_RDONLY) as reader,
            mmap.mmap(reader, 8_192, prot=mmap.PROT_READ) as mapped,
            repeated(lambda: mapped[:8_192]),
        ):
            for number in range(1, 400):
                os.pwrite(writer, bytes([number % 256]) * 8_192, 0)
    assert path.read_bytes() == bytes([399 % 256]) * 8_192


def test_one_after_the_other(path: Path) -> None:
    """Each open finds what the one before has written."""
    path.write_bytes(b"first")
    assert path.read_bytes() == b"first"
    with opened(path, os.O_RDONLY) as reader:
        assert os.read(reader, 9) == b"first"
        with opened(path, os.O_WRONLY | os.O_APPEND) as writer:
            os.write(writer, b", second")
        assert os.pread(reader, 99, 0) == b"first, second"
    with opened(path, os.O_WRONLY) as writer, opened(path, os.O_WRONLY | os.O_APPEND) as other:
        os.write(writer, b"FIRST")
        os.write(other, b", third")
        with opened(path, os.O_RDWR) as both:
            assert os.pread(both, 99, 0) == b"FIRST, second, third"
            os.pwrite(both, b"SECOND", 7)
        os.ftruncate(other, 13)
    assert path.read_bytes() == b"FIRST, SECOND"
