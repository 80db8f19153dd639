"""DeepIO (Zhu et al., MASCOTS 2018): the memory of all nodes together is a cache, filled before training.

In the ordered mode reads are in the order of the job. In the opportunistic one samples that are in memory are read
instead, which changes what is learned.
"""

import numpy as np

from fanstore.model.job import Access, Job
from fanstore.model.plan import Load, Plan, Source, Staging
from fanstore.model.policy import Policy, RefusedError, fitting
from fanstore.model.system import System


class DeepIOOrdered(Policy):
    """What no node has in memory is read from the PFS when it is needed."""

    name = "deepio-ordered"
    summary = "memory of all nodes as one cache, loaded first"

    def plan(self, system: System, job: Job) -> Plan:
        memory = self.memory(system)
        held = _held(job, system.classes[memory].capacity_mb)
        loads = tuple((Load.into(system, memory, np.arange(own.start, own.stop)),) for own in held)
        staging = Staging(frozenset({Source.LOCAL, Source.REMOTE}))
        return Plan(self._access(job, held), loads, preloads=True, staging=staging)

    def _access(self, job: Job, held: list[range]) -> Access:
        return job.access


class DeepIOOpportunistic(DeepIOOrdered):
    """Only what is in memory is read, at random."""

    name = "deepio-opportunistic"
    summary = "the same, and reads only what is in memory"
    keeps_order = False

    def _access(self, job: Job, held: list[range]) -> Access:
        """As published: node 0 reads only what it has itself, node i with probability 1/(N-1), and otherwise what node
        i-1 has."""
        if not all(held):
            raise RefusedError(f"{self.name} reads only what is in memory, and on some node nothing is")
        random = np.random.default_rng([job.seed, 1])
        access = np.empty_like(job.access)
        for node, own in enumerate(held):
            access[node] = random.integers(own.start, own.stop, access.shape[1])
            if node > 0:
                before = held[node - 1]
                others = np.flatnonzero(random.integers(0, job.nodes - 1, access.shape[1]))
                access[node, others] = random.integers(before.start, before.stop, len(others))
        return access


def _held(job: Job, capacity_mb: float) -> list[range]:
    """What each node has in memory: an even share if that fits, otherwise as much as fits, node after node."""
    if job.dataset_mb / job.nodes <= capacity_mb:
        return [job.share(node) for node in range(job.nodes)]
    held = []
    begin = 0
    for _ in range(job.nodes):
        end = begin + fitting(job.sizes_mb[begin:], capacity_mb)
        held.append(range(begin, end))
        begin = end
    return held
