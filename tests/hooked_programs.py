"""Programs with torch, as people write them; they know nothing of FanStore. Run by test_hook.py: NAME MOUNTPOINT ...

Each says a line per epoch, and waits for one before it goes on, so that a test can look in between.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset
from torch.utils.data.distributed import DistributedSampler


class Images(Dataset):  # type: ignore[type-arg,misc,unused-ignore]
    """As ImageFolder has them: ``samples``; with ``said=False`` as others do, which say nothing."""

    def __init__(self, root: Path, said: bool = True) -> None:
        self.paths = sorted(os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
        if said:
            self.samples = [(path, 0) for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Any:
        with open(self.paths[number], "rb", buffering=0) as file:
            content = file.readall()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that each epoch is seen by the mount
        return torch.tensor([len(content) / 1e4, content[0] / 255, content[-1] / 255])


def say(*words: object) -> None:
    print(*words, flush=True)
    sys.stdin.readline()


class Training:
    def __init__(self) -> None:
        torch.manual_seed(11)
        torch.set_num_threads(1)
        layers = (torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.model: Any = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def epoch(self, batches: Iterable[Any]) -> str:
        """Its last loss, to the last digit."""
        loss: Any = None
        for batch in batches:
            self.optimizer.zero_grad()
            loss = ((self.model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()
            loss.backward()
            self.optimizer.step()
        return repr(loss.item())


def samplers(root: Path) -> None:
    data = Images(root / "train")
    distributed: Any = DistributedSampler(data, num_replicas=2, rank=1, seed=17)
    weights = [1.0 + number % 3 for number in range(len(data))]
    weighted = torch.utils.data.WeightedRandomSampler(weights, len(data), replacement=False)
    subset = torch.utils.data.SubsetRandomSampler(range(0, len(data), 2))
    kept = {"persistent_workers": True}
    chosen = Subset(data, list(range(100, 200)))
    cases: list[tuple[str, dict[str, Any]]] = [
        ("random", {"dataset": data, "shuffle": True, "num_workers": 2}),
        ("own", {"dataset": data, "shuffle": True, "generator": torch.Generator().manual_seed(5)}),
        ("distributed", {"dataset": data, "sampler": distributed, "num_workers": 2, **kept}),
        ("weighted", {"dataset": data, "sampler": weighted, "num_workers": 1}),
        ("subset", {"dataset": data, "sampler": subset, "num_workers": 2}),
        ("learned", {"dataset": Images(root / "train", said=False), "shuffle": True, "num_workers": 2}),
        ("spawn", {"dataset": chosen, "num_workers": 1, "multiprocessing_context": "spawn", **kept}),
    ]
    for case, options in cases:
        training = Training()
        loader: Any = DataLoader(batch_size=16, **options)
        for epoch in range(3):
            if case == "distributed":
                distributed.set_epoch(15 + epoch)
            say(case, epoch, training.epoch(loader))


def ddp(root: Path) -> None:
    """Unmodified training of two ranks, which reads a validation set after each epoch."""
    torch.distributed.init_process_group("gloo")
    data, validation = Images(root / "train"), Images(root / "val")
    sampler: Any = DistributedSampler(data)
    loader: Any = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2)
    others: Any = DataLoader(validation, batch_size=16, num_workers=1)
    training = Training()
    training.model = torch.nn.parallel.DistributedDataParallel(training.model)
    rank = torch.distributed.get_rank()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loss = training.epoch(loader)
        print("rank", rank, "epoch", epoch, loss, sum(float(batch.sum()) for batch in others), flush=True)
    torch.distributed.barrier()
    if rank == 0:
        statistics = json.loads((root / ".fanstore/stats.json").read_bytes())
        if "order" in statistics:
            print(json.dumps(statistics["order"]), flush=True)
    torch.distributed.destroy_process_group()


def endless(root: Path, seed: str) -> None:
    torch.manual_seed(int(seed))
    loader: Any = DataLoader(Images(root / "train"), batch_size=8, shuffle=True, num_workers=1)
    while True:
        for number, _ in enumerate(loader):
            if number == 10:
                say("middle")


def forks(root: Path) -> None:
    torch.manual_seed(3)
    torch.set_num_threads(1)
    data = Images(root / "train")
    generator = torch.Generator().manual_seed(9)
    loader: Any = DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=generator))
    batches = iter(loader)
    total = float(next(batches).sum())
    child = os.fork()
    total += sum(float(batch.sum()) for batch in batches)
    if not child:
        again: Any = DataLoader(data, batch_size=8, shuffle=True)
        total += sum(float(batch.sum()) for batch in again)
        os._exit(0 if total > 0 else 1)
    code = os.waitpid(child, 0)[1]
    again = DataLoader(data, batch_size=8, shuffle=True)
    print(repr(total), code, [repr(float(batch.sum())) for batch in again], flush=True)


class Moved(Images):
    """Its files are on a mount that goes away; it notices, and has them elsewhere."""

    def __getitem__(self, number: int) -> Any:
        try:
            return super().__getitem__(number)
        except OSError:
            return torch.zeros(3)


def elsewhere(root: Path) -> None:
    data = Moved(root / "train")
    loader: Any = DataLoader(data, batch_size=1)
    for number, _ in enumerate(loader):
        if number == 20:
            say("begun")
    print("through", number + 1, flush=True)


def intercepted(root: Path) -> None:
    loader: Any = DataLoader(Images(root / "train"), batch_size=8, shuffle=True, num_workers=2)
    for epoch in range(2):
        for _ in loader:
            pass
        deadline = time.monotonic() + 60
        while (order := json.loads((root / ".fanstore/stats.json").read_bytes())["order"])["epoch"] != epoch:
            assert time.monotonic() < deadline, order
        print(json.dumps(order), flush=True)


class Mine(DistributedSampler):  # type: ignore[type-arg,misc,unused-ignore]
    """Does what it is derived from, under another name."""


class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg,misc,unused-ignore]
    def __iter__(self) -> Any:
        return iter(range(4))


def rearranged(root: Path, epochs: str) -> None:
    """DDP on two nodes: epochs of which others decide who reads what, then the last one again as the sampler has it.

    Says of each: the samples of each batch of this rank, its gradients, and what the daemon has counted so far.
    """
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(5)
    torch.set_num_threads(1)
    data = Images(root / "train")
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1).double())
    chosen, plain, in_order = (
        DistributedSampler(data, seed=7),
        Mine(data, seed=7),
        DistributedSampler(data, shuffle=False),
    )
    loaders: list[Any] = [DataLoader(Numbered(data), 32, sampler=each, num_workers=1) for each in (chosen, plain)]
    endless: Any = DataLoader(Endless(), batch_size=2)
    ordered: Any = DataLoader(Numbered(data), batch_size=8, sampler=in_order)
    said: dict[str, Any] = {
        "rank": torch.distributed.get_rank(),
        "epochs": [],
        "endless": [b.tolist() for b in endless],
    }
    said["in_order"] = [number for numbers, _ in ordered for number in numbers.tolist()]
    for epoch in range(int(epochs) + 1):
        is_last = epoch == int(epochs)
        loader, sampler = (loaders[1], plain) if is_last else (loaders[0], chosen)
        sampler.set_epoch(epoch - is_last)
        batches, gradients = [], []
        for numbers, batch in loader:
            model.zero_grad()
            ((model(batch.double()) - 1.0) ** 2).mean().backward()
            batches.append(numbers.tolist())
            gradients.append([value for each in model.parameters() for value in each.grad.reshape(-1).tolist()])
        torch.distributed.barrier()
        statistics = json.loads((root / ".fanstore/stats.json").read_bytes())
        remote = statistics["sources"]["remote"]["reads"]
        said["epochs"].append({"batches": batches, "gradients": gradients, "remote": remote})
        said["rearranged"] = statistics["order"]["rearranged"]
        torch.distributed.barrier()
    print(json.dumps(said), flush=True)
    torch.distributed.destroy_process_group()


class Numbered(Dataset):  # type: ignore[type-arg,misc,unused-ignore]
    """With the number of each sample."""

    def __init__(self, dataset: Images) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return number, self.dataset[number]


PROGRAMS = (samplers, ddp, rearranged, endless, forks, elsewhere, intercepted)

if __name__ == "__main__":
    name, point, *rest = sys.argv[1:]
    program: Any = {each.__name__: each for each in PROGRAMS}[name]
    program(Path(point), *rest)
