"""fanstore-stat: what a job and one of its mounts have done so far.

From ``.fanstore/stats.json`` (this node), ``nodes.json`` and ``report.json`` (all nodes of the job), described in
docs/operations.md. Their content is asked for on the control socket; if that cannot be reached, it is read there.
"""

import argparse
import errno
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fanstore.cli.common import make_parser, parse, run
from fanstore.cli.nodetable import copies_text, node_table
from fanstore.cli.pages import check_page, write_page
from fanstore.client.connection import ControlClient, connect
from fanstore.client.protocol import ControlError
from fanstore.errors import MountError, UsageError
from fanstore.fuse.mountpoint import NotAnsweringError, within_limit
from fanstore.fuse.unmounted import connect_to
from fanstore.mounttable import find_mount
from fanstore.paths import Role, Used, resolve
from fanstore.report.page import report_page
from fanstore.report.planned import Planned, read_plan
from fanstore.units import format_bytes, format_count, format_duration

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
    parser.add_argument(
        "--plan",
        metavar="FILE",
        type=Path,
        help="for --html: a plan (fanstore-plan job --json), to stand beside what the job did",
    )
    return parser


def _main(argv: Sequence[str]) -> int:
    args = parse(_parser(), argv)
    if args.html is not None and (args.json or args.nodes or args.watch is not None):
        raise UsageError("--html writes a page of its own: leave out --json, --nodes and --watch")
    if args.plan is not None and args.html is None:
        raise UsageError("--plan is for the page of --html: say where to write it")
    plan = None if args.plan is None else read_plan(args.plan)
    with _Asked(args.mountpoint) as mount:
        if args.html is not None:
            return _write_page(mount, args.html, plan)
        if args.watch is not None:
            return _watch(mount, args)
        _show(_sample(mount, args), None, args)
    return 0


class _Asked:
    """The mount that is asked.

    Attributes:
        point: where it is.
        _client: the connection to its daemon; None if that is not to be had, and its files are read.
    """

    def __init__(self, path: Path) -> None:
        self.point = resolve(path)
        mount = find_mount(self.point)
        self._client: ControlClient | None = None
        if mount is None or not mount.is_fanstore:
            self._client = connect_to(self.point, PROG)
            if self._client is None:
                raise MountError(f"no FanStore dataset is mounted on {self.point}, nor served there without a mount")
        else:
            self._client = connect(json.loads(self.read("config.json")), PROG)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._client is not None:
            self._client.close()

    def read(self, name: str) -> bytes:
        """The content of a control file. Raises MountError."""
        if self._client is not None:
            try:
                return bytes(self._client.ask("stat", name=name).values["content"])
            except ControlError:
                self._client.close()
                self._client = None
        return self._read_file(self.point / ".fanstore" / name)

    def _read_file(self, path: Path) -> bytes:
        try:
            return within_limit(path.read_bytes)
        except NotAnsweringError as error:
            raise MountError(f"the mount {self.point} does not answer: {error}") from None
        except OSError as error:
            if error.errno == errno.ENOTCONN:
                raise MountError(
                    f"the daemon of {self.point} is dead: remove the mount with fanstore-umount {self.point}"
                ) from None
            raise MountError(f"cannot read {path}: {error.strerror}") from None


@dataclass(frozen=True)
class _Sample:
    """What the mount said at one moment; files that were not asked for are empty.

    Attributes:
        stats, nodes: the files as they are. config: the content of config.json.
    """

    stats: bytes
    nodes: bytes
    config: Mapping[str, Any]


def _sample(mount: _Asked, args: argparse.Namespace) -> _Sample:
    config = json.loads(mount.read("config.json"))
    # Asking the other nodes takes a second if one is silent: only if it is wanted.
    wanted = args.nodes or (not args.json and config.get("size", 1) > 1)
    nodes = mount.read("nodes.json") if wanted else b""
    stats = b"" if args.nodes else mount.read("stats.json")
    return _Sample(stats, nodes, config)


def _show(sample: _Sample, before: _Sample | None, args: argparse.Namespace) -> None:
    if args.json:
        text = (sample.nodes if args.nodes else sample.stats).decode().rstrip()
    else:
        clear = "\x1b[H\x1b[2J" if args.watch is not None and sys.stdout.isatty() else ""
        end = "" if args.watch is None else "\n"
        text = clear + "\n".join(_report(sample, before)) + end
    print(text, flush=True)


def _watch(mount: _Asked, args: argparse.Namespace) -> int:
    """Show it again and again; the end of the mount is the end, not an error."""
    before = None
    try:
        while True:
            sample = _sample(mount, args)
            _show(sample, before, args)
            before = sample
            time.sleep(args.watch)
    except MountError:
        if before is None or find_mount(mount.point) is not None:
            raise
        print("unmounted")
    except KeyboardInterrupt:
        print()
    return 0


