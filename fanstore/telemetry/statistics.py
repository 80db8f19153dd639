"""What the daemon has done so far: operations, bytes, sources, latencies, errors, memory.

Owns the counters and the shape of ``stats.json`` (documented in docs/operations.md); others add sections of their own
with ``add_section``. Written by the fuse layer and the reader on the trio thread, without a lock; only the staging
counters are also written by the threads that copy, under ``_staging_lock``. ``snapshot`` runs on the trio thread.
"""

import enum
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, Protocol

#: Version of the shape of stats.json; a reader that finds another one must not guess.
STATISTICS_VERSION = 1

#: Longer than this (18 minutes) falls in the last bucket; the maximum is exact all the same.
_LONGEST_NS = (1 << 40) - 1


class Source(enum.StrEnum):
    """Where bytes came from."""

    LOCAL = "local"  #: a staged copy on this node
    REMOTE = "remote"  #: a staged copy on another node
    SHARED = "shared"  #: the prepared dataset, where it is
    CACHE = "cache"  #: the memory cache


def _bucket(elapsed_ns: int) -> int:
    """Number of the histogram bucket: eight per power of two, so a bucket is at most 12.5 % wide."""
    if elapsed_ns < 8:
        return max(elapsed_ns, 0)
    shift = min(elapsed_ns, _LONGEST_NS).bit_length() - 4
    return (shift << 3) + (min(elapsed_ns, _LONGEST_NS) >> shift)


def _bucket_end_ns(bucket: int) -> int:
    """The largest value that falls in the bucket."""
    if bucket < 16:
        return bucket
    shift = (bucket >> 3) - 1
    return ((bucket & 7) + 9 << shift) - 1


_BUCKETS = _bucket(_LONGEST_NS) + 1

#: Powers of two of nanoseconds between which times are counted for people and for other programs: 1 µs to 17 s.
OCTAVES = range(10, 35)


class OperationStatistics:
    """Count, errors and latencies of one kind of operation.

    Attributes:
        count, errors: requests answered, and how many of them with an error.
        total_ns, max_ns: sum and maximum of the time from request to answer.
        _buckets: histogram of it; invariant: adds up to ``count``.
    """

    __slots__ = ("_buckets", "count", "errors", "max_ns", "total_ns")

    def __init__(self) -> None:
        self.count = 0
        self.errors = 0
        self.total_ns = 0
        self.max_ns = 0
        self._buckets = [0] * _BUCKETS

    def record(self, elapsed_ns: int, failed: bool = False) -> None:
        """Count one operation."""
        self.count += 1
        self.total_ns += elapsed_ns
        if elapsed_ns > self.max_ns:
            self.max_ns = elapsed_ns
        if failed:
            self.errors += 1
        self._buckets[_bucket(elapsed_ns)] += 1

    def add(self, count: int, errors: int, total_ns: int, max_ns: int, buckets: bytes) -> None:
        """Count what the native engine has counted; ``buckets`` are 64-bit numbers of this machine."""
        self.count += count
        self.errors += errors
        self.total_ns += total_ns
        self.max_ns = max(self.max_ns, max_ns)
        self._buckets = [own + more for own, more in zip(self._buckets, array("Q", buckets), strict=True)]

    def percentile_ns(self, share: float) -> int:
        """A time that this share (0 … 1) of the operations did not exceed; at most 12.5 % above the true one."""
        wanted = share * self.count
        seen = 0
        for bucket, count in enumerate(self._buckets):
            seen += count
            if seen and seen >= wanted:
                return min(_bucket_end_ns(bucket), self.max_ns)
        return 0

    def octaves(self) -> list[int]:
        """How many took less than 2^k ns and not less than half of that, for k of OCTAVES.

        The first has all that is shorter, too, and after them comes what is longer than all. Adds up to ``count``.
        """
        ends = [_bucket(1 << power) for power in OCTAVES]
        starts = [0, *ends]
        return [sum(self._buckets[a:b]) for a, b in zip(starts, [*ends, _BUCKETS], strict=True)]

    def histogram(self) -> dict[str, object]:
        """The times in full, for the report and for metrics: see ``octaves``; sum in seconds."""
        return {
            "count": self.count,
            "sum_s": self.total_ns / 1e9,
            "bounds_ns": [1 << power for power in OCTAVES],
            "octaves": self.octaves(),
            "latency_us": self.latency_us(),
        }

    def copy(self) -> "OperationStatistics":
        """Another one with the same numbers."""
        other = OperationStatistics()
        other.count, other.errors, other.total_ns, other.max_ns = self.count, self.errors, self.total_ns, self.max_ns
        other._buckets = list(self._buckets)
        return other

    def snapshot(self) -> dict[str, object]:
        """The numbers as they appear in stats.json."""
        return {"count": self.count, "errors": self.errors, "latency_us": self.latency_us()}

    def latency_us(self) -> dict[str, float]:
        """Mean, percentiles and maximum, in microseconds."""
        return {
            "mean": round(self.total_ns / self.count / 1000, 1) if self.count else 0.0,
            "p50": self.percentile_ns(0.50) / 1000,
            "p90": self.percentile_ns(0.90) / 1000,
            "p99": self.percentile_ns(0.99) / 1000,
            "max": self.max_ns / 1000,
        }

    def validate(self) -> None:
        """Check the invariants; for tests."""
        assert sum(self._buckets) == self.count >= self.errors >= 0
        assert self.total_ns >= self.max_ns >= 0


