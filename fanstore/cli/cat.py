"""fanstore-cat: the content of files of a prepared dataset, without a mount."""

from __future__ import annotations

import argparse
import stat
import sys

from fanstore.cli.common import make_parser, parse, run
from fanstore.errors import CorruptDataError, FanstoreError
from fanstore.format.contents import NoSuchFileError, Reader, describe_error, find, own_path
from fanstore.format.prepared import PreparedDataset
from fanstore.units import format_path

PROG = "fanstore-cat"

_DESCRIPTION = """\
Write the content of files of a prepared dataset to standard output, one after the other, decompressed and compared with
their checksums. Nothing is mounted."""

_EPILOG = """\
examples:
  fanstore cat /data/imagenet.fan train/n01440764/n01440764_36.JPEG > image.jpeg
  fanstore cat s3://data/imagenet.fan README

exit codes: 0 all were written; 1 one could not be, which is said; 2 wrong usage"""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "prepared", metavar="PREPARED", help="a dataset made by fanstore-prep: a directory or an address"
    )
    parser.add_argument("paths", metavar="NAME", nargs="+", help="a file, as it is called below the mount point")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    return run(PROG, lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    arguments = parse(_parser(), argv)
    prepared = PreparedDataset.open(arguments.prepared)
    code = 0
    with Reader(prepared) as reader:
        for text in arguments.paths:
            try:
                _write(prepared, reader, own_path(text))
            except FanstoreError as error:
                sys.stdout.flush()
                print(f"{PROG}: error: {error}", file=sys.stderr)
                code = 1
    sys.stdout.flush()
    return code


def _write(prepared: PreparedDataset, reader: Reader, path: bytes) -> None:
    entry = find(prepared.index, path)
    if not stat.S_ISREG(prepared.index.mode[entry]):
        raise NoSuchFileError(f"{format_path(path)} is a directory")
    chunks = reader.chunks(entry)
    while True:
        try:
            chunk = next(chunks, None)
        except (OSError, CorruptDataError) as error:
            raise CorruptDataError(describe_error(error, prepared, entry)) from error
        if chunk is None:
            return
        sys.stdout.buffer.write(chunk)


if __name__ == "__main__":
    sys.exit(main())
