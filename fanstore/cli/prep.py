"""fanstore-prep: turn directories and tar files into a prepared dataset."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from types import FrameType

from fanstore.cli.common import make_parser, parse, run
from fanstore.errors import UsageError
from fanstore.format.codec import NONE, Method
from fanstore.format.codec_table import METHODS, parse_compression
from fanstore.format.manifest import Manifest
from fanstore.prep.build import Outcome, Request, prepare
from fanstore.prep.plan import Limits
from fanstore.prep.rates import stated_rates
from fanstore.prep.selection import Selection
from fanstore.transport.ranks import connect
from fanstore.units import format_bytes, format_count, format_duration, format_path, parse_size

PROG = "fanstore-prep"
#: Exit code when a dataset was written, but some files could not be read and are not in it.
EXIT_INCOMPLETE = 3
#: Options that an update takes from the dataset.
_KEPT_OPTIONS = (
    "--codec",
    "--shuffle",
    "--everywhere",
    "--include",
    "--exclude",
    "--sample",
    "--dereference",
    "--partition-size",
)
#: More garbage than this share of the partitions is worth writing them anew.
_MUCH_GARBAGE = 0.25

_DESCRIPTION = """\
Partition a dataset once, so that fanstore-mount can serve it.

OUT becomes a directory with an index of all names and partitions of about 1 GiB, which are plain tar files: your data
can be unpacked again with tar (and the codec's own program, where files were compressed) alone. Sources are
directories, tar files, tar files compressed with gzip or zstd, or zip files; several sources are merged, and NAME=SRC
puts one into the folder NAME. OUT appears only when it is complete; a run that was killed goes on where it was when it
is started again. Tar files may be named by their addresses, and OUT may be in S3."""

_EPILOG = """\
examples:
  fanstore-prep /data/imagenet /data/imagenet.fan
  fanstore-prep /data/texts /data/texts.fan --codec auto
  fanstore-prep train.tar val.tar.gz /data/set.fan --everywhere 'val*'
  fanstore-prep train=/data/a val=/data/b /data/set.fan         # folders train and val
  fanstore-prep /data/imagenet /data/imagenet.fan --shuffle 1   # every partition has files of all classes
  fanstore-prep /data/imagenet /data/trial.fan --sample 10000 --exclude '*.tmp'
  fanstore-prep /data/imagenet /data/imagenet.fan --update      # only what was added, changed or removed
  fanstore-prep shards/*.tar /data/shards.fan --index-only      # existing tar shards stay where they are
  fanstore-prep 'https://host/shard-{000000..000999}.tar' s3://bucket/shards.fan
  mpirun -n 8 fanstore-prep /data/imagenet /data/imagenet.fan   # eight processes share the work

exit codes: 0 complete; 1 error, nothing was written or replaced; 2 wrong usage; 3 written, but the listed files could
not be read and are not in it; 130 interrupted, there is no OUT, or the one that was there before"""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SRC",
        help="a directory, a tar file (.tar, .tar.gz, .tar.zst), also of an address: https://HOST/x-{000..999}.tar, or "
        "a zip file. NAME=SRC puts it into the folder NAME of the dataset; a path with '=' in it that exists is "
        "taken as it is",
    )
    parser.add_argument("out", metavar="OUT", help="the prepared dataset, a new directory, or s3://BUCKET/PATH")
    cut = parser.add_mutually_exclusive_group()
    cut.add_argument("--partitions", type=int, metavar="N", help="cut into exactly N partitions of about equal size")
    cut.add_argument(
        "--partition-size",
        metavar="SIZE",
        help="cut into partitions of at most about SIZE (default: 1GiB)",
    )
    parser.add_argument(
        "--codec",
        choices=_CodecNames((*METHODS, "auto")),
        help="compress each file: "
        + "; ".join(f"{method.name}: {_about(method)}" for _, method in METHODS.values())
        + "; auto: measure a sample and decide. What does not shrink is stored as it is",
    )
    parser.add_argument(
        "--everywhere",
        action="append",
        default=[],
        metavar="GLOB",
        help="files whose path matches go to partitions that every node keeps, such as 'val/*'; may be repeated",
    )
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="take only files whose path in the dataset matches, and what lies below a matching directory, such as "
        "'train/*.jpg'; an asterisk stands for slashes, too; may be repeated",
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="leave such files out; may be repeated"
    )
    parser.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="for a trial: take N files only, spread over the whole dataset; the same ones each time, others with "
        "another --shuffle SEED",
    )
    parser.add_argument(
        "--shard-folders",
        action="store_true",
        help="give each tar file a folder with its name, for shards that have names in common (WebDataset)",
    )
    parser.add_argument(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="put files into partitions in random order, for datasets sorted by class: then every node has files of "
        "all classes. Names stay as they are; the same SEED gives the same partitions",
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="threads per process (default: one per core)")
    parser.add_argument(
        "--index-only", action="store_true", help="index existing plain tar files where they are, copying nothing"
    )
    parser.add_argument(
        "--dereference",
        action="store_true",
        help="pack the files and directories that symbolic links in a directory point to, instead of the links; what "
        "several links lead to is stored once. Links that lead nowhere or round in circles are listed at the end",
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="if OUT is there: write only what was added, changed (size, time, mode) or removed in SRC since; mounts "
        "go on with what they have read. What was replaced or removed stays in its partition as garbage",
    )
    parser.add_argument(
        "--repack",
        action="store_true",
        help="with --update: write all partitions anew, without garbage, as --force does",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a prepared dataset, and not in use")
    parser.add_argument(
        "--force-pack", action="store_true", help="pack a SRC that is a prepared dataset: its tar files, as they are"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary, errors only")
    return parser


class _CodecNames(tuple[str, ...]):
    """The names of codecs; each may have a level behind it."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name).partition(":")[0])


def _about(method: Method) -> str:
    if not method.levels:
        return method.about
    first, last = method.levels[0], method.levels[-1]
    return f"{method.about} ({method.name}:{first} to {method.name}:{last}, without a level {method.level})"


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    return run(PROG, lambda: _main(argv))


def _request(arguments: argparse.Namespace) -> Request:
    stated = frozenset(
        option for option in _KEPT_OPTIONS if getattr(arguments, option[2:].replace("-", "_")) not in (None, [], False)
    )
    arguments.codec = arguments.codec or NONE.name
    partition_bytes = parse_size(arguments.partition_size or "1GiB")
    if partition_bytes < 1 << 20:
        raise UsageError("--partition-size must be at least 1MiB")
    if arguments.partitions is not None and not 1 <= arguments.partitions <= 100_000:
        raise UsageError("--partitions must be between 1 and 100000")
    if arguments.jobs < 0:
        raise UsageError("--jobs must be 1 or more")
    if arguments.shuffle is not None and not 0 <= arguments.shuffle < 1 << 63:
        raise UsageError("--shuffle needs a SEED between 0 and 2^63 - 1")
    if arguments.sample is not None and arguments.sample < 1:
        raise UsageError("--sample needs a number of files, 1 or more")
    if arguments.repack and not arguments.update:
        raise UsageError("--repack goes with --update")
    if arguments.update and (arguments.force or arguments.index_only or arguments.partitions):
        raise UsageError("--update goes with no --force, --index-only, --partitions")
    if arguments.index_only and arguments.shuffle is not None:
        raise UsageError("--index-only leaves the tar files as they are: it goes with no --shuffle")
    compressed = arguments.codec not in (NONE.name, "auto")
    if arguments.index_only and (compressed or arguments.partitions or arguments.everywhere):
        raise UsageError(
            "--index-only leaves the tar files as they are: it goes with no --codec, --partitions, --everywhere"
        )
    if arguments.index_only and arguments.dereference:
        raise UsageError("--dereference follows symbolic links in directories, and --index-only takes tar files")
    if arguments.codec == "auto":
        stated_rates()  # now rather than after the scan: they may make no sense
    else:
        parse_compression(arguments.codec)
    return Request(
        sources=arguments.sources,
        out=arguments.out,
        limits=Limits(partition_bytes, arguments.partitions, arguments.everywhere, arguments.shuffle),
        codec=NONE.name if arguments.index_only else arguments.codec,
        jobs=arguments.jobs or len(os.sched_getaffinity(0)),
        index_only=arguments.index_only,
        dereference=arguments.dereference,
        force=arguments.force,
        force_pack=arguments.force_pack,
        quiet=arguments.quiet,
        selection=Selection(arguments.include, arguments.exclude, arguments.sample, arguments.shuffle or 0),
        shard_folders=arguments.shard_folders,
        update=arguments.update,
        repack=arguments.repack,
        stated=stated,
    )


def _main(argv: list[str] | None) -> int:
    arguments = parse(_parser(), argv)
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
    changes = outcome.changes
    if changes is not None and changes.nothing:
        print(f"{request.out}: nothing has changed")
        return
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
    partitions = format_count(len(outcome.manifest.partitions), "partition")
    if outcome.manifest.shuffle is not None:
        partitions += f", shuffled with seed {outcome.manifest.shuffle}"
    print(f"{request.out}: {', '.join(parts)}; {size}; {partitions}")
    if changes is not None:
        print(
            f"updated in {format_duration(seconds)}: {changes.added:,} added, {changes.changed:,} changed, "
            f"{changes.removed:,} removed; kept as they are: {format_count(changes.kept_files, 'file')} "
            f"({format_bytes(changes.kept_bytes)})"
        )
        _print_garbage(request, outcome.manifest)
    else:
        print(f"prepared in {format_duration(seconds)} ({rate}/s)")
    count, recalled_bytes = outcome.recalled
    if count:
        partitions = format_count(count, "partition")
        print(f"{partitions} ({format_bytes(recalled_bytes)}) taken over from a run that was interrupted")
    origin = outcome.manifest.origin
    if origin is not None and origin.left_out:
        print(f"{format_count(origin.left_out, 'file')} left out by --include, --exclude or --sample")
    if outcome.skipped:
        print(f"skipped {outcome.skipped:,} sockets, pipes and devices")


def _print_garbage(request: Request, manifest: Manifest) -> None:
    garbage = manifest.garbage
    if garbage is None or not garbage.members:
        return
    share = garbage.bytes / max(1, sum(part.bytes for part in manifest.partitions))
    print(f"garbage in partitions: {format_bytes(garbage.bytes)} ({share:.0%}), {garbage.members:,} tar members")
    if garbage.misleading:
        print(
            f"{format_count(garbage.misleading, 'file')} would not be unpacked right with tar, because the old member "
            "of the name is of another kind: use --update --repack before you unpack"
        )
    elif share > _MUCH_GARBAGE:
        print(f"that is much: fanstore-prep ... {request.out} --update --repack writes the partitions anew")


def _list_problems(request: Request, outcome: Outcome) -> None:
    count = len(outcome.problems)
    print(f"{PROG}: {count:,} entries could not be read and are not in '{request.out}':", file=sys.stderr)
    for path, reason in outcome.problems:
        print(f"  {format_path(path)}: {reason}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
