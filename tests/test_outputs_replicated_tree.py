"""The way of a change (outputs/replicated_tree.py): journal, tree, who is told; and files that an engine creates."""

import ast
import errno
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import core_parts
import pytest
import trio
from core_written import prepare_in

import fanstore.outputs.replicated_tree
from fanstore.outputs.engine import Created, Engine
from fanstore.outputs.journal import Journal, Owner, read_journal
from fanstore.outputs.local_contents import Content, LocalContents, Stamp
from fanstore.outputs.output import FIRST_OUTPUT
from fanstore.outputs.output_dir import OutputDir
from fanstore.outputs.outputs import Outputs
from fanstore.outputs.path_limit import PathLimit
from fanstore.outputs.replicated_tree import Observer, ReplicatedTree
from fanstore.outputs.tree import Effect, Operation, OutputTree, RefusedError

ROOT, FILE, FOLDER = 1, stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755


class Watcher(Observer):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, int]] = []
        self.stamps: list[Stamp | None] = []
        self.settled: list[int] = []

    def applied(self, operation: Operation, effect: Effect) -> None:
        self.told.append(("applied", operation[0], effect.result))

    def learned(self, operation: Operation, effect: Effect, stamp: Stamp | None) -> None:
        self.told.append(("learned", operation[0], effect.result))
        self.stamps.append(stamp)

    async def settle(self, effect: Effect) -> None:
        await trio.lowlevel.checkpoint()
        self.settled.append(effect.result)


class Creating(Engine):
    """An engine that creates files by itself, as the native one does.

    Attributes:
        turn: whether Python has it. owned, disowned: files whose contents it may note, or not.
        names: what it was told of.
    """

    def __init__(self) -> None:
        self.turn = False
        self.owned: list[int] = []
        self.disowned: list[int] = []
        self.names: set[tuple[int, bytes]] = set()
        self.next = 0
        self.ends: list[int] = []
        self._created: list[Created] = []

    def create(self, name: bytes) -> int:
        assert not self.turn and self.next
        self._created.append((self.next, ROOT, name, FILE, time.time_ns(), None))
        self.next += 1
        return self.next - 1

    def close(self, inode: int, size: int) -> None:
        assert not self.turn
        self._created.append((inode, 0, b"", 0, 0, (size, 7, 9)))

    def add_name(self, parent: int, name: bytes, directory: int) -> None:
        self.names.add((parent, name))

    def remove_name(self, parent: int, name: bytes) -> None:
        self.names.remove((parent, name))

    def has_creates(self) -> bool:
        return bool(self._created)

    def take_creates(self) -> Sequence[Created]:
        created, self._created = self._created, []
        return created

    def begin_turn(self) -> tuple[Sequence[Created], int]:
        assert not self.turn
        self.turn = True
        return self.take_creates(), -1

    def disown(self, inode: int) -> None:
        assert self.turn
        self.disowned.append(inode)

    def own(self, inode: int) -> None:
        assert self.turn
        self.owned.append(inode)

    def end_turn(self, next_inode: int, journal_end: int) -> None:
        assert self.turn
        self.turn, self.next = False, next_inode
        self.ends.append(journal_end)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_in(tmp_path_factory.mktemp("replicated"))


class World:
    """One node's tree, watched by two."""

    def __init__(self, namespace: Any, directory: Path) -> None:
        self.path = directory / "journal"
        self.journal = Journal.make(self.path, Owner("job", 0, "output", "copies"))
        tree = OutputTree(namespace)
        self.limit = PathLimit(tree, namespace, directory)
        self.names = ReplicatedTree(tree, namespace, self.journal, None, self.limit)
        self.first, self.second = Watcher(), Watcher()
        self.names.observers = (self.first, self.second)

    def decide(self, *operation: Any) -> int:
        return trio.run(self.names.decide, operation)

    def noted(self) -> list[Any]:
        return [record.value[0] if record.kind == "op" else record.kind for record in read_journal(self.path)[2]]


@pytest.fixture
def world(prepared: Path, tmp_path: Path) -> Iterator[World]:
    with core_parts.opened(prepared) as parts:
        world = World(parts.namespace, tmp_path)
        yield world
        world.names.tree.validate()
        world.journal.close()


def test_who_watches_is_told_in_order(world: World) -> None:
    folder = world.decide("create", ROOT, b"folder", FOLDER, 1, 0, True)
    file = world.decide("create", folder, b"file", FILE, 1, 0, True)
    assert (folder, file) == (FIRST_OUTPUT, FIRST_OUTPUT + 1)
    assert world.first.told == [("applied", "create", folder), ("applied", "create", file)]
    assert world.second.told == world.first.told
    assert world.noted() == ["dir", "create", "create"], "each before it happened, and where the dataset's directory is"
    trio.run(world.names.settle, Effect(7))
    assert world.first.settled == world.second.settled == [7]


def test_what_is_refused_is_told_to_nobody(world: World) -> None:
    world.decide("create", ROOT, b"name", FILE, 1, 0, True)
    for operation, number in (
        (("create", ROOT, b"name", FILE, 1, 0, True), errno.EEXIST),
        (("remove", ROOT, b"nothing", False, 1), errno.ENOENT),
        (("create", ROOT, b"data", FOLDER, 1, 0, True), errno.EEXIST),
    ):
        with pytest.raises(RefusedError) as raised:
            world.decide(*operation)
        assert raised.value.number == number
    assert len(world.first.told) == 1
    assert world.noted() == ["dir", "create"], "nor does the journal have it"


