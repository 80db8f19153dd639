"""The policy of fetching ahead: a window of bytes ahead of each reader, bounded in total, and fair.

Pure: whoever sees files being read calls ``seen``, and fetches what ``take`` says. A **stream** is a sequence of files
that will be read; its **readers** are threads of programs, several of which may read one stream at different places, as
workers of a DataLoader do with their batches. A thread belongs to a stream once it has read three files there that
follow each other, or one that was fetched for it; two files in a row that were not expected, and it does not any more.
A stream that has lost all its readers is not fetched until one is found again. Nothing here can make a read wrong: what
is expected and not read costs memory for a while, and what is read and not expected is fetched when it is wanted.

Driven by the prefetcher of a daemon, and by the simulation of a job (``fanstore.model.ahead``).

What is fetched may go on to the kernel's page cache, from where it is read **unseen**. Then one file in so many does
not, a **milestone**: when it is read, those before it were.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from fanstore.order.order import Integers

#: Places of a stream around its frontier in which readers are looked for: 16 workers with batches of 256.
HORIZON = 4096
#: Files that a reader may leave out and still go on: they were in the kernel's cache.
_STEP = 8
#: Calls of ``take`` between two looks at what was passed over: with many readers it costs as much as all the rest.
_SWEEP = 8
#: Files that the slowest reader may be ahead of one that will still be read: threads of a pool overtake each other.
_PASSED = 16
#: Steps in a row that show that a thread reads a stream; one of 8 places in 1,000 is met by chance too often.
_PROOF = 2
#: Misses of a reader in a row after which it does not read this stream any more.
MISSES = 2
#: Seconds after which a reader that reads nothing gives way to others.
STALL_S = 30.0
#: Files that are given out at a time.
_MOST = 512
#: Bytes of a file that a daemon fetches ahead; the rest of a large one is read in sequence anyway.
FILE_BYTES = 4 << 20
#: A milestone comes after so many files at most, or after this part of a reader's share of the window. (A file that is
#: asked for costs its reader some 60 µs more than one in the page cache.)
MILESTONE_FILES, MILESTONE_PART = 32, 8


@dataclass
class Reader:
    """A thread that reads a stream, or will.

    Attributes:
        place: of the file that it began last, -1 for none; first: of the first one that was expected of it.
        cursor: up to where was looked for it.
        held_bytes: what was fetched ahead of it and not read so far.
        misses: in a row; near: files in a row that follow each other.
        files, bytes: that were given out since the last milestone.
        seen_s: when it last read; bound: it reads this stream, as far as can be told.
    """

    place: int = -1
    first: int = 0
    cursor: int = 0
    held_bytes: int = 0
    misses: int = 0
    near: int = 0
    files: int = 0
    bytes: int = 0
    seen_s: float = 0.0
    bound: bool = False


@dataclass(frozen=True)
class Origin:
    """How an order is known."""

    source: str  #: hooked, stated, recognised or repeated
    sampler: str | None = None
    seed: int | None = None


@dataclass
class Counts:
    """What has become of predictions, in files."""

    seen: int = 0  #: begun to be read
    predicted: int = 0  #: of these, by a reader where it was expected
    asked: int = 0  #: fetched ahead
    taken: int = 0  #: of these, read
    passed: int = 0  #: of these, read unseen, as the next milestone says


class Stream:
    """A sequence of files and its readers.

    Attributes:
        origin: how it is known. readers: by thread; ``None`` is the beginning, before anybody reads.
        frontier: behind the furthest file that was read. followed: it is fetched ahead.
        horizon: places around the frontier in which readers are looked for.
        held: by place, what was fetched and not read: its reader and its bytes; held_bytes: their sum.
        unseen: places of those that will be read unseen; _passed: of those that were, as far as can be told.
        _segments: first place and files of each epoch that is still needed; _end: of the last one.
        _expected: by file, its place, for places up to _top. _again: likewise the one behind it, of a file that was not
            read at the first one when the furthest reader came by: a slower one may still do so.
    """

    def __init__(
        self, origin: Origin, epochs: Iterable[Integers], begin: int | None = None, first_epoch: int = 0
    ) -> None:
        """``epochs``: the files of each; may give more after it has ended for now.

        ``begin``: the place where it is being read, by readers that will be known by what they read next; None if
        nobody has begun. ``first_epoch``: the number of the first one.
        """
        self.origin = origin
        self._first_epoch = first_epoch
        self.readers: dict[int | None, Reader] = {None: Reader(bound=True)} if begin is None else {}
        self.frontier = begin or 0
        self.horizon = HORIZON
        self.followed = begin is None
        self.held: dict[int, tuple[Reader, int]] = {}
        self.held_bytes = 0
        self.unseen: set[int] = set()
        self._passed: set[int] = set()
        self.counts = Counts()
        self._epochs = iter(epochs)
        self._segments: deque[tuple[int, memoryview]] = deque()
        self._began: list[int] = []
        self._end = 0
        self._expected: dict[int, int] = {}
        self._again: dict[int, int] = {}
        self._top = self.frontier
        self._takes = 0

    # --- the sequence ---

    def at(self, place: int) -> int | None:
        """The file at a place; None behind the end, and for places that nobody needs any more."""
        while place >= self._end:
            files = next(self._epochs, None)
            if files is None or not len(files):
                return None
            # A plain memoryview: reading one number from it is several times cheaper than from numpy.
            self._segments.append((self._end, memoryview(np.ascontiguousarray(files, dtype=np.uint32).data)))
            self._began.append(self._end)
            self._end += len(files)
        for start, segment in reversed(self._segments):
            if place >= start:
                return segment[place - start]
        return None

    @property
    def epoch(self) -> int:
        """In which the furthest reader is."""
        return self._first_epoch + max(0, sum(start < self.frontier for start in self._began) - 1)

    def finished(self, now_s: float) -> bool:
        """All of it was read, or what was fetched of it will not be."""
        stalled = now_s - self.last_s > STALL_S
        return self.at(self.frontier) is None and (not self.held or stalled)

    @property
    def last_s(self) -> float:
        """When it was last read."""
        return max((reader.seen_s for reader in self.readers.values()), default=0.0)

    def _extend(self) -> None:
        """Expect what comes up to the horizon; of a file that comes again, first the nearer place."""
        while self._top < self.frontier + self.horizon and (file := self.at(self._top)) is not None:
            known = self._again.get(file, self._expected.get(file))
            if known is not None and known >= self.frontier:
                return
            if known is None:
                self._expected[file] = self._top
            else:
                self._expected[file], self._again[file] = known, self._top
            self._top += 1

    def _place_of(self, file: int, reader: Reader | None) -> int | None:
        """Where it is expected; of two places the one that is nearer to where this reader is."""
        place, again = self._expected.get(file), self._again.get(file)
        if place is None or again is None:
            return again if place is None else place
        here = self.frontier if reader is None or reader.place < 0 else reader.place
        return min(place, again, key=lambda each: abs(each - here))

    def _forget(self, file: int, place: int) -> None:
        """It was read there."""
        again = self._again.pop(file, None)
        if again is None or again == place:
            self._expected.pop(file, None)
        else:
            self._expected[file] = again

    def sweep(self) -> None:
        """Forget what all readers have passed over, and what lies too far behind."""
        self._takes += 1
        if self._takes % _SWEEP:
            return
        low = self.frontier - self.horizon
        # Of the readers that began at a place or before it, the slowest one must have passed it.
        readers = sorted((reader.first, reader.place) for reader in self.readers.values() if reader.bound)
        firsts = [first for first, _ in readers]
        slowest = list(itertools.accumulate((place for _, place in readers), min))
        for place in list(self.held):
            began = bisect.bisect_right(firsts, place)
            passed = began and slowest[began - 1] - _PASSED > place
            # Where it began is not known so well of a reader that was first seen at a milestone.
            far_behind = place in self.unseen and slowest and slowest[-1] - 2 * MILESTONE_FILES > place
            if place < low:
                self._release(place)
            elif passed or far_behind:
                self._pass(place)
        if len(self._passed) > self.horizon:
            self._passed = {place for place in self._passed if place >= low}
        if len(self._expected) > 4 * self.horizon:
            for known in (self._expected, self._again):
                for file in [file for file, place in known.items() if place < low]:
                    del known[file]
        while len(self._segments) > 1 and self._segments[1][0] < low:
            self._segments.popleft()

    # --- reading ---

    def seen(self, file: int, thread: int, now_s: float) -> bool:
        """A thread has begun to read a file: whether that was expected of it."""
        self._extend()
        reader = self.readers.get(thread)
        place = self._place_of(file, reader)
        if place is None or place < self.frontier - self.horizon:
            return False
        if reader is None:
            reader = self.readers[thread] = Reader()
        near = 0 < place - reader.place <= _STEP and reader.place >= 0
        reader.near = reader.near + 1 if near else 0
        expected = (near and (reader.bound or reader.near >= _PROOF)) or place in self.held
        reader.place, reader.seen_s = place, now_s
        if not expected and not (reader.bound and 0 < place - reader.cursor < self.horizon):
            return False
        reader.cursor = max(reader.cursor, place + 1)
        if not expected:
            return False
        if not reader.bound:
            reader.first = place
        reader.misses, reader.bound = 0, True
        if place in self._passed:  # it was another reader that had passed it
            self._passed.remove(place)
            self.counts.passed -= 1
        self._forget(file, place)
        if place in self.held:
            self.counts.taken += 1
            self._release(place)
        before = place - 1
        while before in self.unseen:
            self._pass(before)
            before -= 1
        self.frontier = max(self.frontier, place + 1)
        self.followed = True
        self._retire_beginning(reader)
        return True

    def passed(self, count: int, now_s: float) -> None:
        """So many files were read, which nobody has seen: the next ones, as far as is known."""
        if self.at(self.frontier) is None:
            return
        self.go_on(self.frontier + count, now_s)

    def go_on(self, place: int, now_s: float) -> None:
        """All before a place was read; what was fetched of it was not needed, or was read unseen."""
        for each in [each for each in self.held if each < place]:
            self._release(each)
        self.frontier = max(self.frontier, place)
        if self._top < self.frontier:
            self._top = self.frontier
            self._expected.clear()
            self._again.clear()
        for reader in self.readers.values():
            reader.seen_s, reader.cursor = now_s, max(reader.cursor, self.frontier)

    def missed(self, thread: int) -> None:
        """A thread has read what was not expected of it."""
        reader = self.readers.get(thread)
        if reader is None:
            return
        reader.misses += 1
        # What it reads unseen meanwhile is no miss, either.
        if reader.misses >= (MILESTONE_FILES if self.unseen else MISSES) and reader.bound:
            reader.bound = False
            if not any(other.bound for other in self.readers.values()):
                self.pause()

    def pause(self) -> None:
        """Fetch nothing ahead until a reader is found again."""
        self.followed = False
        self.readers.clear()
        for place in list(self.held):
            self._release(place)

    def distance(self, file: int) -> int:
        """How much sooner or later than its readers are a file is expected, as far as that says whose it is."""
        return 0

    def is_reader(self, thread: int) -> bool:
        reader = self.readers.get(thread)
        return reader is not None and reader.bound

    def _retire_beginning(self, reader: Reader) -> None:
        """The first reader takes over what was fetched before there was one."""
        beginning = self.readers.pop(None, None)
        if beginning is None:
            return
        reader.cursor = max(reader.cursor, beginning.cursor)
        reader.held_bytes += beginning.held_bytes
        for place, (owner, size) in self.held.items():
            if owner is beginning:
                self.held[place] = (reader, size)

    def _pass(self, place: int) -> None:
        if place in self.unseen:
            self.counts.passed += 1
            self._passed.add(place)
        self._release(place)

    def _release(self, place: int) -> None:
        self.unseen.discard(place)
        reader, size = self.held.pop(place)
        reader.held_bytes -= size
        self.held_bytes -= size

    # --- fetching ---

    def wants(self, file: int) -> bool:
        """Whether there is a reason to fetch a file that is expected."""
        return True

    def bound_readers(self, now_s: float) -> list[Reader]:
        """Those that go on; who has not read for long does not count, unless nobody has read since."""
        for reader in self.readers.values():
            reader.seen_s = reader.seen_s or now_s  # of the beginning, before anybody reads
        last_s = max((reader.seen_s for reader in self.readers.values() if reader.bound), default=0.0)
        old = [
            thread
            for thread, reader in self.readers.items()
            if thread is not None and now_s - reader.seen_s > STALL_S and reader.seen_s < last_s
        ]
        for thread in old:
            del self.readers[thread]
        return [reader for reader in self.readers.values() if reader.bound] if self.followed else []

    def next_for(
        self, reader: Reader, size_of: Callable[[int], int], room: int, milestone_bytes: int | None = None
    ) -> tuple[int, int] | None:
        """The next file to be fetched ahead of a reader, and its bytes; None if there is none for so much room.

        ``milestone_bytes``: it will be read unseen, unless a milestone is due, which it is after so much.
        """
        self._extend()
        while (place := max(reader.cursor, self.frontier - self.horizon, 0)) < self._top:
            reader.cursor = place
            file = self.at(place)
            if file is None:
                return None
            size = size_of(file)
            expected = place in (self._expected.get(file), self._again.get(file)) and place not in self._passed
            wanted = place not in self.held and expected and self.wants(file)
            if wanted and size > room:
                return None
            reader.cursor = place + 1
            if wanted and size:
                self.held[place] = (reader, size)
                reader.held_bytes += size
                self.held_bytes += size
                self.counts.asked += 1
                if milestone_bytes is not None:
                    self._place_milestone(reader, place, size, milestone_bytes)
                return file, size
        return None

    def _place_milestone(self, reader: Reader, place: int, size: int, milestone_bytes: int) -> None:
        reader.files += 1
        reader.bytes += size
        # The last file of an epoch always is one: that it has ended is to be noticed.
        last = self.at(place + 1) is None or place + 1 in self._began
        if last or reader.files >= MILESTONE_FILES or reader.bytes >= milestone_bytes:
            reader.files = reader.bytes = 0
        else:
            self.unseen.add(place)

    def goes_unseen(self, file: int) -> bool:
        """Was it given out to be read unseen?"""
        return self._expected.get(file) in self.unseen or self._again.get(file) in self.unseen


@dataclass
class Window:
    """All streams of a node.

    Attributes:
        size_of: bytes of a file.
        total_bytes: most that is fetched ahead of all readers together; file_bytes: most of one file.
        streams: that may be followed, oldest first. counts: of all, those that are gone included.
        unseen: what is fetched from now on will be read unseen, but for milestones.
    """

    size_of: Callable[[int], int]
    total_bytes: int
    file_bytes: int = FILE_BYTES
    streams: list[Stream] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    unseen: bool = False

    @property
    def held_bytes(self) -> int:
        return sum(stream.held_bytes for stream in self.streams)

    def seen(self, file: int, thread: int, now_s: float) -> bool:
        """A thread has begun to read a file: whether that was expected."""
        self.counts.seen += 1
        mine = [stream for stream in self.streams if stream.is_reader(thread)]
        if len(mine) > 1:
            mine.sort(key=lambda stream: stream.distance(file))
        others = (stream for stream in self.streams if stream not in mine)
        for stream in (*mine, *others):
            taken, passed = stream.counts.taken, stream.counts.passed
            if stream.seen(file, thread, now_s):
                self.counts.taken += stream.counts.taken - taken
                self.counts.passed += stream.counts.passed - passed
                stream.counts.predicted += 1
                self.counts.predicted += 1
                return True
        for stream in mine:
            stream.missed(thread)
        return False

    def passed(self, count: int, now_s: float) -> None:
        """Programs have read so many files that nobody has seen: taken for the next ones, of all streams alike."""
        streams = [stream for stream in self.streams if stream.followed]
        for number, stream in enumerate(streams):
            stream.passed((count + number) // len(streams), now_s)

    def take(self, now_s: float) -> list[int]:
        """Files to be fetched now, in turn for all readers, each within its share of the window."""
        for stream in self.streams:
            passed = stream.counts.passed
            stream.sweep()
            self.counts.passed += stream.counts.passed - passed
        pairs = [(stream, reader) for stream in self.streams for reader in stream.bound_readers(now_s)]
        if not pairs:
            return []
        share = self.total_bytes // len(pairs)
        milestone_bytes = share // MILESTONE_PART if self.unseen else None
        held = self.held_bytes
        files: list[int] = []
        while pairs and len(files) < _MOST:
            going: list[tuple[Stream, Reader]] = []
            for stream, reader in pairs:
                room = min(share - reader.held_bytes, self.total_bytes - held)
                found = stream.next_for(reader, self._size, room, milestone_bytes)
                if found is not None:
                    files.append(found[0])
                    held += found[1]
                    going.append((stream, reader))
            pairs = going
        return files

    def goes_unseen(self, file: int) -> bool:
        """Shall a file that was given out go on to the kernel's page cache?"""
        return any(stream.goes_unseen(file) for stream in self.streams)

    def give_way(self, now_s: float) -> None:
        """Let go of what was fetched for streams in which nothing has been read for long, if others could use it."""
        stalled = [s for s in self.streams if s.held and now_s - s.last_s > STALL_S]
        if stalled and len(stalled) < len(self.streams) and self.held_bytes * 2 > self.total_bytes:
            for stream in stalled:
                stream.pause()

    def drop_finished(self, now_s: float) -> None:
        """Forget streams that have come to their end."""
        self.streams = [stream for stream in self.streams if not stream.finished(now_s)]

    def _size(self, file: int) -> int:
        return min(self.size_of(file), self.file_bytes)


def repeated(files: Integers) -> Iterator[Integers]:
    """The same files in every epoch."""
    while True:
        yield files
