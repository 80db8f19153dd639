"""What is written finds its way to ``--output``, whatever is renamed, removed and changed meanwhile, and whoever dies.

The core alone, on real directories: no mount. Steps are random but the same for the same number; how they meet with
the saver's own steps is up to the threads of the moment.
"""

import errno
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import core_parts
import pytest
import trio
import trio.testing
from core_written import prepare_in, wait_saved, written

from fanstore.fuse import writing
from fanstore.job.job import Job
from fanstore.outputs.journal import Journal, Owner
from fanstore.outputs.local_contents import LocalContents
from fanstore.outputs.output import Output
from fanstore.outputs.output_dir import OutputDir, Wanted
from fanstore.outputs.outputs import Outputs
from fanstore.outputs.tree import Operation, RefusedError

NAMES = (b"a", b"b", b"c", b"data")
FAILING = ("publish", "make_directory", "make_symlink", "rename", "remove", "sync")


class Flaky(OutputDir):
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
                outputs.contents.read(output.inode, 0, 1 << 20) if output.is_file else output.target,
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


async def write_and_compare(outputs: Outputs, output_dir: OutputDir, seed: int) -> None:
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
            assert standing(output_dir.directory) == expected(outputs)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(6))
def test_all_is_saved(prepared: Path, tmp_path: Path, seed: int) -> None:
    output_dir = OutputDir(tmp_path / "output", ".fanstore-job", 0)
    with written(prepared, tmp_path, output_dir) as outputs:
        trio.run(write_and_compare, outputs, output_dir, seed)
        assert outputs.saver is not None and outputs.saver.saved_files > 0
    output_dir.close()
    assert not list(output_dir.directory.glob(".fanstore*"))


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


async def leave_before_the_directory(outputs: Outputs, output_dir: OutputDir) -> None:
    """While the saver is far behind: a file gets another name, its directory does, and the file is removed."""
    above = await outputs.make_directory(1, b"above", 0o755)
    folder = await outputs.make_directory(above, b"folder", 0o755)
    await write_new(outputs, folder, b"name", b"content")
    await save_all(outputs)
    await outputs.rename(folder, b"name", above, b"name", replace=True)
    await outputs.rename(1, b"above", 1, b"renamed", replace=True)
    await outputs.remove(above, b"name", directory=False)
    assert outputs.saver is not None
    await outputs.saver._publisher.advance(above)
    assert standing(output_dir.directory).keys() == {b"renamed", b"renamed/folder"}, "a path that there never was"
    await save_all(outputs)
    assert standing(output_dir.directory) == expected(outputs)


async def write_anew_in_a_renamed_directory(outputs: Outputs, output_dir: OutputDir) -> None:
    """While the saver is far behind: a file is removed, its directory gets another name, and the file is there anew."""
    folder = await outputs.make_directory(1, b"folder", 0o755)
    await write_new(outputs, folder, b"name", b"old")
    await save_all(outputs)
    await outputs.remove(folder, b"name", directory=False)
    await outputs.rename(1, b"folder", 1, b"renamed", replace=True)
    await write_new(outputs, folder, b"name", b"not copied yet")
    assert outputs.saver is not None
    await outputs.saver._publisher.advance(folder)
    assert standing(output_dir.directory).keys() == {b"renamed"}, "what was never in renamed/name"
    await save_all(outputs)
    assert standing(output_dir.directory) == expected(outputs)


async def replace_in_a_renamed_directory(outputs: Outputs, output_dir: OutputDir) -> None:
    """While the saver is far behind: a name that was safe, and its directory's, are changed, and it is replaced."""
    folder = await outputs.make_directory(1, b"folder", 0o755)
    old = await write_new(outputs, folder, b"first name", b"safe")
    await save_all(outputs)
    await outputs.rename(folder, b"first name", folder, b"name", replace=True)
    await outputs.rename(1, b"folder", 1, b"renamed", replace=True)
    await write_new(outputs, folder, b"temporary", b"not copied yet")
    await outputs.rename(folder, b"temporary", folder, b"name", replace=True)
    assert outputs.saver is not None
    await outputs.saver._publisher.advance(old)
    assert (output_dir.directory / "folder/name").read_bytes() == b"safe", "as it was before the directory was renamed"
    await outputs.saver._publisher.advance(folder)
    assert (output_dir.directory / "renamed/name").read_bytes() == b"safe", "until its successor is complete"
    assert standing(output_dir.directory).keys() == {b"renamed", b"renamed/name"}
    await save_all(outputs)
    assert standing(output_dir.directory) == expected(outputs)


