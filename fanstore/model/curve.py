"""A measured throughput: how many MB/s there are in all when so many share it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fanstore.errors import UsageError


@dataclass(frozen=True)
class Curve:
    """Measured points, straight lines in between, constant before the first and after the last (equation 4.1)."""

    sharing: tuple[float, ...]
    mb_per_s: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[int, float], name: str) -> Curve:
        """From throughputs by number of threads or clients; ``name`` is for messages."""
        if not points:
            raise UsageError(f"{name} has no measured point; give at least one")
        for sharing, mb_per_s in points.items():
            if sharing < 1:
                raise UsageError(f"{name} has a throughput for {sharing}; it begins with 1")
            if not (mb_per_s > 0 and math.isfinite(mb_per_s)):  # also refuses NaN
                raise UsageError(f"{name} has a throughput of {mb_per_s} MB/s; it must be above 0")
        ascending = sorted(points)
        return cls(tuple(map(float, ascending)), tuple(float(points[key]) for key in ascending))

    def at(self, sharing: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The throughput in all."""
        return np.interp(np.asarray(sharing, dtype=np.float64), self.sharing, self.mb_per_s)

    def each(self, sharing: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The throughput of each one of those who share it; one alone has all of it."""
        count = np.maximum(sharing, 1.0)
        return self.at(count) / count
