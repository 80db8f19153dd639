"""Hugging Face Accelerate: whole batches of one order are dealt to the processes in turn (``BatchSamplerShard``).

The order dealt is ``TorchEpochSeed`` with ``use_seedable_sampler`` (seed + epoch), otherwise ``TorchGeneratorSampler``,
not shared, with a seed that was drawn from torch's global generator when the loader was prepared.
"""

import numpy as np

from fanstore.errors import UsageError
from fanstore.order.dealing import in_blocks
from fanstore.order.order import Order, Samples, at_least


class AccelerateShards(Order):
    """Process r reads batch r, r + ranks, ... of another order.

    ``even_batches``: all processes get as many full batches; the order is begun again to fill them. With ``drop_last``
    the rest is cut instead. ``split_batches``: ``batch`` is for all processes together, and each reads a part of it.
    """

    def __init__(
        self,
        order: Order,
        ranks: int,
        batch: int,
        *,
        drop_last: bool = False,
        even_batches: bool = True,
        split_batches: bool = False,
    ) -> None:
        super().__init__(order.sample_count, ranks)
        if split_batches and batch % ranks:
            raise UsageError(f"a batch of {batch} cannot be split evenly among {ranks} processes")
        self.order = order
        self.part = at_least(1, batch // ranks if split_batches else batch, "batch")
        self.drop_last = drop_last
        self.even_batches = even_batches

    def samples(self, epoch: int, rank: int = 0) -> Samples:
        self.check(epoch, rank)
        order = self.order.samples(epoch)
        group = self.part * self.ranks
        if self.drop_last:
            order = order[: len(order) // group * group]
        elif self.even_batches and len(order):
            order = np.resize(order, -(-len(order) // group) * group)  # numpy begins again where it ends
        return in_blocks(order, self.part, self.ranks, rank)
