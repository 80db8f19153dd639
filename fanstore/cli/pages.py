"""Pages that a command writes for a browser (--html FILE). Used by cli/stat.py and fanstore-plan."""

import os
import sys
from pathlib import Path

from fanstore.errors import UsageError
from fanstore.paths import Role, Used, refuse_overlaps
from fanstore.report.files import replace_file


def check_page(target: str | None, *others: Used) -> None:
    """UsageError if the page could not be written there, or would be in the way of something: before any work."""
    if target is None or target == "-":
        return
    path = Path(target)
    refuse_overlaps([Used(Role.PAGE, path), *others])
    if os.path.isdir(path):  # False also where nobody may look
        raise UsageError(f"cannot write {target}: it is a directory; name a file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        why = "no permission" if os.path.isdir(path.parent) else "there is no such directory"
        raise UsageError(f"cannot write {target}: {why}")


def write_page(target: str, page: str) -> None:
    """Write it to the file, or with ``-`` to standard output."""
    if target == "-":
        sys.stdout.buffer.write(page.encode("utf-8", "backslashreplace"))
        return
    try:
        replace_file(Path(target), page)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from None
