"""A partition file while it is written: who may write where, and its running checksum.

Used by the packing threads (pack.py, giant.py); one lock per partition, named in PartitionWriter.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from fanstore.errors import OutputError
from fanstore.format.checksum import Hasher
from fanstore.format.codec import CHUNK_BYTES

#: Two blocks of zeros end a tar file.
TAR_END = bytes(1024)


class Stopped(Exception):
    """Another thread or rank asked to stop; raised in workers, never seen by users."""


@dataclass
class PartitionWriter:
    """One partition file while it is written. ``lock`` guards position, turn and hasher.

    Attributes:
        position: where the next batch goes. turn: the number of that batch.
        hasher: checksum of bytes 0 … position; None once it cannot be known in order, so the file is read again.
    """

    path: Path
    fd: int
    position: int = 0
    turn: int = 0
    hasher: Hasher | None = field(default_factory=Hasher)
    lock: threading.Condition = field(default_factory=threading.Condition)

    def wait_turn(self, number: int, stop: threading.Event) -> None:
        """Block until batch ``number`` is next."""
        with self.lock:
            while self.turn != number:
                if stop.is_set():
                    raise Stopped
                self.lock.wait(0.2)

    def pass_turn(self, data: memoryview | None, length: int) -> int:
        """Claim ``length`` bytes, let the next batch go on, and return the position. ``data`` feeds the checksum."""
        with self.lock:
            position = self.position
            self.position += length
            if self.hasher is not None and data is not None:
                self.hasher.update(data)
            self.turn += 1
            self.lock.notify_all()
            return position

    def finish(self) -> tuple[int, int]:
        """End the tar file, make it durable; returns its length and checksum."""
        write_all(self.fd, memoryview(TAR_END), self.position)
        length = self.position + len(TAR_END)
        os.ftruncate(self.fd, length)
        if self.hasher is not None:
            self.hasher.update(TAR_END)
        os.fsync(self.fd)
        checksum = self.hasher.intdigest() if self.hasher is not None else _checksum_file(self.fd, length)
        os.close(self.fd)
        self.fd = -1
        return length, checksum


def write_all(fd: int, data: memoryview, position: int) -> None:
    """pwrite until everything is written."""
    while len(data):
        count = os.pwrite(fd, data, position)
        data = data[count:]
        position += count


def _checksum_file(fd: int, length: int) -> int:
    hasher = Hasher()
    buffer = mmap.mmap(-1, CHUNK_BYTES)
    view = memoryview(buffer)
    position = 0
    while position < length:
        count = os.preadv(fd, [view[: min(CHUNK_BYTES, length - position)]], position)
        if count == 0:
            raise OutputError("a partition became shorter while it was written")
        hasher.update(view[:count])
        position += count
    return hasher.intdigest()
