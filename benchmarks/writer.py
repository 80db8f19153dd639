"""The program that write_speed.py times: ``python writer.py KIND DIRECTORY COUNT BYTES``; one line of JSON.

``large``: one file of COUNT pieces of BYTES, written in order, closed; then synced (a second figure). ``small``: COUNT
files of BYTES, each created, written and closed, as a program that saves samples does. ``synced`` is the time until all
of it was on the disk that it was written to (fsync of each file; fanstore-mount --fsync local means the same disk).
"""

import json
import mmap
import os
import sys
import time
from pathlib import Path


def page_aligned(size: int) -> memoryview:
    """Random bytes in page-aligned memory (style.md, 22)."""
    memory = mmap.mmap(-1, size)
    memory.write(os.urandom(size))
    return memoryview(memory)


def main() -> None:
    kind, directory, count, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
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
    synced_s = time.perf_counter() - start_s
    print(json.dumps({"closed_s": closed_s, "synced_s": synced_s, "bytes": count * size, "files": len(paths)}))


if __name__ == "__main__":
    main()
