"""Fits a linear regression to DATA/features.npy and DATA/targets.npy, which are mapped into memory, with numpy alone.

    python npy_mmap.py DATA --output-dir RUN
    python npy_mmap.py DATA --output-dir RUN --resume     # goes on after the last checkpoint in RUN

Every step takes a block of rows from a random place, so that only the pages of that block are read. Same seed, same
result.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
from sample_log import SampleLog


def main():
    parser = argparse.ArgumentParser(description="Fit a linear regression to arrays that are mapped into memory.")
    parser.add_argument("data", type=Path, help="directory with features.npy and targets.npy")
    parser.add_argument("--output-dir", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on after the last checkpoint, if there is one")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--block", type=int, default=64, help="rows per step")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample-log", type=Path, help="write rows and digest of the samples read to DIR/0.json")
    arguments = parser.parse_args()

    features = np.load(arguments.data / "features.npy", mmap_mode="r")
    targets = np.load(arguments.data / "targets.npy", mmap_mode="r")
    weights, velocity, first = np.zeros(features.shape[1]), np.zeros(features.shape[1]), 1
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = arguments.output_dir / "checkpoint.npz"
    if arguments.resume and checkpoint.exists():
        with np.load(checkpoint) as saved:
            weights, velocity, first = saved["weights"], saved["velocity"], int(saved["epoch"]) + 1

    log, steps = SampleLog(), len(features) // arguments.block
    for epoch in range(first, arguments.epochs + 1):
        start = time.perf_counter()
        random = np.random.default_rng([arguments.seed, epoch])
        total = 0.0
        for begin in map(int, random.integers(0, len(features) - arguments.block, steps)):
            rows = slice(begin, begin + arguments.block)
            x, y = np.asarray(features[rows]), np.asarray(targets[rows])
            log.add(f"rows {rows.start}:{rows.stop}", x.tobytes() + y.tobytes())
            error = x @ weights - y
            velocity = 0.9 * velocity - arguments.learning_rate * (x.T @ error) / arguments.block
            weights = weights + velocity
            total += float(np.mean(error**2))
        seconds = time.perf_counter() - start
        log.end_epoch(epoch, total / steps, seconds)
        temporary = arguments.output_dir / "checkpoint.tmp.npz"
        np.savez(temporary, weights=weights, velocity=velocity, epoch=epoch)
        os.replace(temporary, checkpoint)
        print(f"epoch {epoch}: loss {total / steps:.9f}, {steps * arguments.block / seconds:.0f} rows/s", flush=True)
    if arguments.sample_log:
        log.save(arguments.sample_log / "0.json")


if __name__ == "__main__":
    main()
