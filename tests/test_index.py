"""index.fsx: the real reader (C) against the reference (index_reference.py), on sound, damaged and hostile files.

Both must accept and refuse the same bytes; what is accepted is walked completely and compared. Cases that break one
rule of docs/format.md each are in test_index_hostile.py.
"""

import io
import random
import stat
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_reference import HEADER, SECTION, SECTIONS, Columns, ReferenceIndex, Refused, assemble, checksum, seal
from index_trees import Node, columns_of, directory, file, sample_tree, trees

from fanstore.errors import FormatError
from fanstore.format.index import CHUNK_RECORD, Index
from fanstore.format.indexwriter import write_index

SAMPLE = assemble(columns_of(sample_tree()))
#: Bytes of header and section table.
FRONT_BYTES = HEADER.size + SECTION.size * len(SECTIONS)


def real(data: bytes) -> Index | None:
    """What the real reader makes of the bytes; None if it refuses them, which it must do in one sentence."""
    try:
        return Index.from_buffer(data)
    except FormatError as error:
        text = str(error)
        assert text.startswith("the index is refused: "), text
        assert "\n" not in text, text
        assert len(text) < 300, text
        return None


def reference(data: bytes) -> ReferenceIndex | None:
    try:
        return ReferenceIndex(data)
    except Refused:
        return None


def assert_same_answers(index: Index, expected: ReferenceIndex) -> None:
    """Walk everything that an index offers."""
    assert index.entry_count == expected.n
    assert index.partition_count == expected.partitions
    assert list(index.partition_bytes) == list(expected.parts)
    columns = {
        "parent": index.parent,
        "mode": index.mode,
        "mtime": index.mtime_ns,
        "size": index.size,
        "part": index.partition,
        "offset": index.offset,
        "stored": index.stored_size,
        "codec": index.codec,
        "checksum": index.checksum,
        "inode": index.inode,
        "nlink": index.nlink,
        "first": index.first,
        "count": index.count,
    }
    for tag, column in columns.items():
        assert tuple(column) == expected.column[tag], tag
    for entry in range(expected.n):
        name = expected.name(entry)
        assert index.name(entry) == name
        if entry:
            parent = expected.column["parent"][entry]
            assert index.lookup(parent, name) == entry == expected.lookup(parent, name)
        # Neighbours of a name in the order of bytes are the ones that a binary search gets wrong.
        for near in (name + b"\0", name[:-1], name + b"\xff", b"", b"\xff" * 300):
            assert index.lookup(entry, near) == expected.lookup(entry, near)
        if expected.is_type(entry, stat.S_IFDIR):
            assert index.children(entry) == expected.children(entry)
        elif expected.is_type(entry, stat.S_IFLNK):
            assert index.link_target(entry) == expected.link_target(entry)
        else:
            chunks = expected.stored_chunks(entry)
            assert index.chunk_count(entry) == len(chunks)
            assert [tuple(index.chunk(entry, k)) for k in range(len(chunks))] == chunks
    deepest = expected.n - 1
    assert index.path(deepest) == expected.path(deepest)
    assert index.resolve(expected.path(deepest)) == deepest
    for outside in (-1, expected.n, 2**32 - 1, 2**32, 2**63 - 1):
        assert index.lookup(outside, b"a") == -1


def assert_agreement(data: bytes) -> bool:
    """Both refuse, or both accept and answer alike; whether they accept."""
    expected, index = reference(data), real(data)
    assert (index is None) == (expected is None), "one accepts what the other refuses"
    if index is not None and expected is not None:
        assert_same_answers(index, expected)
        return True
    return False


def written_by_project(columns: Columns) -> tuple[bytes, int]:
    """The same columns through the project's writer; the file and the checksum that it reports."""
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {}
    kinds = {"I": "<u4", "Q": "<u8", "q": "<i8"}
    for tag, letter, _ in SECTIONS[:14]:
        assert letter is not None
        arrays[tag] = np.array(columns.numbers[tag], dtype=kinds[letter])
    arrays["names"] = np.frombuffer(columns.names, dtype=np.uint8)
    arrays["links"] = np.frombuffer(columns.links, dtype=np.uint8)
    arrays["chunks"] = np.array([tuple(record) for record in columns.chunks], dtype=CHUNK_RECORD)
    arrays["parts"] = np.array(columns.parts, dtype=np.uint64)
    output = io.BytesIO()
    length, whole = write_index(output, arrays)
    assert length == len(output.getvalue())
    return output.getvalue(), whole


@settings(max_examples=400, deadline=None)
@given(tree=trees(), partitions=st.integers(1, 4))
def test_generated_trees_are_written_and_read_alike(tree: Node, partitions: int) -> None:
    columns = columns_of(tree, partitions)
    data, whole = written_by_project(columns)
    assert data == assemble(columns)
    assert whole == checksum(data)
    assert assert_agreement(data)


@settings(max_examples=1_000, deadline=None)
@given(tree=trees(depth=2), draws=st.data())
def test_generated_trees_with_sealed_damage(tree: Node, draws: st.DataObject) -> None:
    data = bytearray(assemble(columns_of(tree)))
    for _ in range(draws.draw(st.integers(1, 3))):
        position = draws.draw(st.integers(8, len(data) - 1))
        data[position] ^= draws.draw(st.integers(1, 255))
    seal(data)
    assert_agreement(bytes(data))


def test_every_flipped_byte_is_noticed() -> None:
    numbers = random.Random(1)
    for position in range(len(SAMPLE)):
        data = bytearray(SAMPLE)
        data[position] ^= 1 << numbers.randrange(8)
        assert reference(bytes(data)) is None
        assert real(bytes(data)) is None


