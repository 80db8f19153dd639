"""Runs the samplers of fanstore.torch with the real torch, and says what each rank has read, as JSON.

Run by test_torch_samplers.py, with torch from another environment in PYTHONPATH. Each line that comes in is a case and
its arguments; each line that goes out is its answer. With ``gloo RANK PORT`` it is one of two processes of a job, with
``mounted RANK RANKS PORT DIRECTORY`` one of several that read the files of a mount, with ``pls`` instead of ``mounted``
as pls.Scheduler has it.
"""

import io
import json
import math
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from framework_orders import without_kernels
from torch.utils.data import DataLoader

import fanstore.torch
from fanstore.errors import FanstoreError
from fanstore.torch.placement import find_mount

Read = list[list[int]]


def make(kind: str, samples: int, ranks: int, options: dict[str, Any]) -> list[Any]:
    """The samplers of all ranks."""
    sampler = getattr(fanstore.torch, f"{kind}Sampler")
    return [sampler(range(samples), ranks, rank, **options) for rank in range(ranks)]


def read(sampler: Any, batch: int) -> list[int]:
    """What a loader gives; as much as the sampler said before, and the loader in batches."""
    loader: Any = DataLoader(sampler.dataset, batch_size=batch, sampler=sampler)
    expected, batches = len(sampler), len(loader)
    got = [batch.tolist() for batch in loader]
    assert len(got) == batches
    flat = [sample for batch in got for sample in batch]
    assert len(flat) == expected, f"len is {expected}, {len(flat)} came"
    return flat


def losses(samplers: list[Any], epoch: int) -> None:
    """Losses as training tells them; those of all ranks are given to each, since there is only one process."""
    if hasattr(samplers[0], "record"):
        values = np.random.RandomState(epoch).exponential(size=samplers[0].order.sample_count)
        values[::7], values[1::7], values[2::7] = math.nan, -1.0, math.inf
        for sampler in samplers:
            sampler.order.record(epoch, values)


def epochs(kind: str, samples: int, ranks: int, options: dict[str, Any], count: int, batch: int) -> list[Read]:
    samplers = make(kind, samples, ranks, options)
    everything = []
    for epoch in range(count):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        everything.append([read(sampler, batch) for sampler in samplers])
        losses(samplers, epoch)
    return everything


def resumed(
    kind: str, samples: int, ranks: int, options: dict[str, Any], stop: int, positions: list[int], then: list[int]
) -> dict[str, Any]:
    """Stopped in epoch ``stop`` after each of ``positions`` samples of each rank, and gone on with ``then`` ranks.

    What was read of that epoch before each stop, what was left for the last ranks, and the next epoch.
    """
    samplers = make(kind, samples, ranks, options)
    for epoch in range(stop):
        for sampler in samplers:
            sampler.set_epoch(epoch)
            list(sampler)
        losses(samplers, epoch)
    for sampler in samplers:
        sampler.set_epoch(stop)
    before = []
    for position, ranks_now in zip(positions, then, strict=True):
        parts = []
        for sampler in samplers:
            handed = iter(sampler)
            parts.append([sample for _, sample in zip(range(position), handed, strict=False)])
        before.append(parts)
        kept = io.BytesIO()
        torch.save(samplers[-1].state_dict(), kept)  # of any one rank
        kept.seek(0)
        state = torch.load(kept, weights_only=True)
        samplers = make(kind, samples, ranks_now, options)
        for sampler in samplers:
            sampler.load_state_dict(state)
            sampler.set_epoch(stop)
    left = [read(sampler, 3) for sampler in samplers]
    for sampler in samplers:
        sampler.set_epoch(stop + 1)
    return {"before": before, "left": left, "next": [read(sampler, 3) for sampler in samplers]}


def refused(kind: str, samples: int, ranks: int, options: dict[str, Any], call: str, arguments: list[Any]) -> str:
    """The sentence with which something is refused."""
    try:
        getattr(make(kind, samples, ranks, options)[0], call)(*arguments)
    except FanstoreError as error:
        return str(error)
    return ""


def like_distributed_sampler(samples: int, ranks: int, drop_last: bool) -> list[list[int]]:
    """num_samples, total_size and length of DistributedSampler and of ours."""
    from torch.utils.data.distributed import DistributedSampler

    numbers: Any = range(samples)
    stock: Any = DistributedSampler(numbers, num_replicas=ranks, rank=0, drop_last=drop_last)
    (ours, *_) = make("GlobalShuffle", samples, ranks, {"drop_last": drop_last})
    return [[each.num_samples, each.total_size, len(each), len(list(each))] for each in (stock, ours)]


