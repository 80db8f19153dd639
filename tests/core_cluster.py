"""Several nodes of a job in one process: the core of each, over the in-process transport, without mounts.

Owns the wiring and the staging; a test leaves the with block and has the invariants of all parts checked by that.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fanstore.core.cache import ChunkCache
from fanstore.core.placement import Placement, place
from fanstore.core.reader import Reader, Verify
from fanstore.core.remote import Remote
from fanstore.core.staging import stage
from fanstore.core.statistics import Source, Statistics
from fanstore.core.store import PartitionStore
from fanstore.format.prepared import PreparedDataset
from fanstore.transport.inprocess import Network


@dataclass
class Member:
    """One node; also what its transport asks (Host)."""

    rank: int
    prepared: PreparedDataset
    store: PartitionStore
    cache: ChunkCache
    statistics: Statistics
    remote: Remote
    reader: Reader
    local: Path

    def mapped_partition(self, partition: int) -> memoryview | None:
        return self.store.mapped(partition)

    async def answer(self, peer: int, question: bytes) -> bytes:
        return b""

    def heard(self, peer: int, word: bytes) -> None:
        pass

    def lost(self, peer: int) -> None:
        pass

    def entry(self, path: str) -> int:
        found = self.prepared.index.resolve(os.fsencode(path))
        assert found >= 0, f"{path!r} is not in the index"
        return found

    async def read(self, path: str, offset: int = 0, size: int = 1 << 40) -> bytes:
        return bytes(await self.reader.read(self.entry(path), offset, size))

    def reads(self, source: Source) -> int:
        return self.statistics.sources[source].reads


@dataclass
class Cluster:
    """All nodes."""

    network: Network
    placement: Placement
    nodes: list[Member]

    def stage(self, rank: int) -> None:
        """Copy what belongs on a node."""
        node = self.nodes[rank]
        order = self.placement.staging_order(rank)
        result = stage(node.prepared, node.store, node.local, statistics=node.statistics, partitions=order)
        assert sorted(result.verified + result.unverified) == sorted(order)


@asynccontextmanager
async def cluster(
    prepared: Path,
    base: Path,
    *,
    size: int = 3,
    replicas: int = 1,
    room: list[int] | None = None,
    verify: Verify | str = Verify.FIRST,
    timeout_s: float = 60.0,
    cache_bytes: int = 64 << 20,
    drop_behind: bool = False,
    staged: bool = True,
) -> AsyncIterator[Cluster]:
    """The nodes of one job, staged unless told otherwise."""
    network = Network(size)
    datasets = [PreparedDataset.open(prepared) for _ in range(size)]
    parts = datasets[0].manifest.partitions
    placement = place(
        [part.bytes for part in parts], [part.everywhere for part in parts], room or [1 << 40] * size, replicas
    )
    nodes = []
    for rank, dataset in enumerate(datasets):
        local = base / f"local-{rank}"
        local.mkdir()
        store = PartitionStore(dataset)
        cache = ChunkCache(cache_bytes)
        statistics = Statistics()
        statistics.add_section("cache", lambda cache=cache: asdict(cache.statistics()))  # type: ignore[misc]
        hosts = [f"node{number}" for number in range(size)]
        remote = Remote(network.peers(rank), placement, hosts, statistics, timeout_s)
        reader = Reader(
            dataset.index, store, cache, statistics, verify=verify, workers=4, drop_behind=drop_behind, remote=remote
        )
        nodes.append(Member(rank, dataset, store, cache, statistics, remote, reader, local))
        network.peers(rank).serve(nodes[-1])
    made = Cluster(network, placement, nodes)
    try:
        if staged:
            for rank in range(size):
                made.stage(rank)
        yield made
        for node in nodes:
            for part in (node.store, node.cache, node.statistics, node.reader, node.remote):
                part.validate()
    finally:
        for node in nodes:
            network.peers(node.rank).close(1.0)
            node.store.close()
            node.store.validate()
