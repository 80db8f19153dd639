"""Reads from other nodes through the core: the right bytes from the right place, whatever happens to the peers."""

import gc
import json
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import oddities
import pytest
import trio
import trio.testing
from core_cluster import Cluster, Member, cluster
from core_parts import flip_byte, opened

from fanstore.dataset import remote as remote_module
from fanstore.dataset.remote import MAX_REFUSALS
from fanstore.dataset.sources import Verify
from fanstore.dataset.staging import stage
from fanstore.dataset.store import PartitionStore
from fanstore.errors import CorruptDataError
from fanstore.format.prepared import PreparedDataset
from fanstore.telemetry.statistics import Source

MakePrepared = Callable[..., Path]
ExpectWarnings = Callable[..., None]

MIB = 1 << 20
CHUNK = oddities.CHUNK_BYTES

CONTENTS = {
    **{f"small/{number:02d}": oddities.compressible(107_000 + number, number) for number in range(24)},
    **{f"noise/{number:02d}": oddities.incompressible(107_000 + number, 100 + number) for number in range(12)},
    "a/empty": b"",
    "a/one": b"x",
    "b/text-9M": oddities.compressible(9 * MIB + 17, 5),
    "b/noise-9M": oddities.incompressible(9 * MIB + 17, 6),
    "b/mixed": oddities.compressible(CHUNK, 7) + oddities.incompressible(CHUNK, 8) + b"end",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("remote") / "tree"
    for name, content in CONTENTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    """The datasets that ``intact`` has made, by codec."""
    return {}


@pytest.fixture
def intact(tree: Path, made: dict[str, Path], make_prepared: MakePrepared) -> Callable[[str], Path]:
    """A prepared dataset per codec for the tests that damage nothing: made once."""

    def prepared(codec: str) -> Path:
        if codec not in made:
            made[codec] = make_prepared(tree, out=tree.parent / f"{codec}.fan", codec=codec, partitions=9)
        return made[codec]

    return prepared


async def check_all(node: Member) -> None:
    for name, content in CONTENTS.items():
        assert await node.read(name) == content, name


async def within(seconds: float, main: Callable[[], Awaitable[None]]) -> None:
    with trio.fail_after(seconds):
        await main()


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    ("codec", "verify"), [(codec, verify) for codec in ("none", "lz4") for verify in Verify] + [("lz4hc", Verify.FIRST)]
)
def test_every_byte_on_every_node(
    intact: Callable[[str], Path], tmp_path: Path, codec: str, verify: Verify, replicas: int
) -> None:
    async def main() -> None:
        async with cluster(intact(codec), tmp_path, replicas=replicas, verify=verify) as job:
            for node in job.nodes:
                await check_all(node)
                assert node.reads(Source.SHARED) == 0
                assert node.reads(Source.LOCAL) > 0
                assert (node.reads(Source.REMOTE) > 0) == (replicas < 3)
                await check_all(node)
                index = node.prepared.index
                elsewhere = [
                    node.entry(name) for name in CONTENTS if not node.store.is_local(index.partition[node.entry(name)])
                ]
                remote = node.source(Source.REMOTE)
                chunks = [index.chunk(entry, n) for entry in elsewhere for n in range(index.chunk_count(entry))]
                # What one piece takes whole is not kept: fetched again unless it was still being given out.
                assert len(chunks) <= remote.fetches <= 2 * len(chunks)
                stored = sum(chunk.stored_bytes for chunk in chunks)
                assert stored <= remote.fetched_bytes <= 2 * stored, "as it is stored"
                if verify is Verify.NEVER:
                    assert node.statistics.totals().verification.chunks == 0
                elif verify is Verify.FIRST:
                    assert node.statistics.totals().verification.chunks == remote.fetches

    trio.run(main)


