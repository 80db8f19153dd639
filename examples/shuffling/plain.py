"""Trains a linear model on images in DATA/CLASS/*, with the stock classes; knows nothing of FanStore.

    torchrun --nproc-per-node 2 plain.py DATA

Ranks of this script read what their nodes hold with: fanstore-mount ... --order locality -- torchrun ... plain.py DATA.
The other scripts here do what this one does; what differs is marked.
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder


def flat(image):
    return torch.tensor(list(image.resize((8, 8)).tobytes())) / 255


def main():
    parser = argparse.ArgumentParser(description="Train a linear model on a folder of images.")
    parser.add_argument("data", help="directory with CLASS/*")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="per process")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    data = ImageFolder(arguments.data, flat)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, arguments.batch_size, sampler=sampler, num_workers=1)
    model = DistributedDataParallel(torch.nn.Linear(8 * 8 * 3, len(data.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"rank {dist.get_rank()}, epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
