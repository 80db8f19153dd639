"""How fast this node is: its disk, its memory, its decompression, and the shared file system as it sees it.

Owns the test files and their removal; each function measures one thing, within a few seconds. Used by fanstore-plan
measure. Blocks; threads of its own read and write at the same time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fanstore.dataset.memory_limit import group_memory
from fanstore.doctor.limits import available_bytes
from fanstore.format.codec_table import CODECS
from fanstore.format.prepared import PreparedDataset

#: Names of our directories begin so: what a killed run leaves can be told.
PREFIX = ".fanstore-measure-"
#: No reader goes on for longer in one step.
STEP_S = 4.0
_BLOCK_BYTES = 1 << 20
_MEMORY_BYTES, _MEMORY_S = 32 << 20, 0.2
_DECODE_FILES, _DECODE_S = 64, 0.5


@contextlib.contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """A new directory there, which is gone at the end. Raises OSError."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Done:
    """What some threads have done together."""

    files: int
    nbytes: int
    seconds: float

    @property
    def files_per_s(self) -> float:
        return self.files / max(self.seconds, 1e-9)

    @property
    def mb_per_s(self) -> float:
        return self.nbytes / 1e6 / max(self.seconds, 1e-9)


def write_files(directory: Path, count: int, nbytes: int) -> None:
    """So many files of so many bytes, on the disk when it returns, and not in this node's memory."""
    directory.mkdir(parents=True, exist_ok=True)
    block = os.urandom(min(nbytes, _BLOCK_BYTES))
    for number in range(count):
        with open(directory / str(number), "wb", buffering=0) as file:
            for start in range(0, nbytes, _BLOCK_BYTES):
                file.write(block[: nbytes - start])
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_files(directories: Sequence[Path]) -> Done:
    """Open, read and close all files: a thread for each directory, and none for longer than STEP_S."""
    return _together([_reader(directory) for directory in directories])


#: Does something until the time is over or it is through; returns files and bytes.
_Work = Callable[[float], tuple[int, int]]


def _reader(directory: Path) -> _Work:
    names = sorted(os.listdir(directory))

    def read(end_s: float) -> tuple[int, int]:
        files = total = 0
        for name in names:
            descriptor = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while (piece := len(os.read(descriptor, _BLOCK_BYTES))) and time.perf_counter() < end_s:
                    total += piece
            finally:
                os.close(descriptor)
            files += 1
            if time.perf_counter() >= end_s:
                break
        return files, total

    return read


def _together(works: Sequence[_Work]) -> Done:
    """All at the same time, a thread for each. Ctrl-C ends those that have not begun, and waits for the others."""
    ready = threading.Barrier(len(works) + 1)
    results: list[tuple[int, int]] = []
    failures: list[Exception] = []

    def run(work: _Work) -> None:
        try:
            ready.wait()
            results.append(work(time.perf_counter() + STEP_S))
        except threading.BrokenBarrierError:
            return  # interrupted
        except Exception as error:  # noqa: BLE001  # raised again below, by who waits
            failures.append(error)

    # By hand, and daemons: a signal in the middle of ThreadPoolExecutor.submit leaves a thread that nothing ends.
    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    begin_s = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
        ready.wait()
        begin_s = time.perf_counter()
    except BaseException:
        ready.abort()
        raise
    finally:
        for thread in threads:
            if thread.is_alive():
                thread.join()
    seconds = time.perf_counter() - begin_s
    if failures:
        raise failures[0]
    return Done(sum(files for files, _ in results), sum(count for _, count in results), seconds)


def disk_write(directory: Path, threads: int, nbytes: int) -> Done:
    """Each thread writes a file, until it is on the disk. They stay there, to be read."""

    def writer(number: int) -> _Work:
        def write(end_s: float) -> tuple[int, int]:
            write_files(directory / str(number), 1, nbytes)
            return 1, nbytes

        return write

    return _together([writer(number) for number in range(threads)])


def disk_read(directory: Path, threads: int, block_bytes: int) -> Done:
    """Each thread reads pieces of a file that ``disk_write`` left, at random places, with direct I/O if that is
    possible."""
    size = -(-block_bytes // 4096) * 4096  # whole pages

    def reader(number: int) -> _Work:
        path = directory / str(number) / "0"
        places = max(1, path.stat().st_size // size)
        order = np.random.default_rng(number).permutation(places).tolist()

        def read(end_s: float) -> tuple[int, int]:
            total = 0
            with _open_past_cache(path) as descriptor, mmap.mmap(-1, size) as buffer:
                for place in order:
                    total += os.preadv(descriptor, [buffer], place * size)
                    if time.perf_counter() >= end_s:
                        break
            return 1, total

        return read

    return _together([reader(number) for number in range(threads)])


@contextlib.contextmanager
def _open_past_cache(path: Path) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
    except OSError:  # not on every file system
        descriptor = os.open(path, flags)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def free_memory_bytes() -> int:
    """For caches: what is available, or what the control group of this process leaves."""
    group = group_memory()
    return available_bytes() if group is None else min(available_bytes(), group.room_bytes)


def memory_mb_per_s() -> float:
    """One thread copies."""
    source, target = np.ones(_MEMORY_BYTES, dtype=np.uint8), np.zeros(_MEMORY_BYTES, dtype=np.uint8)
    copied, begin_s = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - begin_s) < _MEMORY_S:
        np.copyto(target, source)
        copied += _MEMORY_BYTES
    return copied / 1e6 / taken_s


def decode_mb_per_s(prepared: PreparedDataset) -> float | None:
    """One core decompresses files of the dataset: MB/s of content. None if those that were looked at are not
    compressed."""
    index = prepared.index
    random = np.random.default_rng(1)
    compressed = np.flatnonzero(np.frombuffer(index.codec, dtype=np.uint32))
    chunks = []
    for entry in random.permutation(compressed)[:_DECODE_FILES].tolist():
        chunk = index.chunk(entry, 0)
        with contextlib.closing(prepared.storage.open(prepared.manifest.partitions[chunk.partition].file)) as file:
            stored = file.read(chunk.offset, chunk.stored_bytes)
        chunks.append((CODECS[index.codec[entry]], stored, chunk.content_bytes))
    if not chunks:
        return None
    total, begin_s = 0, time.perf_counter()
    while time.perf_counter() - begin_s < _DECODE_S:
        for codec, stored, content_bytes in chunks:
            codec.decode_chunk(stored, content_bytes, True)
            total += content_bytes
    return total / 1e6 / (time.perf_counter() - begin_s)
