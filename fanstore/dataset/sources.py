"""Where the stored bytes of a chunk come from: the sources of a partition in the order in which they are tried.

Owns that order, the choice of the source for a prepared dataset (``prepared_source``), and the record of what could not
be read. The order is written here and nowhere else: the broker in C (native/chunks/broker.h) is told which file or
which peers it may try by itself (``publishes``), and asks here for everything that it does not get like that. Used by
broker.py, on the trio thread; what a source is, is in source.py.

The order: the copy on this node, or the one that is being made, the peers that should have one, the prepared dataset,
and at last any peer that is not dead. What cannot be read or is damaged in one source is asked for in the next.
"""

import enum
import logging
from collections.abc import Callable, Iterator

import trio

from fanstore.dataset.damage import FaultyFiles, is_worth_saying
from fanstore.dataset.local_copies import LocalCopies
from fanstore.dataset.object_store import ObjectStore
from fanstore.dataset.partial_copies import PartialCopies
from fanstore.dataset.remote import Remote
from fanstore.dataset.shared_files import SharedFiles
from fanstore.dataset.source import PartitionSource, PreparedSource
from fanstore.dataset.store import PartitionFile, PartitionStore
from fanstore.errors import CorruptDataError
from fanstore.format.checksum import xxh3_64
from fanstore.format.index import Chunk, Index
from fanstore.format.objects import Objects
from fanstore.format.storage import Stored
from fanstore.telemetry.statistics import Source, Statistics
from fanstore.transport.peers import PeerError

log = logging.getLogger(__name__)

#: Threads that read at once; each has the stored bytes of one chunk in memory.
WORKERS = 16


class Verify(enum.StrEnum):
    """When bytes are compared with their checksum."""

    FIRST = "first"  #: when a chunk is first read, unless the whole partition was verified on staging
    ALWAYS = "always"  #: whenever bytes come from a disk
    NEVER = "never"


def prepared_source(store: PartitionStore, limiter: trio.CapacityLimiter | None = None) -> PreparedSource:
    """What reads the prepared dataset where it is."""
    storage = store.prepared.storage
    if isinstance(storage, Objects):
        return ObjectStore(store.prepared, storage)
    return SharedFiles(store, limiter or trio.CapacityLimiter(WORKERS))


