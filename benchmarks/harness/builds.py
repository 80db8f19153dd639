"""Other clones of FanStore that take part in a benchmark, such as one of an earlier commit: ``--build NAME=CLONE``.

Used by the scripts that compare them with this clone in one run. Owns nothing.
"""

import argparse
from pathlib import Path


def add_build_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--build",
        action="append",
        default=[],
        metavar="NAME=CLONE",
        help="another clone of FanStore, set up, to be compared as well: its figures have NAME at the end",
    )


def builds_of(arguments: argparse.Namespace) -> list[tuple[str, Path]]:
    """Name and clone of each."""
    return [(name, Path(clone)) for name, _, clone in (item.partition("=") for item in arguments.build)]


def commands_of(clone: Path) -> Path:
    """The folder of its commands."""
    return clone / ".venv" / "bin"