def gloo(rank: int, port: int) -> dict[str, Any]:
    """One of two processes: losses recorded on each decide the same exchange on both."""
    import torch.distributed as dist

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dataset: Any = fanstore.torch.Indexed(torch.arange(40))
    sampler = fanstore.torch.ImportanceExchangeSampler(dataset, fraction=0.25, seed=5)
    loader: Any = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1)
    seen: list[list[int]] = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        seen.append([])
        for indices, numbers in loader:
            assert torch.equal(indices, numbers)
            seen[-1] += indices.tolist()
            if epoch < 3:  # of the last one nobody has losses, as when a job ends
                sampler.record(indices, torch.where(indices % 5 == 0, 1e6, 1e-3))
        important = sampler.order.exchange(epoch, rank).sent % 5 == 0 if epoch else np.zeros(1, bool)
        seen[-1].append(int(important.sum()))
    dist.barrier()
    dist.destroy_process_group()
    return {"seen": seen, "ranks": sampler.num_replicas}


class Files:
    """All files below a directory, as an ImageFolder has them; a sample is a file's length."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.samples = [(str(path), 0) for path in sorted(root.rglob("*")) if path.is_file()]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        return len(Path(self.samples[index][0]).read_bytes())


def mounted(rank: int, ranks: int, port: int, directory: Path) -> list[str]:
    """One of several processes, each on its node: reads one epoch of local shuffling."""
    import torch.distributed as dist

    if port:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    dataset: Any = Files(directory)
    sampler = fanstore.torch.LocalShuffleSampler(dataset, None if port else ranks, None if port else rank)
    for _ in DataLoader(dataset, batch_size=2, sampler=sampler):
        pass
    if port:
        dist.barrier()
        dist.destroy_process_group()
    return [str(Path(dataset.samples[sample][0]).relative_to(directory)) for sample in sampler.samples()]


class Uncached(Files):
    """What is read does not stay in the page cache of the mount: the daemon sees every read."""

    def __getitem__(self, index: int) -> int:
        with open(self.samples[index][0], "rb", buffering=0) as file:
            content = file.readall()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return len(content)


def owned(kind: str, rank: int, ranks: int, port: int, directory: Path) -> dict[str, Any]:
    """One of several ranks that exchange samples: after each epoch, what it owns and what its daemon has counted."""
    import torch.distributed as dist

    def counted() -> dict[str, Any]:
        """When all has come that is to be kept."""
        deadline = time.monotonic() + 20
        while True:
            statistics = json.loads((directory / ".fanstore/stats.json").read_bytes())
            cache, room = statistics["cache"], statistics["room"]
            if room["waiting"] + cache["in_line"] == 0 or time.monotonic() > deadline:
                return {
                    "room": room,
                    "remote": statistics["sources"]["remote"]["bytes"],
                    "kept": cache["chunks"],
                    "fetched_by_readers": cache["misses"] - cache["prefetched"],
                }
            time.sleep(0.02)

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    dataset: Any = Uncached(directory)
    sampler = getattr(fanstore.torch, f"{kind}Sampler")(dataset, fraction=0.5, seed=3)
    said: dict[str, Any] = {"epochs": [], "counted": []}
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for _ in DataLoader(dataset, batch_size=4, sampler=sampler):
            pass
        if kind == "ImportanceExchange":
            sampler.record(sampler.samples(), torch.arange(len(sampler.samples())) + 1.0)
        said["counted"].append(counted())
        said["epochs"].append(sampler.samples().tolist())
        dist.barrier()
    said["received"] = sampler.order.exchange(3, rank).received.tolist()
    dist.destroy_process_group()
    return said


#: Samplers whose ranks exchange what they own.
EXCHANGING = ("PartialLocalShuffle", "ImportanceExchange")


def read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def scheduled(rank: int, ranks: int, directory: Path) -> dict[str, Any]:
    """One rank alone: two epochs of pls.Scheduler, and what the daemon has counted after each step of it."""
    from fanstore.torch import pls

    def reads() -> dict[str, int]:
        sources = json.loads((directory / ".fanstore/stats.json").read_bytes())["sources"]
        return {name: sources[name]["reads"] for name in ("local", "remote")}

    dataset: Any = pls.ImageFolder(directory, transforms=len, loader=read_bytes)
    everything = len(dataset)
    scheduler = pls.Scheduler(dataset, 4, 0.5, num_replicas=ranks, rank=rank, seed=3)
    loader: Any = DataLoader(dataset, 4, shuffle=True, num_workers=1, persistent_workers=True)
    said: dict[str, Any] = {"everything": everything, "classes": dataset.classes, "seen": [], "labels": []}
    for epoch in range(2):
        scheduler.scheduling(epoch)
        exchange = scheduler.sampler.order.exchange(epoch, rank)
        seen = [
            (int(size) - 20_000, int(label))
            for sizes, labels in loader
            for size, label in zip(sizes, labels, strict=True)
        ]
        said["seen"].append(sorted(number for number, _ in seen))
        said["labels"] += seen
        if epoch:
            break
        said |= {"sent": len(exchange.sent), "received": len(exchange.received), "read": reads()}
        scheduler.communicate()
        said["after_one"] = settled(reads, "remote", 1)
        scheduler.synchronize()
        said["after_all"] = settled(reads, "remote", said["received"])
        said["before_again"] = reads()
        for sample in exchange.sent:  # the kernel has them
            read_bytes(dataset.samples[sample][0])
        said["again"] = reads()
        scheduler.clean_local_storage()
        for sample in exchange.sent:
            read_bytes(dataset.samples[sample][0])
        said["cleaned"] = reads()
    said["end"] = reads()
    return said


def image_folder(root: str, class_file: str | None) -> Any:
    """All of a pls.ImageFolder, with real images: path, class and upper left pixel; or why it is refused."""
    from fanstore.torch import pls

    try:
        dataset: Any = pls.ImageFolder(root, class_file, lambda image: image.getpixel((0, 0)))
    except FanstoreError as error:
        return str(error)
    return [[path, *dataset[number]] for number, (path, _) in enumerate(dataset.samples)]


def seen(batches: Any) -> list[Any]:
    return [[images.tolist(), labels.tolist()] for images, labels in batches]


def stock(root: str) -> dict[str, Any]:
    """Our classes and the stock ones over the same images: what they list, and batches of all kinds of loaders."""
    without_kernels()
    import torchvision

    def upper_left(image: Any) -> Any:
        return torch.tensor(image.getpixel((1, 1)))

    ours: Any = fanstore.torch.ImageFolder(root, upper_left)
    theirs: Any = torchvision.datasets.ImageFolder(root, upper_left)
    said: dict[str, Any] = {
        "listed": [[each.samples, each.imgs, each.targets, each.classes, each.class_to_idx] for each in (ours, theirs)],
        "memory": [type(fanstore.torch.ImageFolder(root, decode=lambda memory: memory)[0][0].obj).__name__],
    }
    sampler: Any = fanstore.torch.GlobalShuffleSampler(ours, 2, 1, seed=3)
    cases: list[dict[str, Any]] = [
        {"shuffle": True},
        {"shuffle": True, "num_workers": 2},
        {"sampler": sampler, "num_workers": 1, "persistent_workers": True},
    ]
    said["batches"] = []
    for options in cases:
        for made in (fanstore.torch.DataLoader(ours, 5, **options), DataLoader(theirs, 5, **options)):
            torch.manual_seed(4)
            said["batches"].append([seen(made) for _ in range(2)] + [torch.rand(1).item()])
            if isinstance(made, fanstore.torch.DataLoader) and find_mount(ours.samples[0][0]):
                said.setdefault("order", []).append(known_order(Path(root), made.sampler))
    return said


def stock_refused(root: str) -> str:
    try:
        fanstore.torch.ImageFolder(root)
    except FanstoreError as error:
        return str(error)
    return ""


def known_order(root: Path, sampler: Any) -> dict[str, Any]:
    """What the daemon says of the order, once it has heard of the last epoch."""
    deadline = time.monotonic() + 10
    while True:
        order: dict[str, Any] = json.loads((root / ".fanstore/stats.json").read_bytes())["order"]
        if (order["sampler"], order["epoch"]) == (type(sampler).__name__, 1) or time.monotonic() > deadline:
            return order
        time.sleep(0.02)


def settled(reads: Callable[[], dict[str, int]], source: str, wanted: int) -> int:
    """The count of a source once it is as high as wanted, or after ten seconds."""
    deadline = time.monotonic() + 10
    while (count := reads()[source]) < wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return count


def run_examples(rank: int, port: int, data: str, *scripts: str) -> None:
    """One of two ranks, which runs scripts one after the other, as torchrun would."""
    without_kernels()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for number, script in enumerate(scripts):
        print(Path(script).stem, flush=True)
        os.environ["MASTER_PORT"] = str(port + number)  # the other rank may not have left the last one
        sys.argv = [script, data, "--epochs", "2"]
        runpy.run_path(script, run_name="__main__")


CASES: list[Callable[..., Any]] = [
    epochs,
    resumed,
    refused,
    like_distributed_sampler,
    image_folder,
    stock,
    stock_refused,
]


def main() -> None:
    if sys.argv[1:2] == ["gloo"]:
        print(json.dumps(gloo(*map(int, sys.argv[2:]))))
        return
    if sys.argv[1:2] == ["mounted"]:
        rank, ranks, port = map(int, sys.argv[2:5])
        print(json.dumps(mounted(rank, ranks, port, Path(sys.argv[5]))))
        return
    if sys.argv[1:2] == ["owned"]:
        rank, ranks, port = map(int, sys.argv[2:5])
        said = [owned(kind, rank, ranks, port + number, Path(sys.argv[5])) for number, kind in enumerate(EXCHANGING)]
        print(json.dumps(said))
        return
    if sys.argv[1:2] == ["pls"]:
        print(json.dumps(scheduled(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[5]))))
        return
    if sys.argv[1:2] == ["examples"]:
        run_examples(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
        return
    cases = {case.__name__: case for case in CASES}
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"answer": cases[name](**arguments)}
        except Exception:  # noqa: BLE001  (the test that asked fails with it)
            answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