class Sources:
    """The sources of one dataset on this node.

    Attributes:
        verify: when bytes are compared with their checksum.
        _local, _partial, _remote, _prepared: the copies here, those that are being made, the other nodes (None if this
            one is alone), the dataset itself.
        _discard: as for the constructor.
        _damaged, _fallen_back: files that could not be read, and those that another copy had to answer for.
    """

    def __init__(
        self,
        index: Index,
        store: PartitionStore,
        statistics: Statistics,
        remote: Remote | None,
        verify: Verify,
        discard: Callable[[int], None] = lambda partition: None,
    ) -> None:
        """``discard`` is called for a partition whose copy on this node is damaged, in a worker thread."""
        self.verify = verify
        self._discard = discard
        self._index = index
        self._statistics = statistics
        self._limiter = trio.CapacityLimiter(WORKERS)
        self._local = LocalCopies(store, self._limiter)
        self._remote = remote
        self._prepared = prepared_source(store, self._limiter)
        self._partial = PartialCopies(store, self._prepared)
        self._damaged = FaultyFiles(index.entry_count)
        self._fallen_back = FaultyFiles(index.entry_count)

    def publishes(self, file: PartitionFile) -> bool:
        """May the broker read this file by itself, before it asks anybody else? From any thread."""
        if file.source is Source.LOCAL:
            return True
        if self._partial.has(file.partition):
            return False  # it comes through the copy that is being made
        # Other nodes come before the prepared file.
        return self._remote is None or not self._remote.has_holders(file.partition)

    async def stored(self, entry: int, number: int) -> tuple[Stored, Source]:
        """The stored bytes of a chunk from the first source that has them intact.

        Raises CorruptDataError, which names the file and the partition file, if none has.
        """
        chunk = self._index.chunk(entry, number)
        problem: OSError | CorruptDataError | None = None

        def check(stored: Stored) -> Stored:
            return self._checked(stored, chunk)

        for source in self._order(chunk.partition):
            try:
                stored = await source.read(chunk.partition, chunk.offset, chunk.stored_bytes, check)
            except PeerError as error:
                log.debug("%s", error)  # counted per peer, and reported where that is of use (remote.py)
                continue
            except (OSError, CorruptDataError) as error:
                problem = error
                if source is self._local:
                    await trio.to_thread.run_sync(self._discard, chunk.partition, limiter=self._limiter)
                continue
            if problem is not None:
                self._report_fallback(entry, chunk.partition, problem, source.name)
            return stored, source.name
        assert problem is not None
        raise self._report_damage(entry, chunk.partition, problem) from problem

    def _order(self, partition: int) -> Iterator[PartitionSource]:
        """Best first; what is the best is decided when it is asked for."""
        local = self._local.has(partition)
        if local:
            yield self._local
        elif self._partial.has(partition):
            yield self._partial
        if self._remote is not None:
            yield self._remote
        if not local and self._local.has(partition):
            yield self._local  # it was completed meanwhile
        yield self._prepared
        if self._remote is not None:
            yield self._remote.last_resort

    def _checked(self, stored: Stored, chunk: Chunk) -> Stored:
        """The same bytes. Raises CorruptDataError if they are not those that were stored. On any thread."""
        if self.verify is not Verify.NEVER and xxh3_64(stored) != chunk.checksum:
            end = chunk.offset + chunk.stored_bytes
            raise CorruptDataError(f"bytes {chunk.offset} to {end} do not match their checksum")
        return stored

    # --- what could not be read ---

    def _report_damage(self, entry: int, partition: int, problem: OSError | CorruptDataError) -> CorruptDataError:
        """A log line for the first file of a partition and for each power of ten; returns the error to raise."""
        label = self._prepared.label(partition)
        error = CorruptDataError(f"cannot read '{self._path(entry)}' from {label}: {_reason(problem)}")
        count = self._damaged.add(entry, partition)
        if count:
            self._statistics.errors.damaged_files += 1
            if is_worth_saying(count):
                log.error("%s%s", error, _so_far(count))
        return error

    def _report_fallback(self, entry: int, partition: int, problem: OSError | CorruptDataError, source: Source) -> None:
        self._statistics.errors.fallbacks += 1
        count = self._fallen_back.add(entry, partition)
        if is_worth_saying(count):
            where = "another node" if source is Source.REMOTE else "the prepared dataset"
            text = f"'{self._path(entry)}' is read from {where}: {self._local.label(partition)}: "
            log.warning("%s%s%s", text, _reason(problem), _so_far(count))

    def _path(self, entry: int) -> str:
        # The bytes of a name need not be UTF-8; what is not comes out as \xNN.
        return self._index.path(entry).decode(errors="backslashreplace")

    def log_damage(self) -> None:
        """At the end: how many files of each partition could not be read, where that was not said last."""
        for partition, count in self._damaged.untold():
            log.error("%s files could not be read from %s", f"{count:,}", self._prepared.label(partition))
        for partition, count in self._fallen_back.untold():
            label = self._local.label(partition)
            log.warning("%s files were not read from %s, but from elsewhere", f"{count:,}", label)

    def validate(self) -> None:
        """Check the invariants when nothing is being read; for tests."""
        assert self._limiter.borrowed_tokens == 0
        assert self._statistics.errors.damaged_files == self._damaged.total


def _so_far(count: int) -> str:
    return f" ({count:,} files of this partition so far)" if count > 1 else ""


def _reason(problem: OSError | CorruptDataError) -> str:
    return (problem.strerror or str(problem)) if isinstance(problem, OSError) else str(problem)
