"""Indexes that break one rule of docs/format.md each (the table *refused*), with right checksums.

A hostile author can compute checksums, so these reach the checks of the structure. Each case says which rule the
reference finds broken, so that a case cannot pass for another reason than its own.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

import pytest
from index_reference import (
    CHUNK_BYTES,
    HEADER,
    NO_PARTITION,
    SECTION,
    SECTIONS,
    ChunkRecord,
    Columns,
    ReferenceIndex,
    Refused,
    assemble,
    checksum,
    seal,
)
from index_trees import columns_of, sample_tree

from fanstore.errors import FormatError
from fanstore.format.index import Index

REFERENCE = ReferenceIndex(assemble(columns_of(sample_tree())))


def entry(path: bytes) -> int:
    number = REFERENCE.resolve(path)
    assert number >= 0, path
    return number


class Case(NamedTuple):
    name: str
    rule: str  #: pattern of what the reference says
    spoil: Callable[[Columns], None]


def put(tag: str, path: bytes, value: int) -> Callable[[Columns], None]:
    def spoil(columns: Columns) -> None:
        columns.numbers[tag][entry(path)] = value

    return spoil


def put_all(path: bytes, **values: int) -> Callable[[Columns], None]:
    def spoil(columns: Columns) -> None:
        for tag, value in values.items():
            columns.numbers[tag][entry(path)] = value

    return spoil


def rename(path: bytes, name: bytes) -> Callable[[Columns], None]:
    """Another name of any length, with all later offsets moved."""

    def spoil(columns: Columns) -> None:
        offsets, number = columns.numbers["nameoff"], entry(path)
        columns.names = columns.names[: offsets[number]] + name + columns.names[offsets[number + 1] :]
        shift = len(name) - (offsets[number + 1] - offsets[number])
        for later in range(number + 1, len(offsets)):
            offsets[later] += shift

    return spoil


def chunk_start(path: bytes, k: int, start: int) -> Callable[[Columns], None]:
    def spoil(columns: Columns) -> None:
        record = columns.numbers["first"][entry(path)] + k
        columns.chunks[record] = ChunkRecord(start, columns.chunks[record].checksum)

    return spoil


def target(path: bytes, spoiled: bytes) -> Callable[[Columns], None]:
    def spoil(columns: Columns) -> None:
        numbers, number = columns.numbers, entry(path)
        numbers["offset"][number] = len(columns.links)
        numbers["size"][number] = numbers["stored"][number] = len(spoiled)
        columns.links += spoiled

    return spoil


def swap_children(columns: Columns) -> None:
    """Two neighbours change their names: all else stays right."""
    offsets = columns.numbers["nameoff"]
    a, b = entry(b"a/x"), entry(b"a/y")
    assert b == a + 1
    names = bytearray(columns.names)
    names[offsets[a] : offsets[a + 1]], names[offsets[b] : offsets[b + 1]] = b"y", b"x"
    columns.names = bytes(names)


def cycle(columns: Columns) -> None:
    """Directory a/z holds the root's children again."""
    put_all(b"a/z", first=1, count=1)(columns)


def self_child(columns: Columns) -> None:
    put_all(b"a/z", first=entry(b"a/z"))(columns)


def overlapping(columns: Columns) -> None:
    """Directory c claims the last child of a as well."""
    columns.numbers["first"][entry(b"c")] -= 1
    columns.numbers["count"][entry(b"c")] += 1


def unreachable(columns: Columns) -> None:
    """The last directory does without its child, which nobody holds then."""
    columns.numbers["count"][entry(b"a/z")] = 0


def three_links(columns: Columns) -> None:
    """A hard link to a hard link: a/x <- c/again <- a/z/deep."""
    for tag, column in columns.numbers.items():
        if tag not in ("parent", "nameoff"):
            column[entry(b"a/z/deep")] = column[entry(b"a/x")]
    columns.numbers["inode"][entry(b"a/z/deep")] = entry(b"c/again")
    for path in (b"a/x", b"c/again", b"a/z/deep"):
        columns.numbers["nlink"][entry(path)] = 3


def forward_link(columns: Columns) -> None:
    columns.numbers["inode"][entry(b"a/x")] = entry(b"c/again")
    columns.numbers["inode"][entry(b"c/again")] = entry(b"c/again")


