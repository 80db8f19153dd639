"""The job of the performance model: which node reads which sample when, and how large samples are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fanstore.errors import UsageError
from fanstore.order import Order

Sizes: TypeAlias = npt.NDArray[np.float64]
#: Samples that nodes read, a row for each node.
Access: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Job:
    """Training over an order, bulk synchronous: in each iteration every node reads ``batch`` samples, then all wait for
    the slowest.

    Attributes:
        order: who reads what; its ranks are the nodes.
        sizes_mb: s_k, the size of each sample.
        epochs: E.
        batch: samples of one node in one iteration, |B_h,i| in the thesis.
        seed: for policies that replace the order by random choices of their own.
    """

    order: Order
    sizes_mb: Sizes
    epochs: int
    batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.sizes_mb) != self.order.sample_count:
            raise UsageError(
                f"there are {len(self.sizes_mb)} sizes for {self.order.sample_count} samples; give one for each"
            )
        if len(self.sizes_mb) and not (np.isfinite(self.sizes_mb).all() and self.sizes_mb.min() >= 0):
            raise UsageError("a sample has a size that is negative or no number")
        if self.epochs < 1:
            raise UsageError(f"'epochs' is {self.epochs}; it must be 1 or more")
        if self.batch < 1:
            raise UsageError(f"'batch' is {self.batch}; it must be 1 or more")
        if self.epoch_iterations < 1:
            raise UsageError("an epoch has fewer samples than one batch of all nodes: nothing would be read")

    @property
    def nodes(self) -> int:
        return self.order.ranks

    @property
    def samples(self) -> int:
        """F."""
        return len(self.sizes_mb)

    @cached_property
    def dataset_mb(self) -> float:
        """S: the size of the dataset."""
        return float(self.sizes_mb.sum())

    @cached_property
    def epoch_iterations(self) -> int:
        """T: whole batches that every node has in an epoch."""
        return min(len(self.order.samples(0, node)) for node in range(self.nodes)) // self.batch

    @property
    def iterations(self) -> int:
        return self.epochs * self.epoch_iterations

    @cached_property
    def access(self) -> Access:
        """R: what each node reads, over all epochs (equation 3.1). The last incomplete batch of an epoch is dropped."""
        count = self.epoch_iterations * self.batch
        access = np.empty((self.nodes, self.epochs, count), dtype=np.int32)
        for epoch in range(self.epochs):
            for node in range(self.nodes):
                access[node, epoch] = self.order.samples(epoch, node)[:count]
        return access.reshape(self.nodes, self.epochs * count)

    def share(self, node: int) -> range:
        """An even, contiguous part of all samples."""
        return range(node * self.samples // self.nodes, (node + 1) * self.samples // self.nodes)
