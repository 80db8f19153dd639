"""Which option is missing, said once: when a program wants to create something in a mount that cannot be written to.

The kernel refuses that by itself, because the mount is read-only, but first it looks the new name up here. Whether it
does so to create something is known from the system call in which the program waits for the answer. Looked at for the
first names only that are not there, at a cost of some 50 us each. Used by operations.py, on the trio thread.
"""

import ctypes
import logging
import os
import platform
from collections.abc import Callable
from typing import NamedTuple

from fanstore.units import format_path

log = logging.getLogger(__name__)

#: Names that are looked at: what a program looks for before it writes for the first time.
_LOOKS = 1000


class _Calls(NamedTuple):
    """Numbers of system calls: those that open a file, and which argument has the flags; those that create a name."""

    opens: dict[int, int]
    creates: frozenset[int]


#: open and openat; creat, mkdir, mkdirat, mknod, mknodat, symlink, symlinkat, link, linkat.
_CALLS = {
    "x86_64": _Calls({2: 1, 257: 2}, frozenset((85, 83, 258, 133, 259, 88, 266, 86, 265))),
    "aarch64": _Calls({56: 2}, frozenset((34, 33, 36, 37))),
}


class Refusals:
    """Of one mount without outputs, until the first of them.

    Attributes:
        end: told when nothing is looked at any more.
        _left: looks that are left; 0 when it was said.
    """

    def __init__(self, mountpoint: os.PathLike[str], end: Callable[[], None]) -> None:
        self._mountpoint = mountpoint
        self._end = end
        self._calls = _CALLS.get(platform.machine()) if ctypes.sizeof(ctypes.c_void_p) == 8 else None
        self._left = _LOOKS if self._calls is not None else 1

    @property
    def wanted(self) -> bool:
        return self._left > 0

    def missing(self, name: bytes, thread: int) -> None:
        """A thread of a program asks for a name that is not there."""
        self._left -= 1
        if self._creates(thread):
            self._left = 0
            log.warning(
                "%s cannot be created in %s: without --output or --scratch it is read-only; --output DIR keeps what "
                "programs write in DIR, --scratch until the end of the job",
                format_path(name),
                self._mountpoint,
            )
        if self._left == 0:
            self._end()

    def _creates(self, thread: int) -> bool:
        """Whether it is in a system call that creates."""
        try:
            with open(f"/proc/{thread}/syscall", "rb") as file:
                words = file.read().split()
        except OSError:
            return False  # it has ended, belongs to somebody else, or lives in another process namespace
        if self._calls is None or len(words) < 7 or not words[0].isdigit():
            return False
        number = int(words[0])
        flags = self._calls.opens.get(number)
        if flags is not None:
            return bool(int(words[1 + flags], 16) & os.O_CREAT)
        return number in self._calls.creates
