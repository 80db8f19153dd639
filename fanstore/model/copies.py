"""Which node keeps a copy of which sample, and from whom a node fetches one.

Owns what follows from the loads of a plan, whenever they are done. Used by both simulations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fanstore.model.equations import Times
from fanstore.model.job import Job
from fanstore.model.plan import Plan, Source
from fanstore.model.system import STAGING
from fanstore.order.order import Integers

#: There is no copy.
NOBODY = -1


@dataclass(frozen=True, eq=False)
class Copies:
    """``storage_class`` is that of the copy, by node and sample; STAGING, where nothing is kept, if there is none."""

    storage_class: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, job: Job, plan: Plan) -> Copies:
        storage_class = np.full((job.nodes, job.samples), STAGING, dtype=np.uint8)
        for node, loads in enumerate(plan.loads):
            for load in loads:
                storage_class[node, load.samples] = load.storage_class
        return cls(storage_class)

    def holders(self, node: int, samples: Integers, sources: frozenset[Source], times: Times) -> Integers:
        """The node that each of the samples is fetched from by ``node``: the fastest, and itself before others."""
        holder = np.full(len(samples), NOBODY)
        best_s = np.full(len(samples), np.inf)
        others = [other for other in range(len(self.storage_class)) if other != node]
        candidates = [node] * (Source.LOCAL in sources) + others * (Source.REMOTE in sources)
        for candidate in candidates:
            fetch_s = (times.fetch_local if candidate == node else times.fetch_remote)[
                self.storage_class[candidate, samples]
            ]
            better = fetch_s < best_s
            best_s[better] = fetch_s[better]
            holder[better] = candidate
        return holder
