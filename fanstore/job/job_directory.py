"""The directory of one job on a node's disk, and the removal of what dead jobs left there.

Owns ``BASE/fanstore-<uid>-<job>``: made with mode 0700, locked as long as the job lives, removed at its end. BASE may
be world-writable (/tmp): directories of other users are never touched, and no symbolic link is ever followed. Used by
the session of a mount, before and after trio runs; not thread-safe and does not need to be.

The lock is an flock on the file ``lock`` in the directory. The kernel drops it when the process dies, however it dies,
so a lock that can be taken means a dead job. Both sides follow the same rules, in whatever order they interleave:

- Who starts makes the directory, opens the lock file, locks it, and then looks whether the name still leads to the file
  that it has locked. If not, a sweep was faster; it begins again with another name.
- Who sweeps locks the lock file (making it if there is none: its job died, or has got only so far) before it removes
  anything, and removes the lock file last. The directory itself goes only if it is empty then.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from fanstore.errors import MountError

log = logging.getLogger(__name__)

LOCK_NAME = "lock"

#: An extended attribute of a BASE that did not exist before.
_MADE = "user.fanstore.made"

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

#: A sweep can win the race for a new directory once or twice; more often than this, something else is wrong.
_ATTEMPTS = 20


class JobDirectory:
    """A directory of this process, from construction to ``remove``. Make it after forking, not before.

    Attributes:
        path: the directory.
        _fd, _lock_fd: descriptors of the directory and of the locked file in it; -1 after ``remove``.
        made_base: BASE did not exist before, and goes when it is empty. It is marked where that is possible: the last
            of several processes that use it removes it, whoever has made it.
    """

    def __init__(self, base: Path, job: str | None = None) -> None:
        """``job`` is part of the name, for people who look at the disk: the batch system's number by default."""
        label = job if job is not None else os.environ.get("SLURM_JOB_ID", "job")
        if not label or "/" in label or "\0" in label:
            raise MountError(f"'{label}' cannot be part of a directory name")
        self._make_base(base)
        try:
            for _ in range(_ATTEMPTS):
                path = base / f"{_prefix()}{label}-{os.getpid()}-{secrets.token_hex(4)}"
                if self._try_make(path):
                    self.path = path
                    return
        except OSError as error:
            raise MountError(f"cannot make a directory in {base}: {error.strerror or error}") from error
        raise MountError(f"cannot make a directory in {base}: it disappears each time, within moments")

    def _make_base(self, base: Path) -> None:
        """Make it if it is missing, but nothing above it: then the name is mistyped, or the disk is not there."""
        self.made_base = False
        try:
            os.mkdir(base)
            self.made_base = True
            os.setxattr(base, _MADE, b"")
        except FileExistsError:
            return
        except FileNotFoundError:
            raise MountError(
                f"cannot make {base}: the directory {base.parent} does not exist; is the name right? Only the last "
                "component is made"
            ) from None
        except OSError as error:
            if not self.made_base:
                raise MountError(f"cannot make a directory in {base}: {error.strerror or error}") from error

    def _try_make(self, path: Path) -> bool:
        """Make and lock the directory; False if a sweep took it for dead in between."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            return False
        with contextlib.ExitStack() as stack:
            try:
                fd = os.open(path, _DIRECTORY_FLAGS)
                stack.callback(os.close, fd)
                lock_fd = os.open(LOCK_NAME, _LOCK_FLAGS, 0o600, dir_fd=fd)
                stack.callback(os.close, lock_fd)
            except FileNotFoundError:
                return False
            try:
                locked = _is_private(fd) and _lock_nowait(lock_fd) and _leads_to(fd, lock_fd)
            except OSError as error:
                _remove_locked(path, fd)  # nobody can lock here, so nobody else can have it
                raise MountError(
                    f"files in {path.parent} cannot be locked ({error.strerror}); use a local disk"
                ) from error
            if not locked:
                return False
            stack.pop_all()  # both stay open
        self._fd = fd
        self._lock_fd = lock_fd
        return True

    def remove(self, keeping: Collection[str] = ()) -> None:
        """Remove the directory with everything in it. What cannot be removed is a WARNING, not an error.

        With something to keep, that and the directory stay, and are found by the next sweep.
        """
        if self._fd < 0:
            return
        _remove_locked(self.path, self._fd, keeping)
        os.close(self._lock_fd)
        os.close(self._fd)
        self._fd = self._lock_fd = -1
        with contextlib.suppress(OSError):  # not empty: another process uses it as well; or without such attributes
            if self.made_base or os.getxattr(self.path.parent, _MADE) == b"":
                self.path.parent.rmdir()

    @staticmethod
    def sweep(base: Path, salvage: Callable[[Path], bool] = lambda path: True) -> list[Path]:
        """Remove the directories that dead jobs of this user left in BASE; returns those that are gone.

        ``salvage`` is called for each before, and says whether it may go.
        """
        removed = []
        try:
            names = sorted(name for name in os.listdir(base) if name.startswith(_prefix()))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise MountError(f"cannot look into {base}: {error.strerror or error}") from error
        for name in names:
            path = base / name
            try:
                if _sweep_one(path, salvage):
                    removed.append(path)
            except OSError as error:
                log.warning("cannot clean up %s: %s", path, error.strerror or error)
        for path in removed:
            log.info("removed %s, which a dead job had left", path)
        return removed

    @staticmethod
    def dead(base: Path) -> list[Path]:
        """The directories that dead jobs of this user left in BASE; nothing is changed. Raises OSError."""
        return JobDirectory._which(base, dead=True)

    @staticmethod
    def living(base: Path) -> list[Path]:
        """The directories of this user's jobs in BASE that are under way. Raises OSError."""
        return JobDirectory._which(base, dead=False)

    @staticmethod
    def _which(base: Path, dead: bool) -> list[Path]:
        found = []
        for name in sorted(os.listdir(base)):
            if not name.startswith(_prefix()):
                continue
            with contextlib.ExitStack() as stack:
                try:
                    fd = os.open(base / name, _DIRECTORY_FLAGS)
                    stack.callback(os.close, fd)
                    lock_fd = os.open(LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                    stack.callback(os.close, lock_fd)
                except OSError as error:
                    log.debug("not looked at: %s: %s", base / name, error.strerror)
                    continue
                if _is_private(fd) and _lock_nowait(lock_fd) == dead:
                    found.append(base / name)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _prefix() -> str:
    return f"fanstore-{os.geteuid()}-"


def _is_private(fd: int) -> bool:
    """Is this a directory that we made: ours, and closed to everybody else?"""
    status = os.fstat(fd)
    return status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077 == 0


def _lock_nowait(lock_fd: int) -> bool:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _leads_to(directory_fd: int, lock_fd: int) -> bool:
    """Does the name of the lock file still lead to the file that we have locked?"""
    try:
        named = os.stat(LOCK_NAME, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(lock_fd))


def _sweep_one(path: Path, salvage: Callable[[Path], bool]) -> bool:
    """Remove one directory if its job is dead."""
    try:
        fd = os.open(path, _DIRECTORY_FLAGS)  # a symbolic link fails here with ENOTDIR or ELOOP
    except OSError as error:
        log.debug("left alone: %s: %s", path, error.strerror)
        return False
    try:
        if not _is_private(fd):
            log.debug("left alone: %s is not a directory that we made", path)
            return False
        try:
            lock_fd = os.open(LOCK_NAME, _LOCK_FLAGS, 0o600, dir_fd=fd)
        except FileNotFoundError:
            return False  # removed by its owner at this moment
        try:
            dead = _lock_nowait(lock_fd) and _leads_to(fd, lock_fd)
            return dead and salvage(path) and _remove_locked(path, fd)
        finally:
            os.close(lock_fd)
    finally:
        os.close(fd)


def _remove_locked(path: Path, fd: int, keeping: Collection[str] = ()) -> bool:
    """Remove a directory whose lock we hold: content first, then the lock file, then itself. False if not all went."""
    complete = not keeping
    for name in os.listdir(fd):
        if name == LOCK_NAME or name in keeping:
            continue
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=fd)
            else:
                os.unlink(name, dir_fd=fd)
        except OSError as error:
            log.warning("cannot remove %s: %s", path / name, error.strerror or error)
            complete = False
    if not complete:
        return False  # the lock file stays, so that a later sweep tries again
    try:
        os.unlink(LOCK_NAME, dir_fd=fd)
        os.rmdir(path)
    except OSError as error:
        # A starting job may have put its own lock file here a moment ago; then the directory is its.
        log.debug("not removed: %s: %s", path, error.strerror or error)
        return False
    return True
