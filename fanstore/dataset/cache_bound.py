"""The memory cache gives way when the control group of this process is nearly full, before the kernel kills somebody.

Owns the bound of the cache; the cache is given as a function that sets it. Used by the session of a mount, on the
trio thread: a look reads three small files. Without a limit nothing is done.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import trio

from fanstore.allocator import return_freed_memory
from fanstore.dataset.broker import Broker
from fanstore.dataset.memory_limit import GroupMemory, group_memory
from fanstore.telemetry.events import NOTABLE
from fanstore.telemetry.statistics import Statistics, memory
from fanstore.units import format_bytes

log = logging.getLogger(__name__)

#: Seconds between two looks. The cache cannot fill what is left meanwhile: it is bounded by it. What others in the
#: group take is seen at the next look.
INTERVAL_S = 0.5

#: What a daemon grows by after its start besides the cache, on one node and on several (docs/operations.md): buffers,
#: and answers under way. What it has not taken of it yet is left for it.
GROWTH_ALONE_BYTES, GROWTH_TOGETHER_BYTES = 80 << 20, 192 << 20
#: At least this part of the limit, within these bounds, is left for whatever grows in the group between two looks.
RESERVE_PART, RESERVE_LEAST_BYTES, RESERVE_MOST_BYTES = 16, 16 << 20, 256 << 20
#: The bound is a multiple of this, if it is not what was asked for: what comes and goes does not move it each time.
STEP_BYTES = 4 << 20
#: The user is told when this part of the cache or more is withheld: less changes nothing that anybody notices.
TOLD_PART = 4


class CacheBound:
    """The bound of the cache of this node.

    Attributes:
        wanted_bytes: what the user asked for; bound_bytes: what it is now, at most that.
        group: the control group with the least room at the last look; None without a limit.
        _start_bytes: memory of this process when nothing was cached; with the index, in which it does not grow.
        _told: it was logged that the cache gives way.
    """

    def __init__(
        self,
        wanted_bytes: int,
        growth_bytes: int,
        used: Callable[[], int],
        resize: Callable[[int], None],
        look: Callable[[], GroupMemory | None] = group_memory,
        own: Callable[[], int] | None = None,
    ) -> None:
        """``used``: bytes in the cache; ``resize`` sets its bound; ``own``: see own_bytes."""
        self.wanted_bytes = self.bound_bytes = wanted_bytes
        self.group: GroupMemory | None = None
        self._growth_bytes = growth_bytes
        self._own = own or own_bytes
        self._start_bytes = self._own()
        self._used = used
        self._resize = resize
        self._look = look
        self._told = False

    async def run(self) -> None:
        """Look again and again, until it is cancelled. Without a limit this ends at once: none comes later."""
        while True:
            if not self.look():
                return
            await trio.sleep(INTERVAL_S)

    def look(self) -> bool:
        """Set the bound by what is left of the control group. False if there is no limit."""
        try:
            self.group, own = self._look(), self._own()
        except OSError as error:
            log.debug("memory cannot be looked at now: %s", error)  # no descriptor is left, say; the bound stays
            return True
        group = self.group
        if group is None:
            return False
        cached = self._used()
        grown = own - cached - self._start_bytes
        reserve = min(max(group.limit_bytes // RESERVE_PART, RESERVE_LEAST_BYTES), RESERVE_MOST_BYTES)
        bound = max(0, cached + group.room_bytes - max(reserve, self._growth_bytes - grown))
        self._set(self.wanted_bytes if bound >= self.wanted_bytes else bound // STEP_BYTES * STEP_BYTES)
        return True

    def _set(self, bound_bytes: int) -> None:
        shrinks = bound_bytes < self.bound_bytes
        if bound_bytes == self.bound_bytes:
            return
        self.bound_bytes = bound_bytes
        self._resize(bound_bytes)
        if not shrinks:
            return
        return_freed_memory()
        withheld_bytes = self.wanted_bytes - bound_bytes
        if not self._told and self.group is not None and withheld_bytes * TOLD_PART >= self.wanted_bytes:
            self._told = True
            log.warning(
                "memory is short: %s of the %s of this job's control group are left; the memory cache gives way, to %s "
                "of --cache %s for now",
                format_bytes(self.group.room_bytes),
                format_bytes(self.group.limit_bytes),
                format_bytes(bound_bytes),
                format_bytes(self.wanted_bytes),
                extra=NOTABLE,
            )

    def describe(self) -> dict[str, int]:
        """For the section ``memory`` of stats.json; only the last one without a limit."""
        withheld = {"cache_withheld_bytes": self.wanted_bytes - self.bound_bytes}
        if self.group is None:
            return withheld
        return {"limit_bytes": self.group.limit_bytes, "limit_used_bytes": self.group.used_bytes, **withheld}


def bound_cache(cache_bytes: int, broker: Broker, statistics: Statistics, *, alone: bool) -> CacheBound:
    """The bound of the broker's cache, set by what the control group has left before anything is cached; shown in the
    statistics. ``alone``: the job has one node."""
    growth = GROWTH_ALONE_BYTES if alone else GROWTH_TOGETHER_BYTES
    bound = CacheBound(cache_bytes, growth, lambda: broker.cache()["used_bytes"], broker.set_capacity)
    bound.look()
    statistics.add_section("memory", lambda: memory() | bound.describe())
    return bound


def own_bytes() -> int:
    """Memory of this process that the kernel cannot take back."""
    fields = dict(re.findall(r"^(Rss\w+):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE))
    return (int(fields["RssAnon"]) + int(fields["RssShmem"])) << 10
