"""The chunk broker, as Python uses it: reads of the Python engine, and the stored bytes that C cannot get by itself.

Owns the broker in C (native/chunks/broker.h), which has the cache, what is in flight, checking, decoding and eviction,
and the eventfd by which it says that something is to be taken. Translates, and nothing else: what the sources are is
decided in sources.py, whom to ask among the peers in remote.py. Trio thread, but for ``_publish``, which the store
calls on any.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from fanstore import _native
from fanstore.dataset.remote import Failure, Remote
from fanstore.dataset.sources import Sources, Verify
from fanstore.dataset.store import PartitionFile, PartitionStore
from fanstore.errors import CorruptDataError
from fanstore.format.codec import CHUNK_BYTES
from fanstore.format.index import Index
from fanstore.telemetry.statistics import EngineCounters, Source, Statistics

log = logging.getLogger(__name__)

#: Longest piece that one call reads: FSX_CHUNK_BYTES of native/format/index.h. Of a chunk that is read in parts, the
#: cache keeps the rest, and the parts are copied once more.
PIECE_BYTES = CHUNK_BYTES

#: Milliseconds for threads to end once they are told to; only one that hangs in a read of a dead disk needs longer.
STOP_LIMIT_MS = 3000

#: Sockets over which programs ask for chunks, and threads that answer them.
FETCHERS_MOST, FETCHER_THREADS = 1024, 4

#: Files whose last problem is remembered.
PROBLEMS_MOST = 100

_VERIFY = {Verify.FIRST: 0, Verify.ALWAYS: 1, Verify.NEVER: 2}
#: enum fsx_source of native/chunks/counts.h.
_SOURCES = {Source.LOCAL: 0, Source.REMOTE: 1, Source.SHARED: 2}


class _Waiting:
    """A read of Python's that waits for its chunk."""

    __slots__ = ("event", "result")

    def __init__(self) -> None:
        self.event = trio.Event()
        self.result: bytes | int = errno.EIO


