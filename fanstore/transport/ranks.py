"""The processes that prepare one dataset together: one alone, or the ranks of an mpirun.

Owns broadcast, gather, and the small messages by which ranks report progress and stop each other. All calls come from
the main thread (MPI_THREAD_FUNNELED is enough). Used by fanstore.prep.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fanstore import DISTRIBUTION
from fanstore.errors import FanstoreError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

T = TypeVar("T")
_TAG_PROGRESS = 1
_TAG_STOP = 2
#: Set by the launchers: Open MPI, MPICH and Intel MPI; by srun. The first that is present counts.
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SLURM_SIZE_VARIABLES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_SLURM_RANK_VARIABLES = ("SLURM_PROCID",)


class Ranks(Protocol):
    """What preparation needs from its fellow processes."""

    rank: int
    size: int

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order, on rank 0; an empty list elsewhere."""

    def report(self, done_bytes: int, done_files: int) -> None:
        """Tell rank 0 how much more this rank has done."""

    def collect_reports(self) -> tuple[int, int]:
        """On rank 0: what the others have reported since the last call."""

    def stop_others(self) -> None:
        """Ask all other ranks to stop."""

    def stop_requested(self) -> bool:
        """Whether another rank has asked this one to stop."""

    def abort(self, code: int) -> None:
        """Give up at once, without waiting for the others (after a signal)."""


class Solo:
    """One process, no MPI."""

    rank = 0
    size = 1

    def broadcast(self, value: T | None) -> T:
        assert value is not None
        return value

    def gather(self, value: T) -> list[T]:
        return [value]

    def report(self, done_bytes: int, done_files: int) -> None:
        """Nobody to tell."""

    def collect_reports(self) -> tuple[int, int]:
        return 0, 0

    def stop_others(self) -> None:
        """There are none."""

    def stop_requested(self) -> bool:
        return False

    def abort(self, code: int) -> None:
        """Nothing to give up: the caller ends the process."""


class MpiRanks:
    """The ranks of MPI_COMM_WORLD."""

    def __init__(self, world: Intracomm) -> None:
        self._world: Any = world.Dup()
        self.rank: int = world.Get_rank()
        self.size: int = world.Get_size()
        self._sent: list[Any] = []

    def broadcast(self, value: T | None) -> T:
        result: T = self._world.bcast(value, root=0)
        return result

    def gather(self, value: T) -> list[T]:
        return self._world.gather(value, root=0) or []

    def report(self, done_bytes: int, done_files: int) -> None:
        self._send((done_bytes, done_files), 0, _TAG_PROGRESS)

    def _send(self, message: tuple[int, int] | None, to: int, tag: int) -> None:
        # Kept until complete: MPI may still read the buffer. Small messages complete at once, so the list stays short.
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self._world.isend(message, dest=to, tag=tag))

    def collect_reports(self) -> tuple[int, int]:
        total_bytes = total_files = 0
        while self._world.iprobe(tag=_TAG_PROGRESS):
            done_bytes, done_files = self._world.recv(tag=_TAG_PROGRESS)
            total_bytes += done_bytes
            total_files += done_files
        return total_bytes, total_files

    def stop_others(self) -> None:
        for other in range(self.size):
            if other != self.rank:
                self._send(None, other, _TAG_STOP)

    def stop_requested(self) -> bool:
        requested = False
        while self._world.iprobe(tag=_TAG_STOP):
            self._world.recv(tag=_TAG_STOP)
            requested = True
        return requested

    def abort(self, code: int) -> None:
        self._world.Abort(code)


def launched_size() -> int:
    """How many processes the launcher that started this one says there are; 1 without a launcher. Needs no MPI."""
    return _first_number(_SIZE_VARIABLES, _SLURM_SIZE_VARIABLES, 1)


def launched_rank() -> int:
    """The rank that the launcher gave this process; 0 without a launcher. Needs no MPI."""
    return _first_number(_RANK_VARIABLES, _SLURM_RANK_VARIABLES, 0)


def _first_number(names: tuple[str, ...], slurm_names: tuple[str, ...], default: int) -> int:
    # Slurm sets its own variables also for a batch script, which is alone; only with PMIx are we one of an MPI job.
    wanted = names + slurm_names if "PMIX_RANK" in os.environ else names
    for name in wanted:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return default


def connect() -> Ranks:
    """The ranks of this job. MPI is only loaded when a launcher started more than one process."""
    if launched_size() <= 1:
        return Solo()
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise FanstoreError(
            f"started by an MPI launcher, but mpi4py cannot be loaded ({error}); run: pip install '{DISTRIBUTION}[mpi]'"
        ) from error
    world = MPI.COMM_WORLD
    if world.Get_size() != launched_size():
        raise FanstoreError(
            f"the MPI launcher started {launched_size()} processes, but the MPI library of this environment sees "
            f"{world.Get_size()}; use the mpirun that belongs to it (in the same virtual environment)"
        )
    return MpiRanks(world)
