"""Contents on their way to the shared file system: several small ones at a time, in a few worker threads.

Owns how many are under way and which go together; what is to be copied when is for saver.py, how for output_dir.py.
Whoever comes while all threads are at work goes with the next batch, so that many small files cost few syncs. Trio
thread; the copying in worker threads.
"""

from __future__ import annotations

import os
from collections import deque

import trio

from fanstore.outputs.output_dir import OutputDir, Wanted
from fanstore.outputs.publisher import in_thread

#: Under way at once: shared file systems dislike many open files.
COPIERS = 4
#: Together; and what is not small goes alone.
TOGETHER, SMALL_BYTES = 16, 256 << 10


class _Waiting:
    """One who waits for a copy."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.done = trio.Event()
        self.taken = False
        self.error: OSError | None = None


class CopyBatcher:
    """Brings copies to the output_dir."""

    def __init__(self, output_dir: OutputDir) -> None:
        self._output_dir = output_dir
        self._line: deque[_Waiting] = deque()
        self._copiers = trio.CapacityLimiter(COPIERS)

    async def copy(self, wanted: Wanted) -> None:
        """Returns when there is a durable copy; the source is closed then. Raises OSError."""
        waiting = _Waiting(wanted)
        self._line.append(waiting)
        try:
            async with self._copiers:
                while not waiting.taken:
                    await self._go()
        finally:
            if not waiting.taken:  # cancelled
                self._line.remove(waiting)
                os.close(wanted.source)
        await waiting.done.wait()
        if waiting.error is not None:
            raise waiting.error

    async def _go(self) -> None:
        """Take the first of the line, and more if they are small."""
        group = [self._line.popleft()]
        while (
            self._line
            and len(group) < TOGETHER
            and max(group[-1].wanted.size, self._line[0].wanted.size) <= SMALL_BYTES
        ):
            group.append(self._line.popleft())
        for waiting in group:
            waiting.taken = True
        errors = await in_thread(self._output_dir.copy_all, [waiting.wanted for waiting in group])
        for waiting, error in zip(group, errors, strict=True):
            waiting.error = error
            waiting.done.set()
