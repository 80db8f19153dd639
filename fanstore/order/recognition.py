"""Recognising the order of a program from the first files that its readers open: usual orders with usual seeds.

Owns what is tried, and in which sequence: lists that are not shuffled; torch, with many seeds; lists that numpy,
``random`` or Keras shuffled, with a few. All 2^32 seeds of torch are in ``torchsearch.py``. Pure: whoever sees files
being opened calls it, at low priority.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fanstore.order.accelerate import AccelerateShards
from fanstore.order.finding import Finding
from fanstore.order.keras import KerasFlow, KerasImageDataset
from fanstore.order.order import Integers, Order, Samples
from fanstore.order.permutation import RANDPERM_LIMIT, LeadingPlaces
from fanstore.order.pytorch import TorchDistributedSampler
from fanstore.order.seeded import Library, SeededShuffle
from fanstore.order.seeds import FEW_SEEDS, MANY_SEEDS
from fanstore.order.sightings import POOL, Sightings, inverse, stride
from fanstore.order.torchsearch import BASE_SEED, torch_finding
from fanstore.order.twister import Twister

#: Places at the beginning of a permutation of torch in which readers are looked for: each rank's first worker is there.
_LEADING = 4096
#: Seeds of torch between two pauses: some 10 ms.
_SEEDS_AT_ONCE = 200
_LIBRARIES: tuple[Library, ...] = ("RandomState", "default_rng", "random")
#: Batches that are tried where Keras shuffles with a buffer of 8 batches.
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100, 128, 256)
_LONGEST_BUFFER = 8 * _BATCHES[-1]


def recognise(listings: Mapping[str, Integers], readers: Sequence[Integers]) -> Iterator[Finding | None]:
    """Yields what is found, and None after every some 10 ms of work, so that the caller can pause or stop. Ends when
    all readers are explained, or everything was tried.

    ``listings``: by name, the files as a program may have listed them (``listing.LISTINGS``). ``readers``: the files
    that each reader opened, first to last.
    """
    unexplained = {reader for reader, files in enumerate(readers) if len(files)}
    tried: list[Integers] = []
    for name, listing in listings.items():
        if any(np.array_equal(listing, other) for other in tried):
            continue
        tried.append(listing)
        sightings = Sightings(name, listing, readers)
        for attempt in (_unshuffled, _torch, _shuffled):
            for finding in attempt(sightings, float(len(listings))):
                if finding is None:
                    yield None
                    continue
                explained = {seat.reader for seat in finding.seating.seats} or unexplained
                if explained & unexplained:
                    unexplained -= explained
                    yield finding
                if not unexplained:
                    return


def _unshuffled(sightings: Sightings, listings: float) -> Iterator[Finding | None]:
    """The list as it is, dealt to ranks: validation sets, most often."""
    count = sightings.sample_count
    seating = sightings.seating(np.arange(count), sightings.needed(listings, 2))
    if seating is not None:
        order = TorchDistributedSampler(count, seating.ranks, shuffle=False)
        yield Finding(sightings.name, "sequential", None, (order,), seating)


def _torch(sightings: Sightings, listings: float) -> Iterator[Finding | None]:
    """Each seed by the leading places of its permutation; the whole permutation only where readers were found there."""
    count = sightings.sample_count
    needed = sightings.needed(listings * len(MANY_SEEDS) * 2, 2)
    begun = list(sightings.begun(needed).values())
    if not begun or count >= RANDPERM_LIMIT:
        return
    wanted = inverse(np.concatenate(begun), count)  # in rows, one for each reader
    leading = LeadingPlaces(count, _LEADING)
    twister = Twister.torch(0)
    for number, seed in enumerate(MANY_SEEDS):
        twister.seed_torch(seed)
        draws = twister.draw(_LEADING + BASE_SEED)
        for skipped in (0, BASE_SEED):
            found = wanted[leading(draws[skipped : skipped + _LEADING])]
            if np.count_nonzero(found >= 0) >= needed and _has_stride(found, len(begun), needed):
                yield torch_finding(sightings, seed, skipped, needed)
        if number % _SEEDS_AT_ONCE == 0:
            yield None


def _has_stride(found: Samples, readers: int, needed: int) -> bool:
    """Whether all samples of a reader were found at places that ascend evenly."""
    places = np.full(readers * needed, -1)
    places[found[found >= 0]] = np.flatnonzero(found >= 0)
    return any(row.min() >= 0 and stride(row) for row in places.reshape(readers, needed))


def _shuffled(sightings: Sightings, listings: float) -> Iterator[Finding | None]:
    """Lists that a script or Keras has shuffled, read by workers or by a pool of threads."""
    count = sightings.sample_count
    tries = listings * len(FEW_SEEDS) * len(_LIBRARIES) * len(_BATCHES)
    needed = sightings.needed(tries, 2)
    for library in _LIBRARIES:
        for seed in FEW_SEEDS:
            place_of = inverse(SeededShuffle(count, seed, library).samples(0), count)
            seating = sightings.seating(place_of, needed)
            if seating is not None:
                orders = tuple(AccelerateShards(order, seating.ranks, 1) for order in _scripts(count, seed, library))
                yield Finding(sightings.name, library, seed, orders, seating)
            elif sightings.pool(place_of, tries, _LONGEST_BUFFER) is not None:
                yield _pooled(sightings, seed, library, tries)
            yield None


def _scripts(count: int, seed: int, library: Library) -> list[Order]:
    """What may come in later epochs, after a list was shuffled."""
    orders: list[Order] = [SeededShuffle(count, seed, library, epochs) for epochs in ("same", "permuted", "shuffled")]
    if library == "RandomState":
        orders += [KerasFlow(count, seed, batch) for batch in _BATCHES]
    return orders


def _pooled(sightings: Sightings, seed: int, library: Library, tries: float) -> Finding | None:
    """Keras shuffles as RandomState does, and in a dataset once more, with a buffer of batches. Those orders are the
    likeliest of which least had to be read to see what was seen."""
    count = sightings.sample_count
    orders = _scripts(count, seed, library)
    if library == "RandomState":
        orders += [KerasImageDataset(count, seed, batch) for batch in _BATCHES]
    reached = [(sightings.pool(inverse(order.samples(0), count), tries), order) for order in orders]
    fitting = sorted(((far, order) for far, order in reached if far is not None), key=lambda pair: pair[0])
    return Finding(sightings.name, library, seed, tuple(order for _, order in fitting), POOL) if fitting else None
