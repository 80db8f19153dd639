"""Where the readers of all hosts meet: a socket in the file system, beside the network that is measured.

Owns both ends. ``Meeting`` is the driver's: a thread that waits until all readers have said that they are there, and
lets them go on; where an epoch begins or ends it asks first what the machine has done so far. ``Place`` is a reader's.
"""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_BATCH, _EPOCH = b"b", b"e"
#: Seconds for the next one to come: a batch over a slow network.
_LIMIT_S = 300.0


class Meeting:
    """The driver's end.

    Attributes:
        samples: what ``look`` has said at each beginning and end of an epoch, with ``at_s``.
        problem: why the readers could not go on; "" as long as they can.
    """

    def __init__(self, path: Path, readers: int, look: Callable[[], dict[str, Any]]) -> None:
        self._readers = readers
        self._look = look
        self.samples: list[dict[str, Any]] = []
        self.problem = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(readers)
        self._thread = threading.Thread(target=self._run, name="meeting", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        connections = [self._socket.accept()[0] for _ in range(self._readers)]
        for connection in connections:
            connection.settimeout(_LIMIT_S)
        try:
            while True:
                said = {connection.recv(1) for connection in connections}
                if said == {_EPOCH}:
                    self.samples.append({"at_s": time.monotonic()} | self._look())
                elif said == {b""}:
                    return
                elif said != {_BATCH}:
                    self.problem = "a reader has ended before the others" if b"" in said else "readers are not in step"
                    return
                for connection in connections:
                    connection.sendall(b".")
        except OSError as error:
            self.problem = f"a reader does not come: {error}"
        finally:
            for connection in connections:
                connection.close()

    def join(self) -> None:
        """After the readers have ended."""
        self._thread.join(_LIMIT_S)


class Place:
    """A reader's end."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_LIMIT_S)
        self._socket.connect(path)

    def _wait(self, what: bytes) -> None:
        self._socket.sendall(what)
        if not self._socket.recv(1):
            raise SystemExit("the others have given up")

    def batch(self) -> None:
        self._wait(_BATCH)

    def epoch(self) -> None:
        self._wait(_EPOCH)
