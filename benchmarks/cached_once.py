"""Does a dataset of 60 % of memory stay in memory? Epochs of random reads in a memory cgroup, with what the disk did.

Example: python benchmarks/cached_once.py --memory 1536MiB --share 0.6 --epochs 3

The daemon and the readers run in a cgroup of limited memory, as on a smaller machine. Bytes that are kept twice (in the
page cache of the mount and in that of the file below) do not fit; then every epoch reads the disk again. Counted are
the READ requests that reach the daemon (fanstore-stat) and the bytes that the disk delivered. Root only. squashfuse,
which keeps the image in the page cache as well, shows what happens without care; the source, what a directory costs. Of
erofs the image is read by a kernel thread of the loop device, outside of the group. Writes results/NAME.json.gz,
NAME.md and NAME.png.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.caches import drop
from harness.command import BenchmarkError, find_program, run
from harness.dataset import Dataset, DatasetSpec, make
from harness.memorygroup import MemoryGroup, memory_group
from harness.peers import Erofs, Fanstore, Peer, Source, Squashfs
from harness.reading import Readers
from harness.record import markdown_table
from harness.script import run_script
from harness.workspace import workspace

from fanstore.units import parse_size

SECTOR_BYTES = 512
MEAN_BYTES = 107_000


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=parse_size, default=parse_size("1.5GiB"), help="of the cgroup")
    parser.add_argument("--share", type=float, default=0.6, help="size of the dataset, as a part of the memory")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--readers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pass-timeout", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--work-dir", type=Path, help="where data and images are made (a disk, not tmpfs)")
    parser.add_argument("--name", default="cached-once", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def contenders() -> list[Peer]:
    fanstore = [Fanstore("none", engine, staged) for engine in ("native", "python") for staged in (True, False)]
    return [Source(), *fanstore, Squashfs("none", in_kernel=False), Erofs("none")]


def disk_read_bytes(work: Path) -> int:
    """What the disk below ``work`` has delivered since the machine started, whoever asked."""
    device = work.stat().st_dev
    line = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(line[2]) * SECTOR_BYTES


def read_requests(peer: Peer, mountpoint: Path) -> int | None:
    """READ requests that the daemon has answered so far; None of a peer that does not count them."""
    if not isinstance(peer, Fanstore):
        return None
    program = find_program("fanstore-stat")
    if program is None:
        raise BenchmarkError("fanstore-stat is not installed")
    statistics = json.loads(run([program, str(mountpoint), "--json"], 60).stdout)
    return int(statistics["operations"]["read"]["count"])


def measure(
    peer: Peer, dataset: Dataset, readers: Readers, group: MemoryGroup, work: Path, epochs: int
) -> list[dict[str, Any]]:
    mountpoint = work / "mount"
    found = []
    with group.joined(), peer.mounted(mountpoint):
        for epoch in range(1, epochs + 1):
            order = random.Random(epoch).sample(dataset.paths, len(dataset.paths))
            load = os.getloadavg()[0]
            requests = read_requests(peer, mountpoint)
            disk = disk_read_bytes(work)
            result = readers.read("c", peer.root(mountpoint), order, dataset.total_bytes)
            disk = disk_read_bytes(work) - disk
            after = read_requests(peer, mountpoint)
            asked = None if after is None or requests is None else after - requests
            line = {"peer": peer.name, "epoch": epoch, "files_per_s": result.files_per_s}
            line |= {"read_requests": asked, "disk_read_bytes": disk, "memory": group.statistics()}
            found.append(line | {"load_average": load})
            told = "" if asked is None else f"{asked:,} READ requests, "
            print(
                f"{peer.name:28} epoch {epoch}: {result.files_per_s:9,.0f} files/s, {told}{disk >> 20:,} MiB from the "
                f"disk, {group.statistics()['file'] >> 20:,} MiB of page cache"
            )
    return found


def make_table(result: dict[str, Any]) -> str:
    settings, dataset = result["settings"], result["dataset"]
    rows = []
    for peer in result["versions"]:
        row = [peer]
        for epoch in range(1, settings["epochs"] + 1):
            item = next((item for item in result["epochs"] if (item["peer"], item["epoch"]) == (peer, epoch)), None)
            if item is None:
                row += ["failed"] + [""] * (2 if epoch == 1 else 3)
                continue
            row.append(f"{item['disk_read_bytes'] / dataset['bytes']:.2f}")
            row.append("" if item["read_requests"] is None else f"{item['read_requests']:,}")
            row.append(f"{item['files_per_s']:,.0f}")
        row.append("" if item is None else f"{item['memory']['file'] / 2**20:,.0f}")
        rows.append(row)
    columns = [
        f"{epoch}: {what}" for epoch in range(1, settings["epochs"] + 1) for what in ("disk", "READs", "files/s")
    ]
    lines = [
        "# Does a dataset of 60 % of memory stay in memory?",
        "",
        f"{dataset['description']}, {dataset['bytes'] / 2**20:,.0f} MiB, in a memory cgroup (version "
        f"{settings['cgroup_version']}) of {settings['limit_bytes'] / 2**20:,.0f} MiB with the daemon and "
        f"{settings['readers']} readers. {machine.sentence(result['machine'])}.",
        "Each epoch reads all files once in a random order. disk: bytes that the disk delivered, relative to the "
        "dataset; READs: requests that reached the daemon. Page cache: at the end, in MiB.",
        record.load_sentence(result["epochs"]),
        "",
        markdown_table(["", *columns, "page cache"], rows),
        "",
    ]
    lines += [f"Missing: {name} ({reason})." for name, reason in result["missing"].items()]
    return "\n".join(lines)


def benchmark(arguments: argparse.Namespace) -> None:
    known = contenders()
    missing = {peer.name: reason for peer in known if (reason := peer.missing()) is not None}
    peers = [peer for peer in known if peer.name not in missing]
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        (work / "mount").mkdir()
        files = round(arguments.memory * arguments.share / MEAN_BYTES)
        dataset = make(work / "source", DatasetSpec(files, MEAN_BYTES, 100))
        readers = Readers(work, arguments.readers, arguments.pass_timeout)
        epochs = []
        for peer in peers:
            peer.prepare(dataset.root, work)
        for peer in peers:
            drop([*peer.files(), *dataset.root.rglob("*.JPEG")])  # pages count where they were first brought in
            with memory_group(arguments.memory) as group:
                epochs += measure(peer, dataset, readers, group, work, arguments.epochs)
                version = group.version
        result = {
            "kind": "cached_once",
            "machine": description,
            "dataset": {"description": dataset.description, "files": len(dataset.paths), "bytes": dataset.total_bytes},
            "settings": {
                "limit_bytes": arguments.memory,
                "cgroup_version": version,
                "epochs": arguments.epochs,
                "readers": arguments.readers,
            },
            "versions": {peer.name: peer.version() for peer in peers},
            "missing": missing,
            "epochs": epochs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
