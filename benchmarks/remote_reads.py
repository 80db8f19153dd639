"""Reading from other nodes: through FanStore's core and through the mount, beside raw mpi4py.

Example: python benchmarks/remote_reads.py

A tree of files of five sizes is prepared once; all ranks are on this machine. Two questions:
pair: one of two ranks reads files that the other one has, one at a time and 16 at a time.
aggregate: 1, 2 and 4 ranks read at once, 16 files at a time each, all of them remote, half of them, none.
Each round starts fresh jobs in turn, raw (remote_raw.py), core (remote_core.py), mount and preload (remote_mount.py),
and ratios are taken within the round, to raw MPI, and to other clones (--build)
that read the same. Writes results/NAME.json.gz, NAME.md and NAME.png.
"""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.builds import add_build_option, builds_of
from harness.command import run
from harness.record import Spread, markdown_table
from harness.remote import SHARES, WARM_UP_S, Case
from harness.remotejob import prepare, run_job
from harness.script import run_script
from harness.workspace import workspace

KIB, MIB = 1 << 10, 1 << 20
SIZES = (16 * KIB, 107 * KIB, 512 * KIB, 2 * MIB, 8 * MIB)
#: The size of the aggregate: an image of ImageNet.
AGGREGATE_SIZE = 107 * KIB
WINDOWS = (1, 16)
RANKS = (1, 2, 4)
WAYS = ("raw", "core", "mount", "preload")
BYTES_PER_SIZE = 256 * MIB
FIGURES = ("files_per_s", "mb_per_s", "p50_us", "p90_us", "p99_us")
#: Without initialising MPI: Open MPI started without a launcher leaves its shared memory in /dev/shm.
LIBRARY_VERSION = "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI as m; print(m.Get_library_version())"


def cases_of(ranks: int, askers: int, sizes: list[int]) -> list[Case]:
    """What one job measures; a rank that is alone has nobody to ask."""
    if askers < ranks:
        return [Case(size, window, "remote", askers) for window in WINDOWS for size in sizes]
    return [Case(AGGREGATE_SIZE, max(WINDOWS), share, ranks) for share in SHARES if ranks > 1 or share == "local"]


def key_of(run: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("ranks", "askers", "window", "share", "size"))


def with_build(way: str, build: str) -> str:
    """What a way is called; "" is this clone."""
    return f"{way}, {build}" if build else way


def summarize(runs: list[dict[str, Any]], builds: list[str]) -> list[dict[str, Any]]:
    """Per case and way the spread of every figure, and the ratios to raw MPI and to other clones in the same round."""
    all_runs = {(item["way"], item["round"], *key_of(item)): item for item in runs}
    summary = []
    for key, way in dict.fromkeys((key_of(item), item["way"]) for item in runs):
        items = [item for item in runs if key_of(item) == key and item["way"] == way]
        line: dict[str, Any] = {name: items[0][name] for name in ("ranks", "askers", "window", "share", "size", "way")}
        line |= {figure: asdict(Spread.of([item[figure] for item in items])) for figure in FIGURES}
        others = {"raw": "raw"} if way != "raw" else {}
        others |= {build: with_build(way, build) for build in builds}
        for name, other in others.items():
            found = [all_runs.get((other, item["round"], *key)) for item in items]
            ratios = [
                item["files_per_s"] / there["files_per_s"] for item, there in zip(items, found, strict=True) if there
            ]
            if ratios:
                line[f"ratio_to_{name}"] = asdict(Spread.of(ratios))
            if name == "raw":
                line["ratios"] = ratios
        summary.append(line)
    return summary


