"""The lower bound: what no policy can beat."""

from fanstore.model.job import Job
from fanstore.model.plan import Plan
from fanstore.model.policy import Policy
from fanstore.model.system import System


class LowerBound(Policy):
    """Every sample is there before it is needed; only computing takes time."""

    name = "lower-bound"
    summary = "every sample is there before it is needed"

    def plan(self, system: System, job: Job) -> Plan:
        return Plan(job.access, ideal=True)
