"""What a node of the corrected simulation fetches ahead, by whole batches.

Owns the two ways: a staging buffer, filled while the next batch fits, and the window of FanStore's prefetcher
(``fanstore.order.window``), the object that a daemon drives, told here of batches instead of files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from fanstore.order.window import Origin, Stream, Window

#: The thread of a node that reads.
_READER = 0


class Ahead(ABC):
    """Batches are asked for in sequence."""

    @abstractmethod
    def begin(self, batch: int, now_s: float) -> None:
        """The node begins to read this one."""

    @abstractmethod
    def has_room(self, batch: int) -> bool:
        """Whether it may be fetched now, which is behind the one that is read."""


class Buffer(Ahead):
    """Holds the batch that is computed on, and those behind it as far as they fit.

    Attributes:
        _before_mb: MB of all batches before each one.
    """

    def __init__(self, batch_mb: Sequence[float], capacity_mb: float) -> None:
        self._before_mb: list[float] = [0.0, *np.cumsum(batch_mb).tolist()]
        self._capacity_mb = capacity_mb
        self._current = 0

    def begin(self, batch: int, now_s: float) -> None:
        self._current = batch

    def has_room(self, batch: int) -> bool:
        return self._before_mb[batch + 1] - self._before_mb[self._current] <= self._capacity_mb


class Ordered(Ahead):
    """What FanStore's window says. What is read leaves it as soon as reading begins.

    Attributes:
        _end: behind the last batch that it has asked for.
    """

    def __init__(self, batch_mb: Sequence[float], capacity_mb: float) -> None:
        batch_bytes = (np.asarray(batch_mb) * 1e6).astype(np.int64).tolist()
        total = int(capacity_mb * 1e6)
        self._window = Window(batch_bytes.__getitem__, total, file_bytes=max(batch_bytes, default=0))
        self._window.streams = [Stream(Origin("stated"), [np.arange(len(batch_bytes))])]
        self._end = 0
        self._now_s = 0.0
        self.has_room(0)  # the beginning is fetched before anybody reads

    def begin(self, batch: int, now_s: float) -> None:
        self._now_s = now_s
        self._window.seen(batch, _READER, now_s)

    def has_room(self, batch: int) -> bool:
        if batch >= self._end:
            for taken in self._window.take(self._now_s):
                self._end = taken + 1
        return batch < self._end
