"""Checks every byte of a prepared dataset against its checksums.

Owns what is checked and how the work is shared; against.py compares with a source, cli/verify.py prints. Each partition
is read once, front to back: its thread computes the checksum of the whole file and hands every window of it to a second
pool, which checks and decodes the chunks in it. xxhash, codecs and pread work without the GIL, so threads are enough.
"""

from __future__ import annotations

import stat
import threading
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fanstore.errors import CorruptDataError
from fanstore.format.checksum import EMPTY, Hasher, of_chunks, xxh3_64
from fanstore.format.codec import CHUNK_BYTES, NONE
from fanstore.format.codec_table import CODECS
from fanstore.format.index import Index
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import Stored, StoredFile
from fanstore.progress import Progress

#: Read at once: large enough for a parallel file system, small enough for two per thread to stay below 100 MiB.
WINDOW_BYTES = 8 << 20

_WHOLE_DIFFERS = "its checksum does not match"

#: One chunk of one file, where it is stored and what it must be.
PIECE = np.dtype(
    [("entry", "<u4"), ("number", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("content", "<u4"), ("checksum", "<u8")]
)


@dataclass(frozen=True)
class Damage:
    """Something that is not as it was prepared. ``path`` is None for a partition file as a whole."""

    partition: str
    path: bytes | None
    reason: str


class _Stopped(Exception):
    """The caller has given up; raised in threads only."""


def verify(prepared: PreparedDataset, jobs: int, progress: Progress) -> list[Damage]:
    """Check everything; what is damaged, in order of partitions and of entries."""
    return _Verification(prepared, progress, jobs).run()


def content_totals(index: Index) -> tuple[int, int]:
    """Bytes of all partitions and number of files with content: what a Progress of verify() counts."""
    return sum(index.partition_bytes), len(_files_with_content(index))


def _files_with_content(index: Index) -> npt.NDArray[np.int64]:
    """Entries of regular files that are not empty, each inode once."""
    mode, inode = _integers(index, "mode"), _integers(index, "inode")
    own = inode == np.arange(len(inode))
    return np.flatnonzero(own & ((mode & 0o170000) == stat.S_IFREG) & (_integers(index, "size") > 0))


def _integers(index: Index, tag: str) -> npt.NDArray[np.int64]:
    # Checked columns fit into 63 bits, but for checksums, which are not asked for here.
    return index.column(tag).astype(np.int64)


def list_pieces(index: Index) -> list[npt.NDArray[np.void]]:
    """For each partition, its chunks in the order of their bytes."""
    files = _files_with_content(index)
    size, offset = _integers(index, "size"), _integers(index, "offset")
    stored, part = _integers(index, "stored"), _integers(index, "part")
    one = files[size[files] <= CHUNK_BYTES]
    several = files[size[files] > CHUNK_BYTES]
    counts = _integers(index, "count")[several]
    total = int(counts.sum())
    pieces = np.zeros(len(one) + total, PIECE)

    head = pieces[: len(one)]
    head["entry"], head["offset"], head["stored"], head["content"] = one, offset[one], stored[one], size[one]
    head["checksum"] = index.column("checksum")[one]

    tail = pieces[len(one) :]
    owner = np.repeat(several, counts)
    number = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    records = index.column("chunks")[_integers(index, "first")[owner] + number] if total else index.column("chunks")[:0]
    start = records["start"].astype(np.int64)  # type: ignore[call-overload]  # a structured array
    is_last = number == np.repeat(counts, counts) - 1
    end = np.where(is_last, stored[owner], np.append(start[1:], 0))
    tail["entry"], tail["number"], tail["offset"], tail["stored"] = owner, number, offset[owner] + start, end - start
    tail["content"] = np.minimum(CHUNK_BYTES, size[owner] - number * CHUNK_BYTES)
    tail["checksum"] = records["checksum"]  # type: ignore[call-overload]  # a structured array

    where = part[pieces["entry"]]
    order = np.lexsort((pieces["offset"], where))
    borders = np.searchsorted(where[order], np.arange(index.partition_count + 1))
    ordered = pieces[order]
    return [ordered[borders[p] : borders[p + 1]] for p in range(index.partition_count)]


@dataclass
class _Findings:
    """What is wrong in one partition. Written by its pass and by checking threads; ``lock`` guards both fields."""

    whole: list[str] = field(default_factory=list)  #: about the partition file
    files: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))  #: entry → reasons
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, entry: int | None, reason: str) -> None:
        with self.lock:
            if entry is None:
                self.whole.append(reason)
            else:
                self.files[entry].append(reason)


