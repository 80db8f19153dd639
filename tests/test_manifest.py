"""manifest.json: what is written is read, and whatever else is in the file is refused with one sentence.

The manifest is read by jobs on many nodes from a shared file system where others may write: nothing in it may raise
anything but FormatError, take long, or name a file outside the dataset.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from index_reference import assemble, checksum
from index_trees import columns_of, sample_tree

from fanstore.errors import FormatError
from fanstore.format.manifest import Manifest, PartitionInfo, Totals
from fanstore.format.prepared import PreparedDataset

INDEX = assemble(columns_of(sample_tree()))
PARTS = columns_of(sample_tree()).parts


def sample() -> Manifest:
    partitions = (
        PartitionInfo("part-00000.tar", PARTS[0], 7, 0x0123456789ABCDEF, everywhere=False, external=False),
        PartitionInfo("/shared/shards/train 1é.tar", PARTS[1], 9, 0, everywhere=True, external=True),
    )
    totals = Totals(files=8, directories=5, symlinks=2, hardlinks=3, bytes=123_456, stored_bytes=100_000)
    return Manifest("2024-02-29T12:00:00Z", "lz4", len(INDEX), checksum(INDEX), totals, partitions)


def sealed(content: dict[str, Any]) -> bytes:
    """The text of a manifest with the checksum that docs/format.md asks for, as a hostile author would write it."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    rest["checksum"] = f"{xxhash.xxh3_64_intdigest(text.encode()):016x}"
    return json.dumps(rest).encode()


def test_the_seed_of_a_shuffle_is_kept() -> None:
    shuffled = replace(sample(), shuffle=5)
    assert Manifest.loads(shuffled.dumps().encode()) == shuffled
    assert "shuffle" not in json.loads(sample().dumps())
    for wrong in (-1, "1", True, None, 1.5, 1 << 63):
        assert_refused(sealed({**json.loads(sample().dumps()), "shuffle": wrong}))


def assert_refused(text: bytes) -> str:
    with pytest.raises(FormatError, match="is refused: ") as caught:
        Manifest.loads(text)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def accepted(text: bytes) -> Manifest | None:
    """The manifest, or None if it was refused properly."""
    try:
        return Manifest.loads(text)
    except FormatError as error:
        assert "\n" not in str(error)
        return None


counts = st.integers(0, 2**63 - 1)
checksums = st.integers(0, 2**64 - 1)
file_names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
partitions = st.one_of(
    st.builds(
        PartitionInfo,
        file_names.filter(lambda name: name not in (".", "..")),
        counts,
        counts,
        checksums,
        st.booleans(),
        st.just(False),
    ),
    st.builds(PartitionInfo, file_names.map("/".__add__), counts, counts, checksums, st.booleans(), st.just(True)),
)
manifests = st.builds(
    Manifest,
    st.text(max_size=30),
    st.sampled_from(["none", "lz4", "lz4hc"]),
    counts,
    checksums,
    st.builds(Totals, counts, counts, counts, counts, counts, counts),
    st.lists(partitions, max_size=4).map(tuple),
)


@settings(max_examples=300, deadline=None)
@given(manifest=manifests)
def test_what_is_written_is_read(manifest: Manifest) -> None:
    text = manifest.dumps().encode()
    assert Manifest.loads(text) == manifest
    # The text is as documented: the checksum can be computed from the document alone, in any order and spacing.
    content = json.loads(text)
    assert Manifest.loads(sealed(content)) == manifest
    assert json.loads(sealed(content)) == content


def test_documented_keys() -> None:
    content = json.loads(sample().dumps())
    assert list(content) == ["format", "version", "created", "codec", "index", "totals", "partitions", "checksum"]
    assert (content["format"], content["version"]) == ("fanstore", 1)
    assert content["index"] == {"file": "index.fsx", "bytes": len(INDEX), "checksum": f"{checksum(INDEX):016x}"}
    assert set(content["partitions"][0]) == {"file", "bytes", "entries", "checksum", "everywhere", "external"}
    assert content["partitions"][0]["checksum"] == "0123456789abcdef"


def test_every_flipped_byte_is_noticed_or_harmless() -> None:
    text, numbers = sample().dumps().encode(), random.Random(1)
    for position in range(len(text)):
        for mask in (1 << numbers.randrange(8), 0x20, numbers.randrange(1, 256)):
            data = bytearray(text)
            data[position] ^= mask
            # A changed blank, or the case of the digits in "\u00e9", means the same.
            assert accepted(bytes(data)) in (None, sample())


