"""Dealing a sequence of samples to ranks.

Owns the three ways: in blocks, and, so that each rank gets its number of them, one by one or to those that have the
samples already.
"""

import numpy as np

from fanstore.order.groups import Labels, as_labels, places_within
from fanstore.order.order import Integers, Samples


def in_blocks(sequence: Samples, block: int, ranks: int, rank: int) -> Samples:
    """What a rank gets: of each ``ranks`` blocks its own, and its part of what is left at the end."""
    whole = len(sequence) // (block * ranks) * block * ranks
    blocks = sequence[:whole].reshape(-1, ranks, block)[:, rank].reshape(-1)
    return np.concatenate([blocks, sequence[whole:][rank * block : (rank + 1) * block]])


def in_turn(sizes: Integers) -> Labels:
    """The rank for each place of a sequence: one sample to each rank that has not all it gets, again and again."""
    ranks = as_labels(np.repeat(np.arange(len(sizes)), sizes), len(sizes))
    rounds = as_labels(places_within(sizes), int(np.max(sizes, initial=0)))
    return ranks[np.argsort(rounds, kind="stable")]


def to_owners(owners: Labels, sizes: Integers, batch: int | None) -> Labels:
    """The rank for each place of a sequence whose samples have these owners.

    The sequence is cut into global batches, each of ``batch`` samples for every rank (None: one for everything). In
    a batch each rank gets as many as in turn, first of its own; what an owner has too many goes to ranks that have too
    few. So batches have the same samples as if they had been dealt in turn.
    """
    ranks = len(sizes)
    turns = np.repeat(np.arange(ranks), sizes)
    batches = places_within(sizes) // batch if batch else np.zeros(len(turns), dtype=np.int64)
    count = int(batches.max(initial=-1)) + 1
    quota = np.bincount(batches * ranks + turns, minlength=count * ranks)  # of each rank in each batch
    batch_of_place = np.repeat(np.arange(count), quota.reshape(count, ranks).sum(axis=1))

    group = batch_of_place * ranks + owners
    by_group = np.argsort(group, kind="stable")
    owned = np.bincount(group, minlength=count * ranks)
    surplus = np.sort(by_group[places_within(owned) >= np.repeat(quota, owned)])
    lacking = np.repeat(np.arange(count * ranks), np.maximum(quota - owned, 0)) % ranks
    # Both ascend by batch, and in each batch there are as many places too many as too few.
    dealt = owners.copy()
    dealt[surplus] = lacking
    return dealt
