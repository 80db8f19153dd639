"""How fast programs write through the mount beside the same program on the disk underneath, in one run.

Example: python benchmarks/write_speed.py --rounds 5

A checkpoint of 1 GiB in pieces of 1 MiB, and 10,000 files of 10 KB, written by writer.py to: the disk itself; a mount
with --scratch; a mount with --output on the same disk (--fsync local, so that the same disk is waited for; the copies
are made meanwhile, and are part of the figure); and one with --output elsewhere, which is memory (/dev/shm) here, and
stands for a shared file system: the copies do not take the disk's time. --local is always on that disk. With --output a
third time is kept: until everything stood there. With --nodes 2 the same in jobs of two nodes, both on this machine, of
which the second writes, which is not the one that decides on names. Writes results/NAME.json.gz (every run), NAME.md
and NAME.png.

As root, the small files are written to a new ext4 in an image on that disk: where files were removed a minute ago, ext4
looks past each of them, and takes up to ten times as long to make one. So the figures would depend on what came before.
"""

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.builds import add_build_option, builds_of, commands_of
from harness.command import BenchmarkError, launcher, only_on, program, run
from harness.dataset import DatasetSpec, make
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import new_file_system, workspace

KINDS = {"large": "1 GiB checkpoint, 1 MiB at a time", "small": "10,000 files of 10 KB"}
WRITER = Path(__file__).parent / "writer.py"
PLACES = ("scratch", "output", "output elsewhere")
ELSEWHERE = Path("/dev/shm")
RUN_S = 600.0
SETTLE_S = 2.0


@dataclass(frozen=True)
class Contender:
    """Who writes where.

    Attributes:
        place: "disk", or one of PLACES; engine, nodes: of the job.
        commands: the folder of the commands, and build: the name that tells them from those of this clone.
    """

    place: str
    engine: str = ""
    nodes: int = 1
    commands: Path = Path()
    build: str = ""

    def __str__(self) -> str:
        nodes = "" if self.nodes == 1 else f"{self.nodes} nodes"
        return ", ".join(part for part in (self.place, self.engine, nodes, self.build) if part)


def measure(contender: Contender, kind: str, count: int, size: int, work: Path) -> dict[str, float]:
    """One run of the writer; what it wrote is removed again."""
    if kind == "small" and os.geteuid() == 0:
        with new_file_system(work / "image", work / "disk") as disk:
            return measure_on(disk, contender, kind, count, size, work)
    return measure_on(work, contender, kind, count, size, work)


def measure_on(disk: Path, contender: Contender, kind: str, count: int, size: int, work: Path) -> dict[str, float]:
    os.sync()
    time.sleep(SETTLE_S)
    writer = [sys.executable, str(WRITER), kind]
    place = disk / "written"
    if contender.place == "disk":
        try:
            return dict(json.loads(run([*writer, str(place), str(count), str(size), str(disk)], RUN_S).stdout))
        finally:
            shutil.rmtree(place, ignore_errors=True)
    output = ELSEWHERE / f"fanstore-bench-{os.getpid()}" if contender.place == "output elsewhere" else disk / "output"
    options = ["--scratch"] if contender.place == "scratch" else ["--output", str(output), "--fsync", "local"]
    last = contender.nodes - 1
    prepared = str(work / f"d{contender.build}.fan")
    argv = [str(contender.commands / "fanstore-mount"), prepared, str(work / "mount-{rank}")]
    argv += ["--local", str(disk / "local-{rank}")]
    command = [*writer, str(work / f"mount-{last}/run"), str(count), str(size), str(disk)]
    start_s = time.perf_counter()
    try:
        command = [*argv, "--engine", contender.engine, *options, "--", *only_on(last), *command]
        if last > 0:
            command = [*launcher(last + 1), *command]
        figures: dict[str, float] = dict(json.loads(run(command, RUN_S).stdout))
        if contender.place != "scratch":
            figures["saved_s"] = time.perf_counter() - start_s
            saved = sum(1 for path in output.rglob("*") if path.is_file())
            if saved != figures["files"]:
                raise BenchmarkError(f"{saved} files stand in --output, not {figures['files']}")
        return figures
    finally:
        shutil.rmtree(output, ignore_errors=True)