def test_every_flipped_byte_with_checksums_computed_anew() -> None:
    numbers = random.Random(2)
    accepted = 0
    for position in range(len(SAMPLE)):
        for mask in (1 << numbers.randrange(8), numbers.randrange(1, 256), 0xFF):
            data = bytearray(SAMPLE)
            data[position] ^= mask
            seal(data)
            accepted += assert_agreement(bytes(data))
    assert accepted > 500, "times, modes and checksums may have any value: many flips give a sound index"


def test_random_fields_with_checksums_computed_anew() -> None:
    """Whole numbers replaced by ones that hurt: limits, neighbours, numbers of other entries."""
    numbers = random.Random(3)
    nasty = [0, 1, 2, 18, 19, 20, 4 << 20, (4 << 20) + 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 512]
    original = columns_of(sample_tree())
    accepted = 0
    for _ in range(8_000):
        columns = columns_of(sample_tree()) if numbers.random() < 0.01 else _copied(original)
        for _ in range(numbers.choice((1, 1, 2, 3))):
            tag, letter, _ = SECTIONS[numbers.randrange(14)]
            column = columns.numbers[tag]
            entry = numbers.randrange(len(column))
            value = numbers.choice(
                (
                    column[entry] + 1,
                    column[entry] - 1,
                    numbers.choice(column),
                    numbers.choice(nasty),
                    numbers.getrandbits(5),
                )
            )
            limit = {"I": 2**32, "Q": 2**64, "q": 2**63}[letter or "I"]
            column[entry] = value % limit
        if numbers.random() < 0.2:
            record = numbers.randrange(len(columns.chunks))
            start = (columns.chunks[record].start + numbers.choice((-1, 1, 4, 19, 20, 2**22, 2**63))) % 2**64
            columns.chunks[record] = columns.chunks[record]._replace(start=start)
        accepted += assert_agreement(assemble(columns))
    assert 400 < accepted < 6_000


def _copied(columns: Columns) -> Columns:
    numbers = {tag: list(column) for tag, column in columns.numbers.items()}
    return Columns(numbers, columns.names, columns.links, list(columns.chunks), list(columns.parts))


def borders() -> list[int]:
    """Where header, table, and each section begin and end."""
    places = {0, 8, 56, HEADER.size, FRONT_BYTES, len(SAMPLE)}
    for number in range(len(SECTIONS)):
        places.add(HEADER.size + number * SECTION.size)
        _, offset, length, _, _ = SECTION.unpack_from(SAMPLE, HEADER.size + number * SECTION.size)
        places |= {offset, offset + length}
    return sorted(places)


@pytest.mark.parametrize("shift", [-64, -8, -1, 0, 1, 8])
def test_truncation_at_every_border(shift: int) -> None:
    for place in borders():
        length = place + shift
        if not 0 <= length < len(SAMPLE):
            continue
        for hostile in (False, True):
            data = bytearray(SAMPLE[:length])
            if hostile and length >= HEADER.size:
                struct.pack_into("<Q", data, 16, length)
                seal(data)
            assert reference(bytes(data)) is None
            assert real(bytes(data)) is None


@pytest.mark.parametrize("extra", [1, 8, 63, 64, 4096])
def test_bytes_after_the_end(extra: int) -> None:
    for filler in (b"\0", b"x"):
        data = bytearray(SAMPLE + filler * extra)
        assert not assert_agreement(bytes(data))
        struct.pack_into("<Q", data, 16, len(data))
        seal(data)
        assert not assert_agreement(bytes(data))


def test_an_empty_tree() -> None:
    assert assert_agreement(assemble(columns_of(directory(), partitions=0)))


def test_a_wide_directory_is_searched_like_a_list() -> None:
    names = {b"%d" % (number * number) for number in range(2_000)} | {b"a" * length for length in range(1, 256)}
    data = assemble(columns_of(directory({name: file(1) for name in names})))
    index, expected = Index.from_buffer(data), ReferenceIndex(data)
    found = {index.name(index.lookup(0, name)) for name in names}
    assert found == names
    for absent in (b"00", b"a" * 256, b"", b"b", b"3"):
        assert index.lookup(0, absent) == expected.lookup(0, absent) == -1


def test_buffers_of_other_kinds_and_alignments() -> None:
    for buffer in (bytearray(SAMPLE), memoryview(b"x" + SAMPLE)[1:], memoryview(SAMPLE).cast("I")):
        assert Index.from_buffer(buffer).entry_count == ReferenceIndex(SAMPLE).n


def test_chunk_numbers_outside_a_file() -> None:
    index = Index.from_buffer(SAMPLE)
    big, small = index.resolve(b"big"), index.resolve(b"plain")
    for entry, number in ((big, 3), (big, -1), (small, 1), (small, -1)):
        with pytest.raises(IndexError):
            index.chunk(entry, number)


def test_columns_are_read_only() -> None:
    index = Index.from_buffer(SAMPLE)
    with pytest.raises(TypeError):
        index.size[1] = 5
    with pytest.raises(ValueError, match="read-only"):
        index.column("size")[1] = 5
    assert list(index.column("size")) == list(index.size)


def test_adopt_gives_what_from_buffer_gives() -> None:
    index = Index.adopt(memoryview(SAMPLE))
    assert_same_answers(index, ReferenceIndex(SAMPLE))
    assert index.nbytes == len(SAMPLE)
    assert index.file_checksum() == checksum(SAMPLE)


_TEXT = b"not an index, but long enough to be one by its length alone, which must not be enough"


@pytest.mark.parametrize("content", [b"", SAMPLE[:63], SAMPLE[:-1], _TEXT])
def test_adopt_refuses_in_one_sentence_with_the_path(content: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        Index.adopt(memoryview(content), "'/data/index.fsx'")
    assert "'/data/index.fsx'" in str(caught.value)
    assert "\n" not in str(caught.value)
