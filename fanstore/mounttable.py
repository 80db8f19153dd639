"""The kernel's table of mounts, as this process sees it.

Owns the reading of ``/proc/self/mountinfo`` and nothing else: it never touches a mounted file system, so that a dead
or silent one cannot hold it up. Used by every part that looks at mounts or compares paths, on any thread.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: The type under which the kernel lists our mounts: ``fuse`` and the mount option ``subtype``.
SUBTYPE = "fanstore"
FILESYSTEM_TYPE = f"fuse.{SUBTYPE}"

_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One line of the table.

    Attributes:
        point: where it is mounted, absolute, without symbolic links.
        device: ``major:minor`` of its super block; two mounts of FanStore never share it.
        kind: file system type, such as ``ext4`` or ``fuse.fanstore``.
        source: what is mounted; for FanStore the prepared dataset.
        owner: user who mounted it, for a FUSE file system; otherwise None.
        root: the directory of the file system that appears at ``point``; another one than ``/`` in a bind mount.
    """

    point: Path
    device: str
    kind: str
    source: str
    owner: int | None
    root: Path

    @property
    def is_fanstore(self) -> bool:
        return self.kind == FILESYSTEM_TYPE


def read_mounts(table: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """All mounts, in the kernel's order: of two at the same point the later one lies on top."""
    return [_parse(line) for line in table.read_bytes().splitlines()]


def find_mount(point: Path) -> Mount | None:
    """What is mounted at exactly this absolute path: the topmost mount, or None."""
    return topmost().get(point)


def topmost() -> dict[Path, Mount]:
    """By mount point what is to be seen there: the topmost mount."""
    return {mount.point: mount for mount in read_mounts()}


def mount_holding(path: Path, table: Mapping[Path, Mount] | None = None) -> Mount | None:
    """The mount on which this absolute path without symbolic links lies; ``table`` is what topmost() has returned."""
    table = topmost() if table is None else table
    return next((table[each] for each in (path, *path.parents) if each in table), None)


def mounts_below(point: Path) -> list[Mount]:
    """Mounts on directories inside this one; they keep it busy."""
    return [mount for mount in read_mounts() if point in mount.point.parents]


def _parse(line: bytes) -> Mount:
    # man 5 proc_pid_mountinfo: "id parent major:minor root point options [optional...] - kind source super_options"
    fields = line.split(b" ")
    separator = fields.index(b"-", 6)
    kind, source, options = fields[separator + 1 : separator + 4]
    return Mount(
        point=Path(_unescape(fields[4])),
        device=fields[2].decode("ascii"),
        kind=_unescape(kind),
        source=_unescape(source),
        owner=_owner(options),
        root=Path(_unescape(fields[3])),
    )


def _unescape(field: bytes) -> str:
    """The kernel writes blank, tab, newline and backslash as three octal digits."""
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))


def _owner(options: bytes) -> int | None:
    for option in options.split(b","):
        name, _, value = option.partition(b"=")
        if name == b"user_id" and value.isdigit():
            return int(value)
    return None
