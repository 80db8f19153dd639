"""The first read of a new mount: does it answer?

From another process, through the kernel, as everybody else will. Never from this one: killed in the middle of it, it
would wait for an answer of its own, and as it cannot end, the kernel would not end the mount either, which hangs then
instead of giving ENOTCONN. Used by session.py, on the trio thread.
"""

import os
import subprocess
import sys
from pathlib import Path

import trio

from fanstore.errors import MountError

#: What the reader runs; its exit code is the error number.
_PROGRAM = """
import sys
try:
    open(sys.argv[1], "rb").read()
except OSError as error:
    sys.exit(error.errno)
"""


async def read_first(point: Path, path: Path) -> None:
    """Read a file of our own mount at ``point``; MountError if that is not possible. Cancelling it ends the reader."""
    argv = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(path)]
    nowhere = subprocess.DEVNULL  # pipes would need descriptors, of which there may be few
    try:
        # In a session of its own: a Ctrl-C is for us.
        done = await trio.run_process(
            argv, check=False, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
        )
    except OSError as error:
        raise MountError(f"the mount at {point} cannot be tried out: {error.strerror}") from error
    if done.returncode != 0:
        reason = os.strerror(done.returncode) if done.returncode > 0 else f"signal {-done.returncode}"
        raise MountError(f"the mount at {point} does not answer: {reason}")