def directory_link(columns: Columns) -> None:
    """An empty directory as a hard link to another one."""
    columns.numbers["inode"][entry(b"c")] = entry(b"b")


def both_links(tag: str, value: int) -> Callable[[Columns], None]:
    def spoil(columns: Columns) -> None:
        for path in (b"a/x", b"c/again"):
            columns.numbers[tag][entry(path)] = value

    return spoil


def big_links(**values: int) -> Callable[[Columns], None]:
    def spoil(columns: Columns) -> None:
        for path in (b"big", b"c/big-again"):
            put_all(path, **values)(columns)

    return spoil


def no_parts(columns: Columns) -> None:
    columns.parts = []


def longer_stored_chunk(columns: Columns) -> None:
    """One byte more than a stored chunk may have; the frame as a whole stays shorter than the file."""
    first = columns.numbers["first"][entry(b"big")]
    columns.chunks[first + 1] = columns.chunks[first + 1]._replace(start=CHUNK_BYTES + 20)
    columns.chunks[first + 2] = columns.chunks[first + 2]._replace(start=CHUNK_BYTES + 40)
    big_links(stored=CHUNK_BYTES + 60)(columns)


LINK_BYTES = len(columns_of(sample_tree()).links)
CHUNK_RECORDS = len(columns_of(sample_tree()).chunks)
BIG_PLAIN_PART = REFERENCE.column["part"][entry(b"big-plain")]
PART_BYTES = REFERENCE.parts[REFERENCE.column["part"][entry(b"plain")]]

