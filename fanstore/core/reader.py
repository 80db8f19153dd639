"""Reads files: finds the chunks, takes them from the best source, checks and decompresses them.

Owns which chunks were checked and the worker threads' limit; the bytes belong to the cache (cache.py) and the files to
the store (store.py). Used by the fuse layer, on the trio thread. Nothing here blocks that thread: what is not in memory
is read, checked and decompressed in worker threads, so a slow read does not hold up a lookup.

A plain file whose chunks were checked is read straight into the answer, on the trio thread if the page cache has it
(RWF_NOWAIT). A plain chunk that was not checked yet is read as a whole once, compared and marked. A compressed chunk
comes through the memory cache. Small chunks that the page cache has are checked and decompressed on the spot, since
that takes less of the trio thread's time than handing them to a worker.

In a job of several nodes, chunks that are not on this one are fetched whole from a peer that has them (remote.py),
plain ones as well as compressed ones, checked after arrival, and come through the memory cache: the many reads of a
file fetch it once, and what is kept is the memory into which it arrived. A plain chunk that one read takes whole is not
kept where the kernel caches above us: it has all of it. The order of sources is: copy on this node,
memory cache, peers, prepared file. What cannot be read or is damaged in one source is asked for in the next.
"""

import enum
import errno
import functools
import logging
import mmap
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple, TypeVar

import trio

from fanstore.core.cache import ChunkCache, ChunkData
from fanstore.core.remote import Remote
from fanstore.core.singleflight import SingleFlight
from fanstore.core.statistics import Source, Statistics
from fanstore.core.store import CANNOT, PartitionFile, PartitionStore
from fanstore.errors import CorruptDataError
from fanstore.format.checksum import xxh3_64
from fanstore.format.codec import Codec, decode_chunk
from fanstore.format.index import Chunk, Index
from fanstore.transport.peers import PeerError

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Largest read that is tried on the trio thread: the largest the kernel sends. Copying 1 MiB from the page cache took
#: 40 µs on the machine of design.md, about as long as a hand-over to a worker thread and back.
INLINE_BYTES = 1 << 20

#: Largest chunk that is checked and decompressed on the trio thread when the page cache has it. Measured with 8 readers
#: on 2 cores, per chunk, CPU of the trio thread alone in brackets: 107 KB plain 54 (36) µs here against 238 (106) µs in
#: a worker thread, LZ4 99 (52) against 251 (66); 256 KB 74 (64) against 145 (68), LZ4 101 (82) against 339 (113); at
#: 512 KB the worker takes load off the trio thread: 94 (93) against 198 (82), LZ4 1278 (1241) against 1337 (240).
INLINE_CHUNK_BYTES = 256 << 10

#: Damaged files that get a log line of their own. A dead disk would otherwise write one per file of the dataset.
MAX_DAMAGE_LINES = 1000


#: By number; Codec(n) takes as long as the rest of a look into the index.
_CODECS = {int(codec): codec for codec in Codec}


class Verify(enum.StrEnum):
    """When bytes are compared with their checksum."""

    FIRST = "first"  #: when a chunk is first read, unless the whole partition was verified on staging
    ALWAYS = "always"  #: whenever bytes come from a disk
    NEVER = "never"


class _Loaded(NamedTuple):
    """A chunk fetched from a partition file or from a peer."""

    data: ChunkData
    source: Source


class WholeChunk(NamedTuple):
    """All of a chunk, of which only a part was asked for."""

    number: int
    content: ChunkData


#: A way to get a chunk: entry, number of the chunk in the file, where it is. Raises OSError or CorruptDataError, saying
#: only what is wrong, or PeerError.
_Way = Callable[[int, int, Chunk], Awaitable[_Loaded]]


