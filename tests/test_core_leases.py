"""Directories that are lent to the node that fills them (core/leases.py): the core of several nodes, without mounts.

What the native engine does with a lent directory is done here by ``Engine``: it creates and closes files by itself, as
native/outputbirths.h has it. Time is trio's MockClock: a minute is a moment.
"""

import errno
import functools
import stat
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import core_parts
import pytest
import trio
import trio.testing
from core_written import prepare_in

from fanstore.core.births import Birth
from fanstore.core.council import OUTPUT_QUESTION
from fanstore.core.journal import Journal, Owner
from fanstore.core.leases import SERIES
from fanstore.core.namespace import Attributes
from fanstore.core.objects import Objects
from fanstore.core.output import FIRST_OUTPUT, Output, Place
from fanstore.core.outputs import Outputs, OutputSettings
from fanstore.core.outputtree import RefusedError
from fanstore.transport.inprocess import Network

ROOT = 1
NAMES = tuple(b"n%d" % number for number in range(6))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_in(tmp_path_factory.mktemp("leases"))


class Engine:
    """Creator and Kernel of one node.

    Attributes:
        cards: directories that it may answer for. lent: those in which it creates. created: how many files so far.
        names: what it knows, counted. unclosed: what it has created and may close.
    """

    def __init__(self, objects: Path) -> None:
        self.cards: set[int] = set()
        self.lent: set[int] = set()
        self.names: dict[tuple[int, bytes], int] = {}
        self.unclosed: set[int] = set()
        self.created = 0
        self._objects = objects
        self._births: list[Birth] = []
        self._numbers = range(0)

    # --- a program ---

    def create(self, parent: int, name: bytes) -> int | None:
        """None if Python must."""
        if parent not in self.lent or not self._numbers or self.names.get((parent, name)):
            return None
        inode = self._numbers[0]
        self._numbers = self._numbers[1:]
        (self._objects / f"{inode:x}").touch(exist_ok=False)
        self.names[parent, name] = 1
        self._births.append((inode, parent, name, stat.S_IFREG | 0o644, time.time_ns(), None))
        self.unclosed.add(inode)
        self.created += 1
        return inode

    def close(self, inode: int) -> bool:
        if inode not in self.unclosed:
            return False
        self.unclosed.remove(inode)
        facts = (self._objects / f"{inode:x}").stat()
        self._births.append((inode, 0, b"", 0, 0, (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)))
        return True

    # --- Creator ---

    def has_births(self) -> bool:
        return bool(self._births)

    def take_births(self) -> Sequence[Birth]:
        births, self._births = self._births, []
        return births

    def begin_turn(self) -> tuple[Sequence[Birth], int]:
        return self.take_births(), -1

    def disown(self, inode: int) -> None:
        self.unclosed -= {inode} if inode else set(self.unclosed)

    def lend(self, directory: int, lent: bool) -> None:
        assert not lent or directory in self.cards
        self.lent -= {directory}
        self.lent |= {directory} if lent else set()

    def end_turn(self, next_inode: int, end_inode: int, journal_end: int) -> None:
        self._numbers = range(next_inode, end_inode)

    # --- Kernel ---

    def appeared(self, place: Place, output: Output) -> None:
        self.names[place] = self.names.get(place, 0) + 1
        assert self.names[place] == 1, "a name that is known already"

    def vanished(self, place: Place) -> None:
        self.names[place] -= 1
        assert self.names[place] == 0

    def changed(self, directory: Attributes) -> None:
        self.cards.add(directory.inode)

    def removed(self, inode: int) -> int:
        self.cards.discard(inode)
        self.lent.discard(inode)
        return 0

    def told(self, inode: int) -> int:
        return 0

    def dropped(self, inode: int) -> None:
        return

    async def settle(self, inodes: dict[int, bool]) -> None:
        await trio.lowlevel.checkpoint()


