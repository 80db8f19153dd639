"""Trains a classifier on images in tar shards, with WebDataset and PyTorch.

    python webdataset_shards.py SHARDS --output-dir RUN

SHARDS is a directory of tar files. Images in them are called [...]train/CLASS/NAME.(jpeg|jpg|png); everything else in
the shards is passed over. Shards are read from front to back by worker processes, and shuffled in a buffer.
The same seed and the same shards give the same result.
"""

import argparse
import hashlib
import io
import os
import random
import tarfile
import time
from pathlib import Path

import numpy as np
import torch
import webdataset as wds
from PIL import Image
from sample_log import SampleLog
from torch import nn

SIDE = 32
KINDS = ("jpeg", "jpg", "png")


def class_of(name):
    """The class of an image for training, by its name in the shard; None of anything else."""
    *_, split, label, _ = ("", "", *name.split("/"))
    return label if split == "train" else None


def find_classes(shards):
    """From the names of all members; only the headers of the tar files are read."""
    found = set()
    for shard in shards:
        with tarfile.open(shard) as archive:
            found |= {class_of(name) for name in archive.getnames() if name.lower().endswith(KINDS)}
    return sorted(found - {None})


def make_decode(classes):
    numbers = {name: number for number, name in enumerate(classes)}

    def decode(sample):
        content = next(sample[kind] for kind in KINDS if kind in sample)
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)), dtype=np.float32)
        label = numbers[class_of(sample["__key__"])]
        return pixels / 127.5 - 1, label, sample["__key__"], hashlib.sha256(content).hexdigest()

    return decode


def is_for_training(sample):
    return class_of(sample["__key__"]) is not None and any(kind in sample for kind in KINDS)


def main():
    parser = argparse.ArgumentParser(description="Train a classifier on images in tar shards.")
    parser.add_argument("shards", type=Path, help="directory of tar files")
    parser.add_argument("--output-dir", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2, help="processes that read and decode shards")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample-log", type=Path, help="write names and digest of the samples read to DIR/0.json")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    shards = sorted(str(path) for path in arguments.shards.glob("*.tar"))
    classes = find_classes(shards)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE * 3, 64), nn.ReLU(), nn.Linear(64, len(classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    log = SampleLog()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for epoch in range(1, arguments.epochs + 1):
        start = time.perf_counter()
        order = random.Random(arguments.seed + epoch).sample(shards, len(shards))
        dataset = (
            wds.WebDataset(order, shardshuffle=False, empty_check=False)
            .select(is_for_training)
            .shuffle(1000, rng=random.Random(arguments.seed + epoch))
            .map(make_decode(classes))
            .batched(arguments.batch_size)
        )
        total = count = 0
        for images, labels, names, digests in wds.WebLoader(dataset, batch_size=None, num_workers=arguments.workers):
            for name, digest in zip(names, digests, strict=True):
                log.add(name, digest)
            loss = nn.functional.cross_entropy(model(torch.as_tensor(images)), torch.as_tensor(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, count = total + loss.item() * len(labels), count + len(labels)
        seconds = time.perf_counter() - start
        log.end_epoch(epoch, total / count, seconds)
        temporary = arguments.output_dir / "model.tmp"
        torch.save(model.state_dict(), temporary)
        os.replace(temporary, arguments.output_dir / "model.pt")
        print(f"epoch {epoch}: loss {total / count:.9f}, {count / seconds:.0f} images/s", flush=True)
    if arguments.sample_log:
        log.save(arguments.sample_log / "0.json")


if __name__ == "__main__":
    main()
