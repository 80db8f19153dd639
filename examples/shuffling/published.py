"""plain.py with partial local shuffling, and the names of its publication.

torchrun --nproc-per-node 2 published.py DATA
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fanstore.torch import pls  # instead of torchvision's ImageFolder


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

    data = pls.ImageFolder(arguments.data, None, flat)  # after init_process_group
    scheduler = pls.Scheduler(data, arguments.batch_size, 0.1)
    loader = DataLoader(data, arguments.batch_size, shuffle=True, num_workers=1)
    model = DistributedDataParallel(torch.nn.Linear(8 * 8 * 3, len(data.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    for epoch in range(arguments.epochs):
        scheduler.scheduling(epoch)
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.communicate()
        scheduler.synchronize()
        scheduler.clean_local_storage()
        print(f"rank {dist.get_rank()}, epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
