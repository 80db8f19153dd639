"""How many bytes a node may keep on its own disk.

Owns the rule what to leave free, and how nodes that share a disk (several ranks on one machine) share its space. Does
not decide what goes where: placement.py. Used by the session of a mount and by staging. Reading the state of a disk may
block; the rest are pure functions.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Room to leave on the disk: this, or 1 % of it if that is more. Others (logs, the job's own files) need it.
RESERVE_BYTES = 64 << 20
#: The part of what is free that partitions leave to outputs, if programs may write.
OUTPUTS_PART = 10


@dataclass(frozen=True)
class Disk:
    """The disk under ``--local`` of one node, as every node of the job gets to know it.

    Attributes:
        name: the same for two nodes exactly if it is the same file system of the same machine.
        free_bytes: what may still be written to it, without the reserve; never negative.
        capacity_bytes: what the user allows (``--capacity``); None for no limit.
        kept_bytes: besides ``free_bytes``, copies that earlier jobs have kept and that serve this one, or make room.
        directory: where these are: the same for two nodes exactly if it is the same directory.
    """

    name: str
    free_bytes: int
    capacity_bytes: int | None = None
    kept_bytes: int = 0
    directory: str = ""


def survey(directory: Path, capacity_bytes: int | None = None, *, outputs: bool = False, kept_bytes: int = 0) -> Disk:
    """The disk of a directory, which must exist. May block; raises OSError.

    ``outputs``: programs will write to it as well, and a tenth of it is left to them. ``kept_bytes``: of copies in this
    directory that count as room.
    """
    # Host names need not differ between containers, and boot identifiers do not differ between them: what is wanted.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    status = directory.stat()
    room_bytes = max(0, spare_bytes(directory, kept_bytes, outputs=outputs) + kept_bytes)
    kept_bytes = min(kept_bytes, room_bytes)
    name = f"{boot}:{status.st_dev}"
    return Disk(name, room_bytes - kept_bytes, capacity_bytes, kept_bytes, f"{name}:{status.st_ino}")


def spare_bytes(directory: Path, kept_bytes: int = 0, *, outputs: bool = False) -> int:
    """Bytes that are free without the reserve; negative if it is not free now. May block; raises OSError.

    Arguments as for ``survey``.
    """
    usage = os.statvfs(directory)
    total_bytes, free_bytes = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    reserve_bytes = max(RESERVE_BYTES, total_bytes // 100)
    if outputs:
        reserve_bytes += (free_bytes + kept_bytes) // OUTPUTS_PART
    return free_bytes - reserve_bytes


def divide(disks: Sequence[Disk | None]) -> tuple[int, ...]:
    """Bytes that each rank may use, from the disks of all ranks; None (no ``--local``) may use nothing.

    Ranks with the same disk get equal shares of what is free on it, and of kept copies those with the same directory.
    """
    sharers = Counter(disk.name for disk in disks if disk is not None)
    keepers = Counter(disk.directory for disk in disks if disk is not None)
    rooms = []
    for disk in disks:
        if disk is None:
            rooms.append(0)
            continue
        share = disk.free_bytes // sharers[disk.name] + disk.kept_bytes // keepers[disk.directory]
        rooms.append(share if disk.capacity_bytes is None else min(share, disk.capacity_bytes))
    return tuple(rooms)


def room_for(directory: Path, capacity_bytes: int | None = None) -> int:
    """Bytes that a node which has the disk for itself may use. May block; raises OSError."""
    return divide([survey(directory, capacity_bytes)])[0]
