"""Memory of daemons over time: many readers, compressed files of several large chunks, a small cache.

Example: python benchmarks/memory.py --seconds 3600

One node and a job of several, one after the other, each under load for so long. Reads go past the kernel's cache and
are compared with their source. A daemon must stay below what docs/operations.md promises (the cache, the index, and
128 MiB on one node or 256 MiB on several), and its memory must not grow between the first fifth and the end. Writes
results/NAME.json.gz, .md and .png; the exit code says whether all was well.
"""

import argparse
import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import dataset, machine, record
from harness.command import BenchmarkError
from harness.workspace import workspace
from soak import GROWTH_BYTES

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the job and the load are those of the tests
from jobs import Job
from load import Load, Source
from mounting import prepare

MIB = 1 << 20
#: What docs/operations.md promises besides cache and index.
ALONE_BYTES, TOGETHER_BYTES = 128 * MIB, 256 * MIB
#: Files of one to three chunks, the last of them short.
MEAN_BYTES = 4 * MIB
SAMPLES = 600  #: per run, at most one in half a second


@dataclass
class Course:
    """One run: a job of so many ranks.

    Attributes:
        samples: the time in seconds, reads so far, and by rank the resident bytes by kind (VmRSS, RssAnon, …), and
            those of the processes that the daemon has started, which docs/operations.md counts apart (Pss).
    """

    ranks: int
    bound_bytes: int
    samples: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def peak_bytes(self) -> int:
        return max(int(rank["VmRSS"]) for sample in self.samples for rank in sample["memory"])

    def helpers_bytes(self) -> int:
        return max(int(rank["helpers"]) for sample in self.samples for rank in sample["memory"])

    def growth_bytes(self) -> int:
        """Of what the kernel cannot take back, from the end of the first fifth to the last tenth (medians of ranks)."""
        count = len(self.samples)

        def median(rank: int, begin: float, end: float) -> int:
            part = self.samples[int(begin * count) : max(int(end * count), int(begin * count) + 1)]
            values = sorted(sample["memory"][rank]["RssAnon"] for sample in part)
            return int(values[len(values) // 2])

        return max(median(rank, 0.9, 1.0) - median(rank, 0.15, 0.25) for rank in range(self.ranks))

    def problems(self) -> list[str]:
        name = f"{self.ranks} node{'s' if self.ranks > 1 else ''}"
        found = [f"{name}: {failure}" for failure in self.failures[:20]]
        if self.peak_bytes() > self.bound_bytes:
            found.append(f"{name}: {self.peak_bytes() / MIB:.0f} MiB are more than {self.bound_bytes / MIB:.0f}")
        if self.growth_bytes() > GROWTH_BYTES:
            found.append(f"{name}: memory grew by {self.growth_bytes() / MIB:.0f} MiB")
        return found


def resident(pid: int) -> dict[str, int]:
    wanted = ("VmRSS", "RssAnon", "RssFile", "RssShmem")
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) << 10 for words in lines if words[0][:-1] in wanted}


def helpers(pid: int) -> int:
    """Bytes of the processes that a daemon has started, as the one that searches for an order; shared pages in part."""
    total = 0
    for child in (path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")):
        for number in map(int, child):
            with contextlib.suppress(OSError):  # it has ended
                lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")) + helpers(number)
    return total


def measure(course: Course, prepared: Path, source: Source, directory: Path, arguments: argparse.Namespace) -> None:
    """Run a job under load, and look at it."""
    directory.mkdir()
    options = ["--cache", f"{arguments.cache_mib}MiB"]
    job = Job(prepared, directory, course.ranks, options, local=True, engine=arguments.engine)
    try:
        job.wait_up()
        load = Load(source, job.mounts(), arguments.readers)
        begin_s = time.monotonic()
        interval_s = max(0.5, arguments.seconds / SAMPLES)
        while (elapsed_s := time.monotonic() - begin_s) < arguments.seconds:
            memory = [resident(pid) | {"helpers": helpers(pid)} for pid in job.pids]
            course.samples.append({"at_s": round(elapsed_s, 1), "reads": load.reads, "memory": memory})
            time.sleep(interval_s)
        load.stop()
        course.failures += load.failures
        job.stop()
    finally:
        job.destroy()


def table(courses: list[Course], arguments: argparse.Namespace) -> str:
    header = [
        "nodes",
        "reads",
        "promised, MiB",
        "highest RSS, MiB",
        "at the end, MiB",
        "of it anonymous",
        "growth, MiB",
        "its other processes, MiB",
    ]
    rows = []
    for course in courses:
        last = max(course.samples[-1]["memory"], key=lambda memory: memory["VmRSS"])
        figures = (course.bound_bytes, course.peak_bytes(), last["VmRSS"], last["RssAnon"], course.growth_bytes())
        reads = course.samples[-1]["reads"]
        rows.append(
            [
                str(course.ranks),
                f"{reads:,}",
                *(f"{figure / MIB:,.0f}" for figure in (*figures, course.helpers_bytes())),
            ]
        )
    words = (
        f"Memory of the largest daemon, {arguments.seconds:g} s under load each: {arguments.readers} readers for each "
        f"mount, --cache {arguments.cache_mib}MiB, {arguments.codec}, engine {arguments.engine}. Growth: of anonymous "
        "memory, from the end of the first fifth to the last tenth. Other processes: those that the daemon has started "
        "(names and pages ahead, the search for an order), all at their highest; the promise does not count them."
    )
    return f"# Memory of daemons over time\n\n{words}\n\n{record.markdown_table(header, rows)}"


def benchmark(arguments: argparse.Namespace) -> int:
    courses = []
    with workspace(arguments.work_dir) as work:
        spec = dataset.DatasetSpec(arguments.files, MEAN_BYTES, classes=4, compressible=True, spread=0.5)
        made = dataset.make(work / "source", spec)
        prepared = prepare(made.root, work / "d.fan", "--codec", arguments.codec, "--partitions", "12")
        index_bytes = (prepared / "index.fsx").stat().st_size
        source = Source(made.root)
        for ranks in arguments.ranks:
            besides = ALONE_BYTES if ranks == 1 else TOGETHER_BYTES
            course = Course(ranks, (arguments.cache_mib << 20) + besides + index_bytes)
            print(f"{ranks} node{'s' if ranks > 1 else ''}, {arguments.seconds:g} s …", flush=True)
            measure(course, prepared, source, work / f"job{ranks}", arguments)
            courses.append(course)
        names = ("seconds", "ranks", "files", "readers", "cache_mib", "codec", "engine")
        settings = {name: getattr(arguments, name) for name in names}
        found = [problem for course in courses for problem in course.problems()]
        whole = {
            "kind": "memory",
            "machine": machine.describe(work),
            "settings": settings,
            "dataset": made.description,
            "problems": found,
            "courses": [vars(course) for course in courses],
        }
    record.write(arguments.name, whole, table(courses, arguments), arguments.results)
    for line in found:
        print(f"problem: {line}", file=sys.stderr)
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="under load, for each number of nodes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="nodes of the jobs, all on this machine")
    parser.add_argument("--files", type=int, default=150)
    parser.add_argument("--readers", type=int, default=8, help="for each mount")
    parser.add_argument("--cache-mib", type=int, default=32)
    parser.add_argument("--codec", default="lz4")
    parser.add_argument("--engine", choices=("native", "python"), default="native")
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--name", default="memory", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    try:
        return benchmark(parser.parse_args())
    except BenchmarkError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
