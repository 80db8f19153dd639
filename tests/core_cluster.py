"""Several nodes of a job in one process: the core of each, over the in-process transport, without mounts.

Owns the wiring and the staging; a test leaves the with block and has the invariants of all parts checked by that.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
from inprocess_transport import Network

from fanstore.dataset.broker import Broker
from fanstore.dataset.partial_copies import Bringer
from fanstore.dataset.placement import Placement, place
from fanstore.dataset.remote import Remote
from fanstore.dataset.restoring import Copier
from fanstore.dataset.sources import Sources, Verify
from fanstore.dataset.staging import begin_copies, stage
from fanstore.dataset.store import PartitionStore
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import Stored
from fanstore.job.copies import Copies
from fanstore.telemetry.statistics import Source, SourceStatistics, Statistics


@dataclass
class Member:
    """One node; also what its transport asks (Host).

    Attributes:
        deaf: it does not hear of deaths: they are kept in ``unheard`` until the test tells.
    """

    rank: int
    prepared: PreparedDataset
    store: PartitionStore
    statistics: Statistics
    remote: Remote
    broker: Broker
    local: Path
    copies: Copies
    bringer: Bringer
    deaf: bool = False
    unheard: list[int] = field(default_factory=list)

    def mapped_partition(self, partition: int) -> memoryview | None:
        return self.store.mapped(partition)

    async def bring(self, partition: int, offset: int, length: int) -> Stored:
        return await self.bringer.bring(partition, offset, length)

    async def answer(self, peer: int, question: bytes) -> bytes:
        return b""

    def heard(self, peer: int, word: bytes) -> None:
        assert self.copies.heard(peer, word)

    def lost(self, peer: int) -> None:
        if self.deaf:
            self.unheard.append(peer)
        else:
            self.copies.lost(peer)

    def entry(self, path: str) -> int:
        found = self.prepared.index.resolve(os.fsencode(path))
        assert found >= 0, f"{path!r} is not in the index"
        return found

    async def read(self, path: str, offset: int = 0, size: int = 1 << 40) -> bytes:
        return await self.broker.read(self.entry(path), offset, size)

    def source(self, source: Source) -> SourceStatistics:
        return self.statistics.totals().sources[source]

    def reads(self, source: Source) -> int:
        return self.source(source).reads


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
    prepared: Path | str,
    base: Path,
    *,
    size: int = 3,
    replicas: int = 1,
    room: list[int] | None = None,
    verify: Verify | str = Verify.FIRST,
    timeout_s: float = 60.0,
    cache_bytes: int = 64 << 20,
    staged: bool = True,
    copying: bool = False,
) -> AsyncIterator[Cluster]:
    """The nodes of one job, staged unless told otherwise; ``copying``: they will be, as in the daemons of a job."""
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
        if copying:
            begin_copies(dataset, store, local, placement.of_rank(rank))
        statistics = Statistics()
        hosts = [f"node{number}" for number in range(size)]
        remote = Remote(network.peers(rank), placement, hosts, statistics, timeout_s)
        sources = Sources(dataset.index, store, statistics, remote, Verify(verify))
        broker = Broker(dataset.index, store, sources, statistics, capacity_bytes=cache_bytes, remote=remote)
        copier = Copier(dataset, store, local, outputs=lambda: False)
        copies = Copies(network.peers(rank), remote, placement, hosts, copier)
        statistics.add_section("copies", copies.statistics)
        nodes.append(Member(rank, dataset, store, statistics, remote, broker, local, copies, Bringer(store, timeout_s)))
        network.peers(rank).serve(nodes[-1])
    made = Cluster(network, placement, nodes)
    try:
        if staged:
            for rank in range(size):
                made.stage(rank)
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(node.broker.run)
            yield made
            nursery.cancel_scope.cancel()
        for node in nodes:
            for part in (node.store, node.statistics, node.broker, node.remote, node.copies):
                part.validate()
    finally:
        for node in nodes:
            network.peers(node.rank).close(1.0)
            assert node.broker.stop()
            node.store.close()
            node.store.validate()