async def follow_a_directory_step_by_step(outputs: Outputs, output_dir: OutputDir) -> None:
    """While the saver is far behind: a directory gets name after name; files come to it, go, and change meanwhile."""
    saver, root = outputs.saver, output_dir.directory
    assert saver is not None
    folder = await outputs.make_directory(1, b"0", 0o755)
    for name in (b"goes", b"removed", b"rewritten"):
        await write_new(outputs, folder, name, b"old")
    await save_all(outputs)
    await outputs.remove(folder, b"removed", directory=False)
    await outputs.rename(1, b"0", 1, b"1", replace=True)
    await write_new(outputs, folder, b"removed", b"not copied yet")
    new = await write_new(outputs, folder, b"new", b"new")
    await outputs.rename(folder, b"goes", folder, b"gone", replace=True)
    rewritten = outputs.lookup(folder, b"rewritten")
    assert rewritten is not None
    await outputs.write(rewritten.inode, 0, b"newer")
    await outputs.close(rewritten.inode)
    await outputs.rename(1, b"1", 1, b"2", replace=True)
    ever = {
        b"0": {b"goes": [b"old"], b"removed": [b"old"], b"rewritten": [b"old"]},
        b"1": {b"goes": [b"old"], b"gone": [b"old"], b"new": [b"new"], b"rewritten": [b"old", b"newer"]},
        b"2": {b"gone": [b"old"], b"new": [b"new"], b"rewritten": [b"old", b"newer"]},
    }
    seen: list[bytes] = []

    def look() -> None:
        """After each change of a name there: nothing is what it never was."""
        for path, (_, _, content, _) in standing(root).items():
            folder_name, _, name = path.partition(b"/")
            assert not name or content in ever[folder_name].get(name, []), path
            if not name and seen[-1:] != [path]:
                seen.append(path)

    def and_look(function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)
        look()

    for function in ("rename", "publish", "remove"):
        setattr(output_dir, function, partial(and_look, getattr(output_dir, function)))
    for inode in (new, rewritten.inode):
        await saver._copy_once(outputs.tree.get(inode), None)
        await saver._publisher.advance(inode)
    await saver._publisher.advance(folder)
    assert seen == [b"0", b"1", b"2"], "one name after the other"
    ever[b"2"][b"removed"] = [b"not copied yet"]
    await save_all(outputs)
    assert standing(root) == expected(outputs)


async def replace_again_in_a_renamed_directory(outputs: Outputs, output_dir: OutputDir) -> None:
    """While the saver is far behind: a safe file is replaced, its directory gets another name, it is replaced again."""
    folder = await outputs.make_directory(1, b"folder", 0o755)
    await write_new(outputs, folder, b"name", b"safe")
    await save_all(outputs)
    for number in range(2):
        await write_new(outputs, folder, b"temporary", b"not copied yet")
        await outputs.rename(folder, b"temporary", folder, b"name", replace=True)
        if number == 0:
            await outputs.rename(1, b"folder", 1, b"renamed", replace=True)
    assert outputs.saver is not None
    await outputs.saver._publisher.advance(folder)
    assert (output_dir.directory / "renamed/name").read_bytes() == b"safe", "until its successor is complete"
    await save_all(outputs)
    assert standing(output_dir.directory) == expected(outputs)


