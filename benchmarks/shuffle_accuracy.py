"""What shuffles that keep reads local cost in accuracy: real data, many simulated workers, several seeds.

Example: python benchmarks/shuffle_accuracy.py

Handwritten digits (scikit-learn's, 1,797 images of 8 x 8) are learned by a small network with batch normalisation,
data-parallel: each worker normalises with its own batch only, and gradients are averaged, as in training on many nodes.
What each worker reads is said by fanstore.order. Shares of the workers are sorted by class (the worst case) or
shuffled. Also counted: how much locality-aware loading leaves remote, and whether its gradients are those of global
shuffling.

scikit-learn and matplotlib are installed into an environment of their own (tests/environments.py), some 200 MB, once.
Writes results/NAME.json.gz, NAME.md and NAME.png.
"""

import argparse
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import machine, record
from harness.command import run
from harness.record import markdown_table
from harness.script import run_script

from fanstore.order import (
    GlobalShuffle,
    ImportanceExchange,
    LocalityAware,
    LocalShuffle,
    PartialLocalShuffle,
    Shuffle,
)

Array = npt.NDArray[Any]

_ENVIRONMENTS = Path(__file__).parent.parent / "tests" / "environments.py"
_INSTALL_S, _LOAD_S, _DRAW_S = 600.0, 120.0, 120.0

TRAINING_IMAGES = 1_440
HIDDEN = 64
CLASSES = 10
RATE, MOMENTUM = 0.1, 0.9
_EPSILON = 1e-5
#: How fast the averages of batch normalisation follow.
_FOLLOW = 0.1

#: Workers, and the batch of each: nothing of a share is left over in an epoch.
WORKERS = {16: 10, 64: 11, 256: 5}

#: Fractions of partial shuffling and of importance exchange.
_FRACTIONS, _IMPORTANT = (0.1, 0.3, 0.5, 0.9), (0.1, 0.3)


def make_order(name: str, samples: int, workers: int, batch: int, seed: int) -> Shuffle:
    kind, _, number = name.partition(" ")
    shape = {"samples": samples, "ranks": workers, "seed": seed}
    if kind == "partial":
        return PartialLocalShuffle(**shape, fraction=float(number))
    if kind in ("IS", "IS-Pair", "ILag-Pair"):
        lagging = kind.startswith("ILag")
        return ImportanceExchange(**shape, fraction=float(number), pairing="Pair" in kind, lagging=lagging)
    if kind == "locality":
        return LocalityAware(**shape, batch=batch)
    return {"local": LocalShuffle, "global": GlobalShuffle}[kind](**shape)


ORDERS = (
    "local",
    *(f"partial {fraction}" for fraction in _FRACTIONS),
    *(f"{kind} {fraction}" for kind in ("IS", "IS-Pair", "ILag-Pair") for fraction in _IMPORTANT),
    "locality",
    "global",
)
SHARES = ("sorted", "shuffled")


# --- the network ---


