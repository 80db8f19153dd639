"""fanstore-verify: check a prepared dataset, by its checksums and against its source."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from types import FrameType

from fanstore.cli.common import make_parser, parse, run
from fanstore.errors import UsageError
from fanstore.format.prepared import PreparedDataset
from fanstore.prep.against import compare, opened_sources
from fanstore.prep.verify import content_totals, verify
from fanstore.progress import Progress
from fanstore.units import format_bytes, format_count, format_duration, format_path

PROG = "fanstore-verify"
EXIT_DAMAGED = 1

_DESCRIPTION = """\
Read a prepared dataset completely and compare all of it with its checksums: the index, every partition file, and every
file in them, which is also decompressed. What is damaged is listed on standard output with its partition.

With --against, compare it with the tree it was made from as well: names, types, modes, times, link targets, hard links
and bytes; what is missing, extra or different is listed."""

_EPILOG = """\
examples:
  fanstore-verify /data/imagenet.fan
  fanstore-verify /data/imagenet.fan --against /data/imagenet

exit codes: 0 everything is as it should be; 1 something is not, or the dataset cannot be read; 2 wrong usage;
130 interrupted"""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "prepared", metavar="PREPARED", help="a dataset made by fanstore-prep: a directory or an address"
    )
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="SRC",
        help="compare with these directories or plain tar files, given as to fanstore-prep: in the same order, with "
        "the same names before '='. What --include, --exclude and --sample have left out is not missed",
    )
    parser.add_argument(
        "--shard-folders",
        action="store_true",
        help="each tar file is in a folder, as fanstore-prep --shard-folders does",
    )
    parser.add_argument(
        "--dereference",
        action="store_true",
        help="compare with what symbolic links in directories point to, as fanstore-prep --dereference has packed it",
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="threads (default: one per core)")
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary, only what is wrong")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    return run(PROG, lambda: _main(argv))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _main(argv: list[str] | None) -> int:
    arguments = parse(_parser(), argv)
    if arguments.jobs < 0:
        raise UsageError("--jobs must be 1 or more")
    jobs: int = arguments.jobs or len(os.sched_getaffinity(0))
    # A batch system ends a job with SIGTERM: stop reading as after Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    prepared = PreparedDataset.open(arguments.prepared)
    with opened_sources(arguments.against, arguments.dereference, arguments.shard_folders) as sources:
        wrong = _check(prepared, jobs, arguments.quiet)
        if sources:
            begin = time.monotonic()
            totals = prepared.manifest.totals
            with Progress("comparing", totals.bytes, totals.files, quiet=arguments.quiet) as progress:
                differences = compare(prepared, sources, jobs, progress)
            for one in differences:
                print(f"{one.kind}: {format_path(one.path)}: {one.reason}")
            wrong += len(differences)
            if not arguments.quiet:
                seconds = format_duration(time.monotonic() - begin)
                result = f"{len(differences):,} differences" if differences else "the same"
                print(f"{arguments.prepared}: compared with {', '.join(arguments.against)} in {seconds}: {result}")
    return EXIT_DAMAGED if wrong else 0


def _check(prepared: PreparedDataset, jobs: int, quiet: bool) -> int:
    """Check all checksums and say what was found; the number of damages."""
    begin = time.monotonic()
    total_bytes, total_files = content_totals(prepared.index)
    with Progress("verifying", total_bytes, total_files, quiet=quiet) as progress:
        damages = verify(prepared, jobs, progress)
    for one in damages:
        what = f"{format_path(one.path)} in {one.partition}" if one.path is not None else one.partition
        print(f"damaged: {what}: {one.reason}")
    if not quiet:
        seconds = max(time.monotonic() - begin, 1e-6)
        size = f"{format_count(len(prepared.manifest.partitions), 'partition')}, {format_bytes(total_bytes)}"
        rate = f"{format_duration(seconds)} ({format_bytes(total_bytes / seconds)}/s)"
        files = len({one.path for one in damages if one.path is not None})
        result = f"{len(damages):,} damages, {files:,} files damaged" if damages else "all checksums match"
        print(f"{prepared.storage}: {size} verified in {rate}: {result}")
    return len(damages)


if __name__ == "__main__":
    sys.exit(main())
