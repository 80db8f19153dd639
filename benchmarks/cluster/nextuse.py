"""The most that a host of a cluster can read from what it keeps: its home share, and room that is used by next use.

Owns the calculation for exactly the order of a job; pure. Used by cluster_series.py.
"""

import heapq
import random

from cluster.settings import Settings
from fanstore.order import TorchDistributedSampler


def local_share(settings: Settings, room: float) -> float:
    """Of all reads behind the first epoch; ``room``: part of the dataset that a host may keep besides its home share.

    What is wanted last goes first, and what is wanted later than all that is kept is not kept (Belady's rule).
    """
    chance = random.Random(1)
    sampler = TorchDistributedSampler(settings.files, settings.hosts, settings.seed)
    homes = [number % settings.hosts for number in range(settings.files)]
    chance.shuffle(homes)
    hits = reads = 0
    for rank in range(settings.hosts):
        string = [file for epoch in range(settings.epochs) for file in sampler.samples(epoch, rank).tolist()]
        own = len(string) // settings.epochs
        found = _hits(string, [home == rank for home in homes], round(room * settings.files))
        hits += sum(found[own:])
        reads += len(found) - own
    return hits / max(1, reads)


def _hits(string: list[int], here: list[bool], capacity: int) -> list[bool]:
    next_use: dict[int, int] = {}
    later = [0] * len(string)
    for place in range(len(string) - 1, -1, -1):
        later[place] = next_use.get(string[place], len(string))
        next_use[string[place]] = place
    kept: dict[int, int] = {}
    last: list[tuple[int, int]] = []  # the one wanted last first; entries that are out of date stay
    hits = []
    for file, when in zip(string, later, strict=True):
        hits.append(here[file] or file in kept)
        kept.pop(file, None)
        if here[file] or when == len(string):
            continue
        kept[file] = when
        heapq.heappush(last, (-when, file))
        while len(kept) > capacity:
            use, victim = heapq.heappop(last)
            if kept.get(victim) == -use:
                del kept[victim]
    return hits
