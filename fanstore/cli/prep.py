"""fanstore-prep: turn directories and tar files into a prepared dataset."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import time
from types import FrameType

from fanstore.cli.common import make_parser, run
from fanstore.errors import UsageError
from fanstore.prep.build import Outcome, Request, prepare
from fanstore.prep.plan import Limits
from fanstore.transport.ranks import connect, launched_rank
from fanstore.units import format_bytes, format_count, format_duration, format_path, parse_size

PROG = "fanstore-prep"
#: Exit code when a dataset was written, but some files could not be read and are not in it.
EXIT_INCOMPLETE = 3

_DESCRIPTION = """\
Partition a dataset once, so that fanstore-mount can serve it.

OUT becomes a directory with an index of all names and partitions of about 1 GiB, which are plain tar files: your data
can be unpacked again with tar (and lz4, where a file was compressed) alone. Sources are directories, tar files, or tar
files compressed with gzip or zstd; several sources are merged. OUT appears only when it is complete."""

_EPILOG = """\
examples:
  fanstore-prep /data/imagenet /data/imagenet.fan
  fanstore-prep /data/texts /data/texts.fan --codec auto
  fanstore-prep train.tar val.tar.gz /data/set.fan --everywhere 'val*'
  fanstore-prep shards/*.tar /data/shards.fan --index-only      # existing tar shards stay where they are
  mpirun -n 8 fanstore-prep /data/imagenet /data/imagenet.fan   # eight processes share the work

exit codes: 0 complete; 1 error, nothing was written; 2 wrong usage; 3 written, but the listed files could not be read
and are not in it; 130 interrupted, nothing was written"""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument("sources", nargs="+", metavar="SRC", help="a directory or a tar file (.tar, .tar.gz, .tar.zst)")
    parser.add_argument("out", metavar="OUT", help="the prepared dataset, a new directory")
    cut = parser.add_mutually_exclusive_group()
    cut.add_argument("--partitions", type=int, metavar="N", help="cut into exactly N partitions of about equal size")
    cut.add_argument(
        "--partition-size",
        default="1GiB",
        metavar="SIZE",
        help="cut into partitions of at most about SIZE (default: 1GiB)",
    )
    parser.add_argument(
        "--codec",
        choices=("none", "lz4", "lz4hc", "auto"),
        default="none",
        help="compress each file: none (default; right for JPEG and other compressed formats), lz4, lz4hc (slower to "
        "write, smaller, as fast to read), auto (measure a sample and decide). What does not shrink is stored as it is",
    )
    parser.add_argument(
        "--everywhere",
        action="append",
        default=[],
        metavar="GLOB",
        help="files whose path matches go to partitions that every node keeps, such as 'val/*'; may be repeated",
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="threads per process (default: one per core)")
    parser.add_argument(
        "--index-only", action="store_true", help="index existing plain tar files where they are, copying nothing"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a prepared dataset already")
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary, errors only")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    return run(PROG, lambda: _main(argv))


def _request(arguments: argparse.Namespace) -> Request:
    partition_bytes = parse_size(arguments.partition_size)
    if partition_bytes < 1 << 20:
        raise UsageError("--partition-size must be at least 1MiB")
    if arguments.partitions is not None and not 1 <= arguments.partitions <= 100_000:
        raise UsageError("--partitions must be between 1 and 100000")
    if arguments.jobs < 0:
        raise UsageError("--jobs must be 1 or more")
    if arguments.index_only and (arguments.codec in ("lz4", "lz4hc") or arguments.partitions or arguments.everywhere):
        raise UsageError(
            "--index-only leaves the tar files as they are: it goes with no --codec, --partitions, --everywhere"
        )
    return Request(
        sources=arguments.sources,
        out=arguments.out,
        limits=Limits(partition_bytes, arguments.partitions, arguments.everywhere),
        codec="none" if arguments.index_only else arguments.codec,
        jobs=arguments.jobs or len(os.sched_getaffinity(0)),
        index_only=arguments.index_only,
        force=arguments.force,
        quiet=arguments.quiet,
    )


def _main(argv: list[str] | None) -> int:
    # Rank 0 says what is wrong with the command line; once is enough.
    with contextlib.redirect_stderr(io.StringIO()) if launched_rank() else contextlib.nullcontext():
        arguments = _parser().parse_args(argv)
    request = _request(arguments)
    # A batch system ends a job with SIGTERM, a closed terminal with SIGHUP: clean up as after Ctrl-C.
    # SIGINT as well, because a shell starts background jobs with it ignored; SIGHUP stays ignored under nohup.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    ranks = connect()

    def note(sentence: str) -> None:
        if not request.quiet:
            print(f"{PROG}: {sentence}", file=sys.stderr)

    begin = time.monotonic()
    outcome = prepare(request, ranks, note)
    return _finish(request, outcome, time.monotonic() - begin)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _finish(request: Request, outcome: Outcome | None, seconds: float) -> int:
    if outcome is None:
        return 0
    if not request.quiet:
        _summarise(request, outcome, seconds)
    if outcome.problems:
        _list_problems(request, outcome)
        return EXIT_INCOMPLETE
    return 0


def _summarise(request: Request, outcome: Outcome, seconds: float) -> None:
    totals = outcome.manifest.totals
    parts = [format_count(totals.files, "file"), format_count(totals.directories, "directory", "directories")]
    if totals.symlinks:
        parts.append(format_count(totals.symlinks, "symbolic link"))
    if totals.hardlinks:
        parts.append(format_count(totals.hardlinks, "hard link"))
    size = format_bytes(totals.bytes)
    if totals.stored_bytes != totals.bytes:
        size += f", stored in {format_bytes(totals.stored_bytes)} ({outcome.manifest.codec})"
    rate = format_bytes(totals.bytes / seconds) if seconds > 0 else "?"
    print(f"{request.out}: {', '.join(parts)}; {size}; {format_count(len(outcome.manifest.partitions), 'partition')}")
    print(f"prepared in {format_duration(seconds)} ({rate}/s)")
    if outcome.skipped:
        print(f"skipped {outcome.skipped:,} sockets, pipes and devices")


def _list_problems(request: Request, outcome: Outcome) -> None:
    count = len(outcome.problems)
    print(f"{PROG}: {count:,} entries could not be read and are not in '{request.out}':", file=sys.stderr)
    for path, reason in outcome.problems:
        print(f"  {format_path(path)}: {reason}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
