"""What a node needs before it can mount: paths that are in nobody's way, a mount point, a directory on its disk.

Owns the order in which these are looked at and taken; what is undone at the end goes to the caller's stack. Used by
session.py, on every node. Nothing is made before the paths are known to be safe (fanstore/paths.py). Trio thread, but
for ``claim_node``; what may block runs in a worker thread, left behind if a file system does not answer.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from fanstore.dataset.capacity import Disk, survey
from fanstore.dataset.kept_copies import KeptCopies
from fanstore.errors import MountError
from fanstore.format.prepared import PreparedDataset
from fanstore.fuse.command import check_command
from fanstore.fuse.deadmount import take_over
from fanstore.fuse.mountpoint import MountPoint, check_fuse
from fanstore.fuse.mountrecord import record_mount
from fanstore.fuse.reporting import Reporting
from fanstore.fuse.settings import MountSettings
from fanstore.fuse.startwatch import StartWatch
from fanstore.fuse.success import STANDARD_OUTPUT
from fanstore.fuse.supervised import Supervised
from fanstore.fuse.unmounted import UnmountedPoint, record_unmounted
from fanstore.job.job_directory import JobDirectory
from fanstore.paths import Role, Used, refuse_overlaps
from fanstore.transport.ranks import launched_rank

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """What this node has for the job: a mount point, a directory on its disk; or a problem.

    Without ``--local`` and outputs there is only the control socket in the directory, and it works without one, too.
    """

    point: MountPoint | None = None
    directory: JobDirectory | None = None
    disk: Disk | None = None  #: where partitions are to be staged
    kept: KeptCopies | None = None  #: what earlier jobs have kept there
    problem: str | None = None
    code: int = 1  #: exit code of the job for this problem


def claim_node(
    settings: MountSettings,
    reporting: Reporting,
    supervised: Supervised,
    cleanup: contextlib.ExitStack,
    remove: Callable[[JobDirectory], None],
) -> Claim:
    """In a thread: claim the mount point, make the directory of the job. Raises FanstoreError."""
    if settings.command:
        check_command(settings.command)
    if not settings.no_fuse:
        check_fuse()
    point = UnmountedPoint(settings.mountpoint) if settings.no_fuse else MountPoint(settings.mountpoint)
    reporting.check(launched_rank(), _proofs(settings))
    point.claim()
    cleanup.callback(point.remove)
    supervised.tell(mount=str(point.path), created=point.created)
    try:
        base = settings.local or _temporary()
        JobDirectory.sweep(base, take_over)
        directory = JobDirectory(base)
    except (MountError, OSError) as error:
        if settings.local is not None or settings.writing is not None or settings.no_fuse:
            raise
        log.info("there is no control socket, and fanstore-stat and fanstore-umount do without it: %s", error)
        return Claim(point)
    cleanup.callback(remove, directory)
    supervised.tell(directory=str(directory.path), made_base=directory.made_base)
    if settings.no_fuse:
        record_unmounted(directory.path, point, cleanup)
    else:
        record_mount(directory.path, point.path, point.created)
    if settings.local is None:
        return Claim(point, directory)
    try:
        disk = survey(directory.path, settings.capacity_bytes, outputs=settings.writing is not None)
    except OSError as error:
        raise MountError(f"cannot use {settings.local}: {error.strerror}") from error
    kept = _open_kept(settings, settings.local, directory)
    if kept is not None:
        cleanup.callback(kept.close)
    return Claim(point, directory, disk, kept)


def _open_kept(settings: MountSettings, base: Path, directory: JobDirectory) -> KeptCopies | None:
    """The copies that earlier jobs have kept. Without ``--keep-local`` they only make room, if there are any."""
    try:
        kept = KeptCopies(base, make=settings.keep_local)
        if settings.keep_local:
            kept.check_links(directory.path)
        return kept
    except FileNotFoundError:
        return None
    except MountError as error:
        if settings.keep_local:
            raise
        log.info("kept copies make no room: %s", error)
        return None


async def check_paths(settings: MountSettings, watch: StartWatch) -> None:
    """UsageError if one path of the command line is in the way of another, MountError if they do not answer."""
    if settings.problem is not None:
        raise settings.problem
    await _check(settings, watch, None)


async def check_shards(settings: MountSettings, watch: StartWatch, prepared: PreparedDataset) -> None:
    """The same with the tar files of ``--index-only``, of which only the manifest knows."""
    if any(part.external for part in prepared.manifest.partitions):
        await _check(settings, watch, prepared)


async def _check(settings: MountSettings, watch: StartWatch, prepared: PreparedDataset | None) -> None:
    def look() -> None:
        refuse_overlaps([*_named(settings), *([] if prepared is None else _shards(settings, prepared))])

    with trio.move_on_after(watch.limit_s) as scope:
        await trio.to_thread.run_sync(look, abandon_on_cancel=True)
    watch.give_up(scope, f"looking at {settings.prepared} and the other paths")


def _temporary() -> Path:
    """Where the directory of the job is made if there is no ``--local``."""
    return Path(tempfile.gettempdir())


def _proofs(settings: MountSettings) -> list[Path]:
    """The files of ``--success``."""
    return [path for path in settings.success if path != STANDARD_OUTPUT]


def _named(settings: MountSettings) -> list[Used]:
    """All paths of the command line, to be compared with each other."""
    writing, publishing = settings.writing, settings.publishing
    paths = [
        (Role.PREPARED, settings.prepared.directory),
        (Role.MOUNTPOINT, settings.mountpoint),
        (Role.LOCAL, settings.local),
        (Role.TEMPORARY, None if writing is None or settings.local is not None else _temporary()),
        (Role.OUTPUT, None if writing is None else writing.output),
        (Role.REPORT, publishing.report),
        (Role.METRICS, publishing.metrics),
        *((Role.SUCCESS, path) for path in _proofs(settings)),
        (Role.LOG, settings.log_file),
    ]
    return [Used(role, path) for role, path in paths if path is not None]


def _shards(settings: MountSettings, prepared: PreparedDataset) -> list[Used]:
    """The directories with the tar files of ``--index-only``; and those that may be files which we are to replace.

    There can be very many, and so a tar file is looked at only if it is as long as such a file. May block.
    """
    shards = [part for part in prepared.manifest.partitions if part.external]
    present = [path for path in (settings.publishing.report, settings.publishing.metrics) if path is not None]
    lengths = {os.path.getsize(path) for path in present if os.path.isfile(path)}
    directories = sorted({Path(shard.file).parent for shard in shards})
    return [
        *(Used(Role.SHARDS, directory) for directory in directories),
        *(Used(Role.SHARD, Path(shard.file)) for shard in shards if shard.bytes in lengths),
    ]
