"""Types of the C extension (native/module.c)."""

from typing import Any, TypeAlias

import numpy.typing as npt
from typing_extensions import Buffer as BytesBuffer

# numpy arrays are buffers, but say so to the type checker from Python 3.12 on only.
Buffer: TypeAlias = BytesBuffer | npt.NDArray[Any]

CHUNK_BYTES: int
PACK_CHANGED: int
PACK_NO_ROOM: int
PACK_BAD_TABLE: int
PACK_NO_CONTENT: int

class Index:
    def __init__(self, buffer: Buffer) -> None: ...
    def lookup(self, directory: int, name: bytes, /) -> int: ...

class Packer:
    def __init__(self, columns: dict[str, Buffer], sources: list[tuple[int, bool]]) -> None: ...
    def pack(
        self, order: Buffer, level: int, out: Buffer, scratch: Buffer, packed: Buffer, chunks: Buffer
    ) -> tuple[int, int]: ...

def tar_file_header(
    path: bytes, mode: int, uid: int, gid: int, mtime_ns: int, size: int, size_largest: int, /
) -> bytes: ...
def list_directory(fd: int, /) -> tuple[dict[str, bytes], list[tuple[bytes, int]], int, int]: ...
def pages_resident(buffer: Buffer, /) -> bool: ...
def populate_pages(buffer: Buffer, /) -> bool: ...
def poll_requests(
    mpi: tuple[int, int, int, int, int],
    count: int,
    requests: Buffer,
    indices: Buffer,
    bytes: Buffer,
    statuses: Buffer,
    interrupt: Buffer,
    spin_ns: int,
    /,
) -> tuple[int, int]: ...
def start_writing(fd: int, offset: int, length: int, /) -> None: ...
def all_zero(buffer: Buffer, /) -> bool: ...
def pack_scratch(largest_file: int, /) -> int: ...