CASES = [
    # name
    Case("name empty", "name of", rename(b"a/x", b"")),
    Case("name of 256 bytes", "name of", rename(b"\xff" * 255, b"\xff" * 256)),
    Case("name '.'", "name of", rename(b"a/x", b".")),
    Case("name '..'", "name of", rename(b"a/x", b"..")),
    Case("name with slash", "name of", rename(b"a/x", b"a/b")),
    Case("absolute name", "name of", rename(b"a/x", b"/etc")),
    Case("name with parent", "name of", rename(b"a/x", b"../x")),
    Case("name with NUL", "name of", rename(b"a/x", b"a\0b")),
    Case("the root has a name", "root has a name", rename(b"", b"r")),
    Case("names equal", "not ascending", rename(b"a/y", b"x")),
    Case("names descending", "not ascending", swap_children),
    Case("name offset beyond the end", "nameoff", lambda c: c.numbers["nameoff"].__setitem__(2, 2**63)),
    Case("name offsets descend", "nameoff descends", lambda c: c.numbers["nameoff"].__setitem__(3, 0)),
    Case("names do not begin at 0", "nameoff does not span", lambda c: c.numbers["nameoff"].__setitem__(0, 1)),
    Case("bytes after the last name", "nameoff does not span", lambda c: setattr(c, "names", c.names + b"z")),
    # mode
    Case("no type", "mode of", put("mode", b"plain", 0o644)),
    Case("pipe", "mode of", put("mode", b"plain", 0o010644)),
    Case("socket", "mode of", put("mode", b"plain", 0o140644)),
    Case("block device", "mode of", put("mode", b"plain", 0o060644)),
    Case("all type bits", "mode of", put("mode", b"plain", 0o170644)),
    Case("bit above the type", "mode of", put("mode", b"plain", 0o300644)),
    Case("highest bit", "mode of", put("mode", b"plain", 0o100644 | 1 << 31)),
    Case("root is a file", "root is not a directory", put("mode", b"", 0o100644)),
    # directory
    Case("root's parent", "own parent", put("parent", b"", 1)),
    Case("cycle", "children of", cycle),
    Case("its own child", "children of", self_child),
    Case("overlapping children", "children of", overlapping),
    Case("children far away", "children of", put("first", b"a", 2**32 - 1)),
    Case("children of an empty directory elsewhere", "children of", put("first", b"b", 0)),
    Case("more children than entries", "children of", put("count", b"a/z", 2**32 - 1)),
    Case("all children and more", "children of", put("count", b"", REFERENCE.n)),
    Case("a child too many", "children of", put("count", b"a/z", 2)),
    Case("unreachable entry", "no directory holds", unreachable),
    Case("another parent", "another parent", put("parent", b"a/x", entry(b"c"))),
    Case("parent is itself", "another parent", put("parent", b"a/z", entry(b"a/z"))),
    Case("parent does not exist", "another parent", put("parent", b"a/x", 2**32 - 1)),
    Case("parent is a file", "another parent", put("parent", b"a/x", entry(b"plain"))),
    Case("directory nlink too small", "nlink of directory", put("nlink", b"a", 2)),
    Case("directory nlink too large", "nlink of directory", put("nlink", b"b", 3)),
    Case("directory with size", "size of", put("size", b"a", 4096)),
    Case("directory with stored", "stored of", put("stored", b"a", 1)),
    Case("directory with offset", "offset of", put("offset", b"a", 1)),
    Case("directory with partition", "part of", put("part", b"a", 0)),
    Case("directory with codec", "codec of", put("codec", b"a", 1)),
    Case("directory with checksum", "checksum of", put("checksum", b"a", 1)),
    # regular file
    Case("partition does not exist", "partition of", put("part", b"plain", 2)),
    Case("no partition", "partition of", put("part", b"plain", NO_PARTITION)),
    Case("no partitions at all", "partition of", no_parts),
    Case("ends one byte outside", "outside the partition", put("offset", b"plain", PART_BYTES - 999)),
    Case("begins outside", "outside the partition", put("offset", b"plain", PART_BYTES + 1)),
    Case("end overflows 64 bits", "outside the partition", put("offset", b"plain", 2**64 - 500)),
    Case("empty file outside", "outside the partition", put("offset", b"empty", 2**40)),
    Case("unknown codec", "codec of", put("codec", b"plain", 3)),
    Case("unknown large codec", "codec of", put("codec", b"plain", 2**32 - 1)),
    Case("plain, stored less", "stored != size", put("stored", b"plain", 999)),
    Case("plain, size more", "stored != size", put("size", b"plain", 1001)),
    Case("LZ4 not shorter", "stored bytes of compressed", both_links("stored", 700)),
    Case("LZ4 shorter than a frame", "stored bytes of compressed", both_links("stored", 18)),
    Case("zstd not shorter", "stored bytes of compressed", put("stored", b"zstd-small", 300)),
    Case("zstd shorter than a frame", "stored bytes of compressed", put("stored", b"zstd-small", 9)),
    Case("compressed and empty", "stored bytes of compressed", put("codec", b"empty", 1)),
    Case("one chunk, with a list", "count of", put("count", b"plain", 1)),
    Case("one chunk, with a first record", "first of", put("first", b"plain", 1)),
    Case("exactly one chunk, with a list", "count of", put_all(b"one-chunk", count=1)),
    Case("a chunk too few", "chunk count", put("count", b"big-plain", 2)),
    Case("a chunk too many", "chunk count", put("count", b"big-plain", 4)),
    Case("no chunks", "chunk count", put_all(b"big-plain", first=0, count=0)),
    Case("size of 2^63 and a wide partition", "chunk count", lambda c: _enormous(c, 2**63)),
    Case("size of 2^64 - 1 and a wide partition", "chunk count", lambda c: _enormous(c, 2**64 - 1)),
    # chunks
    Case("records outside", "outside the section", put("first", b"big-plain", CHUNK_RECORDS - 2)),
    Case("records far outside", "outside the section", put("first", b"big-plain", 2**32 - 1)),
    Case("first chunk not at 0", "does not start at 0", chunk_start(b"big", 0, 15)),
    Case("plain chunk not at its place", "start of chunk 1", chunk_start(b"big-plain", 1, CHUNK_BYTES - 1)),
    Case("chunks descend", "length of stored chunk 1", chunk_start(b"big", 2, 1)),
    Case("empty stored chunk", "length of stored chunk", lambda c: _equal_starts(c)),
    Case("chunk starts after the end", "length of stored chunk", chunk_start(b"big", 2, 2**63)),
    Case("last stored chunk empty", "length of stored chunk", lambda c: _last_empty(c)),
    Case("stored chunk too long", "length of stored chunk", longer_stored_chunk),
    # hard link
    Case("link to a link", "is not a primary", three_links),
    Case("link to a later entry", "is not a primary", forward_link),
    Case("link to nowhere", "is not a primary", lambda c: c.numbers["inode"].__setitem__(entry(b"plain"), 2**32 - 1)),
    Case("link to a directory", "of hard link|inode of", put("inode", b"plain", entry(b"a"))),
    Case("directory as a link", "inode of", directory_link),
    Case("link to another file", "of hard link", put("inode", b"plain", entry(b"empty"))),
    Case("link with another mode", "mode of hard link", put("mode", b"c/again", 0o100600)),
    Case("link with another time", "mtime of hard link", put("mtime", b"c/again", 77)),
    Case("link with another checksum", "checksum of hard link", put("checksum", b"c/again", 77)),
    Case("link with another nlink", "nlink of hard link", put("nlink", b"c/again", 1)),
    Case("symbolic link with another target", "offset of hard link", target(b"c/link-again", b"plaix")),
    Case("nlink too large", "nlink of", both_links("nlink", 3)),
    Case("nlink too small", "nlink of", both_links("nlink", 1)),
    Case("nlink of a single file", "nlink of", put("nlink", b"plain", 2)),
    Case("nlink 0", "nlink of", put("nlink", b"plain", 0)),
    Case("nlink of a single symbolic link", "nlink of", put("nlink", b"a/y", 0)),
    # symbolic link
    Case("target empty", "length of the target", put_all(b"a/y", size=0, stored=0)),
    Case("target of 4096 bytes", "length of the target", target(b"a/y", b"t" * 4096)),
    Case("target enormous", "length of the target", put_all(b"a/y", size=2**64 - 1, stored=2**64 - 1)),
    Case("target ends outside", "outside links", put("offset", b"a/y", LINK_BYTES - 2)),
    Case("target begins outside", "outside links", put("offset", b"a/y", 2**64 - 2)),
    Case("target with NUL", "with NUL", target(b"a/y", b"a\0b")),
    Case("target stored differs", "stored of", put("stored", b"a/y", 4)),
    Case("symbolic link with partition", "part of", put("part", b"a/y", 0)),
    Case("symbolic link with codec", "codec of", put("codec", b"a/y", 1)),
    Case("symbolic link with checksum", "checksum of", put("checksum", b"a/y", 1)),
    Case("symbolic link with first", "first of", put("first", b"a/y", 1)),
    Case("symbolic link with count", "count of", put("count", b"a/y", 1)),
]


