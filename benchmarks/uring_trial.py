"""What FUSE over io_uring would give: the same small file system behind threads on /dev/fuse, and behind rings.

Example: python benchmarks/uring_trial.py --rounds 10

The file system is uring_trial.c, not FanStore: nothing but the way of requests differs. Each figure has a fresh mount:
the round trip of a LOOKUP (stat of names that do not exist, one at a time, by a program that the kernel may move
between processors, and by one that is bound to the first), and a first pass over all files in random
order (LOOKUP and READ each) by 1 to 8 readers, with the bytes in the memory of the file system, and on the disk past
the page cache. Ways: threads-N, N threads on clones of /dev/fuse, as FanStore's engine has them; ring-N, a ring of N
entries and a thread for each processor; ring-plain-N. Root only: `enable_uring` of the fuse module is set for as long
as it takes to mount, and set back. Writes results/NAME.json.gz (every run) and NAME.md.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.command import BenchmarkError, run, started
from harness.reading import Readers
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import unmount, workspace

SOURCE = Path(__file__).parent / "uring_trial.c"
SWITCH = Path("/sys/module/fuse/parameters/enable_uring")
FILE_BYTES = 107_000
PAGE = 4096
STRIDE = (FILE_BYTES + PAGE - 1) // PAGE * PAGE
LIMIT_S = 60.0
WAYS = ("threads-8", "threads-2", "ring-8")


@dataclass(frozen=True)
class Case:
    """What is measured; 0 readers is the round trip of a LOOKUP. Bound: whoever asks stays on one processor."""

    store: str
    readers: int
    bound: bool = False

    @property
    def name(self) -> str:
        if self.readers == 0:
            return "round trip of LOOKUP" + (", bound" if self.bound else "")
        return f"first pass from {self.store}, {self.readers} reader{'s' if self.readers > 1 else ''}"


class Trial:
    """The compiled programs, the blob, and a mount at a time.

    Attributes:
        names: of all files.
    """

    def __init__(self, work: Path, files: int, stats: int) -> None:
        self.names = [f"{number:08d}" for number in range(files)]
        self._stats = stats
        self._work = work
        self._mountpoint = work / "mount"
        self._mountpoint.mkdir()
        self._readers = Readers(work, 1, LIMIT_S)
        self._program = work / "uring_trial"
        flags = ["-O2", "-std=gnu11", "-pthread", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
        run(["cc", *flags, str(SOURCE), "-o", str(self._program)], LIMIT_S)
        self._blob = work / "blob"
        with self._blob.open("wb") as blob:
            for _ in self.names:
                blob.write(os.urandom(STRIDE))
            os.fsync(blob.fileno())

    def _wait_ready(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not log.read_text().startswith("ready\n"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"the file system did not start: {log.read_text().strip() or 'nothing is said'}")
            time.sleep(0.005)

    @contextmanager
    def _mounted(self, way: str, store: str, counts: dict[str, Any]) -> Iterator[Path]:
        """A fresh mount; when it is gone, ``counts`` is what the file system has told of itself."""
        kind, _, count = way.rpartition("-")
        log = self._work / "log"
        argv = [str(self._program), "serve", kind, count, store, str(self._blob), str(len(self.names)), str(FILE_BYTES)]
        with ExitStack() as stack:
            with permitted() if kind.startswith("ring") else nullcontext():
                process = stack.enter_context(started([*argv, str(self._mountpoint)], log))
                stack.callback(unmount, self._mountpoint)
                self._wait_ready(process, log)
            yield self._mountpoint
            unmount(self._mountpoint)
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                raise BenchmarkError(f"the file system runs on after it was unmounted ({way}, {store})") from None
        if process.returncode != 0:
            raise BenchmarkError(f"the file system ended with code {process.returncode}: {log.read_text().strip()}")
        counts.update(json.loads(log.read_text().splitlines()[1]))

    def check(self, way: str, store: str) -> None:
        """Every byte of every file, once."""
        with self._mounted(way, store, {}) as root, self._blob.open("rb") as blob:
            for number, name in enumerate(self.names):
                blob.seek(number * STRIDE)
                if (root / name).read_bytes() != blob.read(FILE_BYTES):
                    raise BenchmarkError(f"{way}, {store}: {name} has other bytes than it should have")

    def measure(self, way: str, case: Case, seed: int) -> dict[str, Any]:
        """One run; BenchmarkError if requests went another way than they should."""
        counts: dict[str, Any] = {}
        load = os.getloadavg()[0]
        with self._mounted(way, case.store, counts) as root:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            begin_s, begin_busy_s = time.monotonic(), busy_s()
            if case.readers == 0:
                under = ["taskset", "--cpu-list", "0"] if case.bound else []
                argv = [*under, str(self._program), "stat", str(root), str(self._stats)]
                done = json.loads(run(argv, LIMIT_S).stdout)
                operations, seconds, latency_us = self._stats, done["seconds"], done["latency_us"]
            else:
                self._readers.count = case.readers
                order = random.Random(seed).sample(self.names, len(self.names))
                result = self._readers.read("c", root, order, len(order) * FILE_BYTES)
                operations, seconds, latency_us = result.files, result.seconds, result.latency_us
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            elapsed_s, all_busy_s = time.monotonic() - begin_s, busy_s() - begin_busy_s
        asked, other = ("ring", "device") if way.startswith("ring") else ("device", "ring")
        lookups, reads = operations, operations if case.readers else 0
        if (counts[asked]["lookup"], counts[asked]["read"]) != (lookups, reads) or counts[other]["lookup"] > 0:
            raise BenchmarkError(f"{way}: requests came in another way or number than they should: {counts}")
        client_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        own_s = counts["user_s"] + counts["system_s"] + client_s
        return {
            "way": way,
            "case": case.name,
            "per_s": operations / seconds,
            "mean_us": seconds / operations * 1e6,
            "latency_us": latency_us,
            "processors_us": own_s / operations * 1e6,
            "others_share": max(0.0, all_busy_s - own_s) / elapsed_s / len(os.sched_getaffinity(0)),
            "requests": counts,
            "load_average": load,
        }


def busy_s() -> float:
    """What all processors have worked since the machine started."""
    user, nice, system, _idle, _waiting, interrupts, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


@contextmanager
def permitted() -> Iterator[None]:
    """FUSE over io_uring may be asked for as long as the block; what was set before is set again in every case."""
    before = SWITCH.read_text().strip()
    SWITCH.write_text("Y")
    try:
        yield
    finally:
        SWITCH.write_text(before)


def check_possible() -> None:
    if os.geteuid() != 0:
        raise BenchmarkError("this needs root: it mounts, and sets enable_uring of the fuse module for a moment")
    if not SWITCH.exists():
        raise BenchmarkError(f"{SWITCH} is missing: the kernel has no FUSE over io_uring (Linux 6.14, FUSE_IO_URING)")
    disabled = Path("/proc/sys/kernel/io_uring_disabled")
    if disabled.exists() and disabled.read_text().strip() == "2":
        raise BenchmarkError(f"io_uring is disabled for everybody: {disabled}")


def summarize(runs: Sequence[dict[str, Any]], first: str) -> list[dict[str, Any]]:
    """Per case and way the spread of every figure, and of the speed relative to the first way in the same round."""
    base = {(item["round"], item["case"]): item for item in runs if item["way"] == first}
    summary = []
    for case in dict.fromkeys(item["case"] for item in runs):
        for way in dict.fromkeys(item["way"] for item in runs):
            items = [item for item in runs if (item["way"], item["case"]) == (way, case)]
            line: dict[str, Any] = {"case": case, "way": way}
            for figure in ("per_s", "mean_us", "processors_us"):
                line[figure] = asdict(Spread.of([item[figure] for item in items]))
            for figure in ("p50", "p99"):
                line[f"{figure}_us"] = asdict(Spread.of([item["latency_us"][figure] for item in items]))
            for figure in ("per_s", "processors_us"):
                ratios = [item[figure] / base[item["round"], case][figure] for item in items]
                line[f"ratio_{figure}"] = asdict(Spread.of(ratios))
            summary.append(line)
    return summary


def make_table(result: dict[str, Any]) -> str:
    settings = result["settings"]
    rows = [
        [
            item["case"],
            item["way"],
            f"{item['per_s']['median']:,.0f}",
            f"{item['p50_us']['median']:,.1f}",
            f"{item['p99_us']['median']:,.0f}",
            f"{item['processors_us']['median']:,.0f}",
            Spread(**item["ratio_per_s"]).ratio_text(),
            Spread(**item["ratio_processors_us"]).ratio_text(),
        ]
        for item in result["summary"]
    ]
    header = ["", "way", "per s", "p50 us", "p99 us", "cpu us", "speed ratio", "cpu ratio"]
    return "\n".join(
        [
            "# FUSE over io_uring, tried with a file system of its own",
            "",
            f"{settings['rounds']} rounds; {settings['files']:,} files of {FILE_BYTES:,} bytes, "
            f"{settings['stats']:,} LOOKUPs for a round trip. {machine.sentence(result['machine'])}.",
            record.load_sentence(result["runs"]),
            "Share of the processors that went to others, harness and interrupts included, in the median of the runs: "
            f"{statistics.median(item['others_share'] for item in result['runs']):.0%}.",
            "threads-N: N threads on clones of /dev/fuse; ring-N: a ring of N entries and a thread for each processor. "
            "Per s: files, or LOOKUPs; p50 and p99 of one; cpu: of the file system and the readers together, for one. "
            f"Ratios to {settings['ways'][0]} in the same round: median (lowest-highest).",
            "",
            markdown_table(header, rows),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--files", type=int, default=4000)
    parser.add_argument("--stats", type=int, default=20_000, help="LOOKUPs for one figure of the round trip")
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="the first is what the others are compared with")
    parser.add_argument("--stores", nargs="+", choices=("memory", "disk"), default=["memory", "disk"])
    parser.add_argument("--work-dir", type=Path, help="a disk")
    parser.add_argument("--name", default="uring-trial", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    check_possible()
    ways: list[str] = arguments.ways
    trips = [Case("memory", 0), Case("memory", 0, bound=True)]
    cases = [*trips, *(Case(store, count) for store in arguments.stores for count in arguments.readers)]
    runs: list[dict[str, Any]] = []
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        trial = Trial(work, arguments.files, arguments.stats)
        for way in ways:
            for store in arguments.stores:
                trial.check(way, store)
        for number in range(1, arguments.rounds + 1):
            for case in cases:
                shift = number % len(ways)
                for way in ways[shift:] + ways[:shift]:
                    item = {"round": number} | trial.measure(way, case, number)
                    print(
                        f"round {number}: {case.name:34} {way:12} {item['per_s']:9,.0f}/s, p50 "
                        f"{item['latency_us']['p50']:7,.1f} us, {item['processors_us']:6,.0f} us of the processors"
                    )
                    runs.append(item)
        result = {
            "kind": "uring_trial",
            "machine": description,
            "settings": {
                "rounds": arguments.rounds,
                "files": arguments.files,
                "stats": arguments.stats,
                "ways": ways,
            },
            "summary": summarize(runs, ways[0]),
            "runs": runs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
