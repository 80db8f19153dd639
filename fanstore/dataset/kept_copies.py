"""Copies of partitions that stay on a node's disk for later jobs of the same user (``--keep-local``).

Owns ``BASE/fanstore-kept-<uid>`` (docs/format.md, Kept copies): how a copy is found again, handed out and added, and
which one goes first when room is needed. Does not copy (staging.py, restoring.py) and does not decide what a node is to
have (placement.py). Used by these, by the session of a mount, by fanstore-clean and fanstore-doctor. Any thread; all
calls may block for the disk.

A copy is known by its content, the bytes and the checksum that the manifest has for its partition, never by a path. So
a dataset that was prepared anew finds none of its old copies, and what two versions have in common is shared.

There is no list of users and no lock around them: a job that uses a copy has a hard link to it in its own directory
(job/job_directory.py), and reads that. A copy with one link is used by nobody and may go; if a job takes it at that
very moment, only the name here goes, and the job reads on. A job adds a copy by a link as well, once it is complete and
checked, so whatever dies leaves nothing incomplete here; its own links go with its directory.

BASE may be world-writable: the directory must be ours and closed to others, and no symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fanstore.dataset.capacity import spare_bytes
from fanstore.errors import MountError
from fanstore.format.checksum import to_hex, xxh3_64
from fanstore.format.manifest import PartitionInfo
from fanstore.units import format_bytes, format_count

if TYPE_CHECKING:
    from fanstore.format.prepared import PreparedDataset  # needs numpy, and fanstore-doctor does not

log = logging.getLogger(__name__)

#: Checksum, bytes, and the time of the last change, in nanoseconds: a file that was written to later is not used.
_COPY = re.compile(r"([0-9a-f]{16})-(\d{1,19})-(\d{1,20})\.tar")
_RECORD = re.compile(r"[0-9a-f]{16}\.json")
_COPYING = ".copying"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Seconds after which what belongs to no copy is removed; a job that has just begun has a record before it has copies.
_STALE_S = 24 * 3600.0
#: Seconds without a sign of life after which whoever copies a partition is not waited for: it is stopped (a job that
#: the batch system has suspended), or its file server does not answer.
_SILENT_S = 10.0
#: A removal can win the race for a directory or a lock once or twice; more often than this, something else is wrong.
_ATTEMPTS = 20


class Identity(NamedTuple):
    """What a partition is known by, wherever it is."""

    checksum: int
    bytes: int

    @classmethod
    def of(cls, info: PartitionInfo) -> Identity:
        return cls(info.checksum, info.bytes)

    def __str__(self) -> str:
        return f"{to_hex(self.checksum)}-{self.bytes}"


@dataclass(frozen=True)
class KeptCopy:
    """One file, as it was when it was looked at; ``used_s``: when a job last took it."""

    name: str
    identity: Identity
    changed_ns: int
    used_s: float
    in_use: bool


@dataclass(frozen=True)
class Copying:
    """The copying of one partition. ``alone``: this job may do it now. ``_fd``: what it has locked, or -1."""

    alone: bool
    _fd: int

    def go_on(self) -> None:
        """A sign of life, for those who wait; to be given more often than every few seconds."""
        if self._fd >= 0:
            os.utime(self._fd)


@dataclass(frozen=True)
class KeptDataset:
    """A dataset of which a job has kept copies, for people.

    Attributes:
        dataset: where it was; created: when it was prepared. identities: of all its partitions.
        used_s: when a job last began to use it.
    """

    dataset: str
    created: str
    identities: frozenset[Identity]
    used_s: float


@dataclass(frozen=True)
class Holding:
    """The copies of one dataset; ``dataset`` is None for those of which nothing is known any more."""

    dataset: KeptDataset | None
    copies: tuple[KeptCopy, ...]

    @property
    def used_s(self) -> float:
        """When a job last began to use them."""
        return max(copy.used_s for copy in self.copies) if self.dataset is None else self.dataset.used_s


class KeptCopies:
    """The directory, from construction to ``close``.

    Attributes:
        path: where it is.
        _fd: its descriptor, with a shared lock: as long as anybody has one, the directory itself stays.
    """

    def __init__(self, base: Path, *, make: bool) -> None:
        """MountError if it cannot be used, FileNotFoundError if it is not there and is not to be made."""
        self.path = base / f"fanstore-kept-{os.geteuid()}"
        self._fd = -1
        try:
            for _ in range(_ATTEMPTS):
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(self.path, 0o700)
                try:
                    self._fd = os.open(self.path, _DIRECTORY_FLAGS)
                except FileNotFoundError:
                    if not make:
                        raise
                    continue
                self._check_private()
                fcntl.flock(self._fd, fcntl.LOCK_SH)
                if self._is_named():
                    return
                self.close()
        except FileNotFoundError:
            raise
        except OSError as error:
            self.close()
            raise MountError(f"cannot use {self.path}: {error.strerror}; name another --local") from error
        raise MountError(f"cannot use {self.path}: it disappears each time, within moments")

    def _check_private(self) -> None:
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            self.close()
            raise MountError(
                f"{self.path} is not yours alone, so nothing in it is used; remove it or name another --local"
            )

    def _is_named(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def check_links(self, directory: Path) -> None:
        """MountError if files of a job's directory cannot be linked to from here."""
        name = f"probe-{secrets.token_hex(4)}"
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
            os.close(fd)
            try:
                os.link(name, directory / name, src_dir_fd=self._fd, follow_symlinks=False)
                os.unlink(directory / name)
            finally:
                os.unlink(name, dir_fd=self._fd)
        except OSError as error:
            raise MountError(
                f"--keep-local needs hard links, and in {self.path.parent} none can be made ({error.strerror}): name a "
                "--local on a local disk, or leave out --keep-local"
            ) from error

    # --- looking ---

    def copies(self) -> list[KeptCopy]:
        """All copies that are good as far as can be seen without reading them; others are removed."""
        return [copy for name in self._names() if _COPY.fullmatch(name) and (copy := self._look(name)) is not None]

    def _names(self) -> list[str]:
        # Not of _fd itself, or its duplicate: threads that list at once would move each other's place in the directory.
        fd = os.open(".", _DIRECTORY_FLAGS, dir_fd=self._fd)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def _look(self, name: str) -> KeptCopy | None:
        """The copy of that name, if size and time are right; else it is removed."""
        match = _COPY.fullmatch(name)
        assert match is not None
        identity, changed_ns = Identity(int(match[1], 16), int(match[2])), int(match[3])
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        is_right = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if is_right and (status.st_size, status.st_mtime_ns) == (identity.bytes, changed_ns):
            return KeptCopy(name, identity, changed_ns, status.st_atime, status.st_nlink > 1)
        log.info("removed %s: it was changed since it was kept", self.path / name)
        self._unlink(name)
        return None

    def find(self, infos: Sequence[PartitionInfo]) -> dict[int, KeptCopy]:
        """The copies that there are of these partitions, by their place in the sequence."""
        wanted = {str(Identity.of(info)) for info in infos}
        names = {name.rpartition("-")[0]: name for name in self._names() if _COPY.fullmatch(name)}
        found = {key: copy for key in wanted & names.keys() if (copy := self._look(names[key])) is not None}
        return {number: found[key] for number, info in enumerate(infos) if (key := str(Identity.of(info))) in found}

    def room(self, held: Iterable[KeptCopy]) -> int:
        """Bytes of the copies that may go, because nobody uses them, and of ``held``, used or not."""
        idle = {copy.identity for copy in self.copies() if not copy.in_use}
        return sum(identity.bytes for identity in idle | {copy.identity for copy in held})

    # --- taking and giving ---

    def take(self, copy: KeptCopy, target: Path) -> bool:
        """Make ``target``, in the directory of a job, a link to a copy; False if it has just gone. Raises OSError."""
        try:
            os.link(copy.name, target, src_dir_fd=self._fd, follow_symlinks=False)
            # Kept by hand, since many disks are mounted without times of access; and it says when a job began.
            os.utime(copy.name, ns=(time.time_ns(), copy.changed_ns), dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return target.exists()
        return True

    def add(self, info: PartitionInfo, path: Path) -> None:
        """Keep a file of the directory of a job, which is complete and was checked. A WARNING if that cannot be."""
        try:
            os.chmod(path, 0o400)
            name = f"{Identity.of(info)}-{os.stat(path).st_mtime_ns}.tar"
            if not self.find([info]):
                os.link(path, name, dst_dir_fd=self._fd, follow_symlinks=False)
        except OSError as error:
            log.warning("%s does not stay in %s for the next job: %s", path.name, self.path, error.strerror)

    @contextlib.contextmanager
    def copying(self, info: PartitionInfo) -> Iterator[Copying]:
        """Whether this job may copy this partition, from now to the end of the block: no other one does here."""
        name = f"{Identity.of(info)}{_COPYING}"
        try:
            fd = self._lock_nowait(name)
            alone = fd >= 0 or self._is_silent(name)
        except OSError as error:  # a full disk, most likely: then nobody else can copy it either
            log.debug("no lock %s: %s", name, error.strerror)
            fd, alone = -1, True
        try:
            yield Copying(alone, fd)
        finally:
            if fd >= 0:
                try:
                    self._unlink(name)
                except OSError as error:
                    log.debug("%s stays: %s", name, error.strerror)  # once it is not locked, it means nothing
                os.close(fd)

    def _is_silent(self, name: str) -> bool:
        try:
            return os.stat(name, dir_fd=self._fd).st_mtime < time.time() - _SILENT_S
        except FileNotFoundError:
            return False  # it has just finished

    def _lock_nowait(self, name: str) -> int:
        """A descriptor of the file, locked; -1 if somebody has locked it."""
        for _ in range(_ATTEMPTS):
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                named = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if os.path.samestat(named, os.fstat(fd)):
                    os.utime(fd)
                    return fd
            except BlockingIOError:
                os.close(fd)
                return -1
            except FileNotFoundError:
                pass  # whoever had it has just finished
            os.close(fd)
        return -1

    # --- removing ---

    def discard(self, info: PartitionInfo) -> None:
        """Forget the copy of a partition, whose bytes are not right; whoever uses it keeps it. Raises OSError."""
        for name in self._names():
            if _COPY.fullmatch(name) and name.startswith(f"{Identity.of(info)}-"):
                self._unlink(name)

    def make_room(self, excess_bytes: int) -> bool:
        """Remove copies that nobody uses, those first that were not used for longest, until so many bytes are free.

        Whether any was removed. Raises OSError.
        """
        idle = sorted((copy for copy in self.copies() if not copy.in_use), key=lambda copy: (copy.used_s, copy.name))
        removed = []
        for copy in idle:
            if excess_bytes <= 0:
                break
            removed.append(copy)
            self._unlink(copy.name)
            excess_bytes -= copy.identity.bytes
        if removed:
            log.info(
                "%s (%s) in %s made room: no job had used them for longest",
                format_count(len(removed), "kept copy", "kept copies"),
                format_bytes(sum(copy.identity.bytes for copy in removed)),
                self.path,
            )
        self._tidy()
        return bool(removed)

    def remove(self, copies: Iterable[KeptCopy]) -> list[KeptCopy]:
        """Remove these, but for those that are in use now; returns the removed ones."""
        removed = []
        for copy in copies:
            now = self._look(copy.name)
            if now is not None and not now.in_use:
                self._unlink(copy.name)
                removed.append(copy)
        self._tidy(stale_s=0)
        return removed

    def remove_directory(self) -> bool:
        """Remove the directory itself, if nothing is in it and no job has it; it is closed then. Raises OSError."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rmdir(self.path)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        self.close()
        return True

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def _tidy(self, stale_s: float = _STALE_S) -> None:
        """Remove what belongs to no copy: records of datasets that have none, what jobs left that were killed."""
        identities = {copy.identity for copy in self.copies()}
        needed = {name for name, record in self._records() if not record.identities.isdisjoint(identities)}
        for name in self._names():
            if name in needed or _COPY.fullmatch(name):
                continue
            with contextlib.suppress(FileNotFoundError):
                if os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime > time.time() - stale_s:
                    continue
            fd = self._lock_nowait(name) if name.endswith(_COPYING) else -1
            if fd >= 0 or not name.endswith(_COPYING):
                self._unlink(name)
            if fd >= 0:
                os.close(fd)

    # --- whose they are, for people ---

    def record(self, prepared: PreparedDataset) -> None:
        """Note that a job uses this dataset now. A WARNING if that cannot be."""
        manifest = prepared.manifest
        content = {
            "dataset": str(prepared.storage),
            "created": manifest.created,
            "index": to_hex(manifest.index_checksum),
            "partitions": sorted({str(Identity.of(info)) for info in manifest.partitions}),
        }
        name = to_hex(xxh3_64(os.fsencode(f"{content['dataset']}\0{content['index']}")))
        temporary = f"{name}-{secrets.token_hex(4)}.new"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
            with open(fd, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.rename(temporary, f"{name}.json", src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError as error:
            log.warning("fanstore-clean will not know %s by its name: %s", content["dataset"], error.strerror)
            self._unlink(temporary)

    def holdings(self) -> list[Holding]:
        """All copies, by dataset, the last used first; one that several datasets have is in each of them."""
        copies = self.copies()
        records = sorted((record for _, record in self._records()), key=lambda record: -record.used_s)
        found = [Holding(record, tuple(c for c in copies if c.identity in record.identities)) for record in records]
        known = {copy for holding in found for copy in holding.copies}
        found.append(Holding(None, tuple(copy for copy in copies if copy not in known)))
        return [holding for holding in found if holding.copies]

    def _records(self) -> Iterator[tuple[str, KeptDataset]]:
        for name in self._names():
            if not _RECORD.fullmatch(name):
                continue
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
                with open(fd, encoding="utf-8") as file:
                    used_s = os.fstat(fd).st_mtime
                    yield name, _dataset(json.load(file), used_s)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.debug("%s is not read: %s", self.path / name, error)


def _dataset(content: Mapping[str, object], used_s: float) -> KeptDataset:
    """Raises ValueError, KeyError, TypeError or AttributeError if it is not what ``record`` writes."""
    partitions = content["partitions"]
    if not isinstance(partitions, list):
        raise ValueError("no list of partitions")
    pairs = [text.split("-") for text in partitions]
    identities = frozenset(Identity(int(checksum, 16), int(size)) for checksum, size in pairs)
    return KeptDataset(str(content["dataset"]), str(content["created"]), identities, used_s)


@dataclass(frozen=True)
class Keeping:
    """What one node of a job does with kept copies.

    Attributes:
        keeps: it uses them and adds to them (``--keep-local``); otherwise they only make room for its own.
        capacity_bytes: how much of its disk each rank may use; None for no limit. outputs: programs write there, too.
        disk_ranks, directory_ranks: ranks with the same disk, and of these with the same directory; usually 1.
    """

    copies: KeptCopies
    keeps: bool
    capacity_bytes: int | None = None
    outputs: bool = False
    disk_ranks: int = 1
    directory_ranks: int = 1

    def make_room(self, needed_bytes: int) -> None:
        """Before a rank copies so many bytes: other ranks may be about to copy as many. Raises OSError."""
        kept = self.copies.copies()
        idle_bytes = sum(copy.identity.bytes for copy in kept if not copy.in_use)
        excess = needed_bytes * self.disk_ranks - spare_bytes(self.copies.path, idle_bytes, outputs=self.outputs)
        if self.keeps and self.capacity_bytes is not None:
            all_bytes = sum(copy.identity.bytes for copy in kept) + needed_bytes * self.directory_ranks
            excess = max(excess, all_bytes - self.capacity_bytes * self.directory_ranks)
        self.copies.make_room(excess)
