"""One measured pass over a list of files, by the C reader or by Python processes, and the check that bytes are right.

Owns the readers and their results; knows nothing of mounts. Used by read_peers.py. The work is done in child
processes, so that this interpreter is no part of what is measured.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.command import BenchmarkError, run
from harness.dataset import Dataset

_HERE = Path(__file__).parent.parent
#: Large enough that a file of a usual image dataset is one read, small enough to stay in the second-level cache.
BUFFER_BYTES = 256 << 10
READER_NAMES = ("c", "python")


@dataclass(frozen=True)
class ReadResult:
    """What one pass read, and how long it took. Latency is per file: open, fstat, read to the end, close."""

    files: int
    bytes: int
    seconds: float
    latency_us: dict[str, float]

    @property
    def files_per_s(self) -> float:
        return self.files / self.seconds


class Readers:
    """The two readers, ready to run.

    Attributes:
        count: readers at work at the same time (threads of the C reader, processes of the Python one).
        timeout_s: a pass that takes longer is an error.
    """

    def __init__(self, directory: Path, count: int, timeout_s: float) -> None:
        self.count = count
        self.timeout_s = timeout_s
        self._list = directory / "reading-order"
        self._program = directory / "reader"
        flags = ["-O2", "-std=gnu11", "-pthread", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
        run(["cc", *flags, str(_HERE / "reader.c"), "-o", str(self._program)], 60)

    def _write_list(self, root: Path, paths: Sequence[str]) -> None:
        self._list.write_bytes(b"".join(os.fsencode(root / path) + b"\0" for path in paths))

    def read(
        self, reader: str, root: Path, order: Sequence[str], expected_bytes: int, under: Sequence[str] = ()
    ) -> ReadResult:
        """Read all of ``order`` below ``root`` once; ``under`` is a program that runs the reader, such as perf."""
        self._write_list(root, order)
        program = [str(self._program)] if reader == "c" else [sys.executable, str(_HERE / "python_reader.py")]
        argv = [*under, *program, str(self._list), str(self.count), str(BUFFER_BYTES)]
        result = ReadResult(**json.loads(run(argv, self.timeout_s).stdout))
        if result.files != len(order) or result.bytes != expected_bytes:
            raise BenchmarkError(
                f"{root} gave {result.files} files with {result.bytes} bytes, not {len(order)} with {expected_bytes}"
            )
        return result

    def digests(self, root: Path, paths: Sequence[str]) -> list[str]:
        """xxh3-128 of every file, in the order of ``paths``."""
        self._write_list(root, paths)
        done = run([sys.executable, str(_HERE / "digest.py"), str(self._list)], self.timeout_s)
        return done.stdout.split()

    def check_same(self, root: Path, dataset: Dataset, expected: Sequence[str]) -> None:
        """Fail when a file below ``root`` has other bytes than in the source."""
        for path, found, wanted in zip(dataset.paths, self.digests(root, dataset.paths), expected, strict=True):
            if found != wanted:
                raise BenchmarkError(f"{path} has other bytes than the source")
