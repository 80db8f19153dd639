"""No prefetching: what a training script does without workers."""

from fanstore.model.job import Job
from fanstore.model.plan import Plan
from fanstore.model.policy import Policy
from fanstore.model.system import System


class Naive(Policy):
    """Each sample is read from the PFS when it is needed, then preprocessed, then computed on."""

    name = "naive"
    summary = "read from the PFS when needed, nothing ahead"

    def plan(self, system: System, job: Job) -> Plan:
        return Plan(job.access)