class Network:
    """Two hidden layers with batch normalisation, which each worker does alone; averages for evaluation are the mean of
    what all workers have seen."""

    def __init__(self, pixels: int, seed: int, normalises: bool = True, kind: type = np.float32) -> None:
        random = np.random.default_rng([seed, 77])
        widths = (pixels, HIDDEN, HIDDEN, CLASSES)
        self.normalises = normalises
        self.weights: list[Array] = [
            (random.normal(size=(a, b)) * math.sqrt(2 / a)).astype(kind) for a, b in itertools.pairwise(widths)
        ]
        self.scales: list[Array] = [np.ones(HIDDEN, kind) for _ in range(2)]
        self.shifts: list[Array] = [np.zeros(HIDDEN, kind) for _ in range(2)] + [np.zeros(CLASSES, kind)]
        self.means: list[Array] = [np.zeros(HIDDEN, kind) for _ in range(2)]
        self.variances: list[Array] = [np.ones(HIDDEN, kind) for _ in range(2)]

    @property
    def parameters(self) -> list[Array]:
        return [*self.weights, *self.scales, *self.shifts]

    def outputs(self, images: Array) -> Array:
        """Of evaluation."""
        values = images
        for layer in range(2):
            values = values @ self.weights[layer]
            if self.normalises:
                values = (values - self.means[layer]) / np.sqrt(self.variances[layer] + _EPSILON)
            values = np.maximum(self.scales[layer] * values + self.shifts[layer], 0)
        outputs: Array = values @ self.weights[2] + self.shifts[2]
        return outputs

    def gradients(self, images: Array, labels: Array) -> tuple[list[Array], Array]:
        """Of the mean loss of a global batch, by worker and place in its batch; and the loss of each sample."""
        workers, batch, _ = images.shape
        count = workers * batch
        values = images.reshape(count, -1)
        kept: list[tuple[Array, Array, Array, Array]] = []
        for layer in range(2):
            raw = (values @ self.weights[layer]).reshape(workers, batch, HIDDEN)
            mean = raw.mean(axis=1, keepdims=True) if self.normalises else np.zeros_like(raw[:, :1])
            variance = raw.var(axis=1, keepdims=True) if self.normalises else np.ones_like(raw[:, :1])
            spread = 1 / np.sqrt(variance + _EPSILON)
            normal = (raw - mean) * spread if self.normalises else raw
            scaled = self.scales[layer] * normal + self.shifts[layer]
            kept.append((values, normal, spread, scaled))
            values = np.maximum(scaled, 0).reshape(count, HIDDEN)
            if self.normalises:
                self.means[layer] += _FOLLOW * (mean.mean(axis=(0, 1)) - self.means[layer])
                self.variances[layer] += _FOLLOW * (variance.mean(axis=(0, 1)) - self.variances[layer])
        logits = values @ self.weights[2] + self.shifts[2]
        chances, losses = _softmax(logits, labels.ravel())
        back = chances
        back[np.arange(count), labels.ravel()] -= 1
        back /= count
        weights = [values.T @ back]
        shifts = [back.sum(axis=0)]
        scales: list[Array] = []
        for layer in (1, 0):
            before, normal, spread, scaled = kept[layer]
            back = (back @ self.weights[layer + 1].T).reshape(workers, batch, HIDDEN) * (scaled > 0)
            scales.insert(0, (back * normal).sum(axis=(0, 1)))
            shifts.insert(0, back.sum(axis=(0, 1)))
            back = back * self.scales[layer]
            if self.normalises:
                along = (back * normal).mean(axis=1, keepdims=True)
                back = spread * (back - back.mean(axis=1, keepdims=True) - normal * along)
            back = back.reshape(count, HIDDEN)
            weights.insert(0, before.T @ back)
        return [*weights, *scales, *shifts], losses.reshape(workers, batch)


def _softmax(logits: Array, labels: Array) -> tuple[Array, Array]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    total = powers.sum(axis=1, keepdims=True)
    return powers / total, np.log(total[:, 0]) - shifted[np.arange(len(labels)), labels]


# --- training ---


@dataclass(frozen=True)
class Trial:
    order: str
    workers: int
    share: str
    seed: int
    steps: int


def split(images: Array, labels: Array, share: str, seed: int) -> tuple[Array, Array, Array, Array]:
    """Training images in the sequence in which shares are cut from them, their labels, and those for validation."""
    chosen = np.random.default_rng([seed, 5]).permutation(len(labels))
    train, test = chosen[:TRAINING_IMAGES], chosen[TRAINING_IMAGES:]
    if share == "sorted":
        train = train[np.argsort(labels[train], kind="stable")]
    return images[train], labels[train], images[test], labels[test]


def accuracy(network: Network, images: Array, labels: Array) -> float:
    return float((network.outputs(images).argmax(axis=1) == labels).mean())


