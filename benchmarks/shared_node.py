"""The program of one node of a job of shared_fs.py: ``shared_node.py SPEC [RANK]``, by default FANSTORE_RANK.

Reads this node's share of each epoch with the C reader, wherever the job has put the files: on a client of the shared
file system, in a copy on the local disk, or in a mount of FanStore. All nodes begin an epoch together. Writes one line
of JSON per epoch, and first the time at which it was started.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.caches import drop, drop_method, files_below
from harness.command import run
from harness.meeting import Meeting
from harness.reading import BUFFER_BYTES

EPOCHS = ("first", "second", "emptied")
LIMIT_S = 600.0


@dataclass(frozen=True)
class Spec:
    """One job; given to its nodes as a file.

    Attributes:
        root: where a node finds the tree; {rank} is replaced.
        server: what the servers of the shared file system are to have in memory when the caches are emptied: a path
            below which all files are read, or "" if the job does not need the servers any more.
        orders: per epoch the files in the order in which all nodes together read them; a node takes every Nth.
    """

    root: str
    server: str
    reader: str
    readers: int
    nodes: int
    orders: list[list[str]]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.__dict__))

    @classmethod
    def read(cls, path: Path) -> "Spec":
        return cls(**json.loads(path.read_text()))


def warm_servers(path: Path) -> None:
    """Bring what the servers have into their memory: what makes them slow is the throttle alone, never this disk."""
    for file in files_below(path):
        with file.open("rb", buffering=0) as content:
            while content.read(1 << 20):
                pass


def fetches(root: Path) -> dict[str, int]:
    """By source, as a mount of FanStore says; of other places nothing."""
    control = root / ".fanstore" / "stats.json"
    if not control.exists():
        return {}
    sources: dict[str, Any] = json.loads(control.read_text())["sources"]
    return {name: int(values["fetches"]) for name, values in sources.items()}


def processor_ticks() -> tuple[int, int]:
    """Of all cores since the machine has started: busy, and all."""
    ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # idle, and idle while a disk is waited for
    return sum(ticks) - idle, sum(ticks)


def main() -> None:
    started_s = time.monotonic()
    path = Path(sys.argv[1])
    spec = Spec.read(path)
    rank = int(sys.argv[2] if len(sys.argv) > 2 else os.environ["FANSTORE_RANK"])
    root = Path(spec.root.replace("{rank}", str(rank)))
    meeting = Meeting(path.parent, rank, spec.nodes)
    order = path.parent / f"order-{rank}"
    with (path.parent / f"figures-{rank}").open("w") as output:
        output.write(json.dumps({"started_s": started_s}) + "\n")
        for epoch, paths in zip(EPOCHS, spec.orders, strict=True):
            files = [root / name for name in paths[rank :: spec.nodes]]
            order.write_bytes(b"".join(os.fsencode(file) + b"\0" for file in files))
            if epoch == "emptied":
                meeting.wait()
                if rank == 0 or drop_method() != "drop_caches":
                    drop(files)
                if rank == 0 and spec.server:
                    warm_servers(Path(spec.server))
            before = fetches(root)
            meeting.wait()
            busy, ticks = processor_ticks()
            done = json.loads(run([spec.reader, str(order), str(spec.readers), str(BUFFER_BYTES)], LIMIT_S).stdout)
            busy, ticks = (after - earlier for after, earlier in zip(processor_ticks(), (busy, ticks), strict=True))
            if done["files"] != len(files):
                meeting.give_up(f"{done['files']} files were read, not {len(files)}")
            sources = {name: count - before[name] for name, count in fetches(root).items()}
            output.write(json.dumps({"epoch": epoch, **done, "sources": sources, "busy": busy / max(1, ticks)}) + "\n")
        meeting.wait()


if __name__ == "__main__":
    main()
