"""What a policy is: the decision what to keep where and what to fetch from where, given a system and a job.

Owns the interface and what several policies need; ``policies`` has a module for each, and their table. Simulations
drive them. Policies have no state.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from fanstore.errors import FanstoreError
from fanstore.model.job import Job, Sizes
from fanstore.model.plan import Plan
from fanstore.model.system import System


class RefusedError(FanstoreError):
    """A policy cannot run this job on this system; the message says why."""


class Policy(ABC):
    """One way to bring samples to the nodes that read them."""

    name: ClassVar[str]  #: on the command line
    summary: ClassVar[str]  #: half a sentence for people
    keeps_order: ClassVar[bool] = True  #: what is read is what the job asks for

    @abstractmethod
    def plan(self, system: System, job: Job) -> Plan:
        """Decide; a job that the policy cannot run is a ``RefusedError``."""

    def memory(self, system: System) -> int:
        """The number of the fastest storage class that keeps copies."""
        if not system.keeping:
            raise RefusedError(f"{self.name} keeps copies, and there is no storage class besides the staging buffer")
        return system.keeping[0]

    def disk(self, system: System) -> int:
        """The number of the slowest one."""
        self.memory(system)  # or there is none
        return system.keeping[-1]


def fitting(sizes_mb: Sizes, capacity_mb: float) -> int:
    """How many of these samples, from the first on, fit together."""
    return int(np.searchsorted(np.cumsum(sizes_mb), capacity_mb, side="right"))
