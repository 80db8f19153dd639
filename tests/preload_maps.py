"""A program that maps files of a dataset in all ways, also past Python's own checks, and says what it sees.

Run by test_preload_unmounted.py on a mount, beside it and without one: it must say the same. Arguments:
MOUNTPOINT, and names of files.
"""

import ctypes
import errno
import hashlib
import mmap
import os
import sys

PAGE = mmap.PAGESIZE
READ, WRITE = mmap.PROT_READ, mmap.PROT_WRITE
SHARED, PRIVATE = mmap.MAP_SHARED, mmap.MAP_PRIVATE

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def digest(data: bytes | mmap.mmap) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def said(status: int) -> str:
    return "done" if status == 0 else errno.errorcode[ctypes.get_errno()]


def map_raw(path: str, length: int, protection: int, flags: int, offset: int) -> int:
    """The address, of a descriptor that is closed again; 0 and a line for an error."""
    fd = os.open(path, os.O_RDONLY)
    address = libc.mmap(None, length, protection, flags, fd, offset)
    error = ctypes.get_errno()
    os.close(fd)
    if address == ctypes.c_void_p(-1).value:
        print("mmap", length, protection, flags, offset, errno.errorcode[error])
        return 0
    return int(address)


def map_with_python(path: str) -> None:
    with open(path, "rb") as file:
        file.seek(5)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        print(len(memory), digest(memory), file.read(3), file.tell(), os.fstat(file.fileno()).st_size, memory.size())
        part = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, offset=64 << 10)
        copy = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    print("closed", digest(memory), digest(part), memory.find(b"nowhere"))
    copy[:5], copy[-5:] = b"first", b"last."
    print("written", digest(copy), digest(memory))
    pid = os.fork()
    if pid == 0:
        copy[:5], copy[-5:] = b"child", b"child"
        os._exit(0 if memory[5:10] == copy[5:10] else 1)
    print("child", os.waitpid(pid, 0)[1], digest(copy), digest(memory))
    with open(path, "rb") as file:
        print("read", digest(file.read()))


def map_past_python(path: str) -> None:
    size = os.stat(path).st_size
    pages = -(-size // PAGE) * PAGE
    for flags, protection in ((SHARED, READ), (PRIVATE, READ), (PRIVATE, READ | WRITE)):
        address = map_raw(path, size, protection, flags, 0)
        whole = ctypes.string_at(address, pages)
        print("whole pages", digest(whole), whole[size:].strip(b"\0"))
        if protection & WRITE:
            ctypes.memset(address, 1, 10)
            ctypes.memset(address + size - 10, 1, 10)
        print("dropped", said(libc.madvise(address, pages, mmap.MADV_DONTNEED)))
        print("again", digest(ctypes.string_at(address, pages)))
        for start, length in ((0, pages), (0, PAGE), (pages - PAGE, PAGE)):
            print("mprotect", start, said(libc.mprotect(address + start, length, READ | WRITE)))
        print("munmap", said(libc.munmap(address, pages)))
    for offset in range(0, pages, pages // 4 // PAGE * PAGE):
        for length in (1, PAGE, PAGE + 1, size - offset):
            shown = min(-(-length // PAGE) * PAGE, pages - offset)
            address = map_raw(path, length, READ, SHARED, offset)
            print("at", offset, length, digest(ctypes.string_at(address, shown)))
    last = map_raw(path, 1, READ, SHARED, pages - PAGE)
    print("last page", digest(ctypes.string_at(last, PAGE)), said(libc.mprotect(last, PAGE, READ | WRITE)))
    longer = map_raw(path, pages + PAGE, READ, SHARED, 0)
    print("longer", digest(ctypes.string_at(longer, pages)))
    ready = map_raw(path, size, READ, PRIVATE | getattr(mmap, "MAP_POPULATE", 0x8000), 0)
    print("populated", digest(ctypes.string_at(ready, pages)))
    for length, protection, flags, offset in (
        (size, READ | WRITE, SHARED, 0),
        (0, READ, SHARED, 0),
        (PAGE, READ, SHARED, 1),
        (PAGE, READ, SHARED, -PAGE),
        (PAGE, READ, 0, 0),
    ):
        assert map_raw(path, length, protection, flags, offset) == 0
    print("behind the end", map_raw(path, PAGE, READ, SHARED, pages) != 0)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(f"--- {name}", flush=True)
        map_with_python(os.path.join(sys.argv[1], name))
        map_past_python(os.path.join(sys.argv[1], name))
