"""A memory cgroup: a machine with less memory, for this process and what it starts. Version 1 or 2, root only.

Used by cached_once.py and by tests/test_memory.py. The group is made by ``memory_group`` and removed at the end of the
block, when all processes in it have ended. The page cache that they fill counts, as on a small machine.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.command import BenchmarkError

_ROOT = Path("/sys/fs/cgroup")
_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
#: Seconds for the last process of a group to vanish.
_EMPTY_S = 20.0


class MemoryGroup:
    """One group; ``version`` is that of the cgroup file system."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.version = version

    def statistics(self) -> dict[str, int]:
        """What is in the group: page cache (``file``) and memory of processes (``anon``), in bytes."""
        lines = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        names = {"file": "cache", "anon": "rss"} if self.version == 1 else {"file": "file", "anon": "anon"}
        return {name: int(lines[field]) for name, field in names.items()}

    def limit_bytes(self) -> int:
        """As the kernel has it: in whole pages."""
        return int((self.path / _LIMIT[self.version]).read_text())

    def killed(self) -> int:
        """How many of its processes were killed because its memory did not suffice."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return int(dict(line.split() for line in (self.path / name).read_text().splitlines())["oom_kill"])

    @contextmanager
    def joined(self) -> Iterator[None]:
        """This process is in the group as long as the block; so is all that it starts, for as long as that runs."""
        home = self.path.parent / "cgroup.procs"
        (self.path / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            home.write_text(str(os.getpid()))


def _parent() -> tuple[Path, int]:
    if os.geteuid() != 0:
        raise BenchmarkError("a memory cgroup can only be made by root")
    controllers = _ROOT / "cgroup.controllers"
    if controllers.exists() and "memory" in controllers.read_text().split():
        (_ROOT / "cgroup.subtree_control").write_text("+memory")
        return _ROOT, 2
    if (_ROOT / "memory" / "cgroup.procs").exists():
        return _ROOT / "memory", 1
    raise BenchmarkError("this machine has no memory cgroups")


@contextmanager
def memory_group(limit_bytes: int, name: str = "bench") -> Iterator[MemoryGroup]:
    """A fresh group of so much memory, page cache included."""
    parent, version = _parent()
    path = parent / f"fanstore-{name}-{os.getpid()}"
    path.mkdir()
    try:
        (path / _LIMIT[version]).write_text(str(limit_bytes))
        yield MemoryGroup(path, version)
    finally:
        deadline = time.monotonic() + _EMPTY_S
        while (path / "cgroup.procs").read_text().strip() and time.monotonic() < deadline:
            time.sleep(0.05)
        path.rmdir()
