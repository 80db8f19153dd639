"""Recognising a permutation of torch whose seed may be any: RandomSampler, or a seed that nobody guesses.

Owns the search through all 2^32 seeds for the readers that were seen, and the way from the seed of one epoch to those
of the next ones: RandomSampler draws them from torch's global generator.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from fanstore.order.finding import Finding
from fanstore.order.order import Order
from fanstore.order.permutation import randperm, randperm_draws
from fanstore.order.pytorch import (
    TorchDistributedSampler,
    TorchEpochSeed,
    TorchGeneratorSampler,
    TorchRandomSampler,
)
from fanstore.order.seeds import FEW_SEEDS
from fanstore.order.seedsearch import PLACES, SEEDS, SeedSearch, Sighting
from fanstore.order.sightings import Sightings, inverse
from fanstore.order.twister import TorchOutputs, Twister

#: Outputs that a DataLoader draws from a generator that was given to it, before the permutation.
BASE_SEED = 2
#: Outputs that are looked through at once: some 5 ms.
_OUTPUTS_AT_ONCE = 1 << 20


def torch_finding(sightings: Sightings, seed: int, skipped: int, files: int) -> Finding | None:
    """What readers follow of the permutation from a seed, after ``skipped`` outputs; ``files`` of each must fit."""
    count = sightings.sample_count
    order = randperm(count, TorchOutputs(seed).draw(skipped, randperm_draws(count)))
    seating = sightings.seating(inverse(order, count), files)
    if seating is None or (skipped and seating.ranks > 1):
        return None
    orders: tuple[Order, ...]
    if seating.ranks > 1:
        sampler = "DistributedSampler"
        orders = tuple(TorchDistributedSampler(count, seating.ranks, seed, set_epoch=told) for told in (True, False))
    elif skipped:
        sampler = "RandomSampler with a generator"
        orders = tuple(TorchGeneratorSampler(count, seed, persistent_workers=kept) for kept in (False, True))
    else:
        sampler = "RandomSampler"
        epochs = (TorchEpochSeed(count, seed, grows=grows) for grows in (True, False))
        orders = (*epochs, TorchGeneratorSampler(count, seed, shared=False))
    return Finding(sightings.name, sampler, seed, orders, seating)


class TorchSearch:
    """All seeds, for readers that begin at the first place of a permutation: rank 0's first worker.

    ``strides``: how far apart its samples may be: 1 for RandomSampler and accelerate, the ranks for DistributedSampler.
    A few minutes of one core in all; ``step`` by ``step``, from seed ``begin`` on, where another search was left.
    """

    def __init__(self, sightings: Sightings, strides: Sequence[int] = (1,), *, begin: int = 0) -> None:
        self._sightings = sightings
        self._files = sightings.needed(float(SEEDS) * len(strides), 0)
        hypotheses = _hypotheses(sightings, strides, self._files)
        self._search = SeedSearch(sightings.sample_count, hypotheses) if hypotheses else None
        if self._search:
            self._search.tried = begin

    @property
    def tried(self) -> int:
        """Seeds that are done; all of them, if too little was seen for a search."""
        return self._search.tried if self._search else SEEDS

    @property
    def done(self) -> bool:
        return self.tried == SEEDS

    def step(self, seeds: int) -> list[Finding]:
        """Try the next so many seeds."""
        matches = self._search.step(seeds) if self._search else []
        found = [torch_finding(self._sightings, match.seed, 0, self._files) for match in matches]
        return [finding for finding in found if finding is not None]


def _hypotheses(sightings: Sightings, strides: Sequence[int], files: int) -> list[list[Sighting]]:
    """That a reader begins at place 0, for each reader and stride."""
    places = min(PLACES, sightings.sample_count - 1)
    return [
        [Sighting(stride * i, int(sample)) for i, sample in enumerate(samples)]
        for samples in sightings.begun(files).values()
        for stride in strides
        if stride * (files - 1) < places
    ]


def global_seeds(
    samples: int, epoch_seed: int, outputs: int = 1 << 26, seeds: Sequence[int] = FEW_SEEDS
) -> Iterator[TorchRandomSampler | None]:
    """From which global seed (``torch.manual_seed``) was the seed of an epoch drawn, and after how many outputs?

    Looks through the first outputs from all seeds, then through later ones: the weights of a model may have been drawn
    before. Yields None every some 5 ms. One in 2^32 outputs is equal by chance, two in all that is tried by default;
    what is found must be confirmed by ``next_epoch``.
    """
    twisters = {seed: Twister.torch(seed) for seed in seeds}
    for begin in range(0, outputs, _OUTPUTS_AT_ONCE):
        for seed, twister in twisters.items():
            for place in np.flatnonzero(twister.draw(_OUTPUTS_AT_ONCE) == epoch_seed & 0xFFFF_FFFF):
                if begin + place >= TorchRandomSampler.FIRST_OUTPUT:
                    drawn = int(begin + place) - TorchRandomSampler.FIRST_OUTPUT
                    yield TorchRandomSampler(samples, seed, drawn_before=drawn)
            yield None


def next_epoch(sampler: TorchRandomSampler, sightings: Sightings, outputs: int = 10_000) -> TorchRandomSampler | None:
    """The sampler with what is drawn in an epoch besides, by the first files of the second one; None if it is wrong."""
    hypotheses = _hypotheses(sightings, (1,), sightings.needed(outputs, 0))
    if not hypotheses:
        return None
    search = SeedSearch(sightings.sample_count, hypotheses)
    least = 2  # the sampler itself draws two outputs
    seeds = TorchOutputs(sampler.seed).draw(sampler.first_output + least, outputs)
    for further, seed in enumerate(seeds.tolist()):
        search.tried = seed
        if search.step(1):
            return sampler.with_stride(least + further)
    return None
