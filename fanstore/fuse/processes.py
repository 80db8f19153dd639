"""Naming a process for ever: its number and the moment it started. Any thread."""

import os
import select
from pathlib import Path


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; OSError if there is none."""
    # The name in parentheses may hold blanks and parentheses itself; what follows the last one is fields 3 to 52.
    text = Path(f"/proc/{pid}/stat").read_bytes()
    return int(text.rpartition(b")")[2].split()[19])


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

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended within the limit."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(max(0.0, limit_s) * 1000))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