def _enormous(columns: Columns, size: int) -> None:
    columns.parts[BIG_PLAIN_PART] = 2**64 - 1
    put_all(b"big-plain", offset=0, size=size, stored=size)(columns)


def _equal_starts(columns: Columns) -> None:
    first = columns.numbers["first"][entry(b"big")]
    columns.chunks[first + 2] = columns.chunks[first + 2]._replace(start=columns.chunks[first + 1].start)


def _last_empty(columns: Columns) -> None:
    first = columns.numbers["first"][entry(b"big")]
    columns.chunks[first + 2] = columns.chunks[first + 2]._replace(start=columns.numbers["stored"][entry(b"big")])


def assert_refused(data: bytes, rule: str) -> None:
    with pytest.raises(Refused, match=rule):
        ReferenceIndex(data)
    with pytest.raises(FormatError, match=r"^the index is refused: ") as caught:
        Index.from_buffer(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_broken_rule_is_refused(case: Case) -> None:
    columns = columns_of(sample_tree())
    case.spoil(columns)
    assert_refused(assemble(columns), case.rule)


def header(offset: int, letter: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into("<" + letter, data, offset, value)


def table(section: str, offset: int, letter: str, value: int) -> Callable[[bytearray], None]:
    number = [tag for tag, _, _ in SECTIONS].index(section)
    return header(HEADER.size + number * SECTION.size + offset, letter, value)


def exchange_sections(data: bytearray) -> None:
    """Two columns of the same shape, mode and part, change their rows in the table."""
    a, b = HEADER.size + 2 * SECTION.size, HEADER.size + 5 * SECTION.size
    data[a : a + 32], data[b : b + 32] = data[b : b + 32], data[a : a + 32]


def spoil_padding(data: bytearray) -> None:
    _, offset, length, _, _ = SECTION.unpack_from(data, HEADER.size + 14 * SECTION.size)
    assert (offset + length) % 64 != 0
    data[offset + length] = 1


LAYOUT_CASES: list[tuple[str, str, Callable[[bytearray], None]]] = [
    ("magic", "magic", header(0, "B", 0x88)),
    ("magic after a text-mode transfer", "magic", lambda data: data.__setitem__(slice(4, 6), b"\n\n")),
    ("version 0", "version", header(8, "I", 0)),
    ("version 2", "version", header(8, "I", 2)),
    ("17 sections", "number of sections", header(12, "I", 17)),
    ("many sections", "number of sections", header(12, "I", 2**32 - 1)),
    ("file_bytes less", "length", header(16, "Q", 640)),
    ("file_bytes more", "length", header(16, "Q", 2**64 - 1)),
    ("no entries", "number of entries", header(24, "Q", 0)),
    ("2^32 - 1 entries", "number of entries", header(24, "Q", 2**32 - 1)),
    ("2^32 - 2 entries", "length of section", header(24, "Q", 2**32 - 2)),
    ("2^64 - 1 entries", "number of entries", header(24, "Q", 2**64 - 1)),
    ("entries overflow a product", "number of entries", header(24, "Q", 2**62 + 1)),
    ("one entry less", "length of section", header(24, "Q", REFERENCE.n - 1)),
    ("one entry more", "length of section", header(24, "Q", REFERENCE.n + 1)),
    ("partitions", "length of section parts", header(32, "I", 2**32 - 1)),
    ("chunk_bytes", "chunk_bytes", header(36, "I", 1)),
    ("chunk_bytes 0", "chunk_bytes", header(36, "I", 0)),
    ("chunks", "length of section chunks", header(40, "Q", 2**60 + CHUNK_RECORDS)),
    ("one chunk less", "length of section chunks", header(40, "Q", CHUNK_RECORDS - 1)),
    ("tag", "tag of section", table("links", 0, "B", 0x4C)),
    ("tag with rubbish after its NUL", "tag of section", table("mode", 7, "B", 1)),
    ("sections exchanged", "tag of section", exchange_sections),
    ("offset not aligned", "offset of section", table("mode", 8, "Q", 641)),
    ("offset outside", "offset of section", table("names", 8, "Q", 2**63)),
    ("offset at the header", "offset of section", table("parent", 8, "Q", 0)),
    ("offset one block on", "offset of section", table("parts", 8, "Q", len(assemble(columns_of(sample_tree()))))),
    ("section too long", "outside the file|offset of section", table("names", 16, "Q", 2**40)),
    ("length overflows", "outside the file|offset of section", table("links", 16, "Q", 2**64 - 64)),
    ("column too short", "length of section", table("mode", 16, "Q", 4)),
    ("item_bytes", "item_bytes", table("mode", 24, "I", 8)),
    ("item_bytes 0", "item_bytes", table("mode", 24, "I", 0)),
    ("zero", "item_bytes or zero", table("mode", 28, "I", 1)),
    ("padding", "padding", spoil_padding),
]


@pytest.mark.parametrize("rule, spoil", [case[1:] for case in LAYOUT_CASES], ids=[case[0] for case in LAYOUT_CASES])
def test_a_broken_layout_is_refused(rule: str, spoil: Callable[[bytearray], None]) -> None:
    data = bytearray(assemble(columns_of(sample_tree())))
    spoil(data)
    seal(data)
    assert_refused(bytes(data), rule)


def test_wrong_checksums_are_refused() -> None:
    for offset, rule in ((48, "checksum"), (56, "header checksum")):
        data = bytearray(assemble(columns_of(sample_tree())))
        data[offset] ^= 1
        if offset == 48:  # a right header checksum over a wrong body checksum
            body = data[48:56]
            seal(data)
            data[48:56] = body
            data[56:64] = struct.pack("<Q", checksum(bytes(data[:56])))
        assert_refused(bytes(data), rule)


def test_every_case_changes_only_what_it_says() -> None:
    """The tree that the cases spoil is itself accepted: otherwise they would prove nothing."""
    data = assemble(columns_of(sample_tree()))
    ReferenceIndex(data)
    Index.from_buffer(data)
