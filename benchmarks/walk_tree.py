"""A walk with lstat of every entry of a large tree, on the source directory, on FanStore, and on its peers, in one run.

Example: python benchmarks/walk_tree.py --files 100000 --rounds 3

In every round each peer in turn is mounted afresh, the kernel's caches are emptied, and the tree is walked once (cold)
and then several times (warm). The walk is walker.c: one thread, readdir and lstat. Ratios are to the source and to
erofs within a round. Writes results/NAME.json.gz (every walk), NAME.md and NAME.png.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from harness import machine, record
from harness.caches import drop, drop_method
from harness.command import BenchmarkError, run
from harness.dataset import Dataset, DatasetSpec, make
from harness.peers import Erofs, Fanstore, Peer, Ratarmount, Source, Squashfs
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace

STATES = ("cold", "warm")
REFERENCES = ("source", "erofs-none")
WALK_S = 300.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--folders", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-passes", type=int, default=5, help="in each round; their median counts")
    parser.add_argument("--walker", choices=("c", "python"), default="c", help="walker.c, or os.walk (walker.py)")
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="only these, and the source")
    parser.add_argument("--work-dir", type=Path, help="where data and images are made (a disk, not tmpfs)")
    parser.add_argument("--name", default="walk-tree", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def contenders() -> list[Peer]:
    fanstore = [Fanstore("none", engine) for engine in ("native", "python")] + [Fanstore("none", preload=True)]
    squashfs = [Squashfs("none", in_kernel) for in_kernel in (False, True)]
    return [Source(), *fanstore, Ratarmount(), *squashfs, Erofs("none")]


def walk(walker: Sequence[str | Path], root: Path, expected: tuple[int, int]) -> float:
    """Seconds of one walk; an error if it did not see as many entries and bytes as are there."""
    seen = json.loads(run([*walker, root], WALK_S).stdout)
    if (seen["entries"], seen["bytes"]) != expected:
        raise BenchmarkError(f"{root}: {seen['entries']} entries with {seen['bytes']} bytes, not {expected}")
    return float(seen["seconds"])


def summarize(walks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per peer and state: entries per second of each round, and the ratios to the references in the same round."""
    rates: dict[tuple[str, str, int], list[float]] = {}
    for item in walks:
        rates.setdefault((item["peer"], item["state"], item["round"]), []).append(item["entries"] / item["seconds"])
    middle = {key: median(values) for key, values in rates.items()}
    summary = []
    for peer, state in dict.fromkeys((peer, state) for peer, state, _ in middle):
        rounds = [number for name, other, number in middle if (name, other) == (peer, state)]
        line: dict[str, Any] = {"peer": peer, "state": state}
        line["entries_per_s"] = asdict(Spread.of([middle[peer, state, number] for number in rounds]))
        for reference in REFERENCES:
            ratios = [
                middle[peer, state, number] / middle[reference, state, number]
                for number in rounds
                if (reference, state, number) in middle
            ]
            if ratios:
                line[f"ratio_to_{reference}"] = asdict(Spread.of(ratios)) | {"ratios": ratios}
        summary.append(line)
    return summary


def make_table(result: dict[str, Any]) -> str:
    settings = result["settings"]
    rows = []
    for peer in result["versions"]:
        row = [peer]
        for state in STATES:
            line = next(item for item in result["summary"] if (item["peer"], item["state"]) == (peer, state))
            for reference in REFERENCES:
                figures = line.get(f"ratio_to_{reference}")
                row.append(
                    "" if figures is None else Spread(figures["median"], figures["low"], figures["high"]).ratio_text()
                )
            row.append(f"{line['entries_per_s']['median']:,.0f}")
        rows.append(row)
    columns = [f"{state} {what}" for state in STATES for what in ("to source", "to erofs", "entries/s")]
    lines = [
        f"# A walk with lstat: {result['dataset']}",
        "",
        f"{settings['rounds']} rounds. {machine.sentence(result['machine'])}.",
        f"Cold: fresh mount, caches emptied with {settings['cold_by']}. Warm: the next {settings['warm_passes']} "
        "walks; their median counts.",
        "Ratio: entries per second relative to the source and to erofs (kernel) in the same round: median "
        "(lowest-highest).",
        record.load_sentence(result["walks"]),
        "",
        markdown_table(["", *columns], rows),
        "",
    ]
    lines += [f"Missing: {name} ({reason})." for name, reason in result["missing"].items()]
    return "\n".join(lines)


def measure(arguments: argparse.Namespace, peers: list[Peer], dataset: Dataset, work: Path) -> list[dict[str, Any]]:
    here = Path(__file__).parent
    walker: list[str | Path] = [sys.executable, here / "walker.py"]
    if arguments.walker == "c":
        walker = [work / "walker"]
        flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
        run(["cc", *flags, here / "walker.c", "-o", *walker], 60)
    mountpoint = work / "mount"
    mountpoint.mkdir()
    folders = {parent for path in dataset.paths for parent in Path(path).parents} - {Path()}
    expected = (len(dataset.paths) + len(folders), dataset.total_bytes)
    walks = []
    for number in range(1, arguments.rounds + 1):
        turn = list(peers)
        random.Random(number).shuffle(turn)
        for peer in turn:
            with peer.mounted(mountpoint):
                drop(peer.files())
                for state in ["cold"] + ["warm"] * arguments.warm_passes:
                    load = os.getloadavg()[0]
                    seconds = walk([*peer.under(mountpoint), *walker], peer.root(mountpoint), expected)
                    rate = len(dataset.paths) / seconds
                    print(f"round {number}: {peer.name:22} {state}: {seconds:7.3f} s, {rate:11,.0f} files/s")
                    walks.append(
                        {"round": number, "peer": peer.name, "state": state, "seconds": seconds}
                        | {"entries": len(dataset.paths), "load_average": load}
                    )
    return walks


def benchmark(arguments: argparse.Namespace) -> None:
    known = contenders()
    missing = {peer.name: reason for peer in known if (reason := peer.missing()) is not None}
    wanted = {"source", *(arguments.peers or [peer.name for peer in known])}
    peers = [peer for peer in known if peer.name not in missing and peer.name in wanted]
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        dataset = make(work / "source", DatasetSpec(arguments.files, 100, arguments.folders, spread=0))
        for peer in peers:
            peer.prepare(dataset.root, work)
            print(f"prepared: {peer.name}")
        walks = measure(arguments, peers, dataset, work)
        result = {
            "kind": "walk_tree",
            "machine": description,
            "dataset": dataset.description,
            "settings": {
                "rounds": arguments.rounds,
                "warm_passes": arguments.warm_passes,
                "cold_by": drop_method(),
            },
            "versions": {peer.name: peer.version() for peer in peers},
            "missing": missing,
            "summary": summarize(walks),
            "walks": walks,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
