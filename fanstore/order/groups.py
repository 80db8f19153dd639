"""Items in groups: everything of rank 0, then of rank 1, and so on, each in the sequence it had.

Owns the one operation that all shuffles are made of. Labels are kept in as few bytes as they need: numpy sorts 8 and 16
bits by counting, in a tenth of the time.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fanstore.order.order import Integers, Samples

#: A small number (of a rank, mostly) for each item.
Labels: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


def as_labels(values: Integers, count: int) -> Labels:
    """Numbers below ``count``, in as few bytes as they need."""
    return values.astype(np.min_scalar_type(max(0, count - 1)), copy=False)


@dataclass(frozen=True)
class Groups:
    """``items[bounds[g]:bounds[g + 1]]`` is group g."""

    items: Samples
    bounds: Samples

    @classmethod
    def of(cls, items: Samples, labels: Labels, count: int) -> "Groups":
        """Items by label; there are ``count`` groups, of which some may be empty."""
        return cls(items[np.argsort(labels, kind="stable")], bounds_of(np.bincount(labels, minlength=count)))

    def __getitem__(self, group: int) -> Samples:
        return self.items[self.bounds[group] : self.bounds[group + 1]]

    @property
    def sizes(self) -> Samples:
        return np.diff(self.bounds)


def bounds_of(sizes: Integers) -> Samples:
    """Where groups of these sizes begin, one after the other, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def places_within(sizes: Integers) -> Samples:
    """0, 1, 2, ... within each of the groups."""
    return np.arange(int(np.sum(sizes))) - np.repeat(bounds_of(sizes)[:-1], sizes)
