"""FanStore's own policy: one copy of each sample in the job, on a fixed node, its home.

So nothing is read from the PFS twice as long as the nodes have room for it together; what has no room is read from the
PFS each time, and the rest is never evicted, which is the least that any policy can read. A sample that has a home
comes only from there, also in the first epoch, when its home may still have to load it. How far ahead samples are
fetched is what the window of the prefetcher says (``fanstore.order.window``).
"""

import numpy as np
import numpy.typing as npt

from fanstore.model.job import Job
from fanstore.model.plan import Load, Plan, Source, Staging
from fanstore.model.policies.hdmlp import first_reads
from fanstore.model.policy import Policy, fitting
from fanstore.model.system import STAGING, System
from fanstore.order.order import Integers, Samples

_NOWHERE = -1


class FanStore(Policy):
    """Homes load their samples in the sequence in which the job reads them first, with the threads of all their storage
    classes together."""

    name = "fanstore"
    summary = "one copy in the job, read ahead through its home"

    def plan(self, system: System, job: Job) -> Plan:
        home = homes(job, system.room_mb)
        first_read = np.min([first_reads(access, job.samples) for access in job.access], axis=0)
        threads = sum(system.classes[j].threads for j in system.keeping)
        loads = []
        for node in range(job.nodes):
            own = np.flatnonzero(home == node)
            storage_class = _classes(system, job, own)
            sequence = np.argsort(first_read[own], kind="stable")
            sequence = sequence[storage_class[sequence] != STAGING]
            loads.append((Load(own[sequence], storage_class[sequence], threads),))
        return Plan(job.access, tuple(loads), staging=Staging(frozenset(Source), waits=True, by_window=True))


def homes(job: Job, room_mb: float) -> Samples:
    """The node that keeps each sample, or -1: nodes in turn, as far as each has room; what one has no room for goes to
    another that has.

    A daemon places partitions, in turn if they are of one size (``fanstore.dataset.placement``). To a shuffled job it
    is the same which samples share one; here each is alone.
    """
    home = np.arange(job.samples) % job.nodes
    left_mb = np.full(job.nodes, room_mb, dtype=np.float64)
    over: list[Integers] = []
    for node in range(job.nodes):
        own = np.flatnonzero(home == node)
        count = fitting(job.sizes_mb[own], room_mb)
        left_mb[node] -= job.sizes_mb[own[:count]].sum()
        over.append(own[count:])
    homeless = np.concatenate(over)
    home[homeless] = _NOWHERE
    for node in range(job.nodes):
        count = fitting(job.sizes_mb[homeless], left_mb[node])
        home[homeless[:count]] = node
        homeless = homeless[count:]
    return home


def _classes(system: System, job: Job, own: Integers) -> npt.NDArray[np.uint8]:
    """The storage class for each of a node's samples: the fastest one as far as it goes, then the next."""
    storage_class = np.full(len(own), STAGING, dtype=np.uint8)
    begin = 0
    for j in system.keeping:
        end = begin + fitting(job.sizes_mb[own[begin:]], system.classes[j].capacity_mb)
        storage_class[begin:end] = j
        begin = end
    return storage_class
