"""Simulates everything that the thesis behind fanstore.model published, at full size, and compares.

Example: python benchmarks/published_cells.py

All policies in S1 to S4, in both modes, and HDMLP in S3 with other stores (16 points). Unlike other benchmarks this one
has figures that do not depend on the machine; only the processor time of each cell does.
Writes results/NAME.json.gz and NAME.md.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.record import markdown_table
from harness.script import run_script

from fanstore.model import MODES, POLICIES, THESIS, Mode, RefusedError, Scenario, run
from fanstore.model.thesis import PUBLISHED_S, PUBLISHED_STORES_S, with_stores


def cell(scenario: Scenario, policy: str, mode: Mode, published_s: float | None, seed: int) -> dict[str, Any]:
    """One simulation, and what it took."""
    begin_s = time.process_time()
    measured: dict[str, Any] = {"scenario": scenario.name, "policy": policy, "mode": mode, "published_s": published_s}
    job = scenario.job(seed)
    try:
        outcome = run(POLICIES[policy], scenario.system, job, mode)
    except RefusedError as refusal:
        return measured | {"refused": str(refusal)}
    return measured | {
        "seconds": outcome.seconds,
        "pfs_datasets": outcome.pfs_mb / job.dataset_mb,
        "cpu_s": time.process_time() - begin_s,
    }


def deviation(measured: dict[str, Any]) -> float:
    return float(measured["seconds"] / measured["published_s"] - 1)


def text(measured: dict[str, Any]) -> str:
    """``4,434.29 (+0.02 %)``: seconds, and how far they are from what was published."""
    if "refused" in measured:
        return "-"
    seconds = f"{measured['seconds']:,.2f}"
    return seconds if measured["published_s"] is None else f"{seconds} ({100 * deviation(measured):+.2f} %)"


def grid(title: str, columns: Sequence[str], rows: dict[str, list[str]]) -> str:
    return markdown_table([title, *columns], [[name, *cells] for name, cells in rows.items()])


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    cells = {(item["mode"], item["scenario"], item["policy"]): item for item in result["cells"]}
    parts = ["# Published figures, simulated again", machine.sentence(result["machine"])]
    for mode in MODES:
        for what in ("seconds", "datasets from the PFS"):
            rows = {}
            for policy in POLICIES:
                items = [cells[mode, scenario, policy] for scenario in THESIS]
                rows[policy] = (
                    [text(item) for item in items]
                    if what == "seconds"
                    else ["-" if "refused" in item else f"{item['pfs_datasets']:.3f}" for item in items]
                )
            parts.append(grid(f"{mode}: {what}", list(THESIS), rows))
    stores = {(item["memory_gb"], item["other_gb"]): item for item in result["stores"]}
    memory = list(PUBLISHED_STORES_S[0])
    parts.append(
        grid(
            "HDMLP in S3, seconds: a class of 100 MB/s, by memory",
            [f"{gb} GB" for gb in memory],
            {f"{other} GB": [text(stores[gb, other]) for gb in memory] for other in PUBLISHED_STORES_S},
        )
    )
    worst = {
        name: max(abs(deviation(item)) for item in items)
        for name, items in {
            "S1": [item for item in result["cells"] if item["published_s"] and item["scenario"] == "S1"],
            "S2 to S4": [item for item in result["cells"] if item["published_s"] and item["scenario"] != "S1"],
            "other stores": result["stores"],
        }.items()
    }
    times = [item["cpu_s"] for item in result["cells"] if "cpu_s" in item and item["mode"] == "published"]
    parts.append(
        "In brackets: against the published seconds. At most "
        + ", ".join(f"{100 * value:.2f} % in {name}" for name, value in worst.items())
        + f". A cell of the published mode takes up to {max(times):.1f} s of processor time, all together "
        f"{sum(times):.0f} s."
    )
    return "\n\n".join(parts)


def measure(seed: int, jobs: int) -> dict[str, Any]:
    asked = [
        (THESIS[scenario], policy, mode, PUBLISHED_S[scenario].get(policy) if mode == "published" else None)
        for mode in MODES
        for scenario in reversed(THESIS)  # the longest first
        for policy in POLICIES
    ]
    points = [(memory, other) for other, row in PUBLISHED_STORES_S.items() for memory in row]
    stores = [
        (with_stores(memory, other), "hdmlp", "published", PUBLISHED_STORES_S[other][memory])
        for memory, other in points
    ]
    with ProcessPoolExecutor(jobs) as pool:
        cells = list(pool.map(cell, *zip(*(asked + stores), strict=True), repeat(seed)))
    return {
        "machine": machine.describe(Path.cwd()),
        "settings": {"seed": seed, "jobs": jobs},
        "cells": cells[: len(asked)],
        "stores": [
            item | {"memory_gb": memory, "other_gb": other}
            for item, (memory, other) in zip(cells[len(asked) :], points, strict=True)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of orders and sizes (default: 0)")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one per core)"
    )
    parser.add_argument("--name", default="published-cells", help="of the record")
    parser.add_argument("--results", type=Path, default=record.RESULTS, metavar="DIR", help="where records are kept")
    arguments = parser.parse_args()
    result = measure(arguments.seed, arguments.jobs)
    record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


if __name__ == "__main__":
    sys.exit(run_script(main))
