"""Who reads a prepared dataset now: ``PREPARED/.users/``, a small file for each job (docs/format.md, *.users*).

Owns that directory: what a mount leaves in it, and what fanstore-prep concludes from it before it replaces a dataset.
Every call blocks, and may be made from any thread.

There are no locks, since shared file systems need not have any that work. A registration is touched once a minute, and
counts while it is fresh, compared with a file that whoever asks has touched a moment ago in the same directory: clocks
of different machines do not matter where the file server sets the times. Replacing is safe in whatever order two sides
interleave:

- Who mounts registers in the directory, and then looks whether the path still leads to it. If not, it begins again.
- Who replaces closes the directory for registrations (``close``), moves the dataset aside, and closes it once more, in
  case somebody has made the directory again. A registration that was there before is found; one that comes later fails,
  or finds that the path leads elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import pwd
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from fanstore.format.manifest import MANIFEST_FILE
from fanstore.processes import is_alive, start_ticks
from fanstore.units import format_path

USERS_DIRECTORY = ".users"
#: Beside ``NAME``, ``.NAME.replaced-XXXXXXXX`` is the dataset of that name while another one takes its place.
MOVED_ASIDE = "replaced"
#: Seconds between two touches of a registration.
HEARTBEAT_S = 60.0
#: Seconds after which a registration that nobody has touched is that of a dead job.
STALE_S = 600.0
_SUFFIX = ".json"
#: A registration is some 300 bytes. Anybody may write into the directory, so what is longer is not read to its end.
_MAX_BYTES = 4096
_SHOWN_MAX = 200
#: Seconds to wait for a dataset that is moved aside at this moment, and how often.
_AGAIN_S = 0.05
_ATTEMPTS = 40

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class DatasetUser:
    """A job that reads a dataset.

    Attributes:
        file: name of its registration. user, host, mountpoint, since: for people; ``since`` is in UTC.
    """

    file: str
    user: str
    host: str
    mountpoint: str
    since: str

    def __str__(self) -> str:
        return f"{self.user} on {self.host} has it mounted on {self.mountpoint} since {self.since}"


@dataclass(frozen=True)
class _Note:
    """The content of a registration. ``machine``, ``pid`` and ``start_ticks`` name a process for ever."""

    host: str
    mountpoint: str
    since: str
    ranks: int  #: daemons of the job
    machine: str
    pid: int
    start_ticks: int


class Registration:
    """One job's registration. Any daemon of the job can keep it, by its name.

    Attributes:
        name: the same on all daemons of the job; of no meaning.
    """

    def __init__(self, prepared: Path, mountpoint: Path, host: str, ranks: int, name: str = "") -> None:
        self.name = name or f"{host[:100]}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        self._prepared = prepared
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        note = _Note(host, str(mountpoint), since, ranks, _machine(), os.getpid(), start_ticks(os.getpid()))
        self._text = json.dumps(asdict(note)).encode()

    def register(self) -> None:
        """Make it, and forget dead jobs. Raises OSError: FileNotFoundError if there is no dataset, others if nothing
        can be written there.
        """
        for _ in range(_ATTEMPTS):
            try:
                fd = os.open(self._prepared, _DIRECTORY)
            except FileNotFoundError:
                if wait_while_replaced(self._prepared) or not self._prepared.exists():
                    raise
                continue
            try:
                if self._register_in(fd):
                    return
            finally:
                os.close(fd)
        raise OSError(errno.EBUSY, "it is being replaced again and again")

    def _register_in(self, prepared_fd: int) -> bool:
        """Register in this directory; False if it is no longer, or perhaps not, the one to which the path leads."""
        try:
            fd = self._open_users(prepared_fd)
        except OSError:
            if self._leads_to(prepared_fd):
                raise
            return False
        try:
            self._write(fd)
            if self._leads_to(prepared_fd):
                _forget_dead(fd)
                return True
            os.unlink(self.name, dir_fd=fd)
            return False
        except FileNotFoundError:
            return False  # it was closed a moment ago
        finally:
            os.close(fd)

    def _open_users(self, prepared_fd: int) -> int:
        """A descriptor of the directory with the registrations, which datasets of an earlier version do not have."""
        try:
            return os.open(USERS_DIRECTORY, _DIRECTORY | os.O_NOFOLLOW, dir_fd=prepared_fd)
        except FileNotFoundError:
            os.stat(MANIFEST_FILE, dir_fd=prepared_fd)  # nothing is made in what is no dataset
            time.sleep(_AGAIN_S)
            if not self._leads_to(prepared_fd):
                raise  # it was closed, and has been moved aside by now
            with contextlib.suppress(FileExistsError):
                make_directory(prepared_fd)
            return os.open(USERS_DIRECTORY, _DIRECTORY | os.O_NOFOLLOW, dir_fd=prepared_fd)

    def _leads_to(self, prepared_fd: int) -> bool:
        try:
            return os.path.samestat(os.stat(self._prepared), os.fstat(prepared_fd))
        except FileNotFoundError:
            return False

    def touch(self) -> None:
        """Show that the job lives; what somebody has removed is made again. Raises OSError."""
        try:
            os.utime(self._prepared / USERS_DIRECTORY / self.name, follow_symlinks=False)
        except FileNotFoundError:
            self.register()

    def remove(self) -> None:
        """The job reads no longer. Raises OSError."""
        (self._prepared / USERS_DIRECTORY / self.name).unlink(missing_ok=True)

    def _write(self, users_fd: int) -> None:
        fd = os.open(self.name, _NEW, 0o644, dir_fd=users_fd)
        try:
            os.write(fd, self._text)
        except OSError:
            os.unlink(self.name, dir_fd=users_fd)
            raise
        finally:
            os.close(fd)


def make_directory(prepared_fd: int) -> None:
    """Let mounts register, those of other users as well. Raises OSError."""
    os.mkdir(USERS_DIRECTORY, 0o700, dir_fd=prepared_fd)
    fd = os.open(USERS_DIRECTORY, _DIRECTORY | os.O_NOFOLLOW, dir_fd=prepared_fd)
    try:
        os.fchmod(fd, 0o1777)  # not by mkdir, which subtracts the umask
    finally:
        os.close(fd)


def wait_while_replaced(prepared: Path) -> list[Path]:
    """Wait, not long, for a dataset that fanstore-prep moves aside at this moment to have its name again.

    Returns where datasets of that name are that were moved aside and never came back.
    """
    moved: list[Path] = []
    for _ in range(_ATTEMPTS):
        if prepared.exists():
            return []
        moved = sorted(prepared.parent.glob(f".{glob.escape(prepared.name)}.{MOVED_ASIDE}-*"))
        if not moved:
            break
        time.sleep(_AGAIN_S)
    return moved


def users_of(prepared: Path) -> list[DatasetUser]:
    """The jobs that read a dataset now. Raises OSError."""
    with _opened(prepared) as fd:
        return [] if fd < 0 else _sort_out(fd)[0]


def _forget_dead(users_fd: int) -> None:
    """Remove what killed jobs have left, as far as we may; nothing depends on it."""
    for name in _sort_out(users_fd)[1]:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=users_fd)


def close(prepared: Path) -> list[DatasetUser]:
    """Let nobody register any more, and forget dead jobs; if there are living ones, they are returned and all stays.

    The directory is removed, which succeeds only if it is empty: the file system decides who was first. Raises OSError.
    """
    for _ in range(_ATTEMPTS):
        with _opened(prepared) as fd:
            if fd < 0:
                return []
            users, rest = _sort_out(fd)
            if users:
                return users
            for name in rest:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
        try:
            os.rmdir(prepared / USERS_DIRECTORY)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return []
    raise OSError(errno.EBUSY, f"{USERS_DIRECTORY} in it cannot be emptied")


@contextlib.contextmanager
def _opened(prepared: Path) -> Iterator[int]:
    """A descriptor of the directory with the registrations; -1 if there is none."""
    try:
        fd = os.open(prepared / USERS_DIRECTORY, _DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield -1
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _sort_out(fd: int) -> tuple[list[DatasetUser], list[str]]:
    """The users, and the names of what is not the registration of a living job."""
    now_ns = _now_ns(fd)
    users, rest = [], []
    for name in sorted(os.listdir(fd)):
        try:
            user = _look_at(fd, name, now_ns)
        except FileNotFoundError:
            continue  # removed meanwhile
        if user is None:
            rest.append(name)
        else:
            users.append(user)
    return users, rest


def _now_ns(fd: int) -> int:
    """The time as this file system sees it; that of this machine where nothing can be written."""
    name = f"now-{secrets.token_hex(8)}"
    try:
        own = os.open(name, _NEW, 0o600, dir_fd=fd)
    except OSError:
        return time.time_ns()
    try:
        os.utime(own)
        return os.fstat(own).st_mtime_ns
    finally:
        os.close(own)
        with contextlib.suppress(FileNotFoundError):  # somebody has taken it for what a killed job left
            os.unlink(name, dir_fd=fd)


def _look_at(fd: int, name: str, now_ns: int) -> DatasetUser | None:
    """The user that a file stands for; None if it is not the registration of a living job."""
    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode) or not name.endswith(_SUFFIX):
        return None
    if now_ns - status.st_mtime_ns > STALE_S * 1e9:
        return None
    note = _read(fd, name)
    if note is not None and note.ranks == 1 and note.machine == _machine() and not is_alive(note.pid, note.start_ticks):
        return None
    try:
        user = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        user = f"user {status.st_uid}"
    if note is None:  # just being written, or by another version
        return DatasetUser(name, user, "an unknown host", "an unknown place", "recently")
    return DatasetUser(name, user, _shown(note.host), _shown(note.mountpoint), _shown(note.since))


def _read(fd: int, name: str) -> _Note | None:
    """The content of a registration, which anybody may have written; None if it makes no sense."""
    try:
        own = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        try:
            content = json.loads(os.read(own, _MAX_BYTES))
        finally:
            os.close(own)
        note = _Note(**{field: content[field] for field in _Note.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    texts, numbers = (note.host, note.mountpoint, note.since, note.machine), (note.ranks, note.pid, note.start_ticks)
    sane = all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)
    return note if sane else None


def _machine() -> str:
    """The same for two processes exactly if each can see whether the other one lives."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _shown(text: str) -> str:
    return format_path(text.encode("utf-8", "backslashreplace"), _SHOWN_MAX)[1:-1]
