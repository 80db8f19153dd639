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

from fanstore.core.capacity import survey
from fanstore.doctor.finding import Finding, note, ok, skipped, warning, wrong
from fanstore.errors import FanstoreError
from fanstore.fuse.mounttable import mount_holding
from fanstore.units import format_bytes

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
    """Exists or can be made, takes files and locks, is on this node, has room, reads round the page cache."""
    if local is None:
        yield skipped("local", "no directory on the node's own disk was named; check it with --local DIR")
        return
    if not local.exists():
        parent = next(parent for parent in local.absolute().parents if parent.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            yield wrong("local", f"{local} does not exist, and you may not make it in {parent}", _other_local())
            return
        yield note("local", f"{local} does not exist; fanstore-mount makes it and removes it (checked: {parent})")
        local = parent
    if not local.is_dir():
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
        yield ok("local.direct", "reads can go round the page cache (O_DIRECT): bytes are kept in memory once")
    elif kind not in _MEMORY:
        yield note("local.direct", f"{kind} has no O_DIRECT: what is read may be in memory twice for a while")
    yield from _check_room(local)


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

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.partitions = 0
        self.index_bytes = 0

    def check(self) -> Iterator[Finding]:
        """Can it be read, and is it a prepared dataset that is complete?"""
        path = self._path
        if path is None:
            yield skipped("shared", "no shared path was named; check it with --shared PATH")
            return
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
            yield from self._check_dataset(path)
        else:
            yield note("shared.dataset", f"{path} is not a prepared dataset", f"make one: fanstore-prep {path} OUT.fan")

    def _check_dataset(self, path: Path) -> Iterator[Finding]:
        from fanstore.format.prepared import PreparedDataset

        try:
            prepared = PreparedDataset.open(path)
        except (FanstoreError, OSError) as error:
            yield wrong("shared.dataset", str(error), "copy the dataset again, or prepare it again")
            return
        parts = prepared.manifest.partitions
        self.partitions, self.index_bytes = len(parts), prepared.index.nbytes
        for number, part in enumerate(parts):
            file = prepared.partition_path(number)
            try:
                size = file.stat().st_size
                os.close(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                fix = "copy the dataset again, or prepare it again"
                yield wrong("shared.dataset", f"partition {file} cannot be read ({error.strerror})", fix)
                return
            if size != part.bytes:
                fix = f"fanstore-verify {path} says what is damaged; copy the dataset again"
                yield wrong("shared.dataset", f"partition {file} has {size:,} bytes instead of {part.bytes:,}", fix)
                return
        totals = prepared.manifest.totals
        found = f"a prepared dataset: {totals.files:,} files, {format_bytes(totals.bytes)}, {len(parts):,} partitions"
        yield ok("shared.dataset", found)
