"""Files mapped into memory without a descriptor of their own.

Python's mmap duplicates the descriptor and keeps it; a node with two thousand partitions would need as many, where
1024 is a common limit. Owns the map: it goes when the last view of it is gone, so that nobody can send from memory that
is no longer there. Used by the store; any thread.
"""

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Map:
    """The owner of one map; numpy arrays made of it keep it alive, and so does every view of these."""

    def __init__(self, fd: int, length: int) -> None:
        address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, True),
        }
        # Not at the end of the process: the MPI thread may be sending to the last.
        weakref.finalize(self, _libc.munmap, address, length).atexit = False


def map_file(fd: int, length: int) -> memoryview:
    """The first ``length`` bytes (at least 1) of a file, read-only. Raises OSError.

    Bytes beyond the end of the file must not be touched (SIGBUS); ``fd`` may be closed at any time.
    """
    return np.asarray(_Map(fd, length)).data
