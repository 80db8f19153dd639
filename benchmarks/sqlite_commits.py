"""What small transactions of SQLite cost under the mount: each is a few writes and fsyncs, one after the other.

Example: python benchmarks/sqlite_commits.py --rounds 3

A database of one table, one row per transaction, with SQLite's own defaults (a rollback journal, synchronous=FULL), on
the disk itself and in mounts with --scratch, --output and --fsync local, and --output, all on that disk; one after the
other in every round. Beside them, in the same database file, what one fsync of a page takes. Writes
results/NAME.json.gz (every run) and NAME.md.
"""

import argparse
import json
import os
import shutil
import sqlite3
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.command import program, run
from harness.dataset import DatasetSpec, make
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace

RUN_S = 600.0
PAGE_BYTES = 4096
DISK = "disk"
#: What is compared with the disk, and the options of its mount.
MOUNTS = {
    "scratch": ["--scratch"],
    "fsync local": ["--output", "{out}", "--fsync", "local"],
    "output": ["--output", "{out}"],
}
FIGURES = ("transactions_per_s", "fsync_p50_us", "fsync_p99_us")


def commit(directory: Path, transactions: int) -> dict[str, float]:
    """In the process that is measured: all transactions, then as many fsyncs of a page."""
    database = sqlite3.connect(directory / "database", isolation_level=None)
    database.execute("CREATE TABLE steps (number INTEGER PRIMARY KEY, loss REAL, note TEXT)")
    begun_s = time.perf_counter()
    for number in range(transactions):
        database.execute("INSERT INTO steps VALUES (?, ?, ?)", (number, 1 / (number + 1), "x" * 100))
    seconds = time.perf_counter() - begun_s
    (count,) = database.execute("SELECT count(*) FROM steps").fetchone()
    assert count == transactions
    database.close()
    times_us = []
    with open(directory / "pages", "wb", buffering=0) as file:
        for number in range(transactions):
            file.seek(number % 64 * PAGE_BYTES)
            file.write(os.urandom(PAGE_BYTES))
            begun_s = time.perf_counter()
            os.fsync(file.fileno())
            times_us.append(1e6 * (time.perf_counter() - begun_s))
    times_us.sort()
    middle, late = times_us[len(times_us) // 2], times_us[len(times_us) * 99 // 100]
    return {"transactions_per_s": transactions / seconds, "fsync_p50_us": middle, "fsync_p99_us": late}


def measure(where: str, transactions: int, work: Path) -> dict[str, float]:
    """One of the contenders, in a process of its own."""
    figures = work / "figures"
    argv = [sys.executable, __file__, "--transactions", str(transactions), "--commit-in"]
    if where == DISK:
        place = work / "written"
        place.mkdir()
        argv += [str(place), str(figures)]
    else:
        place, out = work / "mount", str(work / "written")
        options = [option.format(out=out) for option in MOUNTS[where]]
        mount = [program("fanstore-mount"), str(work / "d.fan"), str(place), "--local", str(work / "local"), *options]
        argv = [*mount, "--", *argv, str(place), str(figures)]
    try:
        run(argv, RUN_S)
        result: dict[str, float] = json.loads(figures.read_text())
        return result
    finally:
        figures.unlink(missing_ok=True)
        shutil.rmtree(work / "written", ignore_errors=True)


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per contender the spread of every figure, and of the speed relative to the disk in that round."""
    disk = {item["round"]: item["figures"] for item in runs if item["where"] == DISK}
    summary = []
    for where in (DISK, *MOUNTS):
        items = [item for item in runs if item["where"] == where]
        line: dict[str, Any] = {"where": where}
        for figure in FIGURES:
            line[figure] = asdict(Spread.of([item["figures"][figure] for item in items]))
        speeds = [item["figures"][FIGURES[0]] / disk[item["round"]][FIGURES[0]] for item in items]
        line["ratio_to_disk"] = asdict(Spread.of(speeds))
        summary.append(line)
    return summary


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    rows = [
        [
            item["where"],
            *[f"{item[figure]['median']:,.0f}" for figure in FIGURES],
            Spread(**item["ratio_to_disk"]).ratio_text(),
        ]
        for item in result["summary"]
    ]
    return "\n".join(
        [
            "# Small transactions of SQLite",
            "",
            f"{result['settings']['rounds']} rounds of {result['settings']['transactions']:,} transactions of one row, "
            f"SQLite {sqlite3.sqlite_version} with its defaults, and as many fsyncs of a page. "
            f"{machine.sentence(result['machine'])}.",
            record.load_sentence(result["runs"]),
            "Everything lies on one disk, --output included. Ratio: transactions/s relative to the disk in the same "
            "round: median (lowest-highest).",
            "",
            markdown_table(["", "transactions/s", "fsync p50 us", "fsync p99 us", "ratio to disk"], rows),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transactions", type=int, default=1000)
    parser.add_argument("--work-dir", type=Path, help="the disk on which everything lies")
    parser.add_argument("--name", default="sqlite", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    parser.add_argument("--commit-in", nargs=2, type=Path, metavar=("DIR", "FIGURES"), help=argparse.SUPPRESS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    if arguments.commit_in is not None:
        directory, figures = arguments.commit_in
        figures.write_text(json.dumps(commit(directory, arguments.transactions)))
        return
    runs: list[dict[str, Any]] = []
    with workspace(arguments.work_dir) as work:
        make(work / "images", DatasetSpec(100, 10_000, 10))
        run([program("fanstore-prep"), str(work / "images"), str(work / "d.fan")], RUN_S)
        for number in range(1, arguments.rounds + 1):
            order = [DISK, *MOUNTS]
            shift = number % len(order)
            for where in order[shift:] + order[:shift]:
                figures = measure(where, arguments.transactions, work)
                print(f"round {number}: {where}: " + ", ".join(f"{key} {value:,.0f}" for key, value in figures.items()))
                runs.append({"round": number, "where": where, "figures": figures, "load_average": os.getloadavg()[0]})
        result = {
            "kind": "sqlite",
            "machine": machine.describe(work),
            "settings": {"rounds": arguments.rounds, "transactions": arguments.transactions},
            "summary": summarize(runs),
            "runs": runs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
