"""fanstore-plan measure: how fast the nodes of a job, their network and the shared file system are.

Owns the sequence of steps, the bound on their load, and the file that is written; doctor/speeds.py and
transport/speed.py measure. Under mpirun all ranks go through the same steps; what fails on one ends all, with one
sentence.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from fanstore.cli.common import make_parser
from fanstore.cli.tomlfile import read_toml
from fanstore.doctor import speeds
from fanstore.errors import FanstoreError, UsageError
from fanstore.format.prepared import PreparedDataset
from fanstore.model.machine import VERSION, machine_of
from fanstore.paths import is_prepared
from fanstore.report.files import replace_file
from fanstore.transport.ranks import Ranks, connect
from fanstore.units import format_bytes, format_count, parse_size

T = TypeVar("T")

PROG = "fanstore-plan measure"

_DESCRIPTION = """\
Measure what a plan is made from, and write it to FILE: the nodes' disks, memory and decompression, the network between
them, and the shared file system with 1, 2, 4 ... readers, in small files and in large reads. It takes about a minute.
Start it on the nodes of a job, one process on each, under mpirun; alone it measures one node, and no network."""

_EPILOG = """\
examples:
  mpirun -n 4 --map-by ppr:1:node fanstore-plan measure site.toml --shared /shared/me --local /local/ssd
  fanstore-plan measure site.toml --shared /shared/me --dataset /shared/imagenet.fan      with sizes of its files
  fanstore-plan measure site.toml --shared /shared/me --dry-run                           only say what would be done

It says first what it will do. New files are written to the shared file system, up to --load in all, read by another
node than the one that wrote them, and removed. Their names begin with .fanstore-measure-, should a killed run leave
some.

exit codes: 0 measured, 1 error, 2 wrong usage, 130 interrupted."""

#: Files of a reader in one step, and how large they are if no dataset says it.
_SMALL_FILES, _SMALL_BYTES = 100, 107_000
#: Files of a dataset may be larger; then this is taken.
_SMALL_MOST_BYTES = 8 << 20
_LARGE_BYTES, _LARGE_LEAST_BYTES = 32 << 20, 4 << 20
#: Threads of a node that read or write at the same time, besides one alone.
_THREADS = 4
_DISK_BYTES = 64 << 20
_NETWORK_S = 0.5
_PAIRS_SHOWN = 16


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument("file", metavar="FILE", type=Path, help="what was measured, as TOML, for fanstore-plan job")
    parser.add_argument(
        "--shared", metavar="DIR", type=Path, help="a directory on the shared file system in which you may write"
    )
    parser.add_argument(
        "--local", metavar="DIR", type=Path, help="one on each node's own disk (default: where temporary files are)"
    )
    parser.add_argument(
        "--dataset", metavar="PREPARED", help="take the sizes of its files, and time their decompression"
    )
    parser.add_argument(
        "--load",
        metavar="SIZE",
        default="4GiB",
        help="most that is written to the shared file system, and read from there, by all nodes (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and end")
    return parser


@dataclass(frozen=True)
class _Step:
    """Of the shared file system: the first ``nodes`` ranks read with so many threads each."""

    number: int
    nodes: int
    threads: int

    @property
    def readers(self) -> int:
        return self.nodes * self.threads


@dataclass(frozen=True)
class _Plan:
    """What will be done."""

    steps: tuple[_Step, ...]
    small_files: int
    small_bytes: int
    large_bytes: int

    @property
    def _readings(self) -> int:
        return sum(step.readers for step in self.steps)

    @property
    def files(self) -> int:
        return self._readings * (self.small_files + 1)

    @property
    def load_bytes(self) -> int:
        return self._readings * (self.small_files * self.small_bytes + self.large_bytes)


def _make_plan(nodes: int, small_bytes: int, load_bytes: int) -> _Plan:
    counts = [2**power for power in range(nodes.bit_length()) if 2**power < nodes] + [nodes]
    shapes = [(count, 1) for count in counts] + [(nodes, _THREADS)]
    steps = tuple(_Step(number, count, threads) for number, (count, threads) in enumerate(shapes))
    readings = sum(step.readers for step in steps)
    each = load_bytes // readings
    small_files = max(1, min(_SMALL_FILES, each // 2 // small_bytes))
    large_bytes = min(_LARGE_BYTES, each - small_files * small_bytes)
    if large_bytes < _LARGE_LEAST_BYTES:
        least = readings * (small_files * small_bytes + _LARGE_LEAST_BYTES)
        raise UsageError(
            f"--load is too little for {format_count(nodes, 'node')}; it must be {format_bytes(least)} or more"
        )
    return _Plan(steps, small_files, small_bytes, large_bytes)


def main(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)  # of a batch system; clean up as after Ctrl-C
    load_bytes = parse_size(args.load)
    if args.shared is None:
        raise UsageError("name a directory on the shared file system in which you may write: --shared DIR")
    local = args.local or Path(tempfile.gettempdir())
    ranks = connect()
    prepared, small_bytes = _together(ranks, lambda: _look_at(args.dataset))
    _together(ranks, lambda: _check(args.file if ranks.rank == 0 else None, args.shared, local))
    plan = _make_plan(ranks.size, small_bytes, load_bytes)
    if ranks.rank == 0:
        for line in _announce(plan, ranks.size, args.shared, local):
            print(line, file=sys.stderr, flush=True)
    if args.dry_run:
        return 0
    measured = _measure(ranks, plan, args.shared, local, prepared)
    if ranks.rank == 0:
        machine_of(measured, "the measurement")  # what the planner reads
        _write(args.file, measured)
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do it on all ranks; if it fails on any of them, all raise the same error, and rank 0 says it."""
    result: T | None = None
    problem, code = "", 1
    try:
        result = work()
    except (FanstoreError, OSError) as error:
        where = f"{socket.gethostname()}: " if ranks.size > 1 else ""
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        problem, code = where + reason, getattr(error, "exit_code", 1)
    problems = ranks.gather((problem, code))
    problem, code = ranks.broadcast(next((one for one in problems if one[0]), ("", 0)) if ranks.rank == 0 else None)
    if problem:
        failure = UsageError(problem) if code == UsageError.exit_code else FanstoreError(problem)
        failure.told_elsewhere = ranks.rank > 0
        raise failure
    return result  # type: ignore[return-value]  # it is there, or something was raised


