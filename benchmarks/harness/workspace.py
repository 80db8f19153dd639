"""The temporary directory of one benchmark run, and the promise that it and every mount in it is gone afterwards.

Used by the benchmark scripts through ``workspace``; peers mount through ``unmount`` and ``is_mounted``. Main thread
(signals are turned into KeyboardInterrupt there).
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from harness.command import BenchmarkError, find_program, run

#: An unmount that takes longer than this is done lazily.
_UNMOUNT_S = 20.0
#: Limit of making a file system.
_MAKE_S = 60.0


def mounts_below(path: Path) -> list[Path]:
    """Mount points at or below ``path``, the innermost first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        # Blanks and backslashes are written as \ooo: undone by Python's own escapes.
        mounted = Path(os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")))
        if mounted == path or path in mounted.parents:
            found.append(mounted)
    return sorted(found, key=lambda mounted: len(mounted.parts), reverse=True)


def is_mounted(path: Path) -> bool:
    """Whether something is mounted exactly here (also when it no longer answers)."""
    return path in mounts_below(path)


def unmount(path: Path) -> None:
    """Take a mount away, lazily if it does not go otherwise. Silent when it is gone already."""
    attempts: list[list[str]] = []
    fusermount = find_program("fusermount3")
    if os.geteuid() == 0:
        attempts = [["umount", str(path)], ["umount", "-l", str(path)]]
    elif fusermount is not None:
        attempts = [[fusermount, "-u", str(path)], [fusermount, "-uz", str(path)]]
    for argv in attempts:
        if not is_mounted(path):
            return
        try:
            subprocess.run(argv, timeout=_UNMOUNT_S, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        except subprocess.TimeoutExpired:
            print(f"{argv[0]} {path} takes long; trying harder", file=sys.stderr)
    deadline = time.monotonic() + _UNMOUNT_S
    while is_mounted(path):
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{path} is still mounted; unmount it by hand")
        time.sleep(0.02)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def workspace(parent: Path | None, keep: bool = False) -> Iterator[Path]:
    """A fresh directory below ``parent`` (default: where temporary files go), removed at the end in every case."""
    signal.signal(signal.SIGTERM, _interrupt)
    path = Path(tempfile.mkdtemp(prefix="fanstore-bench-", dir=parent)).resolve()
    try:
        yield path
    finally:
        # A second Ctrl-C must not leave mounts behind; everything here is bounded in time.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for mounted in mounts_below(path):
            unmount(mounted)
        # Never delete through a mount that did not go away.
        if not keep and not mounts_below(path):
            shutil.rmtree(path)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def new_file_system(image: Path, point: Path) -> Iterator[Path]:
    """An ext4 of 8 GiB in a sparse file, mounted at a new directory as long as the block; root only."""
    run(["truncate", "-s", "8G", str(image)], _MAKE_S)
    run(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image)], _MAKE_S)
    point.mkdir(exist_ok=True)
    run(["mount", "-o", "loop", str(image), str(point)], _MAKE_S)
    try:
        yield point
    finally:
        unmount(point)
        image.unlink()
