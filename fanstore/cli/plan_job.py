"""fanstore-plan job: what a job will do with a dataset, in four ways to get at it, and whether FanStore pays.

Owns how a dataset is looked at (sizes only; nothing is read but directories, or the index), and what is shown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fanstore.cli.common import make_parser
from fanstore.cli.pages import check_page, write_page
from fanstore.cli.tomlfile import read_toml
from fanstore.errors import UsageError
from fanstore.format.codec import NONE
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import is_address
from fanstore.model.advice import Job, Verdict, by_nodes, by_shuffle, memory_hits, smallest_memory_mb, verdict
from fanstore.model.forecast import Dataset, Forecast, Moment, Training, Way
from fanstore.model.machine import ASSUMED, Machine, machine_of
from fanstore.model.shuffling import Shuffling
from fanstore.paths import Role, Used, is_prepared
from fanstore.prep.against import opened_sources
from fanstore.prep.scan import scan
from fanstore.progress import Progress
from fanstore.report.planpage import needs_text, plan_page
from fanstore.units import format_bytes, format_count, format_duration, parse_size

PROG = "fanstore-plan job"

_DESCRIPTION = """\
Say what a training job will do with a dataset, before it runs: from the shared file system directly, from a copy on
every node, and with FanStore, without and with a known order. How long it takes, what it reads from where, how much
room it needs, what limits it, and from which epoch on FanStore pays, or that it does not."""

_EPILOG = """\
examples:
  fanstore-plan job /shared/imagenet.fan --nodes 16 --gpus 4 --samples-per-second 400 --epochs 90 --measured site.toml
  fanstore-plan job /shared/imagenet --nodes 4 --room 100GB        not prepared yet; a first look, nothing measured
  fanstore-plan job /shared/imagenet.fan --html plan.html          a page with pictures, for a browser

Without --measured, figures of a usual cluster are used: better run fanstore-plan measure on your nodes first. Each file
is one sample.