class Broker:
    """The chunks of one dataset, for whoever wants them on this node.

    Attributes:
        native: the broker in C, for other faces that are in C.
        _budget: descriptors that may still be published; guarded by ``_lock``.
        _waiting: reads under way, by token.
        _problems: why the last files that could not be read could not, by entry.
        _stopped: the threads have ended; counters are those of that moment.
    """

    def __init__(
        self,
        index: Index,
        store: PartitionStore,
        sources: Sources,
        statistics: Statistics,
        *,
        capacity_bytes: int,
        loaders: int = 4,
        shared_readers: int = 4,
        remote: Remote | None = None,
    ) -> None:
        """Raises OSError.

        Args:
            capacity_bytes: what may be kept.
            loaders: threads that read for those who may not block; shared_readers: how many threads may wait for the
                shared file system at a time.
            remote: the other nodes, which the broker asks by itself if the transport has a part in C.
        """
        self._index = index
        self._sources = sources
        self._statistics = statistics
        # Memoryview columns: plain ints without the cost of numpy scalars.
        self._primary = index.inode
        self._size = index.size
        self.marks = bytearray(index.entry_count + len(index.column("chunks")))
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.native = _native.Broker(
            index.native,
            self.marks,
            verify=_VERIFY[sources.verify],
            capacity_bytes=capacity_bytes,
            shared_readers=shared_readers,
            loaders=loaders,
            wake=self._wake,
        )
        self._lock = threading.Lock()
        # Two descriptors per file, one of them for direct I/O; the store itself may use half of all.
        self._budget = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8
        self._tokens = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._problems: dict[int, str] = {}
        self._stopped = False
        self._last: dict[str, Any] = {}
        self._last_fetched: tuple[Sequence[tuple[int, int]], tuple[int, int, int, int, bytes]] = ([], (0, 0, 0, 0, b""))
        self._remote: Remote | None = None
        if remote is not None and remote.exchange is not None:
            self.native.ask_peers(remote.exchange, remote.rank, remote.timeout_s)
            self._remote = remote
            remote.share_with(self)
        self.native.start()
        statistics.add_counters(self.counters)
        statistics.add_section("cache", self.cache)
        store.tell_of_files(self._publish)

    # --- wanting ---

    async def read(self, entry: int, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes of a regular file from ``offset``; fewer only at its end.

        Raises CorruptDataError if no source can give these bytes; the log says why.
        """
        entry = self._primary[entry]
        end = min(offset + size, self._size[entry])
        if offset >= end:
            return b""
        if end - offset <= PIECE_BYTES:
            return await self._read_piece(entry, offset, end - offset)
        parts = [
            await self._read_piece(entry, start, min(PIECE_BYTES, end - start))
            for start in range(offset, end, PIECE_BYTES)
        ]
        return b"".join(parts)

    async def _read_piece(self, entry: int, offset: int, length: int) -> bytes:
        data = self.native.read_nowait(entry, offset, length)
        if data is not None:
            return data
        token = next(self._tokens)
        waiting = self._waiting[token] = _Waiting()
        self.native.read(entry, offset, length, token)
        await waiting.event.wait()  # who is cancelled leaves it: the result is taken, and nobody wants it
        if isinstance(waiting.result, int):
            path = self._index.path(entry).decode(errors="backslashreplace")
            reason = self._problems.get(entry, f"cannot read '{path}': {os.strerror(waiting.result)}")
            raise CorruptDataError(reason)
        return waiting.result

    def prefetch(self, entry: int, number: int, into_kernel: bool = False) -> bool:
        """Bring a chunk into the cache for one use, behind those that readers wait for (native/chunks/prefetch.h).

        ``into_kernel``: the file's beginning goes on to the page cache of the mount. False if too many are in line.
        """
        return not self._stopped and self.native.want(self._primary[entry], number, into_kernel)

    def keep(self, entry: int, number: int) -> bool:
        """The same, but it stays for as long as there is room, until ``forget``."""
        return not self._stopped and self.native.want(self._primary[entry], number, False, True)

    def forget(self, entry: int, number: int) -> None:
        """A chunk need not stay any more."""
        if not self._stopped:
            self.native.forget(self._primary[entry], number)

    # --- what C asks for ---

    async def run(self) -> None:
        """Bring what C asks for, and hand out what it has read, until it is cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await trio.lowlevel.wait_readable(self._wake)
                os.eventfd_read(self._wake)
                while upcalls := self.native.take_upcalls():
                    self._note_failures()  # after it: why a chunk is asked for here is noted before it is
                    for entry, number in upcalls:
                        nursery.start_soon(self._bring, entry, number)
                self._note_failures()
                for token, result in self.native.take_reads():
                    waiting = self._waiting.pop(token)
                    waiting.result = result
                    waiting.event.set()

    async def _bring(self, entry: int, number: int) -> None:
        """The stored bytes of one chunk."""
        try:
            stored, source = await self._sources.stored(entry, number)
        except CorruptDataError as error:
            self._refuse(entry, number, str(error))  # the sources have logged it
        except Exception as error:
            log.error("unexpected error while a chunk was fetched; please report it", exc_info=error)
            self._refuse(entry, number, str(error))
        else:
            self.native.give(entry, number, stored, _SOURCES[source])

    def _refuse(self, entry: int, number: int, reason: str) -> None:
        self._problems.pop(entry, None)
        self._problems[entry] = reason
        if len(self._problems) > PROBLEMS_MOST:
            del self._problems[next(iter(self._problems))]
        self._statistics.errors.failed_reads += self.native.refuse(entry, number, errno.EIO)

    def _note_failures(self) -> None:
        if self._remote is not None:
            while failures := self.native.take_failures():
                for failure, peer, partition in failures:
                    self._remote.note_failure(Failure(failure), peer, partition)

    # --- programs that ask for chunks ---

    def share(self) -> int:
        """A descriptor of the cache, for reading: from the first call on its memory is shared. Raises OSError."""
        most = min(FETCHERS_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        return self.native.share(FETCHER_THREADS, most)

    def add_fetcher(self) -> int:
        """A descriptor of a socket over which a program asks for chunks (native/clients/fetchers.h). Raises OSError."""
        return self.native.add_fetcher()

    # --- sources ---

    def publishes(self, file: PartitionFile) -> bool:
        """As Sources has it."""
        return self._sources.publishes(file)

    def _publish(self, file: PartitionFile) -> None:
        """A file that the store has opened: C reads from it as well, if it may. From any thread."""
        if not self._sources.publishes(file):
            return
        with self._lock:
            if self._budget == 0 or self._stopped:
                return
            self._budget -= 1
        used = False
        try:
            used = self.native.use(file.partition, file.fd, file.number, file.verified)
        except OSError as error:
            log.warning("%s is read through Python, which is slower: %s", file.path, error.strerror)
        if not used:  # the store has opened it once more, or a local copy was faster
            with self._lock:
                self._budget += 1

    def route(self, partition: int, ranks: Sequence[int]) -> None:
        """As Fetcher of remote.py has it; after the end there is nobody to tell."""
        if not self._stopped:
            self.native.route(partition, ranks)

    def fetched(self) -> tuple[Sequence[tuple[int, int]], tuple[int, int, int, int, bytes]]:
        """As Fetcher of remote.py has it."""
        if not self._stopped:
            self._last_fetched = self.native.fetched()
        return self._last_fetched

    def log_damage(self) -> None:
        """As Sources has it."""
        self._sources.log_damage()

    # --- life and statistics ---

    def stop(self) -> bool:
        """End the threads; False if some hang in a read and were left behind. Reads under way are not answered."""
        if self._stopped:
            return True
        self._last = self.native.statistics()
        if self._remote is not None:
            self.fetched()
        with self._lock:
            self._stopped = True
        ended = self.native.stop(STOP_LIMIT_MS)
        os.close(self._wake)
        return ended

    def _raw(self) -> dict[str, Any]:
        return self._last if self._stopped else self.native.statistics()

    def counters(self) -> EngineCounters:
        """What was given out by the threads of the broker."""
        raw = self._raw()
        return EngineCounters({}, raw["sources"], raw["verification"])

    def cache(self) -> Mapping[str, int]:
        """The section ``cache`` of stats.json."""
        cache: dict[str, int] = self._raw()["cache"]
        return cache

    def set_capacity(self, capacity_bytes: int) -> None:
        """Keep no more than this from now on."""
        if not self._stopped:
            self.native.set_capacity(capacity_bytes)

    def validate(self) -> None:
        """Check the invariants when nothing is being read; for tests."""
        self._sources.validate()
        assert not self._waiting
        for _ in range(1000):  # who was given a chunk may be faster than the thread that gave it
            cache = self.cache()
            if cache["in_flight_bytes"] == 0 and cache["used_bytes"] <= cache["capacity_bytes"]:
                break
            time.sleep(0.001)
        assert cache["in_flight_bytes"] == 0
        assert cache["used_bytes"] <= cache["capacity_bytes"]
        assert max(self.marks, default=0) <= 2
