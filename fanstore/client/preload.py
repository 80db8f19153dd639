"""What preloaded programs are told of a mount: files as native/preload/state.h has them, and who names these files.

Owns their layout, which is that of state.h, and the directory that holds them; the caller removes it. Knows nothing of
partitions but their numbers and files (fuse/interception.py does). Any thread.
"""

import mmap
import os
import stat
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fanstore import _native
from fanstore.errors import FanstoreError

#: The library, next to the extension module, with which it is built.
LIBRARY = Path(_native.__file__).with_name("libfanstore-io.so")
#: Name of the directory in that of the job.
DIRECTORY_NAME = "preload"
STATE_VARIABLE = "FANSTORE_PRELOAD_STATE"

VERSION = 3
_MAGIC = b"FSXSTATE"
#: Magic, version, ended, uid, gid, device, verify, writable, entries, partitions, marks, index, hidden, points,
#: unmounted, blocks, files, shares.
_HEADER = struct.Struct("<8sIIIIQIIIIQQIIQQQI28x")
_ENDED_OFFSET = 12
_PATH_BYTES = 4096
_STATE_BYTES = _HEADER.size + 2 * _PATH_BYTES
_PART_HEAD_BYTES = 16
_PART_BYTES = _PART_HEAD_BYTES + 2 * _PATH_BYTES
_VERIFIED = 0x100
_NOTHING_HIDDEN = 0xFFFFFFFF
_COUNTER_SLOTS = 64
#: One line of counters; one more number is 0.
COUNTERS = ("opens", "reads", "bytes", "stats", "promotions", "passed", "listings")
_LINE = struct.Struct("<8Q")


class PreloadError(FanstoreError):
    """Programs cannot be intercepted."""


@dataclass(frozen=True)
class Described:
    """A mount, as far as programs need it.

    Attributes:
        device: ``st_dev``; uid, gid: of everything in it. verify: 0 first, 1 always, 2 never.
        writable: there may be outputs. hidden: entry of the dataset that the control directory hides, -1 for none.
        points: the mount point: its real path, and perhaps the path that was given.
        partitions: how many; marks: entries and chunk records. unmounted: there is no mount at ``points``.
        blocks, files: what statfs says. shares: the daemon shows its chunk cache.
        waits: who closes an output is to say so.
    """

    device: int
    uid: int
    gid: int
    verify: int
    writable: bool
    hidden: int
    points: Sequence[Path]
    entries: int
    partitions: int
    marks: int
    unmounted: bool = False
    blocks: int = 0
    files: int = 0
    shares: bool = False
    waits: bool = False


