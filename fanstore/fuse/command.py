"""The COMMAND that uses the mount: started when the mount is up, given the signals that we get, waited for.

Owns the child process; does not know what is mounted. Used by session.py, on the trio thread. The command stays in our
process group, so that it can use the terminal and a batch system reaches it like any other process of the job.
"""

import logging
import math
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TypeAlias

import trio

from fanstore.errors import FanstoreError
from fanstore.fuse.signals import SIGNAL_WITHOUT_HURRY, meant_by
from fanstore.telemetry.events import NOTABLE

log = logging.getLogger(__name__)

Process: TypeAlias = "trio.Process"

#: Seconds that a command may take to end after a signal before it is killed: as long as most batch systems give.
KILL_AFTER_S = 10.0
#: A batch system signals mpirun and its processes, and mpirun signals them again: within this time it counts once.
SAME_SIGNAL_S = 1.0


class CommandError(FanstoreError):
    """The command cannot be started. The exit code is the one that shells use for the same reason."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def check_command(argv: Sequence[str]) -> None:
    """Refuse a program that is nowhere in PATH before anything is staged. A path may lead to the mount itself."""
    if "/" not in argv[0] and shutil.which(argv[0]) is None:
        raise CommandError(f"command '{argv[0]}' was not found", 127)


async def run_command(argv: Sequence[str], environment: Mapping[str, str], signals: AsyncIterator[int]) -> int:
    """Run the command to its end; its exit code, or 128 plus the number of the signal that ended it.

    ``signals`` gives the numbers of the signals that arrive. The first is passed on; a second one after
    SAME_SIGNAL_S, or KILL_AFTER_S without one, kills the command. After the signal without hurry it has all the time
    that the batch system gives.
    """
    with trio.open_signal_receiver(signal.SIGUSR1) as warnings:  # before the command can say that it is ready for them
        try:
            process = await trio.lowlevel.open_process(list(argv), env=dict(environment))
        except FileNotFoundError:
            raise CommandError(f"command '{argv[0]}' was not found", 127) from None
        except OSError as error:
            raise CommandError(f"command '{argv[0]}' cannot be started: {error.strerror}", 126) from None
        code = await _wait(process, signals, warnings)
    log.info("the command ended with %d", code, extra=NOTABLE)
    return code if code >= 0 else 128 - code


async def _wait(process: Process, signals: AsyncIterator[int], warnings: AsyncIterator[int]) -> int:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_pass_on, signals, process)
        nursery.start_soon(_pass_on_warnings, warnings, process)
        with trio.CancelScope(shield=True):  # whatever happens to us, nobody else waits for the child
            code = await process.wait()
        nursery.cancel_scope.cancel()
    return code


async def _pass_on_warnings(warnings: AsyncIterator[int], process: Process) -> None:
    """SIGUSR1 is how batch systems announce the end (sbatch --signal=USR1@60), so that a command can save its state."""
    async for number in warnings:
        log.info("SIGUSR1 is passed on to the command")
        process.send_signal(number)


async def _pass_on(signals: AsyncIterator[int], process: Process) -> None:
    number = await anext(signals)
    name = signal.Signals(number).name
    if number == signal.SIGINT and _terminal_tells_everybody():
        log.info("SIGINT: the terminal has given it to the command as well")
    else:
        meant = meant_by(number)
        log.info("%s is passed on to the command%s", name, "" if meant == number else " as SIGTERM", extra=NOTABLE)
        process.send_signal(meant)
    first_s = trio.current_time()
    with trio.move_on_after(math.inf if number == SIGNAL_WITHOUT_HURRY else KILL_AFTER_S) as patience:
        while True:
            await anext(signals)
            if trio.current_time() - first_s > SAME_SIGNAL_S:
                break
    reason = f"did not end within {KILL_AFTER_S:g} s of {name}" if patience.cancelled_caught else "got a second signal"
    log.warning("the command %s and is killed", reason)
    process.kill()


def _terminal_tells_everybody() -> bool:
    """Whether Ctrl-C reaches the command directly: the terminal signals its whole foreground process group.

    A second SIGINT from us would interrupt the clean-up that the first one has started in the command.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False  # no terminal
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
