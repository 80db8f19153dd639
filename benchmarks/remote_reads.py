"""Reading from another node: MpiPeers.fetch beside raw mpi4py requests and answers of the same sizes.

Example: python benchmarks/remote_reads.py

A file in the page cache is mapped by every rank, all on this machine. With two ranks, one asks the other, with one and
with 16 requests under way; with four ranks, every rank asks every other. One rank alone copies out of the mapping. Each
round starts fresh jobs in turn, raw and fetch, and the ratio is taken within the round.
Writes results/NAME.json, NAME.md and NAME.png.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine, record
from harness.command import BenchmarkError, find_program, run
from harness.record import Spread, markdown_table
from harness.workspace import workspace

CHILD = Path(__file__).parent / "remote_child.py"
SIZES = (16 << 10, 107 << 10, 512 << 10, 2 << 20, 8 << 20)
#: Ranks and requests under way of each asker.
CASES = ((1, 1), (2, 1), (2, 16), (4, 16))
FILE_BYTES = 256 << 20
#: Without initialising MPI: Open MPI started without a launcher leaves its shared memory in /dev/shm.
LIBRARY_VERSION = "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI as m; print(m.Get_library_version())"


def launch(ranks: int) -> list[str]:
    launcher = find_program("mpirun")
    if launcher is None:
        raise BenchmarkError("mpirun is missing: pip install 'fanstore[mpi]'")
    options = ["--oversubscribe", "-n", str(ranks)]
    return [launcher, *(["--allow-run-as-root"] if os.geteuid() == 0 else []), *options]


def measure(ranks: int, window: int, way: str, file: Path, seconds: float, sizes: list[int]) -> list[dict[str, Any]]:
    """One job; a line of figures per size."""
    program = [sys.executable, str(CHILD), way, str(file), str(seconds), str(window), *map(str, sizes)]
    done = run([*(launch(ranks) if ranks > 1 else []), *program], 60 + 3 * seconds * len(sizes))
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if [line["size"] for line in lines] != sizes:
        raise BenchmarkError(f"{way} on {ranks} ranks did not report every size: {done.stdout} {done.stderr}")
    for line in lines:
        line["mb_per_s"] = line["reads_per_s"] * line["size"] / 1e6
    return lines


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per case, way and size the spread of every figure, and the ratio to raw MPI in the same round."""
    figures = ("reads_per_s", "mb_per_s", "p50_us", "p90_us", "p99_us")
    raw = {(r["round"], r["ranks"], r["window"], r["size"]): r for r in runs if r["way"] == "raw"}
    keys = dict.fromkeys((r["ranks"], r["window"], r["size"], r["way"]) for r in runs)
    summary = []
    for ranks, window, size, way in keys:
        items = [r for r in runs if (r["ranks"], r["window"], r["size"], r["way"]) == (ranks, window, size, way)]
        line: dict[str, Any] = {"ranks": ranks, "window": window, "size": size, "way": way}
        line |= {figure: asdict(Spread.of([item[figure] for item in items])) for figure in figures}
        if way == "fetch":
            ratios = [item["reads_per_s"] / raw[item["round"], ranks, window, size]["reads_per_s"] for item in items]
            line["ratios"] = ratios
            line["ratio_to_raw"] = asdict(Spread.of(ratios))
        summary.append(line)
    return summary


def size_text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    header = ["", "reads/s", "MB/s", "p50 us", "p90 us", "p99 us", "ratio to raw"]
    rows = []
    for item in result["summary"]:
        ratio = Spread(**item["ratio_to_raw"]).ratio_text() if "ratio_to_raw" in item else ""
        rows.append(
            [
                f"{item['ranks']} ranks, {item['window']} under way, {size_text(item['size'])}, {item['way']}",
                f"{item['reads_per_s']['median']:,.0f}",
                f"{item['mb_per_s']['median']:,.0f}",
                *(f"{item[name]['median']:,.0f}" for name in ("p50_us", "p90_us", "p99_us")),
                ratio,
            ]
        )
    settings = result["settings"]
    return "\n".join(
        [
            "# Reading from another node, beside raw MPI",
            "",
            f"{settings['rounds']} rounds of {settings['seconds']:g} s per figure. {settings['mpi']}. "
            f"{machine.sentence(result['machine'])}.",
            record.load_sentence(result["runs"]),
            "All ranks are on this machine. raw: mpi4py alone; fetch: MpiPeers.fetch; local: copies out of the "
            "mapping, no MPI. With 4 ranks every rank asks every other, and the figures are sums (latencies: of the "
            "slowest rank). "
            "Ratio: in the same round: median (lowest-highest).",
            "",
            markdown_table(header, rows),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="per figure")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--name", default=f"remote-reads-{datetime.now(UTC):%Y-%m-%d}", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        file = work / "partition"
        file.write_bytes(np.random.default_rng(1).bytes(FILE_BYTES))
        version = run([sys.executable, "-c", LIBRARY_VERSION], 60).stdout
        runs = []
        for number in range(1, arguments.rounds + 1):
            for ranks, window in CASES:
                for way in ("raw", "fetch") if ranks > 1 else ("local",):
                    load = os.getloadavg()[0]
                    for line in measure(ranks, window, way, file, arguments.seconds, arguments.sizes):
                        case = {"round": number, "ranks": ranks, "window": window, "way": way, "load_average": load}
                        runs.append(case | line)
                        print(
                            f"round {number}: {ranks} ranks, {window:2} under way, "
                            f"{size_text(line['size']):>7} {way:5} {line['reads_per_s']:8,.0f}/s "
                            f"{line['mb_per_s']:6,.0f} MB/s, "
                            f"p50 {line['p50_us']:,.0f} us"
                        )
        result = {
            "kind": "remote_reads",
            "machine": description,
            "settings": {
                "rounds": arguments.rounds,
                "seconds": arguments.seconds,
                "mpi": version.split(",")[0].strip().splitlines()[0],
            },
            "summary": summarize(runs),
            "runs": runs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


def main() -> int:
    try:
        benchmark(parse_arguments())
    except BenchmarkError as error:
        print(f"remote_reads: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("remote_reads: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
