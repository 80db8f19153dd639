"""Locality-aware loading: global shuffling that lets each sample be read where it is.

Yang and Cong, "Accelerating Data Loading in Deep Neural Network Training", HiPC 2019. A global batch has the samples of
global shuffling, so the gradient is the same (but for batch normalisation, which sees each rank's own); only which
rank reads which sample differs. What a rank has too many of in a batch goes to ranks that have too few.
"""

import numpy.typing as npt

from fanstore.order.dealing import to_owners
from fanstore.order.groups import Labels
from fanstore.order.order import Integers, at_least
from fanstore.order.shuffle import Shuffle


class LocalityAware(Shuffle):
    """``batch`` is the batch of one rank; a global batch has as many for each."""

    def __init__(
        self,
        *,
        samples: int,
        ranks: int,
        batch: int,
        seed: int = 0,
        ownership: npt.ArrayLike | None = None,
        first_epoch: int = 0,
    ) -> None:
        self.batch = at_least(1, batch, "batch")
        super().__init__(samples=samples, ranks=ranks, seed=seed, ownership=ownership, first_epoch=first_epoch)

    def _deal(self, owner_of_place: Labels, sizes: Integers, whole: bool) -> Labels:
        return to_owners(owner_of_place, sizes, self.batch)