async def replace_with_what_was_rewritten(outputs: Outputs, output_dir: OutputDir) -> None:
    """While the saver is far behind: a safe file is replaced by one with newer content, and that by another one."""
    await write_new(outputs, 1, b"name", b"safe")
    other = await write_new(outputs, 1, b"other", b"old")
    await save_all(outputs)
    await outputs.write(other, 0, b"newer, not copied yet")
    await outputs.close(other)
    await outputs.rename(1, b"other", 1, b"name", replace=True)
    new = await write_new(outputs, 1, b"temporary", b"not copied yet either")
    await outputs.rename(1, b"temporary", 1, b"name", replace=True)
    saver = outputs.saver
    assert saver is not None
    with pytest.raises(RefusedError):
        await saver._publisher.advance(other)
    assert (output_dir.directory / "name").read_bytes() == b"safe", "until its successor is complete"
    assert (output_dir.directory / "other").read_bytes() == b"old", "perhaps this one was safe"
    await saver._copy_once(outputs.tree.get(new), None)
    await saver._publisher.advance(new)
    await saver._publisher.advance(other)
    assert standing(output_dir.directory) == expected(outputs)


async def take_each_others_last_names(outputs: Outputs, output_dir: OutputDir) -> None:
    """While the saver is far behind: two safe files get each other's name, and are replaced there."""
    first = await write_new(outputs, 1, b"a", b"first")
    second = await write_new(outputs, 1, b"b", b"second")
    await save_all(outputs)
    for old, new in ((b"a", b"c"), (b"b", b"a"), (b"c", b"b")):
        await outputs.rename(1, old, 1, new, replace=True)
    for name in (b"a", b"b"):
        await write_new(outputs, 1, b"temporary", b"not copied yet")
        await outputs.rename(1, b"temporary", 1, name, replace=True)
    saver = outputs.saver
    assert saver is not None
    for inode in (first, second, first, second):
        with suppress(RefusedError):
            await saver._publisher.advance(inode)
    assert {name: content for name, (_, _, content, _) in standing(output_dir.directory).items()} == {
        b"a": b"second",
        b"b": b"first",
    }
    await save_all(outputs)
    assert standing(output_dir.directory) == expected(outputs)


async def replace_while_it_comes_to_a_renamed_directory(outputs: Outputs, output_dir: OutputDir) -> None:
    """A name that was safe is changed, and replaced in the moment in which ``--output`` follows the first change."""
    folder = await outputs.make_directory(1, b"folder", 0o755)
    old = await write_new(outputs, 1, b"first name", b"safe")
    await save_all(outputs)
    await outputs.rename(1, b"first name", folder, b"name", replace=True)
    new = await write_new(outputs, 1, b"temporary", b"not copied yet")
    rename = output_dir.rename

    def rename_and_replace(*paths: bytes) -> None:
        output_dir.rename = rename  # type: ignore[method-assign]
        rename(*paths)
        trio.from_thread.run(partial(outputs.rename, 1, b"folder", 1, b"renamed", replace=True))
        trio.from_thread.run(partial(outputs.rename, 1, b"temporary", folder, b"name", replace=True))

    output_dir.rename = rename_and_replace  # type: ignore[method-assign, assignment]
    assert outputs.saver is not None
    await outputs.saver._publisher.advance(old)
    assert outputs.lookup(folder, b"name") is outputs.tree.get(new), "it was replaced meanwhile"
    for inode in (old, folder, old):
        await outputs.saver._publisher.advance(inode)
        [there] = output_dir.directory.glob("*/name")
        assert there.read_bytes() == b"safe", "until its successor is complete"
    assert there.parent.name == "renamed"
    await save_all(outputs)
    assert standing(output_dir.directory) == expected(outputs)


