"""Random histories of a program and of a saver that is far behind it, stopped anywhere: what was promised is kept.

As test_outputs_crash.py, but in one process without a mount, so that there is time for many, and a history is the same
for the same number. The program goes on while the saver is in the middle of something, at any of its calls of the file
system of ``--output``.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import core_parts
import pytest
import trio
from core_written import prepare_in
from output_model import Model, contents
from output_program import Ledger, Program, identity

from fanstore.outputs.journal import JOURNAL_NAME, Journal, Owner
from fanstore.outputs.local_contents import LocalContents
from fanstore.outputs.output_dir import OutputDir
from fanstore.outputs.outputs import Outputs
from fanstore.outputs.recovery import CONTENTS_NAME, salvage
from fanstore.outputs.saver import Saver

CALLS = ("publish", "rename", "remove", "make_directory", "set_attributes", "sync", "copy_all", "make_parents")
#: Steps of a program; calls after which some histories are stopped, at most.
STEPS, CALLS_MOST = 120, 240
#: How often a saver may try.
TRIES = 3000


class Stopped(Exception):
    """The daemon is dead from here on."""


class Watched(OutputDir):
    """Somebody is called before and after everything that is done in ``--output``."""

    def __init__(self, directory: Path, watch: Callable[[], None]) -> None:
        super().__init__(directory, ".fanstore-job", 0)
        self._watch = watch

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in CALLS:
            return found

        def call(*arguments: Any) -> Any:
            self._watch()
            result = found(*arguments)
            self._watch()
            return result

        return call


class Notes(Ledger):
    """Nothing is done: what would be done is noted, and the writing of a content before it is closed or synced."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, ...]] = []
        self._nowhere = os.open(os.devnull, os.O_WRONLY)

    def do(self, call: Callable[[], Any], *words: object) -> Any:
        if words[0] in ("sync", "close") and self.steps[-1][0] == "create":
            self.steps.append(("write", *map(str, words[1:])))
        self.steps.append(tuple(map(str, words)))
        return self._nowhere

    def close(self) -> None:
        os.close(self._nowhere)


class Author(Program):
    """Says what a program does, as output_program.py does it.

    Attributes:
        texts: contents, by what they are called.
    """

    def __init__(self, notes: Notes, seed: int) -> None:
        super().__init__(Path("/nowhere"), notes, seed)
        self.texts: dict[str, bytes] = {}

    def content(self) -> bytes:
        text = b"%d " % len(self.texts) + bytes(len(self.texts))  # each has a size of its own
        self.texts[identity(text)] = text
        return text

    def act(self) -> None:
        actions = [self.save] * 5 + [self.checkpoint] * 6 + [self.remove] * 2 + [self.rename] * 3
        self.chance.choice([*actions, self.make_folder, self.remove_folder, self.rename_folder])()


