"""The mount of a job, on record in its directory on the node's disk, and its removal when the job was killed.

What is on record is in mountrecord.py. Mount points are often named after the job's number, so that no
later job would come across the dead mount of an earlier one; it comes across the directory (job/job_directory.py).
Used by session.py and by ``fanstore-mount --recover``, which hold the lock of the directory, by the supervisor of a
daemon that was killed, and by ``fanstore-umount``; the calls block.
"""

import contextlib
import logging
import os
import tempfile
from pathlib import Path

from fanstore.client.protocol import SOCKET_NAME
from fanstore.errors import MountError
from fanstore.fuse.mountpoint import Condition, condition, remove_unused, unmount
from fanstore.fuse.mountrecord import RECORD_NAME, read_record
from fanstore.job.job_directory import LOCK_NAME, JobDirectory
from fanstore.mounttable import find_mount
from fanstore.outputs.recovery import salvage
from fanstore.prefetch.orderfile import NAME as ORDER_NAME

log = logging.getLogger(__name__)


def take_over(directory: Path) -> bool:
    """Unmount and save what a dead job has left; whether its directory may go. For ``JobDirectory.sweep``."""
    try:
        noted = read_record(directory)
        _clear(Path(noted["path"]), bool(noted["created"]))
    except FileNotFoundError:
        log.debug("%s: killed before it had a mount", directory)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be understood: %s", directory / RECORD_NAME, error)
    except MountError as error:
        log.warning("%s", error)
    return salvage(directory)


def forget(point: Path) -> None:
    """The dead mount here was removed: so is the directory of its job, if it has no copies and no outputs.

    It is among temporary files then. What has more in it is left for the next start, which knows what to save.
    """

    def is_spare(directory: Path) -> bool:
        try:
            noted = read_record(directory)
            return noted["path"] == str(point) and set(os.listdir(directory)) <= {
                LOCK_NAME,
                SOCKET_NAME,
                ORDER_NAME,
                RECORD_NAME,
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.debug("%s is left alone: %s", directory, error)
            return False

    JobDirectory.sweep(Path(tempfile.gettempdir()), is_spare)


def clean_up(mount: str | None, created: bool | None, directory: str | None, made_base: bool | None) -> None:
    """Remove what a daemon has left that was just killed, as far as it had got (cli/supervisor.py)."""
    try:
        if directory is not None:
            base = Path(directory).parent
            JobDirectory.sweep(base, take_over)
            if made_base:
                with contextlib.suppress(OSError):  # not empty: another job uses it as well, or outputs are left there
                    base.rmdir()
        if mount is not None:
            _clear(Path(mount), bool(created))
    except MountError as error:
        log.warning("%s", error)


def _clear(point: Path, created: bool) -> None:
    """Only a mount that is ours and dead: by now the name may belong to another job."""
    mount = find_mount(point)
    if mount is not None:
        if not mount.is_fanstore or mount.owner != os.geteuid() or condition(point) is not Condition.STALE:
            return
        unmount(point, lazy=True)
        log.info("unmounted the dead mount of %s that a killed job left at %s", mount.source, point)
    if created:
        remove_unused(point)
