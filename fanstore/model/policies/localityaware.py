"""Locality-aware data loading (Yang and Cong, HiPC 2019): an even share on each node's disk, loaded before training.

The idea is to give each sample of a batch to a node that has it. As published, the simulation never does: the order
stays that of the job. (``fanstore.order.LocalityAware`` does it.)
"""

import numpy as np

from fanstore.model.job import Job
from fanstore.model.plan import Load, Plan, Source, Staging
from fanstore.model.policy import Policy, fitting
from fanstore.model.system import System


class LocalityAware(Policy):
    """The staging buffer is filled from the fastest of local disk, other nodes' disks and PFS."""

    name = "locality-aware"
    summary = "even shares on local disks, loaded first"

    def plan(self, system: System, job: Job) -> Plan:
        disk = self.disk(system)
        loads = []
        for node in range(job.nodes):
            share = np.array(job.share(node))
            own = share[: fitting(job.sizes_mb[share], system.classes[disk].capacity_mb)]
            loads.append((Load.into(system, disk, own),))
        return Plan(job.access, tuple(loads), preloads=True, staging=Staging(frozenset(Source)))
