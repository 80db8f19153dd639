"""Search for the seed of a torch permutation among all 2^32, slice by slice.

Owns how far the search has come. The trying is C (``native/order/seedsearch.c``), without the GIL: 9 ns per seed with
AVX-512 and 70 ns with SSE2, so that all seeds take one to five minutes of one core.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fanstore import _native
from fanstore.errors import UsageError

SEEDS = 1 << 32
#: All places must be below this, the first of them below ``FIRST_PLACES``.
PLACES = _native.SEARCH_PLACES
FIRST_PLACES = _native.SEARCH_FIRST


class Sighting(NamedTuple):
    """This sample stands at this place of the permutation."""

    place: int
    sample: int


class Match(NamedTuple):
    seed: int
    hypothesis: int  #: which of them is true


class SeedSearch:
    """Which seeds permute so that one of the hypotheses is true?

    A hypothesis is a few sightings, ascending by place; the first place is the same in all, and a low one.
    A seed is missed if an earlier swap brought the first sample to its place: with a probability of place / samples.

    Attributes:
        tried: all seeds below this one are done.
    """

    def __init__(self, samples: int, hypotheses: Sequence[Sequence[Sighting]], *, skipped: int = 0) -> None:
        """``skipped``: outputs that are drawn between seeding and the permutation."""
        depth = min(map(len, hypotheses), default=0)
        self._samples = samples
        self._skipped = skipped
        self._depth = depth
        self._sightings = np.array([hypothesis[:depth] for hypothesis in hypotheses], dtype=np.uint32)
        self.tried = 0
        try:
            self.step(0)
        except ValueError:
            raise UsageError(
                "these places cannot be searched for: they must ascend, begin with the same place in each hypothesis, "
                f"which is below {FIRST_PLACES - skipped}, and end below {PLACES}"
            ) from None

    @property
    def done(self) -> bool:
        return self.tried == SEEDS

    def step(self, seeds: int) -> list[Match]:
        """Try the next so many seeds."""
        end = min(SEEDS, self.tried + seeds)
        matches = []
        while found := _native.search_seed(self._samples, self._skipped, self._sightings, self._depth, self.tried, end):
            matches.append(Match(*found))
            self.tried = found[0] + 1
        self.tried = end
        return matches
