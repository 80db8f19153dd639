"""The MPI requests that are under way, tested all at once. Owned and used by the MPI thread of mpi.py only.

MPI_Testsome is called from C (native/polling.h), without the GIL, over an array of handles. Why not mpi4py's Testsome:
a thread that polls with it takes the GIL a million times a second, and a thread that waits for the GIL gets it only
after the switch interval of 5 ms. Measured with answers of 107 KiB, 16 under way, 2 cores: 5 to 12 thousand answers per
second with mpi4py's Testsome (0.3 to 0.5 ms from completion until trio ran), 18 to 27 thousand like this.
"""

from __future__ import annotations

import contextlib
import ctypes
from array import array
from typing import Any, Generic, TypeVar

from fanstore import _native

#: Instead of a number of bytes: the request was cancelled, or its peer is dead.
FAILED = -1
#: Nobody waits for it any more.
TIMED_OUT = -2

Owner = TypeVar("Owner")


class Pending(Generic[Owner]):
    """Requests, each with an owner that says what to do when it has completed.

    Attributes:
        _handles, _requests, _owners: parallel, by slot; an empty slot has the null handle, which MPI passes over. The
            requests of mpi4py keep the buffers alive; their own handles are out of date from the moment of completion.
            An owner of None with a request: abandoned, kept for the memory that MPI may still write to.
        _free: empty slots.
        _abandoned: number of abandoned requests.
        _indices, _bytes, _statuses: filled by a poll, one for each request that has completed.
        _interrupt: one byte; another thread sets it to 1 to end a wait.
    """

    def __init__(self, mpi: Any, interrupt: bytearray) -> None:
        self._mpi = mpi
        self._interrupt = interrupt
        self._handle_of = mpi._handleof
        handle_bytes, self._status_bytes = mpi._sizeof(mpi.Request), mpi._sizeof(mpi.Status)
        # Handles are pointers in one family of MPI libraries, and ints in the other.
        self._mask = (1 << 8 * handle_bytes) - 1
        self._null = self._handle_of(mpi.REQUEST_NULL) & self._mask
        byte = mpi._handleof(mpi.BYTE) & (1 << 8 * mpi._sizeof(mpi.Datatype)) - 1
        library = ctypes.CDLL(mpi.__file__)  # the one that mpi4py is linked with, whichever it is
        functions = (library.MPI_Testsome, library.MPI_Get_count, library.MPI_Test_cancelled)
        testsome, get_count, test_cancelled = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions)
        self._library = (testsome, get_count, test_cancelled, byte, self._status_bytes)
        self._handles = array("Q" if handle_bytes == 8 else "I")
        self._requests: list[Any] = []
        self._owners: list[Owner | None] = []
        self._free: list[int] = []
        self._abandoned = 0
        self._grow(64)

    def _grow(self, slots: int) -> None:
        begin = len(self._handles)
        self._handles.extend([self._null] * slots)
        self._requests += [None] * slots
        self._owners += [None] * slots
        self._free += range(begin + slots - 1, begin - 1, -1)
        self._indices = array("i", bytes(4 * (begin + slots)))
        self._bytes = array("i", bytes(4 * (begin + slots)))
        self._statuses = bytearray(self._status_bytes * (begin + slots))

    def __len__(self) -> int:
        """Requests that somebody waits for."""
        return len(self._handles) - len(self._free) - self._abandoned

    def add(self, request: Any, owner: Owner) -> None:
        if not self._free:
            self._grow(len(self._handles))
        slot = self._free.pop()
        self._handles[slot] = self._handle_of(request) & self._mask
        self._requests[slot] = request
        self._owners[slot] = owner

    def owners(self) -> list[Owner]:
        return [owner for owner in self._owners if owner is not None]

    def cancel(self, owner: Owner) -> None:
        """Cancel the receive of this owner; it completes soon: with FAILED, or as usual if the answer was just here."""
        self._requests[self._owners.index(owner)].Cancel()

    def abandon(self, owner: Owner) -> None:
        """Wait for this receive no more: its peer is dead. Its memory is kept until MPI lets go of it, if ever."""
        slot = self._owners.index(owner)
        self._owners[slot] = None
        self._abandoned += 1
        with contextlib.suppress(self._mpi.Exception):  # the library may have found out itself, and says so
            self._requests[slot].Cancel()

    def take_completed(self, spin_ns: int) -> list[tuple[Owner, int]]:
        """Let MPI work, and remove what has completed: owner and bytes received (of a send: of no meaning).

        If nothing has, it polls for ``spin_ns``, or until the interrupt is set.
        """
        code, count = _native.poll_requests(
            self._library,
            len(self._handles),
            self._handles,
            self._indices,
            self._bytes,
            self._statuses,
            self._interrupt,
            spin_ns,
        )
        if code != 0:
            self._mark_failed(count)
        completed: list[tuple[Owner, int]] = []
        for slot, received in zip(self._indices[:count], self._bytes, strict=False):
            owner = self._owners[slot]
            if owner is None:
                self._abandoned -= 1
            else:
                completed.append((owner, received))
            self._owners[slot] = self._requests[slot] = None
            self._handles[slot] = self._null
            self._free.append(slot)
        return completed

    def _mark_failed(self, count: int) -> None:
        """At least one request has failed: its peer is dead. Each status tells (only then is its error field set)."""
        status = self._mpi.Status()
        memory = status.tomemory().cast("B")
        for number in range(count):
            memory[:] = self._statuses[number * self._status_bytes : (number + 1) * self._status_bytes]
            if status.error != self._mpi.SUCCESS:
                self._bytes[number] = FAILED
