"""Naming a process for ever: its number and the moment it started; waiting for its end; how it serves idly.

Used by whoever leaves a note about itself that may outlive it (config.json, the users of a dataset), and by a process
that works for the daemon in the background.
"""

import ctypes
import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import Self

_PR_SET_PDEATHSIG = 1


def serve_idly() -> None:
    """This process dies with its parent, and gets a processor from now on only while no other process wants it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):  # some containers forbid it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.nice(19)


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; OSError if there is none."""
    return int(_fields(pid)[19])


def is_alive(pid: int, started: int) -> bool:
    """Whether the process that had this number and start is there, and not only waiting for its parent to notice."""
    try:
        fields = _fields(pid)
    except OSError:
        return False
    return int(fields[19]) == started and fields[0] not in (b"Z", b"X")


def _fields(pid: int) -> list[bytes]:
    """Fields 3 to 52 of /proc/PID/stat; OSError if there is no such process."""
    # The name in parentheses may hold blanks and parentheses itself; what follows the last one is what is wanted.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


class ProcessWatch:
    """Waits for the end of a process that is not our child.

    Attributes:
        pid: its number.
        _fd: a pidfd, which means this very process even when its number is used again; -1 after ``close``.
    """

    def __init__(self, pid: int, started: int) -> None:
        """ProcessLookupError if the process that had this number and start is not there any more."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        try:
            same = start_ticks(pid) == started
        except OSError:
            same = False
        if not same:
            self.close()
            raise ProcessLookupError(f"process {pid} is another one by now")

    @classmethod
    def adopt(cls, pid: int, descriptor: int) -> Self:
        """A process that has handed out a pidfd of itself, which is ours from now on. Its number is for messages."""
        watch = cls.__new__(cls)
        watch.pid, watch._fd = pid, descriptor
        return watch

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended within the limit."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(max(0.0, limit_s) * 1000))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
