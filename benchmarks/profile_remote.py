"""Where the time of a read from another node goes: what both cores do, sampled by perf, through the mount.

Example: python benchmarks/profile_remote.py

One of two ranks reads files of 107 KiB that the other one has, through the mount, one at a time and 16 at a time, as in
remote_reads.py. Samples of the whole machine are sorted by who ran (reader, daemon that asks, daemon that is asked,
kernel threads, nobody) and by what the function belongs to, and given in microseconds of processor time per file.
Beside them, what raw mpi4py takes for the same files in a job just before. Needs perf (Debian: linux-perf) and root.
Writes results/NAME.json.gz and NAME.md.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.caches import back_memory
from harness.command import BenchmarkError, find_program
from harness.profiling import KIND_NAMES, NOBODY, make_functions_table, make_parts_table, read_profile, record_argv
from harness.remote import Case, Spec
from harness.remotejob import prepare, run_job
from harness.script import run_script
from harness.workspace import workspace

SIZE = 107 << 10
WINDOWS = (1, 16)
ASKS, ANSWERS, OTHERS = "daemon that asks", "daemon that is asked", "kernel threads and others"
RANKS = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of the tree, half of which is read")
    parser.add_argument("--frequency", type=int, default=8000, help="samples per second and core")
    parser.add_argument("--work-dir", type=Path, help="where data and images are made (a disk, not tmpfs)")
    parser.add_argument("--name", default="profile-remote", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def sample(window: int, base: Spec, perf: str, frequency: int, work: Path) -> dict[str, Any]:
    """One job, one pass of whose reader is sampled."""
    case = Case(SIZE, window, "remote", 1)
    raw = run_job("raw", "native", RANKS, [case], replace(base, seconds=0.5), work)[0]
    back_memory()
    data = work / "perf.data"
    daemons: dict[int, int] = {}
    under = tuple(record_argv(perf, data, frequency))
    load = os.getloadavg()[0]
    line = run_job("mount", "native", RANKS, [case], replace(base, under=under), work, daemons)[0]

    def who_of(command: str, thread: int) -> str:
        if command.startswith("swapper"):
            return NOBODY
        if command == "reader":
            return "reader"
        return (ASKS, ANSWERS)[daemons[thread]] if thread in daemons else OTHERS

    profile = read_profile(perf, data, 1 / line["files_per_s"], 1, who_of)
    data.unlink()
    return {"window": window, "files_per_s": line["files_per_s"], "raw_files_per_s": raw["files_per_s"]} | (
        profile | {"load_average": load}
    )


def make_table(result: dict[str, Any]) -> str:
    profiles = {f"{item['window']} under way": item for item in result["profiles"]}
    raws = ", ".join(
        f"{1e6 * len(os.sched_getaffinity(0)) / item['raw_files_per_s']:.0f} with {item['window']} under way"
        for item in result["profiles"]
    )
    lines = [
        "# Where the time goes: files of 107 KiB from another node, through the mount",
        "",
        f"Two ranks on this machine, one reads. {machine.sentence(result['machine'])}.",
        "Microseconds of processor time per file, all cores together, one pass of the C reader each. Sampled by perf "
        f"{result['settings']['frequency']:,} times a second and core. Raw mpi4py, whose two ranks keep both cores "
        f"busy, took so many microseconds of both just before: {raws}.",
        record.load_sentence(result["profiles"]),
        "",
        make_parts_table("µs per file", profiles, ("reader", ASKS, ANSWERS, OTHERS, NOBODY)),
        "",
    ]
    for name, item in profiles.items():
        lines += [make_functions_table(name, item), ""]
    return "\n".join(lines)


def benchmark(arguments: argparse.Namespace) -> None:
    perf = find_program("perf")
    if perf is None:
        raise BenchmarkError("perf is not installed (Debian: linux-perf)")
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        base = prepare(work, [SIZE], arguments.bytes, 0.1)
        profiles = [sample(window, base, perf, arguments.frequency, work) for window in WINDOWS]
        result = {
            "kind": "profile_remote",
            "machine": description,
            "settings": {"frequency": arguments.frequency, "bytes": arguments.bytes},
            "kinds": KIND_NAMES,
            "profiles": profiles,
        }
        record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
