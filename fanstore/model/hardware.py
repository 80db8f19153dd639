"""How much hardware it takes to keep GPUs busy: disks, network interfaces, processor cores.

Owns the rates and the tables of NVIDIA's talk "Large scale deep learning": bytes go from storage, perhaps over a
network, to processor cores, which decompress and prepare them, and to GPUs; the weakest link decides.
Rates are GB/s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fanstore.errors import UsageError
from fanstore.model.flow import Flow, max_flow

#: GB/s of one of each. A GPU computes on uncompressed bytes; a core reads compressed ones and writes uncompressed ones.
RATES = {
    "ssd": 0.4,
    "hd-random": 0.02,
    "hd-sequential": 0.2,
    "interface": 5.0,
    "core-in": 0.025,
    "core-out": 0.1,
    "gpu-in": 1.0,
    "gpu": 0.3,
}
#: Compression of the talk: 4:1.
COMPRESSION = 4.0

#: Rounding must not ask for one more.
_HAIR = 1e-9


@dataclass(frozen=True)
class Setup:
    """A way from storage to GPUs.

    Attributes:
        storage: what the bytes are on, a key of ``RATES``.
        network: storage is not in the node.
        compressed: until the cores.
        gpus: for how many the talk has figures.
    """

    title: str
    storage: str
    network: bool
    compressed: bool
    gpus: Sequence[int]


SETUPS = {
    "local": Setup("local SSDs, compressed", "ssd", False, True, (1, 4, 8, 16)),
    "nfs": Setup("NFS on hard disks, compressed", "hd-random", True, True, (1, 4, 8, 16, 64, 256)),
    "nfs-uncompressed": Setup("NFS on hard disks, uncompressed", "hd-random", True, False, (1, 4, 8, 16, 64, 256)),
    "object-store": Setup("object store, uncompressed", "hd-sequential", True, False, (1, 4, 8)),
}


@dataclass(frozen=True)
class Hardware:
    """What is needed for so many GPUs; ``stored_gb_per_s`` is what storage must give, compressed or not."""

    gpus: int
    stored_gb_per_s: float
    storage: int
    interfaces: int
    cores: int


def needed(setup: Setup, gpus: int, rates: Mapping[str, float] = RATES, compression: float = COMPRESSION) -> Hardware:
    """The fewest of everything that keep the GPUs busy; 0 for what is not on the way."""
    for name, rate in rates.items():
        if not (rate > 0 and math.isfinite(rate)):
            raise UsageError(f"the rate '{name}' is {rate} GB/s; it must be above 0")
    if not (compression >= 1 and math.isfinite(compression)):
        raise UsageError(f"the compression is {compression}; it must be 1 or more")
    if gpus < 1:
        raise UsageError(f"there are {gpus} GPUs to be fed; there must be at least 1")
    computed = gpus * rates["gpu"]
    stored = computed / compression if setup.compressed else computed
    return Hardware(
        gpus=gpus,
        stored_gb_per_s=stored,
        storage=fewest(stored, rates[setup.storage]),
        interfaces=fewest(stored, rates["interface"]) if setup.network else 0,
        cores=max(fewest(stored, rates["core-in"]), fewest(computed, rates["core-out"])) if setup.compressed else 0,
    )


def fewest(wanted: float, of_one: float) -> int:
    """How many of a kind give what is wanted; at least one."""
    return max(1, math.ceil(wanted / of_one - _HAIR))


def datapath(
    setup: Setup, hardware: Hardware, rates: Mapping[str, float] = RATES, compression: float = COMPRESSION
) -> Flow:
    """What this hardware brings to the GPUs and through them, in GB/s of uncompressed bytes, and what limits it."""
    expand = compression if setup.compressed else 1.0
    counts = {"storage": hardware.storage, "interfaces": hardware.interfaces, "cores": hardware.cores}
    each = {
        "storage": rates[setup.storage] * expand,
        "interfaces": rates["interface"] * expand,
        "cores": min(rates["core-in"] * expand, rates["core-out"]),
    }
    capacity: dict[tuple[str, str], float] = {}
    place = "data"
    for name, count in counts.items():
        if count:
            capacity[place, name] = count * each[name]
            place = name
    for gpu in range(hardware.gpus):
        capacity[place, f"GPU {gpu}"] = rates["gpu-in"]
        capacity[f"GPU {gpu}", "trained"] = rates["gpu"]
    return max_flow(capacity, "data", "trained")


def time_for(gigabytes: float, gb_per_s: float) -> str:
    """How long it takes to read so much, as the talk says it: ``9 h``, ``2 days``, ``2 weeks``."""
    if not gb_per_s > 0:
        raise UsageError(f"the rate is {gb_per_s} GB/s; it must be above 0")
    hours = gigabytes / gb_per_s / 3600
    for unit, length in (("week", 7 * 24), ("day", 36)):  # below a day and a half, hours say more
        if hours >= length:
            count = round(hours / (7 * 24 if unit == "week" else 24))
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return f"{hours:.0f} h"
