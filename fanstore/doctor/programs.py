"""Programs that checks start: always with a limit, always ended, never waiting for a terminal.

Owns the processes. Each is the leader of a session of its own, so that what it starts can be ended with it. ``run`` is
called from the thread of a check; ``stop`` from the main thread, when the user has enough.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Seconds between asking a program to end and killing it: a launcher ends its processes, a daemon unmounts.
GRACE_S = 10.0

#: This Python, without looking for modules in the working directory, where a clone or anything else may lie.
PYTHON = (sys.executable, "-P")

#: Variables by which a launcher tells a process that it is one of several. What is started here is alone.
_LAUNCHER_PREFIXES = ("OMPI_COMM_WORLD_", "OMPI_MCA_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "HYDRA_")


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        code: exit code, negative for a signal; None if it was ended because of the limit.
    """

    code: int | None
    out: str
    err: str

    @property
    def said(self) -> str:
        """The line that explains a failure, as far as one line can."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip(" -*=")]
        errors = [line for line in lines if "error" in line.lower()]
        return (errors or lines or [f"exit code {self.code}"])[-1 if not errors else 0]


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without a launcher's marks, so that a program started in a job is not one of its ranks."""
    return {name: value for name, value in environment.items() if not name.startswith(_LAUNCHER_PREFIXES)}


class Programs:
    """The programs that run at the moment.

    Attributes:
        _running: guarded by ``_lock``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(self, command: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> Ended:
        """Run it to its end or to the limit. Raises OSError if it cannot be started."""
        with self._lock:
            if self._stopped:
                raise InterruptedError("stopped")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**(os.environ if env is None else env), "LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
            self._running.add(process)
        try:
            out, err = process.communicate(timeout=limit_s)
            return Ended(process.returncode, out, err)
        except subprocess.TimeoutExpired:
            out, err = _end(process)
            return Ended(None, out, err)
        finally:
            with self._lock:
                self._running.discard(process)

    def stop(self) -> None:
        """Ask all to end; their ``run`` returns then. No other can be started any more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """SIGTERM, time to clean up, then SIGKILL for it and all that it has started."""
    process.terminate()
    try:
        return process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        return "", ""  # somebody who left the session still holds its output; it itself is dead
