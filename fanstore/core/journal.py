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
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from fanstore.core.outputtree import Operation
from fanstore.errors import FormatError

JOURNAL_NAME = "outputs.journal"
_FORMAT = 1
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
    """The journal of this process. ``note`` raises OSError: a full disk, most likely.

    Attributes:
        position: where the next record goes.
    """

    def __init__(self, path: Path, owner: Owner) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 -- for life
        self._file.write(json.dumps({"format": _FORMAT, **asdict(owner)}).encode() + b"\n")
        self.position = self._file.tell()

    def note(self, kind: str, value: Operation) -> None:
        """Add a record: an operation ("op"), or the path of a directory of the dataset ("dir")."""
        text = msgpack.packb([kind, list(value)])
        record = _HEAD.pack(len(text), zlib.crc32(text)) + text
        if self._file.write(record) != len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.position += len(record)

    def cut(self, position: int) -> None:
        """Take back what was noted after this position."""
        self._file.truncate(position)
        self._file.seek(position)
        self.position = position

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> tuple[Owner, Iterator[tuple[str, list[Any]]]]:
    """Whose it is, and its records. Raises FormatError, OSError."""
    file = open(path, "rb")  # noqa: SIM115 -- the generator closes it
    try:
        owner = _read_owner(path, file)
    except BaseException:
        file.close()
        raise
    return owner, _records(file)


def _read_owner(path: Path, file: BinaryIO) -> Owner:
    try:
        head = json.loads(file.readline(_RECORD_BYTES))
        if head.pop("format") != _FORMAT:
            raise FormatError(f"{path} was written by another version of FanStore")
        return Owner(**head)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{path} is not a journal of outputs: {error}") from None


def _records(file: BinaryIO) -> Iterator[tuple[str, list[Any]]]:
    with file:
        while True:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return
            length, crc = _HEAD.unpack(head)
            text = file.read(length) if length <= _RECORD_BYTES else b""
            if len(text) < length or zlib.crc32(text) != crc:
                return  # the process was killed while it wrote this
            kind, value = msgpack.unpackb(text)
            yield kind, value