def test_offsets_and_ends(intact: Callable[[str], Path], tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(intact("none"), tmp_path, size=2, room=[0, 1 << 40]) as job:
            for name in ("b/noise-9M", "b/mixed", "small/03", "a/one"):
                content = CONTENTS[name]
                for offset in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, len(content) - 1, len(content), 1 << 62):
                    for size in (0, 1, 4096, CHUNK + 5):
                        assert await job.nodes[0].read(name, offset, size) == content[offset : offset + size]
            assert job.nodes[0].reads(Source.LOCAL) == job.nodes[0].reads(Source.SHARED) == 0

    trio.run(main)


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_many_readers_share_one_fetch(intact: Callable[[str], Path], tmp_path: Path, codec: str) -> None:
    content = CONTENTS["b/text-9M"]

    async def read(node: Member) -> None:
        for offset in range(0, len(content), 128 << 10):
            assert await node.read("b/text-9M", offset, 128 << 10) == content[offset : offset + (128 << 10)]

    async def main() -> None:
        async with cluster(intact(codec), tmp_path, size=2, room=[0, 1 << 40]) as job:
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(read, job.nodes[0])
            assert job.network.peers(0).statistics()["fetches"] == 3
            assert job.nodes[0].source(Source.REMOTE).fetches == 3

    trio.run(main)


