"""One rank of remote_reads.py that reads through FanStore's core: ``mpirun -n N python remote_core.py SPEC``

The core is put together as a daemon does it (fanstore.job.node): partitions staged on this rank's directory, broker,
checksums on arrival, MPI thread; without FUSE. Each of the tasks under way opens the next file, reads all
of it, chunk by chunk, and closes it. Rank 0 prints one line of JSON per case. A job of one rank has no MPI.
"""

import json
import os
import sys
import time
from pathlib import Path

import trio
from harness.remote import WARM_UP_S, Case, Figures, Files, Source, Spec, keep_in_memory, total

from fanstore.allocator import bound_freed_memory
from fanstore.dataset.sources import Verify
from fanstore.format.prepared import PreparedDataset
from fanstore.job.job import Job
from fanstore.job.node import Node, NodeSettings
from fanstore.telemetry.statistics import Source as ReadSource
from fanstore.telemetry.statistics import Statistics
from fanstore.transport.mpi import MpiPeers

#: As fanstore-mount has them by default.
SETTINGS = NodeSettings(cache_bytes=256 << 20, verify=Verify.FIRST, peer_timeout_s=20.0)


class Rank:
    """This process."""

    def __init__(self, spec: Spec, prepared: PreparedDataset, job: Job) -> None:
        self._spec = spec
        self._job = job
        self._files = Files(prepared, spec.ranks)
        self._source = Source.open(prepared)
        self._chunk_bytes = prepared.index.chunk_bytes
        self.directory = Path(spec.local.replace("{rank}", str(job.rank)))
        self.directory.mkdir(parents=True)
        self.statistics = Statistics()
        self.node = Node(prepared, job, self._files.placement, self.directory, SETTINGS, self.statistics, dict)

    async def run(self, case: Case) -> Figures:
        """All tasks of one case."""
        files = self._files.of(case, self._job.rank)
        figures = Figures()
        broker, source, chunk_bytes = self.node.broker, self._source, self._chunk_bytes
        position = 0

        async def read(end_s: float) -> None:
            nonlocal position
            while (now_s := time.perf_counter()) < end_s:
                if position % len(files) == 0:  # each pass fetches them again
                    broker.set_capacity(0)
                    broker.set_capacity(SETTINGS.cache_bytes)
                file = files[position % len(files)]
                position += 1
                for offset in range(0, case.size, chunk_bytes):
                    source.check(file, offset, await broker.read(file.entry, offset, chunk_bytes))
                figures.latencies_s.append(time.perf_counter() - now_s)

        async def read_for(seconds: float) -> None:
            end_s = time.perf_counter() + seconds
            async with trio.open_nursery() as nursery:
                for _ in range(case.window):
                    nursery.start_soon(read, end_s)

        await read_for(WARM_UP_S)
        figures.latencies_s.clear()
        before = self._reads()
        begin_s = time.perf_counter()
        await read_for(self._spec.seconds)
        figures.seconds = time.perf_counter() - begin_s
        self._check_sources(case, before)
        return figures

    def _reads(self) -> dict[ReadSource, int]:
        return {source: counters.fetches for source, counters in self.statistics.totals().sources.items()}

    def _check_sources(self, case: Case, before: dict[ReadSource, int]) -> None:
        """The path that is measured must be the one that answered."""
        wanted = {"remote": {ReadSource.REMOTE}, "local": {ReadSource.LOCAL}}.get(
            case.share, {ReadSource.REMOTE, ReadSource.LOCAL}
        )
        answered = {source for source, count in self._reads().items() if count > before[source]}
        if answered != wanted:
            raise SystemExit(f"{case}: answered by {answered}, not by {wanted}")


async def run(spec: Spec) -> None:
    bound_freed_memory()
    peers = None
    if spec.ranks > 1:
        peers = MpiPeers()
        await peers.wait_started()
    job = Job(peers)
    prepared = PreparedDataset.open(Path(spec.prepared))
    rank = Rank(spec, prepared, job)
    rank.node.serve()
    await rank.node.stage()
    kept = keep_in_memory(rank.directory)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rank.node.broker.run)
        for case in spec.cases:
            await job.agree("the start", None, {})
            figures = await rank.run(case) if job.rank < case.askers else Figures()
            everybody = await job.agree("the end", None, {"line": figures.line()})
            if job.rank == 0:
                print(json.dumps(total(case, [answer["line"] for answer in everybody])), flush=True)
        await job.agree("all", None, {})
        nursery.cancel_scope.cancel()
    rank.node.close()
    del kept
    if peers is not None:
        peers.close(10.0)


if __name__ == "__main__":
    trio.run(run, Spec.read(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # threads that hold maps end with the process
