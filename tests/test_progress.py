"""Progress as a terminal of any width shows it, and a log."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from fanstore.progress import Progress

MIB, GIB = 1 << 20, 1 << 30


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


@contextmanager
def terminal(columns: int, encoding: str = "utf-8") -> Iterator[tuple[TextIO, list[str]]]:
    """A stream to a terminal of that width, and after the block the lines that were written over each other there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # that is how a terminal ends
            while data := os.read(master, 65536):
                shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    lines: list[str] = []
    with open(slave, "w", encoding=encoding) as stream:
        yield stream, lines
    reader.join()
    os.close(master)
    lines += [line.removesuffix("\x1b[K") for line in shown.decode().split("\r")[1:]]


def test_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with terminal(120) as (stream, seen), Progress("staging on 3 nodes", 10 * GIB, 1200, stream=stream) as bar:
        bar.add(100 * MIB, 3)
        for _ in range(50):
            clock.now_s += 1
            bar.add(100 * MIB, 10)
    *lines, last = seen
    assert re.fullmatch(r"staging on 3 nodes   0 % \| +\| 100 MiB of 10 GiB, 3 of 1,200 files", lines.pop(0))
    assert len(lines) == 50 and last == "", "it is gone at the end"
    assert re.fullmatch(
        r"staging on 3 nodes   1 % \| +\| 200 MiB of 10 GiB, 13 of 1,200 files, 200 MiB/s, 50\.2 s left", lines[0]
    )
    assert re.fullmatch(
        r"staging on 3 nodes  49 % \|█+ +\| 4\.98 GiB of 10 GiB, 503 of 1,200 files, 100 MiB/s, 51\.4 s left", lines[-1]
    )
    assert all(len(line) <= 119 for line in lines)


@pytest.mark.parametrize("columns", [12, 30, 60, 80, 100, 200, 0])
def test_it_fits(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    clock = Clock(monkeypatch)
    with terminal(columns, "ascii") as (stream, lines), Progress("packing", 3 * GIB, 1_281_167, stream=stream) as bar:
        for _ in range(20):
            clock.now_s += 1
            bar.add(97 * MIB, 40_000)
    assert lines.pop() == ""
    assert all(len(line) < (columns or 80) for line in lines)
    assert all(re.match(r"packing +\d", line) for line in lines)
    assert ("#" in lines[-1]) == (columns in (100, 200)), lines
    assert ("left" in lines[-1]) == (columns in (0, 60, 80, 100, 200)), lines
    assert ("800,000 files, " in lines[-1]) == (columns in (0, 80)), lines


def test_nothing_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without files, a rate or an end there is no word about them."""
    clock = Clock(monkeypatch)
    log = io.StringIO()
    with Progress("staging", 0, 0, stream=log) as nothing:
        clock.now_s += 11
        nothing.add(0)
    with Progress("verifying", 2 * MIB, 0, stream=log) as bar:
        clock.now_s += 11
        bar.add(0)
        clock.now_s += 11
        bar.add(2 * MIB)
    assert log.getvalue().splitlines() == [
        "staging: 100 %, 0 B of 0 B",
        "verifying: 0 %, 0 B of 2 MiB",
        "verifying: 100 %, 2 MiB of 2 MiB, 93.1 KiB/s",
    ]


def test_the_rate_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    log = io.StringIO()
    with Progress("staging", 100 * GIB, 10, stream=log) as bar:
        for rate in (1, 1, 50, 50, 50):
            clock.now_s += 10
            bar.add(10 * rate * MIB)
    lines = log.getvalue().splitlines()
    assert len(lines) == 5
    assert "1 MiB/s, 28 h " in lines[1] and "50 MiB/s, 33 min 38 s left" in lines[4]


def test_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    log = io.StringIO()
    with Progress("staging", MIB, 1, quiet=True, stream=log) as bar:
        clock.now_s += 100
        bar.add(MIB, 1)
    assert (log.getvalue(), bar.done_bytes) == ("", MIB)
