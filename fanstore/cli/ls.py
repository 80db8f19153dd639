"""fanstore-ls: what is in a prepared dataset, without a mount."""

from __future__ import annotations

import argparse
import stat
import sys
import time
from collections.abc import Iterator

from fanstore.cli.common import make_parser, parse, run
from fanstore.format.codec_table import CODECS
from fanstore.format.contents import find, own_path
from fanstore.format.index import Index
from fanstore.format.prepared import PreparedDataset
from fanstore.units import format_path

PROG = "fanstore-ls"

_DESCRIPTION = """\
List a directory of a prepared dataset, or a file. Nothing is mounted, and only the index is read."""

_EPILOG = """\
examples:
  fanstore ls /data/imagenet.fan                       the top directory
  fanstore ls -l /data/imagenet.fan train/n01440764    with mode, size, time, codec and partition
  fanstore ls -R /data/imagenet.fan | wc -l            every path below it, one per line

exit codes: 0 listed; 1 there is no such name, or the dataset cannot be read; 2 wrong usage"""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "prepared", metavar="PREPARED", help="a dataset made by fanstore-prep: a directory or an address"
    )
    parser.add_argument("path", metavar="NAME", nargs="?", default="", help="what to list (default: the top directory)")
    parser.add_argument(
        "-l", "--long", action="store_true", help="mode, size, time, codec, stored size and partition before each name"
    )
    parser.add_argument(
        "-R", "--recursive", action="store_true", help="everything below it, as paths; directories end with a slash"
    )
    parser.add_argument(
        "-0", "--null", action="store_true", help="end names with a zero byte, for xargs -0: names may have newlines"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    return run(PROG, lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    arguments = parse(_parser(), argv)
    prepared = PreparedDataset.open(arguments.prepared)
    index = prepared.index
    top = find(index, own_path(arguments.path))
    end = b"\0" if arguments.null else b"\n"
    raw = arguments.null or not sys.stdout.isatty()
    for name, entry in _listed(index, top, arguments.recursive):
        shown = name if raw else _printable(name)
        line = _long(prepared, entry).encode() + shown if arguments.long else shown
        sys.stdout.buffer.write(line + end)
    sys.stdout.flush()
    return 0


def _printable(name: bytes) -> bytes:
    """On a terminal, names cannot move the cursor or change colours."""
    return format_path(name)[1:-1].encode()


def _listed(index: Index, top: int, recursive: bool) -> Iterator[tuple[bytes, int]]:
    if not stat.S_ISDIR(index.mode[top]):
        yield index.name(top), top
        return
    pending: list[tuple[bytes, int]] = [(b"", top)]
    while pending:
        prefix, directory = pending.pop()
        below: list[tuple[bytes, int]] = []
        for child in index.children(directory):
            name = prefix + index.name(child)
            is_directory = stat.S_ISDIR(index.mode[index.inode[child]])
            yield (name + b"/" if is_directory else name), child
            if recursive and is_directory:
                below.append((name + b"/", child))
        pending += reversed(below)


def _long(prepared: PreparedDataset, entry: int) -> str:
    index = prepared.index
    own = index.inode[entry]
    mode, size = index.mode[own], index.size[own]
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(index.mtime_ns[own] / 1e9))
    stored = ""
    if stat.S_ISREG(mode) and size:
        file = prepared.manifest.partitions[index.partition[own]].file.rpartition("/")[2]
        stored = f"{CODECS[index.codec[own]].name} {index.stored_size[own]} {file}"
    return f"{stat.filemode(mode)} {size:>12} {changed}  {stored:<28} "


if __name__ == "__main__":
    sys.exit(main())
