"""This job as a user of the dataset that it reads, so that fanstore-prep does not replace it meanwhile.

Owns the job's registration (format/users.py) and the thread that keeps it fresh and removes it: the file system of the
dataset may hang, and must not hold up anything. The lowest rank that is there keeps it for the whole job. Used by the
session of a mount; ``register`` blocks.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from fanstore.format.users import HEARTBEAT_S, Registration

log = logging.getLogger(__name__)

#: Seconds that the end of a mount waits for the registration to be removed.
_END_LIMIT_S = 2.0


class DatasetUse:
    """The registration of this daemon's job.

    Attributes:
        name: of the registration, for the other daemons of the job; "" if there is none.
        _prepared: its directory; None if it is in no directory, and cannot be registered.
        _registration: None if there is none. _keeps: whether it is up to this daemon; called from the thread.
        _ended: set at the end. _stays: it is not to be removed then, others of the job go on.
    """

    def __init__(self, prepared: Path | None, mountpoint: Path) -> None:
        self.name = ""
        self._prepared = prepared
        self._mountpoint = mountpoint
        self._registration: Registration | None = None
        self._keeps: Callable[[], bool] = lambda: True
        self._ended = threading.Event()
        self._stays = False
        self._thread: threading.Thread | None = None

    def register(self, host: str, ranks: int) -> None:
        """On the first rank, before anything of the dataset is read. May block."""
        if self._prepared is None:
            return
        registration = Registration(self._prepared, self._mountpoint, host, ranks)
        try:
            registration.register()
        except FileNotFoundError:
            return  # there is no such dataset, which is said by whoever opens it
        except OSError as error:
            log.info(
                "%s cannot be marked as in use (%s); fanstore-prep --force would replace it",
                self._prepared,
                error.strerror,
            )
            return
        self._registration = registration
        self.name = registration.name

    def keep(self, name: str, host: str, ranks: int, keeps: Callable[[], bool]) -> None:
        """On all ranks, with the name that the first has told: keep it fresh while ``keeps`` says that we should."""
        if not name or self._prepared is None:
            return
        if self._registration is None:
            self._registration = Registration(self._prepared, self._mountpoint, host, ranks, name)
        self._keeps = keeps
        self._start()

    def leave(self) -> None:
        """This daemon ends, and others of its job go on."""
        self._stays = True

    def end(self) -> None:
        """Nothing is read any more. Waits for a moment only."""
        self._ended.set()
        if self._thread is None:  # the start has failed
            self._start()
        if self._thread is not None:
            self._thread.join(_END_LIMIT_S)

    def _start(self) -> None:
        if self._registration is not None:
            self._thread = threading.Thread(
                target=self._run, args=(self._registration,), name="dataset use", daemon=True
            )
            self._thread.start()

    def _run(self, registration: Registration) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            if self._keeps():
                self._try(registration.touch)
        if self._keeps() and not self._stays:
            self._try(registration.remove)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            log.info("the mark that %s is in use cannot be changed: %s", self._prepared, error.strerror)
