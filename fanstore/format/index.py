"""index.fsx in memory: the whole name space of a dataset, used in place (docs/format.md, *index.fsx*).

Owns loading, checking (in C, native/format/index.c) and access; indexwriter.py makes such files. An Index never changes
after it is loaded, so any thread may use it.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fanstore import _native
from fanstore.errors import FormatError
from fanstore.format.checksum import xxh3_64
from fanstore.format.codec import CHUNK_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"\x89FSX\r\n\x1a\n"
VERSION = 1
HEADER = struct.Struct("<8sIIQQIIQQQ")
SECTION = struct.Struct("<8sQQII")
SECTION_ALIGN = 64
NO_PARTITION = 0xFFFFFFFF
CHUNK_RECORD = np.dtype([("start", "<u8"), ("checksum", "<u8")])

#: The sections in file order: tag, numpy type, and the character by which a memoryview knows it.
SECTIONS: dict[str, tuple[np.dtype[np.generic], Literal["I", "Q", "q", "B"]]] = {
    "parent": (np.dtype("<u4"), "I"),
    "nameoff": (np.dtype("<u8"), "Q"),
    "mode": (np.dtype("<u4"), "I"),
    "mtime": (np.dtype("<i8"), "q"),
    "size": (np.dtype("<u8"), "Q"),
    "part": (np.dtype("<u4"), "I"),
    "offset": (np.dtype("<u8"), "Q"),
    "stored": (np.dtype("<u8"), "Q"),
    "codec": (np.dtype("<u4"), "I"),
    "checksum": (np.dtype("<u8"), "Q"),
    "inode": (np.dtype("<u4"), "I"),
    "nlink": (np.dtype("<u4"), "I"),
    "first": (np.dtype("<u4"), "I"),
    "count": (np.dtype("<u4"), "I"),
    "names": (np.dtype("u1"), "B"),
    "links": (np.dtype("u1"), "B"),
    "chunks": (CHUNK_RECORD, "Q"),
    "parts": (np.dtype("<u8"), "Q"),
}


class Chunk(NamedTuple):
    """Where one chunk of a file is stored and what it must be."""

    partition: int
    offset: int  #: in the partition file
    stored_bytes: int
    content_bytes: int
    checksum: int  #: of the stored bytes
    first: bool  #: the first chunk of its file


class Index:
    """A checked index.

    Attributes (memoryviews indexed by entry number, docs/format.md has their meaning): parent, mode, mtime_ns, size,
    partition, offset, stored_size, codec, checksum, inode, nlink, first, count; partition_bytes is indexed by
    partition number. Plain memoryviews, because reading one number from them is several times cheaper than from numpy.
    ``native`` is the same index for C.
    """

    def __init__(self, buffer: mmap.mmap | memoryview) -> None:
        """Use the bytes where they are; call load(), adopt() or from_buffer() instead."""
        view = memoryview(buffer).toreadonly()
        self.native = _native.Index(view)
        self._whole = view
        self.nbytes = len(view)
        (_, _, sections, _, self.entry_count, self.partition_count, self.chunk_bytes, *_rest) = HEADER.unpack_from(view)
        self._bytes: dict[str, memoryview] = {}
        for number in range(sections):
            tag, offset, length, _, _ = SECTION.unpack_from(view, HEADER.size + number * SECTION.size)
            self._bytes[tag.rstrip(b"\0").decode()] = view[offset : offset + length]
        column = {tag: self._bytes[tag].cast(code) for tag, (_, code) in SECTIONS.items()}
        self.parent = column["parent"]
        self.mode = column["mode"]
        self.mtime_ns = column["mtime"]
        self.size = column["size"]
        self.partition = column["part"]
        self.offset = column["offset"]
        self.stored_size = column["stored"]
        self.codec = column["codec"]
        self.checksum = column["checksum"]
        self.inode = column["inode"]
        self.nlink = column["nlink"]
        self.first = column["first"]
        self.count = column["count"]
        self.partition_bytes = column["parts"]
        self._name_offset = column["nameoff"]
        self._names = column["names"]
        self._links = column["links"]
        self._chunks = column["chunks"]  # pairs: start, checksum
        self.lookup = self.native.lookup

    @classmethod
    def from_buffer(cls, buffer: Buffer) -> Index:
        """Check and use a copy of bytes that are in memory already."""
        view = memoryview(buffer)
        if view.nbytes < HEADER.size:
            raise FormatError(f"the index is refused: it is truncated to {view.nbytes} bytes")
        memory = mmap.mmap(-1, view.nbytes)
        memory[:] = view.cast("B") if view.format != "B" else view
        return cls._checked(memory, "the index")

    @classmethod
    def adopt(cls, memory: mmap.mmap | memoryview, what: str = "the index") -> Index:
        """Check and use bytes where they are; nobody may change them from now on.

        Only memory that does not begin at a multiple of 8, as the columns need it, is copied; maps always do.
        """
        view = memoryview(memory).cast("B")
        if view.nbytes < HEADER.size:
            raise FormatError(f"{what} is refused: it is truncated to {view.nbytes} bytes")
        if np.frombuffer(view, np.uint8).ctypes.data % 8:
            return cls.from_buffer(view)
        return cls._checked(view, what)

    @classmethod
    def _checked(cls, memory: mmap.mmap | memoryview, what: str) -> Index:
        try:
            return cls(memory)
        except ValueError as error:
            raise FormatError(f"{what} is refused: {error}") from error

    @property
    def data(self) -> memoryview:
        """All of its bytes, as in the file."""
        return self._whole

    def file_checksum(self) -> int:
        """Checksum of the whole file, as the manifest has it."""
        return xxh3_64(self._whole)

    def column(self, tag: str) -> npt.NDArray[np.generic]:
        """A whole section as a read-only numpy array, for bulk work. Tags are those of docs/format.md."""
        return np.frombuffer(self._bytes[tag], dtype=SECTIONS[tag][0])

    def name(self, entry: int) -> bytes:
        """Name of an entry; empty for the root."""
        return bytes(self._names[self._name_offset[entry] : self._name_offset[entry + 1]])

    def path(self, entry: int) -> bytes:
        """Path of an entry relative to the root; empty for the root."""
        parts = []
        while entry != 0:
            parts.append(self.name(entry))
            entry = self.parent[entry]
        return b"/".join(reversed(parts))

    def resolve(self, path: bytes) -> int:
        """Entry of a relative path (symbolic links are not followed), or -1."""
        entry = 0
        for part in path.split(b"/"):
            if part:
                entry = self.lookup(entry, part)
                if entry < 0:
                    return -1
        return entry

    def children(self, directory: int) -> range:
        """Entries of a directory, ascending by name."""
        first = self.first[directory]
        return range(first, first + self.count[directory])

    def link_target(self, entry: int) -> bytes:
        """Target of a symbolic link."""
        offset = self.offset[entry]
        return bytes(self._links[offset : offset + self.size[entry]])

    def chunk_count(self, entry: int) -> int:
        """Number of chunks of a regular file; 0 if it is empty."""
        return (self.size[entry] + CHUNK_BYTES - 1) // CHUNK_BYTES

    def chunk(self, entry: int, number: int) -> Chunk:
        """Chunk ``number`` of a regular file."""
        size = self.size[entry]
        stored = self.stored_size[entry]
        partition, offset = self.partition[entry], self.offset[entry]
        if size <= CHUNK_BYTES:
            if number != 0:
                raise IndexError(number)
            return Chunk(partition, offset, stored, size, self.checksum[entry], True)
        count = self.count[entry]
        if not 0 <= number < count:
            raise IndexError(number)
        record = 2 * (self.first[entry] + number)
        start = self._chunks[record]
        end = self._chunks[record + 2] if number + 1 < count else stored
        content = min(CHUNK_BYTES, size - number * CHUNK_BYTES)
        return Chunk(partition, offset + start, end - start, content, self._chunks[record + 1], number == 0)
