"""How much of what a node reads is in its memory: least recently used, and at best, by next use.

Each epoch is a new random permutation, of which a node reads an Nth. Pure; figures depend on the number of nodes and on
how much of the dataset fits, not on the dataset.
"""

from __future__ import annotations

import functools
import heapq
import math

import numpy as np

#: Places within an epoch that are looked at, along each side of a square.
_GRID = 200
#: Less likely than this is never.
_NEVER = 1e-4
#: The sampled order: so many samples, at most so many epochs.
_SAMPLES, _EPOCHS = 1_600, 90


def seen(nodes: int, epochs: int) -> float:
    """The part of the dataset that a node has read in so many epochs."""
    return 1.0 - (1.0 - 1.0 / nodes) ** epochs


def seen_again(nodes: int, moved: float, epochs: float) -> float:
    """The chance that a sample which comes to a node was there in so many epochs before, if such a part of all samples
    moves in each, to any other node."""
    return 1.0 - math.pow(1.0 - min(1.0, moved / (nodes - 1)), epochs)


def lru_hits(nodes: int, share: float) -> float:
    """The part of reads that a cache for ``share`` of the dataset answers once it is full, if what was not read for
    longest goes first. (Until then it cannot be more than what was ``seen``.)

    A sample was read at place u of one epoch, and is read again at place v, g epochs later. In between a part
    (1 - (1-u)/N) (1 - v/N) (1 - 1/N)^(g-1) of all samples was not read; it is still there if that is 1 - share or more.
    """
    if share >= 1:
        return 1.0
    if share <= 0:
        return 0.0
    place = (np.arange(_GRID) + 0.5) / _GRID
    unread = (1 - (1 - place[:, np.newaxis]) / nodes) * (1 - place / nodes)
    hits, weight, left = 0.0, 1 / nodes, 1.0
    while weight > _NEVER / nodes and (there := float((unread * left >= 1 - share).mean())) > 0:
        hits += weight * there
        weight *= 1 - 1 / nodes
        left *= 1 - 1 / nodes
    return hits


@functools.lru_cache(maxsize=512)
def next_use_hits(nodes: int, share: float, epochs: int) -> float:
    """The same if the one goes first that is wanted last, and one that is not wanted again is not kept: the best that
    any cache can do. Sampled; of all reads behind the first epoch."""
    epochs = min(epochs, _EPOCHS)
    if share <= 0 or epochs < 2:
        return 0.0
    random = np.random.default_rng(7)
    own = max(1, _SAMPLES // nodes)
    samples = own * nodes
    reads = np.concatenate([random.permutation(samples)[:own] for _ in range(epochs)])
    next_use = np.full(len(reads), len(reads))
    later_read: dict[int, int] = {}
    for place in range(len(reads) - 1, -1, -1):
        next_use[place] = later_read.get(int(reads[place]), len(reads))
        later_read[int(reads[place])] = place
    capacity = round(share * samples)
    wanted: dict[int, int] = {}  # what is kept, and when it is wanted next
    last: list[tuple[int, int]] = []  # the same, the one wanted last first; entries that are out of date stay
    hits = 0
    for sample, later in zip(reads.tolist(), next_use.tolist(), strict=True):
        hits += sample in wanted
        wanted.pop(sample, None)
        if later == len(reads):
            continue
        wanted[sample] = later
        heapq.heappush(last, (-later, sample))
        while len(wanted) > capacity:
            when, victim = heapq.heappop(last)
            if wanted.get(victim) == -when:
                del wanted[victim]
    return hits / (len(reads) - own)
