"""Replays of frameworks: the C loops against plain Python, whole orders against the libraries that are always here.

What the frameworks themselves do is compared in test_order_frameworks.py; some of what they gave stands here as golden
values, for machines without them.
"""

import random
from itertools import islice

import numpy as np
import order_reference as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fanstore import _native
from fanstore.errors import UsageError
from fanstore.order import (
    AccelerateShards,
    FileOrder,
    KerasFlow,
    KerasImageDataset,
    Loader,
    Order,
    SeededShuffle,
    TfDataShuffle,
    TorchDistributedSampler,
    TorchEpochSeed,
    TorchGeneratorSampler,
    TorchRandomSampler,
)
from fanstore.order.permutation import RANDPERM_LIMIT, LeadingPlaces, buffer_shuffle, python_shuffle, seeded_randperm
from fanstore.order.philox import philox_draws
from fanstore.order.seeded import Library
from fanstore.order.twister import TorchOutputs, Twister

SEEDS = st.integers(0, 2**32 - 1)
COUNTS = st.integers(0, 700)


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_twister(seed: int) -> None:
    expected = list(islice(reference.mersenne(seed), 1300))
    twister = Twister.torch(seed + (seed << 32))  # what is above 32 bits does not matter
    assert twister.draw(10).tolist() == expected[:10]
    twister.skip(1000)
    copy = twister.copy()
    assert twister.draw(290).tolist() == copy.draw(290).tolist() == expected[1010:]


@settings(max_examples=50, deadline=None)
@given(COUNTS, SEEDS)
def test_randperm(count: int, seed: int) -> None:
    assert seeded_randperm(count, seed).tolist() == reference.randperm(count, reference.mersenne(seed))


def test_outputs_by_number() -> None:
    outputs = TorchOutputs(5)
    expected = list(islice(reference.mersenne(5), 2000))
    for first, count in ((3, 1), (7, 1), (7, 2), (1000, 990), (0, 5), (1500, 1)):
        assert outputs.draw(first, count).tolist() == expected[first : first + count]


@settings(max_examples=50, deadline=None)
@given(COUNTS, st.integers(1, 800), st.lists(SEEDS, min_size=2, max_size=4))
def test_leading_places(count: int, places: int, seeds: list[int]) -> None:
    """One seed after the other: nothing is left of the one before."""
    leading = LeadingPlaces(count, places)
    for seed in seeds:
        found = leading(Twister.torch(seed).draw(places)).tolist()
        assert found == seeded_randperm(count, seed).tolist()[:places]


@settings(max_examples=50, deadline=None)
@given(COUNTS, SEEDS)
def test_python_shuffle(count: int, seed: int) -> None:
    """Against the reference and against Python, twice in a row: exactly as many numbers are used."""
    twister = Twister.python(seed)
    chance = random.Random(seed)
    for _ in range(2):
        numbers = list(range(count))
        chance.shuffle(numbers)
        assert python_shuffle(count, twister).tolist() == numbers
    expected = reference.python_shuffle(count, draws := reference.mersenne(seed))
    twister = Twister.torch(seed)
    assert python_shuffle(count, twister).tolist() == expected
    assert twister.draw(1)[0] == next(draws)


def test_python_shuffle_has_too_few_draws() -> None:
    assert _native.swap_backward(np.zeros(8, dtype=np.uint32), np.arange(10)) == -1
    assert _native.swap_backward(np.zeros(9, dtype=np.uint32), np.arange(10)) == 9


@pytest.mark.parametrize("seed", [0, 10**30, "a text", b"bytes"])
def test_python_seeds(seed: int | str | bytes) -> None:
    numbers = list(range(1000))
    random.Random(seed).shuffle(numbers)
    assert python_shuffle(1000, Twister.python(seed)).tolist() == numbers


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 99))
def test_philox(seed: int, seed2: int, count: int) -> None:
    assert philox_draws(seed, seed2, count).tolist() == reference.philox(seed, seed2, count)


def test_philox_computes_many_blocks() -> None:
    assert philox_draws(7, 8, 40_000).tolist() == reference.philox(7, 8, 40_000)


