"""What mpi.py keeps of each peer and of each message under way. No behaviour; which thread owns what is said here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fanstore.transport.peers import MESSAGE_BYTES
from fanstore.transport.pending import FAILED
from fanstore.transport.window import WINDOW, Window
from fanstore.transport.wire import HEADER, TAG_REPLY_FIRST


class Peer:
    """One other daemon.

    Attributes:
        lost, said_bye: set by the MPI thread, never unset, read by trio.
        silent: trio sets it at a time-out, the MPI thread unsets it at any sign of life.
        window: questions to it that are not answered, those that nobody waits for included; trio only.
        buffer: where its next message is received; MPI thread only.
        held: bytes in the buffer that wait until this node serves, or None; MPI thread only.
        free_tags: tags that no answer of it is awaited with; MPI thread only.
    """

    __slots__ = ("buffer", "free_tags", "held", "lost", "rank", "said_bye", "silent", "window")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lost = False
        self.said_bye = False
        self.silent = False
        self.window = Window()
        self.buffer = bytearray(HEADER.size + MESSAGE_BYTES)
        self.held: int | None = None
        self.free_tags = list(range(TAG_REPLY_FIRST, TAG_REPLY_FIRST + WINDOW))


class Flight:
    """A question to one peer: from the trio thread to the MPI thread and back.

    Attributes:
        data: memory for the answer; belongs to MPI from submission until the receive has completed.
        task: who waits, until ``deadline_s`` of time.monotonic(); None after it has given up; trio only.
        got: bytes received, or FAILED; set by the MPI thread.
        tag: of the answer; set by the MPI thread.
        other fields: what is asked; never changed.
    """

    __slots__ = (
        "data",
        "deadline_s",
        "got",
        "kind",
        "length",
        "offset",
        "partition",
        "peer",
        "tag",
        "task",
        "text",
    )

    def __init__(
        self,
        peer: Peer,
        kind: int,
        partition: int,
        offset: int,
        length: int,
        text: bytes,
        data: Any,
        task: Any,
        deadline_s: float,
    ) -> None:
        self.peer = peer
        self.kind = kind
        self.partition = partition
        self.offset = offset
        self.length = length
        self.text = text
        self.data = data
        self.task = task
        self.deadline_s = deadline_s
        self.got = FAILED
        self.tag = 0


class Sent:
    """A message that is being sent; ``weight`` is 1 for a reply, which counts, and 0 for others, which do not."""

    __slots__ = ("weight",)

    def __init__(self, weight: int) -> None:
        self.weight = weight


@dataclass
class Counters:
    """Each is counted by one thread; read by statistics() without a lock."""

    fetches: int = 0
    fetched_bytes: int = 0
    served: int = 0
    served_bytes: int = 0
    refused: int = 0
    timeouts: int = 0
    late_answers: int = 0
    slow_pages: int = 0
