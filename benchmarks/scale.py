"""Simulates FanStore on 16 to 10,000 nodes: what docs/scale.md says of them.

Example: python benchmarks/scale.py

ImageNet with partitions of 1 GiB and of 8 MB, with 1 to 3 copies, and a thousand million files. Its figures do not
depend on the machine; only the time and the memory that the simulation takes do. Writes the record scale.
"""

import argparse
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.record import markdown_table
from harness.script import run_script

from fanstore.cli.plan_scale import ROWS
from fanstore.model.scale import Outcome, Scale, simulate

FILES, FILE_MB = 1_281_167, 0.107
NODES = (16, 100, 1_000, 10_000)
#: Title, and the job on so many nodes.
CASES: dict[str, list[Scale]] = {
    "ImageNet, partitions of 1 GiB": [Scale(nodes, FILES, FILE_MB) for nodes in NODES],
    "ImageNet, partitions of 8 MB": [Scale(nodes, FILES, FILE_MB, partition_mb=8.0) for nodes in NODES],
    "ImageNet, partitions of 8 MB, 2 copies": [
        Scale(nodes, FILES, FILE_MB, partition_mb=8.0, replicas=2) for nodes in NODES
    ],
    "ImageNet, partitions of 8 MB, 3 copies": [
        Scale(nodes, FILES, FILE_MB, partition_mb=8.0, replicas=3) for nodes in NODES
    ],
    "10^9 files of 107 KB, partitions of 1 GiB": [Scale(nodes, 10**9, FILE_MB) for nodes in (1_000, 10_000)],
}


def measure() -> dict[str, Any]:
    cases: dict[str, Any] = {}
    outcomes: dict[str, list[Outcome]] = {}
    for title, scales in CASES.items():
        outcomes[title], cases[title] = [], []
        for scale in scales:
            begin_s = time.process_time()
            found = simulate(scale)
            outcomes[title].append(found)
            cases[title].append(asdict(found) | {"cpu_s": time.process_time() - begin_s})
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"machine": machine.describe(Path.cwd()), "cases": cases, "peak_mib": peak_mib, "outcomes": outcomes}


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    parts = ["# FanStore on very many nodes, simulated", machine.sentence(result["machine"])]
    for title, found in result["outcomes"].items():
        rows = [[name, *(show(one) for one in found)] for name, show in ROWS.items()]
        parts.append(markdown_table([title, *(row for row in rows[0][1:])], rows[1:]))
    longest_s = max(case["cpu_s"] for cases in result["cases"].values() for case in cases)
    parts.append(
        f"A column takes up to {longest_s:.0f} s of processor time, and the whole run {result['peak_mib']:.0f} MiB of "
        "memory. 90 epochs, 32 samples of a node in an iteration, 10 GB/s of a node, 50 GB/s of the shared file system."
    )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="scale", help="of the record")
    parser.add_argument("--results", type=Path, default=record.RESULTS, metavar="DIR", help="where records are kept")
    arguments = parser.parse_args()
    result = measure()
    table = make_table(result)
    del result["outcomes"]
    record.write(arguments.name, result, table, arguments.results, picture=False)


if __name__ == "__main__":
    sys.exit(run_script(main))
