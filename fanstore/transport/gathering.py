"""Collective steps: every rank gives a value and gets all of them. Owned and used by the MPI thread of mpi.py only.

Made of plain messages instead of MPI's collectives: those keep the MPI thread until all have come, and may wait for
ever when a rank dies. No MPI here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from fanstore.errors import FanstoreError

Finish = Callable[[list[bytes] | FanstoreError], None]


class _Step:
    """One step: ``finish`` is None until this rank takes part."""

    __slots__ = ("finish", "values")

    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}
        self.finish: Finish | None = None


class Gatherings:
    """The steps that are not complete.

    Attributes:
        finished: calls with the result of steps that are; the owner takes them and makes them on the trio thread.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._steps: dict[int, _Step] = {}
        self._gone: dict[int, str] = {}
        self.finished: list[Callable[[], None]] = []

    def take_part(self, step: int, finish: Finish) -> None:
        self._steps.setdefault(step, _Step()).finish = finish
        self._check()

    def give(self, rank: int, step: int, value: bytes) -> None:
        """A rank's value, our own included. Others may be ahead of us."""
        self._steps.setdefault(step, _Step()).values[rank] = value
        self._check()

    def leave(self, rank: int, reason: str) -> None:
        """The rank gives no more values."""
        self._gone.setdefault(rank, reason)
        self._check()

    def _check(self) -> None:
        """End the steps that are complete, or cannot be completed any more."""
        for number, step in list(self._steps.items()):
            if step.finish is None:
                continue
            missing = [rank for rank in range(self._size) if rank not in step.values]
            gone = [rank for rank in missing if rank in self._gone]
            if missing and not gone:
                continue
            result: list[bytes] | FanstoreError = [step.values[rank] for rank in range(self._size) if not missing]
            if gone:
                result = FanstoreError(f"rank {gone[0]} {self._gone[gone[0]]}")
            del self._steps[number]
            self.finished.append(functools.partial(step.finish, result))
