"""What happened on a node that is worth telling: a bounded list, filled from the log.

Every warning and every error of FanStore is an event, and so is what is logged with ``extra=NOTABLE``: what a person
must know to understand a picture of the job, such as the end of staging. Owns the list; does not decide what is
logged. Installed on the logger ``fanstore`` by the session; read by job/account.py.

Records come from any thread, under the handler's own lock, which is held for an append; ``snapshot`` takes it, too.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

#: For ``log.info(…, extra=NOTABLE)``.
NOTABLE = {"notable": True}

#: Events that are kept: the first ones say how a trouble began, the last ones what became of it.
FIRST_KEPT, LAST_KEPT = 50, 100

#: Characters of a text that are kept. Names of files are in it.
LONGEST_TEXT = 400

_KINDS = {
    "staging": "staging",
    "node": "staging",
    "job": "nodes",
    "remote": "nodes",
    "copies": "nodes",
    "mpi": "nodes",
    "sources": "data",
    "store": "data",
    "outputs": "outputs",
    "saver": "outputs",
    "publisher": "outputs",
    "output_dir": "outputs",
    "writing": "outputs",
    "sequencer": "outputs",
    "remote_contents": "outputs",
    "recovery": "outputs",
    "command": "command",
}


class Event(NamedTuple):
    """One of them.

    Attributes:
        at_s: when, by the monotonic clock of this machine.
        level: ``info``, ``warning`` or ``error``. kind: what it is about, as a word for people.
    """

    at_s: float
    level: str
    kind: str
    text: str


class Events(logging.Handler):
    """The events of one daemon; all attributes are guarded by the handler's lock.

    Attributes:
        warnings, errors: how many there were of these, kept or not.
        left_out: events that are not kept.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.warnings = 0
        self.errors = 0
        self.left_out = 0
        self._first: list[Event] = []
        self._last: deque[Event] = deque(maxlen=LAST_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and not getattr(record, "notable", False):
            return
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 -- as every handler: a fault in a message is not one of the code that logs it
            self.handleError(record)
            return
        self._keep(record, text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…")

    def _keep(self, record: logging.LogRecord, text: str) -> None:
        if record.levelno >= logging.ERROR:
            level = "error"
            self.errors += 1
        elif record.levelno >= logging.WARNING:
            level = "warning"
            self.warnings += 1
        else:
            level = "info"
        event = Event(time.monotonic(), level, _KINDS.get(record.name.rpartition(".")[2], "mount"), text)
        if len(self._first) < FIRST_KEPT:
            self._first.append(event)
        else:
            self.left_out += len(self._last) == LAST_KEPT
            self._last.append(event)

    def snapshot(self) -> list[Event]:
        """Those that are kept, in order of time."""
        self.acquire()
        try:
            return [*self._first, *self._last]
        finally:
            self.release()
