"""plain.py with importance exchange: ranks read what they own, and exchange the tenth of it that matters most.

torchrun --nproc-per-node 2 importance.py DATA
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from fanstore.torch import ImportanceExchangeSampler, Indexed  # instead of torch's DistributedSampler


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
    indexed = Indexed(data)  # samples are (index, image, label)
    sampler = ImportanceExchangeSampler(indexed, fraction=0.1)  # after init_process_group
    loader = DataLoader(indexed, arguments.batch_size, sampler=sampler, num_workers=1)
    model = DistributedDataParallel(torch.nn.Linear(8 * 8 * 3, len(data.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for indices, images, labels in loader:
            losses = torch.nn.functional.cross_entropy(model(images), labels, reduction="none")
            sampler.record(indices, losses)  # all ranks know them at set_epoch
            loss = losses.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"rank {dist.get_rank()}, epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