class Reader:
    """Answers reads of regular files.

    Attributes:
        verify: when bytes are compared with their checksum.
        marks: per chunk, ``PartitionFile.number`` of the file in which it was found intact; 0 for none. The only
            chunk of a file has the file's entry number, record *r* of the index's section ``chunks`` has
            ``entry_count + r``. One byte rather than one bit: a chunk that was intact in the prepared file must be
            looked at again in a staged copy that was not verified. Shared with the native engine, whose threads read
            and write single bytes of it at any time.
        _passes_on: plain chunks of other nodes that are read whole are not kept: whoever asked keeps them. Their memory
            goes back at once, and is still in the processor's caches when the next answer comes.
        _scratch: where reads on the trio thread land; page-aligned. Never used across an await.
        _limiter: bounds the worker threads, and with them the memory of loads under way (twice a chunk each).
        _damaged: entries that had a read fail.
        _fallen_back: entries that another copy had to answer for.
    """

    def __init__(
        self,
        index: Index,
        store: PartitionStore,
        cache: ChunkCache,
        statistics: Statistics,
        *,
        verify: Verify | str = Verify.FIRST,
        workers: int = 16,
        drop_behind: bool = False,
        remote: Remote | None = None,
    ) -> None:
        """``drop_behind``: let go of plain bytes here when a file is closed; right where the kernel caches above us.

        ``remote``: the other nodes; None if this one is alone.
        """
        self.verify = Verify(verify)
        self._index = index
        self._store = store
        self._cache = cache
        self._statistics = statistics
        self._drop_behind = drop_behind
        self._remote = remote
        self._passes_on = drop_behind and remote is not None
        self._chunk_bytes = index.chunk_bytes
        self._entry_count = index.entry_count
        # Memoryview columns: plain ints without the cost of numpy scalars.
        self._primary = index.inode
        self._size = index.size
        self._codec = index.codec
        self._partition = index.partition
        self._offset = index.offset
        self._first = index.first
        self._count = index.count
        self.marks = bytearray(index.entry_count + len(index.column("chunks")))
        self._scratch = memoryview(mmap.mmap(-1, INLINE_BYTES))
        self._limiter = trio.CapacityLimiter(workers)
        self._loads: SingleFlight[tuple[int, int], _Loaded] = SingleFlight()
        self._damaged: set[int] = set()
        self._fallen_back: set[int] = set()

    def open(self, entry: int) -> None:
        """A handle on this file was opened: its chunks are worth keeping."""
        self._cache.pin(self._primary[entry])

    def close(self, entry: int) -> None:
        """A handle on this file was closed."""
        entry = self._primary[entry]
        if self._cache.unpin(entry) == 0 and self._drop_behind and self._codec[entry] == Codec.NONE:
            if self._remote is not None:
                # Memory that is given back now is still in the processor's caches when the next file arrives in it.
                self._cache.drop(entry)
                if not self._store.is_local(self._partition[entry]):
                    return
            file = self._store.acquire_nowait(self._partition[entry])
            if file is not None:
                _drop_pages(file.fd, self._offset[entry], self._size[entry])
                self._store.release(file)

    async def read(self, entry: int, offset: int, size: int) -> ChunkData:
        """Up to ``size`` bytes of a regular file from ``offset``; fewer only at its end. Not to be changed.

        Raises CorruptDataError, which names the file and the partition file, if no copy can give these bytes.
        """
        entry = self._primary[entry]
        end = min(offset + size, self._size[entry])
        if offset >= end:
            return b""
        try:
            through_cache = self._goes_through_cache(entry, offset // self._chunk_bytes)
            if not through_cache:
                data = await self._read_plain(entry, offset, end)
                if data is not None:
                    return data
            return await self._read_chunks(entry, offset, end, through_cache)
        except CorruptDataError:
            self._statistics.errors.failed_reads += 1
            raise

    async def read_with_chunk(self, entry: int, offset: int, size: int) -> tuple[ChunkData, WholeChunk | None]:
        """As ``read``; with it all of the chunk, if the rest will be wanted soon and does not come from a file here."""
        entry = self._primary[entry]
        number, start = divmod(offset, self._chunk_bytes)
        end = min(offset + size, self._size[entry])
        chunk_end = min((number + 1) * self._chunk_bytes, self._size[entry])
        part_of_it = offset < end <= chunk_end and end - offset < chunk_end - number * self._chunk_bytes
        if not part_of_it or not self._goes_through_cache(entry, number):
            return await self.read(entry, offset, size), None
        came_from: list[Source] = []
        try:
            chunk = await self._cache.get((entry, number), functools.partial(self._fetch, entry, number, came_from))
        except CorruptDataError:
            self._statistics.errors.failed_reads += 1
            raise
        counters = self._statistics.sources[came_from[0] if came_from else Source.CACHE]
        counters.reads += 1
        counters.bytes += end - offset
        return chunk[start : start + end - offset], WholeChunk(number, chunk)

    def let_go(self, entry: int) -> None:
        """The native engine, or the kernel, has what was read of this file: it need not be kept here as well."""
        self._cache.drop(self._primary[entry])

    def asks_peers(self, partition: int) -> bool:
        """Are there other nodes that keep this partition, and come before the prepared file? From any thread."""
        return self._remote is not None and self._remote.has_holders(partition)

    def _goes_through_cache(self, entry: int, number: int) -> bool:
        """Does a read that begins in this chunk use the memory cache, or go straight to a partition file?"""
        if self._codec[entry] != Codec.NONE or self.verify is Verify.ALWAYS:
            return True
        remote = self._remote
        if remote is None:
            return False
        partition = self._partition[entry]
        return not self._store.is_local(partition) and ((entry, number) in self._cache or remote.has(partition))

    async def _read_plain(self, entry: int, offset: int, end: int) -> bytes | None:
        """Read a plain file directly; None if chunks must be checked first, or if this way does not work out."""
        partition = self._partition[entry]
        file = self._store.acquire_nowait(partition)
        if file is None:
            try:
                file = await self._in_thread(self._store.acquire, partition)
            except OSError:
                return None  # met again, and reported, when the chunk is fetched
        try:
            if not (self.verify is Verify.NEVER or file.verified or self._is_marked(file, entry, offset, end)):
                return None
            position, length = self._offset[entry] + offset, end - offset
            data = self._pread_nowait(file, position, length)
            if data is None:
                try:
                    data = await self._in_thread(_pread_exactly, file, position, length)
                except (OSError, CorruptDataError):
                    return None  # likewise; and there may be another copy
            counters = self._statistics.sources[file.source]
            counters.reads += 1
            counters.bytes += length
            counters.fetches += 1
            counters.fetched_bytes += length
            return data
        finally:
            self._store.release(file)

    def _pread_nowait(self, file: PartitionFile, position: int, length: int) -> bytes | None:
        """Read what the page cache has; None if it does not have all of it."""
        if length > INLINE_BYTES or file.nowait_flags == CANNOT:
            return None
        target = self._scratch[:length]
        try:
            got = os.preadv(file.fd, (target,), position, file.nowait_flags)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                file.nowait_flags = CANNOT  # this file system cannot; do not ask it again
            return None  # any other error comes back in the worker thread, where it is reported
        return bytes(target) if got == length else None

    async def _read_chunks(self, entry: int, offset: int, end: int, through_cache: bool) -> ChunkData:
        parts: list[ChunkData] = []
        pass_on = self._passes_on and self._codec[entry] == Codec.NONE
        position = offset
        while position < end:
            number, start = divmod(position, self._chunk_bytes)
            stop = min(start + end - position, self._chunk_bytes)
            key = (entry, number)
            if through_cache:
                came_from: list[Source] = []  # filled if the cache does not have it, and nobody else loads it
                load = functools.partial(self._fetch, entry, number, came_from)
                whole = start == 0 and (stop == self._chunk_bytes or position + stop == self._size[entry])
                chunk = await self._cache.get(key, load, keep=not (whole and pass_on))
                source = came_from[0] if came_from else Source.CACHE
            else:
                # Not kept: from now on it is marked, and is read from the page cache piece by piece.
                chunk, source = await self._loads.run(key, functools.partial(self._fetch_once, entry, number))
            counters = self._statistics.sources[source]
            counters.reads += 1
            counters.bytes += stop - start
            if stop - start == len(chunk):
                parts.append(chunk)
            else:
                parts.append(chunk[start:stop])  # no copy if it is a view
            position += stop - start
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _fetch_once(self, entry: int, number: int) -> _Loaded:
        came_from: list[Source] = []
        return _Loaded(await self._fetch(entry, number, came_from), came_from[0])

    async def _fetch(self, entry: int, number: int, came_from: list[Source]) -> ChunkData:
        """Get a chunk from the first source that has it intact, which is noted."""
        chunk = self._index.chunk(entry, number)
        problem: OSError | CorruptDataError | None = None
        for way in self._ways(chunk.partition):
            try:
                loaded = await way(entry, number, chunk)
            except PeerError as error:
                log.debug("%s", error)  # counted per peer, and reported where that is of use (remote.py)
                continue
            except (OSError, CorruptDataError) as error:
                problem = error
                continue
            if problem is not None:
                self._report_fallback(entry, problem, loaded.source)
            came_from.append(loaded.source)
            return loaded.data
        assert problem is not None
        raise self._report_damage(entry, chunk.partition, problem) from problem

    def _ways(self, partition: int) -> Iterator[_Way]:
        """The sources of a partition, best first; what is the best is decided when it is asked for."""
        remote = self._remote
        local = self._store.is_local(partition)
        if local:
            yield self._fetch_from_best
        if remote is not None:
            yield self._fetch_from_peers
        if not local:
            yield self._fetch_from_best  # the prepared file, or a copy that was completed meanwhile
        if self._store.is_local(partition):
            yield self._fetch_from_prepared
        if remote is not None:
            yield self._fetch_from_any_peer

    async def _fetch_from_best(self, entry: int, number: int, chunk: Chunk) -> _Loaded:
        return await self._fetch_from(entry, number, chunk, prepared=False)

    async def _fetch_from_prepared(self, entry: int, number: int, chunk: Chunk) -> _Loaded:
        return await self._fetch_from(entry, number, chunk, prepared=True)

    async def _fetch_from_any_peer(self, entry: int, number: int, chunk: Chunk) -> _Loaded:
        return await self._fetch_from_peers(entry, number, chunk, last_resort=True)

    async def _fetch_from_peers(self, entry: int, _number: int, chunk: Chunk, last_resort: bool = False) -> _Loaded:
        """Get the chunk from another node, check and decode it. Raises PeerError."""
        assert self._remote is not None
        codec = _CODECS[self._codec[entry]]
        check = self.verify is not Verify.NEVER
        # The bytes are in memory: to compare a plain chunk of 4 MiB takes 0.1 ms, as long as the trio thread would need
        # to hand it to a worker and take it back (measured: 97 µs of its time for 512 KiB, which take 9 µs to compare).
        inline = codec is Codec.NONE or chunk.content_bytes <= INLINE_CHUNK_BYTES
        data = await self._remote.fetch(
            chunk,
            lambda stored: _decode_checked(stored, chunk, codec, check),
            run=None if inline else self._in_thread,
            last_resort=last_resort,
        )
        counters = self._statistics.sources[Source.REMOTE]
        counters.fetches += 1
        counters.fetched_bytes += chunk.stored_bytes
        if check:
            self._statistics.verification.chunks += 1
            self._statistics.verification.bytes += chunk.stored_bytes
        return _Loaded(data, Source.REMOTE)

    async def _fetch_from(self, entry: int, number: int, chunk: Chunk, prepared: bool) -> _Loaded:
        """Read, check, mark and decode a chunk. Raises OSError or CorruptDataError, saying only what is wrong."""
        codec = _CODECS[self._codec[entry]]
        mark = entry if self._count[entry] == 0 else self._entry_count + self._first[entry] + number
        file = None if prepared else self._store.acquire_nowait(chunk.partition)
        if file is None:
            file = await self._in_thread(lambda: self._store.acquire(chunk.partition, prepared=prepared))
        try:
            known = file.verified or self.marks[mark] == file.number
            # Where one copy has failed, nothing that was found out earlier counts for the other.
            check = self.verify is Verify.ALWAYS or (self.verify is Verify.FIRST and (prepared or not known))
            drop = self._drop_behind and codec is not Codec.NONE
            stored: bytes | None = None
            data: ChunkData
            if chunk.content_bytes <= INLINE_CHUNK_BYTES:
                stored = self._pread_nowait(file, chunk.offset, chunk.stored_bytes)
            if stored is not None:
                data = _decode_checked(stored, chunk, codec, check)
                if drop:
                    _drop_pages(file.fd, chunk.offset, chunk.stored_bytes)
            else:
                data = await self._in_thread(_load_chunk, file, chunk, codec, check, drop)
        finally:
            self._store.release(file)
        counters = self._statistics.sources[file.source]
        counters.fetches += 1
        counters.fetched_bytes += chunk.stored_bytes
        if check:
            self.marks[mark] = file.number
            self._statistics.verification.chunks += 1
            self._statistics.verification.bytes += chunk.stored_bytes
        return _Loaded(data, file.source)

    def _is_marked(self, file: PartitionFile, entry: int, offset: int, end: int) -> bool:
        """Were all chunks of this range found intact in this file?"""
        if self._count[entry] == 0:
            return self.marks[entry] == file.number
        base = self._entry_count + self._first[entry]
        first, last = offset // self._chunk_bytes, (end - 1) // self._chunk_bytes
        return all(self.marks[base + number] == file.number for number in range(first, last + 1))

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        # Never abandoned: a cancelled reader waits for its thread, so a descriptor is not given back while in use.
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._limiter)

    def _report_damage(self, entry: int, partition: int, problem: OSError | CorruptDataError) -> CorruptDataError:
        """One log line per file, not one per read; returns the error to raise."""
        # The bytes of a name need not be UTF-8; what is not comes out as \xNN.
        path = self._index.path(entry).decode(errors="backslashreplace")
        file = self._store.path(partition, prepared=True)
        error = CorruptDataError(f"cannot read '{path}' from partition file {file}: {_reason(problem)}")
        if entry not in self._damaged:
            self._damaged.add(entry)
            self._statistics.errors.damaged_files += 1
            if len(self._damaged) <= MAX_DAMAGE_LINES:
                log.error("%s", error)
            if len(self._damaged) == MAX_DAMAGE_LINES:
                log.error("%d files cannot be read; further ones are only counted", MAX_DAMAGE_LINES)
        return error

    def _report_fallback(self, entry: int, problem: OSError | CorruptDataError, source: Source) -> None:
        self._statistics.errors.fallbacks += 1
        if entry not in self._fallen_back and len(self._fallen_back) < MAX_DAMAGE_LINES:
            self._fallen_back.add(entry)
            path = self._index.path(entry).decode(errors="backslashreplace")
            file = self._store.path(self._partition[entry])
            where = "another node" if source is Source.REMOTE else "the prepared dataset"
            log.warning("'%s' is read from %s: local copy %s: %s", path, where, file, _reason(problem))

    def validate(self) -> None:
        """Check the invariants when no read is under way; for tests."""
        self._loads.validate()
        assert len(self._loads) == 0
        assert self._limiter.borrowed_tokens == 0
        assert max(self.marks, default=0) <= 2
        assert self._statistics.errors.damaged_files == len(self._damaged)


