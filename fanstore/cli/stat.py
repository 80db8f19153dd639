"""fanstore-stat: what a job and one of its mounts have done so far.

From ``.fanstore/stats.json`` (this node), ``nodes.json`` and ``report.json`` (all nodes of the job), described in
docs/operations.md. Asks nobody but the mount.
"""

import argparse
import errno
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fanstore.cli.common import make_parser, run
from fanstore.cli.nodetable import node_table
from fanstore.errors import MountError, UsageError
from fanstore.fuse.mountpoint import NotAnsweringError, resolve, within_limit
from fanstore.fuse.mounttable import find_mount
from fanstore.report.files import replace_file
from fanstore.report.page import report_page
from fanstore.units import format_bytes, format_duration

PROG = "fanstore-stat"

#: Version of stats.json that the table below can show.
_KNOWN_VERSION = 1
#: Version of report.json that the page can show.
_KNOWN_REPORT = 1

_DESCRIPTION = """\
Show what a mount has done so far: operations, latencies, where bytes came from, cache, memory. In a job of several
nodes, first one line per node: state, bytes on its disk, reads by source, traffic with the other nodes, errors."""

_EPILOG = """\
examples:
  fanstore-stat /tmp/imagenet               a table
  fanstore-stat /tmp/imagenet --watch 5     a new one every five seconds, until Ctrl-C or the end of the mount
  fanstore-stat /tmp/imagenet --nodes       only the table of nodes
  fanstore-stat /tmp/imagenet --json        the numbers for a program, as in /tmp/imagenet/.fanstore/stats.json
  fanstore-stat /tmp/imagenet --nodes --json    the same of all nodes, as in /tmp/imagenet/.fanstore/nodes.json
  fanstore-stat /tmp/imagenet --html job.html   a page with pictures about the whole job, for a browser

In the table of nodes, 'on disk' is what is staged there, MB/s (10^6 bytes) are what programs on that node read, what
came in from other nodes and what went out to them: averages since the start, or with --watch since the table before.
States: up; silent (does not answer now); lost (dead); done (has ended orderly). 'peers lost': ranks it knows as dead.

exit codes: 0 shown, 1 error (not a FanStore mount), 2 wrong usage."""


def main() -> int:
    """Entry point of the command."""
    return run(PROG, lambda: _main(sys.argv[1:]))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", type=Path, help="where the dataset is mounted")
    parser.add_argument("--json", action="store_true", help="print stats.json as it is, with --nodes nodes.json")
    parser.add_argument("--nodes", action="store_true", help="only the nodes of the job")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=_interval,
        const=2.0,
        help="show it again and again (default: every %(const)g s)",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write a page about the job so far, of all its nodes: throughput, sources, traffic between nodes, "
        "latencies, memory, outputs, events; - for standard output. fanstore-mount --report writes it at the end",
    )
    return parser


def _main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.html is not None and (args.json or args.nodes or args.watch is not None):
        raise UsageError("--html writes a page of its own: leave out --json, --nodes and --watch")
    control = _control(args.mountpoint)
    if args.html is not None:
        return _write_page(control, args.html)
    if args.watch is not None:
        return _watch(control, args)
    _show(_sample(control, args), None, args)
    return 0


@dataclass(frozen=True)
class _Sample:
    """What the mount said at one moment; files that were not asked for are empty.

    Attributes:
        stats, nodes: the files as they are. config: the content of config.json.
    """

    stats: bytes
    nodes: bytes
    config: Mapping[str, Any]


def _sample(control: Path, args: argparse.Namespace) -> _Sample:
    config = json.loads(_read(control, "config.json"))
    # Asking the other nodes takes a second if one is silent: only if it is wanted.
    wanted = args.nodes or (not args.json and config.get("size", 1) > 1)
    nodes = _read(control, "nodes.json") if wanted else b""
    stats = b"" if args.nodes else _read(control, "stats.json")
    return _Sample(stats, nodes, config)