@dataclass
class SourceStatistics:
    """What one source has given.

    Attributes:
        reads, bytes: parts of read requests answered from it, and the bytes of content in those answers.
        fetches, fetched_bytes: reads of partition files, or answers of peers, and their bytes: stored ones, and whole
            chunks where a chunk is checked or decompressed. Always 0 for the memory cache.
    """

    reads: int = 0
    bytes: int = 0
    fetches: int = 0
    fetched_bytes: int = 0


@dataclass
class StagingStatistics:
    """Progress of copying partitions to this node. All fields are guarded by ``Statistics._staging_lock``."""

    partitions: int = 0  #: to be copied
    bytes: int = 0  #: to be copied
    done_partitions: int = 0  #: in use, checked
    unverified_partitions: int = 0  #: in use, but the checksum of the whole file was wrong
    failed_partitions: int = 0  #: could not be copied; read where they are
    skipped_partitions: int = 0  #: no room; read where they are
    done_bytes: int = 0
    reused_partitions: int = 0  #: in use without copying: earlier jobs have kept them here; not in ``partitions``
    reused_bytes: int = 0  #: of these


@dataclass
class ErrorStatistics:
    """What went wrong while reading."""

    damaged_files: int = 0  #: files with at least one read that failed on damaged or unreadable bytes
    failed_reads: int = 0  #: reads that failed for that reason
    fallbacks: int = 0  #: reads that another copy of the partition answered


@dataclass
class VerificationStatistics:
    """Chunks compared with their checksum while reading."""

    chunks: int = 0
    bytes: int = 0


class EngineCounters(NamedTuple):
    """What an engine that answers without Python has counted by itself.

    Attributes:
        operations: by name: count, errors, total_ns, max_ns and the histogram, as OperationStatistics.add takes them.
        sources: by name of a Source: the four numbers of SourceStatistics.
        verification: chunks and bytes.
    """

    operations: Mapping[str, tuple[int, int, int, int, bytes]]
    sources: Mapping[str, tuple[int, int, int, int]]
    verification: tuple[int, int]


class Engine(Protocol):
    """Whoever answers requests beside Python."""

    def counters(self) -> EngineCounters:
        """What it has answered so far."""

    def describe(self) -> Mapping[str, object]:
        """The section ``engine`` of stats.json."""


