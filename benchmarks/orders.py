"""What it gains to know the order of reads, and what it costs not to know it: the same reader with and without.

Example: python benchmarks/orders.py --rounds 2

Remote: two nodes on this machine; a reader in Python on one reads, in random orders, all files that only the other has,
and pauses after each as for a GPU. Several epochs; each file leaves the page cache once it was read (the time of that
does not count). Compared: ``--order off``; the orders stated in .fanstore/order; ``auto``, which is told nothing and
cannot recognise them. The figure is the time of it all over that of the pauses alone, measured in the same round.

Here: one node, its partitions just staged and in the page cache, one epoch, the first. One reader that computes after
each file, or two that do not; from ext4, where the files lie in the page cache, and from the mount with
``--order off``, with the order stated, and with ``auto``. The figure is the speed relative to ext4.

A new job for each. Writes results/NAME.json.gz (every run) and NAME.md.
"""

import argparse
import functools
import multiprocessing
import os
import random
import shutil
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import dataset, machine, record
from harness.caches import back_memory, files_below
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the job is that of the tests
from jobs import Job
from mounting import prepare

REMOTE, COMPUTING, TWO = "remote", "here, computing", "here, two readers"
#: Of each case; the first is what the others are compared with.
WAYS = {
    REMOTE: ("off", "stated", "auto"),
    COMPUTING: ("ext4", "off", "stated", "auto"),
    TWO: ("ext4", "off", "stated", "auto"),
}
#: Epochs of the remote case: long enough for a search in vain to begin and to go on.
EPOCHS = 4
#: Seconds until what was stated is known, and the first window is there.
STATED_S = 0.5


