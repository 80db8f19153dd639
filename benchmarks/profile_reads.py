"""Where the time of a read goes: what both cores do, sampled by perf, while the source and FanStore are read.

Example: python benchmarks/profile_reads.py --files 6000

Takes samples of the whole machine at a fixed rate (perf record -a, by the clock, since virtual machines often have no
counters) during one pass: cold, first (a fresh mount, the bytes in the page cache below) and warm. Samples are sorted
by who ran (reader, daemon, kernel threads, nobody) and by what the function belongs to, and given in microseconds of
processor time per file: two cores that are idle for half of a pass have waited for the disk. Needs perf (Debian:
linux-perf) and root. Writes results/NAME.json.gz, NAME.md and NAME.png.
"""

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.caches import back_memory, drop, drop_method
from harness.command import BenchmarkError, find_program
from harness.dataset import DatasetSpec, make
from harness.peers import Fanstore, Peer, Source
from harness.profiling import KIND_NAMES, NOBODY, make_functions_table, make_parts_table, read_profile, record_argv
from harness.reading import Readers
from harness.script import run_script
from harness.workspace import workspace

STATES = ("cold", "first", "warm")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=6000)
    parser.add_argument("--mean-bytes", type=int, default=107_000)
    parser.add_argument("--readers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--frequency", type=int, default=4000, help="samples per second and core")
    parser.add_argument("--warm-repeats", type=int, default=20, help="each file is read so often while warm is sampled")
    parser.add_argument("--pass-timeout", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--work-dir", type=Path, help="where data and images are made (a disk, not tmpfs)")
    parser.add_argument("--name", default="profile-reads", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def who_of(command: str) -> str:
    if command.startswith("swapper"):
        return NOBODY
    if command == "reader":
        return "reader"
    if command.startswith("fanstore"):
        return "daemon"
    return "kernel threads and others"


def sample(
    perf: str, readers: Readers, root: Path, order: Sequence[str], total_bytes: int, frequency: int, work: Path
) -> dict[str, Any]:
    """One pass under perf: microseconds of processor time per file by who and what, and by function."""
    data = work / "perf.data"
    result = readers.read("c", root, order, total_bytes, record_argv(perf, data, frequency))
    profile = read_profile(perf, data, result.seconds, result.files, lambda command, _: who_of(command))
    data.unlink()
    return {"files_per_s": result.files_per_s} | profile


def make_table(result: dict[str, Any]) -> str:
    settings = result["settings"]
    lines = [
        f"# Where the time goes: {result['dataset']}",
        "",
        f"{settings['readers']} readers in C, one pass each. {machine.sentence(result['machine'])}.",
        'Microseconds of processor time per file, all cores together; "idle" is time in which a core had nothing to '
        f"do, that is, waited for the disk. Sampled by perf {settings['frequency']:,} times a second and core. Cold: "
        f"caches emptied with {settings['cold_by']}. First: fresh mount, bytes in the page cache below. Warm: again.",
        record.load_sentence(result["profiles"]),
        "",
    ]
    whos = ("reader", "daemon", "kernel threads and others", NOBODY)
    for state in STATES:
        chosen = [item for item in result["profiles"] if item["state"] == state]
        lines += [make_parts_table(f"{state}, µs per file", {item["peer"]: item for item in chosen}, whos), ""]
    for item in result["profiles"]:
        if item["peer"] != "source":
            lines += [make_functions_table(f"{item['peer']}, {item['state']}", item), ""]
    return "\n".join(lines)


def profile(
    arguments: argparse.Namespace,
    perf: str,
    peers: list[Peer],
    readers: Readers,
    work: Path,
    paths: Sequence[str],
    total: int,
) -> list[dict[str, Any]]:
    mountpoint = work / "mount"
    mountpoint.mkdir()
    found = []
    for peer in peers:
        for states in (("first",), ("cold", "warm")):
            with peer.mounted(mountpoint):
                for state in states:
                    order = random.Random(state).sample(paths, len(paths))
                    repeats = arguments.warm_repeats if state == "warm" else 1
                    if state == "cold":
                        drop(peer.files())
                    elif state == "first":
                        peer.warm_up()
                    back_memory()
                    load = os.getloadavg()[0]
                    item = sample(
                        perf,
                        readers,
                        peer.root(mountpoint),
                        order * repeats,
                        total * repeats,
                        arguments.frequency,
                        work,
                    )
                    found.append({"peer": peer.name, "state": state} | item | {"load_average": load})
                    print(f"{peer.name:28} {state:5}: {item['files_per_s']:9,.0f} files/s")
    order_of = {peer.name: number for number, peer in enumerate(peers)}
    return sorted(found, key=lambda item: (STATES.index(item["state"]), order_of[item["peer"]]))


def benchmark(arguments: argparse.Namespace) -> None:
    perf = find_program("perf")
    if perf is None:
        raise BenchmarkError("perf is not installed (Debian: linux-perf)")
    peers: list[Peer] = [Source(), Fanstore("none", "native"), Fanstore("none", "native", staged=True)]
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        dataset = make(work / "source", DatasetSpec(arguments.files, arguments.mean_bytes, 100))
        readers = Readers(work, arguments.readers, arguments.pass_timeout)
        for peer in peers:
            peer.prepare(dataset.root, work)
        profiles = profile(arguments, perf, peers, readers, work, dataset.paths, dataset.total_bytes)
        result = {
            "kind": "profile_reads",
            "machine": description,
            "dataset": dataset.description,
            "settings": {"readers": arguments.readers, "frequency": arguments.frequency, "cold_by": drop_method()},
            "kinds": KIND_NAMES,
            "profiles": profiles,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
