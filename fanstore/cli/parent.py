"""--until-eof: a mount that ends with whoever started it, however that ends: a notebook, say (client/mounted.py).

Owns the thread that reads standard input to its end and then has this process end as by SIGURG, without hurry, so that
outputs are saved. Used by cli/mount.py, before trio runs, and by the process that waits for ``--launch``.
"""

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path

from fanstore.cli.daemon import detach_streams
from fanstore.fuse.signals import SIGNAL_WITHOUT_HURRY

#: Seconds between two signals: the first may come before anybody, or a launcher in between, listens.
_AGAIN_S = 0.5


def end_with_input(log: Path) -> None:
    """End when standard input ends; what is said after that goes to the log if nobody reads it any more."""
    # Of the signals for this process none may come to that thread: another one waits for them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=_wait, args=(log,), name="input", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(log: Path) -> None:
    with contextlib.suppress(OSError):  # a terminal that has gone
        while os.read(0, 1 << 16):
            pass
    poll = select.poll()
    poll.register(2, 0)
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        with contextlib.suppress(BrokenPipeError):  # of what was still to be written there
            detach_streams(log)
    while True:
        os.kill(os.getpid(), SIGNAL_WITHOUT_HURRY)
        time.sleep(_AGAIN_S)
