"""Orders replayed by fanstore.order against the frameworks themselves, bit for bit.

They are large, so they come from another environment: FANSTORE_TEST_FRAMEWORKS=/path/to/venv/bin/python, with torch and
tensorflow-cpu, and torchvision, timm and accelerate where their cases are not to be skipped; environments.py makes it
for scripts/test. What they do is in framework_orders.py.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked_process import Ask, asked_process

from fanstore.order import listing
from fanstore.order.accelerate import AccelerateShards
from fanstore.order.files import FileOrder
from fanstore.order.keras import KerasFlow, KerasImageDataset
from fanstore.order.loader import Loader
from fanstore.order.order import Order
from fanstore.order.permutation import seeded_randperm
from fanstore.order.pytorch import (
    TorchDistributedSampler,
    TorchEpochSeed,
    TorchGeneratorSampler,
    TorchRandomSampler,
)
from fanstore.order.sightings import Sightings
from fanstore.order.tfdata import TfDataShuffle
from fanstore.order.torchsearch import TorchSearch, global_seeds, next_epoch
from fanstore.order.twister import Twister

PYTHON = os.environ.get("FANSTORE_TEST_FRAMEWORKS", "")
SCRIPT = Path(__file__).parent / "framework_orders.py"

pytestmark = pytest.mark.skipif(not PYTHON, reason="frameworks are installed by scripts/test --all")


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """A process of that environment: ask(case, **arguments) is what the framework did."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"}
    with asked_process(PYTHON, SCRIPT, os.environ | quiet, tmp_path_factory.mktemp("frameworks")) as asked:
        yield asked


def epochs_of(order: Order, epochs: int, rank: int = 0) -> list[list[int]]:
    return [order.samples(epoch, rank).tolist() for epoch in range(epochs)]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 623, 624, 625, 100_003])
def test_randperm(ask: Ask, count: int) -> None:
    seeds = [0, 1, 42, 2**32 - 1, 2**32, 2**40 + 5, 2**63, 2**64 - 1, -1]
    expected = ask("torch_randperm", count=count, seeds=seeds)
    assert [seeded_randperm(count, seed).tolist() for seed in seeds] == expected


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("drawn", [0, 1001])
def test_random_sampler(ask: Ask, workers: int, persistent: bool, drawn: int) -> None:
    expected = ask(
        "torch_random_sampler", count=101, seed=1234, epochs=4, drawn=drawn, workers=workers, persistent=persistent
    )
    order = TorchRandomSampler(101, 1234, persistent_workers=persistent, drawn_before=drawn)
    assert epochs_of(order, 4) == expected


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_generator(ask: Ask, workers: int, persistent: bool, shared: bool, drop_last: bool) -> None:
    options = {"shared": shared, "workers": workers, "persistent": persistent, "drop_last": drop_last}
    expected = ask("torch_generator", count=101, seed=2**35 + 7, epochs=4, **options)
    order = TorchGeneratorSampler(101, 2**35 + 7, shared=shared, persistent_workers=persistent)
    loader = Loader(8, workers, drop_last=drop_last)
    read = [loader.read(order.samples(epoch)).tolist() for epoch in (0, 1, 2, 3)]
    assert read == expected
    assert loader.read(order.samples(1)).tolist() == expected[1]  # going back


@pytest.mark.parametrize("count", [3, 100, 101, 103])
@pytest.mark.parametrize("set_epoch", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"seed": 77}, {"drop_last": True}, {"shuffle": False}, {"shuffle": False, "drop_last": True}]
)
def test_distributed_sampler(ask: Ask, count: int, set_epoch: bool, options: dict[str, Any]) -> None:
    ranks = 8 if count == 3 else 4
    expected = ask("torch_distributed", count=count, ranks=ranks, epochs=3, set_epoch=set_epoch, options=options)
    order = TorchDistributedSampler(count, ranks, set_epoch=set_epoch, **options)
    assert [epochs_of(order, 3, rank) for rank in range(ranks)] == expected


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("prefetch_factor", [2, 3])
def test_batches_over_workers(ask: Ask, drop_last: bool, prefetch_factor: int) -> None:
    by_worker, [[handed_out]] = ask(
        "torch_workers", count=103, batch=4, workers=3, drop_last=drop_last, prefetch_factor=prefetch_factor
    )
    loader = Loader(4, 3, drop_last=drop_last, prefetch_factor=prefetch_factor)
    assert [loader.worker(np.arange(103), worker).tolist() for worker in range(3)] == by_worker
    assert loader.ahead() == 4 * handed_out


