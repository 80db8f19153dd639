"""The program that write_speed.py times: ``python writer.py KIND DIRECTORY COUNT BYTES DISK``; one line of JSON.

``large``: one file of COUNT pieces of BYTES, written in order, closed; then synced (a second figure). ``small``: COUNT
files of BYTES, each created, written and closed, as a program that saves samples does. ``synced`` is the time until all
of it was on the disk: fsync of the large file (fanstore-mount --fsync local means the same disk), of small ones syncfs
of the file system that holds DISK, where they are on the disk itself or in the directory of a mount's outputs.
"""

import ctypes
import json
import mmap
import os
import sys
import time
from pathlib import Path


def page_aligned(size: int) -> memoryview:
    """Random bytes in page-aligned memory: the kernel copies it faster (README.md)."""
    memory = mmap.mmap(-1, size)
    memory.write(os.urandom(size))
    return memoryview(memory)


def sync_file_system(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "syncfs", path)
    finally:
        os.close(descriptor)


def main() -> None:
    kind, directory, count, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    disk = sys.argv[5]
    data = page_aligned(size)
    directory.mkdir(exist_ok=True)
    start_s = time.perf_counter()
    if kind == "large":
        paths = [directory / "checkpoint"]
        with open(paths[0], "wb", buffering=0) as file:
            for _ in range(count):
                file.write(data)
    else:
        paths = [directory / f"sample-{number:06}.bin" for number in range(count)]
        for path in paths:
            with open(path, "wb", buffering=0) as file:
                file.write(data)
    closed_s = time.perf_counter() - start_s
    if kind == "large":
        for path in paths:
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
    else:
        sync_file_system(disk)
    synced_s = time.perf_counter() - start_s
    print(json.dumps({"closed_s": closed_s, "synced_s": synced_s, "bytes": count * size, "files": len(paths)}))


if __name__ == "__main__":
    main()
