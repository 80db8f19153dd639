"""What it costs to know an order: epochs replayed, seeds searched, plans of shuffles.

Example: python benchmarks/order_speed.py --samples 1281167 --ranks 2048

Processor time of one thread, in interleaved rounds. What is replayed is compared, within each round, with numpy's own
permutation of as many samples (numpy.random.RandomState.permutation). The plan of a shuffle is what one rank computes
for one epoch: what it reads, sends and receives. The search goes through all 2^32 seeds of torch for the one that
shuffled, and must find it and no other; --seeds takes fewer.
Writes results/NAME.json.gz and NAME.md.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine, record
from harness.command import BenchmarkError
from harness.record import Spread, markdown_table
from harness.script import run_script

from fanstore.order import (
    AccelerateShards,
    GlobalShuffle,
    ImportanceExchange,
    KerasFlow,
    KerasImageDataset,
    LocalityAware,
    LocalShuffle,
    Order,
    PartialLocalShuffle,
    SeededShuffle,
    ShardShuffle,
    Shuffle,
    TfDataShuffle,
    TorchDistributedSampler,
    TorchEpochSeed,
    TorchGeneratorSampler,
    TorchRandomSampler,
)
from fanstore.order.recognition import recognise
from fanstore.order.seedsearch import SEEDS
from fanstore.order.sightings import Sightings
from fanstore.order.torchsearch import TorchSearch

READERS, SEEN = 4, 16
STEP = 1 << 24


def replays(samples: int) -> dict[str, Order]:
    return {
        "TorchRandomSampler": TorchRandomSampler(samples, 1),
        "TorchGeneratorSampler": TorchGeneratorSampler(samples, 1),
        "TorchDistributedSampler, 8 ranks": TorchDistributedSampler(samples, 8),
        "AccelerateShards, 8 ranks": AccelerateShards(TorchEpochSeed(samples, 1), 8, 32),
        "TfDataShuffle, buffer 10,000": TfDataShuffle(samples, 10_000, 1),
        "KerasImageDataset": KerasImageDataset(samples, 1),
        "KerasFlow": KerasFlow(samples, 1),
        "SeededShuffle, default_rng": SeededShuffle(samples, 1, "default_rng", "permuted"),
        "SeededShuffle, random": SeededShuffle(samples, 1, "random", "permuted"),
    }


def shuffles(samples: int, ranks: int) -> dict[str, Shuffle]:
    shape: dict[str, Any] = {"samples": samples, "ranks": ranks, "seed": 1}
    return {
        "GlobalShuffle": GlobalShuffle(**shape),
        "LocalShuffle": LocalShuffle(**shape),
        "PartialLocalShuffle, 0.3": PartialLocalShuffle(**shape, fraction=0.3),
        "ImportanceExchange, 0.3, pairs": ImportanceExchange(**shape, fraction=0.3),
        "ImportanceExchange, 0.3, all-to-all": ImportanceExchange(**shape, fraction=0.3, pairing=False),
        "LocalityAware, batch 32": LocalityAware(**shape, batch=32),
        "ShardShuffle, buffer 10,000": ShardShuffle(**shape, buffer=10_000),
    }


def processor_s(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def plan(shuffle: Shuffle, epoch: int) -> None:
    rank = shuffle.ranks // 2
    shuffle.samples(epoch, rank)
    shuffle.exchange(epoch, rank)


def measure(samples: int, ranks: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """By kind and name, the seconds of each round; "numpy" is the yardstick of the same round."""
    taken: dict[str, dict[str, list[float]]] = {"replay": {"numpy": []}, "plan": {}}
    replayed, planned = replays(samples), shuffles(samples, ranks)
    for number in range(1, rounds + 1):  # what the first epoch costs is in part paid before
        yardstick = processor_s(lambda epoch=number: np.random.RandomState(epoch).permutation(samples))  # type: ignore[misc]
        taken["replay"]["numpy"].append(yardstick)
        for name, order in replayed.items():
            seconds = processor_s(lambda order=order, epoch=number: order.samples(epoch))  # type: ignore[misc]
            taken["replay"].setdefault(name, []).append(seconds)
        for name, shuffle in planned.items():
            seconds = processor_s(lambda shuffle=shuffle, epoch=number: plan(shuffle, epoch))  # type: ignore[misc]
            taken["plan"].setdefault(name, []).append(seconds)
    return taken


def search(samples: int, seeds: int) -> dict[str, Any]:
    """Usual seeds in vain, then all of them; the one that is right is at half of what is searched."""
    seed = seeds // 2 + 12_345
    order = TorchEpochSeed(samples, seed).samples(0)
    readers = [order[32 * reader : 32 * reader + SEEN] for reader in range(READERS)]
    usual_s = processor_s(lambda: list(recognise({"list": np.arange(samples)}, readers)))
    torch = TorchSearch(Sightings("list", np.arange(samples), readers))
    found = []
    begin = time.process_time()
    while torch.tried < seeds:
        found += [finding.seed for finding in torch.step(min(STEP, seeds - torch.tried))]
    seconds = time.process_time() - begin
    if found != [seed]:
        raise BenchmarkError(f"the search found {found}, not [{seed}]")
    return {"seeds": seeds, "seconds": seconds, "ns_per_seed": seconds / seeds * 1e9, "usual_s": usual_s}


def make_table(result: dict[str, Any]) -> str:
    settings, searched = result["settings"], result["search"]
    yardstick = result["taken"]["replay"]["numpy"]
    rows = []
    for name, seconds in result["taken"]["replay"].items():
        ratio = Spread.of([own / other for own, other in zip(seconds, yardstick, strict=True)])
        rows.append([name, f"{Spread.of(seconds).median * 1e3:.1f}", ratio.ratio_text()])
    plans = [
        [name, Spread.of([s * 1e3 for s in seconds]).ratio_text()] for name, seconds in result["taken"]["plan"].items()
    ]
    return "\n".join(
        [
            f"# Orders of {settings['samples']:,} samples",
            "",
            f"Processor time of one thread, median of {settings['rounds']} rounds (lowest-highest). "
            f"{machine.sentence(result['machine'])}.",
            "",
            "An epoch replayed:",
            "",
            markdown_table(["order", "ms", "of numpy's permutation"], rows),
            "",
            f"An epoch planned for one of {settings['ranks']:,} ranks: what it reads, sends and receives:",
            "",
            markdown_table(["shuffle", "ms"], plans),
            "",
            f"The search for a seed: {searched['seeds']:,} seeds of torch in {searched['seconds']:.0f} s, "
            f"{searched['ns_per_seed']:.1f} ns each, the right one found and no other. Usual orders with usual seeds, "
            f"all in vain: {searched['usual_s']:.1f} s.",
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--ranks", type=int, default=2_048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the search (default: all, one to five minutes)")
    parser.add_argument("--name", default="order-speed", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    taken = measure(arguments.samples, arguments.ranks, arguments.rounds)
    result = {
        "kind": "order_speed",
        "machine": machine.describe(Path.cwd()),
        "settings": {key: getattr(arguments, key) for key in ("samples", "ranks", "rounds")},
        "taken": taken,
        "search": search(arguments.samples, arguments.seeds),
    }
    record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
