"""How long a job needs before its command begins and after it has ended, and how much memory its daemons had meanwhile.

Example: python benchmarks/start_up.py --build before=/path/to/another/clone

A tree of 2,000 files of 107 KB is prepared once. In every round a job is started on one node and on two (all on this
machine, --stage-first, so that all is copied before the command begins), whose command notes when it began, reads all
files with the C reader, half of them from the other node if there are two, and notes the daemon's peak of memory and
when it ended. Another job of this clone finds the copies that one before it has left (--keep-local). Builds take turns,
and ratios are those of this clone to another one in the same round. Bytes of the dataset are those of staging and of
reads together, as the daemons count them. Writes results/NAME.json.gz and NAME.md.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.builds import add_build_option, builds_of, commands_of
from harness.command import launcher, program, run
from harness.dataset import DatasetSpec, make
from harness.reading import BUFFER_BYTES, Readers
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace

FILES = 2_000
THREADS = 8
RUN_S = 120.0
FIGURES = {"begin_s": "until the command begins, s", "end_s": "after it has ended, s", "peak_mib": "peak memory, MiB"}
#: In place of the name of a build: this clone, with copies that are there.
KEPT = "this clone, copies kept by a job before"
#: Of every node, under mpirun as well: begin, read, end, and the memory of the daemon, which is its parent.
COMMAND = (
    'date +%s.%N >"$1-$FANSTORE_RANK.begin" && "$2" "$1-$FANSTORE_RANK.order" "$3" "$4" >/dev/null && '
    'grep VmHWM "/proc/$PPID/status" >"$1-$FANSTORE_RANK.memory" && '
    'cat "$FANSTORE_MOUNT/.fanstore/stats.json" >"$1-$FANSTORE_RANK.stats" && date +%s.%N >"$1-$FANSTORE_RANK.end"'
)


def job(commands: Path, nodes: int, work: Path, paths: list[str], kept: Path | None = None) -> dict[str, float]:
    """One job from its start to its end; ``kept``: its copies stay below this directory."""
    directory = work / "job"
    directory.mkdir()
    for rank in range(nodes):
        order = random.Random(rank).sample(paths, len(paths))
        text = b"\0".join(os.fsencode(directory / f"mount-{rank}" / path) for path in order) + b"\0"
        (directory / f"x-{rank}.order").write_bytes(text)
    argv = [str(commands / "fanstore-mount"), str(work / "d.fan"), str(directory / "mount-{rank}"), "--stage-first"]
    argv += ["--local", str((kept or directory) / "local-{rank}"), *(["--keep-local"] if kept is not None else [])]
    argv += ["--engine", "native", "--", "sh", "-c", COMMAND, "sh"]
    argv += [str(directory / "x"), str(work / "reader"), str(THREADS), str(BUFFER_BYTES)]
    started = time.time()
    run([*launcher(nodes), *argv] if nodes > 1 else argv, RUN_S)
    ended = time.time()
    begin, end, memory = (
        [(directory / f"x-{rank}.{what}").read_text() for rank in range(nodes)] for what in ("begin", "end", "memory")
    )
    told = [json.loads((directory / f"x-{rank}.stats").read_bytes()) for rank in range(nodes)]
    shutil.rmtree(directory)
    return {
        "begin_s": max(map(float, begin)) - started,
        "end_s": ended - max(map(float, end)),
        "peak_mib": max(int(line.split()[1]) for line in memory) / 1024,
        "dataset_mib": sum(one["staging"]["done_bytes"] + one["sources"]["shared"]["fetched_bytes"] for one in told)
        / 2**20,
    }


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per build and number of nodes: each figure, and that of this clone in the same round divided by it."""
    ours = {(item["round"], item["nodes"]): item for item in runs if item["build"] == ""}
    lines = []
    for build, nodes in dict.fromkeys((item["build"], item["nodes"]) for item in runs):
        items = [item for item in runs if (item["build"], item["nodes"]) == (build, nodes)]
        line: dict[str, Any] = {"build": build, "nodes": nodes}
        for name in FIGURES:
            line[name] = asdict(Spread.of([item[name] for item in items]))
            ratios = [ours[item["round"], nodes][name] / item[name] for item in items]
            line[f"{name} ratio"] = asdict(Spread.of(ratios))
        line["dataset_mib"] = asdict(Spread.of([item["dataset_mib"] for item in items]))
        lines.append(line)
    return lines


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    rows = []
    for line in result["summary"]:
        row = [f"{line['nodes']} node{'s' if line['nodes'] > 1 else ''}, {line['build'] or 'this clone'}"]
        for name in FIGURES:
            row.append(Spread(**line[name]).ratio_text())
            row.append(Spread(**line[f"{name} ratio"]).ratio_text() if line["build"] else "")
        rows.append([*row, Spread(**line["dataset_mib"]).ratio_text()])
    head = [column for title in FIGURES.values() for column in (title, "this clone to it")]
    head.append("read of the dataset, MiB")
    return "\n".join(
        [
            "# Start, end and memory of a job",
            "",
            f"{result['settings']['rounds']} interleaved rounds. {machine.sentence(result['machine'])}.",
            f"{result['dataset']}, copied before the command begins; the command reads all of them with {THREADS} "
            "threads on every node. Memory: VmHWM of the largest daemon, with what it has mapped.",
            "Median (lowest-highest); this clone to it: in the same round, below 1 is less.",
            record.load_sentence(result["runs"]),
            "",
            markdown_table(["", *head], rows),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 2], help="of the jobs")
    add_build_option(parser)
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--name", default="start-up", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    builds = [("", Path(program("fanstore-mount")).parent)]
    builds += [(KEPT, builds[0][1]), *((name, commands_of(clone)) for name, clone in builds_of(arguments))]
    runs: list[dict[str, Any]] = []
    with workspace(arguments.work_dir) as work:
        dataset = make(work / "tree", DatasetSpec(FILES, 107_000, 20))
        # Two partitions, so that each of two nodes has one.
        run([program("fanstore-prep"), str(dataset.root), str(work / "d.fan"), "--partitions", "2"], RUN_S)
        Readers(work, THREADS, RUN_S)  # compiles the reader
        for nodes in arguments.nodes:
            (work / f"kept-{nodes}").mkdir()
            job(builds[0][1], nodes, work, list(dataset.paths), work / f"kept-{nodes}")
        for number in range(1, arguments.rounds + 1):
            for nodes in arguments.nodes:
                for build, commands in builds if number % 2 else builds[::-1]:
                    load = os.getloadavg()[0]
                    kept = work / f"kept-{nodes}" if build == KEPT else None
                    figures = job(commands, nodes, work, list(dataset.paths), kept)
                    print(f"round {number}: {nodes} nodes, {build or 'this clone'}: {figures}", flush=True)
                    runs.append({"round": number, "build": build, "nodes": nodes, "load_average": load} | figures)
        result = {
            "kind": "start_up",
            "machine": machine.describe(work),
            "dataset": dataset.description,
            "settings": {"rounds": arguments.rounds},
            "summary": summarize(runs),
            "runs": runs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
