"""How long it takes until a job has all its copies again after a death, and what readers notice meanwhile.

Example: python benchmarks/restore_copies.py --rounds 3

Ranks of one job on this machine, two copies of each partition. The C reader (reader.c) reads random files through the
mounts of two of them, past the kernel's cache, in short passes; then another rank is killed. Compared, one after the
other in every round: nothing is copied again (a job that has lost a node, read for --seconds); copied with one part in
so many of the time (PARTS of dataset/restoring.py), where passes that lie within the copying count. Writes
results/NAME.json.gz (every run) and NAME.md.
"""

import argparse
import math
import os
import random
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.command import BenchmarkError, program, run
from harness.dataset import Dataset, DatasetSpec, make
from harness.reading import Readers, ReadResult
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the job is that of the tests
from jobs import ULFM, Job

RANKS, READING, VICTIM = 4, (0, 2), 1
LIMIT_S = 300.0
DIED, BEGUN, ENDED = rf"rank {VICTIM} on \S+ has died", "are copied again, to", "all partitions have 2 copies again"
#: Instead of a number of parts: nothing is copied.
NEVER = "never"


def mount_with(parts: str, argv: list[str]) -> None:
    """In the supervisor of a daemon, which forks: fanstore-mount, with another share for copying than its own."""
    from fanstore.cli.supervisor import main
    from fanstore.dataset import restoring
    from fanstore.job import copies

    restoring.PARTS = 0.0 if parts == NEVER else float(parts)
    if parts == NEVER:
        copies.SETTLE_S = math.inf
    sys.argv = argv
    sys.exit(main())


