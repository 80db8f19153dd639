"""Going to the background: a detached process, its log, and a parent that returns when the start has succeeded or not.

Owns the fork and the standard streams; what runs is given by the caller. The daemon keeps the parent's standard error
until it is up, so that progress and errors of the start appear where the user looks; then its streams go to the log.
Used by cli/mount.py, before trio runs and before any library has started threads.
"""

import contextlib
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from fanstore.errors import MountError

#: Logs of earlier mounts that are kept in the default directory.
KEPT_LOGS = 30

#: Seconds that the parent waits longer than the daemon's own watchdog.
_PARENT_EXTRA_S = 10.0


def default_log(label: str) -> Path:
    """A new file name in this user's private directory for logs; the oldest logs there are removed.

    In the home directory where there is one: on a cluster it outlives the job and can be seen from the login node.
    """
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    for directory in (Path(home, "fanstore"), Path(tempfile.gettempdir(), f"fanstore-logs-{os.getuid()}")):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.lstat()
            if status.st_uid == os.getuid() and status.st_mode & 0o022 == 0 and os.access(directory, os.W_OK):
                _remove_oldest(directory)
                return directory / f"mount-{label}-{os.getpid()}.log"
        except OSError:
            continue  # no home, or it is read-only: the next one
    raise MountError("no directory for a log file; name one with --log FILE")


def _remove_oldest(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another mount that starts at the same time cleans up as well
        logs = sorted(directory.glob("mount-*.log"), key=lambda path: path.stat().st_mtime)
        for path in logs[: -KEPT_LOGS + 1]:
            path.unlink(missing_ok=True)


def in_background(body: Callable[[int], int], log: Path) -> int:
    """Run ``body`` in a detached process and return its exit code there, at its end.

    In the parent, wait until it is up and return 0, or until it has said why it cannot be and return its exit code.
    ``body`` gets the descriptor on which to report (fuse/startwatch.py). Raises MountError in the parent if the daemon
    has ended without a word.
    """
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        os.setsid()
        os.chdir("/")
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        return body(send)
    os.close(send)
    with open(receive, "rb", buffering=0) as reports, _passing_signals_to(pid):
        return _wait_until_up(pid, reports.fileno(), log)


def detach_streams(log: Path) -> None:
    """The daemon is up: from now on what anything prints goes to the log."""
    with open(log, "ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _wait_until_up(pid: int, reports: int, log: Path) -> int:
    told = False
    limit_s = _PARENT_EXTRA_S
    pending = b""
    while True:
        readable, _, _ = select.select([reports], [], [], limit_s or None)
        if not readable:
            os.kill(pid, signal.SIGKILL)
            raise MountError(f"the daemon (process {pid}) did not start in time and was killed; see {log}")
        data = os.read(reports, 4096)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            if line == b"ready":
                return 0
            if line == b"told":
                told = True
            else:
                limit_s = float(line) + _PARENT_EXTRA_S if float(line) else 0.0
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if told and code > 0:
        return code
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    raise MountError(f"the daemon (process {pid}) {how} before the mount was up; what it last did is in {log}")


@contextlib.contextmanager
def _passing_signals_to(pid: int) -> Iterator[None]:
    """Ctrl-C reaches only us, since the daemon has a session of its own; it cleans up, and we see it end."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(pid, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
