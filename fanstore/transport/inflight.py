"""What mpi.py keeps of each peer and of each question under way. Which thread owns what is said here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import trio

from fanstore.transport.window import Window

#: Instead of a number of bytes: the request was cancelled, or its peer is dead (FSX_FAILED in native/mpi/exchange.h).
FAILED = -1
#: Nobody waits for it any more.
TIMED_OUT = -2


class Peer:
    """One other daemon.

    Attributes:
        lost, said_bye: set by the MPI thread, never unset, read by trio.
        window: questions to it that are not answered, those that nobody waits for included; trio only.
        held: a message that waits until this node serves, or None; MPI thread only.
    """

    __slots__ = ("held", "lost", "rank", "said_bye", "window")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lost = False
        self.said_bye = False
        self.window = Window()
        self.held: bytes | None = None


class InFlight:
    """A question to one peer that waits for its answer; trio only.

    Attributes:
        task: who waits, until ``deadline_s`` of time.monotonic(); None after it has given up.
        answer_bytes: at most; with as many it has its place in the window.
    """

    __slots__ = ("answer_bytes", "deadline_s", "peer", "task")

    def __init__(self, peer: Peer, task: Any, deadline_s: float, answer_bytes: int) -> None:
        self.peer = peer
        self.task = task
        self.deadline_s = deadline_s
        self.answer_bytes = answer_bytes

    def give_up(self, _: object) -> trio.lowlevel.Abort:
        """The reader is cancelled. The memory belongs to MPI until the answer comes."""
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED


@dataclass
class Counters:
    """Each is counted by one thread; read by statistics() without a lock. The Exchange counts on its own."""

    fetches: int = 0
    fetched_bytes: int = 0
    served: int = 0
    served_bytes: int = 0
    refused: int = 0
    timeouts: int = 0
    late_answers: int = 0
    slow_pages: int = 0
