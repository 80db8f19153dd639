"""Progress of long work: a bar on a terminal, a plain line now and then in a log.

Owns the display only; whoever does the work calls ``add``. ``add`` may be called from any thread.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, TextIO

from fanstore.units import format_bytes, format_duration

if TYPE_CHECKING:
    from tqdm import tqdm

#: Seconds between two plain lines in a log: often enough to see life, seldom enough to keep the log readable.
LOG_INTERVAL_S = 10.0


class Progress:
    """Bytes and files done of a known total.

    Attributes:
        total_bytes, total_files: what there is to do; done_bytes, done_files: what is done (guarded by ``_lock``).
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
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._next_line = self._start + LOG_INTERVAL_S
        self._bar: tqdm[NoReturn] | None = None
        if not quiet and self._stream.isatty():
            from tqdm import tqdm  # only a terminal needs it, and a command should start quickly

            self._bar = tqdm(
                desc=title,
                total=total_bytes,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                file=self._stream,
                leave=False,
                dynamic_ncols=True,
                bar_format="{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}, {postfix} {rate_fmt}, {remaining}",
            )

    @classmethod
    def counting(cls, title: str, what: str, *, quiet: bool = False, stream: TextIO | None = None) -> Counting:
        """Progress of work whose end is not known: it only counts ``what``."""
        return Counting(title, what, quiet=quiet, stream=stream)

    def add(self, done_bytes: int, done_files: int = 0) -> None:
        """Count work as done."""
        with self._lock:
            self.done_bytes += done_bytes
            self.done_files += done_files
            if self._bar is not None:
                self._bar.set_postfix_str(f"{self.done_files:,} of {self.total_files:,} files", refresh=False)
                self._bar.update(done_bytes)
            elif not self._quiet and time.monotonic() >= self._next_line:
                self._next_line = time.monotonic() + LOG_INTERVAL_S
                self._print_line()

    def _print_line(self) -> None:
        elapsed = time.monotonic() - self._start
        rate = self.done_bytes / elapsed if elapsed > 0 else 0.0
        left = (self.total_bytes - self.done_bytes) / rate if rate > 0 else 0.0
        share = 100 * self.done_bytes // self.total_bytes if self.total_bytes else 100
        print(
            f"{self.title}: {share} %, {format_bytes(self.done_bytes)} of {format_bytes(self.total_bytes)}, "
            f"{self.done_files:,} of {self.total_files:,} files, {format_bytes(rate)}/s, {format_duration(left)} left",
            file=self._stream,
            flush=True,
        )

    def close(self) -> None:
        """Take the bar off the screen."""
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None

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