def _reason(problem: OSError | CorruptDataError) -> str:
    return (problem.strerror or str(problem)) if isinstance(problem, OSError) else str(problem)


def _pread_exactly(file: PartitionFile, position: int, length: int) -> bytes:
    """Read a range of a partition file; a file that ends before it is damaged, not at its end. In a worker thread."""
    data = os.pread(file.fd, length, position)
    if len(data) == length:
        return data
    parts = [data]
    missing = length - len(data)
    while missing and data:
        data = os.pread(file.fd, missing, position + length - missing)
        parts.append(data)
        missing -= len(data)
    if missing:
        raise CorruptDataError(f"the partition file is truncated: it ends at byte {position + length - missing}")
    return b"".join(parts)


def _load_chunk(file: PartitionFile, chunk: Chunk, codec: Codec, check: bool, drop: bool) -> ChunkData:
    """Read, check and decode one chunk. In a worker thread."""
    stored = _pread_exactly(file, chunk.offset, chunk.stored_bytes)
    if drop:
        _drop_pages(file.fd, chunk.offset, chunk.stored_bytes)
    return _decode_checked(stored, chunk, codec, check)


def _decode_checked(stored: ChunkData, chunk: Chunk, codec: Codec, check: bool) -> ChunkData:
    """Content of a stored chunk. On any thread."""
    if check and xxh3_64(stored) != chunk.checksum:
        end = chunk.offset + chunk.stored_bytes
        raise CorruptDataError(f"bytes {chunk.offset} to {end} do not match their checksum")
    if codec is Codec.NONE:
        return stored
    return decode_chunk(codec, stored, chunk.content_bytes, chunk.first)


def _drop_pages(fd: int, offset: int, length: int) -> None:
    """Let the page cache forget a range: its bytes are kept above (by the kernel's cache of the mount, or by ours)."""
    try:
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        log.debug("fadvise is not possible: %s", error)  # it is advice: nothing depends on it
