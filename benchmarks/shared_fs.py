"""An epoch of a small-file dataset from a shared file system, from copies on local disks, and from FanStore.

Example: python benchmarks/shared_fs.py --rounds 3

The shared file system is throttled_fs.c with a profile of harness/throttled.py. Each of 1, 2 and 4 nodes has a client
of its own and the same number of readers in C; together they read every file once per epoch, in random order:
shared     straight from the shared file system
copied     every node first copies all files to its disk (cp, as many at a time as there are readers)
unpacked   every node first unpacks one tar file that lies on the shared file system
fanstore   fanstore-mount on each node; the prepared dataset lies on the shared file system, and is copied meanwhile
fanstore-staged   the same with --stage-first
Start-up is what comes before the first read. Epochs: first; second, with what the first left in memory; emptied, after
emptying all caches, as if the dataset were larger than memory. All nodes are on this machine, on one disk and its
cores. Ratios are to `shared` with as many nodes in the same round. Writes results/NAME.json.gz, NAME.md and NAME.png.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.caches import drop, drop_method, files_below
from harness.command import BenchmarkError, end_group, launcher, program, run
from harness.dataset import Dataset, DatasetSpec, make
from harness.reading import Readers
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.throttled import PROFILES, Throttled, build, throttled
from harness.workspace import workspace
from shared_node import EPOCHS, LIMIT_S, Spec, warm_servers

HERE = Path(__file__).parent
NODES = (1, 2, 4)
CONTENDERS = ("shared", "copied", "unpacked", "fanstore", "fanstore-staged")
#: Enough to share them out evenly.
PARTITIONS = 8
#: Small against the dataset: what an epoch finds in memory is what the kernel keeps, in all contenders.
FANSTORE_CACHE = "32MiB"


class Job:
    """One contender on so many nodes, in a directory of its own, on a shared file system that was just mounted.

    Attributes:
        directory: of this job; holds the clients, the copies, the mounts and what the nodes report.
        served: the directory that the shared file system serves: ``tree``, ``tree.tar`` and ``data.fan``.
    """

    def __init__(self, contender: str, nodes: int, readers: int, directory: Path, served: Path, shared: Throttled):
        self._contender = contender
        self._nodes = nodes
        self._readers = readers
        self.directory = directory
        self.served = served
        self._shared = shared

    def needs(self) -> Path:
        """What the servers are asked for."""
        name = {"shared": "tree", "copied": "tree", "unpacked": "tree.tar"}.get(self._contender, "data.fan")
        return self.served / name

    def _root(self) -> str:
        place = {"shared": "client-{rank}/tree", "copied": "copy-{rank}/tree", "unpacked": "copy-{rank}"}
        return str(self.directory / place.get(self._contender, "mount-{rank}"))

    def run(self, orders: list[list[str]], reader: Path) -> dict[str, Any]:
        """Start-up and epochs; raises BenchmarkError if a node fails."""
        spec = self.directory / "spec"
        server = str(self.needs()) if self._contender == "shared" else ""
        Spec(self._root(), server, str(reader), self._readers, self._nodes, orders).write(spec)
        node = [sys.executable, str(HERE / "shared_node.py"), str(spec)]
        begin_s = time.monotonic()
        copied_s = 0.0
        if self._contender.startswith("fanstore"):
            run([*self._mounter(), "--", *node], LIMIT_S)
        else:
            if self._contender != "shared":
                self._copy()
                copied_s = time.monotonic() - begin_s
            run_together([[*node, str(rank)] for rank in range(self._nodes)])
        lines = [
            [json.loads(line) for line in (self.directory / f"figures-{rank}").read_text().splitlines()]
            for rank in range(self._nodes)
        ]
        started_s = max(line[0]["started_s"] for line in lines) - begin_s
        startup_s = started_s if self._contender.startswith("fanstore") else copied_s
        epochs = [together([line[1 + number] for line in lines]) for number in range(len(EPOCHS))]
        return {"startup_s": startup_s, "epochs": epochs, "asked": asdict(self._shared.counts())}

    def _mounter(self) -> list[str]:
        launch = launcher(self._nodes) if self._nodes > 1 else []  # one node needs none
        mounter = [program("fanstore-mount"), str(self._shared.clients[0] / "data.fan"), self._root()]
        options = ["--local", str(self.directory / "local-{rank}"), "--cache", FANSTORE_CACHE]
        staged = ["--stage-first"] if self._contender == "fanstore-staged" else []
        return [*launch, *mounter, *options, "--engine", "native", *staged]

    def _copy(self) -> None:
        """On all nodes at once; each through its own client to its own directory."""
        commands = []
        for rank, client in enumerate(self._shared.clients):
            copy = self.directory / f"copy-{rank}"
            copy.mkdir()
            if self._contender == "unpacked":
                commands.append([program("tar"), "-xf", str(client / "tree.tar"), "-C", str(copy)])
            else:
                folders = f"find tree -type d -print0 | (cd '{copy}' && xargs -0 mkdir -p)"
                files = f"find tree -type f -print0 | xargs -0 -n 32 -P {self._readers} cp --parents -t '{copy}'"
                commands.append(["sh", "-c", f"cd '{client}' && {folders} && {files}"])
        run_together(commands)


def run_together(commands: Sequence[Sequence[str]]) -> None:
    """Run programs at once; BenchmarkError when one fails or they take too long. Their groups are gone at the end."""
    processes = []
    try:
        for argv in commands:
            processes.append(
                subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
            )
        deadline = time.monotonic() + LIMIT_S
        for process in processes:
            try:
                _, errors = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise BenchmarkError(f"{commands[0][0]} takes longer than {LIMIT_S:.0f} s") from None
            if process.returncode != 0:
                raise BenchmarkError(f"{commands[0][0]} failed: {errors.decode(errors='replace').strip()[-500:]}")
    finally:
        for process in processes:
            if process.returncode is None:
                end_group(process)


def together(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """One epoch of all nodes: it has ended when the slowest has."""
    seconds = max(line["seconds"] for line in lines)
    files = sum(line["files"] for line in lines)
    sources: dict[str, int] = {}
    for line in lines:
        for name, count in line["sources"].items():
            sources[name] = sources.get(name, 0) + count
    return {
        "epoch": lines[0]["epoch"],
        "files": files,
        "bytes": sum(line["bytes"] for line in lines),
        "seconds": seconds,
        "files_per_s": files / seconds,
        "p50_us": max(line["latency_us"]["p50"] for line in lines),
        "p99_us": max(line["latency_us"]["p99"] for line in lines),
        "sources": sources,
        "busy": lines[0]["busy"],
    }


def orders_of(dataset: Dataset, round_number: int) -> list[list[str]]:
    """The same for every contender of a round, another one in each epoch."""
    chance = random.Random(round_number)
    orders = []
    for _ in EPOCHS:
        order = list(dataset.paths)
        chance.shuffle(order)
        orders.append(order)
    return orders


def measure(
    place: tuple[str, int], arguments: argparse.Namespace, served: Path, work: Path, orders: list[list[str]]
) -> dict[str, Any]:
    """One contender on so many nodes, on a fresh mount of the shared file system; nothing of it is left."""
    contender, nodes = place
    directory = work / "job"
    directory.mkdir()
    try:
        with throttled(work / "throttled_fs", PROFILES[arguments.profile], served, directory, nodes) as shared:
            job = Job(contender, nodes, arguments.readers, directory, served, shared)
            drop(files_below(served))
            time.sleep(arguments.settle)
            warm_servers(job.needs())
            return job.run(orders, work / "reader")
    finally:
        shutil.rmtree(directory)


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per contender and number of nodes; each figure's ratio is to `shared` in the same round."""

    def figures(item: dict[str, Any]) -> dict[str, float]:
        """Larger is better in all of them."""
        rates = {epoch["epoch"]: epoch["files_per_s"] for epoch in item["epochs"]}
        first = item["epochs"][0]
        return rates | {"with start-up": first["files"] / (item["startup_s"] + first["seconds"])}

    shared = {(item["round"], item["nodes"]): figures(item) for item in runs if item["contender"] == "shared"}
    summary = []
    for nodes in sorted({item["nodes"] for item in runs}):
        for contender in CONTENDERS:
            items = [item for item in runs if (item["contender"], item["nodes"]) == (contender, nodes)]
            if not items:
                continue
            line: dict[str, Any] = {"contender": contender, "nodes": nodes, "rounds": len(items)}
            line["busy"] = Spread.of([item["epochs"][-1]["busy"] for item in items]).median
            line["startup_s"] = asdict(Spread.of([item["startup_s"] for item in items]))
            line["asked"] = {
                name: Spread.of([item["asked"][name] for item in items]).median for name in items[0]["asked"]
            }
            for name in figures(items[0]):
                values = [figures(item)[name] for item in items]
                line[name] = {"files_per_s": asdict(Spread.of(values))}
                ratios = [
                    value / shared[item["round"], nodes][name]
                    for value, item in zip(values, items, strict=True)
                    if (item["round"], nodes) in shared
                ]
                if ratios:
                    line[name] |= {"ratios": ratios, "ratio_to_shared": asdict(Spread.of(ratios))}
            summary.append(line)
    return summary


