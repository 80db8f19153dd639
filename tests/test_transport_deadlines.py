"""Time limits of questions to peers, watched by one task."""

import time

import trio
import trio.lowlevel
import trio.testing

from fanstore.transport.deadlines import Deadlines
from fanstore.transport.inflight import TIMED_OUT, InFlight, Peer

LATE_S = 1.0
LIMIT_S = 20


async def _wait(deadlines: Deadlines, deadline_s: float, ends: list[int]) -> None:
    request = InFlight(Peer(1), trio.lowlevel.current_task(), deadline_s, 0)
    deadlines.add(request)
    ends.append(await trio.lowlevel.wait_task_rescheduled(request.give_up))


def test_time_that_was_up_before_anybody_looked() -> None:
    """As after SIGSTOP: the limits of all questions, of those to come as well, are past when the process goes on."""
    ends: list[int] = []
    trio.run(_late, ends)
    assert ends == [TIMED_OUT] * 3


async def _late(ends: list[int]) -> None:
    deadlines = Deadlines()
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as watching:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_wait, deadlines, time.monotonic() - LATE_S, ends)
                nursery.start_soon(_wait, deadlines, time.monotonic() - 2 * LATE_S, ends)
                await trio.testing.wait_all_tasks_blocked()
                watching.start_soon(deadlines.watch)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(_wait, deadlines, time.monotonic() - LATE_S, ends)
            watching.cancel_scope.cancel()
