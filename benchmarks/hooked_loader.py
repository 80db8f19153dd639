"""A program with a DataLoader of many samples that reads nothing, for order_hook.py: says what batches took, as JSON.

Knows nothing of FanStore. Arguments: a file with a path per line, samples per batch, ``listed`` for a sampler that
only lists its numbers.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

#: Between two batches, as for a step of training that is faster than any.
PAUSE_S = 0.001


class Numbers(Dataset):  # type: ignore[type-arg,misc,unused-ignore]
    def __init__(self, paths: list[str]) -> None:
        self.samples = [(path, 0) for path in paths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> int:
        return number


class Listed(torch.utils.data.Sampler):  # type: ignore[type-arg,misc,unused-ignore]
    """As most samplers of one's own are."""

    def __init__(self, count: int) -> None:
        self.numbers = torch.randperm(count).tolist()

    def __iter__(self) -> Any:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def main() -> None:
    data = Numbers(Path(sys.argv[1]).read_text().splitlines())
    torch.manual_seed(1)
    options: dict[str, Any] = {"sampler": Listed(len(data))} if sys.argv[3] == "listed" else {"shuffle": True}
    loader: Any = DataLoader(data, batch_size=int(sys.argv[2]), collate_fn=len, **options)
    epochs = []
    for _ in range(2):
        batches = iter(loader)
        taken = []
        while True:
            begin = time.perf_counter()
            if next(batches, None) is None:
                break
            taken.append(time.perf_counter() - begin)
            time.sleep(PAUSE_S)
        epochs.append(taken)
    print(json.dumps([{"first_s": batches[0], "batch_s": sum(batches[1:]) / len(batches[1:])} for batches in epochs]))


if __name__ == "__main__":
    main()
