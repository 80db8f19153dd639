"""Fetching ahead in a daemon: sees what is read, asks the policy what comes next, and has the chunk broker bring it.

Owns the window of this node and the tasks that keep it; the policy is in order/window.py, what users state in
statement.py. Files that are begun to be read come from whichever engine answers. Everything here may fail without a
reader noticing more than that it waits as it would have. Trio thread, but for what takes long.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import trio

from fanstore.client.server import Request
from fanstore.dataset.broker import Broker
from fanstore.errors import UsageError
from fanstore.format.codec import CHUNK_BYTES
from fanstore.format.index import Index
from fanstore.order.order import Integers
from fanstore.order.reportedstream import ReportedStream
from fanstore.order.window import FILE_BYTES, Origin, Stream, Window, repeated
from fanstore.prefetch.arranging import Arranging
from fanstore.prefetch.hooked import Hooked
from fanstore.prefetch.orderfile import OrderFile
from fanstore.prefetch.recogniser import Recogniser, streams_of
from fanstore.prefetch.repetition import Repetition
from fanstore.prefetch.room import Room
from fanstore.prefetch.search import Found
from fanstore.prefetch.specification import Mode, Specification
from fanstore.prefetch.statement import PathList, specified
from fanstore.units import format_count

log = logging.getLogger(__name__)

#: What is fetched ahead of all readers of a node, if the cache is at least twice as large. 64 MiB are 600 files of 107
#: KiB: 40 ms of a link of 1.6 GB/s, four times what passes between two looks at what was read.
WINDOW_BYTES = 64 << 20
#: Seconds between two looks at what was read, while an order is followed, and while none is.
FOLLOW_S, LOOK_S = 0.01, 0.1
#: Seconds until a look is worth while in which nothing is read.
_IDLE_S = 5.0
#: Lists that programs have written and nobody has read to the end so far; the oldest goes.
_STREAMS_MOST = 64
#: Threads whose last files are known.
_RECENT_MOST = 256
#: Files of a thread by which the epoch is found in which it is now.
_RECENT_FILES = 4
#: Threads that are asked for that.
_THREADS_ASKED = 32
#: Times that a change is told in the log.
_TOLD_MOST = 20


class Sightings(Protocol):
    """Files that were begun to be read: entries and threads."""

    lost: int

    def take_nowait(self) -> list[tuple[int, int]]: ...

    async def wait(self) -> None: ...

    def goes_into_kernel(self) -> bool:
        """What is fetched ahead from now on can be had in the page cache of the mount, from where it is read unseen."""


class Prefetcher:
    """What is fetched ahead on this node.

    Attributes:
        hooked: orders that programs report. _reported: one of them has, since it was last looked at.
        room: what programs own.
        _repetition: epochs that begin like one before; _again: those that are expected.
        _pending: chunks for which there was no place in line, and whether they go on to the kernel.
        _bad_lines: of all lists.
        _told: how often something was said in the log; _left: streams of which it was said that nobody follows them.
        _recent: by thread, the last files that it has read. _noted_at: how many files had been read when those of which
            the order is searched began. _begun: where files that are read are told; None before ``run``.
    """

    def __init__(
        self,
        index: Index,
        broker: Broker,
        points: Sequence[Path],
        order_file: OrderFile | None,
        opened: Callable[[], int | None],
        *,
        rank: int,
        size: int,
        is_here: Callable[[int], bool] = lambda partition: True,
        arranging: Arranging | None = None,
    ) -> None:
        """``points``: paths by which programs know the mount; ``rank``, ``size``: of this node in its job.
        ``is_here``: this node keeps a partition on its disk. ``arranging``: what programs read is rearranged; None if
        it is not.

        ``opened``: how many files programs have opened without asking the kernel, which is all that is known of these;
        None if no program can.
        """
        self._index = index
        self._broker = broker
        self._points = [os.fsencode(point) for point in points]
        self._order_file = order_file
        self._opened, self._opened_before = opened, 0
        self._rank, self._size = rank, size
        self._window = Window(index.size.__getitem__, 0)
        self._pending: list[tuple[int, int, bool]] = []
        self._bad_lines = 0
        self._told = 0
        self._lost = 0
        self._wanted = trio.Event()
        self._arranging = arranging
        self.hooked = Hooked(
            index, self._follow_report, self._wake, self._tell, lambda: self._opened() is not None, arranging
        )
        self.room = Room(index, broker, is_here, self.hooked.entries)
        self._reported = False
        self._repetition: Repetition | None = None
        self._again: list[tuple[Stream, array[int]]] = []
        self._recogniser = Recogniser(index, self._recognised)
        self._recent: dict[int, deque[int]] = {}
        self._noted_at = 0
        self._left: deque[Stream] = deque(maxlen=_STREAMS_MOST)
        self._begun: Sightings | None = None

    def requests(self) -> Mapping[str, Request]:
        """Rows for the table of the control socket."""
        return {**self.hooked.requests(), **self.room.requests()}

    # --- life ---

    async def run(self, order: Mode | Path | Specification, begun: Sightings) -> None:
        """Until it is cancelled."""
        self._begun = begun
        try:
            async with trio.open_nursery() as nursery:
                if self._order_file is not None:
                    nursery.start_soon(self._listen, self._order_file)
                if isinstance(order, Path):
                    nursery.start_soon(self._read_list, order)
                elif isinstance(order, Specification):
                    nursery.start_soon(self._specify, order)
                else:
                    self._repetition = Repetition()
                    nursery.start_soon(self._recogniser.run)
                nursery.start_soon(self.room.run)
                await self._follow(begun)
        except Exception as error:
            log.error("unexpected error: nothing is fetched ahead from now on; please report it", exc_info=error)

    async def _follow(self, begun: Sightings) -> None:
        while True:
            self._wanted = trio.Event()
            now_s = time.monotonic()
            files = self._look(begun, now_s)
            opened = self._opened()
            unseen, self._opened_before = (opened or 0) - self._opened_before, opened or 0
            if unseen:
                self._window.passed(unseen, now_s)
            reported, self._reported = self._reported, False
            if reported:
                self._settle(now_s)
            # Of an order that is only thought to be known, each file that is read confirms it; and programs that are
            # intercepted do not read from the page cache of the mount.
            stated = all(stream.origin.source == "stated" for stream in self._window.streams)
            useful = bool(self._window.streams) and stated and not opened
            self._window.unseen = useful and begun.goes_into_kernel()
            fetched = self._fetch(now_s)
            if files or fetched or reported or unseen or self._pending:
                await trio.sleep(FOLLOW_S if self._window.streams else LOOK_S)
                continue
            with trio.move_on_after(self._patience_s()):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_cancel_after, begun.wait, nursery.cancel_scope)
                    await self._wanted.wait()
                    nursery.cancel_scope.cancel()

    def _look(self, begun: Sightings, now_s: float) -> bool:
        """Take what was read since the last look; whether there was anything."""
        files = begun.take_nowait()
        for entry, thread in files:
            self._seen(entry, thread, now_s)
        self._lost = begun.lost
        return bool(files)

    def _patience_s(self) -> float:
        """Until a look is worth while although nobody tells of anything: nobody tells of what programs open."""
        if not self._window.streams:
            return float("inf")
        return _IDLE_S if self._opened() is None else LOOK_S

    def _wake(self) -> None:
        self._reported = True
        self._wanted.set()

    def _settle(self, now_s: float) -> None:
        """What was read before programs reported is known by now."""
        for stream in self._window.streams:
            if isinstance(stream, ReportedStream) and not stream.settle(self._window.counts, now_s):
                self._tell("a program does not read what it says (%s): nothing is fetched ahead", stream.origin)

    def _seen(self, entry: int, thread: int, now_s: float) -> None:
        before = [stream for stream in self._window.streams if stream.followed]
        expected = self._window.seen(entry, thread, now_s)
        if not expected and not any(stream.readers for stream in before):
            if self._recogniser.is_empty:
                self._noted_at = self._window.counts.seen
            self._recogniser.note(entry, thread)
        if not expected and self._repetition is not None:
            again = self._repetition.note(entry, thread)
            if again is not None:
                self._expect_again(*again)
        files = self._recent.pop(thread, None) or deque(maxlen=_RECENT_FILES)
        self._recent[thread] = files
        files.append(entry)
        if len(self._recent) > _RECENT_MOST:
            del self._recent[next(iter(self._recent))]
        for stream in before:
            if not stream.followed and stream not in self._left:
                self._left.append(stream)
                self._tell(
                    "programs do not follow the order (%s): until they do, nothing is fetched ahead", stream.origin
                )

    def _fetch(self, now_s: float) -> bool:
        """Put in line what comes next; whether there was anything."""
        if not self._window.streams and not self._pending:
            return False
        self._window.total_bytes = min(WINDOW_BYTES, self._broker.cache()["capacity_bytes"] // 2)
        self._end_repetitions()
        self._window.drop_finished(now_s)
        self._window.give_way(now_s)
        if not self._pending:
            for entry in self._window.take(now_s):
                chunks = -(-min(self._index.size[entry], FILE_BYTES) // CHUNK_BYTES)
                unseen = self._window.goes_unseen(entry)
                self._pending.extend((entry, number, unseen and number == 0) for number in range(chunks))
        put = 0
        while put < len(self._pending) and self._broker.prefetch(*self._pending[put]):
            put += 1
        del self._pending[:put]
        return put > 0

    # --- orders ---

    def follow(self, origin: Origin, epochs: Iterable[Integers]) -> None:
        """Expect this sequence of files to be read."""
        self._add(Stream(origin, epochs))

    def _add(self, stream: Stream) -> None:
        self._window.streams.append(stream)
        del self._window.streams[:-_STREAMS_MOST]
        self._wanted.set()

    def _follow_report(self, stream: ReportedStream) -> None:
        """Before all others, because what a program says itself is surer."""
        for other in self._window.streams:
            if other.origin.source == "recognised":
                other.pause()
        self._window.streams.insert(0, stream)
        self._wake()

    def _expect_again(self, epoch: array[int], place: int) -> None:
        """A thread reads what was read before."""
        if any(other is epoch for _, other in self._again):
            return
        stream = Stream(Origin("repeated"), repeated(np.array(epoch, dtype=np.uint32)), place, 1)
        self._again.append((stream, epoch))
        self._add(stream)
        self._tell("an epoch of %s begins like one before, and is expected again", format_count(len(epoch), "file"))

    def _end_repetitions(self) -> None:
        """Of epochs that were expected again and turned out to be others."""
        ended = [pair for pair in self._again if pair[0].counts.predicted and not pair[0].followed]
        for stream, epoch in ended:
            self._again.remove((stream, epoch))
            if stream in self._window.streams:
                self._window.streams.remove(stream)
            if self._repetition is not None:
                self._repetition.forget(epoch)
        if len(self._again) > _STREAMS_MOST:
            del self._again[0]

    async def _recognised(self, found: Sequence[Found]) -> None:
        """Follow what was found, instead of what was found before."""
        files = self._window.counts.seen - self._noted_at
        recent = [list(last) for last in list(self._recent.values())[-_THREADS_ASKED:]]
        made = await trio.to_thread.run_sync(lambda: [s for each in found for s in streams_of(each, files, recent)])
        self._window.streams = [s for s in self._window.streams if s.followed or s.origin.source != "recognised"]
        for stream in made:
            self._add(stream)
        for each in found:
            self._tell(
                "the order is recognised: %s, seed %s, over the files of '%s' as %s lists them",
                each.sampler,
                each.seed,
                each.root or ".",
                each.listing,
            )

    async def _read_list(self, path: Path) -> None:
        """``--order FILE``: expected again and again, as a program reads it in each epoch."""
        lines = PathList(self._index, self._points)
        try:
            data = await trio.to_thread.run_sync(path.read_bytes, abandon_on_cancel=True)
        except OSError as error:
            log.warning("--order %s cannot be read, so nothing is known of the order: %s", path, error.strerror)
            return
        files = await trio.to_thread.run_sync(lambda: lines.feed(data, end=True), abandon_on_cancel=True)
        self._finish_list(lines, f"--order {path}", len(files))
        if files:
            self.follow(Origin("stated", "list"), repeated(_as_files(files)))

    async def _specify(self, spec: Specification) -> None:
        try:
            streams = await trio.to_thread.run_sync(
                specified, spec, self._index, self._rank, self._size, abandon_on_cancel=True
            )
        except UsageError as error:
            log.warning("%s", error)
            return
        for origin, epochs in streams:
            self.follow(origin, epochs)
        self._tell("the order is stated: %s", streams[0][0])

    async def _listen(self, order_file: OrderFile) -> None:
        """Lists that programs write, each followed once."""
        lines = PathList(self._index, self._points)
        stream: Stream | None = None
        written: deque[Integers] = deque()
        count = 0
        async for data in order_file.pieces():
            files = lines.feed(data, end=not data)
            count += len(files)
            if files:
                written.append(_as_files(files))
                if stream is None:
                    stream = Stream(Origin("stated", "list"), _Written(written))
                if stream not in self._window.streams:
                    self._add(stream)
            if not data:
                if count or lines.bad:
                    self._finish_list(lines, "a list written to .fanstore/order", count)
                lines, stream, written, count = PathList(self._index, self._points), None, deque(), 0

    def _finish_list(self, lines: PathList, what: str, count: int) -> None:
        self._bad_lines += lines.bad
        if lines.bad:
            self._tell("%s: %s", what, lines.describe(), level=logging.WARNING)
        self._tell("%s: %s to be read", what, format_count(count, "file"))

    def _tell(self, message: str, *values: object, level: int = logging.INFO) -> None:
        self._told += 1
        if self._told <= _TOLD_MOST:
            log.log(level, message, *values)

    # --- statistics ---

    def describe(self) -> Mapping[str, object]:
        """The section ``order`` of stats.json."""
        if self._begun is not None:
            self._look(self._begun, time.monotonic())  # what was read just now counts, too
        counts, cache = self._window.counts, self._broker.cache()
        followed = [stream for stream in self._window.streams if stream.followed]
        latest = max(followed, key=lambda stream: stream.last_s, default=None)
        origin, epoch = (Origin("none"), None) if latest is None else (latest.origin, latest.epoch)
        if latest is None and self.hooked.last is not None:
            origin, epoch = self.hooked.last
        return {
            "source": origin.source,
            "sampler": origin.sampler,
            "seed": origin.seed,
            "epoch": None if origin.sampler == "list" else epoch,
            "streams": len(followed),
            "files": counts.seen + counts.passed,
            "predicted": counts.predicted + counts.passed,
            "prefetched": cache["ordered"],
            "into_kernel": cache["into_kernel"],
            "taken": counts.taken + counts.passed,
            "late": cache["late"],
            "in_line": cache["in_line"] + len(self._pending),
            "waited_s": round(cache["waited_ns"] / 1e9, 3),
            "window_bytes": self._window.total_bytes,
            "held_bytes": self._window.held_bytes,
            "bad_lines": self._bad_lines,
            "lost": self._lost,
            "rearranged": None if self._arranging is None else self._arranging.describe(),
        }


class _Written(Iterator[Integers]):
    """What is in the queue, and later what was added to it since."""

    def __init__(self, queue: deque[Integers]) -> None:
        self._queue = queue

    def __next__(self) -> Integers:
        if not self._queue:
            raise StopIteration
        return self._queue.popleft()


def _as_files(entries: list[int]) -> Integers:
    return np.array(entries, dtype=np.uint32)


async def _cancel_after(wait: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    await wait()
    scope.cancel()
