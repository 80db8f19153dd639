"""Progress of long work: a bar on a terminal, a plain line now and then in a log, with the same words.

Owns the display only; whoever does the work calls ``add``. ``add`` may be called from any thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import Self, TextIO

from fanstore.units import format_bytes, format_duration

#: Seconds between two plain lines in a log: often enough to see life, seldom enough to keep the log readable.
LOG_INTERVAL_S = 10.0
#: Seconds between two looks of a terminal.
TERMINAL_INTERVAL_S = 0.2
#: Seconds over which the rate is measured: it follows a slow disk, and does not jump with every block.
RATE_WINDOW_S = 15.0
#: Characters of the bar; where there is not so much room, it is left out.
_BAR = range(8, 41)


class Progress:
    """Bytes and files done of a known total.

    Attributes:
        total_bytes, total_files: what there is to do; done_bytes, done_files: what is done (guarded by ``_lock``).
        _seen: (when, done_bytes) of the last RATE_WINDOW_S, the oldest first; never empty; guarded likewise.
        _next: when to show it again; _shown: a bar is on the screen; guarded likewise.
    """

    def __init__(
        self, title: str, total_bytes: int, total_files: int, *, quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.title = title
        self.total_bytes = total_bytes
        self.total_files = total_files
        self.done_bytes = 0
        self.done_files = 0
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet
        self._terminal = not quiet and self._stream.isatty()
        self._interval_s = TERMINAL_INTERVAL_S if self._terminal else LOG_INTERVAL_S
        self._lock = threading.Lock()
        start = time.monotonic()
        self._seen = deque([(start, 0)])
        self._next = start if self._terminal else start + LOG_INTERVAL_S
        self._shown = False

    @classmethod
    def counting(cls, title: str, what: str, *, quiet: bool = False, stream: TextIO | None = None) -> Counting:
        """Progress of work whose end is not known: it only counts ``what``."""
        return Counting(title, what, quiet=quiet, stream=stream)

    def add(self, done_bytes: int, done_files: int = 0) -> None:
        """Count work as done."""
        with self._lock:
            self.done_bytes += done_bytes
            self.done_files += done_files
            now = time.monotonic()
            if self._quiet or now < self._next:
                return
            self._next = now + self._interval_s
            self._seen.append((now, self.done_bytes))
            while len(self._seen) > 2 and self._seen[1][0] < now - RATE_WINDOW_S:
                self._seen.popleft()
            share = min(100, 100 * self.done_bytes // self.total_bytes) if self.total_bytes else 100
            if self._terminal:
                print(f"\r{self._bar(share)}\x1b[K", end="", file=self._stream, flush=True)
                self._shown = True
            else:
                print(f"{self.title}: {share} %, {self._words()}", file=self._stream, flush=True)

    def _words(self, files: str = "{:,} of {:,} files") -> str:
        """What is done, how fast it goes, and how long it takes yet, as far as that is known."""
        words = [f"{format_bytes(self.done_bytes)} of {format_bytes(self.total_bytes)}"]
        if self.total_files and files:
            words.append(files.format(self.done_files, self.total_files))
        (since, before), (now, done) = self._seen[0], self._seen[-1]
        if done > before and now > since:
            rate = (done - before) / (now - since)
            words.append(f"{format_bytes(rate)}/s")
            if self.done_bytes < self.total_bytes:
                words.append(f"{format_duration((self.total_bytes - self.done_bytes) / rate)} left")
        return ", ".join(words)

    def _bar(self, share: int) -> str:
        """A line that fits on the terminal; on a narrow one without the bar, and with less about files."""
        try:
            columns = (os.get_terminal_size(self._stream.fileno()).columns or 80) - 1  # 0: it does not say
        except OSError:
            columns = 79
        head, words = f"{self.title} {share:3d} %", self._words()
        room = min(columns - len(f"{head} || {words}"), _BAR[-1])
        if room in _BAR:
            filled = "█" if "utf" in (self._stream.encoding or "").lower() else "#"
            bar = filled * (room * share // 100)
            return f"{head} |{bar:<{room}}| {words}"
        lines = [f"{head}, {words}", f"{head}, {self._words('{:,} files')}", f"{head}, {self._words('')}"]
        return next((line for line in lines if len(line) <= columns), head[:columns])

    def close(self) -> None:
        """Take the bar off the screen."""
        with self._lock:
            if self._shown:
                print("\r\x1b[K", end="", file=self._stream, flush=True)
                self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Counting:
    """A count that goes up: on a terminal one line that is written over, in a log a line now and then."""

    def __init__(self, title: str, what: str, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._title = title
        self._what = what
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet
        self._terminal = not quiet and self._stream.isatty()
        self._next = time.monotonic() + (0.2 if self._terminal else LOG_INTERVAL_S)
        self._shown = False

    def set_count(self, count: int) -> None:
        """Show the count, if it is time."""
        now = time.monotonic()
        if self._quiet or now < self._next:
            return
        self._next = now + (0.2 if self._terminal else LOG_INTERVAL_S)
        start, end = ("\r", "") if self._terminal else ("", "\n")
        print(f"{start}{self._title}: {count:,} {self._what}", end=end, file=self._stream, flush=True)
        self._shown = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self._terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
