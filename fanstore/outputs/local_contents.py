"""The content of outputs on this node: one file per output, in a directory on the local disk.

Owns the directory, the names of its files (the inode number in hexadecimal, which the native engine knows too:
native/outputs/outputs.h) and the knowledge whether content has changed since it was last made known. Does not know
names, other nodes or ``--output``. The native engine reads and writes the same files. Trio thread, but for ``sync``,
``all`` and ``has_writer``; calls of the local disk are short.

Whether a file has changed is seen by its size and times: every write sets them, and no program can set the ctime back.
Clocks of file systems tick every few milliseconds, so a file that was changed a moment ago may change again without a
trace: for RACY_NS it is taken for changed. Who copies it waits longer than that first, and so copies such a change as
well. Who cannot wait (fsync) marks the file: its mtime on the disk is set back by a nanosecond, to a time that no write
sets, so that the next write leaves a trace in any case. Nobody but recovery.py ever sees that time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Longer than a tick of any file system's clock.
RACY_NS = 20_000_000

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class Stamp(NamedTuple):
    """The state of a content, for comparison."""

    size: int
    ctime_ns: int
    mtime_ns: int


class Content(NamedTuple):
    """What stat says of the content of an output."""

    size: int
    blocks: int
    mtime_ns: int
    stamp: Stamp


class LocalContents:
    """The contents on this node.

    Attributes:
        directory_fd: descriptor of the directory, for the native engine.
        _clean: by inode, the state that was last made known, and when, if it had just been changed then.
        _marks: by inode, the mtime that a marked file has on the disk, and the one that it has for everybody else.
    """

    def __init__(self, directory: Path, *, existing: bool = False) -> None:
        """In a new directory, or in that of a dead job. Raises OSError."""
        if not existing:
            directory.mkdir(mode=0o700)
        self.path = directory
        self.directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._clean: dict[int, tuple[Stamp, int]] = {}
        self._marks: dict[int, tuple[int, int]] = {}

    def close(self) -> None:
        """Nothing is read or written any more."""
        os.close(self.directory_fd)
        self.directory_fd = -1

    @property
    def is_closed(self) -> bool:
        return self.directory_fd < 0

    def file(self, inode: int) -> Path:
        """Where the content of an output is, for people."""
        return self.path / name_of(inode)

    def free(self) -> os.statvfs_result:
        """How much room there is."""
        return os.statvfs(self.path)

    # --- one content ---

    def find(self, inode: int) -> Content | None:
        """The content of an output, if it is here."""
        try:
            found = os.stat(name_of(inode), dir_fd=self.directory_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        marked_ns, mtime_ns = self._marks.get(inode, (-1, -1))
        if marked_ns != found.st_mtime_ns:
            mtime_ns = found.st_mtime_ns
        stamp = Stamp(found.st_size, found.st_ctime_ns, found.st_mtime_ns)
        return Content(found.st_size, found.st_blocks, mtime_ns, stamp)

    def has_writer(self, inode: int) -> bool:
        """Has anybody the content open for writing? The kernel gives no lease for reading then."""
        try:
            fd = self.open(inode)
        except FileNotFoundError:
            return False
        try:
            # Of somebody who opens it for writing meanwhile the kernel tells by a signal: by one that means nothing.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGWINCH)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            return error.errno == errno.EAGAIN
        finally:
            os.close(fd)
        return False

    def make(self, inode: int) -> None:
        """New, empty content. Raises OSError."""
        os.close(os.open(name_of(inode), os.O_RDWR | _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self.directory_fd))

    def remove(self, inode: int) -> None:
        """The content is not needed here any more."""
        self._clean.pop(inode, None)
        self._marks.pop(inode, None)
        try:
            os.unlink(name_of(inode), dir_fd=self.directory_fd)
        except FileNotFoundError:
            return

    def open(self, inode: int, access: int = os.O_RDONLY) -> int:
        """A descriptor, with these flags. Raises OSError; FileNotFoundError if the content is not here."""
        return os.open(name_of(inode), access | _FLAGS, dir_fd=self.directory_fd)

    def read(self, inode: int, offset: int, length: int) -> bytes:
        """Bytes of a content that is here; short at its end. Raises OSError."""
        fd = self.open(inode)
        try:
            return os.pread(fd, length, offset)
        finally:
            os.close(fd)

    def write(self, inode: int, offset: int, data: bytes) -> int:
        """Write into a content that is here; how much of it, which is less only if the disk is full. Raises OSError."""
        fd = self.open(inode, os.O_RDWR)
        try:
            view, done = memoryview(data), 0
            while done < len(view):
                try:
                    done += os.pwrite(fd, view[done:], offset + done)
                except OSError:
                    if done == 0:
                        raise
                    break
            return done
        finally:
            os.close(fd)

    def resize(self, inode: int, size: int) -> None:
        """Cut or extend a content that is here. Raises OSError."""
        fd = self.open(inode, os.O_RDWR)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)

    def set_time(self, inode: int, mtime_ns: int) -> None:
        """Set the time of the last change, as utimensat does. Raises OSError."""
        self._marks.pop(inode, None)
        os.utime(name_of(inode), ns=(mtime_ns, mtime_ns), dir_fd=self.directory_fd, follow_symlinks=False)

    def sync(self, inode: int) -> None:
        """Until the content is on the disk. Blocks. Raises OSError."""
        fd = self.open(inode)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def take_in(self, inode: int, part: Path, mtime_ns: int) -> None:
        """A file of this directory becomes the content of an output; it is known as it is."""
        self._marks.pop(inode, None)
        os.utime(part, ns=(mtime_ns, mtime_ns))
        os.rename(part, self.file(inode))
        content = self.find(inode)
        if content is not None:
            self.set_clean(inode, content.stamp)

    def part(self, inode: int) -> Path:
        """Where content is gathered before it is taken in."""
        return self.path / f"{name_of(inode)}.part"

    # --- changes ---

    def is_changed(self, inode: int) -> bool:
        """Has the content that is here changed since it was made known? False if there is none."""
        content = self.find(inode)
        if content is None:
            return False
        stamp, known_ns = self._clean.get(inode, (None, 0))
        return content.stamp != stamp or time.monotonic_ns() - known_ns < RACY_NS

    def mark(self, inode: int) -> None:
        """From now on every change of the content leaves a trace. Raises OSError."""
        content = self.find(inode)
        if content is None or not _is_racy(content.stamp):
            return
        marked_ns = content.mtime_ns - 1
        os.utime(name_of(inode), ns=(marked_ns, marked_ns), dir_fd=self.directory_fd, follow_symlinks=False)
        found = os.stat(name_of(inode), dir_fd=self.directory_fd, follow_symlinks=False)
        self._marks[inode] = (found.st_mtime_ns, content.mtime_ns)  # a file system may keep less of it

    def is_known(self, inode: int) -> bool:
        """Is the content that is here the one that was made known last, as far as can be seen? False if there is none.

        Not the opposite of ``is_changed``, which is on the safe side for who would make it known once more. Here that
        would be the wrong one: the content that another node has made known since must not be replaced by ours.
        """
        content = self.find(inode)
        return content is not None and content.stamp == self._clean.get(inode, (None, 0))[0]

    def is_as(self, inode: int, stamp: Stamp) -> bool:
        """Is the content here, and in this state?"""
        content = self.find(inode)
        return content is not None and content.stamp == stamp

    def set_clean(self, inode: int, stamp: Stamp) -> None:
        """The content with this stamp is known to all."""
        racy = _is_racy(stamp) and self._marks.get(inode, (-1, -1))[0] != stamp.mtime_ns
        self._clean[inode] = (stamp, time.monotonic_ns() if racy else -RACY_NS)

    def all(self) -> Iterator[int]:
        """The inode numbers of all contents that are here. Any thread."""
        # Not of directory_fd itself: threads that list at once would move each other's place in the directory.
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.directory_fd)
        try:
            names = os.listdir(fd)
        finally:
            os.close(fd)
        for name in names:
            if "." not in name:
                yield int(name, 16)


def _is_racy(stamp: Stamp) -> bool:
    """Could it change again without a trace?"""
    return time.time_ns() - stamp.ctime_ns < RACY_NS


def name_of(inode: int) -> str:
    """The name of an output's file."""
    return f"{inode:x}"
