"""Runs a policy: what it decides for a job, and what comes of that on a system.

Owns the table of modes. Both simulate the same plans; docs/model.md says how they differ.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from fanstore.errors import UsageError
from fanstore.model import corrected, published
from fanstore.model.job import Job
from fanstore.model.outcome import Outcome
from fanstore.model.plan import Plan
from fanstore.model.policy import Policy
from fanstore.model.system import System

Mode: TypeAlias = Literal["published", "corrected"]

MODES: dict[Mode, Callable[[System, Job, Plan], Outcome]] = {
    "published": published.simulate,
    "corrected": corrected.simulate,
}


def run(policy: Policy, system: System, job: Job, mode: Mode) -> Outcome:
    """How the job goes with this policy."""
    if job.nodes != system.nodes:
        raise UsageError(f"the order is for {job.nodes} nodes, and the system has {system.nodes}")
    plan = policy.plan(system, job)
    return lower_bound(system, job) if plan.ideal else MODES[mode](system, job, plan)


def lower_bound(system: System, job: Job) -> Outcome:
    """Only computing takes time: in each iteration that of the node whose samples are largest."""
    batches_mb = job.sizes_mb[job.access].reshape(job.nodes, job.iterations, job.batch).sum(axis=2)
    ends_s = np.cumsum(batches_mb.max(axis=0)) / system.compute_mb_per_s
    epoch_ends_s = ends_s[job.epoch_iterations - 1 :: job.epoch_iterations].tolist()
    return Outcome(epoch_ends_s[-1], stall_s=0.0, pfs_mb=0.0, epoch_ends_s=tuple(epoch_ends_s))
