"""The machine of the performance model: nodes with storage classes, a network, and a parallel file system (PFS).

Owns the parameters of section 3.1.1 of the thesis (docs/model.md). All rates are MB/s, 1 MB = 10^6 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from fanstore.errors import UsageError
from fanstore.model.curve import Curve

#: Number of the staging buffer among the storage classes; copies are kept in the classes behind it.
STAGING = 0

#: What a request to another node or to the PFS costs besides its bytes: one remote file at a time, measured on the
#: cluster in a box (benchmarks/results/remote-reads.md). Only the corrected mode has it.
REQUEST_S = 130e-6


@dataclass(frozen=True)
class StorageClass:
    """Storage of one kind in every node: j in the thesis."""

    name: str
    capacity_mb: float  #: d_j
    threads: int  #: p_j, threads that fetch into it
    read: Curve  #: r_j(p)
    write: Curve  #: w_j(p)

    def __post_init__(self) -> None:
        if not (self.capacity_mb >= 0 and math.isfinite(self.capacity_mb)):
            raise UsageError(
                f"storage class '{self.name}' has a capacity of {self.capacity_mb} MB; it must be 0 or more"
            )
        if self.threads < 1:
            raise UsageError(f"storage class '{self.name}' has {self.threads} threads; it needs at least 1")


@dataclass(frozen=True)
class System:
    """All nodes are alike. ``classes[0]`` is the staging buffer; the others keep copies, the fastest first."""

    nodes: int  #: N
    compute_mb_per_s: float  #: c
    preprocess_mb_per_s: float  #: beta, of one thread
    network_mb_per_s: float  #: b_c, of one node
    pfs_network_mb_per_s: float  #: b_fs, of one node
    pfs: Curve  #: t(gamma)
    classes: tuple[StorageClass, ...]
    request_s: float = REQUEST_S

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UsageError(f"a system of {self.nodes} nodes cannot run anything; it needs at least 1")
        if not self.classes:
            raise UsageError("there is no storage class; the first one is the staging buffer")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("mb_per_s") and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"'{field.name}' is {value}; it must be above 0")
        if not (self.request_s >= 0 and math.isfinite(self.request_s)):
            raise UsageError(f"'request_s' is {self.request_s}; it must be 0 or more")

    @property
    def staging(self) -> StorageClass:
        return self.classes[STAGING]

    @property
    def keeping(self) -> range:
        """Numbers of the classes that keep copies."""
        return range(STAGING + 1, len(self.classes))

    @property
    def room_mb(self) -> float:
        """What a node can keep: D in the thesis."""
        return sum(self.classes[j].capacity_mb for j in self.keeping)
