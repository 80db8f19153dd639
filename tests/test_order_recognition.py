"""Recognising orders from the first files of readers: what is found is right, and nothing is found by chance."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fanstore.order import (
    AccelerateShards,
    KerasFlow,
    KerasImageDataset,
    Loader,
    Order,
    SeededShuffle,
    TorchDistributedSampler,
    TorchEpochSeed,
    TorchGeneratorSampler,
    TorchRandomSampler,
    listing,
)
from fanstore.order.finding import Finding
from fanstore.order.order import Integers
from fanstore.order.recognition import recognise
from fanstore.order.seeds import MANY_SEEDS
from fanstore.order.seedsearch import SEEDS
from fanstore.order.sightings import POOL, RISK, Sightings
from fanstore.order.torchsearch import TorchSearch, global_seeds, next_epoch

COUNT = 5_000
#: Files are known by numbers that have nothing to do with their places in a list.
FILES = np.random.RandomState(1).permutation(COUNT) + 10_000
LISTS = {"sorted": FILES}


@pytest.fixture
def few_torch_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """For orders that torch has not made: its seeds are tried before, and that takes half a second."""
    monkeypatch.setattr("fanstore.order.recognition.MANY_SEEDS", MANY_SEEDS[:100])


not_torch = pytest.mark.usefixtures("few_torch_seeds")


def workers(order: Order, epoch: int, loader: Loader, seen: int = 12, files: Integers = FILES) -> list[Integers]:
    """The first files of every worker of every rank."""
    return [
        files[loader.worker(order.samples(epoch, rank), worker)[:seen]]
        for rank in range(order.ranks)
        for worker in range(loader.readers)
    ]


def pool(order: Order, epoch: int, threads: int = 6, seen: int = 60) -> list[Integers]:
    """The first files of threads of which each takes the next one, some earlier, some later."""
    chance = np.random.RandomState(epoch)
    sequence = order.samples(epoch)[:seen]
    sequence = sequence[np.argsort(np.arange(seen) + chance.uniform(0, 8, seen))]
    takers = chance.randint(threads, size=seen)
    return [FILES[sequence[takers == thread]] for thread in range(threads)]


def findings(lists: Mapping[str, Integers], readers: Sequence[Integers]) -> list[Finding]:
    return [finding for finding in recognise(lists, readers) if finding is not None]


def the_finding(lists: Mapping[str, Integers], readers: Sequence[Integers]) -> Finding:
    (finding,) = findings(lists, readers)
    return finding


def assert_same(order: Order, expected: Order, epochs: range) -> None:
    assert order.ranks == expected.ranks
    for epoch in epochs:
        for rank in range(order.ranks):
            assert order.samples(epoch - epochs[0], rank).tolist() == expected.samples(epoch, rank).tolist()


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (42, 3), (123_456_789, 7)])
@pytest.mark.parametrize("set_epoch", [True, False])
def test_distributed_sampler(seed: int, epoch: int, set_epoch: bool) -> None:
    """Ranks, batches and workers of each are seen, too; the next epoch tells whether set_epoch is called."""
    order = TorchDistributedSampler(COUNT, 4, seed, set_epoch=set_epoch)
    loader = Loader(16, 3)
    finding = the_finding(LISTS, workers(order, epoch, loader))
    assert (finding.sampler, finding.listing) == ("DistributedSampler", "sorted")
    assert finding.seed == seed + epoch * set_epoch
    assert finding.seating.ranks == 4 and finding.seating.batch == 16
    assert [(seat.reader, seat.rank, seat.position) for seat in finding.seating.seats] == [
        (3 * rank + worker, rank, 16 * worker) for rank in range(4) for worker in range(3)
    ]
    later = finding.narrow(1, Sightings("sorted", FILES, workers(order, epoch + 1, loader)))
    assert later is not None and len(later.orders) == 1
    assert_same(later.order, order, range(epoch, epoch + 3))


def test_readers_that_are_dealt_otherwise_do_not_follow() -> None:
    """The same permutation, but for twice as many ranks: another order."""
    finding = the_finding(LISTS, workers(TorchDistributedSampler(COUNT, 2, 3), 0, Loader(16, 2)))
    other = workers(TorchDistributedSampler(COUNT, 4, 4), 0, Loader(16, 2))
    assert finding.narrow(1, Sightings("sorted", FILES, other)) is None


def test_one_node_of_many() -> None:
    """A node sees only its own ranks."""
    order = TorchDistributedSampler(COUNT, 64, 7)
    readers = [FILES[order.samples(0, rank)[:9]] for rank in (24, 25, 26, 27)]
    finding = the_finding(LISTS, readers)
    assert [seat.rank for seat in finding.seating.seats] == [24, 25, 26, 27]
    assert_same(finding.order, order, range(3))


@pytest.mark.parametrize("ranks", [1, 2])
def test_lists_that_are_not_shuffled(ranks: int) -> None:
    order = TorchDistributedSampler(COUNT, ranks, shuffle=False)
    finding = the_finding(LISTS, workers(order, 0, Loader(16, 2)))
    assert (finding.sampler, finding.seed) == ("sequential", None)
    assert_same(finding.order, order, range(2))


@not_torch
def test_which_list() -> None:
    """The same sampler over the same files, listed in different ways."""
    paths = [f"class{number % 7}/img{number}.jpg" for number in reversed(range(COUNT))]
    lists = {name: list_order(paths) for name, list_order in listing.LISTINGS.items()}
    order = TorchDistributedSampler(COUNT, 2, 5)
    for name in ("ImageFolder", "natural", "readdir"):
        finding = the_finding(lists, workers(order, 0, Loader(16, 2), files=lists[name]))
        assert finding.listing == name
    # As ImageFolder lists them, classes sorted and names in them: equal lists are tried once.
    assert the_finding(lists, workers(order, 0, Loader(16), files=lists["sorted"])).listing == "ImageFolder"


def test_accelerate() -> None:
    """Whole batches of one permutation: to readers it is one sequence."""
    order = AccelerateShards(TorchEpochSeed(COUNT, 77), 2, 16)
    finding = the_finding(LISTS, workers(order, 4, Loader(16, 2)))
    assert (finding.seed, finding.seating.ranks, finding.seating.batch) == (81, 1, 16)
    assert_same(finding.order, TorchEpochSeed(COUNT, 77), range(4, 7))


@pytest.mark.parametrize("shared", [True, False])
def test_generator(shared: bool) -> None:
    order = TorchGeneratorSampler(COUNT, 2024, shared=shared)
    loader = Loader(16, 2)
    finding = the_finding(LISTS, workers(order, 0, loader))
    later = finding.narrow(1, Sightings("sorted", FILES, workers(order, 1, loader)))
    assert later is not None and later.seed == 2024
    assert_same(later.order, order, range(4))


@not_torch
@pytest.mark.parametrize(
    ("library", "epochs", "threads"),
    [
        ("RandomState", "same", True),
        ("RandomState", "shuffled", False),
        ("default_rng", "permuted", True),
        ("random", "shuffled", True),
        ("random", "same", False),
    ],
)
def test_lists_that_a_script_shuffles(library: str, epochs: str, threads: bool) -> None:
    order = SeededShuffle(COUNT, 1337, library, epochs)  # type: ignore[arg-type]

    def read(epoch: int) -> list[Integers]:
        return pool(order, epoch) if threads else workers(order, epoch, Loader(16, 2))

    finding = the_finding(LISTS, read(0))
    assert (finding.sampler, finding.seed, finding.seating == POOL) == (library, 1337, threads)
    later = finding.narrow(1, Sightings("sorted", FILES, read(1)))
    assert later is not None
    assert_same(later.order, order, range(4))


@not_torch
def test_a_shuffled_list_dealt_to_ranks() -> None:
    order = AccelerateShards(SeededShuffle(COUNT, 5, "RandomState"), 2, 1)
    finding = the_finding(LISTS, workers(order, 0, Loader(16, 2)))
    assert finding.seating.ranks == 2
    assert_same(finding.order, order, range(2))


@not_torch
@pytest.mark.parametrize("batch", [1, 8, 32, 64])
def test_keras_dataset(batch: int) -> None:
    order = KerasImageDataset(COUNT, 123, batch)
    finding = the_finding(LISTS, pool(order, 0))
    assert finding.seed == 123
    assert finding.order.samples(0).tolist() == order.samples(0).tolist()
    later = finding.narrow(1, Sightings("sorted", FILES, pool(order, 1)))
    assert later is not None
    assert_same(later.order, order, range(3))


@not_torch
def test_keras_flow() -> None:
    order = KerasFlow(COUNT, 99, 32)
    finding = the_finding(LISTS, pool(order, 0))
    later = finding.narrow(1, Sightings("sorted", FILES, pool(order, 1)))
    assert later is not None
    assert_same(later.order, order, range(3))


@not_torch
def test_two_programs() -> None:
    """Training and validation at once, or two jobs on one mount."""
    first, second = TorchDistributedSampler(COUNT, 2, 11), TorchDistributedSampler(COUNT, 1, shuffle=False)
    readers = workers(first, 0, Loader(16, 2)) + workers(second, 0, Loader(16, 2))
    found = findings(LISTS, readers)
    assert sorted(finding.sampler for finding in found) == ["DistributedSampler", "sequential"]
    by_sampler = {finding.sampler: {seat.reader for seat in finding.seating.seats} for finding in found}
    assert by_sampler == {"DistributedSampler": {0, 1, 2, 3}, "sequential": {4, 5}}


def test_files_that_are_not_listed_do_not_disturb() -> None:
    order = TorchDistributedSampler(COUNT, 2, 11)
    readers = [np.insert(files, [0, 2], [3, 999_999]) for files in workers(order, 0, Loader(16, 2))]
    assert the_finding(LISTS, readers).seed == 11


@not_torch
def test_too_little_was_seen() -> None:
    order = TorchDistributedSampler(COUNT, 2, 11)
    for seen in (0, 1, 2):
        assert findings(LISTS, workers(order, 0, Loader(16, 2), seen=seen)) == []
    assert findings({"empty": FILES[:0]}, workers(order, 0, Loader(16))) == []
    assert findings(LISTS, []) == []


@pytest.mark.parametrize("count", [2, 7, 40, 300, 20_000])
def test_nothing_is_found_in_random_reads(count: int) -> None:
    chance = np.random.default_rng(7_654_321)  # none of the usual seeds
    files = np.arange(count)
    for readers in (1, 8):
        seen = [chance.permutation(files)[:16] for _ in range(readers)]
        assert findings({"sorted": files, "other": chance.permutation(files)}, seen) == []


@pytest.mark.parametrize("seed", [2**31 + 12345, 999_999_999])
def test_an_unusual_seed_is_not_found_among_the_usual(seed: int) -> None:
    assert findings(LISTS, workers(TorchDistributedSampler(COUNT, 2, seed), 0, Loader(16, 2))) == []


@settings(deadline=None, max_examples=300)
@given(st.integers(50, 10**7), st.integers(1, 100), st.floats(1, 1e10), st.integers(0, 2))
def test_enough_is_asked_for(count: int, readers: int, tries: float, free: int) -> None:
    """As few files as rule out chance, and no fewer."""
    sightings = Sightings("", np.arange(0), [np.arange(0)] * readers)
    sightings.sample_count = count
    files = sightings.needed(tries, free)
    assert tries * readers * count ** float(free - files) <= RISK
    assert files == free + 1 or tries * readers * count ** float(free - files + 1) > RISK


def test_three_files_of_one_reader_identify_a_seed() -> None:
    """Of ImageNet's 1.28 million: what the search for all seeds needs."""
    sightings = Sightings("", np.arange(0), [np.arange(0)] * 8)
    sightings.sample_count = 1_281_167
    assert sightings.needed(SEEDS, 0) == 3


