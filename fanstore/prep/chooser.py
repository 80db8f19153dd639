"""--codec auto: compress a sample of the data, measure, decide, and say why.

The choice is the codec that makes the sample smallest among those that decompress faster than bytes can come, which is
the slower of disk and network: then compression costs no time, and what is smaller comes sooner.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from fanstore import _native
from fanstore.format.codec import NONE, Codec, Method
from fanstore.format.codec_table import METHODS
from fanstore.prep.plan import has_content
from fanstore.prep.rates import Rate, format_rate, link_rate, stated_rates
from fanstore.prep.sources import DirectorySource, Source
from fanstore.prep.table import Table
from fanstore.units import format_bytes, format_count

#: The sample: so many files spread over the dataset by bytes, so much of each.
SAMPLE_FILES = 64
SAMPLE_BYTES_EACH = 1 << 20
#: Alignment that direct I/O of every disk accepts.
_DIRECT_ALIGN = 4096
#: It is read by so many threads, as a node does.
READERS = 4
#: A sample that is smaller cannot be timed; then the disk is taken for a usual SSD.
MIN_TIMED_BYTES = 4 << 20
USUAL_DISK_BYTES_PER_S = 1e9
#: A codec must save at least this share of the space, or decompression is work for nothing. JPEG saves 0 to 2 %,
#: text and float arrays 30 % and more; nothing common lies close to the line.
MIN_SAVING = 0.15
#: Cores of a node that can be expected to decompress: the others train.
CORES = 2
#: The best of several passes counts: neighbours take cache and memory bandwidth, too.
PASSES = 5


def choose_codec(table: Table, sources: Sequence[Source]) -> tuple[str, str]:
    """The name of a codec for the whole dataset, and the reason as a sentence."""
    rates = stated_rates()
    samples, disk = _read_samples(table, sources)
    raw = sum(map(len, samples))
    if raw == 0:
        return NONE.name, "there is no content to compress"
    if not rates:
        rates = [rate for rate in (disk, link_rate()) if rate is not None]
    trials = [_try(codec, method, samples) for codec, method in METHODS.values() if method.automatic]
    measured = f"a sample of {format_count(len(samples), 'file')} ({format_bytes(raw)}) shrinks "
    measured += f"{' and '.join(map(str, trials))}; bytes come {' and '.join(map(str, rates))}"
    name, why = decide(trials, rates)
    return name, f"{measured}; {why}"


def decide(trials: Sequence[Trial], rates: Sequence[Rate]) -> tuple[str, str]:
    """The name of a codec, and why."""
    slower = min(rates, key=lambda rate: rate.bytes_per_s)
    worthy = [trial for trial in trials if trial.saving >= MIN_SAVING]
    if not worthy:
        return NONE.name, f"to save less than {MIN_SAVING:.0%} is not worth decompressing"
    quick = [trial for trial in worthy if trial.decode_bytes_per_s > slower.bytes_per_s]
    if not quick:
        return NONE.name, f"the {slower.of} is faster than decompressing"
    best = max(quick, key=lambda trial: trial.saving)
    return best.name, f"{best.name} is the smallest that decompresses faster than the {slower.of}"


@dataclass(frozen=True)
class Trial:
    """What a codec does with the sample. Content per second is of CORES cores."""

    name: str
    saving: float
    decode_bytes_per_s: float

    def __str__(self) -> str:
        speed = format_rate(self.decode_bytes_per_s)
        return f"by {self.saving:.0%} with {self.name} ({CORES} cores decompress {speed})"


def _try(codec: Codec, method: Method, samples: Sequence[bytes]) -> Trial:
    assert codec.encode is not None
    packed = [b"".join(codec.encode([sample], len(sample), method.level)) for sample in samples]
    raw = sum(map(len, samples))
    # What does not shrink is stored as it is, so it counts as it is.
    stored = sum(min(len(one), len(sample)) for one, sample in zip(packed, samples, strict=True))
    best_s = min(_decode_s(codec, packed, samples) for _ in range(PASSES))
    return Trial(method.name, 1 - stored / raw, CORES * raw / max(best_s, 1e-9))


def _decode_s(codec: Codec, packed: Sequence[bytes], samples: Sequence[bytes]) -> float:
    """Processor time of one pass by what a mount decodes with; the clock on the wall would measure the neighbours."""
    content = memoryview(bytearray(SAMPLE_BYTES_EACH))
    begin = time.thread_time()
    for one, sample in zip(packed, samples, strict=True):
        _native.decode_chunk(codec.number, one, True, content[: len(sample)])
    return time.thread_time() - begin


def _pick(table: Table) -> list[int]:
    """Files spread evenly over the dataset's bytes."""
    files = np.flatnonzero(has_content(table) & (table.size > 0) & (table.plain == 0))
    if len(files) == 0:
        return []
    ends = np.cumsum(table.size[files])
    points = (np.arange(SAMPLE_FILES) + 0.5) / SAMPLE_FILES * float(ends[-1])
    return [int(entry) for entry in np.unique(files[np.searchsorted(ends, points.astype(np.uint64))])]


def _read_samples(table: Table, sources: Sequence[Source]) -> tuple[list[bytes], Rate]:
    """The sample, and how fast the disk gave it."""
    with ThreadPoolExecutor(READERS, "sample") as pool:
        begin = time.perf_counter()
        samples = [data for data in pool.map(lambda entry: _read(table, sources, entry), _pick(table)) if data]
        taken_s = max(time.perf_counter() - begin, 1e-9)
    raw = sum(map(len, samples))
    if raw < MIN_TIMED_BYTES:
        return samples, Rate("disk", USUAL_DISK_BYTES_PER_S, "assumed: too little to be timed")
    return samples, Rate("disk", raw / taken_s, "measured")


def _read(table: Table, sources: Sequence[Source], entry: int) -> bytes:
    """The beginning of a file; nothing if it cannot be read: the packer will meet the same file and report it."""
    source = sources[int(table.source[entry])]
    count = min(int(table.size[entry]), SAMPLE_BYTES_EACH)
    try:
        if not isinstance(source, DirectorySource):
            return _read_range(f"/proc/self/fd/{source.fd}", None, int(table.origin[entry]), count, 0)
        directory = source.open_directory(table.path(int(table.parent[entry])))
        try:
            return _read_range(table.name(entry), directory, 0, count, source.nofollow)
        finally:
            os.close(directory)
    except OSError:
        return b""


def _read_range(path: str | bytes, directory: int | None, start: int, count: int, nofollow: int) -> bytes:
    """From the disk, not from the page cache, where the file system can do that."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | nofollow
    try:
        return _read_with(flags | os.O_DIRECT, path, directory, start, count)
    except OSError:
        return _read_with(flags, path, directory, start, count)


def _read_with(flags: int, path: str | bytes, directory: int | None, start: int, count: int) -> bytes:
    fd = os.open(path, flags, dir_fd=directory)
    try:
        before = start % _DIRECT_ALIGN
        with mmap.mmap(-1, before + count + _DIRECT_ALIGN - (before + count) % _DIRECT_ALIGN) as memory:
            got = os.preadv(fd, [memory], start - before)
            return memory[before : min(got, before + count)]
    finally:
        os.close(fd)
