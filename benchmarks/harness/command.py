"""Running other programs with a time limit, in a process group of their own, which is gone when the call returns.

Owns processes only, not mounts or files. Used by everything in the harness that runs a program. Main thread.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Programs that setup-peers installs for the benchmarks alone.
PEERS_BIN = Path(__file__).parent.parent / ".peers" / "bin"
#: Seconds that a program which was asked to end has before it is killed.
GRACE_S = 10.0


class BenchmarkError(Exception):
    """Something a benchmark cannot go on with; the message is for the person who started it."""


@dataclass(frozen=True)
class Finished:
    """A program that ended with code 0."""

    seconds: float
    stdout: str
    stderr: str


def find_program(name: str) -> str | None:
    """The program as the benchmarks run it: beside this interpreter, then what setup-peers installed, then PATH."""
    places = [str(Path(sys.executable).parent), str(PEERS_BIN), os.environ.get("PATH", os.defpath)]
    return shutil.which(name, path=os.pathsep.join(places))


def program(name: str) -> str:
    """The same; without it there is nothing to measure."""
    found = find_program(name)
    if found is None:
        raise BenchmarkError(f"{name} is missing: scripts/setup installs it")
    return found


def launcher(ranks: int) -> list[str]:
    """Starts so many processes on this machine, whatever its cores."""
    options = ["--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    return [program("mpirun"), *(["--allow-run-as-root"] if os.geteuid() == 0 else []), *options]


def only_on(rank: int) -> list[str]:
    """In front of the command of a job: it runs on that node; those of the others end at once."""
    return ["sh", "-c", f'[ "$FANSTORE_RANK" != {rank} ] || exec "$@"', "sh"]


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a program that was started here as the leader of its own group, and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_S)
            # The leader is gone; what it left in its group gets no grace.
            os.killpg(process.pid, signal.SIGKILL)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
        break


@contextmanager
def started(argv: Sequence[str | os.PathLike[str]], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A program that runs as long as the block; its output goes to ``log``."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        end_group(process)


def run(argv: Sequence[str | os.PathLike[str]], timeout_s: float, cwd: Path | None = None) -> Finished:
    """Run a program to its end; BenchmarkError when it fails or takes longer than ``timeout_s``."""
    name = Path(argv[0]).name
    begin = time.monotonic()
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{name} took longer than {timeout_s:.0f} s") from None
    finally:
        if process.returncode is None:
            end_group(process)
    seconds = time.monotonic() - begin
    text = stderr.decode(errors="replace")
    if process.returncode != 0:
        # mpirun adds eight lines of its own to what its processes have said.
        last_lines = " | ".join(line.strip() for line in text.splitlines()[-12:] if line.strip(" -"))
        raise BenchmarkError(f"{name} ended with code {process.returncode}: {last_lines}")
    return Finished(seconds, stdout.decode(errors="replace"), text)
