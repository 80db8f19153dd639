"""How fast bytes can come: from the disk, and over the network. What ``--codec auto`` compares decompression with.

The disk is timed by chooser.py while it reads its sample; here is the network's share, which is what the kernel says of
the fastest link that is up: one process cannot time a network. fanstore-prep often runs on a login node, whose disk and
links are not those of the nodes: FANSTORE_RATES says what is true there, and nothing is measured then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fanstore.errors import UsageError
from fanstore.units import parse_size

VARIABLE = "FANSTORE_RATES"
_EXAMPLE = f"{VARIABLE}=disk=3GB,network=12GB (bytes per second)"


def format_rate(bytes_per_s: float) -> str:
    """As data sheets of disks and links say it: ``1.25 GB/s``."""
    return f"{bytes_per_s / 1e9:.{2 if bytes_per_s < 10e9 else 0}f} GB/s"


@dataclass(frozen=True)
class Rate:
    """Bytes per second of something, and how that is known."""

    of: str  #: "disk" or "network"
    bytes_per_s: float
    how: str

    def __str__(self) -> str:
        way = "from the disk" if self.of == "disk" else "over the network"
        return f"{way} at {format_rate(self.bytes_per_s)} ({self.how})"


def stated_rates() -> list[Rate]:
    """What the user says of the nodes; an empty list if nothing is said. Raises UsageError."""
    rates: list[Rate] = []
    for item in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, size = item.partition("=")
        try:
            bytes_per_s = parse_size(size)
        except UsageError:
            bytes_per_s = 0
        if name not in ("disk", "network") or bytes_per_s == 0:
            raise UsageError(f"'{item}' in {VARIABLE} is not understood; write it like {_EXAMPLE}")
        rates.append(Rate(name, bytes_per_s, f"stated in {VARIABLE}"))
    return rates


def link_rate(classes: Path = Path("/sys/class")) -> Rate | None:
    """The fastest network link of this machine that is up; None if the kernel does not know of any."""
    bits_per_s = max([*_ethernet(classes / "net"), *_infiniband(classes / "infiniband")], default=0)
    return Rate("network", bits_per_s / 8, "the speed of its link") if bits_per_s else None


def _ethernet(net: Path) -> Iterator[int]:
    for interface in net.glob("*"):
        # Without a device it is virtual, and its speed means nothing.
        if (interface / "device").exists() and _text(interface / "operstate") == "up":
            speed = _text(interface / "speed")
            if speed.isdecimal():  # -1: not known
                yield int(speed) * 10**6


def _infiniband(infiniband: Path) -> Iterator[int]:
    for port in infiniband.glob("*/ports/*"):
        gigabits = re.match(r"(\d+)(?:\.\d+)? Gb/sec", _text(port / "rate"))
        if gigabits is not None and _text(port / "state").endswith("ACTIVE"):
            yield int(gigabits[1]) * 10**9


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a link that is down has no speed to read
        return ""
