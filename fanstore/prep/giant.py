"""Streams a file that is too large for a buffer into its partition, chunk by chunk.

Called by a packing thread that holds the turn of its partition, so nobody else writes there meanwhile. A failure leaves
the partition as it was. Long runs of zeros (sparse files) become holes in the partition file, not written blocks.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fanstore import _native
from fanstore.format.checksum import of_chunks, xxh3_64
from fanstore.format.codec import CHUNK_BYTES, NONE
from fanstore.format.codec_table import UNCOMPRESSED, Compression
from fanstore.format.index import CHUNK_RECORD
from fanstore.format.tarshard import clamp_mtime_ns
from fanstore.prep.sources import DirectorySource, Source
from fanstore.prep.table import Table
from fanstore.prep.writer import PartitionWriter, Stopped


@dataclass
class GiantResult:
    """As a row of Packed.results, with the file's chunk records."""

    status: int
    codec: int = NONE.number
    offset: int = 0
    stored: int = 0
    checksum: int = 0
    chunks: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, CHUNK_RECORD))


class _Failed(Exception):
    """The file cannot be read, or is not what it was when it was scanned."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Origin:
    """An open source file, read chunk by chunk."""

    def __init__(self, fd: int, base: int, size: int, mtime_ns: int | None, report: Callable[[int, int], None]) -> None:
        """``mtime_ns`` is None for a range of a tar file, whose descriptor belongs to its source."""
        self.size = size
        self._fd = fd
        self._base = base
        self._mtime_ns = mtime_ns
        self._report = report
        self._reported = 0
        self._buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))

    def check(self) -> None:
        """Raise _Failed if the file is not as it was scanned."""
        if self._mtime_ns is None:
            return
        now = os.fstat(self._fd)
        unchanged = stat.S_ISREG(now.st_mode) and now.st_size == self.size
        if not unchanged or clamp_mtime_ns(now.st_mtime_ns) != self._mtime_ns:
            raise _Failed(_native.PACK_CHANGED)

    def chunks(self, stop: threading.Event) -> Iterator[memoryview]:
        """The content from the beginning; each chunk is valid until the next is asked for."""
        for start in range(0, self.size, CHUNK_BYTES):
            if stop.is_set():
                raise Stopped
            count = min(CHUNK_BYTES, self.size - start)
            self._fill(start, count)
            yield self._buffer[:count]
            # A file that did not shrink is read a second time, but counts once.
            self._report(max(0, start + count - self._reported), 0)
            self._reported = max(self._reported, start + count)

    def _fill(self, start: int, count: int) -> None:
        done = 0
        while done < count:
            try:
                got = os.preadv(self._fd, [self._buffer[done:count]], self._base + start + done)
            except OSError as error:
                raise _Failed(error.errno or _native.PACK_CHANGED) from error
            if got == 0:
                raise _Failed(_native.PACK_CHANGED)
            done += got

    def close(self) -> None:
        """Close the file, unless it is its source's tar."""
        if self._mtime_ns is not None:
            os.close(self._fd)


def pack_giant(
    table: Table,
    sources: Sequence[Source],
    entry: int,
    compression: Compression,
    writer: PartitionWriter,
    stop: threading.Event,
    report: Callable[[int, int], None],
    links: bytes,
) -> GiantResult:
    """Append the member of ``entry`` to the partition, then ``links``, the headers of its further names; pass the turn.

    If the file cannot be read, neither is written.
    """
    try:
        origin = _open(table, sources, entry, report)
    except OSError as error:
        writer.skip_turn()
        return GiantResult(error.errno or _native.PACK_CHANGED)
    hasher = writer.hasher.copy() if writer.hasher is not None else None
    writer.begin_stream()
    try:
        origin.check()
        result = None
        if compression.codec is not NONE and not table.plain[entry]:
            result = _stream(table, entry, origin, compression, writer, stop)
            writer.hasher = None  # its header was written after its content
        if result is None:
            writer.hasher = hasher.copy() if hasher is not None else None
            result = _stream(table, entry, origin, UNCOMPRESSED, writer, stop)
            assert result is not None
        origin.check()
    except _Failed as failed:
        result = GiantResult(failed.status)
    finally:
        origin.close()
    if result.status != 0:
        writer.hasher = hasher
        os.ftruncate(writer.fd, writer.position)
        writer.skip_turn()
        return result
    end = result.offset + result.stored
    rest = bytes(-end % 512) + links
    if writer.hasher is not None:
        writer.hasher.update(rest)
    writer.stream(memoryview(rest), end)
    writer.end_stream(end + len(rest))
    report(0, 1)
    return result


def _open(table: Table, sources: Sequence[Source], entry: int, report: Callable[[int, int], None]) -> _Origin:
    source = sources[int(table.source[entry])]
    size = int(table.size[entry])
    if not isinstance(source, DirectorySource):
        return _Origin(source.fd, int(table.origin[entry]), size, None, report)
    directory = source.open_directory(table.path(int(table.parent[entry])))
    try:
        flags = os.O_RDONLY | source.nofollow | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(table.name(entry), flags, dir_fd=directory)
    finally:
        os.close(directory)
    return _Origin(fd, 0, size, int(table.mtime[entry]), report)


def _header(table: Table, entry: int, suffix: bytes, stored: int, largest: int, position: int = -1) -> bytes:
    """The tar header; as long for every ``stored`` up to ``largest``, so that it can be written after the content.

    With a ``position`` it begins there, and ends at a multiple of a page.
    """
    return _native.tar_file_header(
        table.path(entry) + suffix,
        int(table.mode[entry]),
        int(table.uid[entry]),
        int(table.gid[entry]),
        int(table.mtime[entry]),
        stored,
        largest,
        position,
    )


def _stream(
    table: Table,
    entry: int,
    origin: _Origin,
    compression: Compression,
    writer: PartitionWriter,
    stop: threading.Event,
) -> GiantResult | None:
    """Write header and content at the writer's position; None if compression does not make it shorter."""
    size = origin.size
    codec = compression.codec
    # What an earlier attempt left behind the end must not show through holes.
    os.ftruncate(writer.fd, writer.position)
    head = _header(table, entry, codec.suffix, size, size, writer.position if codec is NONE else -1)
    offset = writer.position + len(head)
    if codec is NONE:
        writer.stream(memoryview(head), writer.position)
        if writer.hasher is not None:
            writer.hasher.update(head)
    records: list[tuple[int, int]] = []
    stored = 0
    pieces: Iterator[memoryview] | Iterator[bytes] = origin.chunks(stop)
    if codec.encode is not None:
        pieces = codec.encode(origin.chunks(stop), size, compression.level)
    for piece in pieces:
        records.append((stored, xxh3_64(piece)))
        if codec is NONE and writer.hasher is not None:
            writer.hasher.update(piece)
        if not _native.all_zero(piece):
            writer.stream(memoryview(piece), offset + stored)
        stored += len(piece)
        if codec is not NONE and stored >= size:
            return None
    if codec is not NONE:
        writer.stream(memoryview(_header(table, entry, codec.suffix, stored, size)), writer.position)
    chunks = np.array(records, CHUNK_RECORD)
    checksum = of_chunks(int(value) for value in chunks["checksum"])
    return GiantResult(0, codec.number, offset, stored, checksum, chunks)
