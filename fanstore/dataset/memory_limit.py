"""How much memory this process may use: that of the machine, or of its control groups. Any thread."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


class GroupMemory(NamedTuple):
    """Memory of a control group.

    Attributes:
        used_bytes: what the kernel cannot take back: all but pages of files. (Those of a tmpfs it cannot.)
    """

    limit_bytes: int
    used_bytes: int

    @property
    def room_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


class _Files(NamedTuple):
    """Names of one version of control groups; ``reclaimable`` are fields of memory.stat, of the group and all below."""

    limit: str
    usage: str
    reclaimable: tuple[str, ...]


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _Files("memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))


def usable_bytes() -> int:
    """The memory of this machine, or what the control group of this process may have of it."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = group_limit()
    return physical if limit is None else min(physical, limit)


def available_bytes() -> int:
    """What can be had, pages of files that could go included: of this machine, or what the control groups leave."""
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    group = group_memory()
    return available if group is None else min(available, group.room_bytes)


def group_limit(own: Path = _OWN, root: Path = _CGROUPS) -> int | None:
    """The least limit of the control groups that this process is in, of version 1 or 2; None if there is none."""
    return min((limit for _, _, limit in _limited(own, root)), default=None)


def group_memory(own: Path = _OWN, root: Path = _CGROUPS) -> GroupMemory | None:
    """The one of these groups that has the least room left; None if none has a limit."""
    found = []
    for place, files, limit in _limited(own, root):
        try:
            usage = int((place / files.usage).read_text())
            lines = (place / "memory.stat").read_text().splitlines()
        except OSError:
            continue  # not for us to see, or it is going just now
        fields = dict(line.split() for line in lines)
        taken_back = sum(int(fields.get(name, 0)) for name in files.reclaimable)
        found.append(GroupMemory(limit, max(0, usage - taken_back)))
    return min(found, key=lambda group: group.room_bytes, default=None)


def _limited(own: Path, root: Path) -> Iterator[tuple[Path, _Files, int]]:
    """The groups that this process is in and that have a limit."""
    for line in own.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, files = root, _V2
        elif "memory" in controllers.split(","):
            base, files = root / "memory", _V1
        else:
            continue
        relative = Path(group.lstrip("/"))
        for place in (base / relative, *((base / relative).parents)):
            if place != base and base not in place.parents:
                break
            try:
                text = (place / files.limit).read_text().strip()
            except OSError:
                continue  # the root has no such file; nor has a container that sees only its own group
            # Version 1 says "no limit" by a number beyond all memory.
            if text.isdigit() and int(text) < 1 << 60:
                yield place, files, int(text)
