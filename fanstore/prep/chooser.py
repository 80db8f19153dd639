"""--codec auto: compress a sample of the data, measure, decide, and say why."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import lz4.block
import numpy as np

from fanstore.prep.plan import has_content
from fanstore.prep.sources import DirectorySource, Source
from fanstore.prep.table import Table
from fanstore.units import format_bytes

#: The sample: so many files spread over the dataset by bytes, so much of each.
SAMPLE_FILES = 64
SAMPLE_BYTES_EACH = 1 << 20
#: LZ4 must save at least this share of the space, or decompression is work for nothing. JPEG saves 0 to 2 %,
#: text and float arrays 30 % and more; nothing common lies close to the line.
MIN_SAVING = 0.15
#: and two cores must decompress as fast as a node's SSD reads (1 GB/s is typical), or reads become slower.
MIN_DECODE_BYTES_PER_S = 0.5e9
#: The best of several passes counts: on a busy machine one alone says more about the neighbours than about LZ4.
PASSES = 5


@dataclass(frozen=True)
class Choice:
    """The codec, and the reason as a sentence."""

    codec: str
    reason: str


def choose_codec(table: Table, sources: Sequence[Source]) -> Choice:
    """Decide between ``none`` and ``lz4`` for the whole dataset."""
    samples = [sample for sample in (_read(table, sources, entry) for entry in _pick(table)) if sample]
    raw = sum(map(len, samples))
    if raw == 0:
        return Choice("none", "there is no content to compress")
    packed = [lz4.block.compress(sample, store_size=False) for sample in samples]
    # What does not shrink is stored as it is, so it counts as it is.
    stored = sum(min(len(one), len(sample)) for one, sample in zip(packed, samples, strict=True))
    speed = max(_decode_speed(packed, samples) for _ in range(PASSES))
    saving = 1 - stored / raw
    measured = (
        f"a sample of {len(samples)} files ({format_bytes(raw)}) shrinks by {saving:.0%} "
        f"and decompresses at {speed / 1e9:.1f} GB/s"
    )
    if saving < MIN_SAVING:
        return Choice("none", f"{measured}; less than {MIN_SAVING:.0%} is not worth decompressing")
    if speed < MIN_DECODE_BYTES_PER_S:
        return Choice("none", f"{measured}; that is slower than reading the plain bytes from an SSD")
    return Choice("lz4", measured)


def _decode_speed(packed: Sequence[bytes], samples: Sequence[bytes]) -> float:
    """Bytes of content per second, on this core, now."""
    begin = time.perf_counter()
    for one, sample in zip(packed, samples, strict=True):
        lz4.block.decompress(one, uncompressed_size=len(sample))
    return sum(map(len, samples)) / max(time.perf_counter() - begin, 1e-9)


def _pick(table: Table) -> list[int]:
    """Files spread evenly over the dataset's bytes."""
    files = np.flatnonzero(has_content(table) & (table.size > 0) & (table.plain == 0))
    if len(files) == 0:
        return []
    ends = np.cumsum(table.size[files])
    points = (np.arange(SAMPLE_FILES) + 0.5) / SAMPLE_FILES * float(ends[-1])
    return [int(entry) for entry in np.unique(files[np.searchsorted(ends, points.astype(np.uint64))])]


def _read(table: Table, sources: Sequence[Source], entry: int) -> bytes:
    source = sources[int(table.source[entry])]
    count = min(int(table.size[entry]), SAMPLE_BYTES_EACH)
    try:
        if not isinstance(source, DirectorySource):
            return os.pread(source.fd, count, int(table.origin[entry]))
        directory = source.open_directory(table.path(int(table.parent[entry])))
        try:
            fd = os.open(
                table.name(entry), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory
            )
        finally:
            os.close(directory)
        try:
            return os.pread(fd, count, 0)
        finally:
            os.close(fd)
    except OSError:
        return b""  # only a sample: the packer will meet the same file and report it
