"""The samplers of PyTorch, as a DataLoader that is iterated to its end uses them (torch 2.13).

Owns which numbers they draw from which generator. The seed of a generator has 32 bits that matter. A number of 64 bits
takes two outputs of the generator, of which the second is its low half and decides.

Lightning and timm use DistributedSampler, too (Lightning's seed is PL_GLOBAL_SEED); for what timm lists, see
``listing.py``.
"""

from copy import copy
from typing import Self

import numpy as np

from fanstore.order.order import Order, Samples, at_least
from fanstore.order.permutation import randperm, randperm_draws, seeded_randperm
from fanstore.order.twister import TorchOutputs, Twister


class TorchRandomSampler(Order):
    """RandomSampler without a generator (``DataLoader(shuffle=True)``): seeds are drawn from torch's global generator.

    The loader draws a base seed for its workers (outputs 0 and 1 after ``torch.manual_seed``), then the sampler its own
    (2 and 3). What else draws from the global generator moves them: ``drawn_before`` is what was drawn before the
    first epoch (the weights of a model, say), ``drawn_per_epoch`` what is drawn in an epoch besides.
    """

    #: The output that decides the first epoch, if nothing else was drawn before.
    FIRST_OUTPUT = 3

    def __init__(
        self,
        samples: int,
        seed: int,
        *,
        persistent_workers: bool = False,
        drawn_before: int = 0,
        drawn_per_epoch: int = 0,
    ) -> None:
        super().__init__(samples)
        self.seed = seed
        self.first_output = at_least(0, drawn_before, "drawn_before") + self.FIRST_OUTPUT
        # Persistent workers keep their base seed: later epochs draw only the sampler's.
        self.stride = (2 if persistent_workers else 4) + at_least(0, drawn_per_epoch, "drawn_per_epoch")
        self._outputs = TorchOutputs(seed)

    def with_stride(self, stride: int) -> Self:
        """The same first epoch, and from epoch to epoch so many outputs."""
        other = copy(self)
        other.stride = at_least(1, stride, "stride")
        return other

    def epoch_seed(self, epoch: int) -> int:
        """The seed from which the sampler shuffles in this epoch, as far as it matters."""
        return int(self._outputs.draw(self.first_output + self.stride * epoch, 1)[0])

    def samples(self, epoch: int, rank: int = 0) -> Samples:
        self.check(epoch, rank)
        return seeded_randperm(self.sample_count, self.epoch_seed(epoch))


class TorchGeneratorSampler(Order):
    """RandomSampler with a generator of its own, which goes on from epoch to epoch.

    ``shared``: the loader has the same generator (``DataLoader(shuffle=True, generator=g)``) and draws the base seed
    from it. At the end of an epoch the sampler draws a second permutation, of which it uses nothing.
    """

    def __init__(self, samples: int, seed: int, *, shared: bool = True, persistent_workers: bool = False) -> None:
        super().__init__(samples)
        self.seed = seed
        self.shared = shared
        self.persistent_workers = persistent_workers
        self._outputs = TorchOutputs(seed)

    def samples(self, epoch: int, rank: int = 0) -> Samples:
        self.check(epoch, rank)
        base_seeds = 0 if not self.shared else 1 if self.persistent_workers else epoch + 1
        draws = randperm_draws(self.sample_count)
        return randperm(self.sample_count, self._outputs.draw(2 * base_seeds + 2 * draws * epoch, draws))


class TorchResumedSampler(Order):
    """RandomSampler from the state in which its generator is before an epoch, which is epoch 0 here.

    ``own``: the generator is the sampler's, and the permutation is drawn from it; otherwise the global one, from which
    a seed is drawn. ``stride``: outputs from one epoch to the next; a guess if it is not known.
    """

    def __init__(
        self, samples: int, state: Twister, *, own: bool, persistent_workers: bool = False, stride: int | None = None
    ) -> None:
        super().__init__(samples)
        self.own = own
        base_seed = 0 if persistent_workers else 2
        self.stride = base_seed + (2 * randperm_draws(samples) if own else 2) if stride is None else stride
        self._outputs = TorchOutputs(state)

    def samples(self, epoch: int, rank: int = 0) -> Samples:
        self.check(epoch, rank)
        first = self.stride * epoch
        if self.own:
            return randperm(self.sample_count, self._outputs.draw(first, randperm_draws(self.sample_count)))
        return seeded_randperm(self.sample_count, int(self._outputs.draw(first + 1, 1)[0]))


class TorchEpochSeed(Order):
    """A permutation of torch from a seed that grows with the epoch, or does not: accelerate's SeedableRandomSampler."""

    def __init__(self, samples: int, seed: int, *, grows: bool = True) -> None:
        super().__init__(samples)
        self.seed = seed
        self.grows = grows

    def samples(self, epoch: int, rank: int = 0) -> Samples:
        self.check(epoch, rank)
        return seeded_randperm(self.sample_count, self.seed + (epoch if self.grows else 0))


class TorchDistributedSampler(Order):
    """DistributedSampler: the permutation is padded with its own beginning to a multiple of the ranks, or cut with
    ``drop_last``; rank r reads places r, r + ranks, ... Without ``set_epoch`` all epochs are alike."""

    def __init__(
        self,
        samples: int,
        ranks: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        set_epoch: bool = True,
    ) -> None:
        super().__init__(samples, ranks)
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.set_epoch = set_epoch

    def samples(self, epoch: int, rank: int = 0) -> Samples:
        self.check(epoch, rank)
        return self._at(epoch, np.arange(rank, self.sample_count_of_rank * self.ranks, self.ranks))

    def sequence(self, epoch: int) -> Samples:
        """What all ranks read: the first sample of each rank, then the second of each, and so on."""
        self.check(epoch, 0)
        return self._at(epoch, np.arange(self.sample_count_of_rank * self.ranks))

    @property
    def sample_count_of_rank(self) -> int:
        """How many samples each rank reads in an epoch."""
        return self.sample_count // self.ranks if self.drop_last else -(-self.sample_count // self.ranks)

    def _at(self, epoch: int, places: Samples) -> Samples:
        """The samples at these places of the permutation, which is repeated as often as need be."""
        if self.shuffle:
            order = seeded_randperm(self.sample_count, self.seed + (epoch if self.set_epoch else 0))
        else:
            order = np.arange(self.sample_count)
        return order[places % self.sample_count] if self.sample_count else order