@settings(deadline=None)
@given(COUNTS, st.integers(1, 800), SEEDS)
def test_buffer_shuffle(count: int, buffer: int, seed: int) -> None:
    draws = reference.philox(seed, 1, count)
    assert buffer_shuffle(count, buffer, seed, 1).tolist() == reference.buffer_shuffle(count, buffer, draws)


def test_native_refuses_what_does_not_fit() -> None:
    order = np.empty(3, dtype=np.int64)
    for draws, buffer in ((2, 1), (3, 0), (3, -1)):
        with pytest.raises(ValueError, match="each item needs a draw"):
            _native.swap_buffer(np.zeros(draws, dtype=np.uint32), order, buffer)


@pytest.mark.parametrize("epochs", ["same", "permuted", "shuffled"])
def test_lists_that_a_script_shuffles(epochs: str) -> None:
    """As a script would do it, with each library."""
    legacy, modern, plain = np.random.RandomState(5), np.random.default_rng(5), random.Random(5)
    scripts: dict[Library, object] = {"RandomState": legacy, "default_rng": modern, "random": plain}
    for library, shuffler in scripts.items():
        order = SeededShuffle(101, 5, library, epochs)  # type: ignore[arg-type]
        numbers = list(range(101))
        expected = []
        for epoch in range(4):
            if epochs == "permuted":
                numbers = list(range(101))
            if epochs != "same" or epoch == 0:
                shuffler.shuffle(numbers)  # type: ignore[attr-defined]
            expected.append(list(numbers))
        assert [order.samples(epoch).tolist() for epoch in range(4)] == expected
        assert order.samples(1).tolist() == expected[1]  # going back


#: Recorded from torch 2.13.0, tensorflow 2.21.0, keras 3.15.1 and accelerate 1.15.0 with framework_orders.py.
GOLDEN: list[tuple[Order, int, int, list[int]]] = [
    (TorchEpochSeed(10, 0), 0, 0, [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]),
    (TorchRandomSampler(10, 1234), 1, 0, [3, 0, 9, 5, 2, 6, 4, 7, 8, 1]),
    (TorchRandomSampler(10, 1234, persistent_workers=True), 2, 0, [3, 0, 9, 5, 2, 6, 4, 7, 8, 1]),
    (TorchGeneratorSampler(10, 1234), 1, 0, [0, 4, 7, 8, 5, 9, 3, 2, 1, 6]),
    (TorchDistributedSampler(10, 3), 2, 1, [7, 6, 4, 8]),
    (AccelerateShards(TorchEpochSeed(10, 7), 2, 2), 1, 1, [0, 1, 4, 7, 3, 5]),
    (TfDataShuffle(10, 4, 3), 1, 0, [0, 4, 1, 2, 5, 3, 6, 8, 9, 7]),
    (KerasImageDataset(10, 5, 1), 1, 0, [7, 6, 1, 3, 2, 5, 0, 4, 9, 8]),
    (KerasFlow(10, 5, 4), 1, 0, [8, 6, 9, 0, 2, 5, 7, 1, 4, 3]),
]


@pytest.mark.parametrize(("order", "epoch", "rank", "expected"), GOLDEN)
def test_golden(order: Order, epoch: int, rank: int, expected: list[int]) -> None:
    assert order.samples(epoch, rank).tolist() == expected


def test_without_set_epoch_all_epochs_are_alike() -> None:
    order = TorchDistributedSampler(100, 4, set_epoch=False)
    assert order.samples(0, 1).tolist() == order.samples(7, 1).tolist()
    assert order.samples(0, 1).tolist() == TorchDistributedSampler(100, 4).samples(0, 1).tolist()


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 9), st.integers(0, 5), st.booleans())
def test_workers_read_everything_once(count: int, batch: int, workers: int, drop_last: bool) -> None:
    loader = Loader(batch, workers, drop_last=drop_last)
    samples = np.random.RandomState(1).permutation(count)
    read = loader.read(samples)
    assert len(read) == (count // batch * batch if drop_last else count)
    shares = [loader.worker(samples, worker) for worker in range(loader.readers)]
    assert sorted(np.concatenate(shares).tolist()) == sorted(read.tolist())
    together = loader.together(samples).tolist()
    assert sorted(together) == sorted(read.tolist())
    for share in shares:  # each worker's own sequence is kept
        chosen = set(share.tolist())
        assert [sample for sample in together if sample in chosen] == share.tolist()


def test_workers_take_turns() -> None:
    loader = Loader(2, 3)
    assert loader.worker(np.arange(14), 0).tolist() == [0, 1, 6, 7, 12, 13]
    assert loader.together(np.arange(14)).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11, 12, 13]
    assert (loader.ahead(), Loader(8).ahead()) == (12, 8)


