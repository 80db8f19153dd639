"""fanstore-run: a program that reads the dataset of a mount by itself, on a mount that is up.

Asks the daemon for what preloaded programs need (client/preload.py), and becomes the program.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fanstore.cli.common import make_parser, parse, run
from fanstore.client.connection import connect
from fanstore.client.hooking import hook_environment
from fanstore.client.preload import environment
from fanstore.client.protocol import ControlError
from fanstore.errors import MountError, UsageError
from fanstore.fuse.command import CommandError
from fanstore.fuse.mountpoint import NotAnsweringError, within_limit
from fanstore.fuse.unmounted import connect_to
from fanstore.mounttable import find_mount
from fanstore.paths import resolve
from fanstore.prefetch.specification import HOOKED_MODES

PROG = "fanstore-run"

#: Seconds for the daemon to write the index for programs: some hundred megabytes for the largest datasets.
PRELOAD_LIMIT_S = 60.0

_DESCRIPTION = """\
Run a program that reads files of a mounted dataset without asking the kernel: a preloaded library answers open, read,
seek and stat from the dataset's index and from the partition files on this node. Everything else goes to the mount, as
if there were no library. fanstore-mount --preload does the same for its COMMAND."""

_EPILOG = """\
examples:
  fanstore-mount /shared/imagenet.fan /tmp/imagenet --local /local/ssd --background
  fanstore-run /tmp/imagenet -- python train.py --data /tmp/imagenet
  fanstore-stat /tmp/imagenet                 "intercepted" says what was answered like that

The program and all that it starts are intercepted. FANSTORE_PRELOAD=0 in its environment switches that off, and
FANSTORE_PRELOAD_LOG=FILE says what each call did. The program finds FANSTORE_MOUNT, FANSTORE_RANK and FANSTORE_SIZE in
its environment. What is answered, and what is not: docs/interception.md.

exit codes: that of the COMMAND; 127 not found, 126 cannot be run; 1 error, 2 wrong usage."""


def main() -> int:
    """Entry point of the command."""
    return run(PROG, lambda: _main(sys.argv[1:]))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.usage = "%(prog)s MOUNTPOINT -- COMMAND ..."
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", type=Path, help="where the dataset is mounted")
    return parser


def _main(argv: Sequence[str]) -> int:
    words = list(argv)
    position = words.index("--") if "--" in words else len(words)
    command = words[position + 1 :]
    if not command and len(words[:position]) > 1 and not words[0].startswith("-"):
        right = shlex.join([PROG, words[0], "--", *words[1:position]])
        raise UsageError(f"the COMMAND goes behind --, as in: {right}")
    args = parse(_parser(), words[:position])
    if not command:
        raise UsageError("which program? fanstore-run MOUNTPOINT -- COMMAND")
    point, config = _config(args.mountpoint)
    variables = {
        "FANSTORE_MOUNT": str(point),
        "FANSTORE_RANK": str(config.get("rank", 0)),
        "FANSTORE_SIZE": str(config.get("size", 1)),
    }
    variables |= environment(_state(point, config), os.environ)
    order = config.get("order")
    if order in HOOKED_MODES and config.get("control_socket"):
        variables |= hook_environment(config["control_socket"], os.environ, arranges=order == "locality")
    try:
        os.execvpe(command[0], command, os.environ | variables)
    except FileNotFoundError:
        raise CommandError(f"command '{command[0]}' was not found", 127) from None
    except OSError as error:
        raise CommandError(f"command '{command[0]}' cannot be started: {error.strerror}", 126) from None


def _config(path: Path) -> tuple[Path, dict[str, Any]]:
    point = resolve(path)
    mount = find_mount(point)
    if mount is None or not mount.is_fanstore:
        client = connect_to(point, PROG)
        if client is None:
            raise MountError(f"no FanStore dataset is mounted on {point}, nor served there without a mount")
        with client:
            return point, json.loads(client.ask("stat", name="config.json").values["content"])
    try:
        return point, json.loads(within_limit((point / ".fanstore" / "config.json").read_bytes))
    except NotAnsweringError as error:
        raise MountError(f"the mount {point} does not answer: {error}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise MountError(f"cannot read {point}/.fanstore/config.json: {reason}") from None


def _state(point: Path, config: dict[str, Any]) -> str:
    client = connect(config, PROG)
    if client is None:
        raise MountError(
            f"the daemon of {point} cannot be asked: it belongs to another user, or is of another version of FanStore"
        )
    with client:
        try:
            return str(client.ask("preload", PRELOAD_LIMIT_S).values["state"])
        except ControlError as error:
            raise MountError(str(error)) from None
