"""Copies of partitions while they are being made: what of each is here, and who brings the rest.

Owns the file of such a copy and the knowledge of which parts of it are here. Staging (staging.py) fills it in order;
whoever wants bytes earlier, a program here or another node, brings just those, into their place, and staging leaves
them out. So each byte is read once where the dataset is, however early it is wanted. Any thread; a wait for bytes that
somebody else is bringing is as long as that takes.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from fanstore import _native
from fanstore.dataset.source import BlockingSource, PreparedSource
from fanstore.errors import CorruptDataError
from fanstore.format.storage import Stored, pread_exactly
from fanstore.telemetry.statistics import Source
from fanstore.transport.peers import NOT_YET

if TYPE_CHECKING:
    from fanstore.dataset.store import PartitionStore

log = logging.getLogger(__name__)

#: What is here, is known in pieces of this size. A file that is wanted early brings two pieces more than it needs at
#: most; they come before they are wanted, but are not read again.
PIECE_BYTES = 64 << 10

#: What a full disk says.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

#: Bytes that other nodes want are brought by so many threads at a time, and each of them is answered in this time,
#: which is well below what a node waits before it takes another one for dead.
THREADS = 8
LONGEST_ANSWER_S = 0.5

_MISSING, _COMING, _HERE = b"\0", b"\1", b"\2"


class CopyEndedError(Exception):
    """The copy was given up: somebody else must have the bytes."""


class PartialCopy:
    """The copy of one partition.

    Attributes:
        partition: its number; length: bytes of it.
        problem: why it could not be written; None if that is not why it has ended.
        is_finished: all of it is here, under its name.
        asked_s: when somebody first wanted bytes of it earlier than staging brings them; None if nobody has.
        ----
        _pieces: one byte for each piece: missing, coming or here. _path: the file. _made: it is there.
        _ended: given up. All guarded by the condition, which is told when pieces are here, or will not come.
    """

    def __init__(
        self,
        partition: int,
        length: int,
        path: Path,
        source: PreparedSource,
        make_room: Callable[[int], bool] | None = None,
    ) -> None:
        """``make_room`` is called if there is none for so many bytes; whether there is some then. Raises OSError."""
        self.partition = partition
        self.length = length
        self.asked_s: float | None = None
        self.problem: OSError | None = None
        self.is_finished = False
        self._source = source
        self._make_room = make_room
        self._changed = threading.Condition()
        self._pieces = bytearray(-(-length // PIECE_BYTES))
        self._path = path
        self._made = False
        self._ended = False

    # --- for those who want bytes early ---

    def read(self, offset: int, length: int) -> Stored:
        """Exactly this range. Raises OSError, CorruptDataError, CopyEndedError."""
        if self.asked_s is None:
            self.asked_s = time.monotonic()
        try:
            return self.gather(offset, length)
        except CorruptDataError:  # the file ends before the last piece does; these bytes may still be there
            return self._source.read_range(self.partition, offset, length)

    def gather(self, offset: int, length: int) -> bytes:
        """As ``read``, of whole pieces: nothing if the last one cannot be had."""
        first, last = offset // PIECE_BYTES, -(-(offset + length) // PIECE_BYTES)
        while (missing := self._take_on(first, last)) is not None:
            self._bring(*missing)
        with self._changed:
            if self._ended:
                raise CopyEndedError
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return pread_exactly(fd, offset, length)
        finally:
            os.close(fd)

    def _bring(self, offset: int, length: int) -> None:
        """What was taken on; in memory only for as long as this takes."""
        try:
            stored = self._source.read_range(self.partition, offset, length)
            try:
                self.write(offset, memoryview(stored))
            except OSError as error:
                raise CopyEndedError from error
        except BaseException:
            self.let_go(offset, length)
            raise
        self.settle(offset, length)

    def _take_on(self, first: int, last: int) -> tuple[int, int] | None:
        """Missing bytes of these pieces, which the caller now brings; None as soon as all are here."""
        with self._changed:
            while True:
                if self._ended:
                    raise CopyEndedError
                missing = self._run(first, last)
                if missing is not None:
                    return missing
                if self._pieces.find(_COMING, first, last) < 0:
                    return None
                self._changed.wait()

    def _run(self, first: int, last: int) -> tuple[int, int] | None:
        """The first missing pieces in a row, coming from now on: offset and bytes. With the condition held."""
        start = self._pieces.find(_MISSING, first, last)
        if start < 0:
            return None
        end = start
        last = min(last, len(self._pieces))
        while end < last and self._pieces[end] == _MISSING[0]:
            end += 1
        self._pieces[start:end] = _COMING * (end - start)
        return start * PIECE_BYTES, min(end * PIECE_BYTES, self.length) - start * PIECE_BYTES

    # --- for staging ---

    def take_missing(self, stride: int) -> Iterator[tuple[int, int]]:
        """All that is missing, in order: offsets and at most ``stride`` bytes, each coming once it is given out.

        Whoever takes it calls ``settle`` or ``let_go``.
        """
        first = 0
        while True:
            with self._changed:
                start = self._pieces.find(_MISSING, first)
                missing = None if self._ended or start < 0 else self._run(start, start + stride // PIECE_BYTES)
            if missing is None:
                return
            yield missing
            first = -(-sum(missing) // PIECE_BYTES)

    def write(self, offset: int, block: memoryview) -> None:
        """Put bytes into their place. Raises OSError, with which the copy ends, and CopyEndedError."""
        try:
            try:
                self._write(offset, block)
            except OSError as error:
                if error.errno not in NO_ROOM or self._make_room is None or not self._make_room(self.length):
                    raise
                self._write(offset, block)
        except OSError as error:
            self.problem = error
            self.end()
            raise

    def _write(self, offset: int, block: memoryview) -> None:
        with self._changed:
            if self._ended:
                raise CopyEndedError
            flags = os.O_WRONLY | os.O_CLOEXEC | (0 if self._made else os.O_CREAT | os.O_EXCL)
            fd = os.open(self._path, flags, 0o600)
            self._made = True
        try:
            length = len(block)
            done = 0
            while done < length:
                done += os.pwrite(fd, block[done:], offset + done)
            # Written to the disk meanwhile, not during the first epoch; and only clean pages can be forgotten then.
            _native.start_writing(fd, offset, length)
        finally:
            os.close(fd)

    def settle(self, offset: int, length: int) -> None:
        """These bytes are here: what was taken on."""
        self._mark(offset, length, _HERE)

    def let_go(self, offset: int, length: int) -> None:
        """These bytes do not come: whoever wants them must bring them."""
        self._mark(offset, length, _MISSING)

    def _mark(self, offset: int, length: int, state: bytes) -> None:
        first, last = offset // PIECE_BYTES, -(-(offset + length) // PIECE_BYTES)
        with self._changed:
            self._pieces[first:last] = state * (last - first)
            self._changed.notify_all()

    def finish(self, path: Path, length: int) -> None:
        """All of it is here, ``length`` bytes, and the file has this name from now on. Raises OSError."""
        with self._changed:
            if not self._made:  # a partition without bytes
                os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                self._made = True
            os.truncate(self._path, length)
            os.rename(self._path, path)
            self._path = path
            self._pieces[:] = _HERE * len(self._pieces)
            self.is_finished = True

    def end(self) -> None:
        """It will not be finished, and nothing is left of it: whoever wants bytes must have them elsewhere."""
        with self._changed:
            self._ended = True
            self._path.unlink(missing_ok=True)
            self._changed.notify_all()


class Bringer:
    """Bytes of such copies for other nodes.

    Attributes:
        _patience_s: how long one of them waits for an answer; then it is told to ask again.
    """

    def __init__(self, store: PartitionStore, peer_timeout_s: float) -> None:
        self._store = store
        self._patience_s = min(LONGEST_ANSWER_S, peer_timeout_s / 2)
        self._limiter = trio.CapacityLimiter(THREADS)

    async def bring(self, partition: int, offset: int, length: int) -> Stored:
        """As Host has it."""
        copy = self._store.partial(partition)
        if copy is None:
            mapped = self._store.mapped(partition)  # it was finished at this moment
            return b"" if mapped is None or offset + length > len(mapped) else mapped[offset : offset + length]
        if offset + length > copy.length:
            return b""
        with trio.move_on_after(self._patience_s):
            try:
                return await trio.to_thread.run_sync(
                    copy.read, offset, length, limiter=self._limiter, abandon_on_cancel=True
                )
            except (CopyEndedError, CorruptDataError, OSError) as error:
                log.debug("bytes %d+%d of partition %d: %s", offset, length, partition, error)
                return b""
        return NOT_YET if length > len(NOT_YET) else b""


class PartialCopies(BlockingSource):
    """Such copies as a source. ``abandons``: at the end of a job nobody waits for what others bring."""

    name = Source.LOCAL
    abandons = True

    def __init__(self, store: PartitionStore, prepared: PreparedSource) -> None:
        super().__init__(prepared.limiter)
        self._store = store
        self._prepared = prepared

    def has(self, partition: int) -> bool:
        """Is there, or will there be, such a copy?"""
        return self._store.partial(partition) is not None

    def read_range(self, partition: int, offset: int, length: int) -> Stored:
        copy = self._store.partial(partition)
        if copy is not None:
            try:
                return copy.read(offset, length)
            except CopyEndedError:
                pass  # it was given up at this moment
        if self._store.is_local(partition):
            return self._store.read(partition, offset, length, prepared=False)
        return self._prepared.read_range(partition, offset, length)

    def label(self, partition: int) -> str:
        return f"local copy of partition {partition}"
