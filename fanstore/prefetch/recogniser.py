"""Recognising the order of programs that say nothing of it, from the first files that their threads read.

Owns what was seen of each thread since no order is known, and the process that looks for the order (search.py). Trio
thread. What goes wrong costs nothing but that no order is known.
"""

import contextlib
import io
import itertools
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import trio

from fanstore.dataset.memory_limit import GroupMemory, group_memory
from fanstore.format.index import Index
from fanstore.order import FileOrder
from fanstore.order.order import Integers
from fanstore.order.window import Origin, Stream
from fanstore.prefetch.search import Found, Task
from fanstore.prefetch.statement import epochs_of
from fanstore.units import format_count

log = logging.getLogger(__name__)

#: Files of a thread that are looked at, and of how many threads.
_DEPTH = 16
_THREADS_MOST = 64
#: Seconds after the first thread has read as many, for others to do so, too.
_GATHER_S = 0.5
#: Searches that find nothing, after which no other one is begun.
_FAILURES_MOST = 3
#: Orders that begin alike and are kept in mind.
_ALIKE_MOST = 4
#: What the process runs.
_SEARCH = (
    "from fanstore.processes import serve_idly; serve_idly(); "
    "from fanstore.prefetch.search import main; raise SystemExit(main())"
)
#: Entries of a dataset above which nothing is searched: the lists of its paths would need too much memory.
_ENTRIES_MOST = 5_000_000
#: Memory of the process (17 MiB, and libraries) and for each entry; and what must be left in the control group besides:
#: all that a daemon of several nodes may take (docs/operations.md).
_PROCESS_BYTES, _ENTRY_BYTES, _LEFT_BYTES = 40 << 20, 400, 256 << 20


class Recogniser:
    """What is known so far of readers whose order is not.

    Attributes:
        _first: by thread, the first files that it has read.
        _enough: set when a search may be worth while.
        _failures: searches that have found nothing.
    """

    def __init__(
        self,
        index: Index,
        found: Callable[[Sequence[Found]], Awaitable[None]],
        look: Callable[[], GroupMemory | None] = group_memory,
    ) -> None:
        """``found`` is called with what is recognised; ``look`` says what memory there is."""
        self._index = index
        self._look = look
        self._found = found
        self._first: dict[int, list[int]] = {}
        self._enough = trio.Event()
        self._failures = 0 if index.entry_count <= _ENTRIES_MOST else _FAILURES_MOST

    def note(self, entry: int, thread: int) -> None:
        """A thread has read a file, and no order is known."""
        if self._failures >= _FAILURES_MOST:
            return
        files = self._first.get(thread)
        if files is None:
            if len(self._first) >= _THREADS_MOST:
                return
            files = self._first[thread] = []
        if len(files) < _DEPTH and entry not in files:
            files.append(entry)
            if len(files) == _DEPTH:
                self._enough.set()

    @property
    def is_empty(self) -> bool:
        """Nothing was seen since the last search."""
        return not self._first

    async def run(self) -> None:
        """Search whenever enough was seen, until it is cancelled."""
        while self._failures < _FAILURES_MOST:
            await self._enough.wait()
            await trio.sleep(_GATHER_S)
            readers = [np.array(files, dtype=np.uint32) for files in self._first.values()]
            self._enough = trio.Event()
            if not any(len(files) == _DEPTH for files in readers):
                continue
            found = await self._search(readers)
            self._failures += not found
            if found:
                await self._found(found)
            self._first.clear()
            if not found:
                log.info("no known order was found behind the first files of %s", format_count(len(readers), "reader"))

    def _has_room(self) -> bool:
        """Is there memory for a search, which nobody has reserved any for?"""
        group = self._look()
        needed_bytes = _PROCESS_BYTES + _ENTRY_BYTES * self._index.entry_count
        return group is None or group.room_bytes >= needed_bytes + _LEFT_BYTES

    async def _search(self, readers: Sequence[Integers]) -> list[Found]:
        if not self._has_room():
            log.info("the order of reads is not searched for: the control group of this job has too little memory left")
            return []
        with contextlib.ExitStack() as stack:
            try:
                index, task = os.memfd_create("index"), os.memfd_create("task")
                stack.callback(os.close, index)
                stack.callback(os.close, task)
                await trio.to_thread.run_sync(_write_all, index, self._index.data)
                _write_all(task, memoryview(pickle.dumps(Task(index, readers))))
                os.lseek(task, 0, os.SEEK_SET)
                # On the main thread, not on a worker: the kernel ends the process with the thread that has started it.
                process = subprocess.Popen(  # noqa: ASYNC220 -- a millisecond
                    [sys.executable, "-c", _SEARCH],
                    stdin=task,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[index],
                    cwd="/",
                )
            except OSError as error:
                log.info("the order of reads is not searched for: %s", error)
                return []
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            with process.stdout:
                said = io.BytesIO(await _read_all(process.stdout.fileno()))
        found: list[Found] = []
        try:
            while said.tell() < len(said.getbuffer()):
                found.append(pickle.load(said))
        except (pickle.UnpicklingError, EOFError) as error:
            log.info("the search for the order of reads has failed: %s", error)
        return found


def streams_of(found: Found, files: int, recent: Sequence[Sequence[int]]) -> list[Stream]:
    """What is found as streams, from where its readers are now. From any thread.

    ``files``: that were read since those that were looked at, which says in which epoch readers are by now; ``recent``:
    the last files of each of them. Orders that are alike up to now may differ in the next epoch, so all are returned.
    """
    origin = Origin("recognised", found.sampler, found.seed)
    streams = []
    for rank in found.ranks:
        for order in found.orders[:_ALIKE_MOST]:
            listed = FileOrder(found.files, order)
            passed = files // max(1, len(listed.rank(0, rank)) * len(found.ranks))
            for epoch in dict.fromkeys((passed, passed + 1, max(0, passed - 1))):
                place = _place_of(listed.rank(epoch, rank), recent)
                if place is not None:
                    streams.append(Stream(origin, epochs_of(listed, epoch, rank), place, epoch))
                    break
            else:
                streams.append(Stream(origin, epochs_of(listed, passed + 1, rank), 0, passed + 1))
    return streams


def _place_of(sequence: Integers, recent: Sequence[Sequence[int]]) -> int | None:
    """Where readers are in a sequence, if some have read files that follow each other there: the furthest back."""
    at = np.flatnonzero(np.isin(sequence, [file for files in recent for file in files]))
    place_of = dict(zip(sequence[at].tolist(), at.tolist(), strict=True))
    found = []
    for files in recent:
        places = [place_of.get(file, -1) for file in files]
        if len(places) > 2 and places[0] >= 0 and all(0 < b - a <= 2 for a, b in itertools.pairwise(places)):
            found.append(places[-1])
    return min(found, default=None)


async def _read_all(descriptor: int) -> bytes:
    """Until its other end is closed."""
    os.set_blocking(descriptor, False)
    pieces = []
    while True:
        await trio.lowlevel.wait_readable(descriptor)
        with contextlib.suppress(BlockingIOError):
            pieces.append(os.read(descriptor, 1 << 20))
            if not pieces[-1]:
                return b"".join(pieces)


def _write_all(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])
