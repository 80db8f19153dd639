"""Loading a large name space: index.fsx beside plain Python objects built from the same rows.

Example: python benchmarks/index_load.py --files 1300000

A synthetic name space of ImageNet's shape (2,002 directories) is written with the project's own index writer, as rows
of text, and as a pickle of the finished object tree. Fresh processes, in turn, load one of them each and look up the
same names. All three files are in the page cache.
Writes results/NAME.json.gz, NAME.md and NAME.png.
"""

import argparse
import json
import pickle
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.command import run
from harness.namespace import Namespace, synthetic
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace
from index_child import load_objects

CHILD = Path(__file__).parent / "index_child.py"
WAYS = {"index": "index.fsx", "objects": "objects, from rows", "pickle": "objects, from a pickle"}
#: A fresh process that takes longer is an error; 1.3 million objects take some 10 s.
LOAD_S = 300.0


def write_queries(namespace: Namespace, path: Path, count: int) -> None:
    """Paths of ``count`` files, chosen at random."""
    chance = random.Random(1)
    parents = namespace.columns["parent"].tolist()
    names = namespace.names
    lines = []
    for _ in range(count):
        entry = chance.randrange(len(names) - namespace.files, len(names))
        folder = parents[entry]
        lines.append(b"/".join((names[parents[folder]], names[folder], names[entry])))
    path.write_bytes(b"\n".join(lines) + b"\n")


def summarize(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per way the spread of every figure, and its ratio to index.fsx in the same round."""
    figures = ("load_s", "added_rss_bytes", "peak_rss_bytes", "lookup_ns", "absent_ns", "path_ns")
    own = {item["round"]: item for item in rounds if item["way"] == "index"}
    summary = []
    for way in WAYS:
        items = [item for item in rounds if item["way"] == way]
        line: dict[str, Any] = {"way": way}
        for figure in figures:
            line[figure] = asdict(Spread.of([item[figure] for item in items]))
            line[f"{figure} ratio to index.fsx"] = asdict(
                Spread.of([item[figure] / own[item["round"]][figure] for item in items])
            )
        summary.append(line)
    return summary


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    sizes = result["namespace"]
    header = ["", "load s", "ratio", "added MB", "ratio", "lookup ns", "absent ns", "path ns", "ratio"]
    rows = []
    for item in result["summary"]:

        def ratio(figure: str, line: dict[str, Any] = item) -> str:
            return Spread(**line[f"{figure} ratio to index.fsx"]).ratio_text()

        rows.append(
            [
                WAYS[item["way"]],
                f"{item['load_s']['median']:.3f}",
                ratio("load_s"),
                f"{item['added_rss_bytes']['median'] / 1e6:.0f}",
                ratio("added_rss_bytes"),
                f"{item['lookup_ns']['median']:.0f}",
                f"{item['absent_ns']['median']:.0f}",
                f"{item['path_ns']['median']:.0f}",
                ratio("path_ns"),
            ]
        )
    return "\n".join(
        [
            f"# Loading a name space of {sizes['files']:,} files in {sizes['directories']:,} directories",
            "",
            f"{result['settings']['rounds']} fresh processes each. {machine.sentence(result['machine'])}.",
            f"index.fsx has {sizes['index_bytes']:,} bytes: {sizes['bytes_per_entry']:.1f} per entry and its name "
            f"({sizes['name_bytes_per_entry']:.1f} of them the name). Loading includes every check of the format.",
            "Ratio: relative to index.fsx in the same round: median (lowest-highest). Added: resident memory of the "
            "process. Lookup: one name in one directory; absent: a name that is not there; path: three components.",
            "",
            markdown_table(header, rows),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_300_000)
    parser.add_argument("--queries", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--name", default="index-load", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        namespace = synthetic(arguments.files)
        files = {way: work / way for way in WAYS}
        index_bytes = namespace.write_index(files["index"])
        namespace.write_rows(files["objects"])
        with files["pickle"].open("wb") as file:
            pickle.dump(load_objects(str(files["objects"])), file, pickle.HIGHEST_PROTOCOL)
        write_queries(namespace, work / "queries", arguments.queries)
        entries = len(namespace.names)
        print(f"name space: {namespace.files:,} files in {namespace.directories:,} directories, {index_bytes:,} bytes")
        rounds = []
        for round_number in range(1, arguments.rounds + 1):
            for way, path in files.items():
                done = run([sys.executable, str(CHILD), way, str(path), str(work / "queries")], LOAD_S)
                figures = json.loads(done.stdout)
                rounds.append({"round": round_number, "way": way} | figures)
                print(
                    f"round {round_number}: {WAYS[way]:24} load {figures['load_s']:7.3f} s, added "
                    f"{figures['added_rss_bytes'] / 1e6:6.0f} MB, lookup {figures['lookup_ns']:5.0f} ns"
                )
        result = {
            "kind": "index_load",
            "machine": description,
            "namespace": {
                "files": namespace.files,
                "directories": namespace.directories,
                "index_bytes": index_bytes,
                "bytes_per_entry": index_bytes / entries,
                "name_bytes_per_entry": sum(map(len, namespace.names)) / entries,
            },
            "settings": {"rounds": arguments.rounds, "queries": arguments.queries},
            "summary": summarize(rounds),
            "rounds": rounds,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
