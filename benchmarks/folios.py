"""In pieces of which size the kernel keeps a large file in memory: of the disk, and of a mount of FanStore.

Example: python benchmarks/folios.py

A file that is kept in large pieces (folios) is copied to a program with fewer steps than one that is kept page by page.
Reads files of 8 MiB from the source and from the mount, and asks /proc/kpageflags about every page of them. Root only.
Writes results/NAME.json and NAME.md; nothing is timed.
"""

import argparse
import mmap
import os
import struct
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.command import BenchmarkError, find_program, run
from harness.dataset import DatasetSpec, make
from harness.peers import Fanstore
from harness.record import markdown_table
from harness.script import run_script
from harness.workspace import workspace

PAGE = mmap.PAGESIZE
FILE_BYTES = 8 << 20
FILES = 4
#: Bits of /proc/kpageflags (Documentation/admin-guide/mm/pagemap.rst).
HEAD, TAIL = 1 << 15, 1 << 16
FRAME = (1 << 55) - 1


def address_of(path: Path) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            return int(line.split("-")[0], 16)
    raise BenchmarkError(f"{path} is not mapped")


def look(path: Path) -> dict[str, int]:
    """Read a file, and count its pages by how the kernel keeps them."""
    path = path.resolve()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while os.read(descriptor, 1 << 20):
            continue
        with mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ) as content:
            pages = (len(content) + PAGE - 1) // PAGE
            for page in range(pages):
                content[page * PAGE]
            with open("/proc/self/pagemap", "rb", buffering=0) as frames:
                frames.seek(address_of(path) // PAGE * 8)
                entries = struct.unpack(f"<{pages}Q", frames.read(pages * 8))
            with open("/proc/kpageflags", "rb", buffering=0) as kernel:
                flags = [struct.unpack("<Q", os.pread(kernel.fileno(), 8, (entry & FRAME) * 8))[0] for entry in entries]
    finally:
        os.close(descriptor)
    large = sum(1 for flag in flags if flag & (HEAD | TAIL))
    return {"pages": pages, "folios": sum(1 for flag in flags if flag & HEAD), "in_folios": large}


def make_table(result: dict[str, Any]) -> str:
    rows = [
        [item["where"], item["file"], *(f"{item[name]:,}" for name in ("pages", "folios", "in_folios"))]
        for item in result["runs"]
    ]
    return "\n".join(
        [
            "# How the kernel keeps large files",
            "",
            f"{machine.sentence(result['machine'])}.",
            "Files of 8 MiB, read once in order: pages of 4 KiB, large folios, and the pages in those.",
            "",
            markdown_table(["", "file", "pages", "large folios", "pages in them"], rows),
        ]
    )


def benchmark(arguments: argparse.Namespace) -> None:
    if os.geteuid() != 0 or find_program("fanstore-mount") is None:
        raise BenchmarkError("this needs root, and FanStore (scripts/setup)")
    with workspace(arguments.work_dir) as work:
        dataset = make(work / "source", DatasetSpec(FILES, FILE_BYTES, 1, spread=0))
        run(["sync"], 60)
        peer = Fanstore("none", "native", staged=True)
        peer.prepare(dataset.root, work)
        mountpoint = work / "mount"
        mountpoint.mkdir()
        with peer.mounted(mountpoint):
            Path("/proc/sys/vm/drop_caches").write_text("3")
            runs = [
                {"where": where, "file": str(name), **look(root / name)}
                for where, root in (("disk", dataset.root), ("mount", peer.root(mountpoint)))
                for name in dataset.paths
            ]
        result = {"kind": "folios", "machine": machine.describe(work), "runs": runs}
        record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, help="a disk")
    parser.add_argument("--name", default=f"folios-{datetime.now(UTC):%Y-%m-%d}", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
