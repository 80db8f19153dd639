"""The journal of a node's outputs: every operation, in order, in a file next to their contents.

Owns the file's format (docs/outputs.md): a line of JSON that says whose it is, then records, each of them a length, a
CRC-32 and msgpack. It is what a later start knows when a job was killed (recovery.py), so it is written before
anything is confirmed. Not synced: a killed process loses nothing that it has written, and what a dead node has is lost
anyway unless it stands in ``--output``. The end of a file that was being written is passed over. Trio thread only.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import msgpack

from fanstore.errors import FormatError
from fanstore.outputs.tree import Operation

JOURNAL_NAME = "outputs.journal"
_FORMAT = 2
_HEAD = struct.Struct("<II")
#: No record is longer: an operation fits into a message between nodes.
_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class Owner:
    """Whose journal it is.

    Attributes:
        output: the directory in which outputs are to stand; empty with ``--scratch``.
        copies: name of the directory there in which this job makes copies before they get their names.
    """

    job: str
    rank: int
    output: str
    copies: str


class Journal:
    """The journal of this process.

    What cannot be written, because the disk is full, is kept in memory and written before anything else: a journal
    without an operation in the middle would give contents to the wrong names.

    Attributes:
        _position: where the next record goes. _last: where the last one begins; -1 if it is in ``_waiting``.
        _waiting: records that could not be written yet.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._position = self._last = file.tell()
        self._waiting: list[bytes] = []

    @classmethod
    def make(cls, path: Path, owner: Owner) -> Self:
        """A new one. Raises OSError."""
        file = open(path, "xb", buffering=0)  # noqa: SIM115 -- for life
        file.write(json.dumps({"format": _FORMAT, **asdict(owner)}).encode() + b"\n")
        return cls(file)

    @classmethod
    def resume(cls, path: Path, position: int) -> Self:
        """Go on with that of a dead process, after its last good record. Raises OSError."""
        file = open(path, "r+b", buffering=0)  # noqa: SIM115 -- for life
        file.truncate(position)
        file.seek(position)
        return cls(file)

    def note(self, kind: str, value: Operation, *, must: bool) -> None:
        """Add a record: an operation ("op"), or the path of a directory of the dataset ("dir").

        With ``must`` raises OSError if it cannot be written now.
        """
        text = msgpack.packb([kind, list(value)])
        record = _HEAD.pack(len(text), zlib.crc32(text)) + text
        try:
            while self._waiting:
                self._write(self._waiting[0])
                del self._waiting[0]
            self._write(record)
        except OSError:
            if must:
                raise
            self._waiting.append(record)
            self._last = -1

    def _write(self, record: bytes) -> None:
        try:
            if self._file.write(record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._cut(self._position)
            raise
        self._last, self._position = self._position, self._position + len(record)

    @property
    def fd(self) -> int:
        """The descriptor, for the native engine, which adds records of its own (native/outputs/journal.h)."""
        return self._file.fileno()

    @property
    def end(self) -> int:
        """Where the next record goes; -1 if some could not be written yet, which come first."""
        return -1 if self._waiting else self._position

    def go_on_at(self, position: int) -> None:
        """Somebody else has added records, up to this position."""
        if position != self._position:
            self._file.seek(position)
            self._position = self._last = position

    def take_back(self) -> None:
        """The last record is not to be: what it says was refused."""
        if self._last < 0:
            self._waiting.pop()
        else:
            self._cut(self._last)
            self._position = self._last

    def _cut(self, position: int) -> None:
        self._file.truncate(position)
        self._file.seek(position)

    def close(self) -> None:
        self._file.close()


class Record(NamedTuple):
    """A record, and where it ends."""

    kind: str
    value: list[Any]
    end: int


def read_owner(path: Path) -> Owner:
    """Whose it is. Raises FormatError, OSError."""
    with open(path, "rb") as file:
        return _read_owner(path, file)


def read_journal(path: Path) -> tuple[Owner, int, Iterator[Record]]:
    """Whose it is, where its records begin, and these. Raises FormatError, OSError."""
    file = open(path, "rb")  # noqa: SIM115 -- the generator closes it
    try:
        owner = _read_owner(path, file)
    except BaseException:
        file.close()
        raise
    return owner, file.tell(), _records(file)


def _read_owner(path: Path, file: BinaryIO) -> Owner:
    try:
        head = json.loads(file.readline(_RECORD_BYTES))
        if head.pop("format") != _FORMAT:
            raise FormatError(f"{path} was written by another version of FanStore")
        return Owner(**head)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{path} is not a journal of outputs: {error}") from None


def _records(file: BinaryIO) -> Iterator[Record]:
    with file:
        position = file.tell()
        while True:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return
            length, crc = _HEAD.unpack(head)
            text = file.read(length) if length <= _RECORD_BYTES else b""
            if len(text) < length or zlib.crc32(text) != crc:
                return  # the process was killed while it wrote this
            kind, value = msgpack.unpackb(text)
            position += len(head) + len(text)
            yield Record(kind, value, position)
