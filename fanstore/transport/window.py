"""How many questions to one peer are under way. Used by every transport, on the trio thread."""

from __future__ import annotations

import trio

#: Requests under way to one peer. 16 of 107 KB keep a link busy; more only queue at the peer.
WINDOW = 16


class Window:
    """Places for questions to one peer. Whoever leaves hands its place over to the one who has waited longest.

    A question that was given up keeps its place until it is answered: what a silent peer can cost is bounded.

    Attributes:
        under_way: places taken, at most WINDOW.
    """

    __slots__ = ("_queue", "under_way")

    def __init__(self) -> None:
        self.under_way = 0
        self._queue = trio.lowlevel.ParkingLot()

    def enter_nowait(self) -> bool:
        """Take a place, if one is free."""
        if self.under_way >= WINDOW:
            return False
        self.under_way += 1
        return True

    async def wait(self) -> None:
        """Wait for a place that somebody hands over, when none is free."""
        await self._queue.park()

    def leave(self) -> None:
        if self._queue:
            self._queue.unpark()
        else:
            self.under_way -= 1
