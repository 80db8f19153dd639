"""A place where the processes of one job meet: empty files in a directory that all of them see.

Used by the programs of remote_reads.py and shared_fs.py that run once on each node. Any thread, one at a time.
"""

import time
from pathlib import Path
from typing import NoReturn

LIMIT_S = 120.0


class Meeting:
    """Where all ranks wait for each other; who gives up tells the others why."""

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self._directory, self._rank, self._ranks = directory, rank, ranks
        self._number = 0

    def give_up(self, reason: str) -> NoReturn:
        """Let the others know that this rank does not come any more, and why."""
        (self._directory / "given-up").write_text(reason)
        raise SystemExit(reason)

    def wait(self) -> None:
        self._number += 1
        names = [self._directory / f"met-{self._number}-{rank}" for rank in range(self._ranks)]
        names[self._rank].touch()
        limit_s = time.monotonic() + LIMIT_S
        while not all(name.exists() for name in names):
            if (self._directory / "given-up").exists():
                raise SystemExit((self._directory / "given-up").read_text())
            if time.monotonic() > limit_s:
                raise SystemExit("a rank has not come")
            time.sleep(0.002)
