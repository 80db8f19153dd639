"""Memory of a running command with all its children, sampled until it ends.

Used by prep_memory.py. Reads /proc only; a process that ends between two looks is simply gone.
"""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

#: Seconds between two samples. A look at a handful of processes takes some 100 µs.
INTERVAL_S = 0.05


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _kib(path: str, field: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    return 0  # a process that has ended but was not waited for has no memory


def tree_memory(pid: int) -> tuple[int, int, int]:
    """Processes, sum of their resident sets, and the same with shared pages counted once (Pss)."""
    processes = resident = proportional = 0
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        try:
            waiting += _children(current)
            resident += _kib(f"/proc/{current}/status", "VmRSS")
            proportional += _kib(f"/proc/{current}/smaps_rollup", "Pss")
            processes += 1
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return processes, resident, proportional


def watch(process: "subprocess.Popen[bytes]", timeout_s: float) -> list[dict[str, Any]]:
    """Samples until the process ends; TimeoutExpired when it does not."""
    begin = time.monotonic()
    samples = []
    while process.poll() is None:
        processes, resident, proportional = tree_memory(process.pid)
        elapsed = time.monotonic() - begin
        if processes:
            samples.append(
                {
                    "seconds": round(elapsed, 2),
                    "processes": processes,
                    "rss_bytes": resident,
                    "pss_bytes": proportional,
                }
            )
        if elapsed > timeout_s:
            raise subprocess.TimeoutExpired(os.fsdecode(str(process.args)), timeout_s)
        time.sleep(INTERVAL_S)
    return samples
