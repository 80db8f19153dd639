"""Orders that users state: lists of paths, and specifications of shuffles that frameworks do.

Owns what both mean in files of a dataset (docs/orders.md); the grammar is in specification.py. No I/O but the index;
any thread.
"""

import itertools
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np

from fanstore.errors import UsageError
from fanstore.format.index import Index
from fanstore.order import FileOrder, Order, SeededShuffle, TorchDistributedSampler, TorchRandomSampler
from fanstore.order.listing import LISTINGS
from fanstore.order.order import Integers
from fanstore.order.seeded import Epochs, Library
from fanstore.order.window import Origin
from fanstore.prefetch.specification import Specification

#: Lists, by the word that a specification has for them.
LISTS = {name.lower().replace(" ", "-"): make for name, make in LISTINGS.items()}


def _distributed(spec: Specification, samples: int, ranks: int) -> Order:
    flags = {"drop_last": spec.flag("drop-last", False), "set_epoch": spec.flag("set-epoch", True)}
    return TorchDistributedSampler(samples, ranks, spec.number("seed", 0), **flags)


def _random(spec: Specification, samples: int, ranks: int) -> Order:
    return TorchRandomSampler(
        samples,
        spec.number("seed", 0),
        persistent_workers=spec.flag("persistent-workers", False),
        drawn_before=spec.number("drawn-before", 0),
        drawn_per_epoch=spec.number("drawn-per-epoch", 0),
    )


def _seeded(library: Library) -> Callable[[Specification, int, int], Order]:
    def make(spec: Specification, samples: int, ranks: int) -> Order:
        return SeededShuffle(samples, spec.number("seed", 0), library, cast(Epochs, spec.word("epochs")))

    return make


def _sequential(spec: Specification, samples: int, ranks: int) -> Order:
    return TorchDistributedSampler(samples, ranks, shuffle=False, drop_last=spec.flag("drop-last", False))


#: How the shuffles of KINDS are made, for so many samples and ranks.
MAKERS: dict[str, Callable[[Specification, int, int], Order]] = {
    "torch-distributed": _distributed,
    "torch-random": _random,
    "numpy": _seeded("RandomState"),
    "numpy-default-rng": _seeded("default_rng"),
    "python-random": _seeded("random"),
    "sequential": _sequential,
}


# --- specifications ---


def specified(spec: Specification, index: Index, rank: int, size: int) -> list[tuple[Origin, Iterator[Integers]]]:
    """The streams of this node: one for each rank of the training program on it. Raises UsageError."""
    root = spec.values.get("root", "")
    files, paths = files_below(index, root.encode())
    listed = files[LISTS[spec.word("list")](paths)]
    if not len(listed):
        raise UsageError(
            f"--order {spec.name}: a list as of {spec.word('list')} has no file of {root or 'the dataset'}; "
            "name another list= or root="
        )
    here = spec.number("ranks-per-node", 1)
    origin = Origin("stated", spec.name, None if spec.name == "sequential" else spec.number("seed", 0))
    streams = []
    for own in range(here):
        order = MAKERS[spec.name](spec, len(listed), size * here)
        epochs = epochs_of(FileOrder(listed, order), spec.number("epoch", 0), (rank * here + own) % order.ranks)
        streams.append((origin, epochs))
    return streams


def epochs_of(files: FileOrder, first: int, rank: int) -> Iterator[Integers]:
    """The files of a rank, epoch by epoch, for ever."""
    return (files.rank(epoch, rank) for epoch in itertools.count(first))


def files_below(index: Index, root: bytes) -> tuple[Integers, list[str]]:
    """Regular files below a directory in the sequence of a walk, as entries and as paths relative to it.

    Raises UsageError.
    """
    top = index.resolve(root)
    if top < 0 or not stat.S_ISDIR(index.mode[top]):
        raise UsageError(f"--order: there is no directory '{root.decode(errors='replace')}' in the dataset")
    entries: list[int] = []
    paths: list[str] = []
    waiting = [(top, "")]
    while waiting:
        directory, prefix = waiting.pop()
        below = []
        for child in index.children(directory):
            name = prefix + index.name(child).decode(errors="surrogateescape")
            if stat.S_ISREG(index.mode[child]):
                entries.append(index.inode[child])
                paths.append(name)
            elif stat.S_ISDIR(index.mode[child]):
                below.append((child, name + "/"))
        waiting.extend(reversed(below))
    return np.array(entries, dtype=np.uint32), paths


# --- lists of paths ---


class PathList:
    """Lines of paths, as they come, to entries of the index.

    Attributes:
        bad: lines that name no file of the dataset; examples: what is wrong with the first of them, to be told.
        _points: the mount point, as absolute paths may begin.
    """

    _EXAMPLES = 3

    def __init__(self, index: Index, points: Sequence[bytes]) -> None:
        self.bad = 0
        self.examples: list[str] = []
        self._index = index
        self._points = [point.rstrip(b"/") + b"/" for point in points]
        self._rest = b""

    def feed(self, data: bytes, *, end: bool = False) -> list[int]:
        """The files of all lines that are complete, or are at the end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if end:
            lines.append(self._rest)
            self._rest = b""
        return [entry for line in lines if (entry := self._entry(line.rstrip(b"\r"))) is not None]

    def _entry(self, line: bytes) -> int | None:
        if not line:
            return None
        path = line
        if line.startswith(b"/"):
            point = next((point for point in self._points if line.startswith(point)), None)
            if point is None:
                return self._refuse(line, "is not below the mount point")
            path = line[len(point) :]
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        entry = -1 if b".." in parts else self._index.resolve(b"/".join(parts))
        if entry < 0:
            return self._refuse(line, "is not in the dataset")
        if not stat.S_ISREG(self._index.mode[entry]):
            return self._refuse(line, "is not a regular file")
        return self._index.inode[entry]

    def _refuse(self, line: bytes, why: str) -> int | None:
        """No entry."""
        self.bad += 1
        if len(self.examples) < self._EXAMPLES:
            self.examples.append(f"'{line[:200].decode(errors='backslashreplace')}' {why}")
        return None

    def describe(self) -> str:
        """One sentence about what was wrong."""
        lines = "1 line names" if self.bad == 1 else f"{self.bad:,} lines name"
        return (
            f"{lines} no file of the dataset: {'; '.join(self.examples)}{'; ...' if self.bad > self._EXAMPLES else ''}"
        )
