"""An ordinary training loop over a folder of images: DIR/train/CLASS/*.JPEG and DIR/val/CLASS/*.JPEG.

Decodes JPEGs with Pillow in a few threads, shrinks them, and fits a softmax regression with momentum in numpy. It reads
files the way any training script does (list folders, open, read), and knows nothing about where they come from. With
--ranks N, N processes each read their share of a common shuffle, and learn on their own. Same seed and same files: same
loss.
"""

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

#: Images are shrunk to a square of this side before they are learned from.
SIDE = 16
BATCH = 64
RATE = 0.05
MOMENTUM = 0.9

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Sample:
    """One image file and the number of its class."""

    path: Path
    label: int


def list_folder(directory: Path) -> tuple[list[Sample], int]:
    """All samples below DIR/CLASS/, in a fixed order, and the number of classes."""
    classes = sorted(entry.name for entry in directory.iterdir() if entry.is_dir())
    samples = [
        Sample(path, label) for label, name in enumerate(classes) for path in sorted((directory / name).iterdir())
    ]
    return samples, len(classes)


def load(sample: Sample) -> Floats:
    """Features of one image."""
    with Image.open(sample.path) as image:
        image.draft("RGB", (4 * SIDE, 4 * SIDE))  # libjpeg then decodes at a fraction of the size, as loaders do
        small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(small, dtype=np.float32).ravel() / np.float32(127.5) - np.float32(1)


def batches(samples: list[Sample], pool: ThreadPoolExecutor) -> Iterator[tuple[Floats, NDArray[np.intp]]]:
    """Decoded batches in order; while one is learned from, the next one is read."""
    groups = [samples[start : start + BATCH] for start in range(0, len(samples), BATCH)]
    ahead = [pool.submit(load, sample) for sample in groups[0]] if groups else []
    for number, group in enumerate(groups):
        current, ahead = (
            ahead,
            [pool.submit(load, sample) for group in groups[number + 1 : number + 2] for sample in group],
        )
        features = np.stack([future.result() for future in current])
        yield features, np.array([sample.label for sample in group])


def probabilities(weights: Floats, features: Floats) -> Floats:
    """Softmax of the scores."""
    scores = features @ weights[:-1] + weights[-1]
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: Floats = exponentials / exponentials.sum(axis=1, keepdims=True)
    return result


def train_epoch(weights: Floats, velocity: Floats, samples: list[Sample], pool: ThreadPoolExecutor) -> float:
    """One pass over the samples; changes weights and velocity, returns the mean loss."""
    total = 0.0
    for features, labels in batches(samples, pool):
        error = probabilities(weights, features)
        rows = np.arange(len(labels))
        total -= float(np.log(np.maximum(error[rows, labels], 1e-12)).sum())
        error[rows, labels] -= 1
        gradient = np.vstack([features.T @ error, error.sum(axis=0)]) / len(labels)
        velocity *= MOMENTUM
        velocity -= RATE * gradient
        weights += velocity
    return total / len(samples)


def accuracy(weights: Floats, samples: list[Sample], pool: ThreadPoolExecutor) -> float:
    """Share of samples whose most probable class is the right one."""
    right = sum(
        int((probabilities(weights, features).argmax(axis=1) == labels).sum())
        for features, labels in batches(samples, pool)
    )
    return right / len(samples)


def shuffled(training: list[Sample], epochs: int, seed: int, rank: int, ranks: int) -> Iterator[list[Sample]]:
    """What this rank reads, epoch by epoch."""
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        yield [training[position] for position in random.permutation(len(training))[rank::ranks]]


def main() -> int:
    """Train, and print one line per epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4, help="threads that read and decode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print what would be trained with, in order, and end")
    arguments = parser.parse_args()
    # Ctrl-C ends it at once: a KeyboardInterrupt that comes while a lock of the pool is taken leaves it taken for ever.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    training, classes = list_folder(arguments.directory / "train")
    orders = shuffled(training, arguments.epochs, arguments.seed, arguments.rank, arguments.ranks)
    if arguments.list:
        for order in orders:
            print("\n".join(str(sample.path.relative_to(arguments.directory)) for sample in order))
        return 0
    validation, _ = list_folder(arguments.directory / "val")
    print(f"{len(training):,} training and {len(validation):,} validation images in {classes} classes")
    random = np.random.default_rng(arguments.seed)
    weights = random.normal(0, 0.01, (3 * SIDE * SIDE + 1, classes)).astype(np.float32)
    velocity = np.zeros_like(weights)
    loss = float("nan")
    images, seconds = 0, 0.0
    with ThreadPoolExecutor(arguments.workers) as pool:
        for epoch, order in enumerate(orders):
            begin = time.perf_counter()
            loss = train_epoch(weights, velocity, order, pool)
            elapsed = time.perf_counter() - begin
            images, seconds = images + len(order), seconds + elapsed
            print(f"epoch {epoch + 1}: loss {loss:.6f}, {len(order) / elapsed:,.0f} images/s", flush=True)
        share = accuracy(weights, validation, pool)
    print(f"validation accuracy {share:.1%}")
    print(f"final loss {loss:.6f}, {images / seconds:,.0f} images/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
