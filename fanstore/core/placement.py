"""Which node keeps which partition.

Owns the rule; a pure function of what all nodes know, so every node computes the same without asking anybody. Does not
look at disks (capacity.py) and does not copy (staging.py). Used by the session of a mount, by staging (what to copy)
and by remote.py (whom to ask). Immutable, any thread.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """What is where, or will be once it is staged.

    Attributes:
        partition_bytes: length of each partition.
        holders: per partition the ranks that keep a copy, ascending; empty: it stays on the shared file system.
    """

    partition_bytes: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The partitions that a rank keeps, ascending."""
        return tuple(partition for partition, ranks in enumerate(self.holders) if rank in ranks)

    def bytes_of_rank(self, rank: int) -> int:
        """Bytes of all partitions that a rank keeps."""
        return sum(self.partition_bytes[partition] for partition in self.of_rank(rank))

    def nowhere(self) -> tuple[int, ...]:
        """The partitions that no rank keeps."""
        return tuple(partition for partition, ranks in enumerate(self.holders) if not ranks)

    def staging_order(self, rank: int) -> tuple[int, ...]:
        """The partitions that a rank keeps, in the order in which it should copy them.

        The holders of a partition have it at different places in their order, so that each partition is on some node
        early, and its further copies follow later.
        """

        def turn(partition: int) -> tuple[int, int]:
            ranks = self.holders[partition]
            return (ranks.index(rank) - partition) % len(ranks), partition

        return tuple(sorted(self.of_rank(rank), key=turn))


def place(partition_bytes: Sequence[int], everywhere: Sequence[bool], room: Sequence[int], replicas: int) -> Placement:
    """Decide what is where.

    Partitions for every node come first, on each rank that has room for them. Of the others the largest go first, to
    the ranks that have the fewest bytes so far; then two ranks differ by no more than the largest partition. If not all
    copies fit, there is first one copy of each, then a second one, and so on: a partition that no node has costs more
    than one that only one node has. A rank with no room (0) keeps nothing.

    Args:
        partition_bytes: length of each partition.
        everywhere: whether each partition belongs on every node.
        room: bytes that each rank may use.
        replicas: copies wanted of each partition, on distinct ranks; there are fewer where they do not fit.
    """
    assert len(partition_bytes) == len(everywhere)
    assert replicas >= 1
    copies = min(replicas, sum(limit > 0 for limit in room))
    largest_first = sorted(range(len(partition_bytes)), key=lambda partition: (-partition_bytes[partition], partition))
    spread = [partition for partition in largest_first if not everywhere[partition]]
    plan = _Plan(partition_bytes, room)
    for partition in largest_first:
        if everywhere[partition]:
            plan.add_copies(partition, len(room))
    at_once = plan.copy()
    for partition in spread:
        at_once.add_copies(partition, copies)
    if all(len(at_once.holders[partition]) == copies for partition in spread):
        return at_once.finish()
    for _ in range(copies):
        for partition in spread:
            plan.add_copies(partition, 1)
    return plan.finish()


class _Plan:
    """A placement that is being made.

    Attributes:
        holders: per partition the ranks that have it so far.
        _loads: a heap of (bytes so far, rank) of all ranks with room.
    """

    def __init__(self, partition_bytes: Sequence[int], room: Sequence[int]) -> None:
        self.holders: list[list[int]] = [[] for _ in partition_bytes]
        self._bytes = partition_bytes
        self._room = room
        self._loads = [(0, rank) for rank, limit in enumerate(room) if limit > 0]

    def copy(self) -> "_Plan":
        other = _Plan(self._bytes, self._room)
        other.holders = [list(ranks) for ranks in self.holders]
        other._loads = list(self._loads)
        return other

    def add_copies(self, partition: int, count: int) -> None:
        """Give so many more copies, or fewer, to the least loaded ranks that have none yet and have room."""
        holders = self.holders[partition]
        wanted = len(holders) + count
        size = self._bytes[partition]
        seen = []
        while self._loads and len(holders) < wanted:
            load, rank = heapq.heappop(self._loads)
            if rank not in holders and load + size <= self._room[rank]:
                holders.append(rank)
                load += size
            seen.append((load, rank))
        for item in seen:
            heapq.heappush(self._loads, item)

    def finish(self) -> Placement:
        return Placement(tuple(self._bytes), tuple(tuple(sorted(ranks)) for ranks in self.holders))
