"""One load for many who want the same thing at the same time.

Owns who is loading what at the moment; keeps no result once the last waiter has it (cache.py does). Used by the memory
cache and by the reader. Trio thread only, so nothing here needs a lock.
"""

from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import trio

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Flight(Generic[V]):
    """A load under way.

    Attributes:
        over: set when the load has ended, in whatever way; made by the first who waits for it: most have nobody.
        result: holds the one result after a success; empty before that, after a failure and after a cancellation.
        error: what the load raised; None unless it failed.
    """

    __slots__ = ("error", "over", "result")

    def __init__(self) -> None:
        self.over: trio.Event | None = None
        self.result: list[V] = []
        self.error: Exception | None = None


class SingleFlight(Generic[K, V]):
    """Runs at most one load per key at a time.

    Attributes:
        joined: how often somebody found a load under way and waited for it instead of starting one.
        _flights: loads under way; invariant: the event of each is not set.
    """

    def __init__(self) -> None:
        self.joined = 0
        self._flights: dict[K, _Flight[V]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    async def run(self, key: K, load: Callable[[], Awaitable[V]]) -> V:
        """The result of ``load``, or of the load for this key that somebody else has under way.

        A load that raises an Exception raises it in everybody who waits. A loader that is cancelled takes nobody
        with it: the first of its waiters to wake up loads in its place.
        """
        while key in self._flights:
            result = await self.join(key)
            if result:
                return result[0]
        flight = self.begin(key)
        try:
            value = await load()
        except BaseException as error:
            self.end(key, flight, error=error)
            raise
        self.end(key, flight, value)
        return value

    # The steps of ``run``, for a caller that has no coroutine to spare (the cache: each costs a microsecond per read).

    def __contains__(self, key: K) -> bool:
        """Is a load for this key under way?"""
        return key in self._flights

    async def join(self, key: K) -> list[V]:
        """Wait for the load that is under way. Its result as the only item; nothing if its loader was cancelled."""
        flight = self._flights[key]
        self.joined += 1
        if flight.over is None:
            flight.over = trio.Event()
        await flight.over.wait()
        if flight.error is not None:
            raise flight.error
        return flight.result

    def begin(self, key: K) -> _Flight[V]:
        """The caller loads, and says ``end`` in every case. Nothing is under way for this key."""
        flight = self._flights[key] = _Flight()
        return flight

    def end(self, key: K, flight: _Flight[V], *result: V, error: BaseException | None = None) -> None:
        """The load has a result, or an error; a cancellation is neither for those who wait."""
        flight.result.extend(result)
        if isinstance(error, Exception):
            flight.error = error
        # Before the waiters run: whoever comes from now on must not join a flight that is over.
        del self._flights[key]
        if flight.over is not None:
            flight.over.set()

    def validate(self) -> None:
        """Check the invariants; for tests."""
        for key, flight in self._flights.items():
            assert flight.over is None or not flight.over.is_set(), f"the load of {key!r} is over but still listed"
