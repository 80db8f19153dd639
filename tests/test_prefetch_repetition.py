"""Epochs that are read again: found from their first files, expected, and given up when they turn out to be others."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BOTH_ENGINES
from mounting import Mount, Mounted, needs_fuse, prepare, wait_until
from oddities import compressible

from fanstore.prefetch import repetition
from fanstore.prefetch.repetition import Repetition

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
FILES = 200


def note(reads: Repetition, files: Iterable[int], thread: int) -> list[tuple[array[int], int]]:
    return [again for file in files if (again := reads.note(file, thread)) is not None]


def shuffled(seed: int, count: int = 50) -> list[int]:
    files = [*range(count)]
    random.Random(seed).shuffle(files)
    return files


def test_an_epoch_of_the_same_thread_and_of_another_one() -> None:
    reads, files = Repetition(), shuffled(1)
    assert note(reads, files, 1) == []
    for thread in (1, 1, 2, 3):
        assert [(again.tolist(), place) for again, place in note(reads, files[:10], thread)] == [(files, 4)]


def test_workers_whose_epochs_begin_with_different_files() -> None:
    reads, files = Repetition(), shuffled(1)
    parts = [files[worker::4] for worker in range(4)]
    for worker, part in enumerate(parts):
        note(reads, part, worker)
    for worker, part in enumerate(parts):
        ((again, place),) = note(reads, part, 10 + worker)
        assert (again.tolist(), place) == (part, 4)


def test_files_that_come_from_the_page_cache_are_left_out() -> None:
    reads, files = Repetition(), shuffled(2)
    note(reads, files, 1)
    ((again, place),) = note(reads, files[::3], 2)
    assert (again.tolist(), place) == (files, 10)


def test_another_shuffle_is_not_taken_for_the_same() -> None:
    reads = Repetition()
    for seed in range(200):
        assert note(reads, shuffled(seed, 2000), seed % 5) == []


def test_the_latest_is_what_counts() -> None:
    """From the third file on other ones: that is what the next epoch is compared with."""
    reads, first = Repetition(), shuffled(3)
    other = [*first[:2], *range(100, 140)]
    note(reads, first, 1)
    assert note(reads, other, 1) == []
    ((again, _),) = note(reads, other, 1)
    assert again.tolist() == other
    reads.forget(again)
    assert note(reads, other, 2) == []


def test_what_is_too_short_is_not_worth_it() -> None:
    reads = Repetition()
    for _ in range(3):
        assert note(reads, range(7), 1) == []


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "_FILES_MOST", 1000)
    reads = Repetition()
    for thread in range(2000):
        note(reads, range(thread * 3, thread * 3 + 3), thread)
        assert len(reads._logs) <= 256 and len(reads._begun) <= 256
        assert sum(len(log.files) for log in reads._logs.values()) <= 1000


# --- on a mount ---


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repeated") / "source"
    root.mkdir()
    for number in range(FILES):
        (root / f"{number:03d}").write_bytes(compressible(9000 + number, number))
    return root


def read(point: Path, root: Path, names: Sequence[str]) -> None:
    """Leaving nothing in the page cache."""
    for name in names:
        with open(point / name, "rb", buffering=0) as file:
            assert file.readall() == (root / name).read_bytes()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def order(mounted: Mounted) -> dict[str, Any]:
    section: dict[str, Any] = mounted.statistics()["order"]
    return section


def is_fetched(mounted: Mounted, least: int) -> bool:
    """Nearly all, which may be in the cache already, and nothing is on its way."""
    now = order(mounted)
    return bool(now["prefetched"] >= least and now["in_line"] == 0)


@needs_fuse
def test_an_order_of_nobodys_is_expected_again(mount: Mount, root: Path, tmp_path: Path) -> None:
    mounted = mount(prepare(root, tmp_path / "d.fan", "--codec", "lz4"))
    names = sorted(path.name for path in root.iterdir())
    numbers = np.random.Generator(np.random.SFC64(5))
    epoch = [names[number] for number in numbers.permutation(FILES)]
    read(mounted.path, root, epoch)
    wait_until(lambda: order(mounted)["files"] == FILES, "that all was seen", mounted.evidence)
    assert (order(mounted)["source"], order(mounted)["predicted"]) == ("none", 0)
    # What begins like it is known after a few files, and then to the end, and on to the next one.
    read(mounted.path, root, epoch[:10])
    wait_until(lambda: order(mounted)["source"] == "repeated", "that it is expected again", mounted.evidence)
    wait_until(lambda: is_fetched(mounted, FILES - 20), "that the rest is fetched", mounted.evidence)
    read(mounted.path, root, epoch[10:])
    wait_until(lambda: is_fetched(mounted, 2 * FILES - 40), "that the next is fetched", mounted.evidence)
    read(mounted.path, root, epoch)
    wait_until(lambda: order(mounted)["files"] == 3 * FILES, "that all was seen", mounted.evidence)
    now = order(mounted)
    assert now["predicted"] >= 2 * FILES - 10 and now["taken"] >= 2 * FILES - 20, now
    assert (now["source"], now["sampler"], now["seed"]) == ("repeated", None, None)
    assert "an epoch of 200 files begins like one before" in mounted.log_text()
    # Two files that were not expected end it.
    read(mounted.path, root, [names[number] for number in numbers.permutation(FILES)[:20]])
    wait_until(lambda: order(mounted)["source"] == "none", "that it is given up", mounted.evidence)
