"""A partition file as several threads write it: every byte where it belongs, on a disk and elsewhere."""

import mmap
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest
import xxhash

from fanstore.prep import writer as writing
from fanstore.prep.writer import LEAD_BYTES, TAR_END, PartitionWriter

MIB = 1 << 20


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk, whose files are written without the page cache, and one that is all page cache."""
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="fanstore-test-", dir="/dev/shm") as name:
        yield Path(name)


def batches(chance: random.Random) -> list[bytes]:
    """Of all lengths that matter: none, less than a block, exact blocks, and long ones."""
    blocks = [0, 1, 7, 8, 9, 16, 1, 2, 3, 4096, 4095, 0, 1] + [chance.randrange(3000) for _ in range(40)]
    return [chance.randbytes(512 * count) for count in blocks]


def write(writer: PartitionWriter, parts: list[bytes], streamed: set[int], jobs: int = 4) -> tuple[int, int]:
    """Write all parts from ``jobs`` threads; those in ``streamed`` as large files are. Returns length and checksum."""
    stop = threading.Event()
    numbers = iter(range(len(parts)))
    lock = threading.Lock()

    def work() -> None:
        buffer = mmap.mmap(-1, LEAD_BYTES + 8 * MIB)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            part = parts[number]
            buffer[LEAD_BYTES : LEAD_BYTES + len(part)] = part
            writer.wait_turn(number, stop)
            if number in streamed:
                stream(writer, part)
            else:
                writer.append(buffer, len(part))

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(work) for _ in range(jobs)]):
            if done.exception() is not None:
                stop.set()  # the others wait for a turn that never comes
            done.result()
    return writer.finish()


def stream(writer: PartitionWriter, part: bytes) -> None:
    """As giant.py does it: zeros are left out, and a first attempt may have been given up."""
    begin = writer.position
    writer.begin_stream()
    writer.stream(memoryview(b"an attempt that was longer" * 400), begin)
    os.ftruncate(writer.fd, begin)
    for start in range(0, len(part), MIB):
        piece = part[start : start + MIB]
        if piece.strip(b"\0"):
            writer.stream(memoryview(piece), begin + start)
    assert writer.hasher is not None
    writer.hasher.update(part)
    writer.end_stream(begin + len(part))


def check(path: Path, parts: list[bytes], outcome: tuple[int, int]) -> None:
    expected = b"".join(parts) + TAR_END
    assert path.read_bytes() == expected
    assert outcome == (len(expected), xxhash.xxh3_64_intdigest(expected))


def test_every_byte_is_where_it_belongs(folder: Path) -> None:
    on_a_disk = os.major(folder.stat().st_dev) != 0
    for seed in range(5):
        parts = batches(random.Random(seed))
        path = folder / f"part-{seed}.tar"
        writer = PartitionWriter.create(path)
        assert (writer.direct_fd >= 0) == on_a_disk
        check(path, parts, write(writer, parts, set()))


def test_large_files_between_the_batches(folder: Path) -> None:
    chance = random.Random(1)
    parts = batches(chance)
    # A large file that ends in a hole, at the end of a block and elsewhere, and one that is nothing but a hole.
    for place, blocks in ((5, 3 * 2048 + 3), (9, 2 * 2048), (20, 1), (21, 2048 + 7), (len(parts), 4 * 2048 + 5)):
        parts.insert(place, chance.randbytes(MIB) + bytes(512 * blocks))
    parts.insert(30, bytes(3 * MIB + 512))
    path = folder / "part.tar"
    streamed = {number for number, part in enumerate(parts) if part.endswith(bytes(512))}
    assert len(streamed) == 6
    check(path, parts, write(PartitionWriter.create(path), parts, streamed))


def test_a_disk_that_wants_other_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses blocks that are not the disk's: then the page cache is used, and nothing is lost."""
    writer = PartitionWriter.create(tmp_path / "part.tar")
    if writer.direct_fd < 0:
        writer.close()
        pytest.skip("the temporary directory is not on a disk")
    monkeypatch.setattr(writing, "BLOCK_BYTES", 1000)
    buffer = mmap.mmap(-1, 64 * MIB)
    with pytest.raises(OSError, match="Invalid argument"):
        os.pwrite(writer.direct_fd, memoryview(buffer)[488 : 488 + 1000], 1000)
    parts = batches(random.Random(2))
    for number, part in enumerate(parts):
        buffer[LEAD_BYTES : LEAD_BYTES + len(part)] = part
        writer.wait_turn(number, threading.Event())
        writer.append(buffer, len(part))
    check(tmp_path / "part.tar", parts, writer.finish())


def test_nothing_is_written(folder: Path) -> None:
    writer = PartitionWriter.create(folder / "part.tar")
    writer.skip_turn()
    check(folder / "part.tar", [], writer.finish())
    assert (writer.fd, writer.direct_fd) == (-1, -1)
