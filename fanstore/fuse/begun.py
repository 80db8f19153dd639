"""Which files are begun to be read, and by which threads of programs, whichever engine answers.

Owns the eventfd by which it is told, and the ring of the Python engine; that of the native one is in C
(native/fuse/begun.h). Both forget what is not taken in time. Trio thread.
"""

import os
from collections import deque

import trio

from fanstore.fuse.native import NativeEngine

#: As many as the native ring has: FSX_BEGUN_RING.
_RING = 4096


class Begun:
    """What was begun since it was last taken.

    Attributes:
        wake: the eventfd, for the native engine. lost: how many files were not taken in time.
        _waits: whoever takes is to be woken.
    """

    def __init__(self) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.lost = 0
        self._engine: NativeEngine | None = None
        self._noted: deque[tuple[int, int]] = deque()
        self._waits = False

    def close(self) -> None:
        """When no engine notes anything any more."""
        os.close(self.wake)

    def use(self, engine: NativeEngine | None) -> None:
        """The engine that answers; None if it is the Python engine."""
        self._engine = engine

    def note(self, entry: int, thread: int) -> None:
        """For the Python engine: a thread begins to read a file."""
        if len(self._noted) == _RING:
            self._noted.popleft()
            self.lost += 1
        self._noted.append((entry, thread))
        if self._waits:
            self._waits = False
            os.eventfd_write(self.wake, 1)

    def take_nowait(self) -> list[tuple[int, int]]:
        """Entry and thread of each, oldest first. With none, ``wait`` returns for the next one."""
        if self._engine is not None:
            taken, lost = self._engine.take_begun()
            self.lost += lost
            return taken
        noted = list(self._noted)
        self._noted.clear()
        self._waits = not noted
        return noted

    def goes_into_kernel(self) -> bool:
        """What is fetched ahead from now on can be had in the page cache of the mount, from where it is read unseen."""
        return self._engine is not None and self._engine.want_pages()

    async def wait(self) -> None:
        """Until there may be something to take, after nothing was taken."""
        await trio.lowlevel.wait_readable(self.wake)
        os.eventfd_read(self.wake)
