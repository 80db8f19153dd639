"""The corrected simulation: batch by batch, all nodes side by side, with shared resources really shared.

Owns how time passes. What differs from the published one: gamma follows from who reads now; the share of the PFS, the
throughput of a storage class and the network are shared by all threads that use them, also those of other nodes; a
request to another node or the PFS has a cost of its own; what is in the staging buffer takes room there, and nothing
else; loads are written, not preprocessed; training begins when the slowest node has loaded; only the threads of the
staging buffer read ahead, and the reader waits for them. One thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from fanstore.model.ahead import Buffer, Ordered
from fanstore.model.contention import Contention, Floats
from fanstore.model.copies import NOBODY, Copies
from fanstore.model.equations import Times
from fanstore.model.job import Job
from fanstore.model.loads import Loads
from fanstore.model.outcome import Outcome
from fanstore.model.plan import Plan, Source, Staging
from fanstore.model.system import System
from fanstore.order.order import Integers

_INFINITY = float("inf")
#: Less than this part of a batch is nothing: what rounding leaves.
_NOTHING = 1e-9


def simulate(system: System, job: Job, plan: Plan) -> Outcome:
    """Run the job; the order of the plan replaces that of the job."""
    return _Simulation(system, job, plan).run()


class _Simulation:
    """What the nodes share; ``now_s`` is when this iteration began."""

    def __init__(self, system: System, job: Job, plan: Plan) -> None:
        self.system = system
        self.job = job
        self.plan = plan
        self.now_s = 0.0
        self.times = Times.of(system)
        self.copies = Copies.of(job, plan)
        self.contention = Contention(system)
        self.loads = Loads(system, job, plan, self.copies, self.times)
        self._nodes = [_Node(self, node) for node in range(job.nodes)]

    def run(self) -> Outcome:
        contention, loads = self.contention, self.loads
        self.now_s = stall_s = loads.complete(contention) if self.plan.preloads else 0.0
        epoch_ends_s = []
        for _ in range(self.job.epochs):
            for _ in range(self.job.epoch_iterations):
                if not loads.done:
                    loads.set_speeds(contention)
                iteration_s = max([node.begin_iteration() for node in self._nodes])
                for node in self._nodes:
                    node.end_iteration(iteration_s)
                if not loads.done:
                    loads.advance(contention, iteration_s)
                contention.settle(iteration_s)
                self.now_s += iteration_s
            epoch_ends_s.append(self.now_s)
        pfs_mb = loads.pfs_mb + sum(node.pfs_mb for node in self._nodes)
        local_mb = sum(node.local_mb for node in self._nodes)
        copied_mb = sum(node.copied_mb for node in self._nodes)
        return Outcome(self.now_s, stall_s, pfs_mb, tuple(epoch_ends_s), local_mb, copied_mb - local_mb)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Where a batch of a node comes from.

    Attributes:
        copy_mb: from copies, by holder and storage class; None if nothing.
        pfs_mb: read ahead from the PFS; staged_mb: all that is read ahead.
        requests: to other nodes and the PFS, of what is read ahead.
        late_holder, late_samples: copies that it must wait for.
        left_out_mb, left_out: what is not read ahead, and how many samples that are.
    """

    copy_mb: Floats | None
    pfs_mb: float
    staged_mb: float
    requests: int
    late_holder: Integers
    late_samples: Integers
    left_out_mb: float
    left_out: int


