"""--launch: start the daemons of all nodes through an MPI launcher, in the foreground or in the background.

Owns the launcher's process, how its daemons tell that they are up, and what its end means. Rank 0 prints READY_LINE,
and at the end SUCCESS_LINE, and the launcher passes on what its ranks print, wherever they run. An exit code of 0
without that proof is an error: a launcher may say nothing of processes that were killed. Used by cli/mount.py.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from fanstore.cli.daemon import in_background
from fanstore.cli.supervisor import PASSED_ON, wait_passing_signals_on
from fanstore.errors import MountError, UsageError
from fanstore.fuse.success import STANDARD_OUTPUT, SUCCESS_LINE

#: Set for daemons that were started here and must say when they are up.
VARIABLE = "FANSTORE_LAUNCHED"
READY_LINE = "fanstore: ready"
#: For the last of what the launcher has printed; longer only if something that it has left holds its output open.
_LAST_WORDS_S = 5.0


def launch(launcher: str, argv: Sequence[str], log_file: Path | None) -> int:
    """Run ``LAUNCHER fanstore-mount ARGV``; with ``log_file`` in the background, returning when all mounts are up."""
    words = shlex.split(launcher)
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"the launcher of --launch '{launcher}' was not found; load the MPI module, or name its path")
    script = shutil.which(sys.argv[0])
    program = [os.path.abspath(script)] if script else [sys.executable, "-P", "-m", "fanstore.cli.fanstore", "mount"]
    # Not a file, which this machine may see later than the one that writes it.
    command = [*words, *program, "--success", str(STANDARD_OUTPUT), *argv]
    if log_file is None:
        return _run(command)
    directory = os.getcwd()  # a daemon leaves it, but relative paths among the arguments mean it
    return in_background(lambda pipe: _run_detached(command, directory, pipe, log_file), log_file)


def _check(code: int, proved: bool, launcher: str) -> int:
    """The exit code, if it can be believed. Raises MountError."""
    if code == 0 and not proved:
        raise MountError(
            f"{launcher} ended with 0, but not every node of the job has ended well: a daemon was killed (out of "
            "memory, often), or has never started; see the messages above"
        )
    return code


def _run(command: Sequence[str]) -> int:
    """In the foreground: what the launcher prints goes on to standard output, but for our line."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    sys.stdout.flush()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
    )
    found = threading.Event()
    reader = threading.Thread(target=_pass_on, args=(process, found), daemon=True)
    reader.start()
    status, _ = wait_passing_signals_on(process.pid, sender=-1)
    code = os.waitstatus_to_exitcode(status)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    reader.join(_LAST_WORDS_S)
    return _check(code if code >= 0 else 128 - code, found.is_set(), os.path.basename(command[0]))


def _pass_on(process: subprocess.Popen[bytes], found: threading.Event) -> None:
    """In a thread: what the launcher prints, as it comes, but for our line; ``found``: that was there."""
    assert process.stdout is not None
    wanted, held, readers = SUCCESS_LINE.encode(), b"", True
    while data := os.read(process.stdout.fileno(), 1 << 16):
        text = held + data
        if wanted + b"\n" in text:
            found.set()
            text = text.replace(wanted + b"\n", b"")
        # What may be the beginning of our line waits for the rest of it.
        begun = next((length for length in range(len(wanted), 0, -1) if text.endswith(wanted[:length])), 0)
        text, held = text[: len(text) - begun], text[len(text) - begun :]
        if readers:
            readers = _write(text)
    if readers:
        _write(held)


def _write(text: bytes) -> bool:
    """To standard output; whether anybody still reads it."""
    try:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        return False
    return True


def _run_detached(command: Sequence[str], directory: str, pipe: int, log_file: Path) -> int:
    """In the detached process: run the launcher to its end and pass the news on."""
    os.write(pipe, b"0\n")  # no limit from here: the daemons have limits of their own
    ready = found = False
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
            found = found or SUCCESS_LINE.encode() in line
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
            return code or 1
        try:
            return _check(code, found, os.path.basename(command[0]))
        except MountError as error:
            log.write(f"fanstore-mount: error: {error}\n".encode())
            return error.exit_code


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _detach() -> None:
    """The command that started us has returned: let go of its standard output and error."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
