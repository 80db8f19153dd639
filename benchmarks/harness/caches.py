"""The kernel's caches: emptied before a cold run, with the best means this user has.

Used by the benchmark scripts. The disk below (a RAID controller, the host of a virtual machine) keeps its own caches,
which nothing here can reach: "cold" means cold in this kernel.
"""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
#: Several times what a pass brings into memory: which of the free pages the kernel takes first is its own affair.
BACKED_BYTES = 3 << 30


def drop_method() -> str:
    """How ``drop`` works for this user: ``drop_caches`` (data and metadata) or ``fadvise`` (data only).

    FANSTORE_BENCH_GENTLE=1 asks for the latter: where others use the machine, as in tests.
    """
    return "drop_caches" if not _is_gentle() and os.access(_DROP_CACHES, os.W_OK) else "fadvise"


def _is_gentle() -> bool:
    return os.environ.get("FANSTORE_BENCH_GENTLE") == "1"


def drop(files: Iterable[Path]) -> None:
    """Empty the page cache: as root all of it with dentries and inodes; otherwise the pages of ``files``."""
    if drop_method() == "drop_caches":
        os.sync()  # dirty pages are not dropped
        _DROP_CACHES.write_text("3\n")
        return
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def back_memory() -> None:
    """Have BACKED_BYTES of free memory that is really there.

    The host of a virtual machine may take back what the kernel has freed (free page reporting, after two seconds), and
    gives it again page by page when it is touched: 9.7 µs for a page of 4 KiB here, 2.4 when it was used a moment ago.
    A pass that brings 645 MB into memory then takes 0.36 or 0.7 s, whatever file system it reads. Nothing is done where
    others use the machine, as in tests.
    """
    if _is_gentle():
        return
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, min(BACKED_BYTES, _available_bytes() // 4), flags=flags).close()


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/meminfo does not say how much memory is available")


def files_below(path: Path) -> list[Path]:
    """A file itself, or all regular files in a directory tree."""
    if not path.is_dir():
        return [path]
    return [Path(folder, name) for folder, _, names in os.walk(path) for name in names]


def sync_tree(path: Path) -> None:
    """Wait until what was written at ``path`` is on the disk: every file of it and its directories."""
    folders = [path] if path.is_dir() else []
    folders += [Path(folder, name) for folder, names, _ in os.walk(path) for name in names]
    for item in [*files_below(path), *folders, path.parent]:
        descriptor = os.open(item, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
