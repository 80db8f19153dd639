"""The directories of a job: the node's own disk (``--local``) and the shared file system (``--shared``).

Writes nothing but small files of its own to --local, which it removes. Calls may hang with a dead file server; each
check has a limit for that (finding.py). Any thread.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fanstore.dataset.capacity import survey
from fanstore.doctor.finding import Finding, note, ok, skipped, warning, wrong
from fanstore.errors import FanstoreError, UsageError
from fanstore.mounttable import mount_holding
from fanstore.paths import Role, Used, refuse_overlaps
from fanstore.units import format_bytes

if TYPE_CHECKING:
    from fanstore.format.storage import Storage

#: File systems of a network: what is there is not on this node.
_NETWORK = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "cifs", "smb3", "panfs", "wekafs", "pvfs2"),
    *("afs", "9p", "virtiofs", "glusterfs", "orangefs", "daos", "dvs"),
    *("fuse.sshfs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.gcsfuse", "fuse.dfuse"),
}
_MEMORY = {"tmpfs", "ramfs"}

#: Less room than this holds no dataset worth staging.
_LITTLE_BYTES = 1 << 30
#: Alignment that direct I/O of every disk accepts.
_BLOCK_BYTES = 4096


def file_system(path: Path) -> str:
    """The type of the file system a path is on, as the kernel names it."""
    mount = mount_holding(Path(os.path.realpath(path)))
    return "unknown" if mount is None else mount.kind


def check_local(local: Path | None) -> Iterator[Finding]:
    """Exists or can be made, takes files and locks, is on this node, has room, reads with direct I/O."""
    if local is None:
        yield skipped("local", "no directory on the node's own disk was named; check it with --local DIR")
        return
    if problem := misplaced(local):
        yield wrong("local", problem, _other_local())
        return
    if not os.path.exists(local):
        parent = local.absolute().parent
        if not os.path.isdir(parent):
            yield wrong("local", f"neither {local} nor {parent} exists", f"check the spelling, or {_other_local()}")
            return
        if not os.access(parent, os.W_OK | os.X_OK):
            yield wrong("local", f"{local} does not exist, and you may not make it in {parent}", _other_local())
            return
        yield note("local", f"{local} does not exist; fanstore-mount makes it and removes it (checked: {parent})")
        local = parent
    if not os.path.isdir(local):
        yield wrong("local", f"{local} is not a directory", _other_local())
        return
    try:
        with tempfile.NamedTemporaryFile(dir=local, prefix="fanstore-doctor-") as file:
            file.write(bytes(_BLOCK_BYTES))
            file.flush()
            yield ok("local", f"{local} can be written to")
            yield from _check_lock(local, file.fileno())
            direct = _direct_works(file.name)
    except OSError as error:
        yield wrong("local", f"{local} cannot be written to ({error.strerror})", _other_local())
        return
    kind = file_system(local)
    yield from _check_local_kind(local, kind)
    if direct:
        yield ok("local.direct", "direct I/O works (O_DIRECT): bytes are kept in memory once")
    elif kind not in _MEMORY:
        yield note("local.direct", f"{kind} has no O_DIRECT: what is read may be in memory twice for a while")
    yield from _check_room(local)


def misplaced(local: Path) -> str:
    """Why nothing must be written there; "" if something may."""
    try:
        refuse_overlaps([Used(Role.LOCAL, local)])
    except UsageError as error:
        return str(error)
    return ""


def _other_local() -> str:
    return "name a directory that is yours on the node's own disk, often $TMPDIR of the job or /local/$USER"


def _check_lock(local: Path, descriptor: int) -> Iterator[Finding]:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        yield wrong("local.lock", f"files in {local} cannot be locked ({error.strerror})", _other_local())


def _direct_works(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as memory:  # aligned, as direct I/O wants it
            return os.preadv(descriptor, [memory], 0) == _BLOCK_BYTES
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _check_local_kind(local: Path, kind: str) -> Iterator[Finding]:
    if kind in _NETWORK:
        yield warning(
            "local.type", f"{local} is on {kind}, a network file system: staging there gains nothing", _other_local()
        )
    elif kind in _MEMORY:
        yield warning(
            "local.type",
            f"{local} is on {kind}: what is staged there takes memory, which counts towards the job's limit",
            "use a disk if the node has one, otherwise bound it with --capacity SIZE",
        )
    else:
        yield ok("local.type", f"{local} is on {kind}")


def _check_room(local: Path) -> Iterator[Finding]:
    room = survey(local).free_bytes
    if room < _LITTLE_BYTES:
        yield warning(
            "local.space",
            f"{format_bytes(room)} may be used in {local}",
            "make room; partitions that do not fit are read from other nodes or from the shared file system",
        )
    else:
        yield ok("local.space", f"{format_bytes(room)} may be used in {local}")


class SharedChecks:
    """The checks of the shared path.

    Attributes:
        partitions: how many the dataset there has; 0 if it is none.
        index_bytes: memory that its index will take on each node.
    """

    def __init__(self, where: str | Path | None) -> None:
        self._where = where
        self.partitions = 0
        self.index_bytes = 0

    def check(self) -> Iterator[Finding]:
        """Can it be read, and is it a prepared dataset that is complete?"""
        if self._where is None:
            yield skipped("shared", "no shared path was named; check it with --shared PATH")
            return
        # Not at the top: what it needs may be missing, and that is said by another check.
        from fanstore.format.storage import storage_at

        storage = storage_at(self._where)
        if storage.directory is None:
            yield from self._check_dataset(storage)
            return
        path = Path(self._where)
        try:
            names = os.listdir(path)
        except NotADirectoryError:
            yield wrong("shared", f"{path} is not a directory", "name a prepared dataset or a directory")
            return
        except OSError as error:
            yield wrong(
                "shared", f"{path} cannot be read ({error.strerror})", "check the path and its rights with ls -ld"
            )
            return
        kind = file_system(path)
        where = "a network file system" if kind in _NETWORK else "no network file system that is known"
        yield ok("shared", f"{path} can be read; it is on {kind}, {where}")
        if "manifest.json" in names:
            yield from self._check_dataset(storage)
        else:
            yield note("shared.dataset", f"{path} is not a prepared dataset", f"make one: fanstore-prep {path} OUT.fan")

    def _check_dataset(self, storage: Storage) -> Iterator[Finding]:
        from fanstore.format.prepared import PreparedDataset

        try:
            prepared = PreparedDataset.open(storage)
        except (FanstoreError, OSError) as error:
            yield wrong("shared.dataset", str(error), "copy the dataset again, or prepare it again")
            return
        parts = prepared.manifest.partitions
        self.partitions, self.index_bytes = len(parts), prepared.index.nbytes
        try:
            prepared.check_partitions()
        except FanstoreError as error:
            yield wrong("shared.dataset", str(error), f"fanstore-verify {storage} says all that is damaged")
            return
        totals = prepared.manifest.totals
        found = f"a prepared dataset: {totals.files:,} files, {format_bytes(totals.bytes)}, {len(parts):,} partitions"
        yield ok("shared.dataset", found)
