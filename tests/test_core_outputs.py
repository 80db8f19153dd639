"""What is written finds its way to ``--output``, whatever is renamed, removed and changed meanwhile, and whoever dies.

The core alone, on real directories: no mount. Steps are random but the same for the same number; how they meet with
the saver's own steps is up to the threads of the moment.
"""

import errno
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from core_written import prepare_in, wait_saved, written

from fanstore.core.output import Output
from fanstore.core.outputs import Outputs
from fanstore.core.outputtree import Operation, RefusedError
from fanstore.core.shelf import Shelf, Wanted

NAMES = (b"a", b"b", b"c", b"data")
FAILING = ("publish", "make_directory", "make_symlink", "rename", "remove", "sync")


class Flaky(Shelf):
    """A shared file system that fails now and then.

    Attributes:
        odds: how often it does. Set to 0 to let it recover.
    """

    odds = 0.0

    def __init__(self, directory: Path, copies: str, random: Random) -> None:
        super().__init__(directory, copies, 0)
        self._random = random

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in FAILING or self._random.random() >= Flaky.odds:
            return found

        def fail(*arguments: Any) -> None:
            if self._random.random() < 0.5:
                found(*arguments)  # done, but it does not say so
            raise self._error()

        return fail

    def _error(self) -> OSError:
        number = self._random.choice((errno.EIO, errno.ENOSPC, errno.ESTALE))
        return OSError(number, os.strerror(number))

    def copy_all(self, wanted: Sequence[Wanted]) -> list[OSError | None]:
        """Some are made, and some of these are said to have failed."""
        errors: dict[Wanted, OSError | None] = {}
        for item in wanted:
            if self._random.random() < Flaky.odds:
                errors[item] = self._error()
        tried = [item for item in wanted if item not in errors or self._random.random() < 0.5]
        for item in wanted:
            if item not in tried:
                os.close(item.source)
        done = dict(zip(tried, super().copy_all(tried), strict=True))
        return [(done | errors)[item] for item in wanted]


class Writer:
    """Somebody who writes at random.

    Attributes:
        outputs: what is written to. random: decides what.
    """

    def __init__(self, outputs: Outputs, random: Random) -> None:
        self.outputs = outputs
        self.random = random

    def _named(self) -> list[Output]:
        return [output for output in self.outputs.tree.outputs.values() if output.place is not None]

    def _place(self) -> tuple[int, bytes]:
        """Where something may be, or may be made."""
        named = self._named()
        if named and self.random.random() < 0.6:
            place = self.random.choice(named).place
            assert place is not None
            return place
        directories = [1, 1, 2, *(output.inode for output in named if output.is_directory)]
        return self.random.choice(directories), self.random.choice(NAMES)

    async def step(self) -> None:
        """Do something; that it is refused is as good."""
        steps = [self.write, self.write, self.make, self.rename, self.rename, self.rename, self.remove, self.change]
        try:
            await self.random.choice(steps)()
        except RefusedError:
            return

    async def write(self) -> None:
        parent, name = self._place()
        inode = await self.outputs.create(parent, name, 0o644, exclusive=False)
        await self.outputs.resize(inode, 0)
        await self.outputs.write(inode, self.random.randrange(100), self.random.randbytes(self.random.randrange(5000)))
        await self.outputs.close(inode)

    async def make(self) -> None:
        parent, name = self._place()
        if self.random.random() < 0.7:
            await self.outputs.make_directory(parent, name, 0o755)
        else:
            await self.outputs.make_symlink(parent, name, self.random.choice(NAMES))

    async def rename(self) -> None:
        await self.outputs.rename(*self._place(), *self._place(), replace=True)

    async def remove(self) -> None:
        await self.outputs.remove(*self._place(), directory=self.random.random() < 0.5)

    async def change(self) -> None:
        output = self.outputs.lookup(*self._place())
        if output is None:
            return
        time_ns = self.random.randrange(10**18)
        mode = None if output.target else self.random.choice((0o600, 0o644, 0o755))
        await self.outputs.set_attributes(output.inode, mode, time_ns)
        if not output.target:
            await self.outputs.set_xattr(output.inode, b"user.note", self.random.randbytes(5))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_in(tmp_path_factory.mktemp("outputs"))


