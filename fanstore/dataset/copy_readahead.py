"""Copies on this node's disk are read into the page cache in sequence, before programs read them at random.

The page cache then has them in large folios, as after staging: 107,000 bytes are copied from there in 4 µs. What a
random read of a small file brings in lies in single pages, and the same copy takes 15 µs as long as they stay (an AMD
EPYC, Linux 6.18, ext4). For programs that are intercepted: bytes of others are cached in the mount, not here. Only what
there is room for is read: nobody else's memory is taken for it.

Owns a thread, which runs as long as something is read. Used by fuse/interception.py; ``begin`` and ``end`` on the trio
thread.
"""

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fanstore import _native
from fanstore.dataset.memory_limit import available_bytes
from fanstore.units import format_bytes

log = logging.getLogger(__name__)

#: Of the memory that is available, at most so much is filled: one part in so many stays.
_SHARE = 2
#: Asked whether it is in memory, and read, at a time. The kernel's own read-ahead runs along.
_WINDOW_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 20
#: To look for what is missing may take one part in so many of the time: programs can be started again and again.
_LOOK_PART = 20
#: Seconds that the end waits for a disk that does not answer.
_END_S = 2.0


class CopyReadahead:
    """Reads files of this node into the page cache.

    Attributes:
        read_bytes: so far; read by any thread.
        _thread: that of the last ``begin``. _rest_until_s: when it may look again, by the monotonic clock.
    """

    def __init__(self, files: Callable[[], Sequence[Path]], available: Callable[[], int] = available_bytes) -> None:
        """``files`` says what is to be in memory; it is asked on the thread."""
        self.read_bytes = 0
        self._files = files
        self._available = available
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._rest_until_s = 0.0

    def begin(self) -> None:
        """Read what is not in memory. Returns at once; does nothing while or soon after it was begun, or at the end."""
        is_idle = self._thread is None or not self._thread.is_alive()
        if is_idle and not self._stop.is_set() and time.monotonic() >= self._rest_until_s:
            self._thread = threading.Thread(target=self._run, name="copy readahead", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Read no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        begin_s = time.monotonic()
        missing = {path: windows for path in self._files() if (windows := self._look(path))}
        self._rest_until_s = time.monotonic() + (time.monotonic() - begin_s) * _LOOK_PART
        wanted = sum(map(len, missing.values())) * _WINDOW_BYTES
        room = self._available() // _SHARE
        if wanted > room:
            log.info(
                "%s of local copies are not in memory, and not read ahead: there is room for %s",
                format_bytes(wanted),
                format_bytes(room),
            )
            return
        buffer = bytearray(_BLOCK_BYTES)
        for path, windows in missing.items():
            try:
                with open(path, "rb", buffering=0) as file:
                    for window in windows:
                        self._read(file.fileno(), window, buffer)
            except OSError as error:
                log.info("%s is not read ahead: %s", path, error.strerror)

    def _look(self, path: Path) -> list[int]:
        """Where the windows begin that are not wholly in memory; none of a file that cannot be read."""
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if not size:
                    return []
                with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
                    return [
                        start
                        for start in range(0, size, _WINDOW_BYTES)
                        if not _native.pages_resident(view[start : start + _WINDOW_BYTES])
                    ]
        except OSError as error:
            # Whoever reads it is told. It may be gone because the job ends.
            log.info("%s is not read ahead: %s", path, error.strerror)
            return []

    def _read(self, fd: int, start: int, buffer: bytearray) -> None:
        for offset in range(start, start + _WINDOW_BYTES, _BLOCK_BYTES):
            if self._stop.is_set():
                return
            got = os.preadv(fd, [buffer], offset)
            self.read_bytes += got
            if got < _BLOCK_BYTES:
                return
