"""The directory that fanstore-prep writes: under a temporary name until it is complete.

``.NAME.partial-XXXXXXXX`` beside the real name holds everything; a flock on it tells a run at work from one that was
killed, whose remains the next run for the same name removes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from fanstore.errors import OutputError, UsageError
from fanstore.format.manifest import MANIFEST_FILE

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class OutputDirectory:
    """A context: entered, ``path`` is an empty directory; left without publish(), nothing remains.

    Attributes:
        final: the name the user asked for. path: where to write meanwhile.
    """

    def __init__(self, final: str, force: bool) -> None:
        self.final = Path(os.path.abspath(final))
        self._force = force
        self.path = self.final.with_name(f".{self.final.name}.partial-{os.urandom(4).hex()}")
        self._lock = -1

    def check(self) -> None:
        """Refuse what cannot work, before any work is done."""
        if not self.final.name:
            raise UsageError(f"'{self.final}' cannot be the name of a dataset")
        if not self.final.parent.is_dir():
            raise OutputError(f"the directory '{self.final.parent}' for the dataset does not exist")
        if not os.path.lexists(self.final):
            return
        if not self._force:
            raise OutputError(f"'{self.final}' exists already; use --force to replace it")
        if not self._replaceable():
            raise OutputError(
                f"'{self.final}' is not a prepared dataset, so --force does not replace it; remove it yourself"
            )

    def _replaceable(self) -> bool:
        if self.final.is_symlink() or not self.final.is_dir():
            return False
        return (self.final / MANIFEST_FILE).exists() or not any(self.final.iterdir())

    def __enter__(self) -> Self:
        self.check()
        self._sweep()
        try:
            self.path.mkdir()
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _try_lock(self._lock)
        except OSError as error:
            raise OutputError(f"cannot write to '{self.final.parent}': {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self.path.exists():
            _remove(self.path)

    def _sweep(self) -> None:
        """Remove what killed runs for the same name have left."""
        for remains in self.final.parent.glob(f".{_escape(self.final.name)}.partial-*"):
            try:
                fd = os.open(remains, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue  # not a directory of ours, or gone
            try:
                if os.fstat(fd).st_uid == os.getuid() and _try_lock(fd):
                    _remove(remains)
            finally:
                os.close(fd)

    def publish(self) -> None:
        """Give the complete directory its real name; a dataset that is replaced is removed afterwards."""
        try:
            _sync(self.path)
            if os.path.lexists(self.final):
                self.check()
                _exchange(self.path, self.final)
            else:
                os.rename(self.path, self.final)
            _sync(self.final.parent)
        except OSError as error:
            raise OutputError(f"cannot give the dataset its name '{self.final}': {error.strerror}") from error


def _escape(name: str) -> str:
    """For glob: the name itself and nothing else."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _try_lock(fd: int) -> bool:
    """Take the lock if nobody has it. On a file system without locks nothing is ever taken for dead."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories in one step, so that the name is never missing; two steps where the kernel cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    swapped = libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE)
    if swapped == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(code, os.strerror(code))
    aside = new.with_name(new.name + "-old")
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def _remove(path: Path) -> None:
    """Remove a directory into which another rank may still be writing for a moment."""
    for _ in range(20):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise OutputError(f"cannot remove '{path}': {error.strerror}; remove it yourself") from error
            time.sleep(0.1)
        else:
            return