# ---- Any seed --------------------------------------------------------------------------------------------------------


def search_near(seed: int, sightings: Sightings, strides: Sequence[int] = (1,)) -> list[Finding]:
    """A slice of the search; all of it takes minutes."""
    return TorchSearch(sightings, strides, begin=max(0, seed - 50_000)).step(100_000)


@pytest.mark.parametrize("seen", [5, 12])
def test_random_sampler(seen: int) -> None:
    order = TorchRandomSampler(COUNT, 2**31 + 99, drawn_before=7)
    sightings = Sightings("sorted", FILES, workers(order, 0, Loader(16, 4), seen=seen))
    (finding,) = search_near(order.epoch_seed(0), sightings)
    assert finding.seed == order.epoch_seed(0)
    assert finding.order.samples(0).tolist() == order.samples(0).tolist()
    assert finding.seating.batch == 16


def test_distributed_sampler_with_any_seed() -> None:
    order = TorchDistributedSampler(COUNT, 8, 3_000_000_019)
    sightings = Sightings("sorted", FILES, workers(order, 0, Loader(16, 2)))
    (finding,) = search_near(3_000_000_019, sightings, (1, 8))
    assert_same(finding.order, order, range(2))


@pytest.mark.parametrize("count", [100, 5_000, 1_000_000])
def test_no_seed_is_found_for_random_reads(count: int) -> None:
    """Two million seeds, eight readers."""
    chance = np.random.RandomState(3)
    sightings = Sightings("sorted", np.arange(count), [chance.permutation(count)[:16] for _ in range(8)])
    search = TorchSearch(sightings, strides=(1, 2))
    assert search.step(2_000_000) == [] and search.tried == 2_000_000


