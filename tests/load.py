"""Read load on mounts: random files, compared with their source, past the caches of the kernel; how long reads take.

Owns the threads that read; knows nothing of FanStore. A read that fails or differs is recorded, and the thread goes on.
Used by the tests of jobs and by benchmarks/soak.py.
"""

import errno
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from oddities import compressible, incompressible


def make_files(root: Path, count: int, longest: int = 300_000) -> Path:
    """``count`` files of many sizes in a few directories; every other one shrinks well."""
    for number in range(count):
        folder = root / f"class-{number % 5}"
        folder.mkdir(parents=True, exist_ok=True)
        size = 1 + (number * 7919 * 1000) % longest
        content = compressible(size, number) if number % 2 else incompressible(size, number)
        (folder / f"{number:05d}.bin").write_bytes(content)
    return root


def read_past_cache(path: Path) -> bytes:
    """The bytes of a file as its daemon has them; the kernel keeps none of them for the next read."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        content = bytearray()
        while block := os.read(fd, 1 << 20):
            content += block
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return bytes(content)
    finally:
        os.close(fd)


def forget(root: Path) -> None:
    """Let the kernel forget the content of all files below."""
    for _, _, files, directory_fd in os.fwalk(os.fsencode(root)):
        for name in files:
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory_fd)
            except OSError:
                continue  # a symbolic link
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Source:
    """The files of a directory, in memory: what every mount must show."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.contents = {
            str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
        }

    def check(self, mount: Path, names: Sequence[str] | None = None) -> None:
        """Read all files (or these) once through a mount."""
        for name in names if names is not None else self.contents:
            assert read_past_cache(mount / name) == self.contents[name], f"{mount / name} differs"


class Load:
    """Threads that read random files of some mounts.

    Attributes:
        failures: what went wrong, in words. reads, bytes: what went well. slowest_s: the longest read since ``reset``.
        Counters are per thread (one writer each) and summed when asked.
    """

    def __init__(self, source: Source, mounts: Sequence[Path], threads_per_mount: int = 2, seed: int = 1) -> None:
        self.failures: list[str] = []
        self._source = source
        self._names = list(source.contents)
        self._stop = threading.Event()
        self._reads = [0] * (len(mounts) * threads_per_mount)
        self._bytes = [0] * len(self._reads)
        self._slowest_s = [0.0] * len(self._reads)
        self._threads = [
            threading.Thread(
                target=self._run, args=(number, mounts[number % len(mounts)], random.Random(seed + number)), daemon=True
            )
            for number in range(len(self._reads))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def reads(self) -> int:
        return sum(self._reads)

    @property
    def bytes(self) -> int:
        return sum(self._bytes)

    @property
    def slowest_s(self) -> float:
        return max(self._slowest_s)

    def reset(self) -> None:
        """Forget how long reads took so far (one under way now may still be counted)."""
        self._slowest_s[:] = [0.0] * len(self._slowest_s)

    def wait_reads(self, count: int, limit_s: float = 60.0) -> None:
        """Until every thread has read so many more files."""
        goals = [done + count for done in self._reads]
        deadline = time.monotonic() + limit_s
        while any(done < goal for done, goal in zip(self._reads, goals, strict=True)):
            assert all(thread.is_alive() for thread in self._threads), f"a mount is gone: {self.failures[:5]}"
            assert time.monotonic() < deadline, f"reads hang: {self._reads}, {self.failures[:5]}"
            time.sleep(0.01)

    def stop(self, limit_s: float = 60.0) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(limit_s)
        assert not any(thread.is_alive() for thread in self._threads), "a read hangs"

    def _run(self, number: int, mount: Path, chance: random.Random) -> None:
        while not self._stop.is_set():
            name = chance.choice(self._names)
            start_s = time.monotonic()
            try:
                content = read_past_cache(mount / name)
            except OSError as error:
                self.failures.append(f"{mount / name}: {error}")
                if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
                    return  # its daemon is dead, and will be
                continue
            took_s = time.monotonic() - start_s
            if content != self._source.contents[name]:
                self.failures.append(f"{mount / name}: differs")
            self._slowest_s[number] = max(self._slowest_s[number], took_s)
            self._reads[number] += 1
            self._bytes[number] += len(content)


@contextmanager
def load(source: Source, mounts: Sequence[Path], threads_per_mount: int = 2) -> Iterator[Load]:
    """Load for the time of a block; no read may have failed at its end."""
    running = Load(source, mounts, threads_per_mount)
    try:
        yield running
    finally:
        running.stop()
    assert running.failures == []