def _show(sample: _Sample, before: _Sample | None, args: argparse.Namespace) -> None:
    if args.json:
        text = (sample.nodes if args.nodes else sample.stats).decode().rstrip()
    else:
        clear = "\x1b[H\x1b[2J" if args.watch is not None and sys.stdout.isatty() else ""
        end = "" if args.watch is None else "\n"
        text = clear + "\n".join(_report(sample, before)) + end
    print(text, flush=True)


def _watch(control: Path, args: argparse.Namespace) -> int:
    """Show it again and again; the end of the mount is the end, not an error."""
    before = None
    try:
        while True:
            sample = _sample(control, args)
            _show(sample, before, args)
            before = sample
            time.sleep(args.watch)
    except MountError:
        if before is None or find_mount(control.parent) is not None:
            raise
        print("unmounted")
    except KeyboardInterrupt:
        print()
    return 0


def _write_page(control: Path, target: str) -> int:
    data = json.loads(_read(control, "report.json"))
    _check_version(data, _KNOWN_REPORT, "report.json")
    page = report_page(data)
    if target == "-":
        sys.stdout.buffer.write(page.encode("utf-8", "backslashreplace"))
        return 0
    path = Path(target)
    if control.parent in (path.parent.resolve() / "x").parents:
        raise UsageError(f"{target} lies inside the mount; name a file elsewhere")
    try:
        replace_file(path, page)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from None
    return 0


def _check_version(content: Mapping[str, Any], known: int, name: str) -> None:
    if content.get("version") != known:
        raise MountError(
            f"the mount speaks version {content.get('version')} of {name}, this program knows {known}; use --json"
        )


def _control(path: Path) -> Path:
    point = resolve(path)
    mount = find_mount(point)
    if mount is None or not mount.is_fanstore:
        raise MountError(f"no FanStore dataset is mounted on {point}")
    return point / ".fanstore"


def _read(control: Path, name: str) -> bytes:
    try:
        return within_limit((control / name).read_bytes)
    except NotAnsweringError as error:
        raise MountError(f"the mount {control.parent} does not answer: {error}") from None
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            raise MountError(
                f"the daemon of {control.parent} is dead: remove the mount with fanstore-umount {control.parent}"
            ) from None
        raise MountError(f"cannot read {control / name}: {error.strerror}") from None


# --- the tables ---

#: What is shown of the caches.
_CACHE_KEYS = ("used_bytes", "capacity_bytes", "hits", "misses")


def _report(sample: _Sample, before: _Sample | None) -> Iterator[str]:
    yield f"{sample.config['prepared']} on {sample.config['mountpoint']}"
    if sample.nodes:
        nodes = json.loads(sample.nodes)["nodes"]
        yield from node_table(nodes, json.loads(before.nodes)["nodes"] if before is not None else None)
    if sample.stats:
        if sample.nodes:
            yield f"\nthis node, rank {sample.config['rank']}:"
        yield from _table(sample, json.loads(before.stats) if before is not None else None)


def _table(sample: _Sample, before: Mapping[str, Any] | None) -> Iterator[str]:
    """The mount of this node."""
    stats, config = json.loads(sample.stats), sample.config
    _check_version(stats, _KNOWN_VERSION, "stats.json")
    yield f"up {format_duration(stats['uptime_s'])}, process {config['pid']} on {config['host']}"
    if before is not None:
        yield _rates(stats, before)
    yield ""
    yield f"{'operation':<12}{'count':>12}{'errors':>9}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}"
    for name, operation in stats["operations"].items():
        times = "".join(f"{_microseconds(operation['latency_us'][key]):>10}" for key in ("p50", "p90", "p99", "max"))
        yield f"{name:<12}{operation['count']:>12,}{operation['errors']:>9,}{times}"
    yield ""
    yield f"{'read from':<12}{'reads':>12}{'bytes':>12}{'share':>8}{'fetched':>12}"
    total = sum(source["bytes"] for source in stats["sources"].values())
    for name, source in stats["sources"].items():
        share = f"{source['bytes'] / total:.1%}" if total else "-"
        fetched = format_bytes(source["fetched_bytes"]) if source["fetches"] else "-"
        yield f"{name:<12}{source['reads']:>12,}{format_bytes(source['bytes']):>12}{share:>8}{fetched:>12}"
    yield ""
    yield from _details(stats)


