"""How fast the ranks of a job can send to each other: raw MPI, without anything of FanStore's.

Owns a communicator of its own. All calls are collective, on the main thread. Used by fanstore-plan measure, through
fanstore.doctor.speeds.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

#: One message of a transfer; several are under way at a time.
_MESSAGE_BYTES, _UNDER_WAY = 1 << 20, 4
#: Messages that are timed to find out how many fill the time.
_TRIAL = 4
#: Most that one rank sends in one round.
_MOST_BYTES = 1 << 30
_QUESTIONS, _QUESTION_BYTES = 300, 256


class Links:
    """The network between the ranks of MPI_COMM_WORLD; MPI must have been started (transport/ranks.py)."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world: Any = MPI.COMM_WORLD.Dup()
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()
        self._out = np.zeros((_UNDER_WAY, _MESSAGE_BYTES), dtype=np.uint8)
        self._in = np.zeros((_UNDER_WAY, _MESSAGE_BYTES), dtype=np.uint8)

    def exchange_mb_per_s(self, distance: int, seconds: float) -> float:
        """Every rank sends to the one ``distance`` further, at the same time; what this rank received."""
        self._world.Barrier()
        trial_s = self._transfer(distance, _TRIAL) / _TRIAL
        longest_s = self._world.allreduce(trial_s, op=self._mpi.MAX)
        count = int(min(max(seconds / max(longest_s, 1e-9), _TRIAL), _MOST_BYTES // (_MESSAGE_BYTES * _UNDER_WAY)))
        self._world.Barrier()
        taken_s = self._transfer(distance, count)
        return count * _UNDER_WAY * _MESSAGE_BYTES / 1e6 / max(taken_s, 1e-9)

    def _transfer(self, distance: int, count: int) -> float:
        to, origin = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        begin_s = time.perf_counter()
        for _ in range(count):
            requests = [self._world.Irecv(buffer, source=origin) for buffer in self._in]
            requests += [self._world.Isend(buffer, dest=to) for buffer in self._out]
            self._mpi.Request.Waitall(requests)
        return time.perf_counter() - begin_s

    def round_trip_s(self) -> float:
        """A question and an answer of a few bytes, between neighbours; the median. 0 for one that has no neighbour."""
        self._world.Barrier()
        partner = self.rank ^ 1
        if partner >= self.size:
            return 0.0
        buffer = np.zeros(_QUESTION_BYTES, dtype=np.uint8)
        times_s = []
        for _ in range(_QUESTIONS):
            begin_s = time.perf_counter()
            if self.rank < partner:
                self._world.Send(buffer, dest=partner)
                self._world.Recv(buffer, source=partner)
            else:
                self._world.Recv(buffer, source=partner)
                self._world.Send(buffer, dest=partner)
            times_s.append(time.perf_counter() - begin_s)
        return float(np.median(times_s))
