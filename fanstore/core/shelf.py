"""The directory that ``--output`` names: how things get there, so that nothing half-written ever has a real name.

Owns the calls of the shared file system: copies under temporary names, fsync, rename, and what an earlier job left
there. Does not know what is to be done when (saver.py) nor what an output is. Every function blocks, for as long as the
shared file system likes, and is called in worker threads. Raises OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fanstore.core.outputtree import PARKED_PATH

#: Directories with temporary copies, in the directory of the outputs, begin like this; nothing that does is an output.
COPIES_PREFIX = ".fanstore-"

_COPY_BYTES = 8 << 20


class Found(NamedTuple):
    """Something that stands in the directory: its parts, what stat says, the target of a symbolic link."""

    path: bytes
    mode: int
    mtime_ns: int
    size: int
    target: bytes


class ShorterError(OSError):
    """The file became shorter while it was copied; there is no copy."""


class Shelf:
    """The directory of one job's outputs."""

    def __init__(self, directory: Path, copies: str) -> None:
        """``copies``: name of this job's directory for temporary copies, the same on all nodes."""
        self.directory = directory
        self._copies = directory / copies

    def open(self) -> None:
        """Make sure that it is there and can be written to."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._copies.mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        """Remove what is temporary."""
        try:
            for directory, directories, files in os.walk(self._copies, topdown=False):
                if directory == str(self._copies):
                    for name in files:
                        os.unlink(os.path.join(directory, name))
                for name in directories:
                    os.rmdir(os.path.join(directory, name))  # only if nothing is parked there any more
            self._copies.rmdir()
        except FileNotFoundError:
            return

    def path(self, relative: bytes) -> bytes:
        """Where something stands; what is parked lies among the copies."""
        if relative.startswith(PARKED_PATH + b"/"):
            return os.path.join(os.fsencode(self._copies), relative[len(PARKED_PATH) + 1 :])
        return os.path.join(os.fsencode(self.directory), relative)

    # --- copies ---

    def copy_in(self, source: int, size: int, name: str) -> None:
        """A durable copy of the first ``size`` bytes of an open file, under a temporary name. Raises ShorterError."""
        target = os.open(self._copies / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            done = 0
            while done < size:
                count = os.sendfile(target, source, done, min(_COPY_BYTES, size - done))
                if count == 0:
                    raise ShorterError(errno.ESTALE, "the file became shorter while it was copied")
                done += count
            os.fsync(target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self._copies / name)
            raise
        finally:
            os.close(target)

    def discard(self, name: str) -> None:
        """A copy is not needed any more."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._copies / name)

    def has_copy(self, name: str) -> bool:
        return os.path.lexists(self._copies / name)

    def publish(self, name: str, relative: bytes, mode: int, mtime_ns: int, xattrs: Mapping[bytes, bytes]) -> None:
        """A copy gets its attributes and its real name, at which another file may stand; ``sync`` makes that durable.

        If there is no such copy any more but something has the name, another node has done so just before it died.
        """
        copy = os.fsencode(self._copies / name)
        target = self.path(relative)
        try:
            _set_attributes(copy, mode, mtime_ns, xattrs)
        except FileNotFoundError:
            if not os.path.lexists(target):
                raise
            return
        os.rename(copy, target)

    def sync(self, relatives: Iterable[bytes]) -> None:
        """Make the names durable."""
        for parent in {os.path.dirname(self.path(relative)) for relative in relatives}:
            _sync_directory(parent)

    # --- names ---

    def make_directory(self, relative: bytes, mode: int, mtime_ns: int, xattrs: Mapping[bytes, bytes]) -> None:
        """A directory, which may be there already. Its time holds until something is put there (``set_times``)."""
        path = self.path(relative)
        try:
            os.mkdir(path)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise
        _set_attributes(path, mode, mtime_ns, xattrs)
        _sync_directory(os.path.dirname(path))

    def set_times(self, directories: Iterable[tuple[bytes, int]]) -> None:
        """The times that directories are to have in the end; one that is gone is passed over."""
        for relative, mtime_ns in directories:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.path(relative), ns=(mtime_ns, mtime_ns))

    def make_parents(self, relative: bytes) -> None:
        """The directories of the dataset in which an output lies need not be there."""
        os.makedirs(os.path.dirname(self.path(relative)), exist_ok=True)

    def make_symlink(self, target: bytes, relative: bytes, mtime_ns: int, name: str) -> None:
        """A symbolic link, in place of whatever has its name."""
        copy = os.fsencode(self._copies / name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(copy)
        os.symlink(target, copy)
        os.utime(copy, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
        os.rename(copy, self.path(relative))
        _sync_directory(os.path.dirname(self.path(relative)))

    def rename(self, old: bytes, new: bytes) -> None:
        """A new name; if only that is there, another node has done it just before it died."""
        try:
            os.rename(self.path(old), self.path(new))
        except FileNotFoundError:
            if not os.path.lexists(self.path(new)):
                raise
        for parent in {os.path.dirname(self.path(old)), os.path.dirname(self.path(new))}:
            _sync_directory(parent)

    def set_attributes(self, relative: bytes, mode: int, mtime_ns: int, xattrs: Mapping[bytes, bytes]) -> None:
        _set_attributes(self.path(relative), mode, mtime_ns, xattrs)

    def remove(self, relative: bytes, directory: bool) -> None:
        """Remove a name, which may be gone already."""
        path = self.path(relative)
        with contextlib.suppress(FileNotFoundError):
            if directory:
                os.rmdir(path)
            else:
                os.unlink(path)
            _sync_directory(os.path.dirname(path))

    def exists(self, relative: bytes) -> bool:
        return os.path.lexists(self.path(relative))

    # --- reading ---

    def read(self, relative: bytes, offset: int, length: int) -> bytes:
        fd = os.open(self.path(relative), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.pread(fd, length, offset)
        finally:
            os.close(fd)

    def scan(self) -> Iterator[Found]:
        """Everything that stands here, directories before what is in them; only files, directories and links."""
        pending = [b""]
        while pending:
            relative = pending.pop()
            with os.scandir(self.path(relative)) as entries:
                for entry in sorted(entries, key=lambda item: item.name):
                    if not relative and entry.name.startswith(os.fsencode(COPIES_PREFIX)):
                        continue
                    below = os.path.join(relative, entry.name)
                    status = entry.stat(follow_symlinks=False)
                    kind = stat.S_IFMT(status.st_mode)
                    if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                        continue
                    target = os.readlink(entry.path) if kind == stat.S_IFLNK else b""
                    size = 0 if kind == stat.S_IFDIR else status.st_size
                    yield Found(below, status.st_mode, status.st_mtime_ns, size, target)
                    if kind == stat.S_IFDIR:
                        pending.append(below)


def _set_attributes(path: bytes, mode: int, mtime_ns: int, xattrs: Mapping[bytes, bytes]) -> None:
    if stat.S_ISLNK(mode):
        os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
        return
    present = set()
    with contextlib.suppress(OSError):  # a file system without them
        present = {os.fsencode(name) for name in os.listxattr(path) if name.startswith("user.")}
    for name in present - xattrs.keys():
        os.removexattr(path, name)
    for name, value in xattrs.items():
        try:
            os.setxattr(path, name, value)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOSPC, errno.E2BIG):
                raise
    # We must be able to put something into a directory.
    os.chmod(path, stat.S_IMODE(mode) | (stat.S_IRWXU if stat.S_ISDIR(mode) else 0))
    os.utime(path, ns=(mtime_ns, mtime_ns))


def _sync_directory(path: bytes) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
