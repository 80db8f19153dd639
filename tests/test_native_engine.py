"""The native engine by itself: its door to Python, and (native/engine_drive.c) the whole of it under sanitizers."""

from pathlib import Path

import mounting
import pytest
from oddities import compressible, incompressible

from fanstore import _native
from fanstore.format.prepared import PreparedDataset

CHUNK_BYTES = 4 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of one and of several chunks, some that compression shrinks and some that it does not, and an empty one."""
    root = tmp_path_factory.mktemp("engine") / "source"
    (root / "deep" / "deeper").mkdir(parents=True)
    for number in range(24):
        make = compressible if number % 2 else incompressible
        (root / "deep" / f"small-{number}").write_bytes(make(700 + 9_877 * number, number))
    for name, make in (("text", compressible), ("noise", incompressible)):
        (root / f"large-{name}").write_bytes(make(9_000_001, 1))
        (root / "deep" / f"exact-{name}").write_bytes(make(2 * CHUNK_BYTES, 2))
        (root / "deep" / "deeper" / f"medium-{name}").write_bytes(make(1_500_000, 3))
    (root / "empty").write_bytes(b"")
    (root / "link").symlink_to("deep/small-1")
    return root


@pytest.fixture(scope="module")
def prepared(source: Path) -> Path:
    return mounting.prepare(source, source.parent / "d.fan", "--codec", "lz4", "--partition-size", "9MiB")


# --- the door to Python ---


def make_engine(dataset: PreparedDataset) -> _native.Engine:
    index = dataset.index
    marks = bytearray(index.entry_count + len(index.column("chunks")))
    return _native.Engine(index.native, marks, 0, 0, -1, 1, 1, 0, 64 << 20, 1, 1, 12)


def test_only_chunks_of_the_index_are_kept(prepared: Path) -> None:
    """A chunk of another length would be read beyond its end."""
    dataset = PreparedDataset.open(prepared)
    engine, index = make_engine(dataset), dataset.index
    entry = index.lookup(0, b"large-text")
    engine.keep(entry, 0, bytes(CHUNK_BYTES))
    engine.keep(entry, 2, bytes(9_000_001 - 2 * CHUNK_BYTES))
    empty = index.lookup(0, b"empty")
    engine.keep(empty, 0, b"")
    wrong = [(entry, 0, CHUNK_BYTES - 1), (entry, 0, CHUNK_BYTES + 1), (entry, 2, CHUNK_BYTES), (entry, 3, 1)]
    wrong += [(entry, 0xFFFFFFFF, 1), (0, 0, 0), (index.lookup(0, b"link"), 0, 12), (0xFFFFFFFF, 0, 1), (empty, 1, 0)]
    for number, chunk, length in wrong:
        with pytest.raises(ValueError, match="no such chunk"):
            engine.keep(number, chunk, bytes(length))