def _look_at(dataset: str | None) -> tuple[PreparedDataset | None, int]:
    """The dataset, and how large a small file is."""
    if dataset is None:
        return None, _SMALL_BYTES
    prepared = PreparedDataset.open(dataset)
    totals = prepared.manifest.totals
    if not totals.bytes:
        raise UsageError(f"the dataset '{dataset}' has no bytes in any file; leave out --dataset")
    return prepared, max(1, min(totals.bytes // totals.files, _SMALL_MOST_BYTES))


def _check(file: Path | None, shared: Path, local: Path) -> None:
    for directory in (shared, local):
        if not directory.is_dir():
            raise UsageError(f"{directory} is not a directory")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise UsageError(f"you may not write in {directory}")
    if is_prepared(shared) or is_prepared(local):
        raise UsageError(f"{shared if is_prepared(shared) else local} is a prepared dataset; name another directory")
    if file is None:
        return
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {file}: there is no such directory, or you may not write there")
    if file.exists() and "version" not in (read_toml(file) if file.is_file() else {}):
        raise UsageError(f"{file} exists and is not a measurement; name another file")
    room = min(_free_bytes(directory) for directory in (shared, local))
    if room < 1 << 30:
        raise UsageError(f"there is less than 1 GiB free in {shared} or in {local}; name other directories")


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _announce(plan: _Plan, nodes: int, shared: Path, local: Path) -> Iterator[str]:
    last = plan.steps[-1]
    yield f"{PROG}: on {format_count(nodes, 'node')}, this will"
    yield (
        f"  write {format_count(plan.files, 'file')}, {format_bytes(plan.load_bytes)} in all, to {shared}, read each "
        f"of them once, with 1 to {last.readers} readers, and remove them"
    )
    yield (f"  write {format_bytes((1 + _THREADS) * _DISK_BYTES)} to {local} on each node, read them and remove them")
    if nodes > 1:
        yield f"  send between all nodes for {_NETWORK_S * len(_distances(nodes)):g} s"
    yield f"  take about {20 + 4 * len(plan.steps)} s, less if all is fast; Ctrl-C ends it"


# --- measuring ---


def _measure(ranks: Ranks, plan: _Plan, shared: Path, local: Path, prepared: PreparedDataset | None) -> dict[str, Any]:
    """On rank 0 what is to be written; elsewhere nothing of worth."""
    begin_s = time.time()
    node = _together(ranks, lambda: _measure_node(local, plan.small_bytes, prepared))
    nodes = ranks.gather(node)
    hosts = ranks.gather(socket.gethostname())
    if ranks.rank == 0 and len(set(hosts)) < ranks.size:
        print(
            f"{PROG}: warning: {format_count(len(set(hosts)), 'machine')} for {ranks.size} processes, which share "
            "disk, memory and network; start one on each node (mpirun --map-by ppr:1:node)",
            file=sys.stderr,
        )
    network = _measure_network(ranks)
    small, large = _measure_shared(ranks, plan, shared)
    if ranks.rank:
        return {}
    slowest = {key: min(one[key] for one in nodes) for key in nodes[0]}
    return {
        "version": VERSION,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin_s)),
        "hosts": sorted(set(hosts)),
        "processes": ranks.size,
        "shared": {
            "path": str(shared.absolute()),
            "small_bytes": plan.small_bytes,
            "small": [{"readers": readers, "files_per_s": value} for readers, value in small.items()],
            "large": [{"readers": readers, "mb_per_s": value} for readers, value in large.items()],
        },
        "local": {
            "path": str(local.absolute()),
            "free_mb": slowest["free_mb"],
            "read": [{"threads": threads, "mb_per_s": slowest[f"read {threads}"]} for threads in (1, _THREADS)],
            "write": [{"threads": threads, "mb_per_s": slowest[f"write {threads}"]} for threads in (1, _THREADS)],
        },
        "memory": {"free_mb": slowest["memory_mb"], "mb_per_s": slowest["memory"], "cores": int(slowest["cores"])},
        **({"network": network} if network else {}),
        **({"decode": {"mb_per_s": slowest["decode"]}} if "decode" in slowest else {}),
    }


