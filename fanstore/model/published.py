"""The simulation as published: sample by sample, node after node, with the equations of the thesis.

Owns the rules that all policies share, with the oddities of the published simulation, each named where it is ("as
published"): without them its figures are not met (docs/model.md has both). One thread. A read takes 1 to 2 us here,
so the inner loops keep to local names, plain lists and tuples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from fanstore.model.copies import NOBODY, Copies
from fanstore.model.equations import Times
from fanstore.model.job import Job
from fanstore.model.outcome import Outcome
from fanstore.model.pfsclients import PfsClients
from fanstore.model.plan import Plan, Source, Staging
from fanstore.model.system import STAGING, System

_INFINITY = float("inf")
#: Reads that are looked up together.
_BLOCK = 4096

#: A read to come: sample, its size, time to fetch its copy (infinite if there is none), and when the copy is ready.
_Read: TypeAlias = tuple[int, float, float, float]
#: A read that was planned: sample, its size, when it is ready in the staging buffer (never, if it was left out), and
#: whether it came from the PFS.
_Staged: TypeAlias = tuple[int, float, float, bool]


def simulate(system: System, job: Job, plan: Plan) -> Outcome:
    """Run the job; the order of the plan replaces that of the job."""
    return _Simulation(system, job, plan).run()


class _Simulation:
    """What the nodes share.

    Attributes:
        clients: who reads from the PFS.
        held: by sample, whether any node has a copy, or will have.
        ready_s: by node and sample, when its copy is loaded; infinite without one.
        thread: whose turn it is to fetch into a staging buffer. As published, one counter for all nodes.
        pfs_mb: read from the PFS so far.
        stall_s: before the first iteration.
    """

    def __init__(self, system: System, job: Job, plan: Plan) -> None:
        self.job = job
        self.plan = plan
        self.times = Times.of(system)
        self.copies = Copies.of(job, plan)
        self.held = (self.copies.storage_class != STAGING).any(axis=0).tobytes()
        self.clients = PfsClients(job.nodes)
        self.ready_s = np.full((job.nodes, job.samples), _INFINITY)
        self.thread = 0
        self.pfs_mb = 0.0
        self.stall_s = 0.0
        for node, loads in enumerate(plan.loads):
            loaded_s = self._load(node)
            if plan.preloads:
                self.stall_s = loaded_s  # as published, that of the last node counts, not the longest
                for load in loads:
                    self.ready_s[node, load.samples] = 0.0
        self._nodes = [_Node(self, system, node) for node in range(job.nodes)]

    def _load(self, node: int) -> float:
        """Threads take turns. As published, a load takes as long as if all nodes read from the PFS, with preprocessing.
        Returns when all are done."""
        done_s = 0.0
        for load in self.plan.loads[node]:
            sizes_mb = self.job.sizes_mb[load.samples]
            if load.source is Source.PFS:
                begin_s = 0.0
                fetch = self.times.fetch_pfs[-1]
                self.pfs_mb += float(sizes_mb.sum())
            else:
                begin_s = done_s
                fetch = self.times.fetch_remote[load.storage_class]
            read_s = sizes_mb * fetch + sizes_mb * self.times.write
            start_s, end_s = np.empty((2, len(read_s)))
            for thread in range(load.threads):
                ends_s = begin_s + np.cumsum(read_s[thread :: load.threads])
                end_s[thread :: load.threads] = ends_s
                start_s[thread :: load.threads] = np.concatenate([[begin_s], ends_s[:-1]])[: len(ends_s)]
            self.ready_s[node, load.samples] = end_s
            done_s = max(done_s, float(end_s.max(initial=0.0)))
            if load.source is Source.PFS and not self.plan.preloads:
                self.clients.plan_all(node, start_s.tolist())
        return done_s

    def run(self) -> Outcome:
        now_s = self.stall_s
        epoch_ends_s = []
        for node in self._nodes:
            node.fill(now_s)
        for _ in range(self.job.epochs):
            for _ in range(self.job.epoch_iterations):
                now_s = max([node.iterate(now_s) for node in self._nodes])
            epoch_ends_s.append(now_s)
        return Outcome(now_s, self.stall_s, self.pfs_mb, tuple(epoch_ends_s))


class _Node:
    """A node that reads and computes, with its staging buffer.

    Attributes:
        _ahead: reads that are not planned yet, and _next, the first of them (None behind the last).
        _staged: reads that are planned and not used yet, in sequence.
        _used_mb: what counts as used of the staging buffer. As published, a sample that was there before (_known) takes
            no room, but gives some back when it leaves: so from the second epoch on there is more and more.
        _leaving_mb: what the last batch had in the staging buffer.
        _free_s: when each thread is free to fetch.
    """

    def __init__(self, simulation: _Simulation, system: System, number: int) -> None:
        self._simulation = simulation
        self._number = number
        self._staging = simulation.plan.staging
        self._capacity_mb = system.staging.capacity_mb
        self._fetch_pfs: list[float] = simulation.times.fetch_pfs.tolist()
        self._ahead = self._reads()
        self._next = next(self._ahead, None)
        self._staged: deque[_Staged] = deque()
        self._known = bytearray(simulation.job.samples)
        self._used_mb = 0.0
        self._leaving_mb = 0.0
        self._free_s = [0.0] * system.staging.threads

    def _reads(self) -> Iterator[_Read]:
        simulation, number = self._simulation, self._number
        times, copies = simulation.times, simulation.copies
        sources = self._staging.sources if self._staging else frozenset[Source]()
        access = simulation.plan.access[number]
        for begin in range(0, len(access), _BLOCK):
            samples = access[begin : begin + _BLOCK]
            sizes_mb = simulation.job.sizes_mb[samples]
            holder = copies.holders(number, samples, sources, times)
            held = holder != NOBODY
            storage_class = copies.storage_class[holder, samples]
            fetch = np.where(holder == number, times.fetch_local[storage_class], times.fetch_remote[storage_class])
            fetch_s = np.multiply(fetch, sizes_mb, out=np.full(len(samples), _INFINITY), where=held)
            copy_s = np.where(held, simulation.ready_s[holder, samples], _INFINITY)
            columns = (samples, sizes_mb, fetch_s, copy_s)
            yield from zip(*[column.tolist() for column in columns], strict=True)

    def fill(self, now_s: float) -> None:
        """Plan reads ahead while they fit into the staging buffer."""
        if self._staging is not None:
            self._fill(self._staging, now_s)

    def _fill(self, staging: Staging, now_s: float) -> None:
        simulation, clients, number = self._simulation, self._simulation.clients, self._number
        write = simulation.times.write
        free_s, staged, known, fetch_pfs = self._free_s, self._staged, self._known, self._fetch_pfs
        pfs_allowed, waits = Source.PFS in staging.sources, staging.waits
        while self._next is not None:
            sample, size_mb, fetch_s, ready_s = self._next
            if self._used_mb + size_mb > self._capacity_mb:
                break
            thread = simulation.thread
            start_s = max(now_s, free_s[thread])
            from_pfs = False
            if pfs_allowed and not (waits and fetch_s < _INFINITY):
                pfs_s = size_mb * fetch_pfs[clients.count(number, start_s)]
                if pfs_s < fetch_s or ready_s > start_s:
                    from_pfs, fetch_s, ready_s = True, pfs_s, start_s
                    clients.plan(number, start_s)
                    simulation.pfs_mb += size_mb
            if fetch_s < _INFINITY:
                ready_s = free_s[thread] = max(start_s, ready_s) + (fetch_s + size_mb * write)
                if not known[sample]:
                    known[sample] = True
                    self._used_mb += size_mb
            staged.append((sample, size_mb, ready_s, from_pfs))
            simulation.thread = (thread + 1) % len(free_s)
            self._next = next(self._ahead, None)

    def iterate(self, now_s: float) -> float:
        """Read and compute one batch; returns when that is done."""
        simulation = self._simulation
        staged, last_read_s, compute = self._staged, simulation.clients.last_read_s, simulation.times.compute
        leaving_mb = 0.0
        for place in range(simulation.job.batch):
            if skipped := not staged:
                self._skip()
            sample, size_mb, ready_s, from_pfs = staged.popleft()
            if ready_s > now_s:
                now_s = self._request(now_s, sample, size_mb, ready_s, from_pfs)
            elif from_pfs:
                last_read_s[self._number] = now_s
            if ready_s < _INFINITY:
                leaving_mb += size_mb
            if place == 0:  # what the batch before had in the buffer leaves it
                self._used_mb -= self._leaving_mb
            if place == 0 or skipped:
                self.fill(now_s)
            now_s += size_mb * compute
        self._leaving_mb = leaving_mb
        return now_s

    def _skip(self) -> None:
        """The next read was not planned: without a staging buffer, or because it had no room."""
        assert self._next is not None
        sample, size_mb, _, _ = self._next
        self._staged.append((sample, size_mb, _INFINITY, False))
        self._next = next(self._ahead, None)

    def _request(self, now_s: float, sample: int, size_mb: float, staged_s: float, from_pfs: bool) -> float:
        """A sample is needed that is not there: wait for it, or fetch it now if that is faster. (As published: the
        reader is one more thread that fetches.) Returns when it is there."""
        simulation, number = self._simulation, self._number
        clients, times = simulation.clients, simulation.times
        waits = self._staging is not None and self._staging.waits and staged_s < _INFINITY and not from_pfs
        if not waits:
            fetch = pfs = self._fetch_pfs[clients.count(number, now_s)]
            if simulation.held[sample]:
                for holder in np.flatnonzero(simulation.ready_s[:, sample] <= now_s).tolist():
                    storage_class = simulation.copies.storage_class[holder, sample]
                    fetch = min(fetch, (times.fetch_local if holder == number else times.fetch_remote)[storage_class])
            fetched_s = now_s + (size_mb * fetch + size_mb * times.write)
            if fetched_s < staged_s:
                if fetch == pfs:
                    clients.last_read_s[number] = now_s  # as published: not when it is handed over
                    simulation.pfs_mb += size_mb
                return float(fetched_s)
        if from_pfs:
            clients.last_read_s[number] = staged_s
        return staged_s
