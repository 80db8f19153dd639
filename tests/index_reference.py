"""Reference reader of index.fsx: plain, slow and obvious, written from docs/format.md and not from the C code.

Owns the checks, the look-up and the laying out of columns in a file, one check after the other in the order of the
document. The tests compare the real Index with it: both must accept and refuse the same files and answer alike.
Nothing here is shared with fanstore.format, on purpose.
"""

import itertools
import stat
import struct
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import xxhash

MAGIC = b"\x89FSX\r\n\x1a\n"
VERSION = 1
CHUNK_BYTES = 4_194_304
NO_PARTITION = 0xFFFF_FFFF
HEADER = struct.Struct("<8sIIQQIIQQQ")
SECTION = struct.Struct("<8sQQII")
ALIGNMENT = 64
#: Of every codec but none: the fewest bytes of a file, and by how many a stored chunk may be longer than a chunk.
CODECS = {1: (19, 19), 2: (10, 16_384)}

#: tag, letter of the struct module (None: bytes), bytes per item
SECTIONS: tuple[tuple[str, str | None, int], ...] = (
    ("parent", "I", 4),
    ("nameoff", "Q", 8),
    ("mode", "I", 4),
    ("mtime", "q", 8),
    ("size", "Q", 8),
    ("part", "I", 4),
    ("offset", "Q", 8),
    ("stored", "Q", 8),
    ("codec", "I", 4),
    ("checksum", "Q", 8),
    ("inode", "I", 4),
    ("nlink", "I", 4),
    ("first", "I", 4),
    ("count", "I", 4),
    ("names", None, 1),
    ("links", None, 1),
    ("chunks", "Q", 16),
    ("parts", "Q", 8),
)
PER_ENTRY = tuple(tag for tag, _, _ in SECTIONS[:14])


class Refused(Exception):
    """The index breaks a rule of docs/format.md; the message says which."""


class ChunkRecord(NamedTuple):
    start: int
    checksum: int


class StoredChunk(NamedTuple):
    """One chunk of a file: where its stored bytes are in the partition, and what they must give."""

    partition: int
    offset: int
    stored_bytes: int
    content_bytes: int
    checksum: int
    first: bool


@dataclass
class Columns:
    """The sections of an index as lists. ``numbers`` holds the columns 0 to 13 under their tags."""

    numbers: dict[str, list[int]] = field(default_factory=lambda: {tag: [] for tag in PER_ENTRY})
    names: bytes = b""
    links: bytes = b""
    chunks: list[ChunkRecord] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    def sections(self) -> list[bytes]:
        """The sections' bytes in the order of the table."""
        packed = [
            struct.pack(f"<{len(self.numbers[tag])}{letter}", *self.numbers[tag]) for tag, letter, _ in SECTIONS[:14]
        ]
        records = b"".join(struct.pack("<QQ", *record) for record in self.chunks)
        return [*packed, self.names, self.links, records, struct.pack(f"<{len(self.parts)}Q", *self.parts)]


def checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def aligned(position: int) -> int:
    return (position + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def assemble(columns: Columns) -> bytes:
    """Lay the columns out as a file with right lengths and checksums, whatever is in them."""
    table, body = b"", bytearray()
    start = HEADER.size + SECTION.size * len(SECTIONS)
    for (tag, _, item_bytes), content in zip(SECTIONS, columns.sections(), strict=True):
        body += bytes(aligned(start + len(body)) - start - len(body))
        table += SECTION.pack(tag.encode(), start + len(body), len(content), item_bytes, 0)
        body += content
    file_bytes = start + len(body)
    header = HEADER.pack(
        MAGIC,
        VERSION,
        len(SECTIONS),
        file_bytes,
        len(columns.numbers["parent"]),
        len(columns.parts),
        CHUNK_BYTES,
        len(columns.chunks),
        0,
        0,
    )
    data = bytearray(header + table + body)
    seal(data)
    return bytes(data)


def seal(data: bytearray) -> None:
    """Write both checksums anew, as a hostile author would."""
    if len(data) >= HEADER.size:
        struct.pack_into("<Q", data, 48, checksum(bytes(data[64:])))
        struct.pack_into("<Q", data, 56, checksum(bytes(data[:56])))


def _refuse(text: str) -> NoReturn:
    raise Refused(text)


def _read_layout(data: bytes) -> tuple[int, int, int, list[bytes]]:
    """Check header and section table; number of entries, partitions and chunks, and the sections' bytes."""
    if len(data) < HEADER.size:
        _refuse("shorter than a header")
    magic, version, sections, file_bytes, n, partitions, chunk_bytes, chunks, body_sum, header_sum = HEADER.unpack_from(
        data
    )
    if magic != MAGIC:
        _refuse("magic")
    if version != VERSION:
        _refuse("version")
    if header_sum != checksum(data[:56]):
        _refuse("header checksum")
    if sections != len(SECTIONS):
        _refuse("number of sections")
    if file_bytes != len(data):
        _refuse("length")
    if chunk_bytes != CHUNK_BYTES:
        _refuse("chunk_bytes")
    if not 1 <= n <= 2**32 - 2:
        _refuse("number of entries")
    if body_sum != checksum(data[64:]):
        _refuse("body checksum")
    items = dict.fromkeys(PER_ENTRY, n) | {"nameoff": n + 1, "chunks": chunks, "parts": partitions}
    position = HEADER.size + len(SECTIONS) * SECTION.size
    if len(data) < position:
        _refuse("shorter than the section table")
    contents = []
    for number, (tag, _, item_bytes) in enumerate(SECTIONS):
        found_tag, offset, length, found_item_bytes, zero = SECTION.unpack_from(data, 64 + 32 * number)
        if found_tag != tag.encode().ljust(8, b"\0"):
            _refuse(f"tag of section {number}")
        if found_item_bytes != item_bytes or zero != 0:
            _refuse(f"item_bytes or zero of section {tag}")
        if offset != aligned(position):
            _refuse(f"offset of section {tag}")
        if tag in items and length != items[tag] * item_bytes:
            _refuse(f"length of section {tag}")
        if offset + length > len(data):
            _refuse(f"section {tag} outside the file")
        if any(data[position:offset]):
            _refuse(f"padding before section {tag}")
        contents.append(data[offset : offset + length])
        position = offset + length
    if position != len(data):
        _refuse("does not end with the last section")
    return n, partitions, chunks, contents


class ReferenceIndex:
    """A checked index. Raises Refused when the bytes break a rule."""

    def __init__(self, data: bytes) -> None:
        self.n, self.partitions, chunks, contents = _read_layout(data)
        self.column: dict[str, tuple[int, ...]] = {}
        for (tag, letter, item_bytes), content in zip(SECTIONS[:14], contents, strict=False):
            self.column[tag] = struct.unpack(f"<{len(content) // item_bytes}{letter}", content)
        self.names, self.links = contents[14], contents[15]
        words = struct.unpack(f"<{2 * chunks}Q", contents[16])
        self.chunks = [ChunkRecord(*words[i : i + 2]) for i in range(0, 2 * chunks, 2)]
        self.parts = struct.unpack(f"<{self.partitions}Q", contents[17])
        self._check_names()
        self._check_modes()
        self._check_tree()
        for entry in range(self.n):
            if self.is_type(entry, stat.S_IFREG):
                self._check_file(entry)
            elif self.is_type(entry, stat.S_IFLNK):
                self._check_symlink(entry)
        self._check_hardlinks()

    def is_type(self, entry: int, kind: int) -> bool:
        return stat.S_IFMT(self.column["mode"][entry]) == kind

    def _check_names(self) -> None:
        ends = self.column["nameoff"]
        if ends[0] != 0 or ends[self.n] != len(self.names):
            _refuse("nameoff does not span names")
        for entry in range(self.n):
            if ends[entry] > ends[entry + 1] or ends[entry + 1] > len(self.names):
                _refuse(f"nameoff descends at {entry}")
            name = self.name(entry)
            if entry == 0:
                if name:
                    _refuse("the root has a name")
                continue
            if not 1 <= len(name) <= 255 or name in (b".", b"..") or b"/" in name or b"\0" in name:
                _refuse(f"name of {entry}")

    def _check_modes(self) -> None:
        for entry, mode in enumerate(self.column["mode"]):
            if mode & ~(0o170000 | 0o7777) or stat.S_IFMT(mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                _refuse(f"mode of {entry}")

    def _check_tree(self) -> None:
        if not self.is_type(0, stat.S_IFDIR) or self.column["parent"][0] != 0:
            _refuse("the root is not a directory that is its own parent")
        seen = 1
        for entry in range(self.n):
            if not self.is_type(entry, stat.S_IFDIR):
                continue
            first, count = self.column["first"][entry], self.column["count"][entry]
            if first != seen or count > self.n - seen:
                _refuse(f"children of {entry}")
            if entry >= seen:
                _refuse(f"directory {entry} is nobody's child")
            seen += count
            children = range(first, first + count)
            if any(self.column["parent"][child] != entry for child in children):
                _refuse(f"a child of {entry} has another parent")
            names = [self.name(child) for child in children]
            if any(a >= b for a, b in itertools.pairwise(names)):
                _refuse(f"children of {entry} not ascending")
            subdirectories = sum(self.is_type(child, stat.S_IFDIR) for child in children)
            if self.column["nlink"][entry] != 2 + subdirectories:
                _refuse(f"nlink of directory {entry}")
            self._check_constants(entry, size=0, stored=0, offset=0, part=NO_PARTITION, codec=0, checksum=0)
            self._check_constants(entry, inode=entry)
        if seen != self.n:
            _refuse("entries that no directory holds")

    def _check_constants(self, entry: int, **expected: int) -> None:
        for tag, value in expected.items():
            if self.column[tag][entry] != value:
                _refuse(f"{tag} of {entry} is not {value}")

    def _check_file(self, entry: int) -> None:
        column = self.column
        size, stored = column["size"][entry], column["stored"][entry]
        part, offset = column["part"][entry], column["offset"][entry]
        codec = column["codec"][entry]
        if part >= self.partitions:
            _refuse(f"partition of {entry}")
        if offset + stored > self.parts[part]:
            _refuse(f"stored bytes of {entry} end outside the partition")
        if codec != 0 and codec not in CODECS:
            _refuse(f"codec of {entry}")
        if codec == 0 and stored != size:
            _refuse(f"plain file {entry} with stored != size")
        shortest, extra = CODECS.get(codec, (0, 0))
        if codec != 0 and not shortest <= stored < size:
            _refuse(f"stored bytes of compressed file {entry}")
        needed = (size + CHUNK_BYTES - 1) // CHUNK_BYTES
        if needed <= 1:
            self._check_constants(entry, first=0, count=0)
            return
        first, count = column["first"][entry], column["count"][entry]
        if count != needed:
            _refuse(f"chunk count of {entry}")
        if first + count > len(self.chunks):
            _refuse(f"chunk records of {entry} outside the section")
        records = self.chunks[first : first + count]
        starts = [record.start for record in records] + [stored]
        if starts[0] != 0:
            _refuse(f"first chunk of {entry} does not start at 0")
        for k in range(count):
            if codec == 0 and starts[k] != k * CHUNK_BYTES:
                _refuse(f"start of chunk {k} of plain file {entry}")
            if not 0 < starts[k + 1] - starts[k] <= CHUNK_BYTES + extra:
                _refuse(f"length of stored chunk {k} of {entry}")
        # Whether checksums agree with the bytes, and with each other, is for fanstore-verify to say.

    def _check_symlink(self, entry: int) -> None:
        size, offset = self.column["size"][entry], self.column["offset"][entry]
        if not 1 <= size <= 4095:
            _refuse(f"length of the target of {entry}")
        if offset + size > len(self.links):
            _refuse(f"target of {entry} outside links")
        if b"\0" in self.link_target(entry):
            _refuse(f"target of {entry} with NUL")
        self._check_constants(entry, stored=size, part=NO_PARTITION, codec=0, checksum=0, first=0, count=0)

    def _check_hardlinks(self) -> None:
        links: dict[int, int] = {}
        for entry in range(self.n):
            primary = self.column["inode"][entry]
            links[primary] = links.get(primary, 0) + 1
            if primary == entry:
                continue
            if primary > entry or self.column["inode"][primary] != primary:
                _refuse(f"primary of {entry} is not a primary")
            for tag in PER_ENTRY:
                if tag not in ("parent", "nameoff") and self.column[tag][entry] != self.column[tag][primary]:
                    _refuse(f"{tag} of hard link {entry} is not that of its primary")
        for primary, count in links.items():
            if not self.is_type(primary, stat.S_IFDIR) and self.column["nlink"][primary] != count:
                _refuse(f"nlink of {primary}")

    # What follows is the use of a checked index.

    def name(self, entry: int) -> bytes:
        return self.names[self.column["nameoff"][entry] : self.column["nameoff"][entry + 1]]

    def path(self, entry: int) -> bytes:
        parts: list[bytes] = []
        while entry != 0:
            parts.append(self.name(entry))
            entry = self.column["parent"][entry]
        return b"/".join(reversed(parts))

    def children(self, entry: int) -> range:
        if not self.is_type(entry, stat.S_IFDIR):
            return range(0)
        first = self.column["first"][entry]
        return range(first, first + self.column["count"][entry])

    def lookup(self, directory: int, name: bytes) -> int:
        for child in self.children(directory):
            if self.name(child) == name:
                return child
        return -1

    def resolve(self, path: bytes) -> int:
        entry = 0
        for name in path.split(b"/") if path else []:
            entry = self.lookup(entry, name)
            if entry < 0:
                return -1
        return entry

    def link_target(self, entry: int) -> bytes:
        start = self.column["offset"][entry]
        return self.links[start : start + self.column["size"][entry]]

    def stored_chunks(self, entry: int) -> list[StoredChunk]:
        """The chunks of a regular file."""
        column = self.column
        size, stored, part = column["size"][entry], column["stored"][entry], column["part"][entry]
        if size == 0:
            return []
        if size <= CHUNK_BYTES:
            return [StoredChunk(part, column["offset"][entry], stored, size, column["checksum"][entry], True)]
        first, count = column["first"][entry], column["count"][entry]
        records = self.chunks[first : first + count]
        starts = [record.start for record in records] + [stored]
        return [
            StoredChunk(
                part,
                column["offset"][entry] + starts[k],
                starts[k + 1] - starts[k],
                min(CHUNK_BYTES, size - k * CHUNK_BYTES),
                records[k].checksum,
                k == 0,
            )
            for k in range(count)
        ]
