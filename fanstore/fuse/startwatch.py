"""Time limits for the start of a mount, so that a hang becomes an error with evidence instead of silence.

Owns the watchdog of faulthandler, which works even when no Python code can run, and the pipe on which a daemon tells
the command that started it how far it has got (cli/daemon.py reads it). Used by session.py, on the trio thread.
"""

import faulthandler
import os
from typing import TextIO

import trio

from fanstore.errors import MountError
from fanstore.units import format_duration

#: The watchdog that ends the process waits this much longer than the limit that Python code keeps, which can clean up.
HARD_EXTRA_S = 10.0


class StartWatch:
    """Guards one step of the start after the other.

    Attributes:
        limit_s: what each step may take.
        evidence: where the stacks of a hanging process go: the log, or standard error. Must have a descriptor.
        evidence_name: what to call it in a message.
        _pipe: descriptor on which the waiting parent is told, or -1: one line per step with the seconds that it must
            wait for the next line, 0 for no limit; ``ready`` when the mount is up; ``told`` when it failed and said so.
    """

    def __init__(self, limit_s: float, evidence: TextIO, evidence_name: str, pipe: int = -1) -> None:
        self.limit_s = limit_s
        self.evidence = evidence
        self.evidence_name = evidence_name
        self._pipe = pipe

    def begin(self, *, limited: bool = True) -> None:
        """A step begins; with ``limited`` false one that may take as long as it likes (staging shows its progress)."""
        faulthandler.cancel_dump_traceback_later()
        hard_limit_s = self.limit_s + HARD_EXTRA_S if limited else 0.0
        if limited:
            faulthandler.dump_traceback_later(hard_limit_s, file=self.evidence, exit=True)
        self._tell(f"{hard_limit_s:g}")

    def ready(self) -> None:
        """The start is over: the mount answers."""
        faulthandler.cancel_dump_traceback_later()
        self._tell("ready")
        self._close()

    def failed(self) -> None:
        """The start is over: it failed, and the user was told why."""
        faulthandler.cancel_dump_traceback_later()
        self._tell("told")
        self._close()

    def give_up(self, scope: trio.CancelScope, what: str) -> None:
        """After a step under ``scope``: if its limit has cancelled it, leave the stacks as evidence and raise."""
        if scope.cancelled_caught:
            faulthandler.dump_traceback(file=self.evidence, all_threads=True)
            raise MountError(
                f"{what} took longer than {format_duration(self.limit_s)}; where it hangs is in {self.evidence_name}"
            )

    def _tell(self, line: str) -> None:
        if self._pipe >= 0:
            try:
                os.write(self._pipe, line.encode() + b"\n")
            except BrokenPipeError:
                self._close()  # the parent was killed; the mount goes on all the same

    def _close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
