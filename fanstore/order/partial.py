"""Partial local shuffling: local shuffling that exchanges a fraction Q of the samples per epoch.

Nguyen et al., "Why Globally Re-shuffle? Revisiting Data Shuffling in Large Scale Deep Learning", IPDPS 2022. Q = 0 is
local shuffling, Q = 1 exchanges everything. Of N samples, each of M ranks holds up to (1 + Q) N/M.
"""

import numpy as np
import numpy.typing as npt

from fanstore.order.groups import Groups, Labels, as_labels, places_within
from fanstore.order.localshuffle import LocalShuffle
from fanstore.order.order import Samples, as_fraction
from fanstore.order.streams import Purpose, permutation


class PartialLocalShuffle(LocalShuffle):
    """The first samples that a rank reads in an epoch are those that it passes on; they are there for the next epoch.

    They go out in slots, one sample of each rank per slot. In each slot the ranks are permuted: the rank sends to where
    the permutation puts it, so that it sends one sample and receives one (its own, if it stays where it is).
    """

    def __init__(
        self,
        *,
        samples: int,
        ranks: int,
        fraction: float,
        seed: int = 0,
        ownership: npt.ArrayLike | None = None,
        first_epoch: int = 0,
    ) -> None:
        self.fraction = as_fraction(fraction, "fraction")
        super().__init__(samples=samples, ranks=ranks, seed=seed, ownership=ownership, first_epoch=first_epoch)

    @property
    def slots(self) -> Samples:
        """How many samples each rank exchanges in an epoch: the fraction of what it owns, rounded."""
        return (self.fraction * self._sizes + 0.5).astype(np.int64)

    def room(self, rank: int) -> int:
        return super().room(rank) + int(self.slots[rank])

    def _moved(self, epoch: int, owner: Labels) -> Labels:
        sizes, receivers = self._receivers(epoch, owner)
        leaving = self._leaving(epoch, owner)
        sent = leaving.items[places_within(leaving.sizes) < np.repeat(sizes, leaving.sizes)]
        moved = owner.copy()
        moved[sent] = receivers
        return moved

    def _leaving(self, epoch: int, owner: Labels) -> Groups:
        """The samples of each rank, those first that leave first."""
        sequence = self._sequence(epoch)
        return Groups.of(sequence, owner[sequence], self.ranks)

    def _receivers(self, epoch: int, owner: Labels) -> tuple[Samples, Labels]:
        """How many samples each rank sends, and to whom: first those of rank 0, then those of rank 1, and so on."""
        slots = self.slots
        senders = as_labels(np.repeat(np.arange(self.ranks), slots), self.ranks)
        slot_of = as_labels(places_within(slots), int(slots.max()))
        shuffled = permutation(self.seed, Purpose.EXCHANGE, epoch, len(senders))
        shuffled = shuffled[np.argsort(slot_of[shuffled], kind="stable")]  # slot by slot, permuted in each
        receivers = np.empty_like(senders)
        receivers[np.argsort(slot_of, kind="stable")] = senders[shuffled]
        return slots, receivers
