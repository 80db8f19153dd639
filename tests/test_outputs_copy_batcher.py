"""Copies on their way to ``--output`` (outputs/copy_batcher.py)."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from fanstore.outputs.copy_batcher import COPIERS, SMALL_BYTES, TOGETHER, CopyBatcher
from fanstore.outputs.output_dir import OutputDir, ShorterError, Wanted

LIMIT_S = 20.0


class Counting(OutputDir):
    """A output_dir that notes what comes together, and waits until it may go on."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, ".copies", 0)
        self.open()
        self.groups: list[list[str]] = []
        self.may_go = threading.Event()

    def copy_all(self, wanted: Sequence[Wanted]) -> list[OSError | None]:
        self.groups.append([item.name for item in wanted])
        assert self.may_go.wait(LIMIT_S)
        return super().copy_all(wanted)


@pytest.fixture
def output_dir(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "out")


def wanted(directory: Path, name: str, size: int) -> Wanted:
    path = directory / f"source-{name}"
    path.write_bytes(name.encode() * (size // len(name) + 1))
    os.truncate(path, size)
    return Wanted(os.open(path, os.O_RDONLY), size, name)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def send_all(output_dir: OutputDir, items: Sequence[Wanted], then: Callable[[trio.Nursery], None]) -> None:
    """Have all of them copied, one after the other, and do something when nothing goes on by itself."""

    async def main() -> None:
        batcher = CopyBatcher(output_dir)
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                for item in items:
                    nursery.start_soon(batcher.copy, item)
                    await trio.testing.wait_all_tasks_blocked()
                then(nursery)

    trio.run(main)


def test_small_ones_go_together(output_dir: Counting, tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(COPIERS + 40)]
    items = [wanted(tmp_path, name, 100) for name in names]
    send_all(output_dir, items, lambda nursery: output_dir.may_go.set())
    assert [len(group) for group in output_dir.groups[:COPIERS]] == [1] * COPIERS, "nobody waits for company"
    assert sorted(name for group in output_dir.groups for name in group) == sorted(names)
    assert max(map(len, output_dir.groups)) == TOGETHER
    for name in names:
        assert (output_dir.directory / ".copies" / name).read_bytes() == (name.encode() * 100)[:100]
    assert not any(is_open(item.source) for item in items)


def test_large_ones_go_alone(output_dir: Counting, tmp_path: Path) -> None:
    sizes = [1, 1, 1, 1, 100, SMALL_BYTES, SMALL_BYTES + 1, 7, 8]
    items = [wanted(tmp_path, f"n{number}", size) for number, size in enumerate(sizes)]
    send_all(output_dir, items, lambda nursery: output_dir.may_go.set())
    assert ["n6"] in output_dir.groups, "large"
    assert ["n4", "n5"] in output_dir.groups and ["n7", "n8"] in output_dir.groups


def test_one_that_fails_fails_alone(output_dir: Counting, tmp_path: Path) -> None:
    items = [wanted(tmp_path, f"n{number}", 100) for number in range(COPIERS + 3)]
    os.truncate(tmp_path / "source-n5", 7)
    failed: list[str] = []
    output_dir.may_go.set()

    async def main() -> None:
        batcher = CopyBatcher(output_dir)

        async def copy(item: Wanted) -> None:
            try:
                await batcher.copy(item)
            except ShorterError:
                failed.append(item.name)

        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                for item in items:
                    nursery.start_soon(copy, item)

    trio.run(main)
    assert failed == ["n5"]
    copies = os.listdir(output_dir.directory / ".copies")
    assert sorted(copies) == sorted(item.name for item in items if item.name != "n5"), "no half a copy is left"
    assert not any(is_open(item.source) for item in items)


def test_who_is_cancelled_in_line_leaves_nothing_open(output_dir: Counting, tmp_path: Path) -> None:
    items = [wanted(tmp_path, f"n{number}", 100) for number in range(COPIERS + 5)]
    send_all(output_dir, items, lambda nursery: nursery.cancel_scope.cancel())
    assert sum(is_open(item.source) for item in items) == COPIERS, "those that are being copied"
    output_dir.may_go.set()
    end_s = time.monotonic() + LIMIT_S
    while any(is_open(item.source) for item in items):
        assert time.monotonic() < end_s
        time.sleep(0.01)
