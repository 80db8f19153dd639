"""What the jobs of remote_reads.py have in common: which files a rank reads, from whom, and the figures it reports.

Used by remote_raw.py, remote_core.py and remote_mount.py, each of which is one rank of a job, and by remote_reads.py.
"""

import json
import mmap
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fanstore.dataset.placement import Placement, place
from fanstore.format.prepared import PreparedDataset

SHARES = ("remote", "half", "local")
#: Raw and core read so long before the clock starts. Raw's memory is mapped when a case begins, FanStore's when it is
#: first used; a daemon lives for hours, and the first tenth of a second of each size is not what is asked for here.
WARM_UP_S = 0.1


@dataclass(frozen=True)
class Case:
    """One figure: files of ``size``, ``window`` of them under way in each rank that reads, which are ``askers``."""

    size: int
    window: int
    share: str
    askers: int


@dataclass(frozen=True)
class Spec:
    """One job; given to its ranks as a file."""

    prepared: str
    local: str  #: directory for staged copies; {rank} is replaced
    mount: str  #: likewise
    reader: str  #: the C reader
    ranks: int
    seconds: float
    cases: tuple[Case, ...]
    under: tuple[str, ...] = ()  #: a program that runs the C reader, such as perf

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str) -> "Spec":
        values = json.loads(Path(path).read_text())
        values["cases"] = tuple(Case(**case) for case in values["cases"])
        values["under"] = tuple(values["under"])
        return cls(**values)


@dataclass(frozen=True)
class File:
    """A file of the prepared dataset and where its bytes are."""

    path: str
    entry: int
    partition: int
    offset: int
    holder: int


class Files:
    """The files of the dataset, and which node keeps each."""

    def __init__(self, prepared: PreparedDataset, ranks: int) -> None:
        parts = prepared.manifest.partitions
        self.placement: Placement = place(
            [part.bytes for part in parts], [part.everywhere for part in parts], [1 << 40] * ranks, 1
        )
        self._by_size: dict[int, list[File]] = {}
        index = prepared.index
        for entry in range(index.entry_count):
            if index.size[entry] and index.path(entry).endswith(b".bin"):
                partition = index.partition[entry]
                holder = self.placement.holders[partition][0]
                file = File(index.path(entry).decode(), entry, partition, index.offset[entry], holder)
                self._by_size.setdefault(index.size[entry], []).append(file)

    def of(self, case: Case, rank: int) -> list[File]:
        """What this rank reads, in random order; the same in every job."""
        chance = random.Random(rank)
        files = self._by_size[case.size]
        chance.shuffle(files := list(files))
        here = [file for file in files if file.holder == rank]
        away = [file for file in files if file.holder != rank]
        if case.share == "half":
            chosen = [file for pair in zip(away, here, strict=False) for file in pair]
        else:
            chosen = away if case.share == "remote" else here
        if not chosen:
            raise SystemExit(f"rank {rank} has no files of {case.size} bytes that are {case.share}")
        return chosen


def populated(path: Path) -> memoryview:
    """A file, mapped, with all of its pages."""
    with path.open("rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return memoryview(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ))


class Source:
    """Whom to compare with: the prepared partitions, read without FanStore, and in memory before it is measured."""

    def __init__(self, maps: Sequence[memoryview]) -> None:
        self.maps = maps

    @classmethod
    def open(cls, prepared: PreparedDataset) -> "Source":
        return cls([populated(prepared.partition_path(number)) for number in range(len(prepared.manifest.partitions))])

    def check(self, file: File, offset: int, data: Any) -> None:
        """Both ends: bytes that are wrong would be a figure without meaning."""
        start = file.offset + offset
        right = self.maps[file.partition]
        end = start + len(data)
        if data[:64] != right[start : start + min(64, len(data))] or data[-64:] != right[max(start, end - 64) : end]:
            raise SystemExit(f"wrong bytes in {file.path}")


def keep_in_memory(directory: Path) -> list[memoryview]:
    """Map the staged copies in this directory as long as the result lives.

    FanStore drops what it has read of a local copy from the page cache when the file is closed, since the kernel keeps
    it above; here the same file is read again. What is mapped stays, so that local files are read from memory, as raw
    does it, and not from the disk.
    """
    maps = [populated(path) for path in sorted(directory.rglob("part-*"))]
    if not maps:
        raise SystemExit(f"no staged copies in {directory}")
    return maps


@dataclass
class Figures:
    """What one rank has read."""

    files: int = 0
    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)

    def line(self) -> dict[str, float]:
        """As it is reported: latencies as percentiles."""
        latencies = sorted(self.latencies_s) or [0.0]

        def percentile(share: float) -> float:
            return latencies[min(len(latencies) - 1, int(share * len(latencies)))] * 1e6

        figures = {"files": self.files or len(self.latencies_s), "seconds": self.seconds}
        return figures | {"p50_us": percentile(0.5), "p90_us": percentile(0.9), "p99_us": percentile(0.99)}


def total(case: Case, lines: Sequence[dict[str, float]]) -> dict[str, Any]:
    """All readers of a case together: files/s are summed, latencies are those of the slowest rank."""
    readers = [line for line in lines if line["files"]]
    assert len(readers) == case.askers
    result: dict[str, Any] = asdict(case)
    result["files_per_s"] = sum(line["files"] / line["seconds"] for line in readers)
    result["mb_per_s"] = result["files_per_s"] * case.size / 1e6
    return result | {name: max(line[name] for line in readers) for name in ("p50_us", "p90_us", "p99_us")}