class Node:
    """One node; also what its transport asks (Host)."""

    def __init__(self, network: Network, rank: int, namespace: Any, directory: Path) -> None:
        directory.mkdir()
        self.rank = rank
        self.journal = Journal.make(directory / "journal", Owner("job", rank, "", "copies"))
        self.objects = Objects(directory / "objects")
        self.outputs = Outputs(
            namespace, network.peers(rank), self.objects, self.journal, None, OutputSettings(durable=False)
        )
        self.engine = Engine(directory / "objects")
        self.outputs.use_kernel(self.engine, self.engine)
        network.peers(rank).serve(self)

    def mapped_partition(self, partition: int) -> memoryview | None:
        return None

    async def answer(self, peer: int, question: bytes) -> bytes:
        assert question.startswith(OUTPUT_QUESTION)
        return await self.outputs.answer(peer, question)

    def heard(self, peer: int, word: bytes) -> None:
        return

    def lost(self, peer: int) -> None:
        self.outputs.lost(peer)

    # --- what programs do; each as the fuse layer has it ---

    async def write(self, parent: int, name: bytes, content: bytes) -> int:
        inode = await self.open_new(parent, name)
        await self.finish(inode, content)
        return inode

    async def open_new(self, parent: int, name: bytes) -> int:
        """Exclusively. Raises RefusedError."""
        inode = self.engine.create(parent, name)
        if inode is not None:
            return inode
        self.outputs.births.take_over()
        return await self.outputs.create(parent, name, 0o644, exclusive=True)

    async def finish(self, inode: int, content: bytes) -> None:
        (self.objects.path / f"{inode:x}").write_bytes(content)
        if not self.engine.close(inode):
            self.outputs.births.take_over()
            await self.outputs.close(inode)

    async def look(self, parent: int, name: bytes) -> Output | None:
        """LOOKUP. Without Python only if the engine may answer."""
        if (parent < FIRST_OUTPUT or parent in self.engine.cards) and not self.engine.names.get((parent, name)):
            return None
        self.outputs.births.take_over()
        await self.outputs.leases.clear_name(parent, name)
        return self.outputs.lookup(parent, name)

    async def list(self, directory: int) -> set[bytes]:
        self.outputs.births.take_over()
        await self.outputs.leases.clear(directory)
        return {child.name for child in self.outputs.children(directory, 0)}

    async def read(self, parent: int, name: bytes) -> bytes | None:
        output = await self.look(parent, name)
        if output is None:
            return None
        size = self.outputs.attributes(output.inode).size
        return bytes(await self.outputs.read(output.inode, 0, size))


class Cluster:
    """All nodes of a job."""

    def __init__(self, size: int, namespace: Any, directory: Path) -> None:
        self.network = Network(size)
        self.nodes = [Node(self.network, rank, namespace, directory / str(rank)) for rank in range(size)]
        self._scopes = [trio.CancelScope() for _ in range(size)]

    async def run(self, rank: int) -> None:
        with self._scopes[rank]:
            await self.nodes[rank].outputs.run()

    def kill(self, rank: int) -> None:
        self.network.kill(rank)
        self._scopes[rank].cancel()

    def living(self) -> list[Node]:
        return [node for node in self.nodes if not self.network.peers(node.rank).is_dead]

    async def check(self) -> None:
        """When all is told, all that live have the same tree."""
        for node in self.living():
            await node.outputs.leases.tell()
        trees = [node.outputs.tree for node in self.living()]
        for tree in trees:
            tree.validate()
            assert tree.lent == trees[0].lent and tree.next_inode == trees[0].next_inode
            assert facts(tree) == facts(trees[0])
        for node in self.living():
            tree = node.outputs.tree
            assert node.engine.lent == {inode for inode, rank in tree.lent.items() if rank == node.rank}
            known = {place for place, count in node.engine.names.items() if count}
            assert known == {output.place for output in tree.outputs.values() if output.place is not None}
            for inode, output in tree.outputs.items():
                if output.is_directory and output.place is not None:
                    assert (inode in node.engine.cards) == (tree.lent.get(inode, node.rank) == node.rank)


def facts(tree: Any) -> dict[int, tuple[object, ...]]:
    return {
        inode: (output.place, output.mode, output.size, output.version, output.holder, output.mtime_ns)
        for inode, output in tree.outputs.items()
    }


@asynccontextmanager
async def cluster(prepared: Path, directory: Path, size: int = 3):  # type: ignore[no-untyped-def]
    with ExitStack() as stack:
        parts = stack.enter_context(core_parts.opened(prepared))
        made = Cluster(size, parts.namespace, directory)
        async with trio.open_nursery() as nursery:
            for node in made.nodes:
                nursery.start_soon(made.run, node.rank)
            yield made
            await made.check()
            nursery.cancel_scope.cancel()
        for node in made.nodes:
            made.network.peers(node.rank).close(1.0)
            node.journal.close()
            node.objects.close()


