"""Decides which entries go to which partition, and in which batches they are packed. Pure arithmetic on the table.

The order of members keeps a directory's files together, unless it is to be shuffled; a further hard link follows its
first name; directories come at the very end, children before parents (docs/format.md, *Partitions*, says why).
"""

from __future__ import annotations

import itertools
import stat
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fanstore.errors import UsageError
from fanstore.order.streams import Purpose, permutation
from fanstore.prep.selection import matching
from fanstore.prep.table import Table

#: One batch is packed in memory and written with one call. Processor time for 107 KB files: 4 MiB 0.51 s, 2 MiB 0.54 s,
#: 1 MiB 0.57 s (Python around every batch); 8 MiB no less, and the disk then waits longer for the first.
BATCH_BYTES = 4 << 20
#: Tar headers of one member at most, without what its path adds: pax header, its records, ustar header.
_HEADER_BOUND = 2048
#: Content of files of so many bytes and more begins at a multiple of a page in the partition (native/prep/tarhead.h),
#: which makes their headers longer by at most so much, and once more for each batch.
ALIGNED_BYTES = 1 << 20
_ALIGNMENT_BOUND = 2 * 4608


@dataclass(frozen=True)
class PartitionPlan:
    """Entries of one partition in the order of their members; ``batches`` are positions in ``order`` where one ends."""

    order: npt.NDArray[np.uint32]
    batches: npt.NDArray[np.int64]
    content_bytes: int
    everywhere: bool


@dataclass(frozen=True)
class Limits:
    """How to cut. ``partitions`` is a number asked for, or None to cut by ``partition_bytes``."""

    partition_bytes: int
    partitions: int | None
    everywhere: Sequence[str]
    shuffle: int | None = None  #: a seed: files in random order instead of the order of names


def has_content(table: Table) -> npt.NDArray[np.bool_]:
    """Which entries are regular files under their first name."""
    mask: npt.NDArray[np.bool_] = table.is_type(stat.S_IFREG) & (table.inode == np.arange(len(table), dtype=np.uint32))
    return mask


def content_bytes(table: Table) -> npt.NDArray[np.int64]:
    """Bytes of content that each entry brings to its partition."""
    return np.where(has_content(table), table.size, 0).astype(np.int64)


def make_plan(table: Table, limits: Limits, wanted: npt.NDArray[np.bool_] | None = None) -> list[PartitionPlan]:
    """All partitions; at least one, and as many as asked for. Of files and links, the ``wanted`` ones; None is all."""
    content = content_bytes(table)
    bound = member_bounds(table)
    entries = np.arange(len(table), dtype=np.uint32)
    is_directory = table.is_type(stat.S_IFDIR)
    # Sorted by (inode, entry), a hard link comes right after its first name.
    place = entries if limits.shuffle is None else permutation(limits.shuffle, Purpose.PREPARE, 0, len(table))
    order = np.lexsort((entries, place[table.inode])).astype(np.uint32)
    order = order[~is_directory[order]]
    if wanted is not None:
        order = order[wanted[order]]
    chosen = matching(table, limits.everywhere)[table.inode[order]]
    groups = [(order[chosen], True), (order[~chosen], False)]
    plans: list[PartitionPlan] = []
    for (members, everywhere), count in zip(groups, _group_counts(groups, bound, limits), strict=True):
        for part in _cut(table, members, bound, count):
            if limits.partitions is not None or len(part):  # large files may leave nothing for some
                plans.append(_partition(table, part, bound, content, everywhere))
    if not plans:
        plans.append(_partition(table, order, bound, content, False))
    last = plans[-1]
    members = np.concatenate((last.order, entries[is_directory][::-1]))
    plans[-1] = _partition(table, members, bound, content, last.everywhere)
    return plans


def member_bounds(table: Table) -> npt.NDArray[np.int64]:
    """Upper bound of what each entry needs in its tar file, headers and padding included."""
    content = content_bytes(table)
    paths = table.path_bytes()
    targets = np.where(table.is_type(stat.S_IFLNK), table.size.astype(np.int64), paths[table.inode])
    bound: npt.NDArray[np.int64] = _HEADER_BOUND + (content + 511) // 512 * 512 + (paths + targets + 511) // 512 * 512
    bound[content >= ALIGNED_BYTES] += _ALIGNMENT_BOUND
    return bound


def _group_counts(
    groups: list[tuple[npt.NDArray[np.uint32], bool]], bound: npt.NDArray[np.int64], limits: Limits
) -> list[int]:
    """How many partitions each group gets: [everywhere, the rest]. Together at least one."""
    totals = [int(bound[members].sum()) for members, _ in groups]
    if limits.partitions is None:
        counts = [-(-total // limits.partition_bytes) for total in totals]
        return counts if any(counts) else [0, 1]
    if totals[0] == 0:
        return [0, limits.partitions]
    if totals[1] == 0:
        return [limits.partitions, 0]
    if limits.partitions == 1:
        raise UsageError("--everywhere needs partitions of its own: ask for 2 or more with --partitions")
    share = round(limits.partitions * totals[0] / sum(totals))
    first = min(max(1, share), limits.partitions - 1)
    return [first, limits.partitions - first]


def _cut(
    table: Table, members: npt.NDArray[np.uint32], bound: npt.NDArray[np.int64], count: int
) -> list[npt.NDArray[np.uint32]]:
    """Cut into ``count`` runs of nearly equal weight; none is empty while there are enough files.

    A file and its further hard links stay together, so that every partition can be unpacked by itself.
    """
    if count == 0:
        return []
    units = np.flatnonzero(table.inode[members] == members)  # where a file begins; its links follow
    ends = np.cumsum(np.add.reduceat(bound[members], units)) if len(units) else np.zeros(0, np.int64)
    cuts = [0]
    for left in range(count, 1, -1):
        start = cuts[-1]
        done = float(ends[start - 1]) if start else 0.0
        target = done + (float(ends[-1]) - done) / left if len(ends) else 0.0
        stop = int(np.searchsorted(ends, target))  # the first unit that reaches the target
        # Before or after that unit, whichever is nearer.
        if stop < len(ends) and ends[stop] - target < target - (ends[stop - 1] if stop > start else done):
            stop += 1
        if len(units) - start >= left:
            stop = min(max(stop, start + 1), len(units) - (left - 1))
        cuts.append(min(max(stop, start), len(units)))
    borders = [int(units[cut]) if cut < len(units) else len(members) for cut in cuts] + [len(members)]
    return [members[low:high] for low, high in itertools.pairwise(borders)]


def _partition(
    table: Table,
    order: npt.NDArray[np.uint32],
    bound: npt.NDArray[np.int64],
    content: npt.NDArray[np.int64],
    everywhere: bool,
) -> PartitionPlan:
    ends = np.cumsum(bound[order])
    batches: list[int] = []
    start, base = 0, 0
    while start < len(order):
        stop = max(start + 1, int(np.searchsorted(ends, base + BATCH_BYTES, side="right")))
        # A hard link stays in the batch of its first name: if that fails, the link must not be written either.
        while stop < len(order) and table.inode[order[stop]] != order[stop]:
            stop += 1
        batches.append(stop)
        start, base = stop, int(ends[stop - 1])
    return PartitionPlan(order, np.array(batches, dtype=np.int64), int(content[order].sum()), everywhere)
