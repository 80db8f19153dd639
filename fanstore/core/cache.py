"""The memory cache: chunks that were decompressed or came from a peer, so that many small reads load them once.

Owns the chunks it keeps, the order in which they go, and the count of open handles per inode. Does not know where
chunks come from: the caller gives a function. Used by the reader. Trio thread only: no locks.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fanstore.core.singleflight import SingleFlight

#: Inode and number of the chunk in the file.
ChunkKey = tuple[int, int]

#: Content of a chunk. A view (one dimension, bytes) is the memory into which a peer's answer came: never copied.
ChunkData = bytes | memoryview


@dataclass(frozen=True)
class CacheStatistics:
    """What the cache holds and has done so far."""

    capacity_bytes: int
    used_bytes: int
    chunks: int
    pinned_bytes: int
    open_inodes: int
    hits: int
    misses: int
    joined_loads: int
    failed_loads: int
    evictions: int
    dropped: int
    not_kept: int


class ChunkCache:
    """Least-recently-used chunks up to a number of bytes; chunks of open files are the last to go.

    The capacity bounds what is kept at every moment. What is being loaded is in the hands of the loaders and comes on
    top; the reader bounds it by the number of its workers.

    Attributes:
        capacity_bytes: bound for ``_used_bytes``; 0 keeps nothing, and still loads for several readers at once.
        _loose, _pinned: chunks of files that are not open, and of those that are; oldest first.
            Invariant: a chunk is in exactly one of them, in ``_pinned`` if and only if its inode is in ``_pins``.
        _pins: number of open handles per inode; never 0.
        _chunks_of: numbers of the chunks kept per inode; never empty.
        _used_bytes, _pinned_bytes: bytes in both, and in ``_pinned``.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._loose: OrderedDict[ChunkKey, ChunkData] = OrderedDict()
        self._pinned: OrderedDict[ChunkKey, ChunkData] = OrderedDict()
        self._pins: dict[int, int] = {}
        self._chunks_of: dict[int, set[int]] = {}
        self._used_bytes = 0
        self._pinned_bytes = 0
        self._loads: SingleFlight[ChunkKey, ChunkData] = SingleFlight()
        self._hits = 0
        self._misses = 0
        self._failed_loads = 0
        self._evictions = 0
        self._dropped = 0
        self._not_kept = 0

    def __contains__(self, key: ChunkKey) -> bool:
        """Is the chunk kept? Does not count as use."""
        return key in self._loose or key in self._pinned

    def get_nowait(self, key: ChunkKey) -> ChunkData | None:
        """The chunk if it is kept; then it counts as used just now."""
        chunks = self._pinned if key[0] in self._pins else self._loose
        data = chunks.get(key)
        if data is not None:
            chunks.move_to_end(key)
            self._hits += 1
        return data

    async def get(self, key: ChunkKey, load: Callable[[], Awaitable[ChunkData]], *, keep: bool = True) -> ChunkData:
        """The chunk, kept or loaded; several callers at once load it once. Without ``keep`` it is not kept for others.

        Raises what ``load`` raises, in every caller that waited for it; nothing is kept then.
        """
        data = self.get_nowait(key)
        if data is not None:
            return data
        self._misses += 1
        loads = self._loads
        while key in loads:
            result = await loads.join(key)
            if result:
                return result[0]
            # Its loader was cancelled, and we take over, unless somebody has loaded the chunk meanwhile.
            kept = (self._pinned if key[0] in self._pins else self._loose).get(key)
            if kept is not None:
                return kept
        flight = loads.begin(key)
        try:
            data = await load()
        except BaseException as error:
            self._failed_loads += isinstance(error, Exception)
            loads.end(key, flight, error=error)
            raise
        if keep:
            self._keep(key, data)
        loads.end(key, flight, data)
        return data

    def pin(self, inode: int) -> None:
        """A handle was opened: keep the chunks of this inode until nothing else is left to evict."""
        count = self._pins.get(inode, 0)
        self._pins[inode] = count + 1
        if count == 0:
            self._pinned_bytes += self._move(inode, self._loose, self._pinned)

    def unpin(self, inode: int) -> int:
        """A handle was closed; after the last one the chunks are ordinary again, and count as used just now.

        Returns how many handles are left.
        """
        count = self._pins[inode] - 1
        if count:
            self._pins[inode] = count
        else:
            del self._pins[inode]
            self._pinned_bytes -= self._move(inode, self._pinned, self._loose)
        return count

    def drop(self, inode: int) -> None:
        """Let go of the chunks of an inode that is not open: nobody will want them here soon."""
        for number in self._chunks_of.pop(inode, ()):
            self._used_bytes -= len(self._loose.pop((inode, number)))
            self._dropped += 1

    def _move(
        self, inode: int, source: OrderedDict[ChunkKey, ChunkData], target: OrderedDict[ChunkKey, ChunkData]
    ) -> int:
        moved_bytes = 0
        numbers = self._chunks_of.get(inode)
        if numbers is None:
            return 0
        for number in sorted(numbers):
            data = source.pop((inode, number))
            target[(inode, number)] = data
            moved_bytes += len(data)
        return moved_bytes

    def _keep(self, key: ChunkKey, data: ChunkData) -> None:
        inode, number = key
        pinned = inode in self._pins
        # A chunk of a file that is not open must not push out chunks of open files, so only the rest counts for it.
        reachable_bytes = self.capacity_bytes if pinned else self.capacity_bytes - self._pinned_bytes
        if len(data) > reachable_bytes:
            self._not_kept += 1
            return
        while self._used_bytes + len(data) > self.capacity_bytes:
            self._evict_one()
        (self._pinned if pinned else self._loose)[key] = data
        self._chunks_of.setdefault(inode, set()).add(number)
        self._used_bytes += len(data)
        if pinned:
            self._pinned_bytes += len(data)

    def _evict_one(self) -> None:
        if self._loose:
            (inode, number), data = self._loose.popitem(last=False)
        else:
            (inode, number), data = self._pinned.popitem(last=False)
            self._pinned_bytes -= len(data)
        numbers = self._chunks_of[inode]
        numbers.remove(number)
        if not numbers:
            del self._chunks_of[inode]
        self._used_bytes -= len(data)
        self._evictions += 1

    def statistics(self) -> CacheStatistics:
        """A snapshot."""
        return CacheStatistics(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self._used_bytes,
            chunks=len(self._loose) + len(self._pinned),
            pinned_bytes=self._pinned_bytes,
            open_inodes=len(self._pins),
            hits=self._hits,
            misses=self._misses,
            joined_loads=self._loads.joined,
            failed_loads=self._failed_loads,
            evictions=self._evictions,
            dropped=self._dropped,
            not_kept=self._not_kept,
        )

    def validate(self) -> None:
        """Check the invariants of the class; for tests."""
        self._loads.validate()
        loose_bytes = sum(map(len, self._loose.values()))
        pinned_bytes = sum(map(len, self._pinned.values()))
        assert pinned_bytes == self._pinned_bytes
        assert loose_bytes + pinned_bytes == self._used_bytes
        assert 0 <= self._used_bytes <= self.capacity_bytes
        assert all(count > 0 for count in self._pins.values())
        assert all(inode not in self._pins for inode, _ in self._loose)
        assert all(inode in self._pins for inode, _ in self._pinned)
        assert not self._loose.keys() & self._pinned.keys()
        listed = {(inode, number) for inode, numbers in self._chunks_of.items() for number in numbers}
        assert listed == self._loose.keys() | self._pinned.keys()
        assert all(self._chunks_of.values())
