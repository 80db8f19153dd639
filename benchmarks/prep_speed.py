"""How fast fanstore-prep is beside ``tar -cf`` of the same tree on the same disk, in one run.

Example: python benchmarks/prep_speed.py --rounds 3

Two times are kept for every run, on both sides: until the command returned, and until its output was also on the disk
(fsync of every file that it wrote). tar does not wait for the disk, fanstore-prep does so before it renames, so the
second one compares like with like. ``tar --format=posix`` stores what fanstore-prep does: times to the nanosecond,
which cost a header of 1 KiB per file; plain tar keeps whole seconds. ``tar -c | lz4 -1`` is the mark for lz4: one C
program for each core, and no file of the archive can be read alone; likewise zstd. How fast one core decodes is of the
chunks of the result, in memory. Warm: the tree is in the page cache. Cold:
nothing is.
Writes results/NAME.json.gz (every run), NAME.md and NAME.png.
"""

import argparse
import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine, record
from harness.caches import drop, drop_method, files_below, sync_tree
from harness.command import BenchmarkError, find_program, run
from harness.dataset import Dataset, DatasetSpec, make
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace

from fanstore import _native
from fanstore.format.codec import CHUNK_BYTES, NONE
from fanstore.format.prepared import PreparedDataset

STATES = ("warm", "cold")
#: What the others are compared with.
MARKS = ("tar", "tar posix", "tar+lz4", "tar+zstd")
DATASETS = {
    "images": DatasetSpec(6000, 107_000, 100),
    "small": DatasetSpec(60_000, 3_000, 100),
    "text": DatasetSpec(6000, 107_000, 100, compressible=True),
}
#: A run that takes longer is an error. The largest dataset here takes seconds.
RUN_S = 600.0


@dataclass(frozen=True)
class Contender:
    """A command that packs a tree. ``{source}`` and ``{output}`` in ``argv`` are replaced."""

    name: str
    argv: tuple[str, ...]

    def command(self, source: Path, output: Path) -> list[str]:
        return [part.replace("{source}", str(source)).replace("{output}", str(output)) for part in self.argv]


def contenders(codecs: Sequence[str]) -> list[Contender]:
    """tar first: it is what the others are compared with."""
    found = [
        Contender("tar", ("tar", "-cf", "{output}", "-C", "{source}", ".")),
        Contender("tar posix", ("tar", "--format=posix", "-cf", "{output}", "-C", "{source}", ".")),
    ]
    for name, program in (("lz4", "lz4 -1 -q"), ("zstd", "zstd -3 -q")):
        if find_program(name) is not None:
            pipeline = f'set -o pipefail; tar -c -C "{{source}}" . | {program} > "{{output}}"'
            found.append(Contender(f"tar+{name}", ("bash", "-c", pipeline)))
    prep = find_program("fanstore-prep")
    if prep is None:
        print("missing: fanstore-prep (not installed)")
        return found
    every_core = len(os.sched_getaffinity(0))
    for codec in codecs:
        for jobs in sorted({1, every_core}):
            argv = (prep, "{source}", "{output}", "--codec", codec, "--jobs", str(jobs))
            found.append(Contender(f"fanstore {codec}, {jobs} job{'s' if jobs > 1 else ''}", argv))
    return found


