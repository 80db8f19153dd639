"""How many questions to one peer are under way, and what they bring. Used by every transport, on the trio thread."""

from __future__ import annotations

import collections

import trio

#: Requests under way to one peer. 16 of 107 KB keep a link busy; more only queue at the peer.
WINDOW = 16
#: Bytes that they bring, but for the last of them: four of the largest chunks. Two are on the link (FSX_ASKED_LEAST of
#: native/mpi/exchange.h), the others are checked or next in line. More is memory that has left the processor's caches
#: when its answer comes.
WINDOW_BYTES = 16 << 20


class Window:
    """Places for questions to one peer. Whoever leaves hands its place over to those who have waited longest.

    A question that was given up keeps its place until it is answered: what a silent peer can cost is bounded.

    Attributes:
        under_way: places taken, at most WINDOW.
        under_way_bytes: that they bring, less than WINDOW_BYTES without the last of them.
        _queue: who waits, the longest first, with its bytes. Invariant: empty while there is a place.
    """

    __slots__ = ("_queue", "under_way", "under_way_bytes")

    def __init__(self) -> None:
        self.under_way = 0
        self.under_way_bytes = 0
        self._queue: collections.OrderedDict[trio.lowlevel.Task, int] = collections.OrderedDict()

    def enter_nowait(self, answer_bytes: int) -> bool:
        """Take a place, if one is free."""
        if self.under_way >= WINDOW or self.under_way_bytes >= WINDOW_BYTES:
            return False
        self.under_way += 1
        self.under_way_bytes += answer_bytes
        return True

    async def wait(self, answer_bytes: int) -> None:
        """Wait for a place that somebody hands over, when none is free."""
        task = trio.lowlevel.current_task()
        self._queue[task] = answer_bytes

        def give_up(_: object) -> trio.lowlevel.Abort:
            del self._queue[task]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)

    def leave(self, answer_bytes: int) -> None:
        """Give back a place that was taken with so many bytes."""
        self.under_way -= 1
        self.under_way_bytes -= answer_bytes
        while self._queue and self.enter_nowait(next(iter(self._queue.values()))):
            task, _ = self._queue.popitem(last=False)
            trio.lowlevel.reschedule(task)
