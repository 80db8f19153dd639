"""A small dataset whose files are read in a stated order, and what the daemon says of that.

Use its fixtures with ``pytest_plugins = ["mounting", "ordered"]``. (PYTEST_DONT_REWRITE: the test modules import it as
well, before pytest could.)
"""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mounting import Mounted, prepare, wait_until
from oddities import compressible

FILES = 240


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prefetch") / "source"
    for number in range(FILES):
        path = root / f"class{number % 4}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compressible(20_000 + 11 * number, number))
    return root


@pytest.fixture(scope="module")
def prepared(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(root, tmp_path_factory.mktemp("prepared") / "d.fan", "--codec", "lz4", "--partitions", "4")


def shuffled(root: Path, seed: int) -> list[str]:
    paths = sorted(str(path.relative_to(root)) for path in root.rglob("*.jpg"))
    random.Random(seed).shuffle(paths)
    return paths


def check(point: Path, root: Path, paths: Sequence[str]) -> None:
    for path in paths:
        assert (point / path).read_bytes() == (root / path).read_bytes(), path


def forget(point: Path, paths: Sequence[str]) -> None:
    """Have the kernel forget what it has of these files."""
    for path in paths:
        with open(point / path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def order(mounted: Mounted) -> dict[str, Any]:
    section: dict[str, Any] = mounted.statistics()["order"]
    return section


def until(mounted: Mounted, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """Wait for what the daemon knows only after it has looked; its last word."""
    wait_until(lambda: condition(order(mounted)), what, lambda: f"{order(mounted)}\n{mounted.evidence()}")
    return order(mounted)


def fetched(chunks: int) -> Callable[[dict[str, Any]], bool]:
    """So many have landed, and nothing is on its way."""
    return lambda now: now["prefetched"] >= chunks and now["in_line"] == 0