class History:
    """One program, one saver, and one end.

    Attributes:
        model: what was promised. calls: how many more there are before the end; None if all is done.
    """

    def __init__(self, seed: int, base: Path, stopped: bool) -> None:
        self.model = Model()
        self._notes = Notes()
        self._author = Author(self._notes, seed)
        self._random = Random(seed + 1)
        self._base = base
        self._written = base / "out" / "data"  # the directory of the program; the other one is the saver's
        self.calls = self._random.randrange(10, CALLS_MOST) if stopped else None
        self._is_waiting = False

    def run(self, prepared: Path) -> None:
        job = self._base / "job"
        job.mkdir()
        output_dir = Watched(self._base / "out", self._watch)
        owner = Owner("job", 0, str(output_dir.directory), ".fanstore-job")
        with core_parts.opened(prepared) as parts, suppress(Stopped):
            objects = LocalContents(job / CONTENTS_NAME)
            journal = Journal.make(job / JOURNAL_NAME, owner)
            try:
                output_dir.open()
                self._outputs = Outputs(parts.namespace, None, objects, journal, output_dir)
                top = parts.namespace.child(1, b"data")
                assert self._outputs.saver is not None and top is not None
                self._top = top
                self._saver: Saver = self._outputs.saver
                trio.run(self._live)
            finally:
                journal.close()
                objects.close()
                self._notes.close()
        assert salvage(job)
        assert self.model.check_recovered(self._written, last=0) == []
        if self.calls is None:
            assert set(contents(self._written)) == set(self.model.files)

    async def _live(self) -> None:
        for _ in range(STEPS):
            await self._step()
            if self._random.random() < 0.1:
                await self._save_some()
        while self._notes.steps:
            await self._step()
        await self._save_until(lambda: not self._saver.pending()[0])

    # --- the saver ---

    def _watch(self) -> None:
        """In one of its threads: what a kill would leave now."""
        assert self.model.check_killed(self._written) == []
        if self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                raise Stopped
        if not self._is_waiting and self._random.random() < 0.3:
            trio.from_thread.run(self._go_on)

    async def _go_on(self) -> None:
        """The program does, meanwhile."""
        for _ in range(self._random.choice((1, 1, 2, 5, 12))):
            if self._notes.steps and self._notes.steps[0][0] == "sync":
                return  # it would wait for the saver, which is where we are
            await self._step()

    async def _save_some(self) -> None:
        """Some contents are copied, and all names that are due are given."""
        saver = self._saver
        for output in [output for output in self._outputs.tree.unsaved() if saver._wants_copy(output)]:
            if self._random.random() < 0.4:
                await saver._copy_once(output, saver._stamps.get(output.inode, (None, 0.0))[0])
        due = list(saver._to_publish)
        saver._to_publish.clear()
        if due:
            assert await saver._publish_batch(due) == {}
        held = list(saver._held)
        saver._held.clear()
        for inode in held:
            saver._enqueue(inode)

    async def _save_until(self, is_done: Callable[[], bool]) -> None:
        """Nothing else is done meanwhile."""
        self._is_waiting = True
        for _ in range(TRIES):
            if is_done():
                break
            await self._save_some()
        else:
            pytest.fail(f"it never comes true: {list(self._outputs.tree.unsaved())}")
        self._is_waiting = False

    # --- the program ---

    async def _step(self) -> None:
        while not self._notes.steps:
            self._author.act()
        kind, *words = self._notes.steps.pop(0)
        begun = getattr(self.model, f"_begun_{kind}") if kind in ("sync", "close") else None
        if begun is not None:
            begun(*words)
        if kind == "create" and words[0] not in self.model.files:
            self.model.unsure.add(words[0])
        await getattr(self, f"_{kind}")(*words)
        self.model.unsure.discard(words[0])
        if kind != "write":
            getattr(self.model, f"_{kind}")(*words)

    def _place(self, name: str) -> tuple[int, bytes]:
        inode = self._top
        *folders, last = name.split("/")
        for folder in folders:
            output = self._outputs.lookup(inode, folder.encode())
            assert output is not None
            inode = output.inode
        return inode, last.encode()

    def _inode(self, name: str) -> int:
        output = self._outputs.lookup(*self._place(name))
        assert output is not None
        return output.inode

    async def _create(self, name: str) -> None:
        inode = await self._outputs.create(*self._place(name), 0o644, exclusive=False)
        await self._outputs.resize(inode, 0)

    async def _write(self, name: str, text: str) -> None:
        await self._outputs.write(self._inode(name), 0, self._author.texts[text])

    async def _close(self, name: str, text: str) -> None:
        await self._outputs.close(self._inode(name))

    async def _sync(self, name: str, text: str) -> None:
        """As Outputs.sync, with this saver."""
        inode, tree = self._inode(name), self._outputs.tree
        self._outputs.contents.mark(inode)
        await self._outputs._make_known(inode, urgent=True)
        output = tree.get(inode)

        def is_safe() -> bool:
            is_copied = output.standing is not None and output.standing.version == output.version
            return is_copied and self._saver._publisher.stands(inode)

        await self._save_until(is_safe)

    async def _utime(self, name: str) -> None:
        await self._outputs.set_attributes(self._inode(name), None, self._random.randrange(10**18))

    async def _unlink(self, name: str) -> None:
        await self._outputs.remove(*self._place(name), directory=False)

    async def _mkdir(self, name: str) -> None:
        self.model.unsure.add(name)
        await self._outputs.make_directory(*self._place(name), 0o755)

    async def _rmdir(self, name: str) -> None:
        await self._outputs.remove(*self._place(name), directory=True)

    async def _rename(self, old: str, new: str) -> None:
        await self._outputs.rename(*self._place(old), *self._place(new), replace=True)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_in(tmp_path_factory.mktemp("histories"))


@pytest.fixture
def quick_syncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    yield


@pytest.mark.usefixtures("quick_syncs")
@pytest.mark.parametrize("group", range(4))
def test_histories(prepared: Path, tmp_path: Path, group: int) -> None:
    for seed in range(group * 1000, group * 1000 + 25):
        (tmp_path / str(seed)).mkdir()
        print(f"history {seed}")  # for whoever looks into a failure
        History(seed, tmp_path / str(seed), stopped=seed % 5 != 0).run(prepared)
