"""Locality-aware loading: global shuffling that lets each sample be read where it is.

Yang and Cong, "Accelerating Data Loading in Deep Neural Network Training", HiPC 2019. A global batch has the samples of
global shuffling, so the gradient is the same (but for batch normalisation, which sees each rank's own); only which
rank reads which sample differs. What a rank has too many of in a batch goes to ranks that have too few.

Owns the shuffle of our own, and the same for programs that are not changed, whose shuffle is torch's.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fanstore.order.dealing import to_owners
from fanstore.order.groups import Groups, Labels, as_labels, bounds_of, places_within
from fanstore.order.order import Integers, Order, Samples, at_least
from fanstore.order.pytorch import TorchDistributedSampler
from fanstore.order.shuffle import Shuffle

#: Epochs whose plan is kept: this one, and the next one, which is expected while this one runs.
_KEPT_EPOCHS = 2


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


class DistributedLocality(Order):
    """DistributedSampler, of whose global batches each rank reads first what its node holds.

    A global batch has the samples that the sampler gives to all ranks for it, and every rank reads as many of them as
    it would; only who reads which differs. The ranks of one node take what is there in turn.

    Args:
        batch: of one rank.
        node_of_sample: the node that holds each sample, of those on which ranks run.
        node_of_rank: where each rank runs.

    Several threads may ask; what two of them ask for at the same time is computed twice.
    """

    def __init__(
        self, order: TorchDistributedSampler, batch: int, node_of_sample: Integers, node_of_rank: Sequence[int]
    ) -> None:
        super().__init__(order.sample_count, order.ranks)
        self._order = order
        self._batch = at_least(1, batch, "batch")
        self._node_of_sample = node_of_sample
        self.node_of_rank = np.asarray(node_of_rank)
        self._by_node = np.argsort(self.node_of_rank, kind="stable")
        self._ranks_of_node = np.bincount(self.node_of_rank, minlength=int(np.max(node_of_sample, initial=0)) + 1)
        self._plans: dict[int, Groups] = {}

    def samples(self, epoch: int, rank: int = 0) -> Samples:
        self.check(epoch, rank)
        plan = self._plans.get(epoch)
        if plan is None:
            plan = self._plan(epoch)
            self._plans = dict([*self._plans.items(), (epoch, plan)][-_KEPT_EPOCHS:])
        return plan[rank]

    def held(self, epoch: int, rank: int) -> int:
        """How many of the rank's samples are on its node."""
        return int(np.count_nonzero(self._node_of_sample[self.samples(epoch, rank)] == self.node_of_rank[rank]))

    def _plan(self, epoch: int) -> Groups:
        sequence = self._order.sequence(epoch)
        node = self._node_of_sample[sequence]
        batch_of_place = np.arange(len(sequence)) // (self._batch * self.ranks)
        group = batch_of_place * len(self._ranks_of_node) + node
        turn = np.empty(len(sequence), dtype=np.int64)
        turn[np.argsort(group, kind="stable")] = places_within(np.bincount(group))
        owner = self._by_node[bounds_of(self._ranks_of_node)[node] + turn % self._ranks_of_node[node]]
        sizes = np.full(self.ranks, len(sequence) // self.ranks)
        readers = to_owners(as_labels(owner, self.ranks), sizes, self._batch)
        return Groups.of(sequence, readers, self.ranks)
