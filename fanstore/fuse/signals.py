"""The signals that end a daemon: which of them, whether one has come, and what they interrupt.

Owns no handler of its own: trio's receiver does (``trio.open_signal_receiver``). One place waits for signals at any
time: the start, the command, or the end. Used by session.py, on the trio thread.
"""

import contextlib
import logging
import signal
from collections.abc import AsyncIterator

import trio

from fanstore.errors import FanstoreError
from fanstore.telemetry.events import NOTABLE

log = logging.getLogger(__name__)

#: Ends a job on all of its nodes without hurry. mpirun takes SIGTERM, SIGINT and SIGHUP for itself and kills everything
#: within half a second; this one it passes on (Open MPI 5), and programs that do not know it do not notice it.
SIGNAL_WITHOUT_HURRY = signal.SIGURG


class StoppedError(FanstoreError):
    """A signal ended the start; the exit code is the one that shells use."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} before the mount was up")
        self.exit_code = 128 + meant_by(number)


class Signals(AsyncIterator[int]):
    """The signals that arrive, and whether there was one that leaves no time.

    Attributes:
        seen: a signal was taken after which a launcher kills us in a moment.
    """

    def __init__(self, received: AsyncIterator[int]) -> None:
        self._received = received
        self.seen = False

    async def __anext__(self) -> int:
        number = await anext(self._received)
        if number != SIGNAL_WITHOUT_HURRY:
            self.seen = True
        return number


def meant_by(number: int) -> int:
    """The signal for the command, and for exit codes."""
    return signal.SIGTERM if number == SIGNAL_WITHOUT_HURRY else number


def ending_signals() -> list[int]:
    """Signals that end us; not those that whoever started us wants ignored (nohup, or & in a script)."""
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, SIGNAL_WITHOUT_HURRY)
    return [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.asynccontextmanager
async def stopped_by(signals: AsyncIterator[int]) -> AsyncIterator[None]:
    """Cancel the body when a signal arrives, and raise StoppedError."""
    number = 0

    async def wait() -> None:
        nonlocal number
        number = await anext(signals)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        yield
        nursery.cancel_scope.cancel()
    if number:
        raise StoppedError(number)


async def log_one(signals: AsyncIterator[int], scope: trio.CancelScope, *, hurried: bool = False) -> None:
    """Cancel the scope when a signal arrives; with ``hurried`` only one that leaves no time."""
    number = await anext(signals)
    while hurried and number == SIGNAL_WITHOUT_HURRY:
        number = await anext(signals)
    log.info("%s: ending", signal.Signals(number).name, extra=NOTABLE)
    scope.cancel()