async def note_together(outputs: Outputs, output_dir: OutputDir) -> None:
    """What was copied and saved is noted for many at a time, and one that is removed meanwhile keeps no other."""
    saver, count = outputs.saver, 20
    assert saver is not None
    decide = outputs._names.decide
    decided: list[Operation] = []
    removed = {"ready": b"5", "saved": b"6"}  # in the last moment

    async def note(operation: Operation) -> int:
        decided.append(operation)
        if operation[0] in removed:
            await decide(("remove", 1, removed.pop(operation[0]), False, 1))
        return await decide(operation)

    outputs._names.decide = note  # type: ignore[method-assign]
    inodes = [await write_new(outputs, 1, b"%d" % number, b"content") for number in range(count)]
    decided.clear()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for inode in inodes:
                nursery.start_soon(saver._copy_once, outputs.tree.get(inode), None)
        ready = [len(operation[1]) for operation in decided]
        assert {operation[0] for operation in decided} == {"ready"} and sum(ready) == count
        assert len(ready) < count, "those that come together are one change"
        assert outputs.tree.lookup(1, b"5") is None
        done, failed = await saver._publisher.publish(inodes)
    assert [operation[0] for operation in decided[len(ready) :]] == ["going", "saved"]
    assert sorted(done) == sorted(inodes[:5] + inodes[6:]) and not failed
    await save_all(outputs)
    assert standing(output_dir.directory) == expected(outputs)
    assert len(standing(output_dir.directory)) == count - 2


STORIES = [
    replace_in_a_renamed_directory,
    write_anew_in_a_renamed_directory,
    follow_a_directory_step_by_step,
    replace_again_in_a_renamed_directory,
    replace_with_what_was_rewritten,
    take_each_others_last_names,
    replace_while_it_comes_to_a_renamed_directory,
    leave_before_the_directory,
    note_together,
]


@pytest.mark.parametrize("story", STORIES)
def test_a_saver_that_is_far_behind(
    prepared: Path, tmp_path: Path, story: Callable[[Outputs, OutputDir], Awaitable[None]]
) -> None:
    output_dir = OutputDir(tmp_path / "output", ".fanstore-job", 0)
    with written(prepared, tmp_path, output_dir) as outputs:
        trio.run(story, outputs, output_dir)
    output_dir.close()


async def sync_in_vain(outputs: Outputs, decided: list[object]) -> None:
    inode = await outputs.create(1, b"name", 0o644, exclusive=True)
    await outputs.write(inode, 0, b"content")
    begun_s = trio.current_time()
    decided.clear()
    await outputs.sync(inode)
    assert trio.current_time() == begun_s, "nothing was waited for but the disk"
    assert not decided


def test_fsync_with_scratch_waits_for_the_disk_alone(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pause, no decision: there is nobody to tell."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with core_parts.opened(prepared) as parts:
        objects = LocalContents(tmp_path / "objects")
        journal = Journal.make(tmp_path / "journal", Owner("job", 0, "", ""))
        outputs = Outputs(parts.namespace, None, objects, journal, None)
        decided: list[object] = []
        decide = outputs._names.decide

        async def note(operation: Operation) -> int:
            decided.append(operation)
            return await decide(operation)

        monkeypatch.setattr(outputs._names, "decide", note)
        # A pause would move this clock, and nothing else does.
        trio.run(sync_in_vain, outputs, decided, clock=trio.testing.MockClock(autojump_threshold=0.0))
        journal.close()
        objects.close()
    assert len(synced) == 1


async def sync_and_close(outputs: Outputs, output_dir: OutputDir) -> None:
    """One copy, at once; a change that comes within the same tick of the clock is not missed."""
    saver = outputs.saver
    assert saver is not None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outputs.run)
        inode = await outputs.create(1, b"name", 0o644, exclusive=True)
        await outputs.write(inode, 0, b"content")
        before = outputs.kernel.attributes(inode)
        await outputs.sync(inode)
        assert (output_dir.directory / "name").read_bytes() == b"content"
        assert not outputs.contents.is_changed(inode), "there will be no second copy"
        assert outputs.kernel.attributes(inode) == before, "nobody sees the mark"
        assert (output_dir.directory / "name").stat().st_mtime_ns == before.mtime_ns
        await outputs.close(inode)
        assert (outputs.tree.get(inode).version, saver.saved_files) == (1, 1)
        await outputs.write(inode, 0, b"CONTENT")
        assert outputs.contents.is_changed(inode)
        await outputs.close(inode)
        await wait_saved(outputs)
        assert (output_dir.directory / "name").read_bytes() == b"CONTENT"
        nursery.cancel_scope.cancel()


