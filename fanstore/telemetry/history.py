"""What a node did over time, in bounded memory: samples whose interval doubles when there are many.

Owns the samples; what is in one is made by the caller (job/account.py). A job of seconds has four a second, one of
days a few an hour, and neither has more than SAMPLES_MOST. Trio thread only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import trio

#: Samples that are kept beside the first one. Enough for one pixel in three of a chart, and as a message to another
#: node some 10 kB.
SAMPLES_MOST = 240

#: Seconds between the first samples.
FIRST_INTERVAL_S = 0.25

#: A sample may take one part in so many of the time. It takes some 0.2 ms; with a hundred thousand outputs, more.
COST_SHARE = 200


class Sample(NamedTuple):
    """The state of a node at one moment.

    Attributes:
        at_s: seconds since the history began.
        local, remote, shared, cache: bytes that programs have read so far, by where they came from.
        cached_bytes, memory_bytes: in the memory caches, and resident memory of the daemon; the highest value seen
            since the sample before, like the next two.
        pending, pending_bytes: outputs that do not stand in ``--output`` yet.
        waited_ms: time that readers have waited for chunks so far, all of them together.
    """

    at_s: float
    local: int = 0
    remote: int = 0
    shared: int = 0
    cache: int = 0
    cached_bytes: int = 0
    memory_bytes: int = 0
    pending: int = 0
    pending_bytes: int = 0
    waited_ms: int = 0

    def after(self, before: Sample) -> Sample:
        """This one for both: sums are as of now, and of what goes up and down the higher one counts."""
        return self._replace(
            cached_bytes=max(self.cached_bytes, before.cached_bytes),
            memory_bytes=max(self.memory_bytes, before.memory_bytes),
            pending=max(self.pending, before.pending),
            pending_bytes=max(self.pending_bytes, before.pending_bytes),
        )


class History:
    """The samples of one node.

    Attributes:
        start_s: when it began, by the monotonic clock of this machine.
        interval_s: seconds between two samples from now on.
        _samples: in order of time; the first is the beginning, with nothing read. At most SAMPLES_MOST + 1.
    """

    def __init__(self) -> None:
        self.interval_s = FIRST_INTERVAL_S
        self.start_s = time.monotonic()
        self._samples = [Sample(0.0)]

    def now_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.start_s

    def add(self, sample: Sample) -> None:
        """Keep one more; if there are too many, two become one."""
        self._samples.append(sample)
        if len(self._samples) > SAMPLES_MOST:
            first, *rest = self._samples
            pairs = zip(rest[::2], rest[1::2], strict=False)
            odd = rest[len(rest) // 2 * 2 :]
            self._samples = [first, *(later.after(earlier) for earlier, later in pairs), *odd]
            self.interval_s *= 2

    def samples(self) -> list[Sample]:
        """All of them."""
        return list(self._samples)

    async def run(self, take: Callable[[], Sample]) -> None:
        """Take samples until it is cancelled."""
        while True:
            began_s = time.monotonic()
            self.add(take())
            await trio.sleep(max(self.interval_s, COST_SHARE * (time.monotonic() - began_s)))

    def validate(self) -> None:
        """Check the invariants; for tests."""
        assert 1 <= len(self._samples) <= SAMPLES_MOST + 1
        assert self._samples[0] == Sample(0.0)
        assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(self._samples))