def train(trial: Trial, data: Path) -> dict[str, Any]:
    """One training; validation accuracy after a quarter of the steps, and at the end."""
    with np.load(data) as stored:
        images, labels, test_images, test_labels = split(stored["images"], stored["labels"], trial.share, trial.seed)
    batch = WORKERS[trial.workers]
    order = make_order(trial.order, len(labels), trial.workers, batch, trial.seed)
    network = Network(images.shape[1], trial.seed)
    speeds = [np.zeros_like(parameter) for parameter in network.parameters]
    epoch_steps = TRAINING_IMAGES // trial.workers // batch
    early = math.nan
    moved: list[float] = []
    done = epoch = 0
    while done < trial.steps:
        if isinstance(order, ImportanceExchange) and not order.lagging:
            _, losses = _softmax(network.outputs(images), labels)
            order.record(epoch, losses)
        places = np.stack([order.samples(epoch, rank)[: epoch_steps * batch] for rank in range(trial.workers)])
        seen = np.full(len(labels), np.nan)
        for step in range(min(epoch_steps, trial.steps - done)):
            chosen = places[:, step * batch : (step + 1) * batch]
            gradients, losses = network.gradients(images[chosen], labels[chosen])
            seen[chosen] = losses
            rate = RATE * (1 - done / trial.steps)
            for parameter, speed, gradient in zip(network.parameters, speeds, gradients, strict=True):
                speed *= MOMENTUM
                speed -= rate * gradient
                parameter += speed
            done += 1
            if done == trial.steps // 4:
                early = accuracy(network, test_images, test_labels)
        moved.append(order.traffic(epoch).share)
        if isinstance(order, ImportanceExchange) and order.lagging:
            order.record(epoch, seen)
        epoch += 1
    return {
        **vars(trial),
        "epochs": epoch,
        "early": early,
        "final": accuracy(network, test_images, test_labels),
        "remote": statistics.mean(moved),
    }


# --- locality-aware loading ---


