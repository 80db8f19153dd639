"""Prefetching without caching: what a data loader with workers does."""

from fanstore.model.job import Job
from fanstore.model.plan import Plan, Source, Staging
from fanstore.model.policy import Policy
from fanstore.model.system import System


class StagingPool(Policy):
    """The staging buffer is filled ahead from the PFS; nothing is kept."""

    name = "staging-pool"
    summary = "read ahead from the PFS, keep nothing"

    def plan(self, system: System, job: Job) -> Plan:
        return Plan(job.access, staging=Staging(frozenset({Source.PFS})))
