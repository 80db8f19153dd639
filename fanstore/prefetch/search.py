"""A process that looks for the order behind the first files that readers of a mount have opened.

A process and not a thread: it computes for minutes, at idle priority, and a thread with that priority would keep the
daemon's other threads waiting for the interpreter's lock. It has that priority before it imports this, which takes a
tenth of a second of a processor that readers want. Gets a task on standard input and the index as a descriptor; writes
what it finds to standard output, each a ``Found`` (both ends are this program, so pickle is safe), and ends. Started by
recogniser.py, and ends with the daemon.
"""

import mmap
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fanstore.format.index import Index
from fanstore.order import Finding, Order, Sightings, TorchSearch, recognise
from fanstore.order.listing import LISTINGS
from fanstore.order.order import Integers
from fanstore.order.torchsearch import global_seeds
from fanstore.prefetch.statement import files_below

#: Seeds that are tried in a step, and how long that takes.
_SEEDS_AT_ONCE, _STEP_S = 1 << 20, 0.012
#: With so many cores or fewer, the minutes of all seeds are stretched: after each step it rests so many times as long.
#: Idle priority alone is not enough where readers, the daemon and the search share two cores (remote files, one reader:
#: 0.90 of the speed without a search).
_FEW_CORES, _REST = 4, 6.0


@dataclass(frozen=True)
class Task:
    """The index, as a descriptor, and the first files of each reader."""

    index: int
    readers: Sequence[Integers]


@dataclass(frozen=True)
class Found:
    """An order that readers follow.

    Attributes:
        listing, sampler, seed: what it is called; root: the directory that the program lists.
        files: the program's list. orders: the likeliest first, alike in the epoch that was seen.
        ranks: those of the readers.
    """

    root: str
    listing: str
    sampler: str
    seed: int | None
    files: Integers
    orders: tuple[Order, ...]
    ranks: tuple[int, ...]


def search(index: Index, readers: Sequence[Integers], pause: Callable[[], None] = lambda: None) -> Iterator[Found]:
    """All that is found: usual seeds first; if nothing was, any seed of torch, with a ``pause`` after each step."""
    roots = list(_roots(index, readers))
    lists: dict[str, dict[str, Integers]] = {}
    for root in roots:
        files, paths = files_below(index, root.encode(errors="surrogateescape"))
        lists[root] = {name: made for name, make in LISTINGS.items() if len(made := files[make(paths)]) > 1}
        found = [finding for finding in recognise(lists[root], readers) if finding is not None]
        yield from (_found(root, lists[root], finding) for finding in found)
        if found:
            return
    yield from _any_seed(lists, readers, pause)


def _any_seed(
    lists: dict[str, dict[str, Integers]], readers: Sequence[Integers], pause: Callable[[], None]
) -> Iterator[Found]:
    tried: list[Integers] = []
    for root, named in lists.items():
        for name, listing in named.items():
            if any(np.array_equal(listing, other) for other in tried):
                continue
            tried.append(listing)
            torch = TorchSearch(Sightings(name, listing, readers))
            while not torch.done:
                for finding in torch.step(_SEEDS_AT_ONCE):
                    yield _found(root, named, _from_global_seed(finding))
                    return
                pause()


def _from_global_seed(finding: Finding) -> Finding:
    """The epochs of RandomSampler follow from ``torch.manual_seed``, if that was a usual one."""
    assert finding.seed is not None
    for sampler in global_seeds(finding.order.sample_count, finding.seed):
        if sampler is not None:
            # Persistent workers draw no base seed for later epochs.
            return replace(finding, seed=sampler.seed, orders=(sampler, sampler.with_stride(2), *finding.orders))
    return finding


def _found(root: str, lists: dict[str, Integers], finding: Finding) -> Found:
    ranks = tuple(sorted({seat.rank for seat in finding.seating.seats})) or (0,)
    name = finding.listing
    return Found(root, name, finding.sampler, finding.seed, lists[name], finding.orders, ranks)


def _roots(index: Index, readers: Sequence[Integers]) -> Iterator[str]:
    """Directories that a program may have listed: those above all files that were read, the lowest first."""
    paths = [index.path(int(file)).decode(errors="surrogateescape") for files in readers for file in files]
    common = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    while common:
        yield common
        common = os.path.dirname(common)
    yield ""


def _rest() -> None:
    """After a step, where there are few cores."""
    if len(os.sched_getaffinity(0)) <= _FEW_CORES:
        time.sleep(_REST * _STEP_S)


def main() -> int:
    """Entry point of the process."""
    task: Task = pickle.load(sys.stdin.buffer)
    index = Index.adopt(mmap.mmap(task.index, 0, prot=mmap.PROT_READ))
    for found in search(index, task.readers, _rest):
        pickle.dump(found, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    return 0
