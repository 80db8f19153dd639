"""Trains a small CNN on a folder of images, DATA/train/CLASS/* and DATA/val/CLASS/*, with PyTorch.

    python torch_images.py DATA --output-dir RUN                # one process
    torchrun --nproc-per-node 2 torch_images.py DATA ...        # several, with DistributedDataParallel
    python torch_images.py DATA --output-dir RUN --resume       # goes on after the last checkpoint in RUN

The same seed and the same number of processes give the same result.
"""

import argparse
import hashlib
import io
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from sample_log import SampleLog
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SIDE = 32


class ImageFolder(Dataset):
    """One class per directory; every sample comes with its name and a digest of its file."""

    def __init__(self, root, split):
        self.root = root
        folder = root / split
        self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self.samples = [
            (path, label) for label, name in enumerate(self.classes) for path in sorted((folder / name).iterdir())
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)), dtype=np.float32)
        tensor = torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1)
        return tensor, label, str(path.relative_to(self.root)), hashlib.sha256(content).hexdigest()


def make_model(classes):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 16, classes),
    )


def batches(loader, log):
    """Batches of a loader, each noted in the log when it is used."""
    for images, labels, names, digests in loader:
        for name, digest in zip(names, digests, strict=True):
            log.add(name, digest)
        yield images, labels


def train(model, optimizer, loader, log):
    model.train()
    total = 0.0
    for images, labels in batches(loader, log):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
    return total


@torch.no_grad()
def validate(model, loader, log):
    model.eval()
    right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in batches(loader, log))
    return right / len(loader.dataset)


def save_checkpoint(path, epoch, model, optimizer):
    """Under a temporary name, then renamed: there is a whole checkpoint under the real one at every moment."""
    temporary = path.with_suffix(".tmp")
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    os.replace(temporary, path)


def main():
    parser = argparse.ArgumentParser(description="Train a small CNN on a folder of images.")
    parser.add_argument("data", type=Path, help="directory with train/CLASS/* and val/CLASS/*")
    parser.add_argument("--output-dir", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on after the last checkpoint, if there is one")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--workers", type=int, default=2, help="processes that read and decode images")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample-log", type=Path, help="write names and digest of the samples read to DIR/RANK.json")
    arguments = parser.parse_args()

    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)

    data = ImageFolder(arguments.data, "train")
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, seed=arguments.seed)
    loader = DataLoader(data, arguments.batch_size, sampler=sampler, num_workers=arguments.workers)
    validation = DataLoader(ImageFolder(arguments.data, "val"), arguments.batch_size, num_workers=arguments.workers)
    model = make_model(len(data.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate, momentum=0.9)

    checkpoint, first = arguments.output_dir / "checkpoint.pt", 1
    if arguments.resume and checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    parallel = DistributedDataParallel(model) if size > 1 else model

    log = SampleLog()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for epoch in range(first, arguments.epochs + 1):
        start = time.perf_counter()
        sampler.set_epoch(epoch)
        total = torch.tensor(train(parallel, optimizer, loader, log))
        if size > 1:
            dist.all_reduce(total)
        loss = total.item() / len(data)
        accuracy = validate(model, validation, log)
        seconds = time.perf_counter() - start
        log.end_epoch(epoch, loss, seconds)
        if rank == 0:
            save_checkpoint(checkpoint, epoch, model, optimizer)
            speed = len(data) / seconds
            print(
                f"epoch {epoch}: loss {loss:.9f}, validation accuracy {accuracy:.3f}, {speed:.0f} images/s", flush=True
            )
    if arguments.sample_log:
        log.save(arguments.sample_log / f"{rank}.json")
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