def test_a_search_without_enough_to_go_by_is_done() -> None:
    search = TorchSearch(Sightings("sorted", FILES, [FILES[:2]]))
    assert search.done and search.step(100) == []


@pytest.mark.parametrize(("persistent", "besides"), [(False, 0), (True, 0), (False, 1234)])
def test_from_one_epoch_to_the_next_ones(persistent: bool, besides: int) -> None:
    """An epoch's seed leads to the global seed, the next epoch to what else is drawn; then all epochs are known."""
    order = TorchRandomSampler(
        COUNT, 1337, persistent_workers=persistent, drawn_before=100_001, drawn_per_epoch=besides
    )
    seeds = (42, 1337)
    candidates = [found for found in global_seeds(COUNT, order.epoch_seed(0), 1 << 20, seeds) if found is not None]
    assert [(found.seed, found.first_output) for found in candidates] == [(1337, 100_004)]
    second = Sightings("sorted", FILES, workers(order, 1, Loader(16, 2)))
    follower = next_epoch(candidates[0], second)
    assert follower is not None
    assert_same(follower, order, range(4))


def test_a_wrong_global_seed_is_not_followed() -> None:
    order = TorchRandomSampler(COUNT, 1337)
    second = Sightings("sorted", FILES, workers(order, 1, Loader(16, 2)))
    assert next_epoch(TorchRandomSampler(COUNT, 1338), second) is None
    assert next_epoch(TorchRandomSampler(COUNT, 1337), Sightings("sorted", FILES, [])) is None
