"""Trains a linear model on images in DATA/CLASS/*, with shuffling that keeps reads on the node.

    python images.py DATA --checkpoint FILE                     # one process
    torchrun --nproc-per-node 2 images.py DATA --checkpoint FILE

It goes on where FILE says, in the middle of an epoch, also with another number of processes. What differs from a script
with DistributedSampler is marked.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from fanstore.torch import PartialLocalShuffleSampler  # instead of torch's DistributedSampler

SIDE = 16


class Images(Dataset):
    def __init__(self, root):
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.samples = [
            (str(path), n) for n, name in enumerate(self.classes) for path in sorted((root / name).iterdir())
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB").resize((SIDE, SIDE)), dtype=np.float32) / 255, label


def main():
    parser = argparse.ArgumentParser(description="Train a linear model on a folder of images.")
    parser.add_argument("data", type=Path, help="directory with CLASS/*")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="per process")
    parser.add_argument("--fraction", type=float, default=0.3, help="of the samples exchanged per epoch")
    parser.add_argument("--stop-after", type=int, default=0, help="steps, then end as a job that has run out of time")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)

    data = Images(arguments.data)
    sampler = PartialLocalShuffleSampler(data, fraction=arguments.fraction, seed=0)  # after init_process_group
    loader = DataLoader(data, arguments.batch_size, sampler=sampler, num_workers=1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIDE * SIDE * 3, len(data.classes)))
    step = 0
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint)
        model.load_state_dict(saved["model"])
        sampler.load_state_dict(saved["sampler"])  # goes on in the middle of the epoch
        step = saved["step"]
    parallel = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    for epoch in range(sampler.epoch, arguments.epochs):
        sampler.set_epoch(epoch)
        if len(sampler) == 0:  # the checkpoint was written at the end of this epoch
            continue
        trained = sampler.num_samples - len(sampler)  # of this epoch, before the job was started
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(parallel(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step, trained = step + 1, trained + len(labels)
            if step == arguments.stop_after:
                break
        if sampler.rank == 0:
            state = sampler.state_dict(trained)  # workers read ahead: say how many were trained with
            torch.save({"model": model.state_dict(), "sampler": state, "step": step}, arguments.checkpoint)
            print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}", flush=True)
        if step == arguments.stop_after:
            break
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