def with_mock_clock(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        trio.run(functools.partial(test, **arguments), clock=trio.testing.MockClock(autojump_threshold=0))

    return run


async def borrow(node: Node, name: bytes = b"folder") -> int:
    """A new directory that is lent to a node, with some files in it."""
    directory = await node.outputs.make_directory(ROOT, name, 0o755)
    for number in range(SERIES + 5):
        await node.write(directory, b"first %d" % number, b"x")
    assert directory in node.engine.lent and node.engine.created == 5
    return directory


@with_mock_clock
async def test_a_directory_is_lent_to_whoever_fills_it(prepared: Path, tmp_path: Path) -> None:
    async with cluster(prepared, tmp_path) as made:
        first, second, third = made.nodes
        directory = await borrow(second)
        assert first.outputs.tree.lent == {directory: 1}
        assert all(directory not in node.engine.cards for node in (first, third)), "they ask first"
        assert len(third.outputs.tree.children(directory)) < SERIES + 5, "it was told, and nobody has asked"
        assert len(await third.list(directory)) == SERIES + 5
        assert third.outputs.tree.lent == {} and not second.engine.lent


@with_mock_clock
async def test_others_are_told_by_and_by(prepared: Path, tmp_path: Path) -> None:
    async with cluster(prepared, tmp_path) as made:
        first, second, _ = made.nodes
        directory = await borrow(second)
        second.outputs.births.take_over()
        await trio.sleep(2.0)
        assert len(first.outputs.tree.children(directory)) == SERIES + 5
        assert first.outputs.tree.lent == {directory: 1}, "which does not end it"


@with_mock_clock
async def test_who_only_wants_to_know_takes_nothing_away(prepared: Path, tmp_path: Path) -> None:
    async with cluster(prepared, tmp_path) as made:
        first, second, _ = made.nodes
        directory = await borrow(second)
        await first.outputs.leases.hear()
        assert len(first.outputs.tree.children(directory)) == SERIES + 5
        assert first.outputs.tree.lent == {directory: 1} and directory in second.engine.lent
        assert second.outputs.describe()["lent"] == 1 and first.outputs.describe()["lent"] == 0
        made.network.stop(1)
        await first.outputs.leases.hear()
        made.network.cont(1)


@with_mock_clock
async def test_directories_of_the_dataset_are_not_lent(prepared: Path, tmp_path: Path) -> None:
    async with cluster(prepared, tmp_path) as made:
        for number in range(5 * SERIES):
            await made.nodes[1].write(ROOT, b"%d" % number, b"x")
        assert made.nodes[1].engine.created == 0 and made.nodes[0].outputs.tree.lent == {}


@with_mock_clock
async def test_what_is_closed_is_seen(prepared: Path, tmp_path: Path) -> None:
    """Also if it was open when the directory was given back, or has left it since."""
    async with cluster(prepared, tmp_path) as made:
        first, second, third = made.nodes
        directory = await borrow(second)
        opened = [await second.open_new(directory, b"open %d" % number) for number in range(4)]
        assert second.engine.unclosed == set(opened)
        await second.outputs.rename(directory, b"open 0", ROOT, b"moved", replace=True)
        await second.finish(opened[0], b"content 0")
        assert await first.read(ROOT, b"moved") == b"content 0"
        assert first.outputs.tree.lent == {directory: 1}
        await second.finish(opened[1], b"content 1")
        assert await third.read(directory, b"open 1") == b"content 1"
        assert third.outputs.tree.lent == {}
        await second.finish(opened[3], b"content 3")
        assert await third.read(directory, b"open 3") == b"content 3"
        for number in range(4 * SERIES):
            await second.write(directory, b"more %d" % number, b"x")
        assert directory in second.engine.lent, "borrowed once more"
        await second.finish(opened[2], b"content 2")
        found = await first.read(directory, b"open 2")
        assert found == b"content 2"


@with_mock_clock
async def test_each_time_more_files_are_needed(prepared: Path, tmp_path: Path) -> None:
    async with cluster(prepared, tmp_path) as made:
        first, second, _ = made.nodes
        directory = await borrow(second)
        for attempt in range(1, 4):
            await first.list(directory)
            before = second.engine.created
            for number in range(SERIES * 2**attempt):
                await second.write(directory, b"%d %d" % (attempt, number), b"x")
            assert second.engine.created == before
            await second.write(directory, b"%d" % attempt, b"x")
            assert second.engine.created == before + 1


@with_mock_clock
async def test_removing_directories(prepared: Path, tmp_path: Path) -> None:
    async with cluster(prepared, tmp_path) as made:
        first, second, third = made.nodes
        directory = await borrow(second)
        for node in (first, second):
            with pytest.raises(RefusedError, match="ENOTEMPTY"):
                await node.outputs.remove(ROOT, b"folder", directory=True)
        for name in await third.list(directory):
            await third.outputs.remove(directory, name, directory=False)
        await second.outputs.remove(ROOT, b"folder", directory=True)
        directory = await borrow_again(second)
        for name in await second.list(directory):
            await second.outputs.remove(directory, name, directory=False)
        assert directory in second.engine.lent
        await second.outputs.remove(ROOT, b"again", directory=True)
        assert all(not node.outputs.tree.lent for node in made.nodes)
        with pytest.raises(RefusedError, match="ENOENT"):
            await first.outputs.create(directory, b"late", 0o644, exclusive=True)


async def borrow_again(node: Node) -> int:
    directory = await node.outputs.make_directory(ROOT, b"again", 0o755)
    for number in range(SERIES + 5):
        await node.write(directory, b"first %d" % number, b"x")
    assert directory in node.engine.lent
    return directory


@with_mock_clock
async def test_one_winner(prepared: Path, tmp_path: Path) -> None:
    """All nodes create the same names at the same time, in a directory that goes from one to the other."""
    async with cluster(prepared, tmp_path) as made:
        directory = await made.nodes[0].outputs.make_directory(ROOT, b"folder", 0o755)
        winners: dict[bytes, list[int]] = {}

        async def create_all(node: Node) -> None:
            for number in range(120):
                name = b"%d" % number
                try:
                    inode = await node.open_new(directory, name)
                except RefusedError as error:
                    assert error.number == errno.EEXIST
                    continue
                winners.setdefault(name, []).append(node.rank)
                await node.finish(inode, b"by %d" % node.rank)
                if number % 10 == node.rank:
                    await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            for node in made.nodes:
                nursery.start_soon(create_all, node)
        assert len(winners) == 120 and all(len(ranks) == 1 for ranks in winners.values())
        for node in made.nodes:
            for name, [rank] in winners.items():
                assert await node.read(directory, name) == b"by %d" % rank


@pytest.mark.parametrize("rank", [0, 1])
@with_mock_clock
async def test_a_holder_that_dies(prepared: Path, tmp_path: Path, rank: int) -> None:
    """Whether it decides or not: others go on in its directory, with what they had seen."""
    async with cluster(prepared, tmp_path) as made:
        holder = made.nodes[rank]
        directory = await borrow(holder)
        seen = await made.nodes[2].list(directory)
        for number in range(2 * SERIES + 1):
            await holder.write(directory, b"%d" % number, b"x")
        assert directory in holder.engine.lent
        made.kill(rank)
        assert await made.nodes[2].list(directory) >= seen
        assert made.nodes[2].outputs.tree.lent == {}
        await made.nodes[2].write(directory, b"after", b"y")
        other = made.nodes[1 - rank]
        assert await other.read(directory, b"after") == b"y"


@with_mock_clock
async def test_the_deciding_node_dies(prepared: Path, tmp_path: Path) -> None:
    """Whoever has a directory keeps it, and nothing of what it creates is lost."""
    async with cluster(prepared, tmp_path) as made:
        _, second, third = made.nodes
        directory = await borrow(second)
        made.kill(0)
        await second.write(directory, b"after", b"y")
        assert directory in second.engine.lent
        assert await third.read(directory, b"after") == b"y"
        assert await third.list(directory) == {b"after", *(b"first %d" % number for number in range(SERIES + 5))}


@with_mock_clock
async def test_a_node_that_lives_keeps_what_it_has(prepared: Path, tmp_path: Path) -> None:
    async with cluster(prepared, tmp_path) as made:
        directory = await borrow(made.nodes[1])
        with pytest.raises(RefusedError, match="EBUSY"):
            await made.nodes[2].outputs._council.decide(("revoke", 1))
        assert made.nodes[2].outputs.tree.lent == {directory: 1}


@with_mock_clock
async def test_new_numbers(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanstore.core.leases.NUMBERS", 20)
    monkeypatch.setattr("fanstore.core.leases.NUMBERS_FEW", 2)
    async with cluster(prepared, tmp_path) as made:
        second = made.nodes[1]
        directory = await borrow(second)
        for number in range(100):
            await second.write(directory, b"%d" % number, b"x")
        assert second.engine.created > 90
        assert len(await made.nodes[0].list(directory)) == 100 + SERIES + 5


@pytest.mark.parametrize("kind", ["commit", "setattr"])
@with_mock_clock
async def test_closed_while_python_makes_it_known(prepared: Path, tmp_path: Path, kind: str) -> None:
    """A child process closes its copy of a descriptor while another one syncs the file, or sets its time: one order."""
    async with cluster(prepared, tmp_path) as made:
        first, second, _ = made.nodes
        directory = await borrow(second)
        inode = await second.open_new(directory, b"shared")
        (second.objects.path / f"{inode:x}").write_bytes(b"content")
        second.outputs.births.take_over()
        async with trio.open_nursery() as nursery:
            if kind == "commit":
                nursery.start_soon(second.outputs._make_known, inode, True)
            else:
                nursery.start_soon(second.outputs.set_attributes, inode, None, 12_345)
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            closed = second.engine.close(inode)
        if not closed:
            await second.outputs.close(inode)
        await first.outputs.leases.hear()
        assert facts(first.outputs.tree)[inode] == facts(second.outputs.tree)[inode]
        assert await first.read(directory, b"shared") == b"content"


@with_mock_clock
async def test_a_change_that_is_decided_too_late(prepared: Path, tmp_path: Path) -> None:
    """Its program was told that it failed, and may create the name: not without asking, or there would be two."""
    async with cluster(prepared, tmp_path) as made:
        _, second, third = made.nodes
        directory = await borrow(second)
        await second.outputs.leases.tell()
        made.network.stop(0)
        with pytest.raises(RefusedError, match="ETIMEDOUT"):
            await second.outputs.make_directory(directory, b"late", 0o755)
        assert second.engine.create(directory, b"late") is None and not second.engine.lent
        made.network.cont(0)
        with trio.fail_after(60):
            while second.outputs.lookup(directory, b"late") is None:  # noqa: ASYNC110 -- of another node, no event
                await trio.sleep(0.1)
        with pytest.raises(RefusedError, match="EEXIST"):
            await second.open_new(directory, b"late")
        for number in range(4 * SERIES):
            await second.write(directory, b"after %d" % number, b"x")
        assert directory in second.engine.lent, "lent anew"
        assert len(await third.list(directory)) == SERIES + 5 + 1 + 4 * SERIES


class Walker:
    """Does random things on random nodes, one after the other, beside a model."""

    def __init__(self, made: Cluster, random: Random) -> None:
        self.made = made
        self.random = random
        self.model: dict[bytes, dict[bytes, bytes]] = {}
        self.directories: dict[bytes, int] = {}

    async def step(self) -> None:
        node = self.random.choice(self.made.living())
        if not self.model or self.random.random() < 0.03:
            name = b"d%d" % len(self.model)
            self.directories[name] = await node.outputs.make_directory(ROOT, name, 0o755)
            self.model[name] = {}
            return
        folder = self.random.choice(sorted(self.model))
        steps = [self.burst] * 3 + [self.look] * 2 + [self.list, self.remove, self.rename]
        await self.random.choice(steps)(node, folder)

    async def burst(self, node: Node, folder: bytes) -> None:
        for _ in range(self.random.choice((1, 3, 2 * SERIES))):
            name = b"f%d" % self.random.randrange(60)
            content = self.random.randbytes(self.random.randrange(20))
            if name in self.model[folder]:
                with pytest.raises(RefusedError, match="EEXIST"):
                    await node.open_new(self.directories[folder], name)
            else:
                await node.write(self.directories[folder], name, content)
                self.model[folder][name] = content

    async def look(self, node: Node, folder: bytes) -> None:
        name = b"f%d" % self.random.randrange(60)
        assert await node.read(self.directories[folder], name) == self.model[folder].get(name)

    async def list(self, node: Node, folder: bytes) -> None:
        assert await node.list(self.directories[folder]) == set(self.model[folder])

    async def remove(self, node: Node, folder: bytes) -> None:
        name = b"f%d" % self.random.randrange(60)
        if self.model[folder].pop(name, None) is None:
            with pytest.raises(RefusedError, match="ENOENT"):
                await node.outputs.remove(self.directories[folder], name, directory=False)
        else:
            await node.outputs.remove(self.directories[folder], name, directory=False)

    async def rename(self, node: Node, folder: bytes) -> None:
        if not self.model[folder]:
            return
        old = self.random.choice(sorted(self.model[folder]))
        other = self.random.choice(sorted(self.model))
        new = b"f%d" % self.random.randrange(60)
        await node.outputs.rename(self.directories[folder], old, self.directories[other], new, replace=True)
        content = self.model[folder].pop(old)
        self.model[other][new] = content


@pytest.mark.parametrize("seed", range(12))
@with_mock_clock
async def test_random_steps(prepared: Path, tmp_path: Path, seed: int) -> None:
    """Whatever is done on whichever node, all others see it at once; in the end all have the same tree."""
    random = Random(seed)
    async with cluster(prepared, tmp_path, random.choice((2, 3, 4))) as made:
        walker = Walker(made, random)
        for number in range(300):
            await walker.step()
            if number % 50 == 0:
                await trio.sleep(random.choice((0.0, 0.1, 2.0)))
        assert sum(node.engine.created for node in made.nodes) > 50