def same_gradients(data: Path, workers: int, batch: int) -> dict[str, float]:
    """Largest difference of a gradient between locality-aware loading and global shuffling, in parts of the largest
    gradient; without and with batch normalisation in each worker."""
    with np.load(data) as stored:
        images, labels, _, _ = split(stored["images"], stored["labels"], "shuffled", 0)
    images = images.astype(np.float64)
    orders = [make_order(name, len(labels), workers, batch, 3) for name in ("global", "locality")]
    found = {}
    for name, normalises in (("without", False), ("with", True)):
        worst = 0.0
        for step in range(TRAINING_IMAGES // workers // batch):
            both = []
            for order in orders:
                network = Network(images.shape[1], 0, normalises, np.float64)
                chosen = np.stack(
                    [order.samples(0, rank)[step * batch : (step + 1) * batch] for rank in range(workers)]
                )
                both.append(network.gradients(images[chosen], labels[chosen])[0])
            for one, other in zip(*both, strict=True):
                worst = max(worst, float(np.abs(one - other).max() / max(np.abs(one).max(), 1e-300)))
        found[name] = worst
    return found


def expected_remote(ranks: int, batch: int) -> float:
    """What a rank owns of a global batch is binomial; what is above its own batch is read by others."""
    trials = ranks * batch
    excess = 0.0
    for owned in range(batch + 1, trials + 1):
        log = math.lgamma(trials + 1) - math.lgamma(owned + 1) - math.lgamma(trials - owned + 1)
        excess += (owned - batch) * math.exp(log - owned * math.log(ranks) + (trials - owned) * math.log(1 - 1 / ranks))
    return excess / batch


def remote_shares(batch: int, samples: int = 1_281_167) -> list[dict[str, float]]:
    """Of ImageNet's number of samples, in three epochs."""
    found = []
    for ranks in (2, 4, 8, 16, 32, 64):
        order = LocalityAware(samples=samples, ranks=ranks, batch=batch, seed=1)
        counted = statistics.mean(order.traffic(epoch).share for epoch in range(3))
        found.append({"ranks": ranks, "counted": counted, "expected": expected_remote(ranks, batch)})
    return found


# --- the record ---


def text(trials: Sequence[dict[str, Any]], key: str) -> str:
    """``.983 (.975-.989)``: mean and range of all seeds."""
    values = [trial[key] for trial in trials]
    mean, low, high = (
        f"{value:.3f}".removeprefix("0") for value in (statistics.mean(values), min(values), max(values))
    )
    return f"{mean} ({low}-{high})"


def make_table(result: dict[str, Any]) -> str:
    trials = result["trials"]
    parts = ["# Accuracy of shuffles that keep reads local", machine.sentence(result["machine"])]
    for share in SHARES:
        for key, when in (("final", "at the end"), ("early", "after a quarter of the steps")):
            rows = []
            for order in ORDERS:
                cells = [
                    text([t for t in trials if (t["order"], t["workers"], t["share"]) == (order, workers, share)], key)
                    for workers in WORKERS
                ]
                rows.append([order, *cells])
            title = f"{share} shares, {when}"
            parts.append(markdown_table([title, *(f"{workers} workers" for workers in WORKERS)], rows))
    settings = result["settings"]
    parts.append(
        f"Validation accuracy, mean and range of {settings['seeds']} seeds, on {result['test_images']} images that "
        f"were not trained with (one image is {1 / result['test_images']:.4f}). {settings['steps']} steps each, of "
        + ", ".join(f"{workers} x {batch}" for workers, batch in WORKERS.items())
        + " samples: "
        + ", ".join(f"{result['epochs'][str(workers)]}" for workers in WORKERS)
        + " epochs. The number behind a name is the fraction that is exchanged in an epoch."
    )
    parts.append(
        markdown_table(
            ["locality-aware, batch 32 of each rank", "remote reads", "expected"],
            [
                [f"{row['ranks']} ranks", f"{row['counted']:.4f}", f"{row['expected']:.4f}"]
                for row in result["remote_shares"]
            ],
        )
    )
    gradients = result["gradients"]
    parts.append(
        "Gradients of a global batch, locality-aware against global shuffling, in float64: at most "
        f"{gradients['without']:.1e} of the largest apart, which is rounding; with batch normalisation in each worker "
        f"{gradients['with']:.2g}."
    )
    parts.append(f"![picture]({result['name']}.png)")
    return "\n\n".join(parts)


def measure(seeds: int, steps: int, jobs: int, python: Path, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fanstore-accuracy-") as directory:
        data = Path(directory) / "digits.npz"
        script = (
            "import sys, numpy; from sklearn.datasets import load_digits; d = load_digits(); "
            "numpy.savez(sys.argv[1], images=(d.data / 16).astype('f4'), labels=d.target.astype('i8'))"
        )
        run([python, "-I", "-c", script, str(data)], _LOAD_S)
        asked = [
            Trial(order, workers, share, seed, steps)
            for workers in reversed(WORKERS)  # the longest first
            for order in ORDERS
            for share in SHARES
            for seed in range(seeds)
        ]
        # A process for each core: threads do not help with such small matrices. numpy looks at this when it is loaded.
        os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            trials = list(pool.map(train, asked, [data] * len(asked), chunksize=4))
        with np.load(data) as stored:
            test_images = len(stored["labels"]) - TRAINING_IMAGES
        return {
            "kind": "shuffle_accuracy",
            "name": name,
            "machine": machine.describe(Path.cwd()),
            "settings": {"seeds": seeds, "steps": steps, "jobs": jobs},
            "test_images": test_images,
            "epochs": {str(trial["workers"]): trial["epochs"] for trial in trials},
            "workers": list(WORKERS),
            "orders": list(ORDERS),
            "trials": trials,
            "remote_shares": remote_shares(32),
            "gradients": same_gradients(data, workers=16, batch=WORKERS[16]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each kind (default: 5)")
    parser.add_argument("--steps", type=int, default=200, help="of each training (default: 200)")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one per core)"
    )
    parser.add_argument("--name", default="shuffle-accuracy", help="of the record")
    parser.add_argument("--results", type=Path, default=record.RESULTS, metavar="DIR", help="where records are kept")
    arguments = parser.parse_args()
    made = run([sys.executable, str(_ENVIRONMENTS), "digits"], _INSTALL_S)
    python = Path(made.stdout.splitlines()[-1])
    result = measure(arguments.seeds, arguments.steps, arguments.jobs, python, arguments.name)
    path = record.write(arguments.name, result, make_table(result), arguments.results, picture=False)
    run([python, str(Path(__file__).with_name("picture.py")), str(path)], _DRAW_S)


if __name__ == "__main__":
    sys.exit(run_script(main))
