"""Peak memory of fanstore-prep, with all its processes, for a dataset of very many files.

Example: python benchmarks/prep_memory.py --files 1300000

The files hold one byte each (a name space costs memory, not its bytes) in 2,002 directories of ImageNet's shape. Making
and removing 1.3 million of them takes some minutes: --files takes fewer. The command's memory is sampled from /proc,
twice over: the sum of the resident sets, in which pages that processes share count several times, and Pss, in which
they count once. Writes results/NAME.json.gz (all samples), NAME.md and NAME.png.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.command import BenchmarkError, find_program, started
from harness.memory import watch
from harness.namespace import CLASSES
from harness.record import markdown_table
from harness.script import run_script
from harness.workspace import workspace

#: What the specification allows for 1.3 million files.
LIMIT_BYTES = 1 << 30
#: Samples kept in the record; a picture needs no more.
SAMPLES_KEPT = 400


def make_tree(root: Path, files: int) -> None:
    """One-byte files in 2 x 1,000 class folders, with names as long as ImageNet's."""
    free = os.statvfs(root.parent)
    if free.f_favail < files * 1.01 or free.f_bavail * free.f_frsize < files * 4096 * 1.1:
        raise BenchmarkError(f"{root.parent} has no room for {files:,} files; take fewer with --files")
    for half in ("train", "val"):
        for number in range(CLASSES):
            (root / half / f"n{number:08d}").mkdir(parents=True)
    number = 0
    for folder in range(2 * CLASSES):
        name = f"n{folder % CLASSES:08d}"
        descriptor = os.open(root / ("train" if folder < CLASSES else "val") / name, os.O_DIRECTORY | os.O_RDONLY)
        try:
            for _ in range(files // (2 * CLASSES) + (folder < files % (2 * CLASSES))):
                file = os.open(f"{name}_{number:07d}.JPEG", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=descriptor)
                os.write(file, b"x")
                os.close(file)
                number += 1
        finally:
            os.close(descriptor)


def thin(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most SAMPLES_KEPT samples, of every group the one with the most memory."""
    step = -(-len(samples) // SAMPLES_KEPT)
    groups = [samples[start : start + step] for start in range(0, len(samples), step)]
    return [max(group, key=lambda sample: int(sample["rss_bytes"])) for group in groups]


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    settings, peak = result["settings"], result["peak"]
    limit = settings["limit_bytes"]
    rows = [
        [label, f"{peak[name] / 2**20:,.0f}", f"{peak[name] / limit:.2f}", f"{peak[name] / settings['files']:,.0f}"]
        for label, name in (
            ("sum of resident sets", "rss_bytes"),
            ("shared pages counted once", "pss_bytes"),
            ("largest process (by the kernel)", "largest_process_bytes"),
        )
    ]
    return "\n".join(
        [
            f"# Peak memory of fanstore-prep for {settings['files']:,} files",
            "",
            f"Codec {settings['codec']}, {settings['jobs']} jobs, {peak['processes']} processes, "
            f"{result['seconds']:.0f} s ({settings['files'] / result['seconds']:,.0f} files/s; one byte each). "
            f"{machine.sentence(result['machine'])}.",
            f"Sampled every 50 ms, {result['sample_count']} times. Limit: {limit / 2**20:,.0f} MiB.",
            "",
            markdown_table(["peak", "MiB", "of the limit", "bytes per file"], rows),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_300_000)
    parser.add_argument("--codec", default="none")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of fanstore-prep")
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--name", default="prep-memory", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    prep = find_program("fanstore-prep")
    if prep is None:
        raise BenchmarkError("fanstore-prep is not installed")
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        begin = time.monotonic()
        make_tree(work / "source", arguments.files)
        print(f"made {arguments.files:,} files in {time.monotonic() - begin:.0f} s")
        output = work / "output.fan"
        argv = [prep, str(work / "source"), str(output), "--codec", arguments.codec, "--jobs", str(arguments.jobs)]
        log = work / "log"
        begin = time.monotonic()
        with started(argv, log) as process:
            try:
                samples = watch(process, arguments.timeout)
            except subprocess.TimeoutExpired:
                raise BenchmarkError(f"fanstore-prep took longer than {arguments.timeout:.0f} s") from None
            seconds = time.monotonic() - begin
        if process.returncode != 0:
            last_lines = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
            raise BenchmarkError(f"fanstore-prep ended with code {process.returncode}: {last_lines}")
        print(f"prepared in {seconds:.0f} s; now removing all files")
        shutil.rmtree(output)
        peak = {name: max(int(sample[name]) for sample in samples) for name in ("processes", "rss_bytes", "pss_bytes")}
        # Of all children of this benchmark that have ended; fanstore-prep is by far the largest.
        peak["largest_process_bytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
        result = {
            "kind": "prep_memory",
            "machine": description,
            "settings": {
                "files": arguments.files,
                "codec": arguments.codec,
                "jobs": arguments.jobs,
                "limit_bytes": LIMIT_BYTES,
            },
            "seconds": round(seconds, 2),
            "peak": peak,
            "sample_count": len(samples),
            "samples": thin(samples),
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
