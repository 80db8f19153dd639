"""The native engine by itself: its door to Python, and (native/engine_drive.c) the whole of it under sanitizers."""

import os
import re
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


def test_the_best_file_of_a_partition_is_used(prepared: Path) -> None:
    """The store may open a file several times, and tell of a prepared one after its local copy."""
    engine = make_engine(PreparedDataset.open(prepared))
    before = descriptors()
    with open(prepared / "part-00000.tar", "rb") as file:
        results = [engine.use(0, file.fileno(), number, False) for number in (1, 1, 2, 1, 2)]
        assert results == [True, False, True, False, False]
        kept = descriptors() - before - {str(file.fileno())}
        assert 2 <= len(kept) <= 3  # the prepared one, the copy, and that for direct I/O if its file system can
        with pytest.raises(OSError, match="Invalid argument"):
            engine.use(10_000, file.fileno(), 1, False)
        with pytest.raises(OSError, match="Bad file descriptor"):
            engine.use(1, 1_000_000, 1, False)
    assert all(is_closed_on_exec(descriptor) for descriptor in kept)
    del engine
    assert descriptors() == before


def descriptors() -> set[str]:
    """What is open; not the descriptor with which that is found out."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}


def is_closed_on_exec(descriptor: str) -> bool:
    flags = re.search(r"flags:\s+(\d+)", Path(f"/proc/self/fdinfo/{descriptor}").read_text())
    return flags is not None and bool(int(flags[1], 8) & os.O_CLOEXEC)
