"""Many small files at once (outputs/rush.py): their copies wait for the end of it, others do not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from core_written import LIMIT_S, prepare_in, wait_saved, written

from fanstore.outputs.output_dir import OutputDir
from fanstore.outputs.outputs import Outputs
from fanstore.outputs.rush import LONGEST_S, MANY, PAUSE_S, SMALL_BYTES, Rush


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_in(tmp_path_factory.mktemp("outputs"))


def come(rush: Rush, count: int, apart_s: float, begin_s: float = 100.0) -> float:
    """Files at equal distances; when the last one came."""
    for number in range(count):
        rush.note(begin_s + number * apart_s)
    return begin_s + (count - 1) * apart_s


def test_a_few_files_are_no_rush() -> None:
    rush = Rush()
    assert rush.left_s(0.0) == 0.0
    last_s = come(rush, MANY - 1, 0.001)
    assert rush.left_s(last_s) == 0.0
    rush.note(last_s)
    assert rush.left_s(last_s) == pytest.approx(PAUSE_S)


def test_a_rush_ends_with_a_pause() -> None:
    rush = Rush()
    last_s = come(rush, 2 * MANY, 0.001)
    assert rush.left_s(last_s + PAUSE_S / 2) == pytest.approx(PAUSE_S / 2)
    assert rush.left_s(last_s + PAUSE_S) == 0.0
    later_s = come(rush, 1, 0.0, last_s + 2 * PAUSE_S)
    assert rush.left_s(later_s) == 0.0, "another series has begun"


def test_a_rush_that_does_not_end_is_not_waited_for() -> None:
    rush = Rush()
    last_s = come(rush, int(LONGEST_S / 0.01) - 1, 0.01)
    assert 0.0 < rush.left_s(last_s) < PAUSE_S
    last_s = come(rush, 10, 0.01, last_s + 0.01)
    assert rush.left_s(last_s) == 0.0


def test_files_now_and_then_are_no_rush() -> None:
    rush = Rush()
    for number in range(10 * MANY):
        rush.note(number * 0.1)
        assert rush.left_s(number * 0.1) == 0.0


async def write(outputs: Outputs, name: bytes, size: int) -> int:
    inode = await outputs.create(1, name, 0o644, exclusive=True)
    await outputs.write(inode, 0, bytes(size))
    await outputs.close(inode)
    return inode


async def rush_and_look(outputs: Outputs, output_dir: OutputDir, end: Callable[[], None]) -> None:
    """Until it is ended, only what is synced, or large, is copied."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outputs.run)
        for number in range(2 * MANY):
            await write(outputs, b"small %d" % number, 1000)
        synced = await write(outputs, b"synced", 1000)
        await outputs.sync(synced)
        large = await write(outputs, b"large", SMALL_BYTES + 1)
        saver = outputs.saver
        assert saver is not None
        with trio.fail_after(LIMIT_S):
            await saver.wait_saved(large, outputs.tree.outputs[large].version)
        standing = {path.name for path in output_dir.directory.iterdir() if path.is_file()}
        assert {"synced", "large"} <= standing
        assert not standing & {f"small {number}" for number in range(MANY, 2 * MANY)}, "a copy was made in a rush"
        end()
        await wait_saved(outputs)
        assert len([path for path in output_dir.directory.iterdir() if path.is_file()]) == 2 * MANY + 2
        nursery.cancel_scope.cancel()


def test_copies_wait_for_the_end_of_a_rush(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one that ends when we say so, and not because this machine is slow."""
    over = False

    def end() -> None:
        nonlocal over
        over = True

    monkeypatch.setattr("fanstore.outputs.rush.PAUSE_S", 1e6)
    monkeypatch.setattr(Rush, "left_s", lambda rush, now_s: 0.0 if over or rush._count < MANY else 0.05)
    output_dir = OutputDir(tmp_path / "output", ".fanstore-job", 0)
    with written(prepared, tmp_path, output_dir) as outputs:
        trio.run(rush_and_look, outputs, output_dir, end)
    output_dir.close()