def test_truncation_everywhere() -> None:
    text = sample().dumps().encode().rstrip()
    for length in range(len(text)):
        assert_refused(text[:length])


def _paths(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """All places in a JSON value."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _paths(inner, (*path, number))


def _holder(content: Any, path: tuple[str | int, ...]) -> Any:
    for step in path[:-1]:
        content = content[step]
    return content


CONTENT = json.loads(sample().dumps())
PLACES = [path for path in _paths(CONTENT) if path != ("checksum",)]
WRONG: list[object] = [
    None, True, False, -1, 0.5, -0.0, 1e308, math.inf, math.nan, 2**63, 2**64, 10**400, [], [[]], {}, {"a": 1},
    "", "x", "\0", "\ud800", "0" * 15, "0" * 17, "00000000 0000000", "0x00000000000000", "+000000000000000",
    "ABCDEF0123456789", "\u0660" * 16,
]  # fmt: skip


@pytest.mark.parametrize("path", PLACES, ids=["/".join(map(str, path)) for path in PLACES])
def test_wrong_values_with_a_right_checksum(path: tuple[str | int, ...]) -> None:
    for wrong in WRONG:
        content = json.loads(json.dumps(CONTENT))
        old = _holder(content, path)[path[-1]]
        _holder(content, path)[path[-1]] = wrong
        manifest = accepted(sealed(content))
        if manifest is not None:
            assert type(wrong) is type(old), f"{wrong!r} is taken for {old!r}"


@pytest.mark.parametrize("path", PLACES, ids=["/".join(map(str, path)) for path in PLACES])
def test_missing_keys_with_a_right_checksum(path: tuple[str | int, ...]) -> None:
    content = json.loads(json.dumps(CONTENT))
    del _holder(content, path)[path[-1]]
    if path[-1] in (0, 1):  # a shorter list of partitions is a manifest; open() notices that the index has more
        assert accepted(sealed(content)) is not None
    else:
        assert_refused(sealed(content))


def test_a_missing_or_wrong_own_checksum() -> None:
    for value in (None, 5, "", "0" * 16, CONTENT["checksum"].upper() + " "):
        assert_refused(json.dumps(CONTENT | {"checksum": value}).encode())
    assert_refused(json.dumps({key: value for key, value in CONTENT.items() if key != "checksum"}).encode())


FILE_TRICKS = [
    ("", False), (".", False), ("..", False), ("../part-00000.tar", False), ("a/b", False), ("/etc/passwd", False),
    ("a\0b", False), ("./part", False), ("part/", False), ("\ud800", False), ("part-\udfff.tar", False),
    ("relative.tar", True), ("", True), ("../up.tar", True), ("/a\0b", True), ("~/x.tar", True), ("/\ud800", True),
]  # fmt: skip


@pytest.mark.parametrize("file, external", FILE_TRICKS)
def test_partition_files_outside_the_dataset(file: str, external: bool) -> None:
    content = json.loads(json.dumps(CONTENT))
    content["partitions"][0] |= {"file": file, "external": external}
    assert_refused(sealed(content))


def test_names_that_are_not_utf8_survive() -> None:
    """An external tar may lie under a path that is not UTF-8: Python writes such bytes as U+DC80 and following."""
    content = json.loads(json.dumps(CONTENT))
    content["partitions"][0] |= {"file": "/shards/caf\udce9.tar", "external": True}
    assert Manifest.loads(sealed(content)).partitions[0].file == "/shards/caf\udce9.tar"


NOT_MANIFESTS: list[bytes] = [
    b"", b" ", b"null", b"0", b"[]", b"{}", b'"fanstore"', b"{", b"\0" * 100, b"\xff" * 100, b"\x89FSX\r\n\x1a\n",
    b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000, b'{"format":"fanstore"}', b'{"format":"fanstore","version":2}',
    b'{"format":"fanstore","version":' + b"9" * 5_000 + b"}", b'{"format":"fanstore","version":1e999}',
    '{"format":"fanstore"}'.encode("utf-16"),
]  # fmt: skip


@pytest.mark.parametrize("text", NOT_MANIFESTS, ids=[repr(text[:24]) for text in NOT_MANIFESTS])
def test_what_is_not_a_manifest(text: bytes) -> None:
    assert_refused(text)


@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_at_every_depth(opening: str, closing: str) -> None:
    """Reading and the checksum's writing have different limits; no depth may fall between them."""
    for depth in [*range(1, 1_500), 3_000, 30_000]:
        nested = opening * depth + "1" + closing * depth
        assert_refused(f'{{"format":"fanstore","version":1,"codec":{nested}}}'.encode())


def test_large_numbers_and_texts_take_no_time() -> None:
    start = time.process_time()
    content = json.loads(json.dumps(CONTENT))
    content["partitions"][0]["bytes"] = 10**4_000
    assert_refused(sealed(content))
    content = json.loads(json.dumps(CONTENT))
    content["codec"] = "x" * 5_000_000
    with pytest.raises(FormatError) as caught:
        Manifest.loads(sealed(content))
    assert len(str(caught.value)) < 1_000, "a message of megabytes is not one sentence"
    content["codec"], content["version"] = "lz4", "v" * 5_000_000
    with pytest.raises(FormatError) as caught:
        Manifest.loads(sealed(content))
    assert len(str(caught.value)) < 1_000
    assert time.process_time() - start < 5


@settings(max_examples=300, deadline=None)
@given(
    content=st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from([*CONTENT, "file", "bytes"]) | st.text(), inner)
        ),
    ),
    base=st.booleans(),
)
def test_arbitrary_json(content: object, base: bool) -> None:
    accepted(json.dumps(content).encode())
    if isinstance(content, dict):
        accepted(sealed(CONTENT | content if base else content))


