"""What a daemon tells the process that waits for it under a launcher (cli/supervisor.py), in case that it is killed.

Owns the pipe to it. Used by session.py, on any one thread at a time.
"""

import contextlib
import json
import os


class Supervised:
    """The daemon's end; ``pipe`` is -1 if nobody waits for it.

    Facts: ``mount``, ``created``: the mount point, and whether it is ours to remove; ``directory``, ``made_base``: the
    directory of the job on the local disk, and whether the one above it is ours, too; ``alone``: no other daemon lives;
    ``ended``: all is done, and the exit code counts.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._parent = os.getppid()

    @property
    def is_orphan(self) -> bool:
        """Was the supervisor killed? Then the other nodes take this daemon for dead, and go on."""
        return self._pipe >= 0 and os.getppid() != self._parent

    def tell(self, **facts: str | bool) -> None:
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError):  # it was killed, and this daemon ends
                os.write(self._pipe, json.dumps(facts).encode() + b"\n")
