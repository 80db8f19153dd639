"""fanstore-plan scale: FanStore on very many nodes, simulated."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence

from fanstore.cli.common import make_parser
from fanstore.errors import UsageError
from fanstore.model.scale import Outcome, Scale, simulate
from fanstore.units import format_bytes, format_duration, parse_size

PROG = "fanstore-plan scale"

_DESCRIPTION = """\
Simulate a job on very many nodes: the start, where partitions are, what comes from other nodes, how much the most asked
node has to serve, and what the loss of nodes costs with 1, 2 or 3 copies."""

_EPILOG = """\
examples:
  fanstore-plan scale                                            ImageNet on 16 to 10,000 nodes
  fanstore-plan scale --nodes 1000 10000 --partition-size 16MB --replicas 2
  fanstore-plan scale --nodes 10000 --files 1000000000 --json

Up to 20,000,000 files every read of every epoch is counted; beyond that reads are drawn, and the table says so. It
takes some 10 s for each number of nodes, and a few hundred MB. docs/scale.md has what came out.

exit codes: 0 simulated, 2 wrong usage."""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "--nodes", metavar="N", nargs="+", type=int, default=[16, 100, 1_000, 10_000], help="one or more numbers"
    )
    parser.add_argument("--files", metavar="F", type=int, default=1_281_167, help="default: %(default)s, as ImageNet")
    parser.add_argument("--file-size", metavar="SIZE", default="107KB", help="mean (default: %(default)s)")
    parser.add_argument("--partition-size", metavar="SIZE", default="1GiB", help="default: %(default)s")
    parser.add_argument("--replicas", metavar="R", type=int, default=1, help="copies of each partition (default: 1)")
    parser.add_argument("--epochs", metavar="E", type=int, default=90, help="default: %(default)s")
    parser.add_argument("--batch", metavar="B", type=int, default=32, help="samples of a node (default: %(default)s)")
    parser.add_argument(
        "--window", metavar="W", type=int, default=32, help="iterations that are read ahead if the order is known"
    )
    parser.add_argument(
        "--samples-per-second", metavar="X", type=float, help="that a node computes (default: no limit)"
    )
    parser.add_argument("--network", metavar="SIZE", default="10GB", help="a second, of a node (default: %(default)s)")
    parser.add_argument("--shared", metavar="SIZE", default="50GB", help="a second, for all (default: %(default)s)")
    parser.add_argument(
        "--failures", metavar="X", type=float, default=1.6e-4, help="of a node in an hour (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="for a program")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    scales = [
        Scale(
            nodes=nodes,
            files=args.files,
            file_mb=parse_size(args.file_size) / 1e6,
            epochs=args.epochs,
            batch=args.batch,
            samples_per_s=math.inf if args.samples_per_second is None else args.samples_per_second,
            partition_mb=parse_size(args.partition_size) / 1e6,
            replicas=args.replicas,
            window=args.window,
            network_mb_per_s=parse_size(args.network) / 1e6,
            shared_mb_per_s=parse_size(args.shared) / 1e6,
            failures_per_node_hour=args.failures,
        )
        for nodes in args.nodes
    ]
    for scale in scales:
        if scale.nodes > 200_000 or scale.partitions > 50_000_000:
            raise UsageError("more than 200,000 nodes or 50,000,000 partitions are not simulated; ask for less")
    found = [simulate(scale) for scale in scales]
    if args.json:
        print(json.dumps({"version": 1, "nodes": {str(one.scale.nodes): _document(one) for one in found}}, indent=1))
    else:
        print("\n".join(table(found)))
    return 0


def _document(one: Outcome) -> dict[str, object]:
    values = {name: value for name, value in vars(one).items() if name != "scale"}
    return {**values, "partitions": one.scale.partitions}


#: What the table shows: a title, and the text of each number of nodes.
ROWS: dict[str, Callable[[Outcome], str]] = {
    "nodes": lambda one: f"{one.scale.nodes:,}",
    "index on each node": lambda one: format_bytes(one.index_mb * 1e6),
    "start": lambda one: format_duration(one.start_s),
    "staging": lambda one: format_duration(one.staging_s),
    "nodes with a partition": lambda one: f"{one.holding:,}",
    "largest share / mean": lambda one: f"{one.largest_share_mb / one.mean_share_mb:.2f}",
    "from other nodes": lambda one: f"{one.remote:.2%}",
    "asked of a node in an iteration": lambda one: f"{one.asked_mean:,.1f}",
    "of the most asked node": lambda one: f"{one.asked_most:,.1f}",
    "the same, read ahead": lambda one: f"{one.window_most / max(one.window_mean, 1e-9) * one.asked_mean:,.1f}",
    "epoch": lambda one: _seconds(one.epoch_s),
    "epoch, order known": lambda one: _seconds(one.ordered_s),
    "epoch, if all were asked alike": lambda one: _seconds(one.even_s),
    "nodes lost in an hour": lambda one: f"{one.failures_per_hour:.3g}",
    "until copies are restored": lambda one: format_duration(one.restore_s),
    "partitions without a copy in an hour": lambda one: f"{one.bare_per_hour:.2g}",
    "every read counted": lambda one: "yes" if one.exact else f"drawn: {one.iterations:,}",
}


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 10 else format_duration(seconds)


def table(found: Sequence[Outcome]) -> list[str]:
    """A column for each number of nodes."""
    rows = {title: [show(one) for one in found] for title, show in ROWS.items()}
    widths = [max(map(len, column)) for column in zip(*rows.values(), strict=True)]
    first = max(map(len, rows))
    return [
        f"{title:{first}}  " + "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
        for title, texts in rows.items()
    ]
