"""The memory cache and the single flight below it: real trio tasks, no mount, no files."""

import random
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from fanstore.core.cache import ChunkCache
from fanstore.core.singleflight import SingleFlight
from fanstore.errors import CorruptDataError


def immediately(data: bytes) -> Callable[[], Awaitable[bytes]]:
    async def load() -> bytes:
        await trio.lowlevel.checkpoint()
        return data

    return load


async def unexpected() -> bytes:
    raise AssertionError("this must not be loaded")


def fill(cache: ChunkCache, *keys: tuple[int, int], size: int = 10) -> None:
    """Load chunks one after the other."""

    async def main() -> None:
        for key in keys:
            await cache.get(key, immediately(bytes(size)))

    trio.run(main)
    cache.validate()


def test_a_second_get_is_a_hit() -> None:
    cache = ChunkCache(100)

    async def main() -> None:
        assert await cache.get((1, 0), immediately(b"one")) == b"one"
        assert await cache.get((1, 0), unexpected) == b"one"

    trio.run(main)
    cache.validate()
    statistics = cache.statistics()
    assert (statistics.hits, statistics.misses, statistics.used_bytes, statistics.chunks) == (1, 1, 3, 1)


def test_statistics_are_frozen() -> None:
    with pytest.raises(AttributeError):
        ChunkCache(1).statistics().hits = 1  # type: ignore[misc]


def test_least_recently_used_goes_first() -> None:
    cache = ChunkCache(30)
    fill(cache, (1, 0), (2, 0), (3, 0))
    assert cache.get_nowait((1, 0)) is not None
    fill(cache, (4, 0))
    assert cache.get_nowait((2, 0)) is None
    assert cache.get_nowait((1, 0)) is not None
    assert cache.statistics().evictions == 1


def test_a_chunk_larger_than_the_capacity_is_returned_but_not_kept() -> None:
    cache = ChunkCache(25)
    fill(cache, (1, 0), (2, 0))
    fill(cache, (3, 0), size=26)
    assert cache.get_nowait((3, 0)) is None
    assert cache.get_nowait((1, 0)) is not None, "what is kept must not suffer from what cannot be kept"
    assert cache.statistics().not_kept == 1
    fill(cache, (4, 0), size=25)
    assert cache.statistics().used_bytes == 25


def test_capacity_zero_keeps_nothing() -> None:
    cache = ChunkCache(0)
    fill(cache, (1, 0), (1, 0))
    assert cache.statistics().misses == 2
    assert cache.statistics().used_bytes == 0


def test_chunks_of_open_files_go_last() -> None:
    cache = ChunkCache(30)
    cache.pin(1)
    fill(cache, (1, 0), (2, 0), (3, 0), (4, 0), (5, 0))
    assert cache.get_nowait((1, 0)) is not None
    cache.unpin(1)
    cache.validate()
    fill(cache, (6, 0), (7, 0), (8, 0))
    assert cache.get_nowait((1, 0)) is None


def test_pinning_protects_chunks_that_are_kept_already() -> None:
    cache = ChunkCache(30)
    fill(cache, (1, 0), (1, 1), (2, 0))
    cache.pin(1)
    cache.pin(1)
    cache.validate()
    assert cache.unpin(1) == 1
    fill(cache, (3, 0), (4, 0))
    assert cache.get_nowait((1, 0)) is not None
    assert cache.get_nowait((1, 1)) is not None
    assert cache.unpin(1) == 0
    cache.validate()


def test_open_files_push_out_each_other_when_nothing_else_is_left() -> None:
    cache = ChunkCache(20)
    for inode in (1, 2, 3):
        cache.pin(inode)
    fill(cache, (1, 0), (2, 0), (3, 0))
    assert cache.get_nowait((1, 0)) is None
    assert cache.get_nowait((3, 0)) is not None
    fill(cache, (4, 0))
    assert cache.get_nowait((4, 0)) is None, "a file that is not open does not push out one that is"
    assert cache.statistics().pinned_bytes == 20


def test_dropped_chunks_are_gone() -> None:
    cache = ChunkCache(100)
    fill(cache, (1, 0), (1, 1), (2, 0))
    assert (1, 1) in cache
    cache.drop(1)
    cache.drop(7)
    cache.validate()
    assert (1, 1) not in cache
    assert (2, 0) in cache
    statistics = cache.statistics()
    assert (statistics.used_bytes, statistics.chunks, statistics.dropped, statistics.evictions) == (10, 1, 2, 0)


def test_views_are_kept_as_they_are() -> None:
    cache = ChunkCache(100)
    memory = memoryview(bytearray(30))

    async def load() -> memoryview:
        await trio.lowlevel.checkpoint()
        return memory

    async def main() -> None:
        assert await cache.get((1, 0), load) is memory
        assert await cache.get((1, 0), unexpected) is memory

    trio.run(main)
    cache.validate()
    assert cache.statistics().used_bytes == 30


