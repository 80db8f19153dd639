"""Time-outs of many short waits, watched by one task. Used by mpi.py, on the trio thread.

A cancel scope with a deadline around each fetch took 11.6 µs of the 38 µs that the trio thread spent on it.
"""

from __future__ import annotations

import math
import time

import outcome
import trio

from fanstore.transport.flight import TIMED_OUT, Flight


class Deadlines:
    """The flights for which somebody waits, or has waited.

    Attributes:
        _next_s: when the watching task looks next (time.monotonic()); no waiting flight has an earlier deadline.
    """

    def __init__(self) -> None:
        self._flights: set[Flight] = set()
        self._next_s = math.inf
        self._sooner = trio.Event()

    def add(self, flight: Flight) -> None:
        self._flights.add(flight)
        if flight.deadline_s < self._next_s:
            self._next_s = flight.deadline_s
            self._sooner.set()

    def discard(self, flight: Flight) -> None:
        self._flights.discard(flight)

    async def watch(self) -> None:
        """For ever: let those know whose time is up."""
        while True:
            self._sooner = trio.Event()
            with trio.move_on_after(self._next_s - time.monotonic()):
                await self._sooner.wait()
                continue
            now_s = time.monotonic()
            waiting = [flight for flight in self._flights if flight.task is not None]
            for flight in waiting:
                if flight.deadline_s <= now_s:
                    task, flight.task = flight.task, None
                    trio.lowlevel.reschedule(task, outcome.Value(TIMED_OUT))
            self._flights = {flight for flight in waiting if flight.task is not None}
            self._next_s = min((flight.deadline_s for flight in self._flights), default=math.inf)
