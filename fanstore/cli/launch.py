"""--launch: start the daemons of all nodes through an MPI launcher, in the foreground or in the background.

Owns the launcher's process and how its daemons tell that they are up: rank 0 prints READY_LINE, and the launcher passes
on what its ranks print, wherever they run. Used by cli/mount.py.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fanstore.cli.daemon import in_background
from fanstore.errors import UsageError

#: Set for daemons that were started here and must say when they are up.
VARIABLE = "FANSTORE_LAUNCHED"
READY_LINE = "fanstore: ready"


def launch(launcher: str, argv: Sequence[str], log_file: Path | None) -> int:
    """Run ``LAUNCHER fanstore-mount ARGV``; with ``log_file`` in the background, returning when all mounts are up."""
    words = shlex.split(launcher)
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"the launcher of --launch '{launcher}' was not found; load the MPI module, or name its path")
    program = shutil.which(sys.argv[0]) or sys.argv[0]
    command = [*words, os.path.abspath(program), *argv]
    if log_file is None:
        sys.stdout.flush()
        os.execvp(command[0], command)
    directory = os.getcwd()  # a daemon leaves it, but relative paths among the arguments mean it
    return in_background(lambda pipe: _run(command, directory, pipe, log_file), log_file)


def _run(command: Sequence[str], directory: str, pipe: int, log_file: Path) -> int:
    """In the detached process: run the launcher to its end and pass the news on."""
    os.write(pipe, b"0\n")  # no limit from here: the daemons have limits of their own
    ready = False
    with open(log_file, "ab", opener=_private) as log:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, VARIABLE: "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            if not ready:
                if line.strip() == READY_LINE.encode():
                    ready = True
                    os.write(pipe, b"ready\n")
                    _detach()
                else:
                    sys.stderr.buffer.write(line)  # why it does not come up, where the user looks
                    sys.stderr.flush()
        code = process.wait()
    if not ready:
        os.write(pipe, b"told\n")
    return code or (0 if ready else 1)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _detach() -> None:
    """The command that started us has returned: let go of its standard output and error."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
