"""Processes that use the mount on the engine's behalf, so that the kernel knows more of it: their start and their end.

fanstore-names lists directories ahead of look-ups (native/fuse/namesahead.h); fanstore-pages has files read into the
page cache ahead of programs (native/chunks/pagesahead.h). native/programs/names.c says why they are processes. What
they do is decided in C, which writes to their sockets. If one cannot start, or dies, nobody notices but for the time
it takes. Used by native.py, on the trio thread.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO

import trio

from fanstore import _native
from fanstore.telemetry.events import NOTABLE

log = logging.getLogger(__name__)

#: Next to the extension module, with which they are built.
FOLDER = Path(_native.__file__).parent

#: Descriptors that must be left for files and for the program that is to run: this is only for speed.
SPARE_DESCRIPTORS = 64

#: Seconds for a process to end once it was killed: one slice of a listing that it is in.
END_LIMIT_S = 1.0


class Helper:
    """One such process, while it lives.

    Attributes:
        name: of the program. failed: it could not start, or has ended.
        _loss: what is lost without it, for the log.
        _connect: told of its socket and its number; _disconnect: nothing more is to be asked of it.
        _process: None before its start and if it could not start.
        _ended: set when it has ended, or will not start.
        _wanted: False once ``end`` was called.
    """

    def __init__(
        self, name: str, loss: str, connect: Callable[[int, int], None], disconnect: Callable[[], None]
    ) -> None:
        self.name = name
        self.failed = False
        self._loss = loss
        self._connect, self._disconnect = connect, disconnect
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = trio.Event()
        self._wanted = True

    async def run(self, point: Path) -> None:
        """Start it, for the mount at this path, and wait for its end."""
        if not self._wanted:
            return
        try:
            said = self._start(point)
        except OSError as error:
            log.info("%s: %s", self._loss, error)
            self._end()
            return
        with said:
            await trio.lowlevel.wait_readable(said)  # it says nothing: that is its end
        self._end()
        if self._wanted and self._process is not None:
            log.info("%s has ended (%d): %s any more", self.name, self._process.wait(), self._loss, extra=NOTABLE)

    def _end(self) -> None:
        self.failed = True
        self._ended.set()
        self._disconnect()

    def _start(self, point: Path) -> IO[bytes]:
        """Start it; its standard output, which ends with it. (A pidfd needs Linux 5.3.) Raises OSError.

        On the main thread, not on a worker: the kernel ends the process together with the thread that has started it.
        """
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd")) < SPARE_DESCRIPTORS:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            self._process = subprocess.Popen(
                [FOLDER / self.name, point],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
            )
            self._connect(ours.fileno(), self._process.pid)  # if that fails, it sees the end of its socket
        assert self._process.stdout is not None
        return self._process.stdout

    async def end(self) -> None:
        """End it, before the mount is taken away, which it would keep busy."""
        self._wanted = False
        self._disconnect()
        if self._process is None:
            return
        self._process.kill()
        with trio.move_on_after(END_LIMIT_S):
            await self._ended.wait()
        self._process.poll()