def _write_page(mount: _Asked, target: str, plan: Planned | None) -> int:
    check_page(target, Used(Role.MOUNTPOINT, mount.point))
    data = json.loads(mount.read("report.json"))
    _check_version(data, _KNOWN_REPORT, "report.json")
    write_page(target, report_page(data, plan))
    return 0


def _check_version(content: Mapping[str, Any], known: int, name: str) -> None:
    if content.get("version") != known:
        raise MountError(
            f"the mount speaks version {content.get('version')} of {name}, this program knows {known}; use --json"
        )


# --- the tables ---

#: What is shown of the caches.


def _report(sample: _Sample, before: _Sample | None) -> Iterator[str]:
    yield f"{sample.config['prepared']} on {sample.config['mountpoint']}"
    if sample.nodes:
        nodes = json.loads(sample.nodes)["nodes"]
        yield from node_table(nodes, json.loads(before.nodes)["nodes"] if before is not None else None)
        if text := copies_text([node.get("copies") for node in nodes]):
            yield f"copies: {text}"
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
    cache = stats["cache"]
    answered = f"{engine['answered_python']:,} requests answered by Python"
    if engine["name"] == "native":
        answered = f"{engine['answered_native']:,} requests answered natively, {engine['answered_python']:,} by Python"
    if engine["name"] == "none":
        answered = "nothing is mounted, programs read by themselves"
    yield f"engine      {engine['name']}: {answered}"
    asked = cache["hits"] + cache["misses"]
    hits = f"{cache['hits'] / asked:.1%} of {asked:,} look-ups hit" if asked else "not used so far"
    withheld = memory.get("cache_withheld_bytes", 0)
    less = f" ({format_bytes(withheld)} less than --cache: memory is short)" if withheld else ""
    yield f"cache       {format_bytes(cache['used_bytes'])} of {format_bytes(cache['capacity_bytes'])}{less}, {hits}"
    if "order" in stats:
        yield f"order       {_order(stats['order'])}"
        if stats["order"].get("rearranged") is not None:  # an older daemon does not say
            yield f"rearranged  {_rearranged(stats['order']['rearranged'])}"
    yield f"memory      {format_bytes(memory['rss_bytes'])}, at most {format_bytes(memory['peak_rss_bytes'])} so far"
    intercepted = stats["intercepted"]
    if any(intercepted.values()):
        yield (
            f"intercepted {intercepted['opens']:,} opens, {intercepted['reads']:,} reads, "
            f"{format_bytes(intercepted['bytes'])}, {intercepted['stats']:,} stats, {intercepted['listings']:,} "
            f"listings; {intercepted['promotions']:,} "
            f"promoted, {intercepted['passed']:,} calls passed to the mount"
        )
    if reused := staging["reused_partitions"]:
        kept = f"{format_count(reused, 'partition')}, {format_bytes(staging['reused_bytes'])}"
        yield f"reused      {kept}, from copies that earlier jobs have kept"
    if staging["partitions"] or staging["skipped_partitions"]:
        here = staging["done_partitions"] + staging["unverified_partitions"]
        wanted = staging["partitions"] + staging["skipped_partitions"]
        yield f"staged      {here:,} of {wanted:,} partitions, {format_bytes(staging['done_bytes'])}"
    if text := copies_text([stats.get("copies")]):
        yield f"copies      {text}"
    if "outputs" in stats:
        yield f"outputs     {_outputs(stats['outputs'])}"
    verification = stats["verification"]
    yield f"verified    {verification['chunks']:,} chunks, {format_bytes(verification['bytes'])}, while reading"
    yield f"damaged     {errors['damaged_files']:,} files, {errors['failed_reads']:,} failed reads"
    if errors["fallbacks"]:
        yield f"fallbacks   {errors['fallbacks']:,} reads were answered by another copy"


def _order(order: Mapping[str, Any]) -> str:
    """How the order of reads is known, and what that was good for."""
    if order["source"] == "none":
        text = "not known"
    else:
        known = [] if order["sampler"] is None else [order["sampler"]]
        known += [f"{key} {order[key]}" for key in ("seed", "epoch") if order[key] is not None]
        text = f"{order['source']}: {', '.join(known)}"
    text += f"; {order['predicted']:,} of {order['files']:,} files read as predicted"
    text += f"; {order['prefetched']:,} chunks fetched ahead, {order['late']:,} late"
    if order["into_kernel"]:
        text += f"; {order['into_kernel']:,} files put into the page cache"
    return f"{text}; readers waited {format_duration(order['waited_s'])}"


def _rearranged(rearranged: Mapping[str, Any]) -> str:
    """What programs read of their global batches with ``--order locality``."""
    held, samples = rearranged["held"], rearranged["samples"]
    text = f"{format_count(rearranged['epochs'], 'epoch')}; {held:,} of {samples:,} samples were on this node"
    return "; ".join([text, *(f"left as it is: {why}" for why in rearranged["left_alone"])])


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