def test_a_small_read_of_a_large_file_fetches_one_chunk(intact: Callable[[str], Path], tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(intact("none"), tmp_path, size=2, room=[0, 1 << 40]) as job:
            assert await job.nodes[0].read("b/noise-9M", CHUNK + 5, 7) == CONTENTS["b/noise-9M"][CHUNK + 5 : CHUNK + 12]
            assert job.nodes[0].source(Source.REMOTE).fetched_bytes == CHUNK

    trio.run(main)


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_chunks_that_are_read_whole_are_not_kept(intact: Callable[[str], Path], tmp_path: Path, codec: str) -> None:
    """Whoever asked has all of it; of a part, the rest will be wanted soon."""

    async def main() -> None:
        async with cluster(intact(codec), tmp_path, size=2, room=[0, 1 << 40]) as job:
            node = job.nodes[0]
            assert await node.read("small/05") == CONTENTS["small/05"]
            with trio.fail_after(10):  # who has it may be faster than the thread that gave it
                while node.broker.cache()["chunks"]:  # noqa: ASYNC110 (nobody tells)
                    await trio.sleep(0.001)
            assert await node.read("small/05", 0, 10) == CONTENTS["small/05"][:10]
            assert node.broker.cache()["chunks"] == 1
            before = node.reads(Source.CACHE)
            assert await node.read("small/05") == CONTENTS["small/05"]
            assert node.reads(Source.CACHE) == before + 1, "what is kept is used, also when it is read whole"

    trio.run(main)


def test_load_is_spread_over_the_holders(intact: Callable[[str], Path], tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(intact("none"), tmp_path, size=4, replicas=3, room=[0, *[1 << 40] * 3]) as job:
            await check_all(job.nodes[0])
            given = [job.network.peers(rank).statistics()["served"] for rank in (1, 2, 3)]
            total = sum(map(int, map(str, given)))
            assert all(int(str(count)) > total / 6 for count in given), given

    trio.run(main)


def states(node: Member) -> dict[int, dict[str, object]]:
    section = node.remote.statistics()
    nodes = section["nodes"]
    assert isinstance(nodes, list)
    return {item["rank"]: item for item in nodes}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_a_peer_that_dies_under_load(intact: Callable[[str], Path], tmp_path: Path, codec: str, replicas: int) -> None:
    async def read(job: Cluster, rank: int, seed: int) -> None:
        numbers = random.Random(seed)
        node = job.nodes[rank]
        for step in range(60):
            if seed == 0 and step == 15:
                job.network.kill(2)
            name, content = numbers.choice(list(CONTENTS.items()))
            offset, size = numbers.randrange(len(content) + 10), numbers.randrange(1, 2 * MIB)
            assert await node.read(name, offset, size) == content[offset : offset + size]

    async def main() -> None:
        async with cluster(intact(codec), tmp_path, replicas=replicas, cache_bytes=MIB) as job:
            async with trio.open_nursery() as nursery:
                for seed in range(8):
                    nursery.start_soon(read, job, seed % 2, seed)
            asked = states(job.nodes[0])[2]
            assert asked["state"] == "lost"
            for node in job.nodes[:2]:
                await check_all(node)
                assert (node.reads(Source.SHARED) > 0) == (replicas == 1), "only if there is no other copy left"
            assert states(job.nodes[0])[2] == asked, "a dead peer is not asked again"

    trio.run(within, 60, main)


def test_a_peer_that_is_stopped_and_goes_on(
    intact: Callable[[str], Path], tmp_path: Path, expect_warnings: ExpectWarnings, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with cluster(intact("none"), tmp_path, size=2, room=[0, 1 << 40], timeout_s=1.5, cache_bytes=0) as job:
            node = job.nodes[0]
            await check_all(node)
            assert node.reads(Source.SHARED) == 0
            job.network.stop(1)
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(check_all, node)
            found = states(node)[1]
            assert found["state"] == "silent"
            assert 1 <= int(str(found["timeouts"])) <= 5, "only those who were waiting when it fell silent pay for it"
            assert node.reads(Source.SHARED) > 0
            assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
            job.network.cont(1)
            await trio.testing.wait_all_tasks_blocked()
            assert states(node)[1]["state"] == "alive", "its late answers show that it lives"
            before = node.reads(Source.SHARED)
            await check_all(node)
            assert node.reads(Source.SHARED) == before
            assert job.network.peers(0).statistics()["late_answers"] == found["timeouts"]

    expect_warnings(r"rank 1 \(node1\) did not answer within 1.5 s")
    trio.run(within, 60, main)


def test_a_replica_answers_for_a_stopped_peer(
    intact: Callable[[str], Path], tmp_path: Path, expect_warnings: ExpectWarnings
) -> None:
    async def main() -> None:
        async with cluster(intact("lz4"), tmp_path, replicas=2, room=[0, 1 << 40, 1 << 40], timeout_s=1.5) as job:
            job.network.stop(2)
            await check_all(job.nodes[0])
            assert job.nodes[0].reads(Source.SHARED) == 0
            assert states(job.nodes[0])[1]["fetches"] == job.nodes[0].source(Source.REMOTE).fetches
            job.network.cont(2)

    expect_warnings(r"rank 2 \(node2\) did not answer")
    trio.run(within, 60, main)


def test_the_watch_brings_back_a_peer_that_nobody_waits_for(
    intact: Callable[[str], Path], tmp_path: Path, expect_warnings: ExpectWarnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer came just too late: it counts as silent, but there will be no late answer to show that it lives."""
    monkeypatch.setattr(remote_module, "WATCH_S", 0.01)

    async def main() -> None:
        async with cluster(intact("none"), tmp_path, size=2, room=[0, 1 << 40], timeout_s=1.5) as job:
            node = job.nodes[0]
            job.network.stop(1)
            await node.read("small/00")
            job.network.peers(0)._in_flight[1].clear()  # the transport knows of no question under way
            job.network.cont(1)
            await node.read("small/01")
            assert node.reads(Source.SHARED) == 2
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.remote.watch)
                while states(node)[1]["state"] != "alive":  # noqa: ASYNC110 (nobody tells when it is found alive)
                    await trio.sleep(0.01)
                await node.read("small/02")
                assert node.reads(Source.REMOTE) == 1
                nursery.cancel_scope.cancel()

    expect_warnings(r"rank 1 \(node1\) did not answer")
    trio.run(within, 30, main)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_a_peer_that_gives_damaged_bytes(
    intact: Callable[[str], Path],
    tmp_path: Path,
    expect_warnings: ExpectWarnings,
    caplog: pytest.LogCaptureFixture,
    codec: str,
    replicas: int,
) -> None:
    async def main() -> None:
        async with cluster(intact(codec), tmp_path, replicas=replicas, room=[0, 1 << 40, 1 << 40]) as job:
            job.network.damage(2, True)
            node = job.nodes[0]
            await check_all(node)
            damaged = int(str(states(node)[2]["damaged"]))
            assert damaged > 0
            assert states(node)[2]["fetches"] == 0
            assert states(node)[1]["damaged"] == 0
            assert (node.reads(Source.SHARED) > 0) == (replicas == 1)
            partitions = sum(2 in holders for holders in job.placement.holders)
            assert len(caplog.records) <= partitions, "one line per partition"
            if replicas == 2:
                assert damaged <= partitions, "asked last from then on"
            assert node.statistics.errors.failed_reads == 0
            job.network.damage(2, False)

    expect_warnings(r"rank 2 \(node2\) gave damaged bytes of partition \d+: .*checksum")
    trio.run(main)


def test_never_means_never(intact: Callable[[str], Path], tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(intact("none"), tmp_path, size=2, room=[0, 1 << 40], verify="never") as job:
            job.network.damage(1, True)
            data = await job.nodes[0].read("noise/02")
            assert data != CONTENTS["noise/02"]
            assert len(data) == len(CONTENTS["noise/02"])

    trio.run(main)


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_what_is_not_staged_yet_is_read_where_it_is(
    intact: Callable[[str], Path], tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with cluster(intact(codec), tmp_path, size=2, room=[0, 1 << 40], staged=False, cache_bytes=0) as job:
            node = job.nodes[0]
            monkeypatch.setattr(remote_module, "REFUSAL_NS", 1 << 60)
            for _ in range(3):
                await check_all(node)
            assert node.reads(Source.REMOTE) == 0
            assert states(node)[1]["refused"] == 9, "once per partition"
            job.stage(1)
            await check_all(node)
            assert node.reads(Source.REMOTE) == 0, "a refusal counts for a while"
            monkeypatch.setattr(remote_module, "REFUSAL_NS", 0)
            before = node.reads(Source.SHARED)
            await check_all(node)
            assert node.reads(Source.SHARED) == before

    trio.run(main)


def test_many_holders_that_are_still_staging_are_not_all_asked(
    tree: Path, make_prepared: MakePrepared, tmp_path: Path
) -> None:
    prepared = make_prepared(tree, everywhere="*", partitions=1)

    async def main() -> None:
        async with cluster(prepared, tmp_path, size=8, staged=False) as job:
            node = job.nodes[0]
            assert all(len(holders) == 8 for holders in job.placement.holders)
            assert await node.read("small/00") == CONTENTS["small/00"]
            assert sum(int(str(item["refused"])) for item in states(node).values()) == MAX_REFUSALS
            job.stage(5)
            for number in range(1, 8):  # two are asked each time, so that the one that has it is found
                await node.read(f"small/{number:02d}")
            assert node.reads(Source.REMOTE) > 0

    trio.run(main)


def test_a_copy_that_goes_bad_is_replaced_by_another_node(
    intact: Callable[[str], Path], tmp_path: Path, expect_warnings: ExpectWarnings
) -> None:
    async def main() -> None:
        async with cluster(intact("none"), tmp_path, size=2, replicas=2) as job:
            node = job.nodes[0]
            for path in node.local.iterdir():
                os.truncate(path, 0)
            await check_all(node)
            assert node.reads(Source.SHARED) == 0
            assert node.statistics.errors.fallbacks > 0
            assert node.statistics.errors.failed_reads == 0

    expect_warnings("is read from another node: local copy .*truncated")
    trio.run(main)


@pytest.mark.parametrize("reason", ["silent", "refused"])
def test_the_last_copy_is_found(
    tree: Path, make_prepared: MakePrepared, tmp_path: Path, expect_warnings: ExpectWarnings, reason: str
) -> None:
    """The shared file system is gone, and the only node that has the file counts as not worth asking."""
    prepared = make_prepared(tree)

    async def main() -> None:
        async with cluster(
            prepared, tmp_path, size=2, room=[0, 1 << 40], timeout_s=1.5, staged=reason == "silent"
        ) as job:
            node = job.nodes[0]
            if reason == "silent":
                job.network.stop(1)
                await node.read("small/00")
                job.network.peers(0)._in_flight[1].clear()
                job.network.cont(1)
            else:
                await node.read("small/00")
                job.stage(1)
            assert not node.remote.has(0)
            node.prepared.partition_path(0).unlink()
            node.store.release(node.store.acquire(0))
            node.store._close_file(node.store._shared[0])
            assert await node.read("noise/00") == CONTENTS["noise/00"]
            assert node.reads(Source.REMOTE) == 1

    if reason == "silent":
        expect_warnings("did not answer", "'noise/00' is read from another node")
    else:
        expect_warnings("'noise/00' is read from another node")
    trio.run(within, 30, main)


def test_when_every_copy_is_damaged_the_partition_file_is_named(
    tree: Path, make_prepared: MakePrepared, tmp_path: Path, expect_warnings: ExpectWarnings
) -> None:
    prepared = make_prepared(tree)

    async def main() -> None:
        with opened(prepared) as parts:
            offset = parts.prepared.index.offset[parts.entry("small/00")]
        flip_byte(prepared / "part-00000.tar", offset + 50)
        async with cluster(prepared, tmp_path, replicas=2) as job:
            for node in job.nodes:
                for _ in range(2):
                    with pytest.raises(CorruptDataError, match=r"'small/00' from partition file .*part-00000.tar"):
                        await node.read("small/00")
                assert await node.read("small/01") == CONTENTS["small/01"]
                assert node.statistics.errors.damaged_files == 1

    expect_warnings("does not match its checksum", "gave damaged bytes", "cannot read 'small/00'")
    trio.run(main)


def test_cancelled_readers_take_nobody_with_them(intact: Callable[[str], Path], tmp_path: Path) -> None:
    names = [name for name in CONTENTS if CONTENTS[name]]

    async def read(node: Member, number: int) -> None:
        name = names[number % len(names)]
        with trio.CancelScope() as scope:
            if number % 3 == 0:
                scope.cancel()
            elif number % 3 == 1:
                scope.deadline = trio.current_time() + 0.001 * (number % 7)
            assert await node.read(name) == CONTENTS[name]

    async def main() -> None:
        async with cluster(intact("lz4"), tmp_path, size=2, room=[0, 1 << 40]) as job:
            job.network.delay(1, 0.002)
            async with trio.open_nursery() as nursery:
                for number in range(120):
                    nursery.start_soon(read, job.nodes[0], number)

    trio.run(within, 60, main)


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_reads_go_on_while_partitions_are_staged(intact: Callable[[str], Path], tmp_path: Path, codec: str) -> None:
    async def read(job: Cluster, rank: int, seed: int, done: trio.Event) -> None:
        numbers = random.Random(seed)
        while not done.is_set():
            name, content = numbers.choice(list(CONTENTS.items()))
            offset = numbers.randrange(len(content) + 10)
            assert await job.nodes[rank].read(name, offset, 5000) == content[offset : offset + 5000]
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with cluster(intact(codec), tmp_path, replicas=2, staged=False) as job:
            done = trio.Event()
            async with trio.open_nursery() as nursery:
                for seed in range(6):
                    nursery.start_soon(read, job, seed % 3, seed, done)
                async with trio.open_nursery() as staging:
                    for rank in range(3):
                        staging.start_soon(trio.to_thread.run_sync, job.stage, rank)
                done.set()

    trio.run(within, 60, main)


def test_the_statistics_are_plain_json_and_documented(intact: Callable[[str], Path], tmp_path: Path) -> None:
    def keys(content: object) -> set[str]:
        if isinstance(content, list):
            return set().union(*map(keys, content))
        if not isinstance(content, dict):
            return set()
        return {key for name, value in content.items() for key in ({name} | keys(value))}

    async def main() -> None:
        async with cluster(intact("none"), tmp_path) as job:
            await check_all(job.nodes[1])
            content = json.loads(json.dumps(job.nodes[1].statistics.snapshot()))
            text = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
            for key in keys(content) - {"read"}:
                assert f"`{key}`" in text, f"docs/operations.md does not explain '{key}' of stats.json"
            assert [node["rank"] for node in content["peers"]["nodes"]] == [0, 2]
            assert all(node["state"] == "alive" and node["fetches"] > 0 for node in content["peers"]["nodes"])
            assert content["peers"]["latency_us"]["p50"] > 0
            assert content["sources"]["remote"]["reads"] > 0

    trio.run(main)


def test_maps_of_the_store(tree: Path, make_prepared: MakePrepared, tmp_path: Path) -> None:
    dataset = PreparedDataset.open(make_prepared(tree, partitions=3))
    store = PartitionStore(dataset)
    assert store.mapped(0) is None, "not staged"
    gc.collect()  # what earlier tests have left
    descriptors = len(os.listdir("/proc/self/fd"))
    result = stage(dataset, store, tmp_path, partitions=[2, 0])
    assert result.verified == (0, 2)
    assert len(os.listdir("/proc/self/fd")) == descriptors + 2, "a map needs no descriptor"
    assert store.mapped(1) is None
    content = dataset.partition_path(0).read_bytes()
    view = store.mapped(0)
    assert view is not None
    assert view.readonly
    assert view == content
    store.close()
    assert store.mapped(0) is None
    (tmp_path / "part-00000.tar").unlink()
    assert view == content, "memory that somebody sends from stays"
    assert "part-00000.tar" in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "and goes when nobody does any more"
