"""Trains a softmax classifier on the datasets "images" and "labels" of DATA/data.h5, with h5py and numpy.

    python hdf5.py DATA --output-dir RUN
    python hdf5.py DATA --output-dir RUN --resume         # goes on after the last checkpoint in RUN

Every step takes a block of samples from a random place in the file. Same seed, same result.
"""

import argparse
import os
import time
from pathlib import Path

import h5py
import numpy as np
from sample_log import SampleLog


def main():
    parser = argparse.ArgumentParser(description="Train a softmax classifier on an HDF5 file.")
    parser.add_argument("data", type=Path, help="directory with data.h5")
    parser.add_argument("--output-dir", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on after the last checkpoint, if there is one")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--block", type=int, default=64, help="samples per step")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample-log", type=Path, help="write places and digest of the samples read to DIR/0.json")
    arguments = parser.parse_args()

    with h5py.File(arguments.data / "data.h5", "r") as file:
        fit(file["images"], file["labels"], arguments)


def fit(images, labels, arguments):
    classes, inputs = int(labels.attrs["classes"]), int(np.prod(images.shape[1:]))
    weights, first = np.zeros((inputs, classes)), 1
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = arguments.output_dir / "checkpoint.npz"
    if arguments.resume and checkpoint.exists():
        with np.load(checkpoint) as saved:
            weights, first = saved["weights"], int(saved["epoch"]) + 1

    log, steps = SampleLog(), len(images) // arguments.block
    for epoch in range(first, arguments.epochs + 1):
        start = time.perf_counter()
        random = np.random.default_rng([arguments.seed, epoch])
        total = 0.0
        for begin in map(int, random.integers(0, len(images) - arguments.block, steps)):
            end = begin + arguments.block
            x, y = images[begin:end], labels[begin:end]
            log.add(f"samples {begin}:{end}", x.tobytes() + y.tobytes())
            x = x.reshape(arguments.block, inputs) / 255.0
            scores = x @ weights
            scores -= scores.max(axis=1, keepdims=True)
            shares = np.exp(scores)
            shares /= shares.sum(axis=1, keepdims=True)
            total += float(-np.mean(np.log(shares[np.arange(arguments.block), y])))
            shares[np.arange(arguments.block), y] -= 1
            weights = weights - arguments.learning_rate * (x.T @ shares) / arguments.block
        seconds = time.perf_counter() - start
        log.end_epoch(epoch, total / steps, seconds)
        temporary = arguments.output_dir / "checkpoint.tmp.npz"
        np.savez(temporary, weights=weights, epoch=epoch)
        os.replace(temporary, checkpoint)
        print(f"epoch {epoch}: loss {total / steps:.9f}, {steps * arguments.block / seconds:.0f} samples/s", flush=True)
    if arguments.sample_log:
        log.save(arguments.sample_log / "0.json")


if __name__ == "__main__":
    main()
