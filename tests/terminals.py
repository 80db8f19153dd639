"""An interactive program on a terminal of its own, as a person uses it. Used by tests of completion and of colours.

Owns the process and the terminal; both are gone after the context.
"""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

#: Seconds for an answer; it comes at once, and the limit is only there to end a hang.
LIMIT_S = 30.0


class Terminal:
    """What was typed and what was shown.

    Attributes:
        shown: everything so far.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.shown = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, text: str) -> str:
        """Until it is shown; what was shown up to then, from the last such call on."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.shown:
            if not self._read(deadline):
                pytest.fail(f"'{text}' was not shown; instead:\n{self.shown}", pytrace=False)
        before, _, self.shown = self.shown.partition(text)
        return before

    def read_all(self) -> str:
        """Until the program has ended."""
        deadline = time.monotonic() + LIMIT_S
        while self._read(deadline):
            pass
        return self.shown

    def _read(self, deadline: float) -> bool:
        if not select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:
            return False  # that is how a terminal ends whose program has ended
        self.shown += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def on_terminal(
    command: Sequence[str], environment: Mapping[str, str], size: tuple[int, int] | None = None
) -> Iterator[Terminal]:
    """Run a program with a terminal for input and output; ``size``: of so many columns and lines."""
    ours, theirs = pty.openpty()
    if size is not None:
        Terminal(ours).resize(*size)
    try:
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
    finally:
        os.close(theirs)
    try:
        yield Terminal(ours)
    finally:
        os.close(ours)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)
