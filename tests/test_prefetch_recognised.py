"""Orders of programs that say nothing of them, recognised by a mount from the first files that they read."""

import itertools
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from conftest import BOTH_ENGINES
from mounting import Mount, Mounted, needs_fuse, prepare, wait_until
from oddities import compressible

from fanstore.dataset.memory_limit import GroupMemory
from fanstore.format.index import Index
from fanstore.format.prepared import PreparedDataset
from fanstore.order import TorchDistributedSampler, TorchRandomSampler
from fanstore.order.listing import LISTINGS
from fanstore.prefetch.recogniser import Recogniser, streams_of
from fanstore.prefetch.search import Found, search
from fanstore.prefetch.statement import files_below

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES

FILES = 400
#: An environment with torch; see test_order_frameworks.py.
FRAMEWORKS = os.environ.get("FANSTORE_TEST_FRAMEWORKS", "")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recognised") / "source"
    for number in range(FILES):
        path = root / "train" / f"class{number % 4}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compressible(9000 + number, number))
    return root


@pytest.fixture(scope="module")
def prepared(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(root, tmp_path_factory.mktemp("prepared") / "d.fan", "--codec", "lz4", "--partitions", "2")


def listed(root: Path) -> list[str]:
    """As ImageFolder on ``train`` does."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.jpg"))


def read(point: Path, root: Path, paths: Sequence[str]) -> None:
    """Leaving nothing in the page cache, so that the next epoch is seen, too."""
    for path in paths:
        with open(point / path, "rb", buffering=0) as file:
            assert file.readall() == (root / path).read_bytes(), path
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def order(mounted: Mounted) -> dict[str, Any]:
    section: dict[str, Any] = mounted.statistics()["order"]
    return section


def searching(mounted: Mounted) -> list[int]:
    """Processes that search for the order of this mount."""
    children = Path(f"/proc/{mounted.process.pid}/task/{mounted.process.pid}/children").read_text().split()
    found = []
    for child in map(int, children):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"fanstore.prefetch.search" in command:
            found.append(child)
    return found


@needs_fuse
def test_a_distributed_sampler_is_recognised(mount: Mount, prepared: Path, root: Path) -> None:
    """Two ranks on this node, each in a thread; from the second epoch on, everything is expected."""
    mounted = mount(prepared)
    names = listed(root)
    sampler = TorchDistributedSampler(FILES, 2, seed=5)

    def epoch(number: int, begin: int = 0, end: int = FILES) -> None:
        parts = [[names[sample] for sample in sampler.samples(number, rank)[begin:end]] for rank in range(2)]
        threads = [threading.Thread(target=read, args=(mounted.path, root, part)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    epoch(0, 0, 20)
    wait_until(lambda: "the order is recognised" in mounted.log_text(), "that it is recognised", mounted.evidence)
    assert "DistributedSampler, seed 5, over the files of 'train' as ImageFolder lists them" in mounted.log_text()
    epoch(0, 20)
    before = order(mounted)
    epoch(1)
    wait_until(lambda: order(mounted)["files"] >= 2 * FILES - 4, "that all was seen", mounted.evidence)
    now = order(mounted)
    assert (now["source"], now["sampler"], now["seed"], now["epoch"]) == ("recognised", "DistributedSampler", 5, 1)
    assert now["predicted"] - before["predicted"] > 0.9 * FILES
    assert now["taken"] > 0.9 * FILES
    assert searching(mounted) == []


def test_nothing_is_searched_where_memory_is_short(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process is in the control group of the daemon, and what is promised of the daemon's memory is without it."""
    room: list[GroupMemory | None] = [GroupMemory(320 << 20, 30 << 20), None, GroupMemory(1 << 30, 30 << 20)]
    started: list[object] = []

    def start(*arguments: object, **options: object) -> None:
        started.append(arguments)
        raise OSError("no more is needed of it here")

    async def found(_: Sequence[Found]) -> None:
        raise AssertionError("nothing was searched")

    monkeypatch.setattr("fanstore.prefetch.recogniser.subprocess.Popen", start)
    readers = [np.arange(16, dtype=np.uint32)]
    dataset = PreparedDataset.open(prepared)
    with caplog.at_level("INFO"):
        search = Recogniser(dataset.index, found, lambda: room[0])._search
        for number in range(3):
            assert trio.run(search, readers) == []
            assert len(started) == number
            room.pop(0)
    assert caplog.text.count("too little memory left") == 1


@needs_fuse
def test_the_search_ends_with_the_mount(mount: Mount, prepared: Path, root: Path) -> None:
    """Nothing is found behind a shuffle of nobody's, so all seeds of torch are tried; and nobody waits for it."""
    mounted = mount(prepared)
    shuffled = np.random.Generator(np.random.SFC64(987)).permutation(listed(root)).tolist()
    read(mounted.path, root, shuffled[:40])
    wait_until(lambda: bool(searching(mounted)), "the search", mounted.evidence)
    (process,) = searching(mounted)
    wait_until(lambda: os.sched_getscheduler(process) == os.SCHED_IDLE, "its idle priority", mounted.evidence)
    read(mounted.path, root, shuffled[40:80])
    assert order(mounted)["source"] == "none"
    mounted.stop()
    assert not os.path.exists(f"/proc/{process}")


@needs_fuse
def test_the_search_dies_with_the_daemon(mount: Mount, prepared: Path, root: Path) -> None:
    mounted = mount(prepared)
    shuffled = np.random.Generator(np.random.SFC64(986)).permutation(listed(root)).tolist()
    read(mounted.path, root, shuffled[:40])
    wait_until(lambda: bool(searching(mounted)), "the search", mounted.evidence)
    (process,) = searching(mounted)
    wait_until(lambda: os.sched_getscheduler(process) == os.SCHED_IDLE, "that it runs", mounted.evidence)
    mounted.process.kill()
    mounted.process.wait(60)
    wait_until(lambda: not os.path.exists(f"/proc/{process}"), "its end", lambda: f"process {process}")


@needs_fuse
@pytest.mark.parametrize("order_option", ["off", "sequential"])
def test_nothing_is_searched_if_it_is_not_wanted(mount: Mount, prepared: Path, root: Path, order_option: str) -> None:
    option = order_option if order_option == "off" else "sequential:root=train"
    mounted = mount(prepared, "--order", option)
    shuffled = np.random.Generator(np.random.SFC64(987)).permutation(listed(root)).tolist()
    read(mounted.path, root, shuffled)
    assert searching(mounted) == [] and "recognised" not in mounted.log_text()


SCRIPT = """
import os, sys
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

class Images(Dataset):
    def __init__(self, root):
        self.paths = sorted(os.path.join(d, f) for d, _, fs in os.walk(root) for f in fs)
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, number):
        with open(self.paths[number], "rb", buffering=0) as file:
            content = file.readall()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return len(content)

data = Images(sys.argv[1] + "/train")
sampler = DistributedSampler(data, num_replicas=2, rank=1, seed=17)
loader = DataLoader(data, batch_size=20, sampler=sampler, num_workers=2)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for batch in loader:
        pass
    print("epoch", epoch, flush=True)
    sys.stdin.readline()
"""


@needs_fuse
@pytest.mark.skipif(not FRAMEWORKS, reason="FANSTORE_TEST_FRAMEWORKS does not name a Python with torch")
def test_a_real_data_loader(mount: Mount, prepared: Path) -> None:
    """Unmodified torch, two workers: the sampler and its seed are recognised, and later epochs are expected."""
    mounted = mount(prepared)
    with subprocess.Popen(
        [FRAMEWORKS, "-c", SCRIPT, mounted.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        for epoch in range(4):
            assert program.stdout.readline() == f"epoch {epoch}\n", mounted.evidence()
            if epoch == 0:
                wait_until(lambda: "is recognised" in mounted.log_text(), "that it is recognised", mounted.evidence)
            program.stdin.write("\n")
            program.stdin.flush()
        program.stdin.close()
        assert program.wait(60) == 0
    now = order(mounted)
    assert (now["source"], now["sampler"], now["seed"]) == ("recognised", "DistributedSampler", 17), mounted.evidence()
    assert now["predicted"] > 2 * FILES // 2, "most of three epochs"


def test_the_epoch_is_found_in_which_readers_are(prepared: Path) -> None:
    """A search may take longer than an epoch."""
    index = Index.from_buffer((prepared / "index.fsx").read_bytes())
    files, paths = files_below(index, b"train")
    images = files[LISTINGS["ImageFolder"](paths)]
    sampler = TorchRandomSampler(FILES, 3)
    orders = (sampler, sampler.with_stride(2))
    found = Found("train", "ImageFolder", "RandomSampler", 3, images, orders, (0,))
    for epoch, late in itertools.product((0, 2, 5), (-10, 0, 30)):
        sequence = images[sampler.samples(epoch)]
        streams = streams_of(found, FILES * epoch + 100 + late, [sequence[97:101].tolist()])
        assert (streams[0].epoch, streams[0].frontier) == (epoch, 100)
        assert [streams[0].at(place) for place in range(FILES)] == sequence.tolist()
        assert not streams[0].followed, "before readers go on there"


def test_the_root_of_the_list_is_found(prepared: Path) -> None:
    index = Index.from_buffer((prepared / "index.fsx").read_bytes())
    files, paths = files_below(index, b"train")
    images = files[LISTINGS["ImageFolder"](paths)]
    (found,) = search(index, [images[TorchDistributedSampler(FILES, 4, 99).samples(0, 2)[:16]]])
    assert (found.root, found.listing, found.sampler, found.seed) == ("train", "ImageFolder", "DistributedSampler", 99)
    assert found.ranks == (2,)
    assert len(found.orders) == 2, "with and without set_epoch"
