"""What crosses from rank to rank in an epoch: which samples, how many bytes, in how many messages.

Owns the records; shuffles make them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fanstore.order.groups import Labels
from fanstore.order.order import Integers, Samples


@dataclass(frozen=True)
class Exchange:
    """One rank's part of an epoch's exchange, in the sequence in which it is wanted."""

    sent: Samples
    to: Integers  #: the rank that gets each
    received: Samples
    origin: Integers  #: the rank that each comes from


@dataclass(frozen=True)
class Transfers:
    """All samples that cross in an epoch, and between which ranks."""

    samples: Samples
    origin: Labels
    to: Labels

    def of_rank(self, rank: int) -> Exchange:
        out, into = np.flatnonzero(self.origin == rank), np.flatnonzero(self.to == rank)
        return Exchange(self.samples[out], self.to[out], self.samples[into], self.origin[into])

    def traffic(self, sample_count: int, ranks: int, sizes: npt.ArrayLike | None) -> "Traffic":
        weights = None if sizes is None else np.asarray(sizes, dtype=np.float64)[self.samples]
        origin, to = self.origin.astype(np.int64), self.to.astype(np.int64)
        pairs = np.unique(origin * ranks + to)

        def per_rank(labels: Integers, of: npt.NDArray[np.float64] | None = None) -> Samples:
            return np.bincount(labels, of, minlength=ranks).astype(np.int64)

        return Traffic(
            sample_count=sample_count,
            sent=per_rank(origin),
            received=per_rank(to),
            sent_bytes=None if weights is None else per_rank(origin, weights),
            received_bytes=None if weights is None else per_rank(to, weights),
            partners=per_rank(pairs // ranks),
        )


@dataclass(frozen=True)
class Traffic:
    """Sums per rank, as arrays; bytes are there if sizes were given."""

    sample_count: int
    sent: Samples
    received: Samples
    sent_bytes: Samples | None
    received_bytes: Samples | None
    partners: Samples  #: ranks that each sends to: messages, if what goes to one rank is sent together

    @property
    def share(self) -> float:
        """Samples that cross, of all samples."""
        return int(self.received.sum()) / self.sample_count if self.sample_count else 0.0
