"""Who has which sample at the beginning: an array that says the rank of each sample.

Owns the ways to make one. Shuffles move ownership from epoch to epoch; the bytes of a sample are where its owner is.
"""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from fanstore.errors import UsageError
from fanstore.order.dealing import to_owners
from fanstore.order.groups import Labels, as_labels, places_within
from fanstore.order.order import Integers


def even_sizes(samples: int, ranks: int) -> Integers:
    """How many each rank gets: as even as can be, the first ones have one more."""
    return samples // ranks + (np.arange(ranks) < samples % ranks)


def even(samples: int, ranks: int) -> Labels:
    """Contiguous shares, the first to rank 0."""
    return as_labels(np.repeat(np.arange(ranks), even_sizes(samples, ranks)), ranks)


def of_nodes(node_of_sample: Integers, ranks_of_node: Sequence[int]) -> Labels:
    """What a node holds is shared evenly among its ranks. Ranks are numbered node by node."""
    if len(node_of_sample) and not 0 <= node_of_sample.min() <= node_of_sample.max() < len(ranks_of_node):
        raise UsageError(f"a sample is on a node that is none of the {len(ranks_of_node)} nodes given")
    held = np.bincount(node_of_sample, minlength=len(ranks_of_node))
    ranks = np.asarray(ranks_of_node, dtype=np.int64)
    if (held[ranks < 1] > 0).any():
        raise UsageError(f"node {int(np.flatnonzero((ranks < 1) & (held > 0))[0])} holds samples but has no rank")
    by_node = np.argsort(node_of_sample, kind="stable")
    owner = np.empty(len(node_of_sample), dtype=np.int64)
    nodes = node_of_sample[by_node]
    owner[by_node] = (np.cumsum(ranks) - ranks)[nodes] + places_within(held) * ranks[nodes] // np.maximum(
        held[nodes], 1
    )
    return as_labels(owner, int(ranks.sum()))


def of_holders(partition: Integers, holders: Sequence[Collection[int]], node_of_rank: Sequence[int]) -> Labels:
    """Each sample to a rank on a node that holds its partition.

    A partition that several nodes hold goes to the one with the least for each of its ranks, those with the fewest
    holders first. Samples that no rank has at hand fill up the ranks that own the least.

    Args:
        partition: of each sample; -1 if it is in none.
        holders: per partition the nodes that have it.
        node_of_rank: where each rank runs; a node may have none.
    """
    nodes = 1 + max(max(each, default=0) for each in (node_of_rank, *holders))
    ranks_of_node = np.bincount(node_of_rank, minlength=nodes)
    ranks = len(node_of_rank)
    samples_of = np.bincount(partition[partition >= 0], minlength=len(holders))
    at_hand = [[node for node in sorted(each) if ranks_of_node[node]] for each in holders]
    node_of_partition = np.full(len(holders) + 1, -1)  # the last one: no partition
    load = np.zeros(nodes)  # samples for each rank of the node
    for number in sorted(range(len(holders)), key=lambda number: (len(at_hand[number]), -samples_of[number], number)):
        if at_hand[number]:
            node = min(at_hand[number], key=lambda node: load[node])
            load[node] += samples_of[number] / ranks_of_node[node]
            node_of_partition[number] = node
    node_of_sample = node_of_partition[partition]
    held = node_of_sample >= 0
    owner = np.empty(len(partition), dtype=np.int64)
    node_by_node = np.argsort(node_of_rank, kind="stable")
    owner[held] = node_by_node[of_nodes(node_of_sample[held], ranks_of_node.tolist())]
    owned = np.bincount(owner[held], minlength=ranks)
    lacking = np.repeat(np.arange(ranks), np.maximum(even_sizes(len(partition), ranks) - owned, 0))
    owner[~held] = lacking[: np.count_nonzero(~held)]  # what others own too much is lacking as well
    return as_labels(owner, ranks)


def balanced(owner: Labels, ranks: int) -> Labels:
    """As even as can be: ranks that own more than their share leave the last of it to those that own less."""
    return to_owners(owner, even_sizes(len(owner), ranks), None)


def checked(ownership: npt.ArrayLike, samples: int, ranks: int) -> Labels:
    """An ownership that somebody gave."""
    owner = np.asarray(ownership)
    if owner.shape != (samples,) or (samples and not np.issubdtype(owner.dtype, np.integer)):
        raise UsageError(f"'ownership' must be an array of {samples} integers, the rank of each sample")
    if samples and not 0 <= owner.min() <= owner.max() < ranks:
        raise UsageError(f"'ownership' names a rank that is not among the {ranks} ranks of this order")
    return as_labels(owner, ranks)
