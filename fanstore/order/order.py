"""What an order is: for each epoch and rank of a training job, the samples in the sequence in which they are read.

Owns the interface and the checks that all orders share. A sample is a number, its place in the list of the dataset's
files (``listing.py``); an epoch counts from 0, a rank too. Orders do no I/O and have no threads; several of them keep
what they computed for the last epoch, so one object belongs to one thread at a time.
"""

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fanstore.errors import UsageError
from fanstore.units import format_count

#: Numbers of samples.
Samples: TypeAlias = npt.NDArray[np.int64]
#: Integers of any width, as callers give them.
Integers: TypeAlias = npt.NDArray[np.integer[Any]]


class Order(ABC):
    """An order of ``sample_count`` samples over ``ranks`` ranks."""

    sample_count: int
    ranks: int

    def __init__(self, samples: int, ranks: int = 1) -> None:
        self.sample_count = at_least(0, samples, "samples")
        self.ranks = at_least(1, ranks, "ranks")

    @abstractmethod
    def samples(self, epoch: int, rank: int = 0) -> Samples:
        """What the rank reads in the epoch, first to last. The array may be shared: it is not to be changed."""

    def check(self, epoch: int, rank: int) -> None:
        at_least(0, epoch, "epoch")
        if not 0 <= rank < self.ranks:
            raise UsageError(f"there is no rank {rank} in an order for {format_count(self.ranks, 'rank')}")


def at_least(least: int, value: int, name: str) -> int:
    if value < least:
        raise UsageError(f"'{name}' is {value}; it must be {least} or more")
    return int(value)


def as_fraction(value: float, name: str) -> float:
    if not 0 <= value <= 1:  # also refuses NaN
        raise UsageError(f"'{name}' is {value}; it must be between 0 and 1")
    return float(value)
