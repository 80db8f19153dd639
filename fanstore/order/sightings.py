"""What was seen of a program's reading: the first files of each reader, as samples of one list order.

A reader is a thread that opens files: a worker of a DataLoader, or one of a pool of threads. Owns the tests whether
readers follow a sequence of samples, and how much must be seen so that this is no chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from fanstore.order.order import Integers, Samples

#: The probability of a wrong finding that is accepted, over everything that is tried.
RISK = 1e-6
#: Files of each reader that are looked at.
_DEPTH = 16
#: Places by which threads of a pool may be ahead of each other.
_POOL_SLACK = 64


@dataclass(frozen=True)
class Seat:
    """Where a reader began: at this position of what its rank reads."""

    reader: int
    rank: int
    position: int


@dataclass(frozen=True)
class Seating:
    """Readers that follow one sequence: how many ranks it was dealt to, in turn, and where the readers are in it.

    A pool of threads has no seats: any of its readers takes the next sample.
    """

    ranks: int
    seats: tuple[Seat, ...]

    @property
    def batch(self) -> int | None:
        """Samples per batch, if several workers were seen: they begin with batches that follow each other."""
        positions = [seat.position for seat in self.seats]
        return gcd(*(position - min(positions) for position in positions)) or None


POOL = Seating(1, ())


class Sightings:
    """The first samples of each reader; files that are not in the list are left out.

    Attributes:
        name: of the list order.
        sample_count: how many files the list has.
        readers: by reader, the numbers of its first files in the list.
    """

    def __init__(self, name: str, listing: Integers, readers: Sequence[Integers]) -> None:
        self.name = name
        self.sample_count = len(listing)
        by_file = np.argsort(listing, kind="stable")
        self.readers: list[Samples] = []
        for files in readers:
            places = np.searchsorted(listing, files, sorter=by_file)
            found = by_file[places[places < len(listing)]]
            self.readers.append(found[listing[found] == files[places < len(listing)]][:_DEPTH])

    def needed(self, tries: float, free: int) -> int:
        """How many samples of a reader must fit so that chance is ruled out, if ``free`` of them may stand anywhere."""
        files = free + 1
        while tries * max(1, len(self.readers)) * float(max(2, self.sample_count)) ** (free - files) > RISK:
            files += 1
        return files

    def begun(self, files: int) -> dict[int, Samples]:
        """The first so many samples of each reader that has read as many."""
        return {reader: seen[:files] for reader, seen in enumerate(self.readers) if len(seen) >= files}

    def seating(self, place_of: Samples, files: int) -> Seating | None:
        """Whether readers follow a sequence in strides, as ranks to which it is dealt in turn do.

        ``place_of``: the place of each sample in the sequence; ``files``: how many of a reader must fit.
        """
        places = {reader: place_of[seen] for reader, seen in self.begun(files).items()}
        strides = {reader: stride(its) for reader, its in places.items()}
        ranks = next((step for step in strides.values() if step), 0)
        if not ranks:
            return None
        begins = {reader: int(places[reader][0]) for reader, step in strides.items() if step == ranks}
        return Seating(ranks, tuple(Seat(reader, begin % ranks, begin // ranks) for reader, begin in begins.items()))

    def pool(self, place_of: Samples, tries: float, mixed: int = 0) -> int | None:
        """How far all readers together are in a sequence, if they are a pool of threads at its beginning; else None.

        ``tries``: sequences that are tried in all; ``mixed``: places by which a later shuffle brings samples forward.
        """
        seen = np.concatenate([np.empty(0, dtype=np.int64), *self.readers])
        window = 2 * len(seen) + _POOL_SLACK + mixed
        chance = min(1.0, window / max(1, self.sample_count)) ** len(seen)
        if tries * chance > RISK:
            return None
        furthest = int(place_of[seen].max())
        return furthest if furthest < window else None


def stride(places: Samples) -> int:
    """The distance of places that ascend evenly; 0 if they do not."""
    steps = np.diff(places)
    return int(steps[0]) if len(steps) and places[0] >= 0 and steps[0] > 0 and (steps == steps[0]).all() else 0


def inverse(sequence: Samples, count: int) -> Samples:
    """The place of each of ``count`` samples in a sequence; -1 for those that are not in it."""
    places = np.full(count, -1)
    places[sequence] = np.arange(len(sequence))
    return places
