"""Copies are restored after deaths, through the core: from whom, to whom, and what comes in between."""

import contextlib
import logging
import os
import random
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import oddities
import pytest
import trio
import trio.testing
from core_cluster import Cluster, Member, cluster
from mounting import prepare

from fanstore.dataset import restoring
from fanstore.dataset.store import PartitionStore
from fanstore.format.prepared import PreparedDataset
from fanstore.job import copies as copies_module
from fanstore.telemetry.statistics import Source

ExpectWarnings = Callable[..., None]

CONTENTS = {f"d/{number:02d}": oddities.incompressible(60_000 + 7 * number, number) for number in range(36)}
PARTITIONS = 9


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("copies")
    (base / "tree" / "d").mkdir(parents=True)
    for name, content in CONTENTS.items():
        (base / "tree" / name).write_bytes(content)
    return prepare(base / "tree", base / "d.fan", "--partitions", str(PARTITIONS))


@pytest.fixture
def prepared(original: Path, tmp_path: Path) -> Path:
    """One of which a test may take the partitions away."""
    return shutil.copytree(original, tmp_path / "d.fan")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ranges without a pause: what is tested here does not depend on time."""
    monkeypatch.setattr(copies_module, "SETTLE_S", 0.05)
    monkeypatch.setattr(copies_module, "RETRY_S", 0.02)
    monkeypatch.setattr(restoring, "PARTS", 0.0)
    monkeypatch.setattr(restoring, "RANGE_BYTES", 16 << 10)


class Work:
    """The tasks that restore, one per node; a node that is killed does nothing any more."""

    def __init__(self, job: Cluster, nursery: trio.Nursery) -> None:
        self.job = job
        self.dead: set[int] = set()
        self.ended = [trio.Event() for _ in job.nodes]
        self._scopes = [trio.CancelScope() for _ in job.nodes]
        for node in job.nodes:
            nursery.start_soon(self._run, node)

    async def _run(self, node: Member) -> None:
        with self._scopes[node.rank]:
            await node.copies.run(())
        self.ended[node.rank].set()

    def stop(self, rank: int) -> None:
        self._scopes[rank].cancel()

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.dead.add(rank)
            self.stop(rank)
            self.job.network.kill(rank)

    def living(self) -> list[Member]:
        return [node for node in self.job.nodes if node.rank not in self.dead]

    def holders(self) -> list[list[int]]:
        """Per partition who really has it."""
        return [[node.rank for node in self.living() if node.store.is_local(p)] for p in range(PARTITIONS)]

    async def wait(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 -- of several nodes, none of which knows that a test waits
            await trio.sleep(0.005)

    async def wait_copies(self, count: int) -> None:
        """Until there are so many of each, and nobody knows of more to do."""
        await self.wait(lambda: all(len(ranks) >= count for ranks in self.holders()))
        await self.wait(lambda: not any(node.copies.statistics()["missing_copies"] for node in self.living()))

    def total(self, key: str) -> int:
        return sum(int(str(node.copies.statistics()[key])) for node in self.living())

    async def check_reads(self) -> None:
        """All is read on all nodes, and only from nodes."""
        for node in self.living():
            for name, content in CONTENTS.items():
                assert await node.read(name) == content
            assert node.reads(Source.SHARED) == 0


@asynccontextmanager
async def working(job: Cluster) -> AsyncIterator[Work]:
    with trio.fail_after(15):
        async with trio.open_nursery() as nursery:
            yield Work(job, nursery)
            nursery.cancel_scope.cancel()


def hide_partitions(prepared: Path) -> None:
    for path in prepared.glob("part-*.tar"):
        path.rename(path.with_suffix(".gone"))


def test_deaths_one_after_the_other(prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with cluster(prepared, tmp_path, size=4, replicas=2) as job, working(job) as work:
            hide_partitions(prepared)
            for victim in (2, 0):
                before = work.holders()
                work.kill(victim)
                await work.wait_copies(2)
                assert [len(ranks) for ranks in work.holders()] == [2] * PARTITIONS, "none too many"
                kept = zip(before, work.holders(), strict=True)
                assert all(set(had) - {victim} <= set(has) for had, has in kept), "what was there stays"
                await work.check_reads()
            work.kill(1)
            await work.check_reads()
            assert work.total("shared_bytes") == 0 and work.total("failed_partitions") == 0

    with caplog.at_level(logging.INFO):
        trio.run(main)
    said = [record.getMessage() for record in caplog.records if record.name.endswith("copies")]
    began = re.compile(r"\d partitions \(.*\) of rank 2 on node2 are copied again, to 2 nodes")
    assert sum(began.fullmatch(line) is not None for line in said) == 3, "each of the living says so once"
    assert said.count("all partitions have 2 copies again") == 3 + 2


def test_two_at_once(prepared: Path, tmp_path: Path) -> None:
    """What only these two had comes from the shared file system, once; all else from the copies that are left."""

    async def main() -> None:
        async with cluster(prepared, tmp_path, size=4, replicas=2) as job, working(job) as work:
            victims = job.placement.holders[0]
            orphans = [p for p, ranks in enumerate(job.placement.holders) if ranks == victims]
            work.kill(*victims)
            await work.wait_copies(2)
            assert work.total("shared_bytes") == sum(job.placement.partition_bytes[p] for p in orphans)
            await work.check_reads()

    trio.run(main)


def test_one_copy_each(prepared: Path, tmp_path: Path) -> None:
    """With --replicas 1 nothing is left of it but the shared file system, which is read once for it."""

    async def main() -> None:
        async with cluster(prepared, tmp_path, size=3, replicas=1) as job, working(job) as work:
            work.kill(0)
            await work.wait_copies(1)
            assert [len(ranks) for ranks in work.holders()] == [1] * PARTITIONS
            assert work.total("shared_bytes") == job.placement.bytes_of_rank(0)
            hide_partitions(prepared)
            await work.check_reads()

    trio.run(main)


@pytest.mark.parametrize("seed", range(6))
def test_deaths_that_are_heard_of_in_any_order(prepared: Path, tmp_path: Path, seed: int) -> None:
    """Each node hears of two deaths when and in the order in which it likes; at the end there are enough copies."""

    async def main() -> None:
        chance = random.Random(seed)

        async def tell(node: Member) -> None:
            for rank in chance.sample(node.unheard, len(node.unheard)):
                await trio.sleep(chance.choice([0, 0.01, 0.06, 0.2]))
                node.copies.lost(rank)

        async with cluster(prepared, tmp_path, size=5, replicas=2) as job, working(job) as work:
            for node in job.nodes:
                node.deaf = True
                job.network.delay(node.rank, chance.choice([0, 0, 0.03]))
            work.kill(*chance.sample(range(5), 2))
            async with trio.open_nursery() as nursery:
                for node in work.living():
                    nursery.start_soon(tell, node)
            await work.wait_copies(2)
            await work.check_reads()
            views = [[sorted(set(ranks) - work.dead) for ranks in node.copies._have] for node in work.living()]
            assert views == [work.holders()] * 3, "all know who has what"

    trio.run(main)


def test_source_dies_in_the_middle(prepared: Path, tmp_path: Path) -> None:
    """Rank 3 copies from rank 1 or 2, one of which dies; the other has it, too."""

    async def main() -> None:
        async with cluster(prepared, tmp_path, size=4, replicas=3) as job, working(job) as work:
            hide_partitions(prepared)
            work.kill(0)
            copier = job.nodes[3].copies._copier
            assert copier is not None
            await work.wait(lambda: copier.progress_bytes > 0)
            partition = job.nodes[3].copies._own[0]
            work.kill(job.nodes[3].copies._sources(partition)[0])
            await work.wait_copies(2)
            assert work.total("shared_bytes") == 0
            await work.check_reads()

    trio.run(main)


def test_damaged_source(prepared: Path, tmp_path: Path, expect_warnings: ExpectWarnings) -> None:
    """Bytes that do not match are not used: the next copy is, and at last the shared file system."""

    async def main() -> None:
        async with cluster(prepared, tmp_path, size=4, replicas=2) as job, working(job) as work:
            victim, damaged = job.placement.holders[0]
            job.network.damage(damaged, True)
            work.kill(victim)
            await work.wait_copies(2)
            only = [p for p, ranks in enumerate(job.placement.holders) if ranks == (victim, damaged)]
            assert work.total("shared_bytes") == sum(job.placement.partition_bytes[p] for p in only)
            for node in work.living():
                parts = node.prepared.manifest.partitions
                assert all(node.store.verified(p) for p in range(len(parts)) if node.store.is_local(p))

    expect_warnings(r"partition \d is not copied from rank \d: it does not match its checksum")
    trio.run(main)


def test_source_that_is_silent_or_still_staging(prepared: Path, tmp_path: Path) -> None:
    """It is waited for; the shared file system is not read instead."""

    async def main() -> None:
        async with cluster(prepared, tmp_path, size=3, replicas=2, staged=False) as job, working(job) as work:
            for rank in (0, 2):
                job.stage(rank)
            work.kill(0)
            own = sum(len(ranks) for ranks in work.holders())
            await work.wait(lambda: job.nodes[2].remote._counters[1].refused > 2)
            assert sum(len(ranks) for ranks in work.holders()) >= own
            job.stage(1)
            await work.wait_copies(2)
            assert work.total("shared_bytes") == 0
            await work.check_reads()

    trio.run(main)


def test_no_room(prepared: Path, tmp_path: Path, expect_warnings: ExpectWarnings) -> None:
    """First a copy of each, then second ones; what does not fit is said once, and nothing is copied in vain."""

    async def main() -> None:
        sizes = [part.bytes for part in PreparedDataset.open(prepared).manifest.partitions]
        room = [1 << 40, sum(sizes), sum(sizes) // 2]
        async with cluster(prepared, tmp_path, size=3, replicas=2, room=room) as job, working(job) as work:
            work.kill(0)
            await work.wait(lambda: all(node.copies.statistics()["unplaced_partitions"] for node in work.living()))
            await work.wait(lambda: not work.total("missing_copies"))
            assert all(node.store.local_bytes() <= room[node.rank] for node in work.living())
            assert any(len(ranks) == 2 for ranks in work.holders()) and any(len(ranks) == 1 for ranks in work.holders())
            assert work.total("unplaced_partitions") == 2 * sum(len(ranks) < 2 for ranks in work.holders())
            await work.check_reads()

    expect_warnings(r"\d partitions \(.*\) have fewer copies than before, and there is no room for more")
    trio.run(main)


def test_disk_that_fails(prepared: Path, tmp_path: Path, expect_warnings: ExpectWarnings) -> None:
    """What one node cannot write another one takes."""

    async def main() -> None:
        async with cluster(prepared, tmp_path, size=4, replicas=2) as job, working(job) as work:
            job.nodes[3].local.rename(tmp_path / "elsewhere")
            work.kill(0)
            await work.wait_copies(2)
            assert int(str(job.nodes[3].copies.statistics()["failed_partitions"])) > 0
            assert work.total("shared_bytes") == 0
            await work.check_reads()

    expect_warnings(r"partition \d cannot be copied again to this node: No such file or directory")
    trio.run(main)


def test_end_in_the_middle(prepared: Path, tmp_path: Path) -> None:
    """Nothing is left of a copy that was not complete."""

    async def main() -> None:
        async with cluster(prepared, tmp_path, size=3, replicas=2) as job:
            async with working(job) as work:
                work.kill(0)
                copiers = [node.copies._copier for node in work.living()]
                await work.wait(lambda: any(copier is not None and copier.progress_bytes for copier in copiers))
            for node in work.living():
                files = {path.name for path in node.local.iterdir()}
                assert files == {f"part-{p:05d}.tar" for p in range(PARTITIONS) if node.store.is_local(p)}

    trio.run(main)


def test_end_while_the_shared_file_system_hangs(prepared: Path, tmp_path: Path) -> None:
    """A file server that does not answer does not keep the daemon from its end."""
    pipes = list(prepared.glob("part-*.tar"))

    async def main() -> None:
        async with cluster(prepared, tmp_path, size=2, replicas=1) as job:
            for path in pipes:
                path.unlink()
                os.mkfifo(path)  # to open it waits for a writer, for ever
            async with working(job) as work:
                work.kill(0)
                await work.wait(lambda: not job.nodes[1].copies._is_stale)
                await trio.sleep(0.2)
                with trio.fail_after(10):
                    work.stop(1)
                    await work.ended[1].wait()
            for path in pipes:  # the thread goes on
                with contextlib.suppress(OSError):  # nobody waits for this one
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    trio.run(main)


@pytest.mark.parametrize(("crowd", "seconds"), [(1.0, 4), (3.0, 12)])
def test_readers_have_three_quarters(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crowd: float, seconds: int
) -> None:
    """A range that takes a second is followed by three without one, and more if others copy from the same node."""
    monkeypatch.setattr(restoring, "PARTS", 4.0)
    monkeypatch.setattr(restoring, "RANGE_BYTES", 100_000)

    async def main() -> None:
        dataset = PreparedDataset.open(prepared)
        content = dataset.partition_path(0).read_bytes()
        store = PartitionStore(dataset)

        async def read(offset: int, length: int) -> bytes:
            await trio.sleep(1)
            return content[offset : offset + length]

        begun_s = trio.current_time()
        assert await restoring.Copier(dataset, store, tmp_path, outputs=lambda: True).copy(0, read, crowd=crowd)
        ranges = -(-len(content) // 100_000)
        assert ranges > 1 and trio.current_time() - begun_s == pytest.approx(seconds * ranges)
        assert store.is_local(0)
        store.close()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.05))


def test_nodes_that_copy_from_the_same_one_know_it(prepared: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(prepared, tmp_path, size=5, replicas=2) as job:
            view = job.nodes[4].copies
            assert view._crowd() == 1
            first, second = job.placement.holders[0]
            takers = sorted({0, 1, 2, 3, 4} - {first, second})
            for rank in takers:
                assert view.heard(rank, b"take 0")
            assert view._crowd() == 3 / 2
            view.lost(first)
            assert view._crowd() == 3
            view.heard(takers[0], b"drop 0")
            assert view._crowd() == 2

    trio.run(main)
