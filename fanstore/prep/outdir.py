"""The directory that fanstore-prep writes: under a temporary name until it is complete.

``.NAME.partial-XXXXXXXX`` beside the real name holds everything; a flock on it tells a run at work from one that was
killed. The next run for the same name takes over what that has finished (journal.py), under another tag, so that
whatever is left of the killed one writes there no more; other remains are removed.

A dataset that is replaced is moved aside, to ``.NAME.replaced-XXXXXXXX``, then the new one gets its name. Not exchanged
in one step: only while the name leads nowhere can no mount begin to use what is about to go (format/users.py). A run
that was killed in between is undone by the next run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from fanstore.errors import OutputError, UsageError
from fanstore.format import users
from fanstore.format.manifest import MANIFEST_FILE
from fanstore.format.users import DatasetUser
from fanstore.prep import journal
from fanstore.prep.journal import Finished
from fanstore.units import format_bytes

#: Who interrupts a run which has finished partitions of so many bytes may want to go on later: minutes of work where
#: files are small.
WORTH_KEEPING_BYTES = 256 << 20


class Sink:
    """Where the ranks of a job write partitions; goes from rank 0 to the others. Any thread.

    Attributes:
        first: number of the first new partition. key: what the journal is for.
    """

    def __init__(self, directory: Path, first: int = 0) -> None:
        self._directory = directory
        self.first = first
        self.key = ""

    def name(self, number: int) -> str:
        """The name of a partition."""
        return f"part-{self.first + number:05d}.tar"

    def path(self, number: int) -> Path:
        """The file to write it to."""
        return self._directory / self.name(number)

    def recall(self, number: int) -> Finished | None:
        """The partition, if an earlier run has finished it. Raises OSError."""
        return journal.recall(self.path(number), self.key)

    def finished(self, number: int, what: Finished) -> None:
        """It is complete, and on the disk. Raises OSError, OutputError."""
        if not what.results["status"].any():  # a file that could not be read may be readable the next time
            journal.write(self.path(number), self.key, what)

    def close(self) -> None:
        """This rank writes no more."""


class OutputDirectory:
    """A context: entered, ``path`` has at most finished partitions of an earlier run; left without publish(), nothing
    remains, or what this run has finished, if it is much and the user has interrupted it.

    Attributes:
        final: the name the user asked for. path: where to write meanwhile. sink: for partitions.
    """

    def __init__(self, final: str, force: bool, note: Callable[[str], None] = lambda _: None) -> None:
        self.final = Path(os.path.abspath(final))
        self._force = force
        self._note = note
        self._tag = os.urandom(4).hex()
        self.path = self.final.with_name(f".{self.final.name}.partial-{self._tag}")
        self.sink = Sink(self.path)
        self._lock = -1

    def check(self) -> None:
        """Refuse what cannot work, before any work is done."""
        if not self.final.name:
            raise UsageError(f"'{self.final}' cannot be the name of a dataset")
        try:
            os.stat(f"{self.final.parent}/.")
            self._restore()
            if os.path.lexists(self.final):
                self._check_old()
                if found := self._users():
                    raise self._in_use(found, "unmount it, or prepare under another name")
        except (FileNotFoundError, NotADirectoryError):
            raise OutputError(f"the directory '{self.final.parent}' for the dataset does not exist") from None
        except OSError as error:
            raise OutputError(f"cannot use '{self.final}': {error.strerror}") from error

    def _check_old(self) -> None:
        """Refuse to replace what is there, if it is not what --force is for."""
        if not self._force:
            raise OutputError(f"'{self.final}' exists already; use --force to replace it")
        if not self._replaceable():
            raise OutputError(
                f"'{self.final}' is not a prepared dataset, so --force does not replace it; remove it yourself"
            )

    def _users(self) -> list[DatasetUser]:
        try:
            return users.users_of(self.final)
        except OSError as error:
            raise OutputError(
                f"cannot see who uses '{self.final}': {error.strerror}; prepare under another name"
            ) from error

    def _in_use(self, found: list[DatasetUser], advice: str) -> OutputError:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        note = self.final / users.USERS_DIRECTORY / found[0].file
        return OutputError(
            f"'{self.final}' is in use and was not replaced: {found[0]}{more}; {advice} (a job that was killed counts "
            f"for {users.STALE_S / 60:.0f} minutes, unless you remove '{note}')"
        )

    def _replaceable(self) -> bool:
        if self.final.is_symlink() or not self.final.is_dir():
            return False
        return (self.final / MANIFEST_FILE).exists() or not any(self.final.iterdir())

    def __enter__(self) -> Self:
        self.check()
        try:
            adopted = self._adopt()
            self._sweep()
            if adopted:
                journal.keep_finished(self.path)
                return self
            self.path.mkdir()
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _try_lock(self._lock)
        except OSError as error:
            raise OutputError(f"cannot write to '{self.final.parent}': {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.path.exists() and not (isinstance(error, KeyboardInterrupt) and self._worth_keeping()):
                _remove(self.path)
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _worth_keeping(self) -> bool:
        """Whether much is finished; then all else is removed, and the user is told."""
        if sum(partition.stat().st_size for partition in journal.finished_in(self.path)) < WORTH_KEEPING_BYTES:
            return False
        kept_bytes = journal.keep_finished(self.path)
        self._note(
            f"{format_bytes(kept_bytes)} of finished partitions are kept in '{self.path}': the same command goes on "
            "from there; remove that directory if you do not want to"
        )
        return True

    def _adopt(self) -> bool:
        """Take over what a killed run has finished."""
        for remains in self.final.parent.glob(f".{_escape(self.final.name)}.partial-*"):
            try:
                fd = os.open(remains, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue  # not a directory of ours, or gone
            if os.fstat(fd).st_uid == os.getuid() and _try_lock(fd) and any(journal.finished_in(remains)):
                with contextlib.suppress(FileNotFoundError):  # another run was quicker
                    os.rename(remains, self.path)
                    self._lock = fd
                    return True
            os.close(fd)
        return False

    def _sweep(self) -> None:
        """Remove what killed runs for the same name have left."""
        for kind in ("partial", users.MOVED_ASIDE):
            for remains in self._left(kind):
                _remove(remains)

    def _restore(self) -> None:
        """Give a dataset its name again that a killed run has moved aside and not replaced."""
        for remains in self._left(users.MOVED_ASIDE):
            if os.path.lexists(self.final):
                return
            try:
                os.rename(remains, self.final)
            except OSError as error:
                raise OutputError(f"cannot rename '{remains}' to '{self.final}': {error.strerror}") from error

    def _left(self, kind: str) -> Iterator[Path]:
        """What killed runs for the same name have left; locked while it is looked at."""
        for remains in self.final.parent.glob(f".{_escape(self.final.name)}.{kind}-*"):
            try:
                fd = os.open(remains, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue  # not a directory of ours, or gone
            try:
                if os.fstat(fd).st_uid == os.getuid() and _try_lock(fd):
                    yield remains
            finally:
                os.close(fd)

    def publish(self) -> None:
        """Give the complete directory its real name; a dataset that is replaced is removed afterwards.

        OutputError if somebody began to use it meanwhile: then it stays, and the new one is kept under another name.
        """
        try:
            journal.remove_notes(self.path)
            with contextlib.suppress(OSError):  # a file system without modes: then mounts cannot register
                users.make_directory(self._lock)
            sync(self.path)
            if os.path.lexists(self.final):
                self._check_old()
                if found := self._replace():
                    raise self._in_use(found, f"unmount it, then replace it with the new dataset, '{self._keep()}'")
            else:
                os.rename(self.path, self.final)
            sync(self.final.parent)
        except OSError as error:
            raise OutputError(f"cannot give the dataset its name '{self.final}': {error.strerror}") from error

    def _replace(self) -> list[DatasetUser]:
        """Put the new dataset in the place of the old one, which gets the temporary name; nothing if it has users."""
        aside = self.final.with_name(f".{self.final.name}.{users.MOVED_ASIDE}-{self._tag}")
        old = os.open(self.final, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _try_lock(old)  # nobody takes it for what a killed run left
            found = users.close(self.final)
            if found:
                return found
            try:
                os.rename(self.final, aside)
                found = users.close(aside)  # again: who found no directory to register in may have made one
                if not found:
                    os.rename(self.path, self.final)
            finally:
                if os.path.lexists(self.path):  # the new one has not got its place: all as it was
                    with contextlib.suppress(OSError):
                        users.make_directory(old)
                    if os.path.lexists(aside):
                        os.rename(aside, self.final)
            if not found:
                os.rename(aside, self.path)
            return found
        finally:
            os.close(old)

    def _keep(self) -> Path:
        """Give the new dataset another name, since the one that it was made for is not free."""
        name = f"{self.final.name}.new"
        kept = self.final.with_name(name if not os.path.lexists(self.final.with_name(name)) else f"{name}-{self._tag}")
        os.rename(self.path, kept)
        return kept


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


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