def processor_seconds() -> float:
    """Processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_all(dataset: Dataset) -> None:
    """Bring the tree into the page cache."""
    for path in dataset.paths:
        (dataset.root / path).read_bytes()


def measure(contender: Contender, dataset: Dataset, output: Path, state: str) -> dict[str, Any]:
    """Pack once; the output is removed again."""
    os.sync()  # what others have written must not be waited for in this run
    if state == "cold":
        drop(dataset.root / path for path in dataset.paths)
    else:
        read_all(dataset)
    used = processor_seconds()
    begin = time.monotonic()
    try:
        run(contender.command(dataset.root, output), RUN_S)
        returned = time.monotonic() - begin
        used = processor_seconds() - used
        sync_tree(output)
        on_disk = time.monotonic() - begin
        size = sum(path.stat().st_size for path in files_below(output))
        decoded = decode_bytes_per_s(output) if output.is_dir() else None
    finally:
        if output.is_dir():
            shutil.rmtree(output)
        else:
            output.unlink(missing_ok=True)
    return {
        "returned_s": round(returned, 4),
        "on_disk_s": round(on_disk, 4),
        "processor_s": round(used, 3),
        "output_bytes": size,
        "decode_bytes_per_s": decoded,
    }


def decode_bytes_per_s(prepared: Path) -> float | None:
    """Content per second of one core, of the compressed chunks in the first partition; None if there are none."""
    dataset = PreparedDataset.open(prepared)
    index, stored = dataset.index, dataset.partition_path(0).read_bytes()
    taken_s, content_bytes, content = 0.0, 0, memoryview(bytearray(CHUNK_BYTES))
    for entry in np.flatnonzero((index.column("codec") != NONE.number) & (index.column("part") == 0)).tolist():
        for number in range(index.chunk_count(entry)):
            chunk = index.chunk(entry, number)
            piece = memoryview(stored)[chunk.offset : chunk.offset + chunk.stored_bytes]
            begin = time.thread_time()
            assert _native.decode_chunk(index.codec[entry], piece, chunk.first, content[: chunk.content_bytes])
            taken_s += time.thread_time() - begin
            content_bytes += chunk.content_bytes
    return content_bytes / taken_s if content_bytes else None


def summarize(runs: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Per dataset, state and contender: speed relative to tar, and to tar with a codec, in the same round."""
    by_key = {(item["dataset"], item["state"], item["round"], item["contender"]): item for item in runs}
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for item in runs:
        groups.setdefault((item["dataset"], item["state"], item["contender"]), []).append(item)
    summary = []
    for (dataset, state, contender), items in sorted(groups.items(), key=lambda group: names.index(group[0][2])):
        line: dict[str, Any] = {"dataset": dataset, "state": state, "contender": contender, "rounds": len(items)}
        for time_name in ("returned_s", "on_disk_s"):
            line[time_name] = asdict(Spread.of([item[time_name] for item in items]))
            for mark in MARKS:
                ratios = [
                    by_key[dataset, state, item["round"], mark][time_name] / item[time_name]
                    for item in items
                    if (dataset, state, item["round"], mark) in by_key
                ]
                if ratios:
                    line[f"{time_name} ratio to {mark}"] = asdict(Spread.of(ratios))
        line["processor_s"] = Spread.of([item["processor_s"] for item in items]).median
        line["output_bytes"] = items[0]["output_bytes"]
        decoded = [item["decode_bytes_per_s"] for item in items if item["decode_bytes_per_s"]]
        line["decode_bytes_per_s"] = Spread.of(decoded).median if decoded else None
        summary.append(line)
    return summary


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    lines = [
        "# fanstore-prep beside tar",
        "",
        f"{result['settings']['rounds']} interleaved rounds. {machine.sentence(result['machine'])}.",
        "Ratio: speed relative to `tar -cf` in the same round, above 1 is faster than tar: median (lowest-highest).",
        "On disk: with fsync of all output, on both sides. Seconds are medians. Posix: `tar --format=posix -cf`, which",
        "keeps nanoseconds as FanStore does; the ratio to it is on disk, as is that to tar with the same codec",
        "(`tar -c | lz4 -1`, `tar -c | zstd -3`). Decode: content that one core decodes in memory.",
        f"{record.load_sentence(result['runs'])} All contenders ran with nice {result['settings']['nice']}.",
        "",
    ]
    header = ["", "ratio on disk", "ratio returned", "ratio to posix", "ratio to tar+codec"]
    header += ["on disk s", "returned s", "processor s", "MB", "decode GB/s"]
    for name, description in result["datasets"].items():
        for state in STATES:
            rows = []
            for item in result["summary"]:
                if (item["dataset"], item["state"]) != (name, state):
                    continue
                codec = next((name for name in ("lz4", "zstd") if name in item["contender"]), "")
                mark, decoded = item.get(f"on_disk_s ratio to tar+{codec}"), item["decode_bytes_per_s"]
                rows.append(
                    [
                        item["contender"],
                        Spread(**item["on_disk_s ratio to tar"]).ratio_text(),
                        Spread(**item["returned_s ratio to tar"]).ratio_text(),
                        Spread(**item["on_disk_s ratio to tar posix"]).ratio_text(),
                        Spread(**mark).ratio_text() if mark else "",
                        f"{item['on_disk_s']['median']:.2f}",
                        f"{item['returned_s']['median']:.2f}",
                        f"{item['processor_s']:.2f}",
                        f"{item['output_bytes'] / 1e6:,.0f}",
                        f"{decoded / 1e9:.2f}" if decoded else "",
                    ]
                )
            if rows:
                lines += [f"## {description}, {state}", "", markdown_table(header, rows), ""]
    lines += [f"Failed: {name} ({reason})." for name, reason in result["failed"].items()]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", choices=tuple(DATASETS), default=["images", "small"])
    parser.add_argument("--scale", type=float, default=1.0, help="part of the usual number of files, for a trial")
    parser.add_argument("--codecs", nargs="+", default=["none", "lz4", "lz4hc", "zstd"])
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, help="the disk on which trees and output lie")
    parser.add_argument("--name", default="prep-speed", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    field = contenders(arguments.codecs)
    failed: dict[str, str] = {}
    runs: list[dict[str, Any]] = []
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        specs = {name: DATASETS[name] for name in arguments.datasets}
        specs = {name: replace(spec, files=max(1, round(spec.files * arguments.scale))) for name, spec in specs.items()}
        for name, spec in specs.items():
            dataset = make(work / name, spec)
            print(f"dataset {name}: {dataset.description}, {dataset.total_bytes >> 20} MiB")
            for round_number in range(1, arguments.rounds + 1):
                # Every round starts elsewhere, so that nobody is always first.
                turn = field[round_number % len(field) :] + field[: round_number % len(field)]
                for state in arguments.states:
                    for contender in [item for item in turn if item.name not in failed]:
                        try:
                            figures = measure(contender, dataset, work / "output", state)
                        except BenchmarkError as error:
                            if contender.name == "tar":
                                raise
                            failed[contender.name] = str(error)
                            print(f"failed: {contender.name}: {error}")
                            continue
                        print(
                            f"round {round_number}: {name} {state}: {contender.name:24} returned "
                            f"{figures['returned_s']:7.2f} s, on disk {figures['on_disk_s']:7.2f} s"
                        )
                        place = {"round": round_number, "dataset": name, "state": state, "contender": contender.name}
                        runs.append(place | figures | {"load_average": os.getloadavg()[0]})
            shutil.rmtree(dataset.root)
        result = {
            "kind": "prep_speed",
            "machine": description,
            "versions": {name: machine.program_version(name, "--version") for name in ("tar", "lz4", "zstd")},
            "datasets": {name: str(spec) for name, spec in specs.items()},
            "settings": {"rounds": arguments.rounds, "cold_by": drop_method(), "nice": os.nice(0)},
            "failed": failed,
            "summary": summarize(runs, [contender.name for contender in field]),
            "runs": runs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