class Statistics:
    """All counters of one daemon; see the module for threads.

    Attributes:
        operations: per name of an operation (``lookup``, ``read``, …), as far as Python has answered.
        sources: one per Source, always all of them; likewise.
        engine: what answers beside Python, and counts by itself; None if nothing does.
        without_engine: what is said to answer then: ``python``, or ``none`` without a mount.
        errors: counters of the sources. verification: of whoever checks in Python.
        _counting: others that count by themselves.
        _staging: progress of staging; guarded by ``_staging_lock``, held for a few assignments only.
        _sections: what others add to a snapshot, by name.
    """

    def __init__(self) -> None:
        self.operations: dict[str, OperationStatistics] = {}
        self.sources = {source: SourceStatistics() for source in Source}
        self.errors = ErrorStatistics()
        self.verification = VerificationStatistics()
        self.engine: Engine | None = None
        self.without_engine = "python"
        self._counting: list[Callable[[], EngineCounters]] = []
        self._staging = StagingStatistics()
        self._staging_lock = threading.Lock()
        self._sections: dict[str, Callable[[], Mapping[str, object]]] = {}
        self._start_s = time.monotonic()

    def record(self, operation: str, elapsed_ns: int, failed: bool = False) -> None:
        """Count one operation."""
        counters = self.operations.get(operation)
        if counters is None:
            counters = self.operations[operation] = OperationStatistics()
        counters.record(elapsed_ns, failed)

    def add_section(self, name: str, content: Callable[[], Mapping[str, object]]) -> None:
        """Let ``content`` fill the part ``name`` of each snapshot."""
        self._sections[name] = content

    def add_counters(self, counters: Callable[[], EngineCounters]) -> None:
        """Somebody counts by itself, beside the engine: add what it says to the totals."""
        self._counting.append(counters)

    def add_staging(self, **increments: int) -> None:
        """Add to the fields of StagingStatistics. From any thread."""
        with self._staging_lock:
            for name, increment in increments.items():
                setattr(self._staging, name, getattr(self._staging, name) + increment)

    def staging(self) -> StagingStatistics:
        """A copy of the staging counters. From any thread."""
        with self._staging_lock:
            return replace(self._staging)

    def totals(self) -> "Totals":
        """What Python and the engine have done together."""
        operations = {name: counters.copy() for name, counters in self.operations.items()}
        sources = {source: replace(counters) for source, counters in self.sources.items()}
        verification = replace(self.verification)
        engine = [] if self.engine is None else [self.engine.counters]
        for counted in (count() for count in (*engine, *self._counting)):
            for name, numbers in counted.operations.items():
                operations.setdefault(name, OperationStatistics()).add(*numbers)
            for name, (reads, read_bytes, fetches, fetched_bytes) in counted.sources.items():
                counters = sources[Source(name)]
                counters.reads += reads
                counters.bytes += read_bytes
                counters.fetches += fetches
                counters.fetched_bytes += fetched_bytes
            verification.chunks += counted.verification[0]
            verification.bytes += counted.verification[1]
        return Totals(operations, sources, verification)

    def snapshot(self) -> dict[str, object]:
        """Everything as plain numbers, text and dictionaries: the content of stats.json."""
        totals = self.totals()
        answered = sum(counters.count for counters in totals.operations.values())
        engine = {"name": self.without_engine, "answered_native": 0, "answered_python": answered}
        return {
            "version": STATISTICS_VERSION,
            "uptime_s": round(time.monotonic() - self._start_s, 3),
            "engine": engine if self.engine is None else dict(self.engine.describe()),
            "operations": {name: counters.snapshot() for name, counters in sorted(totals.operations.items())},
            "sources": {str(source): asdict(counters) for source, counters in totals.sources.items()},
            "verification": asdict(totals.verification),
            "errors": asdict(self.errors),
            "staging": asdict(self.staging()),
            "memory": memory(),
            **{name: dict(content()) for name, content in self._sections.items()},
        }

    def validate(self) -> None:
        """Check the invariants; for tests."""
        assert set(self.sources) == set(Source)
        for counters in self.operations.values():
            counters.validate()
        assert self.sources[Source.CACHE].fetches == 0
        staging = self.staging()
        settled = staging.done_partitions + staging.unverified_partitions + staging.failed_partitions
        assert settled <= staging.partitions


class Totals(NamedTuple):
    """Sums over Python and the engine; see Statistics."""

    operations: dict[str, OperationStatistics]
    sources: dict[Source, SourceStatistics]
    verification: VerificationStatistics


def memory() -> dict[str, int]:
    """Resident memory of this process, now and at its highest."""
    wanted = {"VmRSS": "rss_bytes", "VmHWM": "peak_rss_bytes"}
    found = {}
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key in wanted:
                found[wanted[key]] = int(value.split()[0]) * 1024
    return found