def test_it_knows_none_of_those_who_watch() -> None:
    """What changes names imports nothing of what is done about it."""
    tree = ast.parse(Path(fanstore.outputs.replicated_tree.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    watching = {f"fanstore.outputs.{name}" for name in ("saver", "publisher", "kernel_notify", "outputs", "recovery")}
    assert "fanstore.outputs.tree" in imported and not imported & watching


# --- files that an engine creates ---


def test_what_was_created_is_known_before_anything_changes(world: World) -> None:
    engine = Creating()
    world.decide("create", ROOT, b"before", FILE, 1, 0, True)
    world.names.use_engine(engine)
    files = [engine.create(b"new-%d" % number) for number in range(3)]
    engine.close(files[1], 5)
    assert files == [FIRST_OUTPUT + number for number in (1, 2, 3)], "the numbers that the tree would give"
    after = world.decide("create", ROOT, b"after", FILE, 1, 0, True)
    assert after == FIRST_OUTPUT + 4 and engine.next == FIRST_OUTPUT + 5
    learned = [("learned", "create", inode) for inode in files] + [("learned", "commit", files[1])]
    assert world.first.told[1:] == [*learned, ("applied", "create", after)]
    assert world.first.stamps == [None, None, None, Stamp(5, 9, 7)]
    assert (world.names.tree.get(files[1]).size, world.names.tree.get(files[1]).version) == (5, 1)
    assert world.noted() == ["dir", "create", "create"], "the engine has noted its own"
    assert engine.ends[-1] == world.journal.end == world.path.stat().st_size


def test_catching_up(world: World) -> None:
    engine = Creating()
    world.names.use_engine(engine)
    world.names.catch_up()
    inode = engine.create(b"new")
    assert world.names.tree.lookup(ROOT, b"new") is None
    world.names.catch_up()
    output = world.names.tree.lookup(ROOT, b"new")
    assert output is not None and output.inode == inode and not engine.turn
    world.names.use_engine(Engine())
    assert world.decide("create", ROOT, b"other", FILE, 1, 0, True) == inode + 1


def test_a_turn_ends_whatever_happens(world: World) -> None:
    """And what was created before it is known, although the operation is refused."""
    engine = Creating()
    world.names.use_engine(engine)
    inode = engine.create(b"new")
    with pytest.raises(RefusedError):
        world.decide("create", ROOT, b"new", FILE, 1, 0, True)
    assert not engine.turn and engine.next == inode + 1
    assert world.names.tree.get(inode).place == (ROOT, b"new")


def test_what_python_notes_or_removes(world: World) -> None:
    engine = Creating()
    world.names.use_engine(engine)
    first, second, third = (engine.create(name) for name in (b"a", b"b", b"c"))
    world.names.take_back(first)
    assert (engine.disowned, engine.owned) == ([first], [])
    world.decide("commit", first, 3, 1, 0)
    assert engine.owned == [first]
    world.decide("remove", ROOT, b"b", False, 1)
    world.decide("rename", ROOT, b"c", ROOT, b"d", True, 1)
    assert engine.disowned == [first, second]
    assert world.names.tree.get(third).place == (ROOT, b"d")


def test_only_one_of_the_two_notes_a_content(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes a file back before it looks at it, or it could note an old content after the engine's newer one."""
    with core_parts.opened(prepared) as parts:
        contents = LocalContents(tmp_path / "contents")
        (tmp_path / "out").mkdir()
        journal = Journal.make(tmp_path / "journal", Owner("job", 0, str(tmp_path / "out"), "copies"))
        output_dir = OutputDir(tmp_path / "out", "copies", 0)
        outputs, engine = Outputs(parts.namespace, None, contents, journal, output_dir, durable=False), Creating()
        outputs.use_engine(engine)
        inode = engine.create(b"new")
        outputs.catch_up()
        contents.make(inode)
        looked_at = contents.find

        def find(inode: int) -> Content | None:
            assert engine.disowned == [inode], "the engine may note it meanwhile"
            return looked_at(inode)

        monkeypatch.setattr(contents, "find", find)
        trio.run(outputs.close, inode)
        assert engine.owned == [inode]
        journal.close()


def test_all_parts_together(prepared: Path, tmp_path: Path) -> None:
    """Outputs with an engine: names that it has created itself are not told to it again, all others are."""
    with core_parts.opened(prepared) as parts:
        contents = LocalContents(tmp_path / "contents")
        journal = Journal.make(tmp_path / "journal", Owner("job", 0, "", ""))
        outputs, engine = Outputs(parts.namespace, None, contents, journal, None), Creating()
        trio.run(outputs.make_directory, ROOT, b"early", 0o755)
        outputs.use_engine(engine)
        assert engine.names == {(ROOT, b"early")}
        inode = engine.create(b"new")
        contents.make(inode)
        engine.names.add((ROOT, b"new"))
        trio.run(outputs.make_directory, ROOT, b"late", 0o755)
        assert engine.names == {(ROOT, b"early"), (ROOT, b"new"), (ROOT, b"late")}
        assert outputs.describe()["files"] == 1 and outputs.kernel.attributes(inode).nlink == 1
        trio.run(lambda: outputs.remove(ROOT, b"new", directory=False))
        assert (ROOT, b"new") not in engine.names
        assert outputs.kernel.get(inode).place is None and contents.find(inode) is not None, "the kernel knows it"
        outputs.kernel.forget(inode, 1)
        assert contents.find(inode) is None
        journal.close()
        contents.close()


def test_threads_that_list_contents_see_all_of_them(tmp_path: Path) -> None:
    """Whoever asks what is open for writing does so in a thread, while another one lists what is to be made known."""
    contents = LocalContents(tmp_path / "contents")
    wanted = set(range(FIRST_OUTPUT, FIRST_OUTPUT + 1500))
    for inode in wanted:
        contents.make(inode)
    with ThreadPoolExecutor(4) as threads:
        listed = list(threads.map(lambda _: set(contents.all()), range(100)))
    assert all(each == wanted for each in listed)
    contents.close()
