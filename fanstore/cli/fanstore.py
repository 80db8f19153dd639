"""fanstore: one name for all commands, the versions for a bug report, and shell completion.

``fanstore mount ...`` is ``fanstore-mount ...``. Owns the list of commands; each has a module here of its name, with
``main`` and ``_parser``. Main thread.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from fanstore.cli.common import make_parser, parse, run
from fanstore.cli.completion import SHELLS, script

PROG = "fanstore"

#: The commands, in the order in which people meet them, and what each does.
COMMANDS = {
    "prep": "turn directories and tar files into a prepared dataset",
    "mount": "mount a prepared dataset, perhaps for the time of a command",
    "run": "run a program that reads a mounted dataset by itself",
    "umount": "unmount it, and wait for its end",
    "stat": "show what a mount or a job has done so far",
    "info": "say what is in a prepared dataset, and the room that it needs",
    "ls": "list a prepared dataset without mounting it",
    "cat": "write files of a prepared dataset to standard output",
    "verify": "check a prepared dataset, also against its source",
    "plan": "say what a job will take, before it runs",
    "clean": "show or remove copies that --keep-local has left",
    "doctor": "check this node and say what to fix",
}

_DESCRIPTION = """\
Serve deep-learning datasets of many small files from a few large ones, on one node or on all nodes of a job."""

_EPILOG = """\
examples:
  fanstore --version                          versions of everything, for a bug report
  fanstore doctor                             is this node fit?
  fanstore prep /data/imagenet /data/imagenet.fan
  fanstore mount /data/imagenet.fan /tmp/imagenet -- python train.py --data /tmp/imagenet
  fanstore plan simulate --scenario S2        what a job takes, with eleven ways to read its data
  eval "$(fanstore completion bash)"          completion in this shell; put the line into ~/.bashrc to keep it

exit codes: those of the command; 2 wrong usage."""


class _Versions(argparse.Action):
    """--version: found out only when it is asked for, since it takes a moment."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        from fanstore.doctor.programs import Programs
        from fanstore.doctor.versions import report

        print(report(Programs()))
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG, version=_Versions)
    parser.usage = "%(prog)s COMMAND [arguments]"
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    shell = commands.add_parser("completion", help="print shell completion for all commands")
    shell.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of all commands by the name of the manual page, this one first; subcommands behind their command."""
    found = {PROG: _parser()}
    for name in COMMANDS:
        module = importlib.import_module(f"fanstore.cli.{name}")
        found[f"{PROG}-{name}"] = module._parser()
        if name == "plan":
            found |= module.parsers()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        # From here on this is that command: its name in messages, and what --launch starts on other nodes.
        sys.argv = [os.path.join(os.path.dirname(sys.argv[0]), f"{PROG}-{words[0]}"), *words[1:]]
        module = "supervisor" if words[0] == "mount" else words[0]
        code: int = importlib.import_module(f"fanstore.cli.{module}").main()
        return code
    return run(PROG, lambda: _main(words))


def _main(words: Sequence[str]) -> int:
    parser = _parser()
    args = parse(parser, words)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    print(script(args.shell, parsers(), COMMANDS), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