class PreloadState:
    """The files, from construction on.

    Attributes:
        path: the directory.
        _files: number of the file that serves each partition, as programs know it; guarded by ``_lock``.
    """

    def __init__(self, directory: Path, index: memoryview, described: Described) -> None:
        """Raises OSError, PreloadError."""
        names = [os.fsencode(point) for point in described.points]
        if any(len(name) >= _PATH_BYTES for name in names):
            raise PreloadError("the path of the mount point is too long for programs to be intercepted")
        self.path = directory / DIRECTORY_NAME
        self._lock = threading.Lock()
        self._files = [0] * described.partitions
        os.mkdir(self.path, 0o700)
        self._write("index", index)
        os.mknod(self.path / "placeholder", stat.S_IFSOCK | 0o600)
        if described.unmounted:
            os.mkdir(self.path / "tree", 0o700)
        os.close(self._make("marks", max(described.marks, 1)))
        counters = self._make("counters", _COUNTER_SLOTS * _LINE.size)
        try:
            self._counters = mmap.mmap(counters, _COUNTER_SLOTS * _LINE.size, prot=mmap.PROT_READ)
        finally:
            os.close(counters)
        header = _HEADER.pack(
            _MAGIC,
            VERSION,
            0,
            described.uid,
            described.gid,
            described.device,
            described.verify,
            described.writable | described.waits << 1,
            described.entries,
            described.partitions,
            described.marks,
            len(index),
            described.hidden if described.hidden >= 0 else _NOTHING_HIDDEN,
            len(names),
            described.unmounted,
            described.blocks,
            described.files,
            described.shares,
        )
        self._fd = self._make("state", _STATE_BYTES + described.partitions * _PART_BYTES)
        for number, name in enumerate(names):
            os.pwrite(self._fd, name, _HEADER.size + number * _PATH_BYTES)
        os.pwrite(self._fd, header, 0)

    def _make(self, name: str, length: int) -> int:
        fd = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, length)
        return fd

    def _write(self, name: str, content: memoryview) -> None:
        with open(self._make(name, 0), "wb", buffering=0) as file:
            done = 0
            while done < len(content):
                done += file.write(content[done:]) or 0

    def use(self, partition: int, number: int, path: Path, verified: bool) -> None:
        """This file serves a partition: 1 the prepared one, 2 the copy on this node, which stays. From any thread."""
        name = os.fsencode(path)
        if len(name) >= _PATH_BYTES:
            return  # the mount serves it
        with self._lock:
            if self._fd < 0 or self._files[partition] >= number:
                return
            self._files[partition] = number
            start = _STATE_BYTES + partition * _PART_BYTES
            os.pwrite(self._fd, name, start + _PART_HEAD_BYTES + (number - 1) * _PATH_BYTES)
            os.pwrite(self._fd, struct.pack("<I", number | (_VERIFIED if verified else 0)), start)

    def counters(self) -> dict[str, int]:
        """What all programs have counted so far."""
        total = [0] * len(COUNTERS)
        for slot in range(_COUNTER_SLOTS):
            line = _LINE.unpack_from(self._counters, slot * _LINE.size)
            total = [sum(pair) for pair in zip(total, line, strict=False)]
        return dict(zip(COUNTERS, total, strict=True))

    def opens(self) -> int:
        """The first of the counters, which is asked for often."""
        return sum(memoryview(self._counters).cast("Q")[:: _LINE.size // 8])

    def end(self) -> None:
        """Programs are to open nothing any more: the mount ends. What they have open stays readable."""
        with self._lock:
            if self._fd >= 0:
                os.pwrite(self._fd, struct.pack("<I", 1), _ENDED_OFFSET)
                os.close(self._fd)
                self._fd = -1


class ShownState:
    """The same files, as a program reads them that is told of the directory.

    Attributes:
        device: ``st_dev`` of the mount.
    """

    def __init__(self, directory: Path) -> None:
        """Raises OSError, PreloadError."""
        with open(directory / "state", "rb") as file:
            self._state = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        magic, version, _, _, _, self.device, self._verify, *_ = _HEADER.unpack_from(self._state)
        if magic != _MAGIC or version != VERSION:
            raise PreloadError("the daemon of the mount has another version of FanStore")
        with open(directory / "marks", "r+b") as file:
            self._marks = mmap.mmap(file.fileno(), 0)

    @property
    def ended(self) -> bool:
        """The mount is no more."""
        return self._state[_ENDED_OFFSET] != 0

    def file(self, partition: int) -> tuple[int, bool]:
        """Number of the file of this node that serves a partition, 0 for none; was all of it checked?"""
        (number,) = struct.unpack_from("<I", self._state, _STATE_BYTES + partition * _PART_BYTES)
        return number & 0xFF, bool(number & _VERIFIED)

    def path(self, partition: int, number: int) -> Path:
        start = _STATE_BYTES + partition * _PART_BYTES + _PART_HEAD_BYTES + (number - 1) * _PATH_BYTES
        return Path(os.fsdecode(self._state[start : start + _PATH_BYTES].split(b"\0", 1)[0]))

    def must_check(self, verified: bool) -> bool:
        return self._verify == 1 or (self._verify == 0 and not verified)

    def is_marked(self, place: int, number: int) -> bool:
        """Has a program of this node found it intact in this file?"""
        return self._verify == 0 and self._marks[place] == number

    def mark(self, place: int, number: int) -> None:
        self._marks[place] = number


def environment(state: str | Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of a program that is to be intercepted. Raises PreloadError."""
    library = str(LIBRARY)
    if not LIBRARY.exists():
        raise PreloadError(f"{library} is missing: install FanStore again")
    if any(character in library for character in ": \t\n"):
        raise PreloadError(
            f"{library} cannot be preloaded, because a colon or white space in its path separates libraries there; "
            "install FanStore elsewhere"
        )
    others = [name for name in inherited.get("LD_PRELOAD", "").replace(" ", ":").split(":") if name]
    # Behind those that are there: a sanitizer insists on being the first.
    return {
        "LD_PRELOAD": ":".join([*(name for name in others if name != library), library]),
        STATE_VARIABLE: str(state),
    }
