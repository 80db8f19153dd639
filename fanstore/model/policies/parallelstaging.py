"""Parallel data staging (Kurth et al., SC 2018): before training, nodes read shares from the PFS and exchange them.

Each node then reads only what it has itself, which changes what is learned.
"""

import numpy as np

from fanstore.model.job import Job
from fanstore.model.plan import Load, Plan, Source, Staging
from fanstore.model.policy import Policy, RefusedError, fitting
from fanstore.model.system import System


class ParallelStaging(Policy):
    """As published, node i copies from others only samples of lower numbers than those of its share (so node 0 copies
    nothing), and reads its share only: what was copied takes time and is not used."""

    name = "parallel-staging"
    summary = "shares on local disks, loaded first; reads only those"
    keeps_order = False

    def plan(self, system: System, job: Job) -> Plan:
        disk = self.disk(system)
        capacity_mb = system.classes[disk].capacity_mb
        random = np.random.default_rng([job.seed, 2])
        access = np.empty_like(job.access)
        loads = []
        for node in range(job.nodes):
            share = np.array(job.share(node))
            own = share[: fitting(job.sizes_mb[share], capacity_mb)]
            if not len(own):
                raise RefusedError(f"{self.name} reads only what is on the disk of the node, and nothing fits there")
            room_mb = capacity_mb - float(job.sizes_mb[own].sum())
            others = np.arange(fitting(job.sizes_mb[: share[0]], room_mb))
            loads.append((Load.into(system, disk, own), Load.into(system, disk, others, Source.REMOTE)))
            access[node] = random.integers(own[0], own[-1] + 1, access.shape[1])
        return Plan(access, tuple(loads), preloads=True, staging=Staging(frozenset({Source.LOCAL})))
