"""Where the time of a read goes: what both cores do, sampled by perf, while the source and FanStore are read.

Example: python benchmarks/profile_reads.py --files 6000

Takes samples of the whole machine at a fixed rate (perf record -a, by the clock, since virtual machines often have no
counters) during one pass: cold, first (a fresh mount, the bytes in the page cache below) and warm. Samples are sorted
by who ran (reader, daemon, kernel threads, nobody) and by what the function belongs to, and given in microseconds of
processor time per file: two cores that are idle for half of a pass have waited for the disk. Needs perf (Debian:
linux-perf) and root. Writes results/NAME.json, NAME.md and NAME.png.
"""

import argparse
import os
import random
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.caches import drop, drop_method
from harness.command import BenchmarkError, find_program, run
from harness.dataset import DatasetSpec, make
from harness.peers import Fanstore, Peer, Source
from harness.reading import Readers
from harness.record import markdown_table
from harness.script import run_script
from harness.workspace import workspace

STATES = ("cold", "first", "warm")
#: What a function belongs to: the first pattern that is found in its name.
KINDS: tuple[tuple[str, str], ...] = (
    ("idle", r"idle|pv_native_safe_halt|^mwait|^halt"),
    ("copying bytes", r"copy_to_iter|copy_from_iter|copy_user|copy_page|memcpy|memmove|rep_movs|copyout|copyin|_copy_"),
    ("clearing pages", r"clear_page|clear_huge|rep_stos|memset|clear_user"),
    ("engine and checksum", r"_native\."),
    (
        "disk",
        r"virtio|iowrite|gup_|unpin|vring|virtqueue|vp_notify|blk_|bio_|_bio|submit_bio|mpage|iomap|ext4|dma_|sg_|nvme|elv_|dd_|disk|jbd2",
    ),
    (
        "page cache",
        r"filemap|folio|xas_|xa_|lru|page_|_page|pages|mem_cgroup|charge|readahead|workingset|rmqueue|alloc",
    ),
    ("fuse", r"fuse"),
    (
        "waking and switching",
        r"sched|wake|switch|futex|pick_next|enqueue|dequeue|_cfs|_fair|update_load|prepare_to|finish_|ttwu|rt_mutex|poll|clock|tick|timer|irq|spin_|lock",
    ),
    (
        "names",
        r"path|dentry|lookup|d_|dput|inode|namei|open|close|fput|file|stat|perm|getname|filename|fd|lockref|cred",
    ),
    (
        "entering the kernel",
        r"entry_|syscall|do_sys|vfs_|x64_sys|ksys|srso|retbleed|fsnotify|security|apparmor|audit|rw_verify",
    ),
    ("python", r"Py|_PyEval|gc_"),
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=6000)
    parser.add_argument("--mean-bytes", type=int, default=107_000)
    parser.add_argument("--readers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--frequency", type=int, default=4000, help="samples per second and core")
    parser.add_argument("--warm-repeats", type=int, default=20, help="each file is read so often while warm is sampled")
    parser.add_argument("--pass-timeout", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--work-dir", type=Path, help="where data and images are made (a disk, not tmpfs)")
    parser.add_argument(
        "--name", default=f"profile-reads-{datetime.now(UTC):%Y-%m-%d}", help="of the files in results/"
    )
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def kind_of(symbol: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, symbol)), "other")


def who_of(command: str) -> str:
    if command.startswith("swapper"):
        return "nobody"
    if command == "reader":
        return "reader"
    if command.startswith("fanstore"):
        return "daemon"
    return "kernel threads and others"


def parse_report(text: str) -> list[tuple[float, str, str]]:
    """Share, command and function of the lines of perf report; the native library has no names, so its own is told."""
    lines = []
    for line in text.splitlines():
        match = re.match(r"\s*([\d.]+)%\s+(\S+)\s+(\S+)\s+\[[k.]\]\s+(.+)", line)
        if match is not None:
            symbol = match[3] if match[3].startswith("_native.") else match[4].strip()
            lines.append((float(match[1]) / 100, match[2], symbol))
    if not lines:
        raise BenchmarkError("perf has taken no samples")
    return lines


def sample(
    perf: str, readers: Readers, root: Path, order: Sequence[str], total_bytes: int, frequency: int, work: Path
) -> dict[str, Any]:
    """One pass under perf: microseconds of processor time per file by who and what, and by function."""
    data = work / "perf.data"
    under = [perf, "record", "-q", "-a", "-e", "cpu-clock", "-F", str(frequency), "-o", str(data), "--"]
    result = readers.read("c", root, order, total_bytes, under)
    report = run([perf, "report", "-i", str(data), "--stdio", "--no-children", "-s", "comm,dso,sym"], 120).stdout
    data.unlink()
    # All samples together are all cores for as long as the pass took.
    per_file_us = result.seconds * len(os.sched_getaffinity(0)) / result.files * 1e6
    parts: dict[str, dict[str, float]] = {}
    functions: dict[str, float] = {}
    for share, command, symbol in parse_report(report):
        who = who_of(command)
        kind = "idle" if who == "nobody" else kind_of(symbol)
        kinds = parts.setdefault(who, {})
        kinds[kind] = kinds.get(kind, 0) + share * per_file_us
        name = f"{who}: {symbol}"
        functions[name] = functions.get(name, 0) + share * per_file_us
    top = sorted(functions.items(), key=lambda item: -item[1])[:25]
    return {"files_per_s": result.files_per_s, "parts_us": parts, "functions_us": dict(top)}


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
    for state in STATES:
        chosen = [item for item in result["profiles"] if item["state"] == state]
        rows = [["files/s", *(f"{item['files_per_s']:,.0f}" for item in chosen)]]
        for who in ("reader", "daemon", "kernel threads and others", "nobody"):
            for kind in result["kinds"]:
                figures = [item["parts_us"].get(who, {}).get(kind, 0.0) for item in chosen]
                if max(figures) >= 1.0:
                    rows.append([f"{who}: {kind}", *(f"{figure:.1f}" for figure in figures)])
        sums = [sum(sum(kinds.values()) for kinds in item["parts_us"].values()) for item in chosen]
        rows.append(["all, with what is below 1", *(f"{figure:.1f}" for figure in sums)])
        lines += [markdown_table([f"{state}, µs per file", *(item["peer"] for item in chosen)], rows), ""]
    for item in result["profiles"]:
        if item["peer"] != "source":
            rows = [[name, f"{figure:.1f}"] for name, figure in list(item["functions_us"].items())[:12]]
            title = f"{item['peer']}, {item['state']}: {item['files_per_s']:,.0f} files/s; the longest functions"
            lines += [markdown_table([title, "µs per file"], rows), ""]
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
            "kinds": [kind for kind, _ in KINDS] + ["other"],
            "profiles": profiles,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
