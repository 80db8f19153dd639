"""What it costs to read while others read, too: the shares of PFS, storage and network that each thread gets.

Owns the corrected equations. How many threads are at a resource depends on how long they stay there, which depends on
how many they are: a fixed point. It is followed from iteration to iteration of the job.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fanstore.model.system import System

Floats = npt.NDArray[np.float64]

#: How much of a new number of threads is believed at a time. All of it lets the fixed point swing, since those who see
#: an idle resource all come at once.
_STEP = 0.5


class Contention:
    """Seconds for one MB, for one thread, while others are at work.

    Attributes:
        pfs: by reading node. t(gamma)/gamma is shared by the threads of a node; gamma counts a node for the part of its
            time in which it reads.
        copy: by reading node, holding node and storage class. r_j is shared by all who read from or write to it there,
            the network of a node by all that it sends, and by all that it receives.
        keep: by node and storage class, to write a copy.
    """

    pfs: Floats
    copy: Floats
    keep: Floats

    def __init__(self, system: System) -> None:
        self._system = system
        nodes, classes = system.nodes, len(system.classes)
        # Mean numbers of threads: reading from the PFS; at a storage class; sending; receiving.
        self._at_pfs = np.zeros(nodes)
        self._at_class = np.zeros((nodes, classes))
        self._sending = np.zeros(nodes)
        self._receiving = np.zeros(nodes)
        # Seconds that threads spent since the last call of ``settle``.
        self._pfs_s = np.zeros(nodes)
        self._copy_s = np.zeros((nodes, nodes, classes))
        self._keep_s = np.zeros((nodes, classes))
        self._share()

    def use_pfs(self, node: int, mb: float) -> None:
        """The node has read so much from the PFS."""
        self._pfs_s[node] += mb * self.pfs[node]

    def use_copies(self, node: int, mb: Floats) -> None:
        """The node has read so much, by holder and storage class."""
        self._copy_s[node] += mb * self.copy[node]

    def use_keep(self, node: int, mb: Floats) -> None:
        """The node has written so much to its storage classes."""
        self._keep_s[node] += mb * self.keep[node]

    def settle(self, seconds: float) -> None:
        """That was in ``seconds``: what things cost from now on."""
        if seconds > 0:
            crossing_s = self._copy_s.sum(axis=2)
            np.fill_diagonal(crossing_s, 0.0)
            for threads, spent_s in (
                (self._at_pfs, self._pfs_s),
                (self._at_class, self._copy_s.sum(axis=0) + self._keep_s),
                (self._sending, crossing_s.sum(axis=0)),
                (self._receiving, crossing_s.sum(axis=1)),
            ):
                threads += _STEP * (spent_s / seconds - threads)
            self._share()
        for spent_s in (self._pfs_s, self._copy_s, self._keep_s):
            spent_s[:] = 0.0

    def _share(self) -> None:
        system = self._system
        gamma = float(np.minimum(self._at_pfs, 1.0).sum())
        self.pfs = np.maximum(self._at_pfs, 1.0) / min(system.pfs_network_mb_per_s, float(system.pfs.each(gamma)))
        classes = list(zip(system.classes, self._at_class.T, strict=True))
        read = np.stack([1 / storage.read.each(threads) for storage, threads in classes], axis=1)
        self.keep = np.stack([1 / storage.write.each(threads) for storage, threads in classes], axis=1)
        ends = np.maximum(np.maximum(self._sending, self._receiving[:, np.newaxis]), 1.0) / system.network_mb_per_s
        np.fill_diagonal(ends, 0.0)
        self.copy = np.maximum(read, ends[:, :, np.newaxis])