def cell(figure: dict[str, Any]) -> str:
    rate = f"{figure['files_per_s']['median']:,.0f}"
    return f"{rate}, {Spread(**figure['ratio_to_shared']).ratio_text()}" if "ratios" in figure else rate


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    settings = result["settings"]
    lines = [
        "# An epoch from a shared file system, from local copies, and from FanStore",
        "",
        f"{result['dataset']['description']}. {settings['rounds']} interleaved rounds, {settings['readers']} readers "
        f"in C on each node. {machine.sentence(result['machine'])}.",
        record.load_sentence(result["runs"]),
        f"The shared file system is throttled_fs.c, profile {settings['profile_sentence']}; its servers have "
        "everything in memory, and its clients keep names, attributes and data that they have read.",
        "All nodes are on this machine: they share its cores and its disk, where those of a cluster have their own.",
        "",
        "Files/s of all nodes together, and the ratio to `shared` in the same round: median (lowest-highest). First: "
        "the first epoch. With start-up: the same, and the time before it counts as well. Second: with what is in "
        f"memory then. Emptied: all caches emptied before ({settings['emptied_by']}); busy: the part of this "
        "machine's processors that was at work then. Asked: what the shared file system was asked in the whole job.",
    ]
    for nodes in sorted({item["nodes"] for item in result["summary"]}):
        rows = []
        for item in result["summary"]:
            if item["nodes"] != nodes:
                continue
            asked = item["asked"]
            data = f"{asked['reads']:,.0f} reads, {asked['bytes'] / 1e6:,.0f} MB"
            rows.append(
                [
                    item["contender"],
                    f"{item['startup_s']['median']:.2f}",
                    cell(item["with start-up"]),
                    *(cell(item[epoch]) for epoch in EPOCHS),
                    f"{item['busy']:.0%}",
                    f"{asked['metadata_operations']:,.0f} + {data}",
                ]
            )
        head = ["", "start-up s", "with start-up", "first", "second", "emptied", "busy", "asked: metadata operations"]
        title = f"## {nodes} node{'s' if nodes > 1 else ''}, {nodes * settings['readers']} readers"
        lines += ["", title, "", markdown_table(head, rows)]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=4000)
    parser.add_argument("--mean-bytes", type=int, default=107_000, help="as ImageNet's JPEGs")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--profile", choices=PROFILES, default="lustre", help="of the shared file system")
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    parser.add_argument("--readers", type=int, default=4, help="on each node, as workers of a data loader")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before each job, for the disk to calm down")
    parser.add_argument("--work-dir", type=Path, help="the disk on which everything lies")
    parser.add_argument("--name", default="shared-fs", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    profile = PROFILES[arguments.profile]
    runs: list[dict[str, Any]] = []
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        build(work)
        Readers(work, arguments.readers, LIMIT_S)  # compiles the reader
        served = work / "served"
        served.mkdir()
        dataset = make(served / "tree", DatasetSpec(arguments.files, arguments.mean_bytes, arguments.classes))
        run([program("tar"), "-cf", str(served / "tree.tar"), "-C", str(served / "tree"), "."], LIMIT_S)
        prep = [program("fanstore-prep"), str(served / "tree"), str(served / "data.fan")]
        run([*prep, "--partitions", str(PARTITIONS), "--codec", "none", "--quiet"], LIMIT_S)
        for number in range(1, arguments.rounds + 1):
            turn = [(contender, nodes) for contender in arguments.contenders for nodes in arguments.nodes]
            random.Random(number).shuffle(turn)
            orders = orders_of(dataset, number)
            for contender, nodes in turn:
                load = os.getloadavg()[0]
                result = measure((contender, nodes), arguments, served, work, orders)
                if any(epoch["bytes"] != dataset.total_bytes for epoch in result["epochs"]):
                    raise BenchmarkError(f"{contender} gave other bytes than the source")
                place = {"round": number, "contender": contender, "nodes": nodes, "load_average": load}
                runs.append(place | result)
                rates = ", ".join(f"{epoch['epoch']} {epoch['files_per_s']:,.0f}" for epoch in result["epochs"])
                print(
                    f"round {number}: {contender:15} {nodes} nodes: "
                    f"start-up {result['startup_s']:5.2f} s, files/s: {rates}",
                    flush=True,
                )
        result = {
            "kind": "shared_fs",
            "machine": description,
            "dataset": {"description": dataset.description, "files": len(dataset.paths), "bytes": dataset.total_bytes},
            "settings": {
                "rounds": arguments.rounds,
                "readers": arguments.readers,
                "profile": asdict(profile),
                "profile_sentence": profile.sentence(),
                "emptied_by": drop_method(),
                "fanstore_cache": FANSTORE_CACHE,
                "partitions": PARTITIONS,
            },
            "summary": summarize(runs),
            "runs": runs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
