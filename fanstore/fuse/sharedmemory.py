"""Where the MPI library keeps its shared memory: a directory of this job that is gone before the mount is up.

Open MPI maps a file of 16 MiB per process in /dev/shm and leaves it there when the process is killed: memory that the
node misses until it is restarted. Once every process has mapped the files of all others, their names are not needed any
more; so they are made in a job directory (job/job_directory.py), which is removed then. If we are killed before, the
next daemon removes it. Other libraries do not look at the variable. Used by session.py.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from fanstore.errors import MountError
from fanstore.job.job_directory import JobDirectory

log = logging.getLogger(__name__)

_BASE = Path("/dev/shm")
#: Open MPI's variable for the place of these files.
_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"


class SharedMemory:
    """A context in which MPI is initialised and every process has talked to every other.

    A user's own choice of the place is left alone.
    """

    def __init__(self) -> None:
        self._directory: JobDirectory | None = None

    def __enter__(self) -> Self:
        if _VARIABLE in os.environ or not os.access(_BASE, os.W_OK | os.X_OK):
            return self
        try:
            JobDirectory.sweep(_BASE)
            self._directory = JobDirectory(_BASE)
        except MountError as error:
            log.info("the MPI library chooses the place of its shared memory itself: %s", error)
            return self
        os.environ[_VARIABLE] = str(self._directory.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._directory is not None:
            del os.environ[_VARIABLE]  # the COMMAND must not inherit it
            self._directory.remove()