def read_all(root: Path, names: Sequence[str], pause_s: float, compute_s: float, forget: bool) -> tuple[float, float]:
    """The time of it all, and that of reading."""
    waited = forgetting = 0.0
    begin = time.perf_counter()
    for name in names:
        start = time.perf_counter()
        with open(root / name, "rb", buffering=0) as file:
            file.read()
        end = time.perf_counter()
        waited += end - start
        if forget:
            with open(root / name, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            forgetting += time.perf_counter() - end
        if pause_s:
            time.sleep(pause_s)
        while compute_s and time.perf_counter() < end + compute_s:
            pass
    return time.perf_counter() - begin - forgetting, waited


def read_by(readers: int, root: Path, names: Sequence[str], **how: Any) -> tuple[float, float]:
    """By so many processes, each every so manieth file: the time of the slowest, and that of reading, per process."""
    if readers == 1:
        return read_all(root, names, **how)
    with ProcessPoolExecutor(readers, multiprocessing.get_context("fork")) as pool:
        parts = [names[number::readers] for number in range(readers)]
        list(pool.map(len, parts))  # the processes are there
        results = list(pool.map(functools.partial(read_part, root, how), parts))
    return max(total for total, _ in results), sum(waited for _, waited in results) / readers


def read_part(root: Path, how: dict[str, Any], names: Sequence[str]) -> tuple[float, float]:
    return read_all(root, names, **how)


def pauses_alone(count: int, pause_s: float) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        time.sleep(pause_s)
    return time.perf_counter() - begin


def names_in(prepared: Path, partitions: Sequence[int]) -> list[str]:
    names: list[str] = []
    for path in (sorted(prepared.glob("part-*.tar"))[number] for number in partitions):
        with tarfile.open(path) as tar:
            names += [member.name for member in tar if member.isfile()]
    return names


def measure(
    case: str, way: str, source: Path, prepared: Path, directory: Path, settings: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """One job, one epoch, or several of the remote case."""
    directory.mkdir()
    remote = case == REMOTE
    readers = 2 if case == TWO else 1
    how: dict[str, Any] = {
        "pause_s": settings.pause_us / 1e6 if remote else 0.0,
        "compute_s": settings.compute_us / 1e6 if case == COMPUTING else 0.0,
        "forget": remote,
    }
    if way == "ext4":
        names = shuffled(names_below(source), 1, seed)
        for name in names:
            (source / name).read_bytes()
        total_s, waited_s = read_by(readers, source, names, **how)
        return {"files": len(names), "total_s": total_s, "waited_s": waited_s, "pauses_s": None, "order": None}
    options = ["--stage-first", "--order", "off" if way == "off" else "auto"]
    job = Job(prepared, directory, 2 if remote else 1, options, local=True)
    try:
        job.wait_up()
        local = job.nodes(0)[1 if remote else 0]["partitions"]["local"]
        names = shuffled(names_in(prepared, local), EPOCHS if remote else 1, seed)
        if way == "stated":
            (job.mount(0) / ".fanstore" / "order").write_text("".join(f"{name}\n" for name in names))
            time.sleep(STATED_S)
        back_memory()
        total_s, waited_s = read_by(readers, job.mount(0), names, **how)
        order = job.statistics(0).get("order")
        pauses_s = pauses_alone(len(names), how["pause_s"]) if remote else None
        job.stop()
    finally:
        job.destroy()
    return {"files": len(names), "total_s": total_s, "waited_s": waited_s, "pauses_s": pauses_s, "order": order}


def names_below(source: Path) -> list[str]:
    return [str(path.relative_to(source)) for path in files_below(source)]


def shuffled(names: Sequence[str], epochs: int, seed: int) -> list[str]:
    numbers = random.Random(seed)
    return [name for _ in range(epochs) for name in numbers.sample(sorted(names), len(names))]


def summarize(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    base = {(item["case"], item["round"]): item for item in runs if item["way"] == WAYS[item["case"]][0]}
    summary = []
    for case, ways in WAYS.items():
        for way in ways:
            items = [item for item in runs if (item["case"], item["way"]) == (case, way)]
            line: dict[str, Any] = {"case": case, "way": way, "files": items[0]["files"]}
            readers = 2 if case == TWO else 1
            line["wait_us"] = asdict(Spread.of([item["waited_s"] / item["files"] * readers * 1e6 for item in items]))
            speeds = [base[case, item["round"]]["total_s"] / item["total_s"] for item in items]
            line["speed"] = asdict(Spread.of(speeds))
            if case == REMOTE:
                line["over pauses"] = asdict(Spread.of([item["total_s"] / item["pauses_s"] for item in items]))
            summary.append(line)
    return summary


def make_table(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{item['case']}, {item['way']}",
            f"{item['files']:,}",
            f"{item['wait_us']['median']:,.0f}",
            Spread(**item["over pauses"]).ratio_text() if "over pauses" in item else "-",
            Spread(**item["speed"]).ratio_text(),
        ]
        for item in result["summary"]
    ]
    settings = result["settings"]
    return "\n".join(
        [
            "# Reads with and without their order known",
            "",
            f"{settings['rounds']} rounds, {result['dataset']}; readers in Python; remote, pauses of "
            f"{settings['pause_us']:g} us; computing, {settings['compute_us']:g} us per file. "
            f"{machine.sentence(result['machine'])}.",
            record.load_sentence(result["runs"]),
            "Waiting: of the reader, for open and read of one file. Ratios: median (lowest-highest).",
            "",
            "Speed: relative to the first of its kind, off or ext4, in the same round.",
            "",
            markdown_table(["", "files", "waiting us", "time over its pauses", "speed"], rows),
        ]
    )


def benchmark(arguments: argparse.Namespace) -> None:
    runs: list[dict[str, Any]] = []
    with workspace(arguments.work_dir) as work:
        made = dataset.make(work / "source", dataset.DatasetSpec(arguments.files, arguments.mean_bytes, 20))
        prepared = prepare(made.root, work / "d.fan", "--codec", "none", "--partitions", "8")
        for number in range(1, arguments.rounds + 1):
            for case, ways in WAYS.items():
                for way in ways if number % 2 else ways[::-1]:
                    # A seed that no shuffle of a framework has: this order is not to be recognised.
                    seed = (0x5EED << 48) + number
                    figures = measure(case, way, made.root, prepared, work / "job", arguments, seed)
                    figures["load_average"] = os.getloadavg()[0]
                    shutil.rmtree(work / "job")
                    print(f"round {number}: {case}, {way}: {figures}", flush=True)
                    runs.append({"round": number, "case": case, "way": way} | figures)
        result = {
            "kind": "orders",
            "machine": machine.describe(work),
            "settings": {name: getattr(arguments, name) for name in ("rounds", "pause_us", "compute_us")},
            "dataset": made.description,
            "summary": summarize(runs),
            "runs": runs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--files", type=int, default=6000)
    parser.add_argument("--mean-bytes", type=int, default=107_000)
    parser.add_argument("--pause-us", type=float, default=300.0, help="after each file, in the case remote")
    parser.add_argument("--compute-us", type=float, default=100.0, help="per file, in the case computing")
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--name", default="orders", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return run_script(lambda: benchmark(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
