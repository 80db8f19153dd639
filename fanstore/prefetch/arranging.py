"""``--order locality``: which samples of a global batch a rank of an unchanged program reads, so that reads are local.

Owns which loaders are rearranged, why others are left alone, and the orders of the former. All ranks must do the same
without a word between them: what they compute follows from what the program says, from the placement that all nodes
agreed on at the start (deaths do not change it), and from where the ranks run, which the caller finds out
(job/training_ranks.py). What a program reports comes from hooked.py. Trio thread, but for ``compute``.
"""

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fanstore.order import DistributedLocality, TorchDistributedSampler, ownership
from fanstore.order.order import Integers, Samples
from fanstore.units import format_count

#: Where each rank of a program runs: by a word for the program, how many ranks it has, and one that is here. Empty: it
#: is to be left alone; None: that is not known yet.
NodesOfRanks: TypeAlias = Callable[[str, int, int], Sequence[int] | None]

#: What must be equal on all ranks of a program, besides its files.
_COMMON = ("run", "digest", "samples", "count", "ranks", "seed", "batch", "drop_last", "drop_last_samples")
#: Orders that are kept; reasons that are told in the statistics.
_ORDERS_MOST, _REASONS_MOST = 16, 16


class Arranging:
    """What is rearranged on this node.

    Attributes:
        epochs, samples, held: rearranged so far, and how many of these samples are on this node.
        left_alone: why other loaders are not; the oldest first.
        _orders: by program. _lock: so that ranks do not compute the same plan at the same time.
    """

    def __init__(
        self, partition: Integers, holders: Sequence[Collection[int]], nodes_of_ranks: NodesOfRanks, *, size: int
    ) -> None:
        """``partition``: of each entry of the index; ``holders``: nodes by partition; ``size``: how many nodes."""
        self.epochs = self.samples = self.held = 0
        self.left_alone: dict[str, None] = {}
        self._partition = partition
        self._holders = holders
        self._nodes_of_ranks = nodes_of_ranks
        self._size = size
        self._orders: dict[str, DistributedLocality] = {}
        self._lock = threading.Lock()

    def objection(self, told: Mapping[str, Any]) -> str | None:
        """Why a loader of which a program says this must be left alone; the same on all ranks."""
        if told["kind"] != "distributed":
            return f"{told['name']} is no DistributedSampler of torch"
        if not told["shuffle"]:
            return "its DistributedSampler does not shuffle, and the program may count on who reads what"
        if told["ranks"] == 1:
            return "the program has one rank"
        if not told["digest"]:
            return f"the dataset {told['dataset']} does not say which files its samples are"
        return None if self._size > 1 else "all files are on this one node"

    def nodes(self, told: Mapping[str, Any]) -> Sequence[int] | None:
        """As ``NodesOfRanks`` has them."""
        return self._nodes_of_ranks(_key(told), told["ranks"], told["rank"])

    def order(
        self,
        told: Mapping[str, Any],
        plain: TorchDistributedSampler,
        nodes: Sequence[int],
        files: npt.NDArray[np.uint32],
    ) -> DistributedLocality:
        """What a program reads instead of ``plain``; ``nodes``: of its ranks, ``files``: of its samples."""
        key = _key(told)
        if key not in self._orders:
            is_here = files < len(self._partition)
            partition = np.where(is_here, self._partition[np.where(is_here, files, 0)].astype(np.int64), -1)
            partition[partition >= len(self._holders)] = -1
            owner = ownership.of_holders(partition, self._holders, nodes)
            self._orders[key] = DistributedLocality(plain, told["batch"], np.asarray(nodes)[owner], nodes)
            for old in list(self._orders)[:-_ORDERS_MOST]:
                del self._orders[old]
        return self._orders[key]

    def compute(self, order: DistributedLocality, epoch: int, rank: int) -> Samples:
        """What a rank reads; the next epoch is computed, too, since it will be expected. In a thread."""
        with self._lock:
            samples = order.samples(epoch, rank)
            order.samples(epoch + 1, rank)
            return samples

    def count(self, order: DistributedLocality, epoch: int, rank: int) -> None:
        """A rank here reads an epoch that was rearranged."""
        self.epochs += 1
        self.samples += len(order.samples(epoch, rank))
        self.held += order.held(epoch, rank)

    def leave_alone(self, why: str) -> bool:
        """A loader is left alone; whether nobody has been told of that reason so far."""
        is_new = why not in self.left_alone and len(self.left_alone) < _REASONS_MOST
        if is_new:
            self.left_alone[why] = None
        return is_new

    def describe(self) -> dict[str, object]:
        """Of the section ``order`` of stats.json."""
        return {
            "epochs": self.epochs,
            "samples": self.samples,
            "held": self.held,
            "left_alone": list(self.left_alone),
        }


def incomplete(told: Mapping[str, Any]) -> str:
    """Why a program is left alone of which not all ranks have come."""
    return f"not all {format_count(told['ranks'], 'rank')} of the program have reported the same DataLoader in time"


def _key(told: Mapping[str, Any]) -> str:
    return hashlib.blake2b(repr([told.get(name) for name in _COMMON]).encode(), digest_size=16).hexdigest()