def size_text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def rows_of(summary: list[dict[str, Any]], name: Any, others: list[str]) -> list[list[str]]:
    rows = []
    for item in summary:
        keys = [f"ratio_to_{other}" for other in others]
        ratios = [Spread(**item[key]).ratio_text() if key in item else "" for key in keys]
        figures = [f"{item[figure]['median']:,.0f}" for figure in FIGURES]
        rows.append([name(item), *figures, *ratios])
    return rows


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    settings = result["settings"]
    others = ["raw", *settings["builds"]]
    header = ["", "files/s", "MB/s", "p50 us", "p90 us", "p99 us", *[f"ratio to {other}" for other in others]]
    summary = result["summary"]
    pair = sorted((i for i in summary if i["askers"] < i["ranks"]), key=lambda i: (i["window"], i["size"]))
    aggregate = sorted(
        (i for i in summary if i["askers"] == i["ranks"]), key=lambda i: (i["ranks"], SHARES.index(i["share"]))
    )
    return "\n".join(
        [
            "# Reading from other nodes, beside raw MPI",
            "",
            f"{settings['rounds']} rounds of {settings['seconds']:g} s per figure. {settings['mpi']}. "
            f"{machine.sentence(result['machine'])}.",
            record.load_sentence(result["runs"]),
            "All ranks are on this machine. raw: mpi4py alone; core: FanStore's reader, checksums included, without "
            f"FUSE; mount: the mount (engine {settings['engine']}) and a C reader; preload: the same, intercepted. "
            "Whole files. Raw and core read for "
            f"{WARM_UP_S:g} s before the clock starts. "
            "Ratio: files/s in the same round: median (lowest-highest).",
            "",
            "## One of two ranks reads what the other one has",
            "",
            markdown_table(
                header, rows_of(pair, lambda i: f"{i['window']} under way, {size_text(i['size'])}, {i['way']}", others)
            ),
            "",
            f"## All ranks read at once, {size_text(AGGREGATE_SIZE)}, {max(WINDOWS)} under way in each",
            "",
            "Files/s are sums over all ranks; latencies are those of the slowest rank. A rank that is alone has no raw "
            "MPI beside it: raw copies out of the mapped partition there, as it does with all local files.",
            "",
            markdown_table(
                header,
                rows_of(
                    aggregate,
                    lambda i: f"{i['ranks']} rank{'s' if i['ranks'] > 1 else ''}, {i['share']}, {i['way']}",
                    others,
                ),
            ),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="per figure")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--bytes-per-size", type=int, default=BYTES_PER_SIZE, help="of the tree")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS), help="of the aggregate")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--engine", choices=("native", "python"), default="native", help="of the mount")
    add_build_option(parser)
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--name", default="remote-reads", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        base = prepare(work, sorted({*arguments.sizes, AGGREGATE_SIZE}), arguments.bytes_per_size, arguments.seconds)
        version = run([sys.executable, "-c", LIBRARY_VERSION], 60).stdout
        runs = []
        builds: list[tuple[str, Path | None]] = [("", None), *builds_of(arguments)]
        ways = [(way, *build) for way in arguments.ways for build in (builds if way != "raw" else builds[:1])]
        jobs = [(2, 1), *((ranks, ranks) for ranks in arguments.ranks)]
        for number in range(1, arguments.rounds + 1):
            for ranks, askers in jobs:
                cases = cases_of(ranks, askers, arguments.sizes)
                for way, build, clone in ways:
                    load = os.getloadavg()[0]
                    name = with_build(way, build)
                    for line in run_job(way, arguments.engine, ranks, cases, base, work, clone=clone):
                        runs.append({"round": number, "ranks": ranks, "way": name, "load_average": load} | line)
                        print(
                            f"round {number}: {askers} of {ranks} ranks, {line['window']:2} under way, "
                            f"{size_text(line['size']):>7} {line['share']:6} {name:5} {line['files_per_s']:8,.0f}/s "
                            f"{line['mb_per_s']:6,.0f} MB/s, p50 {line['p50_us']:,.0f} us",
                            flush=True,
                        )
        result = {
            "kind": "remote_reads",
            "machine": description,
            "settings": {
                "rounds": arguments.rounds,
                "seconds": arguments.seconds,
                "bytes_per_size": arguments.bytes_per_size,
                "engine": arguments.engine,
                "builds": [name for name, _ in builds_of(arguments)],
                "mpi": version.split(",")[0].strip().splitlines()[0],
            },
            "summary": summarize(runs, [name for name, _ in builds_of(arguments)]),
            "runs": runs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
