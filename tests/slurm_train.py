"""An ordinary training program with checkpoints, as the jobs of test_slurm.py run it: it knows nothing of FanStore.

Learns as scripts/demo_train.py does. After each epoch it writes a checkpoint under a temporary name and renames it;
every second one it syncs first. Then it notes, in a file of its own, what it may rely on from now on. It goes on from
the last checkpoint that it finds: however often it was interrupted, the last one is the same, bit for bit. At
SIGTERM it makes one more and takes its time for it, as programs do that have much to save.
"""

import argparse
import hashlib
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from demo_train import SIDE, list_folder, train_epoch

#: Seconds that it takes to end after SIGTERM.
END_S = 1.0

#: Bytes in a checkpoint that mean nothing: to copy it takes some time.
BALLAST_BYTES = 4_000_000


def name_of(epoch: int) -> str:
    return f"epoch{epoch:04}.npz"


def save(path: Path, synced: bool, **arrays: np.ndarray) -> str:
    """Write a checkpoint; its digest."""
    new = path.with_suffix(".new")
    with open(new, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    digest = hashlib.sha256(new.read_bytes()).hexdigest()
    new.rename(path)
    if synced:  # the name, too (docs/outputs.md)
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    return digest


def main() -> int:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    samples, classes = list_folder(arguments.data / "train")
    random = np.random.default_rng(arguments.seed)
    weights = random.normal(0, 0.01, (3 * SIDE * SIDE + 1, classes)).astype(np.float32)
    velocity = np.zeros_like(weights)
    arguments.checkpoints.mkdir(parents=True, exist_ok=True)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    first = 1
    if found := sorted(arguments.checkpoints.glob("epoch*.npz")):
        with np.load(found[-1]) as state:
            first, weights, velocity = int(state["epoch"]) + 1, state["weights"], state["velocity"]
        print(f"goes on from {found[-1].name}", flush=True)
    with ThreadPoolExecutor(2) as pool, open(arguments.notes, "a", buffering=1) as notes:
        for epoch in range(first, arguments.epochs + 1):
            order = np.random.default_rng((arguments.seed, epoch)).permutation(len(samples))
            ending = told.is_set()
            loss = train_epoch(weights, velocity, [samples[number] for number in order], pool)
            if ending:
                time.sleep(END_S)
            path, synced = arguments.checkpoints / name_of(epoch), epoch % 2 == 0
            ballast = np.random.default_rng(epoch).bytes(BALLAST_BYTES)
            state = {"weights": weights, "velocity": velocity, "ballast": np.frombuffer(ballast, dtype=np.uint8)}
            digest = save(path, synced, epoch=np.array(epoch), **state)
            notes.write(f"{epoch} {'synced' if synced else 'closed'} {digest}\n")
            print(f"epoch {epoch}: loss {loss:.6f}{', the last' if ending else ''}", flush=True)
            if ending:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
