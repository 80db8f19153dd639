"""In pieces of which size the kernel keeps a large file in memory, and what that costs whoever reads it: on the disk,
on the disk but page by page, and on a mount of FanStore.

Example: python benchmarks/folios.py

A file that is kept in large pieces (folios) is copied to a program with fewer steps than one that is kept page by page.
Reads files of 8 MiB: from the source; from a second copy of it that was brought into memory one page at a time
(POSIX_FADV_RANDOM), so that the same file system has it in single pages; and from the mount. Asks /proc/kpageflags
about every page of them, and then times the C reader on all three, from memory, in interleaved rounds. If what sets
the mount apart from the disk is the size of the pieces, it is level with the second. Root only. Writes
results/NAME.json.gz and NAME.md.
"""

import argparse
import mmap
import os
import shutil
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.caches import back_memory
from harness.command import BenchmarkError, find_program, run
from harness.dataset import Dataset, DatasetSpec, make
from harness.peers import Fanstore
from harness.reading import Readers
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace

PAGE = mmap.PAGESIZE
FILE_BYTES = 8 << 20
#: Bits of /proc/kpageflags (Documentation/admin-guide/mm/pagemap.rst).
HEAD, TAIL = 1 << 15, 1 << 16
FRAME = (1 << 55) - 1
WHERE = ("disk", "disk, page by page", "mount")
#: More than the few files in a pass would be: one is over in hundredths of a second.
REPEATS = 8


def address_of(path: Path) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            return int(line.split("-")[0], 16)
    raise BenchmarkError(f"{path} is not mapped")


def bring(path: Path, by_page: bool) -> None:
    """Into memory: in order, or one page at a time."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if by_page:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        while os.read(descriptor, PAGE if by_page else 1 << 20):
            continue
    finally:
        os.close(descriptor)


def look(path: Path) -> dict[str, int]:
    """Count the pages of a file that is in memory by how the kernel keeps them."""
    path = path.resolve()
    descriptor = os.open(path, os.O_RDONLY)
    try:
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


def measure(readers: Readers, roots: dict[str, Path], dataset: Dataset, rounds: int) -> list[dict[str, Any]]:
    """Passes from memory, each place in every round, in another order each time."""
    order = dataset.paths * REPEATS
    passes = []
    for number in range(1, rounds + 1):
        shift = number % len(WHERE)
        for where in WHERE[shift:] + WHERE[:shift]:
            load = os.getloadavg()[0]
            result = readers.read("c", roots[where], order, dataset.total_bytes * REPEATS)
            passes.append({"round": number, "where": where, "load_average": load} | asdict(result))
            print(f"round {number}: {where:20} {result.bytes / result.seconds / 1e6:8,.0f} MB/s")
    return passes


def summarize(passes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per place the speed, and the ratios to both others in the same round."""
    speeds = {(item["where"], item["round"]): item["bytes"] / item["seconds"] / 1e6 for item in passes}
    rounds = sorted({item["round"] for item in passes})

    def ratio(where: str, other: str) -> dict[str, float]:
        return asdict(Spread.of([speeds[where, number] / speeds[other, number] for number in rounds]))

    return [
        {"where": where, "mb_per_s": asdict(Spread.of([speeds[where, number] for number in rounds]))}
        | {"to_disk": ratio(where, "disk"), "to_pages": ratio(where, "disk, page by page")}
        for where in WHERE
    ]


def make_table(result: dict[str, Any]) -> str:
    pages = []
    for where in WHERE:
        items = [item for item in result["runs"] if item["where"] == where]
        pages.append([where, *(f"{sum(item[name] for item in items):,}" for name in ("pages", "folios", "in_folios"))])
    speeds = [
        [item["where"], f"{item['mb_per_s']['median']:,.0f}"]
        + [Spread(**item[name]).ratio_text() for name in ("to_disk", "to_pages")]
        for item in result["summary"]
    ]
    settings = result["settings"]
    return "\n".join(
        [
            "# How the kernel keeps large files, and what it costs",
            "",
            f"{settings['files']} files of 8 MiB, {settings['readers']} readers in C, from memory, "
            f"{settings['rounds']} interleaved rounds. {machine.sentence(result['machine'])}.",
            "Pages of 4 KiB, large folios, and the pages in those, of all files together. Page by page: a second copy "
            "on the same disk, brought into memory one page at a time. Ratio in the same round: median "
            "(lowest-highest).",
            record.load_sentence(result["passes"]),
            "",
            markdown_table(["", "pages", "large folios", "pages in them"], pages),
            "",
            markdown_table(["", "MB/s", "relative to the disk", "relative to the disk, page by page"], speeds),
        ]
    )


def bring_all(roots: dict[str, Path], paths: Sequence[str]) -> list[dict[str, Any]]:
    """Everything into memory, and how it is kept there."""
    Path("/proc/sys/vm/drop_caches").write_text("3")
    back_memory()
    for where, root in roots.items():
        for name in paths:
            bring(root / name, by_page=where == "disk, page by page")
    return [{"where": where, "file": str(name), **look(root / name)} for where, root in roots.items() for name in paths]


def benchmark(arguments: argparse.Namespace) -> None:
    if os.geteuid() != 0 or find_program("fanstore-mount") is None:
        raise BenchmarkError("this needs root, and FanStore (scripts/setup)")
    with workspace(arguments.work_dir) as work:
        dataset = make(work / "source", DatasetSpec(arguments.files, FILE_BYTES, 1, spread=0))
        shutil.copytree(dataset.root, work / "pages")
        run(["sync"], 60)
        readers = Readers(work, arguments.readers, 120)
        peer = Fanstore("none", "native", staged=True)
        peer.prepare(dataset.root, work)
        mountpoint = work / "mount"
        mountpoint.mkdir()
        with peer.mounted(mountpoint):
            places = (dataset.root, work / "pages", peer.root(mountpoint))
            roots = dict(zip(WHERE, places, strict=True))
            runs = bring_all(roots, dataset.paths)
            passes = measure(readers, roots, dataset, arguments.rounds)
        result = {
            "kind": "folios",
            "machine": machine.describe(work),
            "settings": {"files": arguments.files, "readers": arguments.readers, "rounds": arguments.rounds},
            "summary": summarize(passes),
            "runs": runs,
            "passes": passes,
        }
        record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--readers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--work-dir", type=Path, help="a disk")
    parser.add_argument("--name", default="folios", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
