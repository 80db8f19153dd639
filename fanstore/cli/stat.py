"""fanstore-stat: what a job and one of its mounts have done so far.

From ``.fanstore/stats.json`` (this node), ``nodes.json`` and ``report.json`` (all nodes of the job), described in
docs/operations.md. Their content is asked for on the control socket; if that cannot be reached, it is read there.
"""

import argparse
import errno
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fanstore.cli import statpage
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

On a terminal, --watch shows what fits: nodes that are lost, silent or have failed reads first, then the busiest, and
the others as a sum. 'all others' are requests of the kernel that are rare (flush, rename, link) or do not fit.

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
        end = "" if args.watch is None else "\n"
        text = "\n".join(_report(sample, before)) + end
    print(text, flush=True)


def _redraw(sample: _Sample, before: _Sample | None) -> None:
    """On a terminal: over what was there before, as much as fits."""
    stats, earlier = _stats(sample), None if before is None else _stats(before)
    title = f"{sample.config['prepared']} on {sample.config['mountpoint']}"
    top = [title, *([] if stats is None else statpage.head(stats, sample.config, earlier))]
    nodes, nodes_before = _nodes(sample), None if before is None else _nodes(before)
    if text := copies_text([node.get("copies") for node in nodes]):
        top.append(f"copies: {text}")
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    shown = statpage.screen(top, stats, (nodes, nodes_before), columns, lines)
    # Each line to its end, then the rest of the screen: clearing all of it first would flicker.
    print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J", end="", flush=True)


def _stats(sample: _Sample) -> Mapping[str, Any] | None:
    if not sample.stats:
        return None
    stats: Mapping[str, Any] = json.loads(sample.stats)
    _check_version(stats, _KNOWN_VERSION, "stats.json")
    return stats


def _nodes(sample: _Sample) -> list[Mapping[str, Any]]:
    return json.loads(sample.nodes)["nodes"] if sample.nodes else []


def _report(sample: _Sample, before: _Sample | None) -> Iterator[str]:
    """Everything."""
    yield f"{sample.config['prepared']} on {sample.config['mountpoint']}"
    if nodes := _nodes(sample):
        yield from node_table(nodes, None if before is None else _nodes(before))
        if text := copies_text([node.get("copies") for node in nodes]):
            yield f"copies: {text}"
    stats = _stats(sample)
    if stats is not None:
        if nodes:
            yield f"\nthis node, rank {sample.config['rank']}:"
        yield from statpage.head(stats, sample.config, None if before is None else _stats(before))
        yield from statpage.page(stats)


def _watch(mount: _Asked, args: argparse.Namespace) -> int:
    """Show it again and again; the end of the mount is the end, not an error."""
    before = None
    try:
        while True:
            sample = _sample(mount, args)
            if sys.stdout.isatty() and not args.json:
                _redraw(sample, before)
            else:
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


def _interval(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds from 0.1 to a day")
    return value
