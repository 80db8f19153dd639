"""fanstore-plan: what a job will take, before it runs.

Owns the list of its subcommands; each has a module here (``plan_simulate`` and so on) with ``main`` and ``_parser``.
Main thread.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from fanstore.cli.common import make_parser, parse, run

PROG = "fanstore-plan"

#: The subcommands, and what each does.
SUBCOMMANDS = {
    "job": "what a job will do, and whether FanStore pays",
    "measure": "measure nodes, network and shared file system",
    "simulate": "compare policies in published or your own scenarios",
    "scale": "simulate FanStore on very many nodes",
    "hardware": "how much hardware it takes to keep GPUs busy",
}

_DESCRIPTION = """\
Say what a training job will take before it runs: how long, how much it reads from the shared file system, what limits
it. docs/model.md explains the model behind it."""

_EPILOG = """\
examples:
  mpirun -n 4 --map-by ppr:1:node fanstore-plan measure site.toml --shared /shared/me --local /local/ssd
  fanstore-plan job /shared/imagenet.fan --nodes 16 --gpus 4 --samples-per-second 400 --epochs 90
  fanstore-plan simulate --scenario S2 --mode corrected       eleven policies in a published scenario
  fanstore-plan hardware --gpus 64                            disks, network interfaces and cores that feed 64 GPUs

exit codes: 0 done, 1 error, 2 wrong usage, 130 interrupted."""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.usage = "%(prog)s COMMAND [arguments]"
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, summary in SUBCOMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of the subcommands, by the names of their manual pages."""
    return {f"{PROG}-{name}": _module(name)._parser() for name in SUBCOMMANDS}


def _module(name: str) -> Any:
    return importlib.import_module(f"fanstore.cli.plan_{name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run(PROG, lambda: _main(words))


def _main(words: Sequence[str]) -> int:
    if words and words[0] in SUBCOMMANDS:
        module = _module(words[0])
        code: int = module.main(parse(module._parser(), words[1:]))
        return code
    parser = _parser()
    parse(parser, words)  # --help, --version, or what is wrong
    parser.print_help(sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
