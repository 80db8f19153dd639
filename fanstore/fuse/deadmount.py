"""The mount of a job, on record in its directory on the node's disk, and its removal when the job was killed.

Owns the file ``mount.json`` in the job's directory. Mount points are often named after the job's number, so that no
later job would come across the dead mount of an earlier one; the directory is what it comes across (core/joblock.py).
Used by session.py and by ``fanstore-mount --recover``, which hold the lock of the directory; the calls block.
"""

import json
import logging
import os
from pathlib import Path

from fanstore.core.recovery import salvage
from fanstore.errors import MountError
from fanstore.fuse.mountpoint import Condition, MountPoint, condition, remove_unused, unmount
from fanstore.fuse.mounttable import find_mount

log = logging.getLogger(__name__)

_NAME = "mount.json"


def record_mount(directory: Path, point: MountPoint) -> None:
    """Note where the job of this directory is about to mount. On a full disk it does without."""
    noted = json.dumps({"path": str(point.path), "created": point.created})
    try:
        with open(os.open(directory / _NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(noted)
    except OSError as error:
        log.warning(
            "%s cannot be written; the mount stays if this job is killed: %s", directory / _NAME, error.strerror
        )


def take_over(directory: Path) -> bool:
    """Unmount and save what a dead job has left; whether its directory may go. For ``JobDirectory.sweep``."""
    try:
        noted = json.loads((directory / _NAME).read_text())
        _clear(Path(noted["path"]), bool(noted["created"]))
    except FileNotFoundError:
        log.debug("%s: killed before it had a mount", directory)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be understood: %s", directory / _NAME, error)
    except MountError as error:
        log.warning("%s", error)
    return salvage(directory)


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