def test_many_readers_load_once() -> None:
    cache = ChunkCache(100)
    loads = 0

    async def load() -> bytes:
        nonlocal loads
        loads += 1
        await trio.testing.wait_all_tasks_blocked()  # until all the others wait for us
        return b"data"

    async def reader(results: list[bytes]) -> None:
        results.append(bytes(await cache.get((1, 0), load)))

    async def main() -> None:
        results: list[bytes] = []
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(reader, results)
        assert results == [b"data"] * 50

    trio.run(main)
    assert loads == 1
    assert cache.statistics().joined_loads == 49
    cache.validate()


def test_a_failed_load_fails_every_waiter_and_is_tried_again() -> None:
    cache = ChunkCache(100)

    async def load() -> bytes:
        await trio.testing.wait_all_tasks_blocked()
        raise CorruptDataError("broken")

    async def reader(failures: list[str]) -> None:
        try:
            await cache.get((1, 0), load)
        except CorruptDataError as error:
            failures.append(str(error))

    async def main() -> None:
        failures: list[str] = []
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(reader, failures)
        assert failures == ["broken"] * 5
        cache.validate()
        assert await cache.get((1, 0), immediately(b"mended")) == b"mended"

    trio.run(main)
    cache.validate()
    assert cache.statistics().failed_loads == 1


def test_a_cancelled_loader_hands_over_to_a_waiter() -> None:
    cache = ChunkCache(100)
    loaders: list[int] = []

    async def reader(number: int, scope: trio.CancelScope, results: list[bytes]) -> None:
        async def load() -> bytes:
            loaders.append(number)
            if len(loaders) < 3:
                await trio.sleep_forever()
            return b"data"

        with scope:
            results.append(bytes(await cache.get((1, 0), load)))

    async def main() -> None:
        results: list[bytes] = []
        scopes = [trio.CancelScope() for _ in range(4)]
        async with trio.open_nursery() as nursery:
            for number, scope in enumerate(scopes):
                nursery.start_soon(reader, number, scope, results)
                await trio.testing.wait_all_tasks_blocked()
            scopes[3].cancel()  # one who only waits
            await trio.testing.wait_all_tasks_blocked()
            cache.validate()
            assert loaders == [0]
            scopes[0].cancel()  # the loader; whoever takes over hangs as well
            await trio.testing.wait_all_tasks_blocked()
            cache.validate()
            assert len(loaders) == 2
            assert not results
            scopes[loaders[1]].cancel()
        assert results == [b"data"]

    trio.run(main)
    assert sorted(loaders) == [0, 1, 2]
    cache.validate()


def test_single_flight_keeps_nothing() -> None:
    flights: SingleFlight[str, int] = SingleFlight()

    async def one() -> int:
        await trio.lowlevel.checkpoint()
        return 1

    async def two() -> int:
        await trio.lowlevel.checkpoint()
        return 2

    async def main() -> None:
        assert await flights.run("key", one) == 1
        assert await flights.run("key", two) == 2
        assert len(flights) == 0

    trio.run(main)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["get", "get", "get", "pin", "unpin"]), st.integers(1, 5), st.integers(0, 3)),
        max_size=60,
    ),
    st.integers(0, 60),
)
def test_any_sequence_keeps_the_invariants(steps: list[tuple[str, int, int]], capacity: int) -> None:
    cache = ChunkCache(capacity)
    pins: dict[int, int] = {}

    async def main() -> None:
        for step, inode, chunk in steps:
            if step == "get":
                content = bytes([inode, chunk]) * (1 + inode * chunk)
                assert await cache.get((inode, chunk), immediately(content)) == content
            elif step == "pin":
                cache.pin(inode)
                pins[inode] = pins.get(inode, 0) + 1
            elif pins.get(inode):
                pins[inode] -= 1
                assert cache.unpin(inode) == pins[inode]
            cache.validate()

    trio.run(main)
    assert cache.statistics().open_inodes == sum(count > 0 for count in pins.values())


def test_concurrent_use_with_cancellations_keeps_the_invariants() -> None:
    """Tasks that get, pin and are cancelled at random: everybody who was not cancelled gets the right bytes."""
    cache = ChunkCache(200)
    numbers = random.Random(7)

    async def load(key: tuple[int, int]) -> bytes:
        for _ in range(numbers.randrange(4)):
            await trio.lowlevel.checkpoint()
        if numbers.random() < 0.1:
            raise CorruptDataError("now and then")
        return bytes(key) * 10

    async def reader() -> None:
        for _ in range(30):
            key = (numbers.randrange(6), numbers.randrange(3))
            cache.pin(key[0])
            with trio.CancelScope() as scope:
                if numbers.random() < 0.2:
                    scope.cancel()
                try:
                    assert await cache.get(key, lambda key=key: load(key)) == bytes(key) * 10  # type: ignore[misc]
                except CorruptDataError:
                    await trio.lowlevel.checkpoint()
            cache.unpin(key[0])
            cache.validate()

    async def main() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(reader)

    trio.run(main)
    assert cache.statistics().open_inodes == 0
