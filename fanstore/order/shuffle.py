"""What all shuffles of our own have in common: planned from one permutation, restarted, and what crosses between ranks.

A shuffle deals each epoch's samples to ranks that own some of them. Every rank computes the plan of all ranks, from the
seed alone: nothing is agreed upon over the network. The permutation of an epoch does not depend on the ranks, so that a
job that is restarted with another number of them goes on.

Owns the plan of the epoch that was asked for last, and the ownership of the last few. One thread at a time.
"""

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from fanstore.errors import UsageError
from fanstore.order import ownership as owners
from fanstore.order.exchange import Exchange, Traffic, Transfers
from fanstore.order.groups import Groups, Labels
from fanstore.order.order import Integers, Order, Samples, at_least
from fanstore.order.streams import Purpose, check_seed, permutation

#: Epochs whose ownership is kept: this one, the next one (its arrivals come while this one runs), and one more.
_KEPT_EPOCHS = 3


@dataclass(frozen=True)
class State:
    """Where a shuffle is at the beginning of an epoch."""

    epoch: int
    ranks: int
    ownership: Integers  #: the rank that owns each sample
    unread: Samples | None  #: all that is read in this epoch, after a restart in its middle; None for everything
    importance: Mapping[int, npt.NDArray[np.float64]] = field(default_factory=dict)  #: by epoch, where it is known


