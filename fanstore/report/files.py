"""Text files that are replaced as a whole. Used by fuse/reporting.py and cli/stat.py; may block."""

import contextlib
import os
import tempfile
from pathlib import Path


def replace_file(path: Path, text: str, mode: int | None = None) -> None:
    """Put the text under this name: whoever reads it sees the old or the new one. Raises OSError.

    Args:
        mode: permissions; None for what new files of this process have.
    """
    # node_exporter reads what ends in .prom, and must not find a half of it.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            os.fchmod(descriptor, mode if mode is not None else 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _umask() -> int:
    """Of this process; reading it without changing it for a moment is only possible in /proc."""
    with open("/proc/self/status", "rb") as lines:
        return next(int(line.split()[1], 8) for line in lines if line.startswith(b"Umask:"))
