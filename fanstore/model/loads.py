"""The loads of a job in the corrected simulation: how far each of them is, at the speed that contention leaves it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fanstore.model.contention import Contention, Floats
from fanstore.model.copies import Copies
from fanstore.model.equations import Times
from fanstore.model.job import Job
from fanstore.model.plan import Plan, Source
from fanstore.model.system import System
from fanstore.order.order import Integers

#: Steps after which contention among loads is taken for settled: each of them halves what is missing.
_STEPS = 40
#: Less than this is nothing: what rounding leaves of a load.
_NOTHING_MB = 1e-9


class Loads:
    """All loads of all nodes, side by side; arrays have an element for each load.

    Attributes:
        _node, _threads, _requests_per_mb: of each load.
        _from_pfs: 1 or 0; _fetched: parts of it by holder and storage class; both together are all of it.
        _kept: parts of it by storage class into which they are written.
        _left_mb: what is still to be loaded.
        pfs_mb: what was loaded from the PFS, all together.
        _mb_per_s: its speed, for now.
        _load, _behind_mb: by node and sample, the load that brings it, and what is left of that load when it is there.
    """

    def __init__(self, system: System, job: Job, plan: Plan, copies: Copies, times: Times) -> None:
        loads = [
            (node, load)
            for node, loads_of_node in enumerate(plan.loads)
            for load in loads_of_node
            if job.sizes_mb[load.samples].sum() > 0
        ]
        classes = len(system.classes)
        self._request_s = system.request_s
        self._node = np.array([node for node, _ in loads], dtype=np.int64)
        self._threads = np.array([load.threads for _, load in loads], dtype=np.float64)
        self._from_pfs = np.array([float(load.source is Source.PFS) for _, load in loads])
        self._requests_per_mb = np.zeros(len(loads))
        self._fetched = np.zeros((len(loads), job.nodes, classes))
        self._kept = np.zeros((len(loads), classes))
        self._left_mb = np.zeros(len(loads))
        self._mb_per_s = np.zeros(len(loads))
        self.pfs_mb = 0.0
        self._load = np.zeros((job.nodes, job.samples), dtype=np.int16)
        self._behind_mb = np.zeros((job.nodes, job.samples))
        for number, (node, load) in enumerate(loads):
            sizes_mb = job.sizes_mb[load.samples]
            loaded_mb = np.cumsum(sizes_mb)
            total_mb = self._left_mb[number] = loaded_mb[-1]
            self._load[node, load.samples] = number
            self._behind_mb[node, load.samples] = total_mb - loaded_mb
            self._requests_per_mb[number] = len(sizes_mb) / total_mb
            self._kept[number] = np.bincount(load.storage_class, sizes_mb, minlength=classes) / total_mb
            if load.source is not Source.PFS:
                holder = copies.holders(node, load.samples, frozenset({load.source}), times)
                place = holder * classes + copies.storage_class[holder, load.samples]
                fetched_mb = np.bincount(place, sizes_mb, minlength=job.nodes * classes)
                self._fetched[number] = fetched_mb.reshape(job.nodes, classes) / total_mb

    @property
    def done(self) -> bool:
        return not self._left_mb.any()

    def ready_s(self, holder: Integers, samples: Integers) -> Floats:
        """In how many seconds each of these copies is loaded, if loads go on as now; 0 or less if it is."""
        load = self._load[holder, samples]
        missing_mb = self._left_mb[load] - self._behind_mb[holder, samples]
        speed = self._mb_per_s[load]
        return np.divide(missing_mb, speed, out=np.zeros(len(samples)), where=speed > 0)

    def set_speeds(self, contention: Contention, source: Source | None = None) -> None:
        """Speeds under this contention, of all loads or those from one source."""
        speed = self._threads / self._seconds_per_mb(contention)
        self._mb_per_s[:] = np.where(self._going_on(source), speed, 0.0)

    def _seconds_per_mb(self, contention: Contention) -> Floats:
        node = self._node
        fetch = self._from_pfs * contention.pfs[node] + (self._fetched * contention.copy[node]).sum(axis=(1, 2))
        keep = (self._kept * contention.keep[node]).sum(axis=1)
        total: Floats = fetch + keep + self._requests_per_mb * self._request_s
        return total

    def advance(self, contention: Contention, seconds: float) -> None:
        """All go on for so long."""
        loaded_mb = np.minimum(self._mb_per_s * seconds, self._left_mb)
        self._use(contention, loaded_mb)
        self.pfs_mb += float(self._from_pfs @ loaded_mb)
        self._left_mb -= loaded_mb
        self._left_mb[self._left_mb < _NOTHING_MB] = 0.0

    def complete(self, contention: Contention) -> float:
        """Everything is loaded before anything else happens: first from the PFS, then from other nodes. Returns the
        seconds that it takes."""
        elapsed_s = 0.0
        for source in (Source.PFS, Source.REMOTE):
            while (going_on := self._going_on(source)).any():
                for _ in range(_STEPS):
                    self.set_speeds(contention, source)
                    self._use(contention, self._mb_per_s)
                    contention.settle(1.0)
                step_s = float((self._left_mb[going_on] / self._mb_per_s[going_on]).min())
                self.advance(contention, step_s)
                elapsed_s += step_s
        contention.settle(elapsed_s)
        return elapsed_s

    def _going_on(self, source: Source | None) -> npt.NDArray[np.bool_]:
        goes_on = self._left_mb > 0
        return goes_on if source is None else goes_on & (self._from_pfs == float(source is Source.PFS))

    def _use(self, contention: Contention, mb: Floats) -> None:
        for number in np.flatnonzero(mb):
            node = int(self._node[number])
            contention.use_pfs(node, float(self._from_pfs[number] * mb[number]))
            contention.use_copies(node, self._fetched[number] * mb[number])
            contention.use_keep(node, self._kept[number] * mb[number])