def summarize(runs: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Per kind and contender: times, and speed relative to the disk in the same round."""
    by_key = {(item["kind"], item["round"], item["contender"]): item for item in runs}
    summary = []
    for kind in dict.fromkeys(item["kind"] for item in runs):
        for contender in names:
            items = [item for item in runs if (item["kind"], item["contender"]) == (kind, contender)]
            line: dict[str, Any] = {"kind": kind, "contender": contender, "rounds": len(items)}
            for name in ("closed_s", "synced_s"):
                ratios = [by_key[kind, item["round"], "disk"][name] / item[name] for item in items]
                line[f"{name} ratio"] = asdict(Spread.of(ratios))
                line[name] = asdict(Spread.of([item[name] for item in items]))
            line["files"], line["bytes"] = items[0]["files"], items[0]["bytes"]
            if "saved_s" in items[0]:
                line["saved_s"] = asdict(Spread.of([item["saved_s"] for item in items]))
            summary.append(line)
    return summary


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    lines = [
        "# Writing through the mount beside writing to the disk",
        "",
        f"{result['settings']['rounds']} interleaved rounds. {machine.sentence(result['machine'])}.",
        "Ratio: speed relative to the disk in the same round: median (lowest-highest). Closed: until the last close "
        "returned. Synced: until it was on the disk as well (fsync; for small files syncfs of the disk).",
        "Saved: the whole job with start and end, until everything stood in --output.",
        record.load_sentence(result["runs"]),
    ]
    for kind in dict.fromkeys(item["kind"] for item in result["summary"]):
        title = KINDS[kind]
        rows = []
        for item in result["summary"]:
            if item["kind"] == kind:
                closed = item["closed_s"]["median"]
                speed = f"{item['bytes'] / closed / 1e6:,.0f} MB/s"
                rows.append(
                    [
                        item["contender"],
                        Spread(**item["closed_s ratio"]).ratio_text(),
                        f"{item['files'] / closed:,.0f} files/s" if kind == "small" else speed,
                        Spread(**item["synced_s ratio"]).ratio_text(),
                        f"{item['synced_s']['median']:.2f}",
                        f"{item['saved_s']['median']:.2f}" if "saved_s" in item else "",
                    ]
                )
        head = ["", "ratio closed", "speed", "ratio synced", "synced s", "saved s"]
        lines += ["", f"## {title}", "", markdown_table(head, rows)]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the usual bytes and files, for a trial")
    parser.add_argument("--engine", nargs="+", choices=("native", "python"), default=["native", "python"])
    parser.add_argument("--nodes", nargs="+", type=int, default=[1], help="of the jobs")
    parser.add_argument("--place", nargs="+", choices=PLACES, default=list(PLACES), help="of the mount's outputs")
    add_build_option(parser)
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--work-dir", type=Path, help="the disk on which everything lies")
    parser.add_argument("--name", default="write-speed", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    builds = [("", Path(program("fanstore-mount")).parent)]
    builds += [(name, commands_of(clone)) for name, clone in builds_of(arguments)]
    contenders = [
        Contender("disk"),
        *(
            Contender(place, engine, nodes, commands, build)
            for nodes in arguments.nodes
            for engine in arguments.engine
            for place in arguments.place
            for build, commands in builds
        ),
    ]
    sizes = {"large": (max(1, int(1024 * arguments.scale)), 1 << 20), "small": (int(10_000 * arguments.scale), 10_000)}
    runs: list[dict[str, Any]] = []
    with workspace(arguments.work_dir) as work:
        make(work / "images", DatasetSpec(100, 10_000, 10))
        for build, commands in builds:
            run([str(commands / "fanstore-prep"), str(work / "images"), str(work / f"d{build}.fan")], RUN_S)
        for number in range(1, arguments.rounds + 1):
            shift = number % len(contenders)
            for kind in arguments.kind:
                count, size = sizes[kind]
                for contender in contenders[shift:] + contenders[:shift]:
                    figures = measure(contender, kind, count, size, work)
                    print(f"round {number}: {kind}: {contender!s:34} {figures}", flush=True)
                    place = {"round": number, "kind": kind, "contender": str(contender)}
                    runs.append(place | figures | {"load_average": os.getloadavg()[0]})
        result = {
            "kind": "write_speed",
            "machine": machine.describe(work),
            "settings": {"rounds": arguments.rounds, "scale": arguments.scale},
            "summary": summarize(runs, [str(contender) for contender in contenders]),
            "runs": runs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
