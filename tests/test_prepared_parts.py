"""A prepared dataset from the bytes of its manifest and index, as the nodes of a job get it from rank 0."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import oddities
import pytest
from core_parts import flip_byte

from fanstore.errors import FormatError
from fanstore.format.index import Index
from fanstore.format.prepared import PreparedDataset, read_parts

MakePrepared = Callable[..., Path]


@pytest.fixture
def dataset(tmp_path: Path, make_prepared: MakePrepared) -> Path:
    tree = tmp_path / "tree"
    for number in range(50):
        (tree / str(number % 7)).mkdir(parents=True, exist_ok=True)
        (tree / str(number % 7) / f"{number}").write_bytes(oddities.compressible(1000 + number, number))
    return make_prepared(tree, partitions=3)


def in_memory(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


def test_the_same_dataset(dataset: Path) -> None:
    opened = PreparedDataset.open(dataset)
    manifest, index = read_parts(dataset)
    memory = in_memory(index)
    again = PreparedDataset.from_parts(dataset, manifest, memory)
    assert again.manifest == opened.manifest
    assert str(again.storage) == str(opened.storage)
    assert again.index.file_checksum() == opened.index.file_checksum()
    for entry in range(opened.index.entry_count):
        assert again.index.path(entry) == opened.index.path(entry)
        assert again.index.resolve(opened.index.path(entry)) == entry
    assert again.partition_path(1) == opened.partition_path(1)
    with pytest.raises(BufferError):
        memory.close()  # it is used where it is


def test_nothing_is_opened(dataset: Path, tmp_path: Path) -> None:
    manifest, index = read_parts(dataset)
    absent = tmp_path / "absent"
    prepared = PreparedDataset.from_parts(absent, manifest, memoryview(in_memory(index)))
    assert prepared.partition_path(0) == absent / "part-00000.tar"


@pytest.mark.parametrize("shift", [1, 4, 8])
def test_memory_that_begins_anywhere(dataset: Path, shift: int) -> None:
    manifest, index = read_parts(dataset)
    memory = memoryview(in_memory(bytes(shift) + index))[shift:]
    assert PreparedDataset.from_parts(dataset, manifest, memory).index.resolve(b"3/10") > 0


def test_damage_is_refused(dataset: Path) -> None:
    manifest, index = read_parts(dataset)
    for length in (0, 10, len(index) - 1):
        with pytest.raises(FormatError, match="refused"):
            PreparedDataset.from_parts(dataset, manifest, memoryview(index[:length]))
    with pytest.raises(FormatError, match="altered"):
        PreparedDataset.from_parts(dataset, manifest.replace(b'"codec"', b'"dodec"'), memoryview(index))
    with pytest.raises(FormatError):
        Index.adopt(memoryview(bytes(len(index))))
    flip_byte(dataset / "index.fsx", len(index) - 9)
    with pytest.raises(FormatError):
        PreparedDataset.from_parts(dataset, *_views(read_parts(dataset)))


def _views(parts: tuple[bytes, bytes]) -> tuple[bytes, memoryview]:
    return parts[0], memoryview(parts[1])


def test_what_cannot_be_read(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="does not exist; make one"):
        read_parts(tmp_path / "absent")
    with pytest.raises(FormatError, match=r"has no manifest\.json"):
        read_parts(tmp_path)
    os.unlink(dataset / "index.fsx")
    with pytest.raises(FormatError, match=r"cannot read '.*index.fsx': No such file"):
        read_parts(dataset)
