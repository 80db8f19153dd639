"""Files of a prepared dataset without a mount: found by their path, listed, read.

Owns the way from a path to an entry, symbolic links of the dataset included, and the way from an entry to its checked
bytes. For people who look into a dataset (cli/ls.py, cli/cat.py); mounts read through the chunk broker. May block; any
thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from fanstore.errors import CorruptDataError, FanstoreError
from fanstore.format.checksum import xxh3_64
from fanstore.format.codec_table import CODECS
from fanstore.format.index import Index
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import StoredFile
from fanstore.units import format_path

#: As many symbolic links on one way as Linux follows.
LINKS_MOST = 40


class NoSuchFileError(FanstoreError):
    """A path does not lead to what was asked for; the message is for people."""


def find(index: Index, path: bytes) -> int:
    """The entry of a path in the dataset, also with a slash before it; symbolic links are followed."""
    links = 0
    way: list[int] = [0]
    names = _names(path)
    while names:
        name = names.pop()
        if name == b"..":
            way = way[:-1] or [0]
            continue
        if not stat.S_ISDIR(index.mode[way[-1]]):
            raise NoSuchFileError(f"{format_path(path)} is not in the dataset: it leads through a file")
        entry = index.lookup(way[-1], name)
        if entry < 0:
            raise NoSuchFileError(f"{format_path(path)} is not in the dataset")
        if not stat.S_ISLNK(index.mode[entry]):
            way.append(entry)
            continue
        target = index.link_target(entry)
        links += 1
        if target.startswith(b"/") or links > LINKS_MOST:
            where = f"to {format_path(target)}, out of the dataset" if target.startswith(b"/") else "in a circle"
            raise NoSuchFileError(f"{format_path(path)} leads {where}, by a symbolic link")
        names += _names(target)
    return way[-1]


def _names(path: bytes) -> list[bytes]:
    """The last one first."""
    return [name for name in reversed(path.split(b"/")) if name not in (b"", b".")]


class Reader:
    """Reads files of one dataset; a context manager, because partitions stay open."""

    def __init__(self, prepared: PreparedDataset) -> None:
        self._prepared = prepared
        self._open: dict[int, StoredFile] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def chunks(self, entry: int) -> Iterator[bytes]:
        """The content of a regular file, in order, checked. Raises CorruptDataError, OSError."""
        index = self._prepared.index
        entry = index.inode[entry]
        codec = CODECS[index.codec[entry]]
        for number in range(index.chunk_count(entry)):
            chunk = index.chunk(entry, number)
            stored = self._partition(chunk.partition).read(chunk.offset, chunk.stored_bytes)
            if xxh3_64(stored) != chunk.checksum:
                raise CorruptDataError(f"the checksum of {format_path(index.path(entry))} does not match")
            yield codec.decode_chunk(stored, chunk.content_bytes, chunk.first)

    def _partition(self, number: int) -> StoredFile:
        if number not in self._open:
            name = self._prepared.manifest.partitions[number].file
            self._open[number] = self._prepared.storage.open(name)
        return self._open[number]


def describe_error(error: OSError | CorruptDataError, prepared: PreparedDataset, entry: int) -> str:
    """One sentence about a file that cannot be read."""
    index = prepared.index
    label = prepared.partition_label(index.partition[index.inode[entry]])
    why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return f"cannot read {format_path(index.path(entry))} in '{label}': {why}"


def own_path(text: str) -> bytes:
    """A path of the command line as the bytes that names have."""
    return os.fsencode(text)