class Passes(threading.Thread):
    """Reads random files of one mount, pass after pass, until it is told to end.

    Attributes:
        done: of each pass when it began and ended, by time.monotonic(), and what it found.
    """

    def __init__(self, mount: Path, dataset: Dataset, readers: Readers, files: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.done: list[tuple[float, float, ReadResult]] = []
        self.error: BenchmarkError | None = None
        self._mount = mount
        self._dataset = dataset
        self._readers = readers
        self._files = files
        self._chance = random.Random(seed)
        self._ending = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                order = self._chance.sample(self._dataset.paths, self._files)
                size = sum((self._dataset.root / path).stat().st_size for path in order)
                for path in order:  # of this pass and none else: so that it does not find what the last one has left
                    fd = os.open(self._mount / path, os.O_RDONLY)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(fd)
                begun_s = time.monotonic()
                result = self._readers.read("c", self._mount, order, size)
                self.done.append((begun_s, time.monotonic(), result))
        except BenchmarkError as error:
            self.error = error

    def end(self) -> None:
        self._ending.set()
        self.join(LIMIT_S)
        if self.error is not None:
            raise self.error

    def within(self, begin_s: float, end_s: float) -> list[ReadResult]:
        return [result for begun_s, ended_s, result in self.done if begun_s >= begin_s and ended_s <= end_s]


def wait_log(job: Job, rank: int, text: str) -> float:
    """When a line appeared in the log of a rank."""
    deadline = time.monotonic() + LIMIT_S
    while text not in job.log_text(rank):
        if time.monotonic() > deadline:
            raise BenchmarkError(f"'{text}' did not appear in the log of rank {rank}: {job.log_text(rank)}")
        time.sleep(0.005)
    return time.monotonic()


def summary(passes: list[ReadResult]) -> dict[str, float]:
    """Of several passes; percentiles are medians over the passes, as the reader gives no more."""
    if not passes:
        raise BenchmarkError("no pass lies within the copying: take more files, or fewer of them in a pass")
    files, seconds = sum(item.files for item in passes), sum(item.seconds for item in passes)
    middle = {name: Spread.of([item.latency_us[name] for item in passes]).median for name in ("p50", "p90", "p99")}
    return {"passes": len(passes), "files_per_s": files / seconds, **{f"{name}_us": middle[name] for name in middle}}


def measure(parts: str, dataset: Dataset, work: Path, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One job."""
    directory = work / "job"
    directory.mkdir()
    options = ["--replicas", "2", "--stage-first", "--cache", "8MiB"]
    wrapper = [sys.executable, __file__, "--mount-with", parts]
    job = Job(work / "d.fan", directory, RANKS, options, local=True, launcher=ULFM, wrapper=wrapper)
    running: list[Passes] = []
    try:
        job.wait_up()
        for rank in READING:
            (work / f"reader-{rank}").mkdir(exist_ok=True)
            readers = Readers(work / f"reader-{rank}", arguments.readers, LIMIT_S)
            running.append(Passes(job.mount(rank), dataset, readers, arguments.pass_files, seed + rank))
        time.sleep(arguments.seconds)
        killed_s = time.monotonic()
        job.announced.append(DIED)
        job.kill(VICTIM)
        if parts == NEVER:
            begin_s = wait_log(job, READING[0], "has died")
            time.sleep(arguments.seconds)
            end_s = time.monotonic()
        else:
            begin_s = wait_log(job, READING[0], BEGUN)
            end_s = wait_log(job, READING[0], ENDED)
        for passes in running:
            passes.end()
        copies = [job.statistics(rank)["copies"] for rank in job.living()]
        shared = sum(job.reads(rank, "shared") for rank in job.living())
        job.stop()
    finally:
        for passes in running:
            passes._ending.set()
        job.destroy()
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()
    bytes_ = sum(item["done_bytes"] for item in copies)
    if shared or sum(item["shared_bytes"] for item in copies):
        raise BenchmarkError("something was read from the shared file system")
    return {
        "parts": parts,
        "before": summary([result for passes in running for result in passes.within(0, killed_s)]),
        "meanwhile": summary([result for passes in running for result in passes.within(begin_s, end_s)]),
        "copied_bytes": bytes_,
        "copying_s": None if parts == NEVER else end_s - begin_s,
        "since_death_s": None if parts == NEVER else end_s - killed_s,
        "load_average": os.getloadavg()[0],
    }


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per share: speed and latency of readers, and the speed relative to that before the death, in the same job."""
    lines = []
    for parts in dict.fromkeys(item["parts"] for item in runs):
        items = [item for item in runs if item["parts"] == parts]
        line: dict[str, Any] = {"parts": parts}
        for name in ("files_per_s", "p50_us", "p99_us"):
            line[name] = asdict(Spread.of([item["meanwhile"][name] for item in items]))
        line["before_files_per_s"] = asdict(Spread.of([item["before"]["files_per_s"] for item in items]))
        line["ratio"] = asdict(
            Spread.of([item["meanwhile"]["files_per_s"] / item["before"]["files_per_s"] for item in items])
        )
        if parts != NEVER:
            line["copying_s"] = asdict(Spread.of([item["copying_s"] for item in items]))
            line["since_death_s"] = asdict(Spread.of([item["since_death_s"] for item in items]))
            line["mb_per_s"] = asdict(Spread.of([item["copied_bytes"] / item["copying_s"] / 1e6 for item in items]))
        lines.append(line)
    return lines


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    header = (
        "copied again",
        "copying s",
        "since death s",
        "MB/s",
        "before",
        "files/s",
        "p50 us",
        "p99 us",
        "ratio",
    )
    rows = [
        [
            {NEVER: "not at all", "0": "without pause"}.get(item["parts"], f"1 part of {item['parts']}"),
            *[f"{item[key]['median']:,.1f}" if key in item else "-" for key in ("copying_s", "since_death_s")],
            f"{item['mb_per_s']['median']:,.0f}" if "mb_per_s" in item else "-",
            *[f"{item[key]['median']:,.0f}" for key in ("before_files_per_s", "files_per_s", "p50_us", "p99_us")],
            Spread(**item["ratio"]).ratio_text(),
        ]
        for item in result["summary"]
    ]
    settings = result["settings"]
    return "\n".join(
        [
            "# Copies are restored after a death, and readers meanwhile",
            "",
            f"{settings['rounds']} rounds. {result['dataset']}; {RANKS} ranks on this machine, two copies of each; one "
            f"is killed, and {result['runs'][-1]['copied_bytes'] / 1e6:,.0f} MB are copied again to others. "
            f"{settings['readers']} readers on each of {len(READING)} mounts, whole files in random order. "
            f"{machine.sentence(result['machine'])}.",
            record.load_sentence(result["runs"]),
            "Copying: from its plan, one second after the death, to the last copy on any node. Files/s and latencies: "
            "of readers in that time; where nothing is copied, after the death. Ratio: to files/s before the death, in "
            "the same job: median (lowest-highest). Copying has one part in so many of the time of the node that gives "
            "(PARTS of dataset/restoring.py, which is 4), here for two nodes at once.",
            "",
            markdown_table(header, rows),
        ]
    )


def benchmark(arguments: argparse.Namespace) -> None:
    with workspace(arguments.work_dir) as work:
        spec = DatasetSpec(arguments.files, arguments.mean_bytes, 20)
        dataset = make(work / "tree", spec)
        argv = [program("fanstore-prep"), str(work / "tree"), str(work / "d.fan"), "--partitions", "32"]
        run([*argv, "--codec", "none"], LIMIT_S)
        runs = []
        for number in range(arguments.rounds):
            for parts in (NEVER, *arguments.parts):
                runs.append({"round": number, **measure(parts, dataset, work, arguments, 1000 * number)})
                print(f"round {number}, parts {parts}: {runs[-1]}", flush=True)
        names = ("rounds", "files", "mean_bytes", "readers", "pass_files", "seconds", "parts")
        result = {
            "kind": "restore_copies",
            "machine": machine.describe(work),
            "settings": {name: getattr(arguments, name) for name in names},
            "dataset": str(spec),
            "summary": summarize(runs),
            "runs": runs,
        }
    record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


def main() -> int:
    if sys.argv[1:2] == ["--mount-with"]:
        mount_with(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=12_000)
    parser.add_argument("--mean-bytes", type=int, default=109_568)
    parser.add_argument("--readers", type=int, default=2, help="threads for each mount")
    parser.add_argument("--pass-files", type=int, default=100, help="that are read in one pass")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="to read before the death, and after it if nothing is copied"
    )
    parser.add_argument("--parts", nargs="+", default=["4", "2", "0"], help="to be compared; 0 for no pause")
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--name", default="restore-copies", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return run_script(lambda: benchmark(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