def _details(stats: Mapping[str, Any]) -> Iterator[str]:
    staging, errors, memory, engine = stats["staging"], stats["errors"], stats["memory"], stats["engine"]
    # The native engine has a cache of its own, and --cache bounds both together.
    cache = {key: stats["cache"][key] + engine.get("cache", {}).get(key, 0) for key in _CACHE_KEYS}
    answered = f"{engine['answered_python']:,} requests answered by Python"
    if engine["name"] == "native":
        answered = f"{engine['answered_native']:,} requests answered natively, {engine['answered_python']:,} by Python"
    yield f"engine      {engine['name']}: {answered}"
    asked = cache["hits"] + cache["misses"]
    hits = f"{cache['hits'] / asked:.1%} of {asked:,} look-ups hit" if asked else "not used so far"
    yield f"cache       {format_bytes(cache['used_bytes'])} of {format_bytes(cache['capacity_bytes'])}, {hits}"
    yield f"memory      {format_bytes(memory['rss_bytes'])}, at most {format_bytes(memory['peak_rss_bytes'])} so far"
    if staging["partitions"] or staging["skipped_partitions"]:
        here = staging["done_partitions"] + staging["unverified_partitions"]
        wanted = staging["partitions"] + staging["skipped_partitions"]
        yield f"staged      {here:,} of {wanted:,} partitions, {format_bytes(staging['done_bytes'])}"
    if "outputs" in stats:
        yield f"outputs     {_outputs(stats['outputs'])}"
    verification = stats["verification"]
    yield f"verified    {verification['chunks']:,} chunks, {format_bytes(verification['bytes'])}, while reading"
    yield f"damaged     {errors['damaged_files']:,} files, {errors['failed_reads']:,} failed reads"
    if errors["fallbacks"]:
        yield f"fallbacks   {errors['fallbacks']:,} reads were answered by another copy"


def _outputs(outputs: Mapping[str, Any]) -> str:
    """How many there are, and which of them are not where they are to stay."""
    text = f"{outputs['files']:,} files, {format_bytes(outputs['bytes'])}"
    if outputs["being_written"]:
        text += f", {outputs['being_written']:,} being written"
    if outputs["directory"] is None:
        return f"{text}; they end with the job (--scratch)"
    if not outputs["pending"]:
        return f"{text}; nothing pending for {outputs['directory']}"
    text += f"; pending {outputs['pending']:,}, {format_bytes(outputs['pending_bytes'])}, for {outputs['directory']}"
    return f"{text} ({outputs['trouble']}; it is tried again)" if outputs["trouble"] else text


def _rates(stats: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    elapsed_s = max(stats["uptime_s"] - before["uptime_s"], 1e-3)

    def total(snapshot: Mapping[str, Any], section: str, key: str) -> int:
        return sum(item[key] for item in snapshot[section].values())

    operations = (total(stats, "operations", "count") - total(before, "operations", "count")) / elapsed_s
    rate = (total(stats, "sources", "bytes") - total(before, "sources", "bytes")) / elapsed_s
    return f"in the last {elapsed_s:.1f} s: {operations:,.0f} operations/s, {format_bytes(rate)}/s"


def _microseconds(value: float) -> str:
    if value < 1000:
        return f"{value:.3g} µs"
    return f"{value / 1000:.3g} ms" if value < 1e6 else f"{value / 1e6:.3g} s"


def _interval(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds from 0.1 to a day")
    return value
