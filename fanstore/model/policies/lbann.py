"""The in-memory data store of LBANN (Jacobs et al., 2019): the whole dataset is in the memory of all nodes together."""

import numpy as np

from fanstore.model.job import Job
from fanstore.model.plan import Load, Plan, Source, Staging
from fanstore.model.policy import Policy, RefusedError
from fanstore.model.system import System
from fanstore.order.order import Integers


class LbannDynamic(Policy):
    """Each node keeps what it reads in the first epoch."""

    name = "lbann-dynamic"
    summary = "memory of all nodes, filled by the first epoch"
    _preloads = False

    def plan(self, system: System, job: Job) -> Plan:
        memory = self.memory(system)
        capacity_mb = job.nodes * system.classes[memory].capacity_mb
        if job.dataset_mb > capacity_mb:
            raise RefusedError(
                f"{self.name} needs memory for the whole dataset: {job.dataset_mb:,.0f} MB do not fit into "
                f"{capacity_mb:,.0f} MB of {job.nodes} nodes"
            )
        loads = tuple((Load.into(system, memory, self._held(job, node)),) for node in range(job.nodes))
        staging = Staging(frozenset({Source.LOCAL, Source.REMOTE}))
        return Plan(job.access, loads, preloads=self._preloads, staging=staging)

    def _held(self, job: Job, node: int) -> Integers:
        return job.access[node, : job.epoch_iterations * job.batch]


class LbannPreload(LbannDynamic):
    """Each node loads an even share before training."""

    name = "lbann-preload"
    summary = "memory of all nodes, loaded first"
    _preloads = True

    def _held(self, job: Job, node: int) -> Integers:
        return np.array(job.share(node))
