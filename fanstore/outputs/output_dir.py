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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fanstore.outputs.tree import PARKED_PATH

#: Directories with temporary copies, in the directory of the outputs, begin like this; nothing that does is an output.
COPIES_PREFIX = ".fanstore-"

#: Names in them of what stands there for a moment end like this.
PARKED_ENDING = "-parked"

_COPY_BYTES = 8 << 20


class ShorterError(OSError):
    """The file became shorter while it was copied; there is no copy."""


class Wanted(NamedTuple):
    """What is to be copied: the first ``size`` bytes of an open file, and the name of the copy."""

    source: int
    size: int
    name: str


class Found(NamedTuple):
    """Something that stands in the directory: its parts, what stat says, the target of a symbolic link."""

    path: bytes
    mode: int
    mtime_ns: int
    size: int
    target: bytes


class OutputDir:
    """The directory of one job's outputs.

    Attributes:
        moved_bytes: grows while copies are made, by any thread and about as much as they do: a sign of life.
    """

    def __init__(self, directory: Path, copies: str, rank: int) -> None:
        """``copies``: name of this job's directory for temporary copies, the same on all nodes.

        Names in it begin with the rank of the node that has made them: each removes its own.
        """
        self.directory = directory
        self._copies = directory / copies
        self._rank = rank
        self._identity: tuple[int, int] | None = None
        self.moved_bytes = 0

    def open(self, *, parents: bool = True) -> None:
        """Make sure that it is there and can be written to."""
        self.directory.mkdir(parents=parents, exist_ok=True)
        self._copies.mkdir(mode=0o700, exist_ok=True)
        self._identity = _identity(self.directory)

    def join(self) -> None:
        """Make sure that it is the directory that another node has opened."""
        if not self._copies.is_dir():
            raise OSError(errno.ENOENT, "it is not the same directory on all nodes")
        self._identity = _identity(self.directory)

    def _check(self) -> None:
        """It must still be the directory that was opened: otherwise the file system is not mounted, most likely.

        Then nothing may be made there, and that something is not there means nothing.
        """
        if _identity(self.directory) != self._identity:
            raise OSError(errno.ESTALE, f"{self.directory} is another directory than at the start")

    def _reopen(self) -> None:
        """The directory for copies may be gone: another node has left the job, and removed it when it was empty."""
        self._check()
        self._copies.mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        """Remove what is temporary and was made on this node; the last one removes the directory, too.

        What is parked is not temporary.
        """
        try:
            with os.scandir(self._copies) as entries:
                for entry in entries:
                    if entry.name.startswith(f"{self._rank}-") and not entry.name.endswith(PARKED_ENDING):
                        os.unlink(entry.path)
            self._copies.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise

    def path(self, relative: bytes) -> bytes:
        """Where something stands; what is parked lies among the copies."""
        if relative.startswith(PARKED_PATH + b"/"):
            return os.path.join(os.fsencode(self._copies), relative[len(PARKED_PATH) + 1 :])
        return os.path.join(os.fsencode(self.directory), relative)

    # --- copies ---

    def copy_all(self, wanted: Sequence[Wanted]) -> list[OSError | None]:
        """Durable copies of open files, which are closed, under temporary names; for each what went wrong, or None.

        All are written before the first is synced: a file system that writes in groups does so once. ShorterError if a
        file has less than it should.
        """
        targets: list[int] = []
        errors: list[OSError | None] = []
        try:
            for item in wanted:
                targets.append(-1)
                errors.append(self._attempt(item, targets))
            for position, (item, target) in enumerate(zip(wanted, targets, strict=True)):
                if errors[position] is None:
                    errors[position] = self._attempt_sync(item, target)
        finally:
            for item in wanted:
                os.close(item.source)
            for target in targets:
                if target >= 0:
                    os.close(target)
        return errors

    def copy_in(self, wanted: Wanted) -> None:
        """The same for one, but raises what went wrong."""
        (error,) = self.copy_all([wanted])
        if error is not None:
            raise error

    def _attempt(self, item: Wanted, targets: list[int]) -> OSError | None:
        """Write one of them; its descriptor becomes the last of the targets."""
        try:
            targets[-1] = self._create(item.name)
            self._copy(item.source, targets[-1], item.size)
        except OSError as error:
            if targets[-1] >= 0:
                self._throw_away(item.name)
            return error
        return None

    def _copy(self, source: int, target: int, size: int) -> None:
        done = 0
        while done < size:
            count = os.sendfile(target, source, done, min(_COPY_BYTES, size - done))
            if count == 0:
                raise ShorterError(errno.ESTALE, "the file became shorter while it was copied")
            done += count
            self.moved_bytes += count

    def _attempt_sync(self, item: Wanted, target: int) -> OSError | None:
        try:
            os.fsync(target)
        except OSError as error:
            self._throw_away(item.name)
            return error
        return None

    def _throw_away(self, name: str) -> None:
        """A copy that is not whole. If that fails, too, the end or the next attempt removes it."""
        with contextlib.suppress(OSError):
            os.unlink(self._copies / name)

    def _create(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            return os.open(self._copies / name, flags, 0o600)
        except FileNotFoundError:
            self._reopen()
        return os.open(self._copies / name, flags, 0o600)

    def discard(self, name: str) -> None:
        """A copy is not needed any more."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._copies / name)

    def has_copy(self, name: str) -> bool:
        self._check()
        return os.path.lexists(self._copies / name)

    def publish(self, name: str, relative: bytes, mode: int, mtime_ns: int, xattrs: Mapping[bytes, bytes]) -> None:
        """A copy gets its attributes and its real name, where another file may stand; ``sync`` makes that durable."""
        copy = os.fsencode(self._copies / name)
        _set_attributes(copy, mode, mtime_ns, xattrs)
        os.rename(copy, self.path(relative))

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
        self._check()
        parent = os.path.dirname(relative)
        if parent == PARKED_PATH:
            self._reopen()
        elif parent:
            os.makedirs(self.path(parent), exist_ok=True)

    def make_symlink(self, target: bytes, relative: bytes, mtime_ns: int, name: str) -> None:
        """A symbolic link, in place of whatever has its name."""
        copy = os.fsencode(self._copies / name)
        self._reopen()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(copy)
        os.symlink(target, copy)
        os.utime(copy, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
        os.rename(copy, self.path(relative))
        _sync_directory(os.path.dirname(self.path(relative)))

    def rename(self, old: bytes, new: bytes) -> None:
        self._check()
        os.rename(self.path(old), self.path(new))
        for parent in {os.path.dirname(self.path(old)), os.path.dirname(self.path(new))}:
            _sync_directory(parent)

    def set_attributes(self, relative: bytes, mode: int, mtime_ns: int, xattrs: Mapping[bytes, bytes]) -> None:
        self._check()
        _set_attributes(self.path(relative), mode, mtime_ns, xattrs)

    def remove(self, relative: bytes, directory: bool) -> None:
        """Remove a name, which may be gone already."""
        self._check()
        path = self.path(relative)
        with contextlib.suppress(FileNotFoundError):
            if directory:
                os.rmdir(path)
            else:
                os.unlink(path)
            _sync_directory(os.path.dirname(path))

    def exists(self, relative: bytes) -> bool:
        return self.look(relative) is not None

    def look(self, relative: bytes) -> os.stat_result | None:
        """What stands there; None if nothing does."""
        self._check()
        try:
            return os.lstat(self.path(relative))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
                raise
            return None

    def target(self, relative: bytes) -> bytes:
        """Where a symbolic link that stands there leads."""
        return os.readlink(self.path(relative))

    # --- reading ---

    def read(self, relative: bytes, offset: int, length: int) -> bytes:
        return _read(self.path(relative), offset, length)

    def read_copy(self, name: str, offset: int, length: int) -> bytes:
        """The same of a copy that awaits its name."""
        return _read(os.fsencode(self._copies / name), offset, length)

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


def _identity(directory: Path) -> tuple[int, int]:
    status = os.stat(directory)
    return status.st_dev, status.st_ino


def _read(path: bytes, offset: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


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