def test_a_training_is_recognised(ask: Ask) -> None:
    """From the first files of two epochs: seeds, batches, what a model and its validation draw; then all is known."""
    epochs = ask("torch_training", count=3000, batch=32, workers=2, seed=1234, epochs=4)
    files = np.arange(3000)
    first, second = (
        Sightings("list", files, [np.array(worker[:10]) for worker in epoch]) for epoch in (epochs[0], epochs[1])
    )
    weights = 100 * 200 + 200 + 200 * 10 + 10
    drawn_seed = TorchRandomSampler(3000, 1234, drawn_before=weights).epoch_seed(0)
    (finding,) = TorchSearch(first, begin=drawn_seed - 1000).step(2000)  # all of them take a minute
    assert (finding.seed, finding.seating.batch) == (drawn_seed, 32)

    samplers = (found for found in global_seeds(3000, drawn_seed, 1 << 20) if found is not None)
    followers = (follower for sampler in samplers if (follower := next_epoch(sampler, second)) is not None)
    order = next(followers)
    assert (order.seed, order.first_output, order.stride) == (1234, weights + 3, 6)
    job = FileOrder(files, order, Loader(32, 2))
    assert [[job.worker(epoch, 0, worker).tolist() for worker in range(2)] for epoch in range(4)] == epochs


@pytest.mark.parametrize("count", [3, 40, 96, 101])
@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drop_last": True},
        {"even_batches": False},
        {"split_batches": True},
        {"split_batches": True, "drop_last": True},
        {"split_batches": True, "even_batches": False},
    ],
)
def test_accelerate(ask: Ask, count: int, seedable: bool, options: dict[str, Any]) -> None:
    arguments = {"count": count, "ranks": 2, "batch": 8, "seed": 99, "epochs": 3, "seedable": seedable}
    expected = ask("accelerate_shards", **arguments, options=options)
    # Preparing draws the seed of a loader that is not seedable: outputs 0 and 1 of the global generator.
    dealt = TorchEpochSeed(count, 99) if seedable else TorchGeneratorSampler(count, second_output(99), shared=False)
    order = AccelerateShards(dealt, 2, 8, **options)
    assert [epochs_of(order, 3, rank) for rank in range(2)] == expected


def second_output(seed: int) -> int:
    return int(Twister.torch(seed).draw(2)[1])


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that list orders disagree about: upper case, numbers, dots, directories below classes, other types."""
    root = tmp_path_factory.mktemp("tree")
    names = [
        "a.jpg",
        "B.JPG",
        "img2.png",
        "img10.png",
        "img1.jpeg",
        "x.bmp",
        "y.tiff",
        "z.gif",
        "readme.txt",
        ".jpg",
        "apng",
    ]
    for folder in ("b", "a", "a-b", "A", "a/sub", "a/sub-2", "a/sub/deep", "n10", "n2", ".hidden", "empty"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        if folder != "empty":
            for name in names:
                (root / folder / name).touch()
    (root / "top.jpg").touch()
    return root


def walked(root: Path) -> list[str]:
    """As os.walk goes from the bottom up, which is how timm's ties stand."""
    paths = [(Path(folder), file) for folder, _, files in os.walk(root, topdown=False) for file in files]
    return [str((folder / file).relative_to(root)) for folder, file in paths]


@pytest.mark.parametrize(
    ("case", "list_order"), [("torchvision_list", listing.image_folder), ("timm_list", listing.timm_folder)]
)
def test_lists(ask: Ask, tree: Path, case: str, list_order: Callable[[list[str]], Any]) -> None:
    paths = walked(tree)
    assert [paths[number] for number in list_order(paths)] == ask(case, root=str(tree))


@pytest.mark.parametrize("count", [1, 20, 1000])
@pytest.mark.parametrize("buffer", [1, 7, 64, 5000])
@pytest.mark.parametrize("reshuffle", [False, True])
@pytest.mark.parametrize(("seed", "global_seed"), [(3, None), (0, 0), (2**31 + 5, 11)])
def test_tf_data(ask: Ask, count: int, buffer: int, reshuffle: bool, seed: int, global_seed: int | None) -> None:
    arguments: dict[str, Any] = {"seed": seed, "global_seed": global_seed, "reshuffle": reshuffle}
    expected = ask("tf_data", count=count, buffer=buffer, epochs=3, **arguments)
    assert epochs_of(TfDataShuffle(count, buffer, **arguments), 3) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 5, "batch_size": 2},
        {"seed": 999_999, "batch_size": None},
        {"seed": 5, "batch_size": 2, "validation_split": 0.3, "subset": "training"},
        {"seed": 5, "batch_size": 2, "validation_split": 0.3, "subset": "validation"},
    ],
)
def test_keras_dataset(ask: Ask, tree: Path, options: dict[str, Any]) -> None:
    listed, *expected = ask("keras_dataset", root=str(tree), epochs=3, options=options)
    paths = walked(tree)
    assert [paths[number] for number in listing.keras_dataset(paths)] == listed
    ours = dict(options)
    order = KerasImageDataset(len(listed), ours.pop("seed"), ours.pop("batch_size"), **ours)
    assert [[listed[sample] for sample in order.samples(epoch)] for epoch in range(3)] == expected


@pytest.mark.parametrize("batch", [1, 4, 1000])
def test_keras_flow(ask: Ask, tree: Path, batch: int) -> None:
    listed, *expected = ask("keras_flow", root=str(tree), batch=batch, seed=8, epochs=3)
    paths = walked(tree)
    assert [paths[number] for number in listing.keras_flow(paths)] == listed
    order = KerasFlow(len(listed), 8, batch)
    assert [[listed[sample] for sample in order.samples(epoch)] for epoch in range(3)] == expected
