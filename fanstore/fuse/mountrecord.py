"""The file ``mount.json`` in the directory of a job: where its dataset is to be seen, for those who find the directory.

Written by claim.py; read by deadmount.py after a crash, and by unmounted.py while the job lives. The calls block.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

RECORD_NAME = "mount.json"


def record_mount(directory: Path, point: Path, created: bool, **more: object) -> None:
    """Note where the job of this directory is about to mount. On a full disk it does without."""
    noted = json.dumps({"path": str(point), "created": created, **more})
    try:
        opened = os.open(directory / RECORD_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(opened, "w") as file:
            file.write(noted)
    except OSError as error:
        log.warning(
            "%s cannot be written; the mount stays if this job is killed: %s", directory / RECORD_NAME, error.strerror
        )


def read_record(directory: Path) -> dict[str, Any]:
    """What was noted. Raises OSError, ValueError."""
    noted = json.loads((directory / RECORD_NAME).read_text())
    if not isinstance(noted, dict):
        raise ValueError("it is not an object")
    return noted