class _Node:
    """A node that reads and computes, with its staging buffer.

    Batches are fetched one after the other, all threads at one.

    Attributes:
        pfs_mb: what this node's reads took from the PFS; copied_mb: from copies, of which local_mb on the node itself.
        _ahead: what may be fetched before it is needed.
        _iteration: the batch that is computed on; _next: the first one that was not begun to be fetched.
        _batch: the one before _next, which is or was being fetched; _left: the part of it that is missing.
        _left_out: MB and samples of batches behind the one computed on that are read when needed.
        _clock_s: how much of this iteration fetching has used.
    """

    def __init__(self, simulation: _Simulation, number: int) -> None:
        job = simulation.job
        self._simulation = simulation
        self._number = number
        self._staging = simulation.plan.staging or Staging(frozenset())
        self._holder = simulation.copies.holders(
            number, np.arange(job.samples), self._staging.sources, simulation.times
        ).astype(np.int16)
        self._access = simulation.plan.access[number].reshape(-1, job.batch)
        batch_mb = job.sizes_mb[self._access].sum(axis=1)
        self._batch_mb: list[float] = batch_mb.tolist()
        ahead = Ordered if self._staging.by_window else Buffer
        self._ahead = ahead(self._batch_mb, simulation.system.staging.capacity_mb)
        self._iteration = 0
        self._next = 0
        self._left = 0.0
        self._batch: _Batch
        self._left_out: deque[tuple[float, int]] = deque()
        self._clock_s = 0.0
        self.pfs_mb = self.copied_mb = self.local_mb = 0.0

    def begin_iteration(self) -> float:
        """Fetch what is missing of the batch; how long the iteration takes, as far as this node is concerned."""
        simulation, number = self._simulation, self._number
        compute_s = self._batch_mb[self._iteration] * simulation.times.compute
        self._ahead.begin(self._iteration, simulation.now_s)
        self._clock_s = self._fetch(0.0, _INFINITY, self._iteration)
        left_out_mb, left_out = self._left_out.popleft()
        self._use_pfs(left_out_mb)
        reading_s = (
            left_out_mb * (float(simulation.contention.pfs[number]) + simulation.times.write)
            + left_out * simulation.system.request_s
        )
        last_s = compute_s / simulation.job.batch if self._clock_s else 0.0
        return max(compute_s + reading_s, self._clock_s + last_s)

    def end_iteration(self, seconds: float) -> None:
        """The iteration takes so long: time to fetch ahead. Then its batch leaves the staging buffer."""
        self._fetch(self._clock_s, seconds, len(self._batch_mb) - 1)
        self._iteration += 1

    def _fetch(self, clock_s: float, until_s: float, last: int) -> float:
        """Fetch batches up to ``last`` from one time of this iteration until another. Returns when that ended."""
        while clock_s < until_s:
            if not self._left:
                if self._next > last or not self._has_room():
                    break
                self._batch = self._compose(self._next)
                self._left_out.append((self._batch.left_out_mb, self._batch.left_out))
                self._left = 1.0
                self._next += 1
            elif self._next - 1 > last:
                break
            batch = self._batch
            if len(batch.late_samples):
                ready_s = float(self._simulation.loads.ready_s(batch.late_holder, batch.late_samples).max())
                if ready_s > clock_s:
                    clock_s = min(ready_s, until_s)
                    continue
            whole_s = self._seconds(batch)
            part = self._left if whole_s == 0 else min(self._left, (until_s - clock_s) / whole_s)
            clock_s += part * whole_s
            self._left -= part
            if self._left < _NOTHING:
                self._left = 0.0
            self._use_pfs(part * batch.pfs_mb)
            if batch.copy_mb is not None:
                self._simulation.contention.use_copies(self._number, part * batch.copy_mb)
                self.copied_mb += part * float(batch.copy_mb.sum())
                self.local_mb += part * float(batch.copy_mb[self._number].sum())
        return clock_s

    def _has_room(self) -> bool:
        """For the next batch. One that is larger than all the room passes through alone."""
        return self._next == self._iteration or self._ahead.has_room(self._next)

    def _seconds(self, batch: _Batch) -> float:
        """How long all threads together need for a batch under the contention of now."""
        simulation, contention, number = self._simulation, self._simulation.contention, self._number
        seconds = batch.pfs_mb * float(contention.pfs[number])
        seconds += batch.staged_mb * simulation.times.write + batch.requests * simulation.system.request_s
        if batch.copy_mb is not None:
            seconds += float(np.vdot(batch.copy_mb, contention.copy[number]))
        return seconds / simulation.system.staging.threads

    def _use_pfs(self, mb: float) -> None:
        self._simulation.contention.use_pfs(self._number, mb)
        self.pfs_mb += mb

    def _compose(self, iteration: int) -> _Batch:
        """Choose the sources of a batch."""
        simulation, contention, number = self._simulation, self._simulation.contention, self._number
        nodes, classes = contention.copy.shape[1:]
        samples = self._access[iteration]
        sizes_mb = simulation.job.sizes_mb[samples]
        holder = self._holder[samples]
        storage_class = simulation.copies.storage_class[holder, samples]
        held = holder != NOBODY
        loaded = np.ones(len(samples), dtype=bool)
        if not simulation.loads.done:
            loaded[held] = simulation.loads.ready_s(holder[held], samples[held]) <= 0
        pfs_allowed = Source.PFS in self._staging.sources
        if pfs_allowed and not self._staging.waits:
            held &= loaded & (contention.copy[number, holder, storage_class] <= contention.pfs[number])
        late = held & ~loaded
        copy_mb = None
        if held.any():
            place = holder[held].astype(np.int64) * classes + storage_class[held]
            by_place_mb = np.bincount(place, sizes_mb[held], minlength=nodes * classes)
            copy_mb = by_place_mb.astype(np.float64).reshape(nodes, classes)
        other_mb, others = float(sizes_mb[~held].sum()), len(samples) - int(held.sum())
        remote = int((held & (holder != number)).sum())
        return _Batch(
            copy_mb=copy_mb,
            pfs_mb=other_mb if pfs_allowed else 0.0,
            staged_mb=self._batch_mb[iteration] - (0.0 if pfs_allowed else other_mb),
            requests=remote + (others if pfs_allowed else 0),
            late_holder=holder[late],
            late_samples=samples[late],
            left_out_mb=0.0 if pfs_allowed else other_mb,
            left_out=0 if pfs_allowed else others,
        )
