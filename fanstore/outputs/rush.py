"""Many small files at once, and how long their copies to ``--output`` wait for the end of it.

A program that saves thousands of samples wants to go on; copying each of them meanwhile takes the processors and the
disk from it, and makes it three times slower (docs/performance.md). So in a rush copies wait for its end, or for
LONGEST_S at most. Owns nothing but when that is; used by saver.py. Trio thread only.
"""

from __future__ import annotations

#: Files in a series before it is a rush; what comes PAUSE_S after the one before begins another series.
MANY = 64
PAUSE_S = 0.2
#: Seconds from the beginning of a series for which copies wait at most.
LONGEST_S = 3.0
#: Larger files are not waited with: to copy them costs the disk its time, whenever it is.
SMALL_BYTES = 256 << 10


class Rush:
    """The files that were closed lately.

    Attributes:
        _begun_s, _last_s: when the first and the last of the series were closed; _count: how many are in it.
    """

    def __init__(self) -> None:
        self._begun_s = self._last_s = float("-inf")
        self._count = 0

    def note(self, now_s: float) -> None:
        """A file was closed."""
        if now_s - self._last_s > PAUSE_S:
            self._begun_s, self._count = now_s, 0
        self._last_s = now_s
        self._count += 1

    def left_s(self, now_s: float) -> float:
        """Seconds for which copies wait; 0 if there is no rush."""
        if self._count < MANY:
            return 0.0
        return max(0.0, min(self._last_s + PAUSE_S, self._begun_s + LONGEST_S) - now_s)
