"""How much memory this process may use: that of the machine, or of its control group. Any thread."""

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_bytes() -> int:
    """The memory of this machine, or what the control group of this process may have of it."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = group_limit()
    return physical if limit is None else min(physical, limit)


def group_limit(own: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> int | None:
    """The least limit of the control groups that this process is in, of version 1 or 2; None if there is none."""
    limits = []
    for line in own.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        relative = Path(group.lstrip("/"))
        for place in (base / relative, *((base / relative).parents)):
            if place != base and base not in place.parents:
                break
            try:
                text = (place / file).read_text().strip()
            except OSError:
                continue  # the root has no such file; nor has a container that sees only its own group
            # Version 1 says "no limit" by a number beyond all memory.
            if text.isdigit() and int(text) < 1 << 60:
                limits.append(int(text))
    return min(limits, default=None)