exit codes: 0 planned, 1 error (no such dataset), 2 wrong usage."""

#: Data loader workers for each GPU, if nothing is said.
_WORKERS = 4


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument("dataset", metavar="PREPARED|SRC", help="a prepared dataset, or what is to be prepared")
    job = parser.add_argument_group("the job")
    job.add_argument("--nodes", metavar="N", type=int, default=1, help="how many (default: %(default)s)")
    job.add_argument("--gpus", metavar="G", type=int, default=1, help="of a node (default: %(default)s)")
    job.add_argument(
        "--samples-per-second",
        metavar="X",
        type=float,
        help="that one GPU computes, if it never waits (default: computing takes no time)",
    )
    job.add_argument("--epochs", metavar="E", type=int, default=10, help="how many (default: %(default)s)")
    job.add_argument("--batch", metavar="B", type=int, default=32, help="samples of a GPU (default: %(default)s)")
    job.add_argument(
        "--workers", metavar="W", type=int, help=f"data loader workers of a node (default: {_WORKERS} for each GPU)"
    )
    job.add_argument(
        "--room", metavar="SIZE", help="on each node's own disk (default: what was free when it was measured)"
    )
    job.add_argument("--stage-first", action="store_true", help="fanstore-mount --stage-first")
    parser.add_argument("--measured", metavar="FILE", type=Path, help="what fanstore-plan measure wrote")
    parser.add_argument("--json", action="store_true", help="for a program (docs/commands.md)")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures; - for standard output")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    if args.html == "-" and args.json:
        raise UsageError("--json and --html - both write to standard output: name a file for one of them")
    machine = ASSUMED if args.measured is None else machine_of(read_toml(args.measured), str(args.measured))
    training = _training(args, machine)
    check_page(args.html, *_used(args.dataset))
    job = Job(machine, look_at(args.dataset), training)
    found = verdict(job)
    if args.json:
        print(json.dumps(_document(args.dataset, job, found), indent=1))
    elif args.html != "-":
        print("\n".join(_text(args.dataset, job, found)))
    if args.html is not None:
        write_page(args.html, plan_page(args.dataset, job, found))
    return 0


def _training(args: argparse.Namespace, machine: Machine) -> Training:
    room_mb = machine.disk_mb if args.room is None else parse_size(args.room) / 1e6
    if args.measured is not None and room_mb > machine.disk_mb:
        raise UsageError(
            f"--room {args.room} is more than the {machine.disk_mb:,.0f} MB that were free on a node's disk when it "
            "was measured; ask for less, or measure again"
        )
    return Training(
        nodes=args.nodes,
        gpus=args.gpus,
        samples_per_s=math.inf if args.samples_per_second is None else args.samples_per_second,
        epochs=args.epochs,
        batch=args.batch,
        workers=_WORKERS * max(args.gpus, 1) if args.workers is None else args.workers,
        room_mb=room_mb,
        stage_first=args.stage_first,
    )


# --- the dataset ---


def _used(dataset: str) -> list[Used]:
    """What must not be written to."""
    if is_address(dataset):
        return []
    path = Path(dataset)
    return [Used(Role.PREPARED if is_prepared(path) else Role.SOURCE, path)]


def look_at(path: str) -> Dataset:
    """What is in a prepared dataset, also one in an object store, in a directory or in a tar file."""
    if is_address(path) or is_prepared(Path(path)):
        prepared = PreparedDataset.open(path)
        totals = prepared.manifest.totals
        return Dataset(
            files=totals.files,
            content_mb=totals.bytes / 1e6,
            stored_mb=sum(part.bytes for part in prepared.manifest.partitions) / 1e6,
            index_mb=prepared.manifest.index_bytes / 1e6,
            compressed=prepared.manifest.codec != NONE.name,
        )
    with opened_sources([path]) as sources, Progress.counting("looking at the dataset", "entries") as progress:
        table = scan(sources, progress.set_count, len(os.sched_getaffinity(0))).table
    sizes = table.size[table.is_type(stat.S_IFREG)]
    content_mb = float(sizes.sum()) / 1e6
    # A tar member has a header of 512 bytes, and is filled up to a multiple of that.
    return Dataset(
        len(sizes), content_mb, content_mb + len(sizes) * 768 / 1e6, (80 * len(table) + len(table.names)) / 1e6
    )


# --- what is shown ---


def _document(name: str, job: Job, found: Verdict) -> dict[str, object]:
    hits, best = memory_hits(job)
    training = {key: value for key, value in vars(job.training).items() if value not in (math.inf, None)}
    return {
        "version": 1,
        "dataset": {"path": name, **vars(job.dataset)},
        "job": training,
        "measured": job.machine.measured or None,
        "nodes": {
            str(nodes): {way.name.lower(): _way_document(one) for way, one in ways.items()}
            for nodes, ways in by_nodes(job).items()
        },
        "shuffles": {one.name: _shuffle_document(one, job, ways) for one, ways in by_shuffle(job).items()},
        "first_epoch": {
            way.name.lower(): _course_document(job.run(way).course)
            for way in (Way.FANSTORE, Way.ORDERED)
            if job.run(way).course
        },
        "use_fanstore": found.use,
        "pays_from_epoch": found.pays_from or None,
        "why": list(found.why),
        "weakest_link": found.weakest.value,
        "to_add": found.add,
        "needs_on_each_node": found.needs,
        "smallest_room_bytes": round(found.smallest_room_mb * 1e6),
        "smallest_memory_bytes": round(smallest_memory_mb(job) * 1e6),
        "memory_hits": hits,
        "memory_hits_at_best": best,
    }


def _way_document(one: Forecast) -> dict[str, object]:
    if one.impossible:
        return {"impossible": one.impossible}
    return {
        "seconds": one.seconds,
        "start_s": one.start_s,
        "epochs_s": [epoch.seconds for epoch in one.epochs],
        "shared_bytes": round(one.shared_mb * 1e6),
        "network_bytes": round(one.network_mb * 1e6),
        "room_bytes": round(one.room_mb * 1e6),
        "limited_by": one.weakest.value,
        "busy_s": {link.value: seconds for link, seconds in one.epochs[-1].busy_s.items()},
    }


def _course_document(course: Sequence[Moment]) -> dict[str, list[float]]:
    """Ends of intervals, and bytes per second in each."""
    return {
        "ends_s": [one.end_s for one in course],
        "local": [1e6 * one.local_mb_per_s for one in course],
        "network": [1e6 * one.network_mb_per_s for one in course],
        "shared": [1e6 * one.shared_mb_per_s for one in course],
        "staging": [1e6 * one.staging_mb_per_s for one in course],
    }


def _shuffle_document(one: Shuffling, job: Job, ways: Mapping[Way, Forecast]) -> dict[str, object]:
    return {
        "remote_share": one.remote,
        "held_bytes": round(one.share * job.dataset.content_mb / job.training.nodes * 1e6),
        **{
            way.name.lower(): {
                "later_epochs_s": found.later_s,
                "network_bytes_per_epoch": round(found.later_network_mb * 1e6),
                "limited_by": found.weakest.value,
            }
            for way, found in ways.items()
        },
    }


def _text(name: str, job: Job, found: Verdict) -> Iterator[str]:
    dataset, training = job.dataset, job.training
    speed = (
        "computing takes no time"
        if training.samples_per_s == math.inf
        else f"{training.samples_per_s:g} samples/s each"
    )
    yield (
        f"{name}: {format_count(dataset.files, 'file')}, {format_bytes(dataset.content_mb * 1e6)}; "
        f"{format_count(training.nodes, 'node')} with {format_count(training.gpus, 'GPU')}, {speed}; "
        f"{format_count(training.epochs, 'epoch')}"
    )
    yield (
        f"measured {job.machine.measured}"
        if job.machine.measured
        else (
            "NOT measured: figures of a usual cluster. fanstore-plan measure FILE on your nodes, then --measured FILE"
        )
    )
    yield ""
    yield "Use FanStore for this job." if found.use else "Do not use FanStore for this job."
    for sentence in found.why:
        yield f"  {sentence}"
    yield ""
    nodes = by_nodes(job)
    yield from _columns(
        ["", "start", "first epoch", "later epochs", "job", "from shared", "over network", "room/node", "limited by"],
        [[way.value, *_cells(one)] for way, one in nodes[training.nodes].items()],
    )
    if len(nodes) > 1:
        yield ""
        yield from _columns(
            ["job on", *(way.value for way in Way)],
            [
                [format_count(count, "node"), *("-" if one.impossible else _time(one.seconds) for one in ways.values())]
                for count, ways in nodes.items()
            ],
        )
    shuffles = by_shuffle(job)
    if shuffles:
        yield ""
        yield from _columns(
            ["a later epoch, if ranks shuffle", "over network", "held/node", "FanStore", "order known", "limited by"],
            [
                [
                    one.name,
                    format_bytes(ways[Way.FANSTORE].later_network_mb * 1e6),
                    format_bytes(one.share * dataset.content_mb / training.nodes * 1e6),
                    *(_time(found.later_s) for found in ways.values()),
                    ways[Way.FANSTORE].weakest.value,
                ]
                for one, ways in shuffles.items()
            ],
        )
    yield ""
    yield f"Weakest link with FanStore: {found.weakest.value}. To get further: {found.add}"
    if found.needs:
        yield f"To keep its GPUs busy a node needs: {needs_text(found.needs)}."
    all_mb = dataset.stored_mb / training.nodes
    yield (
        f"Room on each node: {format_bytes(all_mb * 1e6)} hold everything, "
        f"{format_bytes(found.smallest_room_mb * 1e6)} still keep up."
    )
    yield _memory_text(job)
    most = max(job.machine.small_files_per_s.sharing)
    if job.machine.measured and training.nodes * training.workers > most:
        yield (
            f"The shared file system was measured with up to {most:,.0f} readers, and this job has "
            f"{training.nodes * training.workers:,}: it is taken to give them no more."
        )


def _memory_text(job: Job) -> str:
    hits, best = memory_hits(job)
    text = f"The memory of the nodes answers {hits:.0%} of later reads"
    text += "" if best - hits < 0.01 else f", and could at best answer {best:.0%}"
    return f"{text}; {format_bytes(smallest_memory_mb(job) * 1e6)} on each still keep up."


def _cells(one: Forecast) -> list[str]:
    if one.impossible:
        return ["-"] * 5 + [f"not possible: {one.impossible}"]
    return [
        _time(one.start_s),
        _time(one.epochs[0].seconds),
        _time(one.later_s) if len(one.epochs) > 1 else "-",
        _time(one.seconds),
        format_bytes(one.shared_mb * 1e6),
        format_bytes(one.network_mb * 1e6),
        format_bytes(one.room_mb * 1e6),
        one.weakest.value,
    ]


def _time(seconds: float) -> str:
    return format_duration(seconds)


def _columns(titles: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Numbers are on the right; words at the ends of lines, and a line that ends early, on the left."""
    full = [row for row in [titles, *rows] if len(row) == len(titles)]
    widths = [max(len(row[column]) for row in full) for column in range(len(titles))]
    widths[0] = max(len(row[0]) for row in [titles, *rows])
    words_last = titles[-1] == "limited by"
    for row in [titles, *rows]:
        cells = [f"{row[0]:{widths[0]}}"]
        for text, width in zip(row[1:], widths[1:], strict=False):
            cells.append(text if text is row[-1] and words_last else f"{text:>{width}}")
        yield "  ".join(cells).rstrip()
