"""Time-outs of many short waits, watched by one task. Used by mpi.py, on the trio thread.

A cancel scope with a deadline around each fetch took 11.6 µs of the 38 µs that the trio thread spent on it.
"""

from __future__ import annotations

import math
import time

import outcome
import trio

from fanstore.transport.inflight import TIMED_OUT, InFlight


class Deadlines:
    """The requests for which somebody waits, or has waited.

    Attributes:
        _next_s: when the watching task looks next (time.monotonic()); no waiting request has an earlier deadline.
    """

    def __init__(self) -> None:
        self._in_flight: set[InFlight] = set()
        self._next_s = math.inf
        self._sooner = trio.Event()

    def add(self, request: InFlight) -> None:
        self._in_flight.add(request)
        if request.deadline_s < self._next_s:
            self._next_s = request.deadline_s
            self._sooner.set()

    def discard(self, request: InFlight) -> None:
        self._in_flight.discard(request)

    async def watch(self) -> None:
        """For ever: let those know whose time is up."""
        while True:
            self._sooner = trio.Event()
            # A process that was stopped finds its time up already.
            with trio.move_on_after(max(0.0, self._next_s - time.monotonic())):
                await self._sooner.wait()
                continue
            now_s = time.monotonic()
            waiting = [request for request in self._in_flight if request.task is not None]
            for request in waiting:
                if request.deadline_s <= now_s:
                    task, request.task = request.task, None
                    trio.lowlevel.reschedule(task, outcome.Value(TIMED_OUT))
            self._in_flight = {request for request in waiting if request.task is not None}
            self._next_s = min((request.deadline_s for request in self._in_flight), default=math.inf)
