"""The search for seeds (native/order/seedsearch.c), against permutations that were made with known ones."""

import numpy as np
import order_reference as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fanstore import _native
from fanstore.errors import UsageError
from fanstore.order.permutation import LeadingPlaces, randperm, seeded_randperm
from fanstore.order.seedsearch import SEEDS, Match, SeedSearch, Sighting
from fanstore.order.twister import TorchOutputs, Twister


def sightings(order: np.ndarray, places: list[int]) -> list[Sighting]:
    return [Sighting(place, int(order[place])) for place in places]


def search_around(search: SeedSearch, seed: int, reach: int = 2_000) -> list[Match]:
    search.tried = max(0, seed - reach)
    return search.step(2 * reach)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, SEEDS - 1),
    samples=st.integers(200_000, 2_000_000),
    skipped=st.integers(0, 3),
    places=st.lists(st.integers(1, 2_000), min_size=3, max_size=5, unique=True),
)
def test_a_seed_is_found(seed: int, samples: int, skipped: int, places: list[int]) -> None:
    """Whatever the places are, and only that one; among hypotheses that are not true."""
    order = randperm(samples, TorchOutputs(seed).draw(skipped, samples - 1))
    true = sightings(order, [0, *sorted(places)])
    false = [Sighting(place, (sample + 1) % samples) for place, sample in true]
    assert search_around(SeedSearch(samples, [false, true], skipped=skipped), seed) == [Match(seed, 1)]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, SEEDS - 1), samples=st.integers(10, 60))
def test_swaps_that_meet_are_followed(seed: int, samples: int) -> None:
    """In a small dataset almost every place was touched by an earlier swap."""
    order = np.array(reference.randperm(samples, reference.mersenne(seed)))
    search = SeedSearch(samples, [sightings(order, list(range(samples - 1)))])
    assert search_around(search, seed, 300) == [Match(seed, 0)]


def test_later_first_places() -> None:
    """The first place may be one of another rank; its sample is missed only if a swap before brought it there."""
    samples, found = 1_000_000, 0
    for seed in range(1000, 1100):
        order = seeded_randperm(samples, seed)
        search = SeedSearch(samples, [sightings(order, [226, 452, 678])])
        found += search_around(search, seed, 300) == [Match(seed, 0)]
    assert found >= 99


def test_slices_meet_without_gap_or_overlap() -> None:
    order = seeded_randperm(1000, 77_000)
    search = SeedSearch(1000, [sightings(order, [0, 1])])  # too few for one seed only
    whole = search.step(100_000)
    again = SeedSearch(1000, [sightings(order, [0, 1])])
    parts: list[Match] = []
    while again.tried < 100_000:
        parts += again.step(777)
    parts = [match for match in parts if match.seed < 100_000]
    assert parts == whole and Match(77_000, 0) in whole
    leading = LeadingPlaces(1000, 2)
    expected = [s for s in range(74_000, 80_000) if (leading(Twister.torch(s).draw(2)) == order[:2]).all()]
    assert [match.seed for match in whole if 74_000 <= match.seed < 80_000] == expected


def test_the_end_of_all_seeds() -> None:
    order = seeded_randperm(10**6, SEEDS - 1)
    search = SeedSearch(10**6, [sightings(order, [0, 1, 2])])
    search.tried = SEEDS - 1000
    assert search.step(10**9) == [Match(SEEDS - 1, 0)]
    assert search.done and search.step(10) == []


@pytest.mark.parametrize(
    "hypotheses",
    [
        [],
        [[]],
        [[Sighting(227, 1)]],
        [[Sighting(1, 1), Sighting(1, 2)]],
        [[Sighting(0, 1)], [Sighting(1, 1)]],
        [[Sighting(0, 1000)]],
        [[Sighting(0, 1), Sighting(999, 2)]],
        [[Sighting(0, 1), Sighting(4096, 2)]],
    ],
)
def test_what_cannot_be_searched(hypotheses: list[list[Sighting]]) -> None:
    with pytest.raises(UsageError, match="these places cannot be searched for"):
        SeedSearch(1000, hypotheses)


def test_bad_ranges() -> None:
    sighting = np.array([[0, 1]], dtype=np.uint32)
    for begin, end in ((5, 4), (0, SEEDS + 1)):
        with pytest.raises(ValueError, match="cannot be searched"):
            _native.search_seed(10, 0, sighting, 1, begin, end)
    with pytest.raises(ValueError, match="cannot be searched"):
        _native.search_seed(0, 0, sighting, 1, 0, 10)
