"""The measured reader in Python: the same list, the same steps and the same report as reader.c, by N processes.

Usage: python_reader.py LIST READERS BUFFER_BYTES (the buffer size is not used: Python reads a file in one call).
This is how most training scripts read: one process per worker, ``open(path, "rb").read()``. Run by harness/reading.py.
"""

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

#: Seconds to wait for the other processes; a pass itself is limited by whoever runs this program.
_START_S = 60.0


def _read(paths: list[bytes], start: Barrier, results: "SimpleQueue[tuple[float, float, int, list[float]]]") -> None:
    total_bytes = 0
    latencies = []
    start.wait(_START_S)
    begin = time.monotonic()
    for path in paths:
        opened = time.perf_counter()
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read()
        latencies.append(time.perf_counter() - opened)
        if len(content) != size:
            raise SystemExit(f"python_reader: {path!r}: read {len(content)} bytes of {size}")
        total_bytes += size
    results.put((begin, time.monotonic(), total_bytes, latencies))


def main() -> int:
    paths = Path(sys.argv[1]).read_bytes().split(b"\0")[:-1]
    readers = int(sys.argv[2])
    context = multiprocessing.get_context("fork")
    start = context.Barrier(readers)
    results: SimpleQueue[tuple[float, float, int, list[float]]] = context.SimpleQueue()
    processes = [
        context.Process(target=_read, args=(paths[number::readers], start, results), daemon=True)
        for number in range(readers)
    ]
    for process in processes:
        process.start()
    parts: list[tuple[float, float, int, list[float]]] = []
    while len(parts) < readers:
        if not results.empty():
            parts.append(results.get())
        elif any(process.exitcode not in (None, 0) for process in processes):
            return 1  # the reader itself has said why
        else:
            time.sleep(0.005)
    latencies = sorted(latency for part in parts for latency in part[3])
    last = len(latencies) - 1
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    report = {
        "files": len(latencies),
        "bytes": sum(part[2] for part in parts),
        "seconds": max(part[1] for part in parts) - min(part[0] for part in parts),
        "latency_us": {name: round(latencies[round(last * share)] * 1e6, 1) for name, share in shares.items()},
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
