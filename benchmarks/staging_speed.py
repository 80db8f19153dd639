"""How fast staging copies partitions to a local disk beside ``cp`` of the same files, in one run.

Example: python benchmarks/staging_speed.py --rounds 5

Both copy the partitions of one prepared dataset to a directory on the same disk, the page cache cold or warm; staging
checks every byte on the way. Two times are kept on both sides: until the copy was complete, and until it was also on
the disk (fsync). Writes results/NAME.json.gz (every run), NAME.md and NAME.png.
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.caches import drop, drop_method, sync_tree
from harness.command import BenchmarkError, find_program, run
from harness.dataset import DatasetSpec, make
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.staging import copy_with_staging, summarize
from harness.workspace import workspace

from fanstore.format.prepared import PreparedDataset

STATES = ("cold", "warm")
CONTENDERS = ("cp", "fanstore staging")
RUN_S = 600.0


def copy_with_cp(prepared: PreparedDataset, target: Path) -> None:
    parts = [str(prepared.partition_path(number)) for number in range(len(prepared.manifest.partitions))]
    run(["cp", *parts, str(target)], RUN_S)


def measure(contender: str, prepared: PreparedDataset, target: Path, state: str) -> dict[str, Any]:
    """Copy once; the copy is removed again."""
    os.sync()
    parts = [prepared.partition_path(number) for number in range(len(prepared.manifest.partitions))]
    drop(parts)
    if state == "warm":
        for part in parts:
            run(["cat", str(part)], RUN_S)
    target.mkdir()
    begin = time.monotonic()
    try:
        (copy_with_cp if contender == "cp" else copy_with_staging)(prepared, target)
        complete = time.monotonic() - begin
        sync_tree(target)
        on_disk = time.monotonic() - begin
    finally:
        shutil.rmtree(target)
    return {"complete_s": round(complete, 4), "on_disk_s": round(on_disk, 4)}


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    rows = [
        [
            f"{item['contender']}, {item['state']}",
            Spread(**item["complete_s ratio to cp"]).ratio_text(),
            f"{item['complete_s MB/s']['median']:,.0f}",
            Spread(**item["on_disk_s ratio to cp"]).ratio_text(),
            f"{item['on_disk_s MB/s']['median']:,.0f}",
        ]
        for item in result["summary"]
    ]
    lines = [
        "# Staging beside cp",
        "",
        f"{result['settings']['rounds']} interleaved rounds, {result['settings']['bytes'] / 1e6:,.0f} MB in "
        f"{result['settings']['partitions']} partitions. {machine.sentence(result['machine'])}.",
        "Ratio: speed relative to `cp` in the same round: median (lowest-highest). On disk: with fsync, on both sides.",
        "Staging also compares every byte with the checksum of the manifest.",
        record.load_sentence(result["runs"]),
        "",
        markdown_table(["", "ratio", "MB/s", "ratio on disk", "MB/s on disk"], rows),
    ]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000, help="of 107 KB each")
    parser.add_argument("--partitions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work-dir", type=Path, help="the disk on which everything lies")
    parser.add_argument("--name", default="staging-speed", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    prep = find_program("fanstore-prep")
    if prep is None:
        raise BenchmarkError("fanstore-prep is not installed")
    runs: list[dict[str, Any]] = []
    with workspace(arguments.work_dir) as work:
        dataset = make(work / "images", DatasetSpec(arguments.files, 107_000, 100))
        run([prep, str(dataset.root), str(work / "d.fan"), "--partitions", str(arguments.partitions)], RUN_S)
        shutil.rmtree(dataset.root)
        prepared = PreparedDataset.open(work / "d.fan")
        total_bytes = sum(part.bytes for part in prepared.manifest.partitions)
        for round_number in range(1, arguments.rounds + 1):
            turn = CONTENDERS if round_number % 2 else CONTENDERS[::-1]
            for state in STATES:
                for contender in turn:
                    figures = measure(contender, prepared, work / "local", state)
                    print(f"round {round_number}: {state}: {contender:18} {figures}")
                    place = {"round": round_number, "state": state, "contender": contender}
                    runs.append(place | figures | {"load_average": os.getloadavg()[0]})
        result = {
            "kind": "staging_speed",
            "machine": machine.describe(work),
            "settings": {
                "rounds": arguments.rounds,
                "bytes": total_bytes,
                "partitions": arguments.partitions,
                "cold_by": drop_method(),
            },
            "summary": summarize(runs, total_bytes, "state", CONTENDERS, ("complete_s", "on_disk_s")),
            "runs": runs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
