"""Shard shuffling: shards in random order, read in sequence, mixed by a buffer in memory.

The way of WebDataset and of tf.data with shards (tar files, TFRecords): storage sees long sequential reads. How well
samples are mixed depends on the buffer; samples of one shard stay near each other.
"""

import numpy as np
import numpy.typing as npt

from fanstore import _native
from fanstore.errors import UsageError
from fanstore.order import ownership as owners
from fanstore.order.groups import Groups, Labels, as_labels, bounds_of, places_within
from fanstore.order.order import Integers, Samples, at_least
from fanstore.order.shuffle import Shuffle
from fanstore.order.streams import Purpose, numbers, permutation

#: Samples per shard, if nothing is said.
_SHARD_SAMPLES = 1000


class ShardShuffle(Shuffle):
    """The shuffled shards, one after the other, are cut into one stretch per rank, each as long as what the rank owns;
    a rank reads its stretch in sequence through a buffer of ``buffer`` samples.

    ``shards``: how many there are (even ones), or the samples of each, in the sequence of the samples.
    """

    def __init__(
        self,
        *,
        samples: int,
        ranks: int,
        buffer: int,
        seed: int = 0,
        shards: int | npt.ArrayLike | None = None,
        ownership: npt.ArrayLike | None = None,
        first_epoch: int = 0,
    ) -> None:
        self.buffer = at_least(1, buffer, "buffer")
        if shards is None:
            shards = max(1, -(-samples // _SHARD_SAMPLES))
        if isinstance(shards, int):
            self._shards = owners.even_sizes(samples, at_least(1, shards, "shards"))
        else:
            self._shards = np.asarray(shards)
        if self._shards.ndim != 1 or (self._shards < 0).any() or self._shards.sum() != samples:
            raise UsageError(f"'shards' must be the numbers of samples of each shard, {samples} together")
        super().__init__(samples=samples, ranks=ranks, seed=seed, ownership=ownership, first_epoch=first_epoch)

    def room(self, rank: int) -> int:
        return super().room(rank) + min(self.buffer, super().room(rank))

    def _sequence(self, epoch: int) -> Samples:
        shuffled = permutation(self.seed, Purpose.SHARDS, epoch, len(self._shards))
        sizes = self._shards[shuffled]
        return np.repeat(bounds_of(self._shards)[shuffled], sizes) + places_within(sizes)

    def _deal(self, owner_of_place: Labels, sizes: Integers, whole: bool) -> Labels:
        return as_labels(np.repeat(np.arange(self.ranks), sizes), self.ranks)

    def _finish(self, plan: Groups, epoch: int) -> Groups:
        draws = numbers(self.seed, Purpose.BUFFER, epoch, len(plan.items)).astype(np.uint32)
        mixed = np.empty_like(plan.items)
        for begin, end in zip(plan.bounds[:-1], plan.bounds[1:], strict=True):
            order = np.empty(end - begin, dtype=np.int64)
            _native.swap_buffer(draws[begin:end], order, self.buffer)
            mixed[begin:end] = plan.items[begin:end][order]
        return Groups(mixed, plan.bounds)
