"""The file to which programs write what they will read: a FIFO in the job's directory, to which
``MOUNTPOINT/.fanstore/order`` links.

A link, because a mount of a dataset is read-only, and stays so; a FIFO, because what is written is wanted once, and in
the sequence in which it comes. From one opening to the next moment in which nobody has it open is one list; programs
that write at the same time write one list together, line by line if they write whole lines. Trio thread.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import trio

NAME = "order"
_READ_BYTES = 64 << 10


class OrderFile:
    """The reading end."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError. The directory removes its name."""
        self.path = directory / NAME
        os.mkfifo(self.path, 0o600)
        self._opened = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._opened)

    async def pieces(self) -> AsyncIterator[bytes]:
        """What is written, as it comes; b"" when all who wrote have closed it."""
        while True:
            await trio.lowlevel.wait_readable(self._opened)
            try:
                data = os.read(self._opened, _READ_BYTES)
            except BlockingIOError:
                continue
            if not data:
                # A descriptor that has seen the end is readable until somebody writes again; a new one is not.
                again = os.open(f"/proc/self/fd/{self._opened}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.close(self._opened)
                self._opened = again
            yield data
