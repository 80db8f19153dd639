"""FUSE messages as the kernel writes and reads them (linux/fuse.h): for tests that take the kernel's place.

Not used by the product: the engine has its own definitions from the system's headers, and must agree with these.
"""

import socket
import struct
from dataclasses import dataclass

LOOKUP, FORGET, GETATTR, READLINK, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 5, 14, 15, 17, 18
GETXATTR, LISTXATTR, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS = 22, 23, 25, 26, 27, 28, 29, 34
INTERRUPT, IOCTL, BATCH_FORGET, READDIRPLUS, LSEEK = 36, 39, 42, 44, 46
SETATTR, WRITE, FSYNC, FSYNCDIR, CREATE, FALLOCATE = 4, 16, 20, 30, 35, 43

_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_TIMES = ("atime", "mtime", "ctime", "atimensec", "mtimensec", "ctimensec")
_ATTR_NAMES = ("ino", "size", "blocks", *_TIMES, "mode", "nlink", "uid", "gid", "rdev", "blksize", "flags")
_ENTRY = struct.Struct("<QQQQII")
_ENTRY_NAMES = ["nodeid", "generation", "entry_valid", "attr_valid", "entry_valid_nsec", "attr_valid_nsec"]
_DIRENT = struct.Struct("<QQII")

#: Flags of INIT.
ATOMIC_O_TRUNC, BIG_WRITES, AUTO_INVAL_DATA, WRITEBACK_CACHE = 1 << 3, 1 << 5, 1 << 12, 1 << 16
NO_OPEN_SUPPORT, MAX_PAGES = 1 << 17, 1 << 22

#: What Linux 6.18 offers in INIT, as far as it matters here: those above, and ASYNC_READ, DO_READDIRPLUS,
#: PARALLEL_DIROPS, CACHE_SYMLINKS, NO_OPENDIR_SUPPORT, INIT_EXT.
DIRECT_IO_ALLOW_MMAP = 1 << 36
OFFERED = 1 | 1 << 13 | 1 << 18 | 1 << 23 | 1 << 24 | 1 << 30
OFFERED |= ATOMIC_O_TRUNC | BIG_WRITES | AUTO_INVAL_DATA | WRITEBACK_CACHE | NO_OPEN_SUPPORT | MAX_PAGES
LARGEST = 1 << 21


@dataclass(frozen=True)
class Reply:
    """An answer: an error number (positive) or bytes."""

    error: int
    data: bytes


class Kernel:
    """The kernel's end of a connection: sends requests and waits for their answers, in any order.

    Attributes:
        init: the answer to INIT.
    """

    def __init__(self, connection: socket.socket, limit_s: float, offered: int = OFFERED) -> None:
        self._connection = connection
        self._connection.settimeout(limit_s)
        self._unique = 0
        arguments = struct.pack("<IIIII44x", 7, 38, 1 << 20, offered & 0xFFFF_FFFF, offered >> 32)
        self.init = self.ask(INIT, 0, arguments)

    def close(self) -> None:
        self._connection.close()

    def send(self, opcode: int, node: int, arguments: bytes = b"", unique: int | None = None) -> int:
        """Send a request; its number."""
        if unique is None:
            self._unique += 2
            unique = self._unique
        head = _IN.pack(_IN.size + len(arguments), opcode, unique, node, 0, 0, 1, 0)
        self._connection.send(head + arguments)
        return unique

    def receive(self) -> tuple[int, Reply]:
        """The next answer, and the number of its request."""
        packet = self._connection.recv(LARGEST)
        length, error, unique = _OUT.unpack_from(packet)
        assert length == len(packet), "an answer says how long it is"
        return unique, Reply(-error, packet[_OUT.size :])

    def ask(self, opcode: int, node: int, arguments: bytes = b"") -> Reply:
        """Send a request and wait for its answer."""
        unique = self.send(opcode, node, arguments)
        got, reply = self.receive()
        assert got == unique, "one question, one answer"
        return reply


def read_arguments(node: int, offset: int, size: int) -> bytes:
    """For READ, READDIR and READDIRPLUS; handles are inode numbers."""
    return struct.pack("<QQIIQII", node, offset, size, 0, 0, 0, 0)


def write_arguments(offset: int, data: bytes, size: int | None = None) -> bytes:
    return struct.pack("<QQIIQII", 0, offset, len(data) if size is None else size, 0, 0, 0, 0) + data


def fallocate_arguments(mode: int, offset: int, length: int) -> bytes:
    return struct.pack("<QQQII", 0, offset, length, mode, 0)


def lseek_arguments(offset: int, whence: int) -> bytes:
    return struct.pack("<QQII", 0, offset, whence, 0)


def create_arguments(name: bytes, flags: int = 0, mode: int = 0o100644, umask: int = 0) -> bytes:
    return struct.pack("<IIII", flags, mode, umask, 0) + name + b"\0"


def getxattr_arguments(name: bytes, size: int) -> bytes:
    return struct.pack("<II", size, 0) + name + b"\0"


def attributes(data: bytes, offset: int = 0) -> dict[str, int]:
    return dict(zip(_ATTR_NAMES, _ATTR.unpack_from(data, offset), strict=True))


def entry(data: bytes, offset: int = 0) -> dict[str, int]:
    """fuse_entry_out; of a name that does not exist (node 0) only what the kernel looks at."""
    fields = dict(zip(_ENTRY_NAMES, _ENTRY.unpack_from(data, offset), strict=True))
    if fields["nodeid"] == 0:
        return {name: fields[name] for name in ("nodeid", "entry_valid", "entry_valid_nsec")}
    return fields | attributes(data, offset + _ENTRY.size)


def attributes_out(data: bytes) -> dict[str, int]:
    """fuse_attr_out."""
    valid, valid_nsec, _ = struct.unpack_from("<QII", data)
    return {"attr_valid": valid, "attr_valid_nsec": valid_nsec} | attributes(data, 16)


def dirents(data: bytes, plus: bool) -> list[tuple[bytes, int, int, int, dict[str, int]]]:
    """Name, inode, cookie, type and (READDIRPLUS) the entry, for each name of a listing."""
    found = []
    position = 0
    skip = _ENTRY.size + _ATTR.size if plus else 0
    while position < len(data):
        known = entry(data, position) if plus else {}
        ino, cookie, length, kind = _DIRENT.unpack_from(data, position + skip)
        start = position + skip + _DIRENT.size
        name = data[start : start + length]
        if name in (b".", b".."):
            known = {}  # the kernel does not look at it
        found.append((name, ino, cookie, kind, known))
        position += (skip + _DIRENT.size + length + 7) // 8 * 8
    assert position == len(data), "a listing ends with a whole entry"
    return found
