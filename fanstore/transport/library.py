"""The MPI library: starting it, and its one collective that moves much data.

Used by mpi.py, on its MPI thread.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

from fanstore import _native
from fanstore.errors import FanstoreError
from fanstore.transport.ranks import launched_size

#: One message of a broadcast: a count is a 32-bit int in many MPI libraries.
_PIECE_BYTES = 1 << 30

#: Memory of answers that is kept for the next ones (native/base/pool.h): eight of the largest chunks. Memory fresh from
#: the kernel is cleared and mapped page by page, which takes longer than receiving into it.
POOL_BYTES = 32 << 20


def initialise() -> tuple[Any, Any]:
    """Initialise MPI in this thread; mpi4py's MPI and a communicator of our own. Raises FanstoreError."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    level = MPI.Init_thread(MPI.THREAD_FUNNELED)
    if level < MPI.THREAD_FUNNELED:
        raise FanstoreError(
            f"the MPI library offers only thread level {level}; FanStore needs MPI_THREAD_FUNNELED. "
            "Use a library built with thread support"
        )
    world = MPI.COMM_WORLD
    if world.Get_size() != launched_size():
        raise FanstoreError(
            f"the MPI launcher started {launched_size()} processes, but the MPI library of this environment sees "
            f"{world.Get_size()}; use the mpirun that belongs to it (in the same virtual environment)"
        )
    world.Set_errhandler(MPI.ERRORS_RETURN)
    own = world.Dup()
    own.Set_errhandler(MPI.ERRORS_RETURN)
    return MPI, own


def finalize(mpi: Any) -> None:
    """End MPI; without the GIL, which mpi4py's own function keeps: if it hangs, the process must be able to end."""
    ctypes.CDLL(mpi.__file__).MPI_Finalize()


def make_exchange(mpi: Any, world: Any, message_bytes: int) -> _native.Exchange:
    """The part of the transport that is in C, over the library that mpi4py is linked with, whichever it is."""
    library = ctypes.CDLL(mpi.__file__)
    names = ("Irecv", "Isend", "Test", "Testsome", "Cancel", "Get_count", "Test_cancelled")
    functions = [ctypes.cast(getattr(library, f"MPI_{name}"), ctypes.c_void_p).value or 0 for name in names]

    def handle(thing: Any) -> int:
        # Handles are pointers in one family of MPI libraries, and ints in the other.
        bits: int = 8 * mpi._sizeof(type(thing))
        return int(mpi._handleof(thing)) & (1 << bits) - 1

    # Where a status keeps its error code is known to the library alone.
    status = mpi.Status()
    status.error = marker = 0x5EED
    error_offset = bytes(status.tomemory().cast("B")).index(marker.to_bytes(4, "little"))
    return _native.Exchange(
        (functions[0], functions[1], functions[2], functions[3], functions[4], functions[5], functions[6]),
        (handle(mpi.BYTE), handle(world), handle(mpi.REQUEST_NULL)),
        (mpi._sizeof(mpi.Request), mpi._sizeof(mpi.Status), error_offset),
        world.Get_size(),
        message_bytes,
        POOL_BYTES,
    )


def broadcast(world: Any, value: bytes | None, length: int) -> memoryview:
    """Rank 0's ``value`` in page-aligned memory of its own on every rank. Collective; returns when it is through."""
    memory = mmap.mmap(-1, max(1, length), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(memory)[:length]
    if value is not None and world.Get_rank() == 0:
        view[:] = value
    for start in range(0, length, _PIECE_BYTES):
        world.Bcast(view[start : start + _PIECE_BYTES], root=0)
    return view