class Shuffle(Order):
    """A shuffle of ``samples`` samples among ``ranks`` ranks, each sample once per epoch.

    ``ownership`` says the rank of each sample in epoch ``first_epoch``; by default each rank has an even, contiguous
    share. A rank reads as many samples per epoch as it owns at first.

    Attributes:
        seed: what everything follows from; 0 to 2^64 - 1.
        first_epoch: nothing is known of epochs before this one.
    """

    def __init__(
        self,
        *,
        samples: int,
        ranks: int,
        seed: int = 0,
        ownership: npt.ArrayLike | None = None,
        first_epoch: int = 0,
    ) -> None:
        super().__init__(samples, ranks)
        self.seed = check_seed(seed)
        self._begin(ranks, ownership, first_epoch, None)

    def _begin(self, ranks: int, ownership: npt.ArrayLike | None, epoch: int, unread: Samples | None) -> None:
        self.ranks = at_least(1, ranks, "ranks")
        self.first_epoch = at_least(0, epoch, "first_epoch")
        owner = (
            owners.even(self.sample_count, ranks)
            if ownership is None
            else owners.checked(ownership, self.sample_count, ranks)
        )
        self._sizes = np.bincount(owner, minlength=ranks)
        self._first_owner = owner
        self._owners: dict[int, Labels] = {epoch: owner}  # by epoch, the latest few
        self._unread = unread  # what is left of the first epoch, after a restart in its middle
        self._plan: tuple[int, Groups] | None = None
        self._transfers: tuple[int, Transfers] | None = None

    # ---- What is read ----------------------------------------------------------------------------------------------

    def samples(self, epoch: int, rank: int = 0) -> Samples:
        self.check(epoch, rank)
        return self.plan(epoch)[rank]

    def plan(self, epoch: int) -> Groups:
        """What all ranks read in the epoch."""
        if self._plan is None or self._plan[0] != epoch:
            sequence = self._sequence(epoch)
            unread = self._unread_of(epoch)
            if unread is not None:
                left = np.zeros(self.sample_count, dtype=bool)
                left[unread] = True
                sequence = sequence[left[sequence]]
            owner = self.ownership(epoch)
            readers = self._deal(owner[sequence], self.sizes(epoch), unread is None)
            self._plan = (epoch, self._finish(Groups.of(sequence, readers, self.ranks), epoch))
        return self._plan[1]

    def sizes(self, epoch: int) -> Integers:
        """How many samples each rank reads in the epoch."""
        unread = self._unread_of(epoch)
        return self._sizes if unread is None else owners.even_sizes(len(unread), self.ranks)

    def _unread_of(self, epoch: int) -> Samples | None:
        """What is read in the epoch; None if it is everything."""
        return self._unread if epoch == self.first_epoch else None

    def remaining(self, epoch: int, position: int) -> Samples:
        """The samples of the epoch that are left when each rank has read ``position`` of its own; ascending."""
        plan = self.plan(epoch)
        read = plan.bounds[:-1] + np.minimum(at_least(0, position, "position"), plan.sizes)
        left = [plan.items[begin:end] for begin, end in zip(read, plan.bounds[1:], strict=True)]
        return np.sort(np.concatenate(left))

    def restart(
        self, epoch: int, position: int = 0, *, ranks: int | None = None, ownership: npt.ArrayLike | None = None
    ) -> Self:
        """The same shuffle for a job that is started again in the middle of an epoch, when each rank had read
        ``position`` samples.

        The new job may have another number of ranks. They read what is left of the epoch, shared evenly among them, and
        go on with the next one. Ownership begins anew: even, contiguous shares, unless it is given.
        """
        again = copy(self)
        again._begin(self.ranks if ranks is None else ranks, ownership, epoch, self.remaining(epoch, position))
        return again

    def state(self, epoch: int) -> State:
        """What a checkpoint keeps, so that ``resumed`` goes on with this epoch as if nothing had happened."""
        return State(epoch, self.ranks, self.ownership(epoch), self._unread_of(epoch))

    def resumed(self, state: State) -> Self:
        """The same shuffle as it was when ``state`` was taken, with the ranks of that time."""
        again = copy(self)
        again._begin(state.ranks, state.ownership, state.epoch, state.unread)
        return again

    def _sequence(self, epoch: int) -> Samples:
        """All samples, in the sequence in which they are dealt."""
        return permutation(self.seed, Purpose.ORDER, epoch, self.sample_count)

    @abstractmethod
    def _deal(self, owner_of_place: Labels, sizes: Integers, whole: bool) -> Labels:
        """The reader of each place of the sequence; rank r gets ``sizes[r]``. ``whole``: it is a whole epoch."""

    def _finish(self, plan: Groups, epoch: int) -> Groups:
        """The last change to what was dealt."""
        return plan

    # ---- Who owns what ---------------------------------------------------------------------------------------------

    def ownership(self, epoch: int) -> Labels:
        """The rank that owns each sample when the epoch begins."""
        if epoch < self.first_epoch:
            raise UsageError(f"this order begins with epoch {self.first_epoch}; there is no epoch {epoch}")
        if epoch < min(self._owners):
            self._go_back(epoch)
        for past in range(max(self._owners), epoch):
            self._owners[past + 1] = self._moved(past, self._owners[past])
            self._owners.pop(past + 1 - _KEPT_EPOCHS, None)
        return self._owners[epoch]

    def _go_back(self, epoch: int) -> None:
        """An epoch is asked for that was forgotten: everything follows from the first one."""
        self._owners = {self.first_epoch: self._first_owner}

    def _moved(self, epoch: int, owner: Labels) -> Labels:
        """Who owns what after the exchange that goes on while the epoch runs."""
        return owner

    def decided(self, epoch: int) -> bool:
        """Whether what is exchanged while the epoch runs is known when it begins."""
        return True

    # ---- What crosses ----------------------------------------------------------------------------------------------

    def transfers(self, epoch: int) -> Transfers:
        """All samples that cross in the epoch: read by a rank that does not own them, or changing their owner."""
        if self._transfers is None or self._transfers[0] != epoch:
            self._transfers = (epoch, self._crossing(epoch))
        return self._transfers[1]

    def _crossing(self, epoch: int) -> Transfers:
        owner, next_owner, plan = self.ownership(epoch), self.ownership(epoch + 1), self.plan(epoch)
        readers = np.repeat(np.arange(self.ranks, dtype=owner.dtype), plan.sizes)
        read = np.flatnonzero(owner[plan.items] != readers)
        fetched = plan.items[read]
        in_order = self._sequence(epoch)
        moved = in_order[owner[in_order] != next_owner[in_order]]
        return Transfers(
            samples=np.concatenate([fetched, moved]),
            origin=np.concatenate([owner[fetched], owner[moved]]),
            to=np.concatenate([readers[read], next_owner[moved]]),
        )

    def exchange(self, epoch: int, rank: int) -> Exchange:
        """What the rank sends and receives in the epoch. In a whole epoch these are equally many."""
        self.check(epoch, rank)
        return self.transfers(epoch).of_rank(rank)

    def traffic(self, epoch: int, sizes: npt.ArrayLike | None = None) -> Traffic:
        """Sums of what crosses in the epoch; ``sizes`` are the bytes of each sample."""
        return self.transfers(epoch).traffic(self.sample_count, self.ranks, sizes)

    def room(self, rank: int) -> int:
        """The most samples that the rank must hold at a time, besides those that it reads from others and forgets."""
        self.check(self.first_epoch, rank)
        return int(self._sizes[rank])
