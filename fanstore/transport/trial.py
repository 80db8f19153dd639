"""A tiny MPI program, to find out whether MPI works on this node: ``python -m fanstore.transport.trial [--library]``.

Owns what it prints: one line, TRIAL_MARK and then JSON. Alone with ``--library`` it names the library without starting
it. Otherwise it is started by mpirun: every rank initialises MPI as a daemon does (library.py) and says what it was
given; rank 0 prints what all said. Run as a program of its own by fanstore.doctor, with a time limit: a library that
hangs, aborts or does not belong to the launcher must not take anybody with it. Main thread only.
"""

from __future__ import annotations

import json
import os
import socket
import sys

#: Before the JSON, in case a launcher or a library prints something of its own.
TRIAL_MARK = "fanstore-trial: "


def library() -> dict[str, str]:
    """Names of the MPI library and of mpi4py; MPI is loaded, not started. Raises ImportError, RuntimeError."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    return {"library": MPI.Get_library_version().rstrip("\0").strip(), "mpi4py": mpi4py.__version__}


def trial() -> dict[str, object] | None:
    """Start MPI, tell each other something, end it; what was seen, on rank 0. Raises FanstoreError."""
    from fanstore.transport.library import initialise

    mpi, world = initialise()
    levels = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    mine = {
        "host": socket.gethostname(),
        "thread_level": levels[mpi.Query_thread()],
        # How the transport itself finds out (mpi.py).
        "survives": os.environ.get("OMPI_MCA_mpi_ft_enable") == "1",  # noqa: SIM112 -- Open MPI's spelling
        "cores": len(os.sched_getaffinity(0)),
    }
    all_of_them = world.gather(mine, root=0)
    mpi.Finalize()
    return None if all_of_them is None else {"ranks": all_of_them}


def main() -> int:
    """Entry point."""
    from fanstore.errors import FanstoreError

    try:
        result = library() if sys.argv[1:] == ["--library"] else trial()
    except (FanstoreError, ImportError, RuntimeError) as error:
        print(f"{TRIAL_MARK}{json.dumps({'error': str(error)})}", flush=True)
        return 1
    if result is not None:
        print(f"{TRIAL_MARK}{json.dumps(result)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