def _measure_node(local: Path, small_bytes: int, prepared: PreparedDataset | None) -> dict[str, float]:
    found = {
        "free_mb": _free_bytes(local) / 1e6,
        "memory_mb": speeds.free_memory_bytes() / 1e6,
        "memory": speeds.memory_mb_per_s(),
        "cores": float(len(os.sched_getaffinity(0))),
    }
    if prepared is not None and (decode := speeds.decode_mb_per_s(prepared)) is not None:
        found["decode"] = decode
    with speeds.scratch_directory(local) as directory:
        for threads in (1, _THREADS):
            place = directory / str(threads)
            found[f"write {threads}"] = speeds.disk_write(place, threads, _DISK_BYTES).mb_per_s
            found[f"read {threads}"] = speeds.disk_read(place, threads, small_bytes).mb_per_s
    return found


def _distances(nodes: int) -> list[int]:
    return sorted({1, nodes // 4, nodes // 2, nodes - 1} - {0})


def _measure_network(ranks: Ranks) -> dict[str, Any]:
    if ranks.size == 1:
        return {}
    from fanstore.transport.speed import Links

    links = Links()
    round_trip_s = ranks.gather(links.round_trip_s())
    rates = {
        distance: ranks.gather(links.exchange_mb_per_s(distance, _NETWORK_S)) for distance in _distances(ranks.size)
    }
    if ranks.rank:
        return {}
    pairs = [
        {"from": (rank - distance) % ranks.size, "to": rank, "mb_per_s": rate}
        for distance, received in rates.items()
        for rank, rate in enumerate(received)
    ]
    means = [sum(received[rank] for received in rates.values()) / len(rates) for rank in range(ranks.size)]
    return {
        "mb_per_s": min(means),
        "request_s": max(round_trip_s),
        "slowest_pairs": sorted(pairs, key=lambda pair: pair["mb_per_s"])[:_PAIRS_SHOWN],
    }


def _measure_shared(ranks: Ranks, plan: _Plan, shared: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Files/s and MB/s by the number of readers; every file is read once, and not by the node that wrote it."""
    small: dict[int, float] = {}
    large: dict[int, float] = {}
    with ExitStack() as stack:
        root = _together(
            ranks, lambda: stack.enter_context(speeds.scratch_directory(shared)) if ranks.rank == 0 else None
        )
        root = Path(ranks.broadcast(os.fspath(root) if root is not None else None))
        for step in plan.steps:
            for kind, count, nbytes, rates in (
                ("small", plan.small_files, plan.small_bytes, small),
                ("large", 1, plan.large_bytes, large),
            ):
                done = _together(ranks, lambda: _write_step(ranks, root / kind, step, count, nbytes))  # noqa: B023
                done = _together(ranks, lambda: _read_step(ranks, root / kind, step))  # noqa: B023
                total = sum(one.files_per_s if kind == "small" else one.mb_per_s for one in ranks.gather(done) if one)
                rates[step.readers] = total
    return small, large


def _places(root: Path, step: _Step, rank: int) -> list[Path]:
    return [root / f"{step.number}-{rank}-{thread}" for thread in range(step.threads)]


def _write_step(ranks: Ranks, root: Path, step: _Step, count: int, nbytes: int) -> None:
    """For the rank before this one."""
    reader = (ranks.rank - 1) % ranks.size
    if reader < step.nodes:
        for place in _places(root, step, reader):
            speeds.write_files(place, count, nbytes)


def _read_step(ranks: Ranks, root: Path, step: _Step) -> speeds.Done | None:
    return speeds.read_files(_places(root, step, ranks.rank)) if ranks.rank < step.nodes else None


# --- the file ---


def _write(file: Path, measured: Mapping[str, Any]) -> None:
    try:
        replace_file(file, "\n".join(_toml(measured)) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
    print(f"written: {file}; use it with fanstore-plan job PREPARED --measured {file}")


def _toml(content: Mapping[str, Any]) -> Iterator[str]:
    yield "# Written by fanstore-plan measure; docs/model.md explains it. MB are 10^6 bytes."
    for key, value in content.items():
        if not isinstance(value, Mapping):
            yield f"{key} = {_value(value)}"
    for table, values in content.items():
        if isinstance(values, Mapping):
            yield f"\n[{table}]"
            yield from (f"{key} = {_value(value)}" for key, value in values.items())


def _value(value: object) -> str:
    if isinstance(value, str):
        escaped = "".join(char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08X}" for char in value)
        return f'"{escaped}"'
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e5 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value)
