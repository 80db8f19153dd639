"""The process that lists directories of the mount ahead of look-ups (native/namesahead.h): its start and its end.

Owns the process, fanstore-names (native/programs/names.c, which says why it is one), and our end of its socket. What
is listed is decided in C: engine threads write to the socket, and read the answers. If the process cannot start, or
dies, names are not listed ahead, and nobody notices but for the time it takes. Used by native.py, on the trio thread.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import subprocess
from pathlib import Path
from typing import IO, Protocol

import trio

from fanstore import _native
from fanstore.core.events import NOTABLE
from fanstore.core.memorylimit import usable_bytes

log = logging.getLogger(__name__)

#: Next to the extension module, with which it is built.
PROGRAM = Path(_native.__file__).with_name("fanstore-names")

#: Kernel memory for a name: an inode and what leads to it (fuse_inode and dentry of /proc/slabinfo: 896 + 192 bytes
#: on Linux 6.18, and some for pages of them that are not full). It can be taken back, but takes room from the page
#: cache until it is.
NAME_BYTES = 1300
#: Names that are listed ahead have this part of the memory at most.
MEMORY_PART = 16

#: Descriptors that must be left for files and for the program that is to run: this is only for speed.
SPARE_DESCRIPTORS = 64

#: Seconds for the process to end once it was killed: one slice of a listing that it is in.
END_LIMIT_S = 1.0


class Orders(Protocol):
    """The engine, which says what is to be listed."""

    def list_with(self, socket: int, most: int, /) -> None: ...

    def end_listing(self) -> None: ...


class Lister:
    """The process, while it lives.

    Attributes:
        _process: None before its start and if it could not start.
        _ended: set when it has ended, or will not start.
        _wanted: False once ``end`` was called.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
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
            log.info("names are not listed ahead: %s", error)
            self._orders.end_listing()
            self._ended.set()
            return
        with said:
            await trio.lowlevel.wait_readable(said)  # it says nothing: that is its end
        self._ended.set()
        self._orders.end_listing()
        if self._wanted and self._process is not None:
            log.info(
                "%s has ended (%d): names are not listed ahead any more",
                PROGRAM.name,
                self._process.wait(),
                extra=NOTABLE,
            )

    def _start(self, point: Path) -> IO[bytes]:
        """Start it; its standard output, which ends with it. (A pidfd needs Linux 5.3.) Raises OSError.

        On the main thread, not on a worker: the kernel ends the process together with the thread that has started it.
        """
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd")) < SPARE_DESCRIPTORS:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            self._orders.list_with(ours.fileno(), usable_bytes() // MEMORY_PART // NAME_BYTES)
            self._process = subprocess.Popen(
                [PROGRAM, point], stdin=theirs.fileno(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/"
            )
        assert self._process.stdout is not None
        return self._process.stdout

    async def end(self) -> None:
        """End it, before the mount is taken away, which it would keep busy."""
        self._wanted = False
        self._orders.end_listing()
        if self._process is None:
            return
        self._process.kill()
        with trio.move_on_after(END_LIMIT_S):
            await self._ended.wait()
        self._process.poll()