def test_fsync_and_close_make_one_copy(prepared: Path, tmp_path: Path) -> None:
    output_dir = OutputDir(tmp_path / "output", ".fanstore-job", 0)
    with written(prepared, tmp_path, output_dir) as outputs:
        trio.run(sync_and_close, outputs, output_dir)
    output_dir.close()


def test_every_change_of_a_marked_content_is_seen(tmp_path: Path) -> None:
    """Also one that the clock of the file system does not tell from the last: it is a millisecond, or several."""
    objects = LocalContents(tmp_path / "objects")
    objects.make(7)
    for number in range(200):
        objects.write(7, 0, b"%03d" % number)
        objects.mark(7)
        content = objects.find(7)
        assert content is not None
        objects.set_clean(7, content.stamp)
        assert not objects.is_changed(7)
        objects.write(7, 0, b"%03d" % number)
        assert objects.is_changed(7)
    objects.close()


async def wait_in_vain(outputs: Outputs, life: writing.OutputLife, out: Path) -> list[int]:
    """How often it was waited for progress, in each of two calls."""
    waits: list[int] = []
    saver = outputs.saver
    assert saver is not None
    wait_progress = saver.wait_progress

    async def count() -> None:
        waits[-1] += 1
        await wait_progress()

    saver.wait_progress = count  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outputs.run)
        await write_new(outputs, 1, b"name", b"content")
        os.rename(out, out.with_name("away"))
        for _ in range(2):
            waits.append(0)
            await life.drain(Job(None))
        assert "1 outputs are not yet saved" in life.waits_for()
        nursery.cancel_scope.cancel()
    return waits


def test_the_end_waits_once(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expect_warnings: Callable[..., None]
) -> None:
    """What was waited for in vain while the mount was up is not waited for again when it is gone."""
    expect_warnings(r"cannot .* to .*; it is tried again")
    monkeypatch.setattr(writing, "STUCK_LIMIT_S", 1.0)
    out = tmp_path / "output"
    life = writing.OutputLife(writing.Writing(out))
    with written(prepared, tmp_path, OutputDir(out, ".fanstore-job", 0)) as outputs:
        life.outputs, life._job = outputs, Job(None)
        first, second = trio.run(wait_in_vain, outputs, life, out)
    assert first >= 4
    assert second == 1


@pytest.mark.parametrize("seed", range(4))
def test_errors_of_the_shared_file_system(
    prepared: Path, tmp_path: Path, seed: int, expect_warnings: Callable[..., None]
) -> None:
    """A fifth of all calls there fail, before or after they have done what they were to do: nothing is lost."""
    expect_warnings(r"to .*/output: .*; it is tried again")
    output_dir = Flaky(tmp_path / "output", ".fanstore-job", Random(seed))
    with written(prepared, tmp_path, output_dir) as outputs:
        trio.run(write_and_compare, outputs, output_dir, seed)
    output_dir.close()
    assert not list(output_dir.directory.glob(".fanstore*"))


async def swap(outputs: Outputs, kind: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outputs.run)
        for name in (b"a", b"b"):
            parent = 1 if kind == "files" else await outputs.make_directory(1, name, 0o755)
            await write_new(outputs, parent, name if kind == "files" else b"inside", name)
        await wait_saved(outputs)
        for old, new in ((b"a", b"other"), (b"b", b"a"), (b"other", b"b")):
            await outputs.rename(1, old, 1, new, replace=True)
        await wait_saved(outputs)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["files", "directories"])
def test_names_that_are_swapped(prepared: Path, tmp_path: Path, kind: str) -> None:
    """Each stands where the other is to come: one of them goes out of the way for a moment."""
    output_dir = OutputDir(tmp_path / "output", ".fanstore-job", 0)
    with written(prepared, tmp_path, output_dir) as outputs:
        trio.run(swap, outputs, kind)
        assert standing(output_dir.directory) == expected(outputs)
    inside = "" if kind == "files" else "inside"
    assert [(tmp_path / "output" / name / inside).read_bytes() for name in "ab"] == [b"b", b"a"]
    output_dir.close()