def expected(outputs: Outputs) -> dict[bytes, tuple[object, ...]]:
    """What must stand in ``--output``."""
    found: dict[bytes, tuple[object, ...]] = {}
    for output in outputs.tree.outputs.values():
        if output.place is not None:
            found[outputs.tree.path(output.place)] = (
                output.mode | (stat.S_IRWXU if output.is_directory else 0),
                output.mtime_ns if not output.is_directory else 0,
                outputs.objects.read(output.inode, 0, 1 << 20) if output.is_file else output.target,
                output.xattrs.get(b"user.note"),
            )
    return found


def standing(root: Path) -> dict[bytes, tuple[object, ...]]:
    """What stands there."""
    found: dict[bytes, tuple[object, ...]] = {}
    top = os.fsencode(root)
    for directory, directories, files in os.walk(top):
        directories[:] = [name for name in directories if not name.startswith(b".fanstore-")]
        for name in [*directories, *files]:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            is_link, is_directory = stat.S_ISLNK(status.st_mode), stat.S_ISDIR(status.st_mode)
            content = os.readlink(path) if is_link else b"" if is_directory else Path(os.fsdecode(path)).read_bytes()
            note = None
            if not is_link and "user.note" in os.listxattr(path):
                note = os.getxattr(path, "user.note")
            time_ns = 0 if is_directory else status.st_mtime_ns
            found[os.path.relpath(path, top)] = (status.st_mode, time_ns, content, note)
    found.pop(b"data", None)  # of the dataset, if something was written there
    return found


async def pause(random: Random) -> None:
    """Let the saver do none, a few or many of its steps."""
    if random.random() < 0.2:
        await trio.sleep(random.choice((0.001, 0.01, 0.06)))


async def write_and_compare(outputs: Outputs, shelf: Shelf, seed: int) -> None:
    """Random changes while they are saved; in the end, and now and then, everything stands as it is here."""
    random = Random(seed)
    writer = Writer(outputs, random)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outputs.run)
        for _ in range(5):
            Flaky.odds = 0.2
            for _ in range(60):
                await writer.step()
                outputs.tree.validate()
                await pause(random)
            Flaky.odds = 0.0
            await wait_saved(outputs)
            assert standing(shelf.directory) == expected(outputs)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(6))
def test_all_is_saved(prepared: Path, tmp_path: Path, seed: int) -> None:
    shelf = Shelf(tmp_path / "output", ".fanstore-job", 0)
    with written(prepared, tmp_path, shelf) as outputs:
        trio.run(write_and_compare, outputs, shelf, seed)
        assert outputs.saver is not None and outputs.saver.saved_files > 0
    shelf.close()
    assert not list(shelf.directory.glob(".fanstore*"))


async def write_new(outputs: Outputs, parent: int, name: bytes, content: bytes) -> int:
    inode = await outputs.create(parent, name, 0o644, exclusive=True)
    await outputs.write(inode, 0, content)
    await outputs.close(inode)
    return inode


async def save_all(outputs: Outputs) -> None:
    """And stop then."""
    assert outputs.saver is not None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outputs.run)
        outputs.saver.wake()
        await wait_saved(outputs)
        nursery.cancel_scope.cancel()


