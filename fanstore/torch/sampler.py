"""Samplers for torch's DataLoader, one for each shuffle of fanstore.order; they stand in for DistributedSampler.

Owns what a training program needs beyond the order itself: equally many samples on each rank, the place in the epoch,
and the state that goes into a checkpoint. Who reads what is decided in ``fanstore.order``. One thread, in the main
process of a rank; workers of a DataLoader never see a sampler.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from fanstore.errors import UsageError
from fanstore.order import GlobalShuffle, LocalityAware, LocalShuffle, PartialLocalShuffle, ShardShuffle, Shuffle
from fanstore.order import ownership as owners
from fanstore.order.order import Samples, at_least
from fanstore.order.shuffle import State
from fanstore.torch.dataset import file_paths
from fanstore.torch.placement import job_ownership
from fanstore.torch.ranks import find_rank
from fanstore.torch.room import Room


class ShuffleSampler(Sampler):  # type: ignore[misc, type-arg, unused-ignore]  # torch is not there when types are checked
    """What all samplers have in common.

    Every rank gets the same number of samples per epoch, so that all take equally many steps. Where ranks own a
    different number, those that own fewer repeat their first ones, or, with ``drop_last``, those that own more leave
    out their last ones. With ``balance`` that is at most one: what a rank owns beyond its even share is given to
    others at the beginning.

    Args:
        dataset: any with a length; samples are its indices.
        num_replicas, rank: as in DistributedSampler; by default those of torch.distributed, or of torchrun.
        seed: must be the same on all ranks.
        ownership: the rank of each sample at the beginning. By default, if the files of the dataset are in a FanStore
            mount, a rank on the node that holds it (``placement.py``); else even, contiguous shares.
        files: the path of each sample; by default those in ``dataset.samples``, as ImageFolder has them.
        group: the process group of the ranks, if it is not that of all processes.
        options: those of the shuffle.

    Attributes:
        order: the shuffle; it also says what is sent and received, and the room that is needed.
        epoch: which is read; ``set_epoch`` sets it.
        _room: keeps what this rank owns on its node; None if that needs nothing.
        _start: samples of this epoch that were read before the job was restarted.
        _left: what is to be handed out; before ``_end`` in the epoch.
    """

    shuffle: type[Shuffle]
    #: Whether it matters who owns what, and not only how much; whether a rank reads what it owns, and nothing else.
    is_local = True
    reads_own = False

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        seed: int = 0,
        drop_last: bool = False,
        ownership: npt.ArrayLike | None = None,
        balance: bool = True,
        files: Sequence[str | os.PathLike[str]] | None = None,
        group: Any = None,
        **options: Any,
    ) -> None:
        self.dataset = dataset
        self.num_replicas, self.rank = find_rank(num_replicas, rank, group)
        self.group = group
        self.seed = seed
        self.drop_last = drop_last
        samples = len(dataset)
        paths = None
        if self.is_local:
            paths = file_paths(dataset) if files is None else files
        self._room = Room(paths) if paths and self.reads_own else None
        if ownership is None and self.is_local:
            if paths is not None and len(paths) != samples:
                raise UsageError(f"'files' has {len(paths)} paths for {samples} samples; it must have one for each")
            ownership = job_ownership(paths, self.num_replicas, self.rank, group)
        if ownership is not None:
            ownership = owners.checked(ownership, samples, self.num_replicas)
            if balance:
                ownership = owners.balanced(ownership, self.num_replicas)
        self._ownership = ownership
        self.order = self.shuffle(samples=samples, ranks=self.num_replicas, seed=seed, ownership=ownership, **options)
        self.epoch = 0
        self._stand(0)

    def _stand(self, start: int) -> None:
        """In the epoch, so many samples were read and no more handed out."""
        self._start = self._end = start
        self._left: Iterator[int] = iter([])

    @property
    def num_samples(self) -> int:
        """Samples of each rank in this epoch, those included that were read before a restart with the same ranks."""
        sizes = self.order.sizes(self.epoch)
        return int(sizes.min() if self.drop_last else sizes.max())

    @property
    def total_size(self) -> int:
        return self.num_samples * self.num_replicas

    def samples(self) -> Samples:
        """What this rank reads in this epoch, first to last."""
        own = self.order.samples(self.epoch, self.rank)
        if not len(own):  # fewer samples than ranks: read what another one reads, too
            own = np.roll(self.order.plan(self.epoch).items, -self.rank)
        return np.resize(own, self.num_samples)

    def __iter__(self) -> Iterator[int]:
        samples = self.samples().tolist()
        if self._room is not None:
            self._room.own(self._owned(self.samples()[self._start :]))
        # An iterator over a list, so that the hook of a mount sees the whole epoch in it (client/hook/).
        self._left, self._end = iter(samples[self._start :]), len(samples)
        yield from self._left
        self._start = 0

    def _owned(self, reading: Samples) -> Samples:
        """What this rank reads in this epoch, and what it has got by the end of it, for the next one."""
        if not self.order.decided(self.epoch):
            return reading
        arriving = self.order.exchange(self.epoch, self.rank).received
        staying = np.flatnonzero(self.order.ownership(self.epoch + 1) == self.rank)
        return np.concatenate([reading, arriving, staying])

    def __len__(self) -> int:
        """How many samples the next iteration gives: after a resume in the middle of an epoch, what is left of it."""
        return max(0, self.num_samples - self._start)

    def set_epoch(self, epoch: int) -> None:
        """To be called before each epoch, by all ranks; otherwise every epoch is like the last one."""
        if at_least(0, epoch, "epoch") != self.epoch:
            self.epoch = epoch
            self._stand(0)

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """For a checkpoint; equal on all ranks, so that one of them saves it. Numbers and tensors only.

        ``position`` is the number of samples that each rank has trained with in this epoch. By default it is what was
        handed out, which is more than that while workers of a DataLoader read ahead.
        """
        state = self.order.state(self.epoch)
        handed = self._end - length_hint(self._left)
        unread = None
        if state.unread is not None:  # a byte for each sample instead of eight
            unread = torch.zeros(self.order.sample_count, dtype=torch.bool)
            unread[torch.from_numpy(state.unread)] = True
        return {
            "shuffle": self.shuffle.__name__,
            "samples": self.order.sample_count,
            "seed": self.seed,
            "epoch": state.epoch,
            "position": handed if position is None else at_least(0, position, "position"),
            "ranks": state.ranks,
            "ownership": torch.from_numpy(state.ownership.astype(np.int32)),
            "unread": unread,
            "importance": {epoch: torch.from_numpy(values) for epoch, values in state.importance.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken, in the middle of an epoch too.

        With as many ranks as then, every rank reads exactly what it would have read. With more or fewer, what is left
        of the epoch is shared evenly among them, and ownership begins anew.
        """
        mine = {"shuffle": self.shuffle.__name__, "samples": self.order.sample_count, "seed": self.seed}
        for name, value in mine.items():
            if state.get(name) != value:
                raise UsageError(
                    f"this state has {name} {state.get(name)}, the sampler {value}: make it as in the job that saved it"
                )
        unread, position = state["unread"], state["position"]
        order = self.order.resumed(
            State(
                state["epoch"],
                state["ranks"],
                state["ownership"].numpy(),
                None if unread is None else np.flatnonzero(unread.numpy()),
                {epoch: values.numpy() for epoch, values in state["importance"].items()},
            )
        )
        if state["ranks"] != self.num_replicas:
            order = order.restart(state["epoch"], position, ranks=self.num_replicas, ownership=self._ownership)
            position = 0
        self.order, self.epoch = order, state["epoch"]
        self._stand(position)


class GlobalShuffleSampler(ShuffleSampler):
    """Any sample may go to any rank, as with DistributedSampler."""

    shuffle = GlobalShuffle
    is_local = False


class LocalShuffleSampler(ShuffleSampler):
    """Each rank shuffles the samples that it owns; nothing crosses."""

    shuffle = LocalShuffle
    reads_own = True


class PartialLocalShuffleSampler(ShuffleSampler):
    """Each rank reads what it owns and passes on the ``fraction`` of it in every epoch."""

    shuffle = PartialLocalShuffle
    reads_own = True


class LocalityAwareSampler(ShuffleSampler):
    """Global batches as with GlobalShuffleSampler, in which each rank reads first what it owns.

    ``batch`` is the batch size of the DataLoader.
    """

    shuffle = LocalityAware


class ShardShuffleSampler(ShuffleSampler):
    """Shards in random order, read in sequence through a ``buffer`` of samples.

    ``shards`` is their number, or the samples of each; by default 1,000 samples each.
    """

    shuffle = ShardShuffle
    is_local = False
