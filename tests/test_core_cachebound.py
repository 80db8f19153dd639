"""The bound of the memory caches, by what a control group has left."""

import logging
from collections.abc import Callable

import pytest
import trio
import trio.testing

from fanstore.dataset.cache_bound import GROWTH_ALONE_BYTES, INTERVAL_S, STEP_BYTES, CacheBound
from fanstore.dataset.memory_limit import GroupMemory

MIB = 1 << 20
GIB = 1 << 30
START_BYTES = 30 * MIB  #: of the process, when it begins


class Caches:
    """What a bound is set for: so much is in them, of so much."""

    def __init__(self, wanted_bytes: int, limit_bytes: int) -> None:
        self.group: GroupMemory | None = GroupMemory(limit_bytes, 0)
        self.used_bytes = 0
        self.bounds: list[int] = []
        self.bound = CacheBound(
            wanted_bytes,
            GROWTH_ALONE_BYTES,
            lambda: self.used_bytes,
            self.bounds.append,
            lambda: self.group,
            lambda: START_BYTES + self.used_bytes,
        )

    def look(self, free_bytes: int) -> None:
        assert self.group is not None
        self.group = GroupMemory(self.group.limit_bytes, self.group.limit_bytes - free_bytes)
        self.bound.look()


def test_what_was_asked_for_where_there_is_room() -> None:
    caches = Caches(GIB, 8 * GIB)
    caches.look(4 * GIB)
    assert caches.bounds == [] and caches.bound.bound_bytes == GIB
    assert caches.bound.describe()["cache_withheld_bytes"] == 0


def test_gives_way_and_comes_back(expect_warnings: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    expect_warnings(r"memory is short: 512 MiB of the 8 GiB .* gives way, to \S+ MiB of --cache 1 GiB")
    caches = Caches(GIB, 8 * GIB)
    caches.used_bytes = 300 * MIB
    with caplog.at_level(logging.WARNING):
        caches.look(512 * MIB)
        (first,) = caches.bounds
        assert 300 * MIB + 512 * MIB - 256 * MIB - STEP_BYTES <= first <= 300 * MIB + 512 * MIB - 256 * MIB
        caches.look(100 * MIB)
        assert caches.bounds[-1] < 300 * MIB - 100 * MIB, "more is let go than others need right now"
        caches.used_bytes = 0
        caches.look(0)
        assert caches.bounds[-1] == 0
        caches.look(2 * GIB)
        assert caches.bounds[-1] == caches.bound.bound_bytes == GIB
    assert len(caplog.records) == 1, "it is said once"
    assert caches.bound.describe()["limit_bytes"] == 8 * GIB


def test_little_is_withheld_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caches = Caches(GIB, 8 * GIB)
    with caplog.at_level(logging.WARNING):
        caches.look(GIB + 200 * MIB)
    (bound,) = caches.bounds
    assert GIB * 3 // 4 < bound < GIB and caches.bound.describe()["cache_withheld_bytes"] == GIB - bound
    assert not caplog.records


def test_what_the_daemon_will_need_is_left(expect_warnings: Callable[..., None]) -> None:
    expect_warnings("memory is short")
    caches = Caches(GIB, 256 * MIB)
    caches.look(220 * MIB)
    assert 0 < caches.bounds[-1] <= 220 * MIB - GROWTH_ALONE_BYTES + MIB


def test_ends_without_a_limit_and_looks_again_with_one(expect_warnings: Callable[..., None]) -> None:
    expect_warnings("memory is short")

    async def main() -> None:
        caches = Caches(GIB, 8 * GIB)
        with trio.move_on_after(10 * INTERVAL_S) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(caches.bound.run)
                await trio.sleep(INTERVAL_S * 1.5)
                assert caches.bounds == []
                caches.group = GroupMemory(8 * GIB, 8 * GIB)
                await trio.sleep(INTERVAL_S * 1.5)
                assert caches.bounds == [0]
                caches.group = None
        assert not scope.cancelled_caught, "it ends when there is no limit"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.001))


def test_what_cannot_be_looked_at_now_changes_nothing() -> None:
    """No descriptor is left at this moment: the daemon lives on, and looks again later."""

    def look() -> GroupMemory:
        raise OSError(24, "Too many open files")

    bounds: list[int] = []
    bound = CacheBound(GIB, GROWTH_ALONE_BYTES, lambda: 0, bounds.append, look, lambda: START_BYTES)
    assert bound.look(), "it is worth looking again"
    assert bounds == [] and bound.bound_bytes == GIB