def make_dataset(path: Path, manifest: bytes | None = None, index: bytes | None = INDEX) -> Path:
    path.mkdir()
    (path / "manifest.json").write_bytes(sample().dumps().encode() if manifest is None else manifest)
    if index is not None:
        (path / "index.fsx").write_bytes(index)
    return path


def test_open_brings_both_together(tmp_path: Path) -> None:
    prepared = PreparedDataset.open(make_dataset(tmp_path / "data.fan"))
    assert prepared.manifest == sample()
    assert prepared.index.nbytes == len(INDEX)
    assert prepared.partition_path(0) == tmp_path / "data.fan" / "part-00000.tar"
    assert prepared.partition_path(1) == Path("/shared/shards/train 1é.tar")


def _changed(**changes: Any) -> bytes:
    return sealed(json.loads(json.dumps(CONTENT)) | changes)


def _with_index(**changes: Any) -> bytes:
    return _changed(index=CONTENT["index"] | changes)


def _partition_bytes(change: int) -> bytes:
    content = json.loads(json.dumps(CONTENT))
    content["partitions"][1]["bytes"] += change
    return sealed(content)


BROKEN: dict[str, Callable[[Path], object]] = {
    "does not exist": lambda path: None,
    "is a file": lambda path: path.write_bytes(b""),
    "is empty": lambda path: path.mkdir(),
    "no index": lambda path: make_dataset(path, index=None),
    "index damaged": lambda path: make_dataset(path, index=INDEX[:-1] + b"?"),
    "index of another dataset": lambda path: make_dataset(
        path, index=assemble(columns_of(sample_tree(), partitions=3))
    ),
    "index shorter than said": lambda path: make_dataset(path, _with_index(bytes=len(INDEX) + 1)),
    "index with another checksum": lambda path: make_dataset(path, _with_index(checksum="0" * 16)),
    "index under another name": lambda path: make_dataset(path, _with_index(file="other.fsx")),
    "partition too few": lambda path: make_dataset(path, _changed(partitions=CONTENT["partitions"][:1])),
    "partition too many": lambda path: make_dataset(path, _changed(partitions=CONTENT["partitions"] * 2)),
    "partition longer": lambda path: make_dataset(path, _partition_bytes(1)),
    "partition shorter": lambda path: make_dataset(path, _partition_bytes(-1)),
    "manifest is a directory": lambda path: (path / "manifest.json").mkdir(parents=True),
}


@pytest.mark.parametrize("make", BROKEN.values(), ids=BROKEN.keys())
def test_open_refuses_in_one_sentence_with_the_path(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "data.fan"
    make(path)
    with pytest.raises(FormatError) as caught:
        PreparedDataset.open(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
