"""What a policy decides: which samples each node keeps, in which sequence they are loaded, and where its staging buffer
is filled from.

Owns the words in which that is said. A plan says nothing of time; simulations (``published``, ``corrected``) drive it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from fanstore.model.job import Access
from fanstore.model.system import System
from fanstore.order.order import Integers


class Source(Enum):
    """Where the bytes of a sample come from."""

    LOCAL = "local"
    REMOTE = "remote"
    PFS = "pfs"


@dataclass(frozen=True, eq=False)
class Load:
    """Samples that a node copies into its storage classes, in this sequence.

    Attributes:
        samples: their numbers, none of them twice.
        storage_class: where each of them goes.
        threads: how many take turns.
    """

    samples: Integers
    storage_class: npt.NDArray[np.uint8]
    threads: int
    source: Source = Source.PFS

    @classmethod
    def into(cls, system: System, j: int, samples: Integers, source: Source = Source.PFS) -> Load:
        """All into one class, with the threads of that class."""
        return cls(samples, np.full(len(samples), j, dtype=np.uint8), system.classes[j].threads, source)


@dataclass(frozen=True)
class Staging:
    """How staging buffers are filled ahead of the reads, in the sequence of the reads.

    A copy is used if its source is among ``sources``, the fastest first. If the PFS is, too, it gives what has no copy,
    and unless ``waits`` also what it gives faster, and what is not loaded yet. A sample that neither a copy nor the PFS
    may give is left out, and read when it is needed.

    ``by_window``: how far ahead is what the window of FanStore's prefetcher says, the same object (in the corrected
    mode; as published, all policies have the staging buffer of the thesis).
    """

    sources: frozenset[Source]
    waits: bool = False
    by_window: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """The decisions of a policy for one job.

    Attributes:
        access: what each node reads; a policy may replace the order of the job.
        loads: of each node, side by side; but loads from other nodes begin when those from the PFS have ended.
        preloads: training begins when everything is loaded.
        staging: None if there is no staging buffer: each sample is read from the PFS when it is needed.
        ideal: every sample is there before it is needed. No policy can do that: it is the lower bound.
    """

    access: Access
    loads: tuple[tuple[Load, ...], ...] = ()
    preloads: bool = False
    staging: Staging | None = None
    ideal: bool = False
