"""What of the sources goes into the dataset: --include, --exclude, --sample. Arithmetic on the scanned table.

A pattern is compared with the whole path of an entry in the dataset, and ``*`` stands for ``/``, too; what lies below a
directory that matches goes with it. Used by build.py, and by plan.py for --everywhere.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fanstore.order.streams import Purpose, numbers
from fanstore.prep.table import Table

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Selection:
    """``include`` nothing stands for everything; ``sample`` None for all files."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    sample: int | None = None
    seed: int = 0  #: of the sample

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude or self.sample is not None)

    def takes(self, path: bytes) -> bool:
        """Whether the patterns leave this path in; what --sample does to it depends on all others."""
        above = [os.fsdecode(path)]
        while "/" in above[-1]:
            above.append(above[-1].rpartition("/")[0])
        included, excluded = (
            any(fnmatch.fnmatchcase(one, pattern.strip("/")) for one in above for pattern in patterns)
            for patterns in (self.include, self.exclude)
        )
        return (included or not self.include) and not excluded


def select(table: Table, chosen: Selection, note: Callable[[str], None]) -> Table:
    """The table without what is left out; ``note`` is told of patterns that match nothing."""
    keep = np.ones(len(table), np.bool_)
    if chosen.include:
        keep = _matching(table, chosen.include, "--include", note)
    if chosen.exclude:
        keep &= ~_matching(table, chosen.exclude, "--exclude", note)
    if chosen.sample is not None:
        keep &= _sample(table, keep, chosen.sample, chosen.seed)
    else:
        keep[0] = True
    _keep_parents(table, keep)
    return table if keep.all() else _without(table, keep)


def matching(table: Table, patterns: Sequence[str], unmatched: Callable[[str], object] = lambda _: None) -> _Mask:
    """Which entries match a pattern by their path, or lie below a directory that does; ``unmatched`` gets the patterns
    that match none.
    """
    matched = np.zeros(len(table), dtype=np.bool_)
    if not patterns:
        return matched
    each = {pattern: re.compile(fnmatch.translate(pattern.strip("/"))) for pattern in patterns}
    every = re.compile("|".join(rule.pattern for rule in each.values()))
    idle = dict(each)
    parents = table.parent.tolist()
    for entry, path in enumerate(_paths(table)):
        if not entry:
            continue
        matched[entry] = matched[parents[entry]] or every.match(path) is not None
        if idle and matched[entry]:
            idle = {pattern: rule for pattern, rule in idle.items() if rule.match(path) is None}
    for pattern in idle:
        unmatched(pattern)
    return matched


def _matching(table: Table, patterns: Sequence[str], option: str, note: Callable[[str], None]) -> _Mask:
    return matching(table, patterns, lambda pattern: note(f"warning: {option} '{pattern}' matches nothing"))


def _paths(table: Table) -> Iterable[str]:
    """The paths of all entries, in their order; the root has an empty one."""
    directories: dict[int, str] = {0: ""}
    is_directory = table.is_type(stat.S_IFDIR).tolist()
    parents = table.parent.tolist()
    yield ""
    for entry in range(1, len(table)):
        above = directories[parents[entry]]
        name = os.fsdecode(table.name(entry))
        path = f"{above}/{name}" if above else name
        if is_directory[entry]:
            directories[entry] = path
        yield path


def _sample(table: Table, keep: _Mask, count: int, seed: int) -> _Mask:
    """``count`` files, one at random of each of so many equal runs, with their further names."""
    first = _first_names(table, keep)
    files = np.flatnonzero(keep & table.is_type(stat.S_IFREG) & (first == np.arange(len(table))))
    if len(files) > count:
        borders = np.arange(count + 1) * len(files) // count
        places = numbers(seed, Purpose.PREPARE, 1, count) % np.diff(borders).astype(np.uint64)
        files = files[borders[:-1] + places.astype(np.int64)]
    wanted = np.zeros(len(table), np.bool_)
    wanted[files] = True
    return wanted[first] & table.is_type(stat.S_IFREG)


def _first_names(table: Table, keep: _Mask) -> npt.NDArray[np.int64]:
    """Of each entry, the first name of its inode that is kept; the column ``inode`` if all are."""
    first = np.full(len(table), len(table), np.int64)
    np.minimum.at(first, table.inode[keep], np.flatnonzero(keep))
    named = first[table.inode]
    return np.where(named < len(table), named, table.inode)


def _keep_parents(table: Table, keep: _Mask) -> None:
    """The directories on the way to what is kept."""
    for entry in np.flatnonzero(keep)[::-1].tolist():
        above = int(table.parent[entry])
        while not keep[above]:
            keep[above] = True
            above = int(table.parent[above])
    keep[0] = True


def _without(table: Table, keep: _Mask) -> Table:
    """Only the rows to keep, numbered again. A hard link whose first name goes becomes the first one."""
    number = np.cumsum(keep) - 1
    lengths = np.diff(table.nameoff)
    rows = {
        name: getattr(table, name)[keep]
        for name in ("mode", "mtime", "size", "uid", "gid", "source", "origin", "plain")
    }
    return replace(
        table,
        parent=number[table.parent[keep]].astype(np.uint32),
        nameoff=np.concatenate(([0], np.cumsum(lengths[keep]))).astype(np.uint64),
        names=table.names[np.repeat(keep, lengths.astype(np.int64))],
        inode=number[_first_names(table, keep)[keep]].astype(np.uint32),
        **rows,
    )