async def leave_before_the_directory(outputs: Outputs, shelf: Shelf) -> None:
    """While the saver is far behind: a file gets another name, its directory does, and the file is removed."""
    above = await outputs.make_directory(1, b"above", 0o755)
    folder = await outputs.make_directory(above, b"folder", 0o755)
    await write_new(outputs, folder, b"name", b"content")
    await save_all(outputs)
    await outputs.rename(folder, b"name", above, b"name", replace=True)
    await outputs.rename(1, b"above", 1, b"renamed", replace=True)
    await outputs.remove(above, b"name", directory=False)
    assert outputs.saver is not None
    await outputs.saver._placer.place(above)
    assert standing(shelf.directory).keys() == {b"renamed", b"renamed/folder"}, "a path that there never was"
    await save_all(outputs)
    assert standing(shelf.directory) == expected(outputs)


async def replace_in_a_renamed_directory(outputs: Outputs, shelf: Shelf) -> None:
    """While the saver is far behind: a name that was safe, and its directory's, are changed, and it is replaced."""
    folder = await outputs.make_directory(1, b"folder", 0o755)
    old = await write_new(outputs, folder, b"first name", b"safe")
    await save_all(outputs)
    await outputs.rename(folder, b"first name", folder, b"name", replace=True)
    await outputs.rename(1, b"folder", 1, b"renamed", replace=True)
    await write_new(outputs, folder, b"temporary", b"not copied yet")
    await outputs.rename(folder, b"temporary", folder, b"name", replace=True)
    assert outputs.saver is not None
    await outputs.saver._placer.place(old)
    assert (shelf.directory / "renamed/name").read_bytes() == b"safe", "until its successor is complete"
    assert standing(shelf.directory).keys() == {b"renamed", b"renamed/name"}
    await save_all(outputs)
    assert standing(shelf.directory) == expected(outputs)


async def note_together(outputs: Outputs, shelf: Shelf) -> None:
    """What was saved is decided on for all of a batch at the same time, and one that is refused keeps no other."""
    saver, count = outputs.saver, 20
    assert saver is not None
    decide, all_asked = saver._placer._decide, trio.Event()
    asked: list[int] = []
    refused: list[int] = []

    async def decide_saved(operation: Operation) -> int:
        if operation[0] == "saved" and not all_asked.is_set():
            asked.append(operation[1])
            if len(asked) == count:
                all_asked.set()
            await all_asked.wait()
            if not refused:
                refused.append(operation[1])
                raise RefusedError(errno.EAGAIN)
        return await decide(operation)

    saver._placer._decide = decide_saved
    inodes = [await write_new(outputs, 1, b"%d" % number, b"content") for number in range(count)]
    for inode in inodes:
        await saver._copy_once(outputs.tree.get(inode), None)
    with trio.fail_after(30):
        done, failed = await saver._placer.publish(inodes)
    assert sorted([*done, *refused]) == sorted(asked) == inodes and not failed
    await save_all(outputs)
    assert standing(shelf.directory) == expected(outputs)
    assert saver.saved_files == count


@pytest.mark.parametrize("story", [replace_in_a_renamed_directory, leave_before_the_directory, note_together])
def test_a_saver_that_is_far_behind(
    prepared: Path, tmp_path: Path, story: Callable[[Outputs, Shelf], Awaitable[None]]
) -> None:
    shelf = Shelf(tmp_path / "output", ".fanstore-job", 0)
    with written(prepared, tmp_path, shelf) as outputs:
        trio.run(story, outputs, shelf)
    shelf.close()


@pytest.mark.parametrize("seed", range(4))
def test_errors_of_the_shared_file_system(
    prepared: Path, tmp_path: Path, seed: int, expect_warnings: Callable[..., None]
) -> None:
    """A fifth of all calls there fail, before or after they have done what they were to do: nothing is lost."""
    expect_warnings(r"to .*/output: .*; it is tried again")
    shelf = Flaky(tmp_path / "output", ".fanstore-job", Random(seed))
    with written(prepared, tmp_path, shelf) as outputs:
        trio.run(write_and_compare, outputs, shelf, seed)
    shelf.close()
    assert not list(shelf.directory.glob(".fanstore*"))
