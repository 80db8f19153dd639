"""What changes of names cost in a job: creating, renaming and removing empty outputs on 1, 2 and 4 nodes.

Example: python benchmarks/name_changes.py --rounds 3

All nodes are on this machine, with --scratch and --local on its disk. One node decides on all names
(docs/outputs.md), so in each job three things are timed by name_changer.py: the deciding node alone, another one alone,
and all at once, each in a directory of its own. Beside them, in the same round: the same on the disk itself, and a
message of that size there and back over raw mpi4py. Writes results/NAME.json.gz (every run) and NAME.md.
"""

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.command import launcher, program, run
from harness.dataset import DatasetSpec, make
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace
from name_changer import KINDS

CHANGER = Path(__file__).parent / "name_changer.py"
RANKS = (1, 2, 4)
TURNS = {"first": "the deciding node", "last": "another node", "all": "all at once"}
RUN_S = 300.0
RAW_TRIPS = 5000


def sum_up(texts: list[str]) -> dict[str, Any]:
    """Of all ranks: per turn and kind the changes per second, and the percentiles of the slowest."""
    ranks = [json.loads(text) for text in texts]
    figures: dict[str, Any] = {}
    for turn in TURNS:
        for kind in KINDS:
            parts = [rank[turn][kind] for rank in ranks if turn in rank]
            figures[f"{turn} {kind}"] = {
                "per_s": sum(part["changes"] for part in parts) / max(part["seconds"] for part in parts),
                "p50_us": max(part["p50_us"] for part in parts),
                "p99_us": max(part["p99_us"] for part in parts),
            }
    return figures


def measure(ranks: int, count: int, work: Path) -> dict[str, Any]:
    """One job; 0 ranks is the disk itself."""
    place = work / "meeting"
    place.mkdir()
    numbers = ["$FANSTORE_RANK", str(ranks)] if ranks > 0 else ["0", "1"]
    directory = work / ("mount-$FANSTORE_RANK" if ranks > 0 else "written")
    command = f'exec "{sys.executable}" "{CHANGER}" "{directory}" {count} "{place}" {" ".join(numbers)}'
    argv = ["sh", "-c", command]
    if ranks > 0:
        options = ["--local", str(work / "local-{rank}"), "--scratch"]
        mount = [program("fanstore-mount"), str(work / "d.fan"), str(work / "mount-{rank}"), *options, "--", *argv]
        argv = mount if ranks == 1 else [*launcher(ranks), *mount]
    else:
        directory.mkdir()
    try:
        run(argv, RUN_S)
        return sum_up([(place / f"figures-{rank}").read_text() for rank in range(max(1, ranks))])
    finally:
        shutil.rmtree(place)
        if ranks == 0:
            directory.rmdir()


def contender(ranks: int) -> str:
    return "disk" if ranks == 0 else f"{ranks} node{'s' if ranks > 1 else ''}"


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per job, turn and kind of change the spread of every figure, and the speed relative to the disk in that round."""
    disk = {item["round"]: item["figures"] for item in runs if item["ranks"] == 0}
    summary = []
    for ranks in dict.fromkeys(item["ranks"] for item in runs):
        items = [item for item in runs if item["ranks"] == ranks]
        for turn in TURNS:
            if ranks < 2 and turn != "first":
                continue
            for kind in KINDS:
                key = f"{turn} {kind}"
                line: dict[str, Any] = {"ranks": ranks, "turn": turn, "kind": kind}
                for figure in ("per_s", "p50_us", "p99_us"):
                    line[figure] = asdict(Spread.of([item["figures"][key][figure] for item in items]))
                ratios = [
                    item["figures"][key]["per_s"] / disk[item["round"]][f"first {kind}"]["per_s"] for item in items
                ]
                line["ratio_to_disk"] = asdict(Spread.of(ratios))
                summary.append(line)
    return summary


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    raw = Spread.of([item["p50_us"] for item in result["raw"]])
    rows = [
        [
            contender(item["ranks"]) + (f", {TURNS[item['turn']]}" if item["ranks"] > 1 else ""),
            item["kind"],
            f"{item['per_s']['median']:,.0f}",
            f"{item['p50_us']['median']:,.0f}",
            f"{item['p99_us']['median']:,.0f}",
            Spread(**item["ratio_to_disk"]).ratio_text(),
        ]
        for item in result["summary"]
    ]
    return "\n".join(
        [
            "# Changes of names in a job",
            "",
            f"{result['settings']['rounds']} rounds of {result['settings']['changes']:,} changes of each kind. "
            f"{machine.sentence(result['machine'])}.",
            record.load_sentence(result["runs"]),
            "All nodes are on this machine. Changes/s are sums over the nodes that make them; latencies are those of "
            "the slowest. Ratio: changes/s relative to the disk in the same round: median (lowest-highest).",
            f"A message of that size there and back over raw mpi4py: {raw.median:,.0f} us.",
            "",
            markdown_table(["", "", "changes/s", "p50 us", "p99 us", "ratio to disk"], rows),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--changes", type=int, default=1000, help="of each kind, by each node")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--work-dir", type=Path, help="the disk on which everything lies")
    parser.add_argument("--name", default="name-changes", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    runs: list[dict[str, Any]] = []
    raw: list[dict[str, float]] = []
    with workspace(arguments.work_dir) as work:
        make(work / "images", DatasetSpec(100, 10_000, 10))
        run([program("fanstore-prep"), str(work / "images"), str(work / "d.fan")], RUN_S)
        for number in range(1, arguments.rounds + 1):
            order = [0, *arguments.ranks]
            shift = number % len(order)
            for ranks in order[shift:] + order[:shift]:
                figures = measure(ranks, arguments.changes, work)
                text = ", ".join(f"{key} {value['per_s']:,.0f}/s" for key, value in figures.items())
                print(f"round {number}: {contender(ranks)}: {text}")
                runs.append({"round": number, "ranks": ranks, "figures": figures, "load_average": os.getloadavg()[0]})
            done = run([*launcher(2), sys.executable, str(CHANGER), "raw", str(RAW_TRIPS)], RUN_S)
            raw.append(json.loads(done.stdout))
        result = {
            "kind": "name_changes",
            "machine": machine.describe(work),
            "settings": {"rounds": arguments.rounds, "changes": arguments.changes},
            "summary": summarize(runs),
            "runs": runs,
            "raw": raw,
        }
        record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
