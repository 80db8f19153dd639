"""What the shuffles of ``fanstore.order`` do to the reads of a job: what comes from other nodes, what a node holds.

Owns the figures that a forecast needs of a shuffle, counted in an epoch of the shuffle itself, over fewer samples where
there are many. Importance exchange is counted without losses, so that what it sends is drawn evenly: how much crosses
does not depend on which.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fanstore.errors import UsageError
from fanstore.order import (
    ImportanceExchange,
    LocalityAware,
    LocalShuffle,
    PartialLocalShuffle,
    ShardShuffle,
    Shuffle,
)

#: Samples of an epoch that is counted, at most; but one batch of every rank at least.
_COUNTED = 1_000_000
#: Fractions of partial shuffling that are looked at.
FRACTIONS = (0.1, 0.3, 0.5, 0.9)
#: Samples of the buffer of shard shuffling.
BUFFER = 1_000


@dataclass(frozen=True)
class Shuffling:
    """One shuffle, for a number of nodes.

    Attributes:
        remote: of an epoch's samples, the part that comes from another node than the one that had it before.
        own: a node reads the samples of its own share again in each epoch, but for those that come.
        stays: what came belongs to the node from then on, so that it reads more and more that lies in partitions of
            other nodes.
        share: samples that a node holds at a time, of its even share: 1 + Q.
    """

    name: str
    remote: float
    own: bool
    stays: bool = False
    share: float = 1.0

    def foreign(self, nodes: int, epoch: int) -> float:
        """Of what a node reads in this epoch, the part whose partitions are on other nodes."""
        if not self.stays:
            return self.remote
        away = 1 - 1 / nodes
        return away * (1 - (1 - self.remote / away) ** epoch) if nodes > 1 else 0.0


def global_shuffle(nodes: int) -> Shuffling:
    """What every stock sampler does: the expected share."""
    return Shuffling("global", 1 - 1 / nodes, own=False)


def shufflings(nodes: int, gpus: int, batch: int, files: int) -> tuple[Shuffling, ...]:
    """All of them, for so many ranks, of which ``gpus`` are on each node."""
    ranks = nodes * gpus
    if files < ranks * batch:
        raise UsageError(f"an epoch has {files:,} samples, and one batch of all GPUs {ranks * batch:,}")
    samples = min(files, max(_COUNTED, ranks * batch)) // (ranks * batch) * (ranks * batch)
    partial = [
        _counted(f"partial, Q = {fraction:g}", _partial(samples, ranks, fraction), gpus, own=True, stays=True)
        for fraction in FRACTIONS
    ]
    return (
        global_shuffle(nodes),
        _counted("locality-aware", LocalityAware(samples=samples, ranks=ranks, batch=batch), gpus, own=True),
        *partial,
        _counted(
            "importance, pairs, Q = 0.1",
            ImportanceExchange(samples=samples, ranks=ranks, fraction=0.1),
            gpus,
            own=True,
            stays=True,
        ),
        _counted("local", LocalShuffle(samples=samples, ranks=ranks), gpus, own=True),
        _counted("shards", _shards(samples, ranks), gpus, own=False),
    )


def by_fraction(nodes: int, fractions: tuple[float, ...]) -> tuple[Shuffling, ...]:
    """Partial shuffling with these fractions, as expected: Q (1 - 1/N) of the samples cross, (1 + Q) are held."""
    return tuple(
        Shuffling(f"Q = {fraction:g}", fraction * (1 - 1 / nodes), own=True, stays=True, share=1 + fraction)
        for fraction in fractions
    )


def _partial(samples: int, ranks: int, fraction: float) -> PartialLocalShuffle:
    return PartialLocalShuffle(samples=samples, ranks=ranks, fraction=fraction)


def _shards(samples: int, ranks: int) -> ShardShuffle:
    """Of 1,000 samples, or less if ranks would have only a few."""
    shards = min(samples, max(samples // 1000, 8 * ranks))
    return ShardShuffle(samples=samples, ranks=ranks, buffer=BUFFER, shards=shards)


def _counted(name: str, order: Shuffle, gpus: int, own: bool, stays: bool = False) -> Shuffling:
    """Of the transfers in one epoch, those that leave a node. A rank that holds more than others decides."""
    transfers = order.transfers(0)
    away = np.count_nonzero(transfers.origin.astype(np.int64) // gpus != transfers.to.astype(np.int64) // gpus)
    ranks = range(min(order.ranks, gpus))
    share = sum(order.room(rank) for rank in ranks) / (len(ranks) * order.sample_count / order.ranks)
    return Shuffling(name, away / order.sample_count, own, stays, share)
