"""What the daemons of one job can do for each other; the interface that every transport has.

A daemon fetches ranges of partitions that a peer has on its disk, asks peers small questions, and tells all of them
something. Implementations: mpi.py, and for tests tests/inprocess_transport.py (several ranks in one process). The one
conformance class that both pass is in tests/test_transport.py.

Callers are on the trio thread. ``Host`` is what a transport calls on this node; it says on which thread.
"""

from __future__ import annotations

from typing import Protocol

from fanstore import _native
from fanstore.errors import FanstoreError
from fanstore.format.storage import Stored

#: The longest question, answer to a question, or word to all. Answers are JSON of a few hundred bytes per node.
MESSAGE_BYTES = 60_000


class PeerError(FanstoreError):
    """A peer did not give what it was asked for; another source may."""


class PeerLostError(PeerError):
    """The peer is dead. It will not be asked again."""


class PeerTimeoutError(PeerError):
    """The peer did not answer in time. It is asked again when it has shown life."""


class PeerRefusedError(PeerError):
    """The peer answered that it does not have these bytes (any more, or yet)."""


class PeerBusyError(PeerError):
    """The peer is bringing these bytes, and they are not there yet: to be asked again."""


#: Instead of bytes of a partition, for such an answer. Nobody who asks for one byte is answered like this.
NOT_YET = b"\0"


class Host(Protocol):
    """What a transport needs from this node to serve the others. Called on the transport's own thread: never blocks."""

    def mapped_partition(self, partition: int) -> memoryview | None:
        """All of a partition that is on this node's disk, mapped from its file for good; None if it is not here.

        Its pages may be taken out of the page table at any time, by which memory of another kind would lose its bytes.
        What it once was for a partition it remains: the transport may keep it and not ask again.
        """

    async def bring(self, partition: int, offset: int, length: int) -> Stored:
        """Bytes of a partition that is not here as a whole; empty: not here; NOT_YET: to be asked for again.

        On the trio thread; no longer than half of a peer's patience.
        """

    async def answer(self, peer: int, question: bytes) -> bytes:
        """The answer to a peer's question; empty to refuse. On the trio thread; it may take its time."""

    def heard(self, peer: int, word: bytes) -> None:
        """A peer has told something to all."""

    def lost(self, peer: int) -> None:
        """A peer has died. Called once per peer."""


class Peers(Protocol):
    """The other daemons of the job.

    Attributes:
        rank: this daemon's number; size: how many daemons the job began with.
        exchange: with which the native engine can fetch by itself; None if this transport has none.
    """

    rank: int
    size: int

    @property
    def exchange(self) -> _native.Exchange | None: ...

    async def broadcast(self, value: bytes | None) -> memoryview:
        """Rank 0's bytes on every rank, in page-aligned memory. Collective; only before ``serve``."""

    async def gather_all(self, value: bytes) -> list[bytes]:
        """Every rank's bytes, in order of ranks, on every rank. Collective, also after ``serve``."""

    def serve(self, host: Host) -> None:
        """From now on answer the others with ``host``. Once, before anything is fetched."""

    async def fetch(self, peer: int, partition: int, offset: int, length: int, timeout_s: float) -> memoryview:
        """Bytes of a partition from a peer's disk, as they are stored. Raises PeerError. ``length`` is at least 1.

        PeerBusyError: the peer will have it. If the time is up, the memory into which the answer might still arrive is
        given up: never used again.
        """

    async def ask(self, peer: int, question: bytes, timeout_s: float) -> bytes:
        """The peer's answer to a question. Raises PeerError."""

    def tell(self, word: bytes) -> None:
        """Tell something to all peers that are alive; they hear it soon, in the order of telling."""

    def is_lost(self, peer: int) -> bool:
        """Is this peer known to be dead?"""

    def is_silent(self, peer: int) -> bool:
        """Has this peer not answered in time, and not shown life since?"""

    def statistics(self) -> dict[str, object]:
        """Counters for stats.json."""

    def close(self, timeout_s: float) -> None:
        """End the transport; blocks, but no longer than ``timeout_s``."""
