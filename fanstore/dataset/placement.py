"""Which node keeps which partition.

Owns the rule, at the start (``place``) and after a death (``restore``); pure functions of what all nodes know, so every
node computes the same without asking anybody. Does not look at disks (capacity.py) and does not copy (staging.py,
restoring.py). Used by the session of a mount, by staging (what to copy), by remote.py (whom to ask) and by copies.py
(what to copy again). Immutable, any thread.
"""

import heapq
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from fanstore.units import format_bytes


@dataclass(frozen=True)
class Placement:
    """What is where, or will be once it is staged, and what was asked for.

    Attributes:
        partition_bytes: length of each partition.
        holders: per partition the ranks that keep a copy, ascending; empty: it stays on the shared file system.
        everywhere, room, replicas: as for ``place``.
        held: per partition those of the holders that had it before, ascending.
    """

    partition_bytes: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    everywhere: tuple[bool, ...]
    room: tuple[int, ...]
    replicas: int
    held: tuple[tuple[int, ...], ...]

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The partitions that a rank keeps, ascending."""
        return tuple(partition for partition, ranks in enumerate(self.holders) if rank in ranks)

    def bytes_of_rank(self, rank: int) -> int:
        """Bytes of all partitions that a rank keeps."""
        return sum(self.partition_bytes[partition] for partition in self.of_rank(rank))

    def to_copy(self, rank: int) -> tuple[int, ...]:
        """The partitions that a rank keeps and did not have before, ascending."""
        return tuple(partition for partition in self.of_rank(rank) if rank not in self.held[partition])

    def nowhere(self) -> tuple[int, ...]:
        """The partitions that no rank keeps."""
        return tuple(partition for partition, ranks in enumerate(self.holders) if not ranks)

    def describe_nowhere(self) -> str:
        """Half a sentence about them."""
        nowhere = self.nowhere()
        size = format_bytes(sum(self.partition_bytes[partition] for partition in nowhere))
        return f"{len(nowhere)} of {len(self.holders)} partitions ({size}) do not fit on local disks"

    def staging_order(self, rank: int) -> tuple[int, ...]:
        """The partitions that a rank keeps, in the order in which it should copy them.

        The holders of a partition have it at different places in their order, so that each partition is on some node
        early, and its further copies follow later.
        """

        def turn(partition: int) -> tuple[int, int]:
            ranks = self.holders[partition]
            return (ranks.index(rank) - partition) % len(ranks), partition

        return tuple(sorted(self.of_rank(rank), key=turn))


def place(
    partition_bytes: Sequence[int],
    everywhere: Sequence[bool],
    room: Sequence[int],
    replicas: int,
    held: Sequence[Collection[int]] = (),
) -> Placement:
    """Decide what is where.

    Partitions for every node come first, on each rank that has room for them. Of the others the largest go first, to
    the ranks that have the fewest bytes so far; then two ranks differ by no more than the largest partition. If not all
    copies fit, there is first one copy of each, then a second one, and so on: a partition that no node has costs more
    than one that only one node has. A rank with no room (0) keeps nothing.

    A rank that has a partition already is preferred, as long as it is not loaded by more than the largest partition
    above its share: that much the rule above allows, and so a job of the same shape finds everything where it was,
    while one on more nodes is balanced again.

    Args:
        partition_bytes: length of each partition.
        everywhere: whether each partition belongs on every node.
        room: bytes that each rank may use.
        replicas: copies wanted of each partition, on distinct ranks; there are fewer where they do not fit.
        held: per partition the ranks that have it already; none at all if it is empty.
    """
    assert len(partition_bytes) == len(everywhere)
    assert replicas >= 1
    held = held or [()] * len(partition_bytes)
    plan = _Plan(partition_bytes, room)
    if any(held):
        plan = _Plan(partition_bytes, room, _stay(plan, everywhere, replicas, held))
    plan = _fill(plan, everywhere, replicas)
    holders = tuple(tuple(sorted(ranks)) for ranks in plan.holders)
    stayed = tuple(tuple(rank for rank in ranks if rank in had) for ranks, had in zip(holders, held, strict=True))
    return Placement(tuple(partition_bytes), holders, tuple(everywhere), tuple(room), replicas, stayed)


def restore(
    placement: Placement, copies: Sequence[Collection[int]], lost: Container[int], barred: Container[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    """Per partition the ranks that are to copy it so that there are as many copies as was asked for; ascending.

    By the rule of ``place``, from what there is. Two nodes that know of the same deaths agree on who copies what while
    there is room enough, also if one of them has heard already what some ranks have taken upon themselves: a rank that
    has its whole share from the beginning is never less loaded than it was when others were preferred to it.

    Args:
        placement: what was decided at the start.
        copies: per partition the ranks alive that have it, or have taken it upon themselves to copy it.
        lost: ranks that are dead.
        barred: (rank, partition) that cannot be.
    """
    room = [0 if rank in lost else limit for rank, limit in enumerate(placement.room)]
    plan = _fill(_Plan(placement.partition_bytes, room, copies, barred), placement.everywhere, placement.replicas)
    return tuple(tuple(sorted(set(ranks).difference(had))) for ranks, had in zip(plan.holders, copies, strict=True))


def _fill(plan: "_Plan", everywhere: Sequence[bool], replicas: int) -> "_Plan":
    """As ``place`` says, with the copies that there are in the plan."""
    copies = min(replicas, plan.able)
    largest_first = plan.largest_first()
    spread = [partition for partition in largest_first if not everywhere[partition]]
    for partition in largest_first:
        if everywhere[partition]:
            plan.fill(partition, plan.able)
    at_once = plan.copy()
    for partition in spread:
        at_once.fill(partition, copies)
    if all(len(at_once.holders[partition]) >= copies for partition in spread):
        return at_once
    for count in range(1, copies + 1):
        for partition in spread:
            plan.fill(partition, count)
    return plan


def _stay(plan: "_Plan", everywhere: Sequence[bool], replicas: int, held: Sequence[Collection[int]]) -> list[list[int]]:
    """Per partition the ranks where it stays because it is there; with those for every node everywhere."""
    for partition in plan.largest_first():
        if everywhere[partition]:
            plan.fill(partition, plan.able)
    loads = plan.loads()
    spread = [partition for partition in plan.largest_first() if not everywhere[partition]]
    sizes = plan.partition_bytes
    wanted = sum(loads.values()) + min(replicas, plan.able) * sum(sizes[partition] for partition in spread)
    limit = _level(wanted, [plan.room[rank] for rank in loads]) + max((sizes[p] for p in spread), default=0)
    for partition in spread:
        for rank in sorted((rank for rank in held[partition] if rank in loads), key=lambda rank: (loads[rank], rank)):
            load = loads[rank] + sizes[partition]
            if len(plan.holders[partition]) < replicas and load <= min(limit, plan.room[rank]):
                plan.holders[partition].append(rank)
                loads[rank] = load
    return plan.holders


def _level(total: int, rooms: Sequence[int]) -> int:
    """How much each of these ranks has if the total is shared equally, as far as there is room; rounded up."""
    left = total
    for count, room in zip(range(len(rooms), 0, -1), sorted(rooms), strict=True):
        if room * count >= left:
            return -(-left // count)
        left -= room
    return max(rooms, default=0)


class _Plan:
    """A placement that is being made.

    Attributes:
        holders: per partition the ranks that have it so far.
        able: how many ranks have any room. partition_bytes, room: as for ``place``.
        _loads: a heap of (bytes so far, rank) of these.
    """

    def __init__(
        self,
        partition_bytes: Sequence[int],
        room: Sequence[int],
        holders: Sequence[Collection[int]] | None = None,
        barred: Container[tuple[int, int]] = (),
    ) -> None:
        self.holders = [list(ranks) for ranks in holders] if holders is not None else [[] for _ in partition_bytes]
        self.partition_bytes = partition_bytes
        self.room = room
        self._barred = barred
        loads = {rank: 0 for rank, limit in enumerate(room) if limit > 0}
        for size, ranks in zip(partition_bytes, self.holders, strict=True):
            for rank in ranks:
                loads[rank] += size
        self.able = len(loads)
        self._loads = [(load, rank) for rank, load in loads.items()]
        heapq.heapify(self._loads)

    def copy(self) -> "_Plan":
        return _Plan(self.partition_bytes, self.room, self.holders, self._barred)

    def loads(self) -> dict[int, int]:
        """Bytes so far of each rank that has any room."""
        return {rank: load for load, rank in self._loads}

    def largest_first(self) -> list[int]:
        return sorted(
            range(len(self.partition_bytes)), key=lambda partition: (-self.partition_bytes[partition], partition)
        )

    def fill(self, partition: int, count: int) -> None:
        """Give copies to the least loaded ranks that can have one, until there are so many, as far as there is room."""
        holders = self.holders[partition]
        size = self.partition_bytes[partition]
        seen = []
        while self._loads and len(holders) < count:
            load, rank = heapq.heappop(self._loads)
            fits = load + size <= self.room[rank]
            if fits and rank not in holders and (rank, partition) not in self._barred:
                holders.append(rank)
                load += size
            seen.append((load, rank))
        for item in seen:
            heapq.heappush(self._loads, item)
