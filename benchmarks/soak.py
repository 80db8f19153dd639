"""A soak: ranks of one job read random files on all their mounts for minutes while one is killed and one is stopped.

Example: python benchmarks/soak.py --seconds 120

Every read is compared with its source, past the kernel's cache and with a small memory cache, so that reads reach the
other nodes. After a quarter of the time the last rank is killed (SIGKILL, as a crash of its node); the one before it is
stopped at 45 % and continued at 60 %. No read may fail or differ, but those on the mount of the killed daemon, which
are ended before; no daemon's own memory may grow. Writes results/NAME.json.gz and NAME.md; the exit code says whether
all was well.
"""

import argparse
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.command import BenchmarkError
from harness.workspace import workspace

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the job and the load are those of the tests
from jobs import ULFM, Job
from load import Load, Source, make_files
from mounting import prepare

KILL_AT, STOP_AT, CONTINUE_AT = 0.25, 0.45, 0.60
#: What a daemon's own memory may grow by between the first fifth of the run, when all caches and pools are filled, and
#: its end: allocators take some from each new thread.
GROWTH_BYTES = 24 << 20
INTERVAL_S = 0.5
#: For the last signs of life of a node that a busy machine has kept from answering in time.
SETTLE_S = 30.0


def memory(pid: int) -> dict[str, int]:
    """Resident bytes: all, and the process's own (without the partitions that it has mapped)."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    return {"rss": int(fields["VmRSS"]) << 10, "own": int(fields["RssAnon"]) << 10}


class Soak:
    """One run.

    Attributes:
        samples: per look the time, reads so far, and memory by rank; events: what was done to the job, and when.
        loads: by rank.
    """

    def __init__(self, job: Job, source: Source, seconds: float, threads: int) -> None:
        self.job = job
        self.seconds = seconds
        self.killed, self.stopped = job.size - 1, job.size - 2
        self.samples: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.loads = [Load(source, [job.mount(rank)], threads, seed=1000 * rank) for rank in range(job.size)]
        self._start_s = time.monotonic()

    def run(self) -> None:
        steps = [(KILL_AT, self._kill), (STOP_AT, self._stop), (CONTINUE_AT, self._continue)]
        while (elapsed_s := time.monotonic() - self._start_s) < self.seconds:
            if steps and elapsed_s >= steps[0][0] * self.seconds:
                steps.pop(0)[1]()
            self._look()
            time.sleep(INTERVAL_S)
        for rank in self.job.living():
            self.loads[rank].stop()
        self._wait_until_used()

    def _wait_until_used(self) -> None:
        """Until everybody uses the stopped rank again, or a while: who did not hear of it asks now and then."""
        others = [rank for rank in self.job.living() if rank != self.stopped]
        end_s = time.monotonic() + SETTLE_S
        while time.monotonic() < end_s and any(
            self.job.peer(rank, self.stopped)["state"] != "alive" for rank in others
        ):
            time.sleep(INTERVAL_S)

    def _kill(self) -> None:
        self.loads[self.killed].stop()
        self._event("killed", self.killed)
        self.job.kill(self.killed)

    def _stop(self) -> None:
        self._event("stopped", self.stopped)
        self.job.kill(self.stopped, signal.SIGSTOP)

    def _continue(self) -> None:
        self._event("continued", self.stopped)
        self.job.kill(self.stopped, signal.SIGCONT)

    def _event(self, what: str, rank: int) -> None:
        at_s = round(time.monotonic() - self._start_s, 2)
        self.events.append({"at_s": at_s, "what": what, "rank": rank, "reads": [load.reads for load in self.loads]})
        print(f"{at_s:7.1f} s: rank {rank} is {what}")

    def _look(self) -> None:
        self.samples.append(
            {
                "at_s": round(time.monotonic() - self._start_s, 2),
                "reads": [load.reads for load in self.loads],
                "memory": {str(rank): memory(self.job.pids[rank]) for rank in self.job.living()},
            }
        )

    def growth(self) -> dict[str, int]:
        """By rank that lives: growth of its own memory, from the end of the first fifth to the last tenth (medians)."""
        count = len(self.samples)

        def own(rank: int, begin: float, end: float) -> int:
            part = self.samples[int(begin * count) : max(int(end * count), int(begin * count) + 1)]
            values = sorted(sample["memory"][str(rank)]["own"] for sample in part)
            return int(values[len(values) // 2])

        return {str(rank): own(rank, 0.9, 1.0) - own(rank, 0.15, 0.25) for rank in self.job.living()}

    def result(self) -> dict[str, Any]:
        living = self.job.living()
        statistics = {str(rank): self.job.statistics(rank) for rank in living}
        return {
            "reads": [load.reads for load in self.loads],
            "bytes": [load.bytes for load in self.loads],
            "slowest_s": [round(load.slowest_s, 3) for load in self.loads],
            "failures": [failure for load in self.loads for failure in load.failures],
            "own_memory_growth_bytes": self.growth(),
            "peers": {rank: values["peers"]["nodes"] for rank, values in statistics.items()},
            "sources": {rank: values["sources"] for rank, values in statistics.items()},
            "events": self.events,
            "samples": self.samples,
        }


def problems(result: dict[str, Any], soak: Soak) -> list[str]:
    """What must not be, in words."""
    found = list(result["failures"][:20])
    found += [
        f"own memory of rank {rank} grew by {growth:,} bytes"
        for rank, growth in result["own_memory_growth_bytes"].items()
        if growth > GROWTH_BYTES
    ]
    continued = next(event for event in soak.events if event["what"] == "continued")
    if result["reads"][soak.stopped] == continued["reads"][soak.stopped]:
        found.append(f"rank {soak.stopped} did not go on reading after it was continued")
    found += [
        f"rank {rank} does not use rank {soak.stopped} any more"
        for rank, nodes in result["peers"].items()
        for node in nodes
        if node["rank"] == soak.stopped and node["state"] != "alive"
    ]
    return found


def benchmark(arguments: argparse.Namespace) -> int:
    with workspace(arguments.work_dir) as work:
        source = Source(make_files(work / "source", arguments.files, arguments.longest))
        prepared = prepare(work / "source", work / "d.fan", "--codec", "auto", "--partitions", str(arguments.ranks * 4))
        (work / "job").mkdir()
        options = ["--replicas", "2", "--cache", "8MiB", "--peer-timeout", "1"]
        job = Job(prepared, work / "job", arguments.ranks, options, local=True, launcher=ULFM)
        job.announced += [
            rf"rank {arguments.ranks - 1} on \S+ has died",
            # The stopped one says it of the others, too, when it wakes up and finds that its time is up.
            r"rank \d \(\S+\) did not answer within 1 s",
        ]
        try:
            job.wait_up()
            soak = Soak(job, source, arguments.seconds, arguments.threads)
            soak.run()
            result = soak.result()
            found = problems(result, soak)
            job.stop()
        finally:
            job.destroy()
        settings = {name: getattr(arguments, name) for name in ("seconds", "ranks", "files", "longest", "threads")}
        whole = {"kind": "soak", "machine": machine.describe(work), "settings": settings, "problems": found, **result}
    reads, size = sum(result["reads"]), sum(result["bytes"])
    summary = (
        f"{reads:,} reads ({size / 1e9:.1f} GB) in {arguments.seconds:g} s, {len(result['failures'])} wrong or failed"
    )
    growth = {rank: f"{bytes_ / 1e6:+.1f} MB" for rank, bytes_ in result["own_memory_growth_bytes"].items()}
    summary += f"\n\nown memory by rank: {growth}; slowest read {max(result['slowest_s'])} s"
    record.write(arguments.name, whole, f"# Soak\n\n{summary}", arguments.results, picture=False)
    for line in found:
        print(f"problem: {line}", file=sys.stderr)
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--files", type=int, default=400)
    parser.add_argument("--longest", type=int, default=500_000, help="bytes of the longest file")
    parser.add_argument("--threads", type=int, default=2, help="readers for each mount")
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--name", default="soak", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    try:
        return benchmark(parser.parse_args())
    except BenchmarkError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
