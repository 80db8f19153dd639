"""HDMLP, the policy of the thesis (NoPFS in the SC'21 paper): each node keeps what it will read most often."""

import numpy as np

from fanstore.model.job import Job
from fanstore.model.plan import Load, Plan, Source, Staging
from fanstore.model.policy import Policy, fitting
from fanstore.model.system import System
from fanstore.order.order import Integers


class Hdmlp(Policy):
    """Nodes decide alone: what several of them read often is loaded by each of them.

    Copies of others are not used to fill the staging buffer, only (as published) when a sample is late.
    """

    name = "hdmlp"
    summary = "each node keeps what it reads most often"

    def plan(self, system: System, job: Job) -> Plan:
        loads = []
        for access in job.access:
            wanted = _preference(system, job, access)[:-1]  # as published, the last of the list is never loaded
            loads_of_node = []
            for j in system.keeping:
                count = fitting(job.sizes_mb[wanted], system.classes[j].capacity_mb)
                loads_of_node.append(Load.into(system, j, wanted[:count]))
                wanted = wanted[count:]
            loads.append(tuple(loads_of_node))
        return Plan(job.access, tuple(loads), staging=Staging(frozenset({Source.LOCAL, Source.PFS})))


def _preference(system: System, job: Job, access: Integers) -> Integers:
    """All samples, most often read by this node first; then cut into windows that are sorted by first read.

    There is a window for each storage class, as large as it is. As published, the staging buffer has one, too, although
    nothing is kept there: so the windows do not fit the classes.
    """
    order = np.argsort(-np.bincount(access, minlength=job.samples), kind="stable")
    first_read = first_reads(access, job.samples)
    begin = 0
    for storage in system.classes:
        end = begin + fitting(job.sizes_mb[order[begin:]], storage.capacity_mb) + 1  # with the one that does not fit
        window = order[begin:end]
        order[begin:end] = window[np.argsort(first_read[window], kind="stable")]
        begin = end
    return order


def first_reads(access: Integers, samples: int) -> Integers:
    """The place of each sample's first read in an access string; its length for those that are not read."""
    first = np.full(samples, len(access))
    first[access[::-1]] = np.arange(len(access))[::-1]  # of several assignments to one element, the last one stays
    return first