def test_files_of_a_job() -> None:
    """For each rank and epoch the files, as a rank's program gets them and as its workers open them."""
    files = np.arange(1000, 1010)
    order = TorchDistributedSampler(10, 2)
    job = FileOrder(files, order, Loader(2, 2))
    for rank in range(2):
        samples = order.samples(3, rank)
        assert job.rank(3, rank).tolist() == (samples + 1000).tolist()
        first, second = job.worker(3, rank, 0), job.worker(3, rank, 1)
        assert sorted([*first, *second]) == sorted((samples + 1000).tolist())
        assert job.together(3, rank)[:2].tolist() == [first[0], second[0]]
    assert FileOrder(files, order).together(0, 1).tolist() == (order.samples(0, 1) + 1000).tolist()


def test_empty_and_tiny_datasets() -> None:
    orders: list[Order] = [
        TorchRandomSampler(0, 1),
        TorchGeneratorSampler(0, 1),
        TorchDistributedSampler(0, 3),
        AccelerateShards(TorchEpochSeed(0, 1), 3, 4),
        TfDataShuffle(0, 4, 1),
        KerasImageDataset(0, 1),
        KerasFlow(0, 1),
        SeededShuffle(0, 1, "random"),
    ]
    for order in orders:
        assert [order.samples(epoch).tolist() for epoch in range(3)] == [[], [], []]
    assert TorchDistributedSampler(1, 3).samples(0, 2).tolist() == [0]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: TorchDistributedSampler(10, 0), "'ranks' is 0; it must be 1 or more"),
        (lambda: TorchDistributedSampler(-1, 1), "'samples' is -1; it must be 0 or more"),
        (lambda: TorchDistributedSampler(10, 2).samples(0, 2), "there is no rank 2 in an order for 2 ranks"),
        (lambda: TorchRandomSampler(10, 0).samples(0, 1), "there is no rank 1 in an order for 1 rank"),
        (lambda: TorchRandomSampler(10, 0).samples(-1), "'epoch' is -1; it must be 0 or more"),
        (lambda: TorchEpochSeed(RANDPERM_LIMIT, 0).samples(0), "is known for fewer than 214,748,364 samples"),
        (lambda: AccelerateShards(TorchEpochSeed(9, 0), 2, 3, split_batches=True), "cannot be split evenly"),
        (lambda: AccelerateShards(TorchEpochSeed(9, 0), 2, 0), "'batch' is 0"),
        (lambda: TfDataShuffle(9, 0, 1), "'buffer' is 0"),
        (lambda: KerasImageDataset(9, -1), "numpy takes seeds from 0"),
        (lambda: KerasImageDataset(9, 1, validation_split=0.5), "'training' or 'validation'"),
        (lambda: KerasImageDataset(9, 1, validation_split=1.5, subset="training"), "must be between 0 and 1"),
        (lambda: SeededShuffle(9, 2**32, "RandomState"), "RandomState takes no such seed"),
        (lambda: SeededShuffle(9, 1, "dice"), "must be one of RandomState, default_rng, random"),  # type: ignore[arg-type]
        (lambda: Loader(0), "'batch' is 0"),
        (lambda: FileOrder(np.arange(3), TorchEpochSeed(4, 0)), "does not fit a list of 3 files"),
        (lambda: FileOrder(np.arange(3), TorchEpochSeed(3, 0)).worker(0, 0, 0), "has no loader"),
    ],
)
def test_bad_input(make: object, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()  # type: ignore[operator]
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
