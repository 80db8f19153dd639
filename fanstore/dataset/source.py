"""A source of stored bytes: what every one of them can do.

Owns the interface; each source has a module (local_copies.py, remote.py, shared_files.py, object_store.py), and the
order in which they are asked is in sources.py. A source whose bytes are in files opens them through the store
(store.py), which tells the broker of each: then C reads the descriptor by itself, and asks here no more.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from typing import Protocol

import trio

from fanstore.format.storage import Stored
from fanstore.telemetry.statistics import Source

#: The same bytes, or CorruptDataError if they are not those that were stored. Called on any thread.
Check = Callable[[Stored], Stored]


class PartitionSource(Protocol):
    """Gives ranges of partitions. ``name``: under which it is counted in statistics."""

    name: Source

    async def read(self, partition: int, offset: int, length: int, check: Check) -> Stored:
        """Exactly this range, from the first copy that passes the check.

        Raises OSError, whose strerror says what is wrong, CorruptDataError, or PeerError if nobody has it.
        """


class BlockingSource(ABC):
    """A source that reads with calls that block, in worker threads.

    Attributes:
        abandons: a read that nobody waits for any more is left to its thread; otherwise its end is awaited.
        _limiter: bounds the threads, and with them the memory of what is being read.
    """

    name: Source
    abandons = False

    def __init__(self, limiter: trio.CapacityLimiter) -> None:
        self._limiter = limiter

    @property
    def limiter(self) -> trio.CapacityLimiter:
        """For others who read through this one."""
        return self._limiter

    @abstractmethod
    def read_range(self, partition: int, offset: int, length: int) -> Stored:
        """Exactly this range; blocks. Raises OSError, CorruptDataError."""

    @abstractmethod
    def label(self, partition: int) -> str:
        """What sentences call the copy that it has of a partition."""

    async def read(self, partition: int, offset: int, length: int, check: Check) -> Stored:
        return await trio.to_thread.run_sync(
            lambda: check(self.read_range(partition, offset, length)),
            limiter=self._limiter,
            abandon_on_cancel=self.abandons,
        )


class PreparedSource(BlockingSource):
    """The prepared dataset, where it is: the source that has everything, and from which the others are filled.

    Attributes:
        stride: bytes that a stream asks for at once.
    """

    stride: int

    @abstractmethod
    def stream(
        self, partition: int, ranges: Iterable[tuple[int, int]] | None = None
    ) -> Generator[memoryview, None, None]:
        """All of a partition in order, for staging, in blocks as Storage.stream has them.

        ``ranges``: these alone, offset and length; each is taken when it is about to be read.
        """

    def forget(self, partition: int) -> None:
        """All of it was copied: what this node has in memory of it is not needed any more."""