class _Verification:
    """One run of ``verify``.

    Attributes:
        _checks: pool for windows; _room: permits for windows in memory, so that reading does not run ahead of checking.
    """

    def __init__(self, prepared: PreparedDataset, progress: Progress, jobs: int) -> None:
        self._prepared = prepared
        self._index = prepared.index
        self._progress = progress
        self._jobs = jobs
        self._pieces = list_pieces(prepared.index)
        self._findings = [_Findings() for _ in self._pieces]
        self._stop = threading.Event()
        self._room = threading.BoundedSemaphore(2 * jobs)

    def run(self) -> list[Damage]:
        self._check_own_sums()
        with (
            ThreadPoolExecutor(self._jobs, "verify-check") as self._checks,
            ThreadPoolExecutor(self._jobs, "verify-read") as readers,
        ):
            passes = [readers.submit(self._pass, partition) for partition in range(len(self._pieces))]
            try:
                _wait_all(passes)
            except BaseException:
                self._stop.set()
                for one in passes:
                    one.cancel()
                raise
        return [damage for partition in range(len(self._pieces)) for damage in self._damages(partition)]

    def _check_own_sums(self) -> None:
        """A file's checksum must be that of its chunks' checksums: the index alone tells."""
        index = self._index
        mode, size = _integers(index, "mode"), _integers(index, "size")
        is_file = (mode & 0o170000) == stat.S_IFREG
        for entry in np.flatnonzero(is_file & (size == 0)).tolist():
            if index.checksum[entry] != EMPTY:
                self._note_own_sum(entry)
        for entry in np.flatnonzero(is_file & (size > CHUNK_BYTES)).tolist():
            sums = (index.chunk(entry, number).checksum for number in range(index.chunk_count(entry)))
            if index.checksum[entry] != of_chunks(sums):
                self._note_own_sum(entry)

    def _note_own_sum(self, entry: int) -> None:
        reason = "its checksum in the index is not that of its chunks"
        if entry == self._index.inode[entry]:
            self._findings[self._index.partition[entry]].add(entry, reason)

    def _pass(self, partition: int) -> None:
        """Read one partition from its first to its last byte."""
        findings, pieces = self._findings[partition], self._pieces[partition]
        info = self._prepared.manifest.partitions[partition]
        try:
            file = self._prepared.storage.open(info.file)
        except OSError as error:
            lost = len(np.unique(pieces["entry"]))
            findings.add(None, f"cannot be opened ({error.strerror}): {lost:,} files are lost")
            self._progress.add(self._index.partition_bytes[partition], lost)
            return
        try:
            expected, length = info.bytes, file.length
            if length != expected:
                findings.add(None, f"has {length:,} bytes instead of {expected:,}")
            whole = self._read_windows(file, min(length, expected), pieces, findings)
            if length == expected and whole not in (None, info.checksum):
                findings.add(None, _WHOLE_DIFFERS)
            # What lies behind a cut end is checked too, so that each lost file is named.
            beyond = pieces[int(np.searchsorted(pieces["offset"], min(length, expected))) :]
            self._check_window(file, None, 0, beyond, findings)
        finally:
            file.close()

    def _read_windows(
        self, file: StoredFile, length: int, pieces: npt.NDArray[np.void], findings: _Findings
    ) -> int | None:
        """Hash the file and have its chunks checked, window by window; None if some part cannot be read."""
        whole: Hasher | None = Hasher()
        checks: list[Future[None]] = []
        done = 0
        try:
            for position in range(0, length, WINDOW_BYTES):
                if self._stop.is_set():
                    raise _Stopped
                end = min(position + WINDOW_BYTES, length)
                until = int(np.searchsorted(pieces["offset"], end))
                self._room.acquire()
                try:
                    data: Stored | None = file.read(position, end - position)
                except (OSError, CorruptDataError) as error:
                    findings.add(None, f"cannot be read after byte {position:,} ({_text(error)})")
                    data, whole = None, None
                if whole is not None and data is not None:
                    whole.update(data)
                check = self._checks.submit(self._check_window, file, data, position, pieces[done:until], findings)
                check.add_done_callback(lambda _: self._room.release())
                checks = [*(one for one in checks if not one.done() or one.exception() is not None), check]
                done = until
        finally:
            wait(checks)  # they read from the file, which the caller closes
        for check in checks:
            check.result()
        return whole.intdigest() if whole is not None else None

    def _check_window(
        self, file: StoredFile, data: Stored | None, base: int, pieces: npt.NDArray[np.void], findings: _Findings
    ) -> None:
        """Check chunks that begin in a window; those that end outside it, or all without data, are read again."""
        view = memoryview(data) if data is not None else memoryview(b"")
        done_files = 0
        for entry, number, offset, stored, content, checksum in pieces.tolist():
            if self._stop.is_set():
                raise _Stopped
            inside = data is not None and offset + stored <= base + len(view)
            try:
                piece = view[offset - base :][:stored] if inside else file.read(offset, stored)
            except (OSError, CorruptDataError) as error:
                findings.add(entry, f"{self._where(entry, number)}cannot be read ({_text(error)})")
                piece = None
            try:
                if piece is not None:
                    self._check_piece(entry, number, piece, content, checksum)
            except CorruptDataError as error:
                findings.add(entry, self._where(entry, number) + str(error))
            done_files += number == 0
        self._progress.add(len(view), done_files)

    def _where(self, entry: int, number: int) -> str:
        count = self._index.chunk_count(entry)
        return f"chunk {number} of {count}: " if count > 1 else ""

    def _check_piece(self, entry: int, number: int, piece: Stored, content: int, checksum: int) -> None:
        if xxh3_64(piece) != checksum:
            raise CorruptDataError("the bytes do not match their checksum")
        codec = CODECS[self._index.codec[entry]]
        if codec is not NONE:
            codec.decode_chunk(piece, content, number == 0)

    def _damages(self, partition: int) -> Iterable[Damage]:
        index, findings = self._index, self._findings[partition]
        file = self._prepared.manifest.partitions[partition].file
        for reason in findings.whole:
            if reason == _WHOLE_DIFFERS and not findings.files:
                reason += ", but every file in it is sound: tar headers or padding were altered"
            yield Damage(file, None, reason)
        inode = index.column("inode")
        for entry, reasons in sorted(findings.files.items()):
            names = np.flatnonzero(inode == entry).tolist() if index.nlink[entry] > 1 else [entry]
            more = f", and {len(reasons) - 1:,} more" if len(reasons) > 1 else ""
            for name in names:
                yield Damage(file, index.path(name), reasons[0] + more)


def _wait_all(futures: Iterable[Future[None]]) -> None:
    """Wait for all, or raise what the first failed one raised. Wakes up often, so that Ctrl-C is heard."""
    pending = set(futures)
    while pending:
        finished, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
        for one in finished:
            one.result()


def _text(error: OSError | CorruptDataError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
