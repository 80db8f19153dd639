"""What the system allows a process of this user: open files, locked memory, memory, cores. Any thread."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from fanstore.dataset.memory_limit import group_limit
from fanstore.doctor.finding import Finding, note, ok, warning
from fanstore.units import format_bytes

#: Fewer open files than this are not normal anywhere, and leave the engine too few for partitions.
_FEW_FILES = 1024
#: The native engine publishes at most this part of all descriptors as partition files (fuse/native.py).
_FILES_PART = 8
#: Default of --cache, and what a daemon of several needs besides cache and index (docs/operations.md).
_CACHE_BYTES, _DAEMON_BYTES = 1 << 30, 256 << 20

_INFINIBAND = Path("/sys/class/infiniband")


def check_files(partitions: int) -> Iterator[Finding]:
    """RLIMIT_NOFILE, for a dataset of so many partitions."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(_FEW_FILES, partitions * _FILES_PART)
    if soft >= needed:
        yield ok("limit.files", f"{soft:,} open files")
        return
    why = f" for {partitions:,} partitions" if partitions else ""
    fix = f"run: ulimit -n {needed}" if hard >= needed else f"ask the administrator for nofile {needed} in limits.conf"
    yield warning("limit.files", f"only {soft:,} open files{why}: the native engine leaves the rest to Python", fix)


def check_locked_memory() -> Iterator[Finding]:
    """RLIMIT_MEMLOCK, which an MPI library needs for InfiniBand; nothing else here does."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not _INFINIBAND.is_dir() or not any(_INFINIBAND.iterdir()):
        return
    if soft == resource.RLIM_INFINITY:
        yield ok("limit.memlock", "locked memory is not limited, as InfiniBand needs it")
    else:
        yield warning(
            "limit.memlock",
            f"only {format_bytes(soft)} of memory may be locked: MPI over InfiniBand may fail or be slow",
            "ask the administrator for memlock unlimited in limits.conf, and for jobs of the batch system",
        )


def check_memory(index_bytes: int) -> Iterator[Finding]:
    """What is free of this machine, and of the control group of this job."""
    needed = _CACHE_BYTES + _DAEMON_BYTES + index_bytes
    free, source = available_bytes(), "free memory"
    limit = group_limit()
    text = f"{format_bytes(free)} of memory are free"
    if limit is not None:
        text += f"; this job may use {format_bytes(limit)} (control group)"
        if limit < free:
            free, source = limit, "the job's limit"
    if free >= needed:
        yield ok("limit.memory", text)
    else:
        yield warning(
            "limit.memory",
            f"{text}: FanStore uses up to {format_bytes(needed)} with the default cache",
            f"ask the batch system for more ({source} counts), or use a smaller --cache, such as 128MiB",
        )


def available_bytes() -> int:
    """Memory that programs can have without paging, as the kernel estimates it."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def check_cores() -> Iterator[Finding]:
    """A launcher may have bound us, and so the program that trains, to one core."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if usable == 1 < present:
        yield warning(
            "limit.cores", f"this process may use 1 of {present} cores", "under Open MPI: mpirun --bind-to none"
        )
    elif usable < present:
        yield note("limit.cores", f"{usable} of {present} cores may be used")
    else:
        yield ok("limit.cores", f"{present} cores")
