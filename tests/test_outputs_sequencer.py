"""The order of changes to outputs (outputs/sequencer.py), over the in-process transport; a follower keeps a list.

Time is trio's MockClock, which jumps when nobody has anything to do: limits of many seconds cost nothing.
"""

import errno
import functools
import random
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import msgpack
import pytest
import trio
import trio.testing
from inprocess_transport import Network

from fanstore.outputs import sequencer as sequencer
from fanstore.outputs.sequencer import OUTPUT_QUESTION, Sequencer
from fanstore.outputs.tree import Effect, Operation, RefusedError


class Member:
    """One node: a sequencer, and a list of what it was made to apply; also what its transport asks (Host)."""

    def __init__(self, network: Network, rank: int) -> None:
        self.rank = rank
        self.log: list[tuple[str, str]] = []
        self.names: dict[str, str] = {}
        self.network = network
        self.sequencer = Sequencer(network.peers(rank), self)
        network.peers(rank).serve(self)

    # --- Follower: an operation is a name and who wants it; a name can be had once ---

    def admit(self, operation: Operation) -> None:
        pass

    def apply(self, operation: Operation) -> Effect:
        name, who = operation
        if name in self.names:
            raise RefusedError(errno.EEXIST)
        self.names[name] = who
        self.log.append((name, who))
        return Effect(len(self.log))

    async def settle(self, effect: Effect) -> None:
        await trio.lowlevel.checkpoint()

    # --- Host ---

    def mapped_partition(self, partition: int) -> memoryview | None:
        return None

    async def bring(self, partition: int, offset: int, length: int) -> bytes:
        return b""

    async def answer(self, peer: int, question: bytes) -> bytes:
        word, *arguments = msgpack.unpackb(question[len(OUTPUT_QUESTION) :])
        return cast(bytes, msgpack.packb(await self.sequencer.handlers()[word](peer, *arguments)))

    def heard(self, peer: int, word: bytes) -> None:
        pass

    def lost(self, peer: int) -> None:
        pass


class Assembly:
    """All nodes of a job, and what was confirmed to whom while it lived."""

    def __init__(self, size: int) -> None:
        self.network = Network(size)
        self.members = [Member(self.network, rank) for rank in range(size)]
        self.confirmed: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str]] = []
        self._scopes: list[list[trio.CancelScope]] = [[] for _ in range(size)]

    def living(self) -> list[Member]:
        return [member for member in self.members if not self.network.peers(member.rank).is_dead]

    async def want(self, rank: int, name: str, who: str = "") -> None:
        """One node wants a name."""
        who = who or f"rank {rank}"
        with trio.CancelScope() as scope:
            self._scopes[rank].append(scope)
            try:
                await self.members[rank].sequencer.decide((name, who))
            except RefusedError as error:
                assert error.number == errno.EEXIST
                self.refused.append((name, who))
                return
            if not self.network.peers(rank).is_dead:  # a dead process would not have come so far
                assert (name, who) in self.members[rank].log, "applied here before it is confirmed here"
                self.confirmed.append((name, who))

    async def run(self, rank: int) -> None:
        """What a node does by itself."""
        with trio.CancelScope() as scope:
            self._scopes[rank].append(scope)
            await self.members[rank].sequencer.run()

    def kill(self, rank: int) -> None:
        self.network.kill(rank)
        for scope in self._scopes[rank]:
            scope.cancel()

    async def wait_same(self) -> None:
        """Until all that live have applied equally much; MockClock's time, so a minute is a moment."""
        with trio.fail_after(120):
            while len({len(member.log) for member in self.living()}) > 1:  # noqa: ASYNC110 -- of several, no event
                await trio.sleep(0.1)

    def check(self) -> None:
        """All that live have the same log; what was confirmed is in it, once."""
        first, *others = [member.log for member in self.living()]
        assert all(log == first for log in others)
        assert len(set(first)) == len(first)
        assert set(self.confirmed) <= set(first)
        assert len(set(self.confirmed)) == len(self.confirmed)


@asynccontextmanager
async def assembly(size: int = 3):  # type: ignore[no-untyped-def]
    made = Assembly(size)
    async with trio.open_nursery() as nursery:
        for member in made.members:
            nursery.start_soon(made.run, member.rank)
        yield made
        nursery.cancel_scope.cancel()
    for member in made.members:
        made.network.peers(member.rank).close(1.0)


def with_mock_clock(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        trio.run(functools.partial(test, **arguments), clock=trio.testing.MockClock(autojump_threshold=0))

    return run


@with_mock_clock
async def test_one_order_for_all() -> None:
    async with assembly() as made:
        async with trio.open_nursery() as nursery:
            for rank in range(3):
                for number in range(50):
                    nursery.start_soon(made.want, rank, f"{rank}-{number}")
        assert len(made.confirmed) == 150
        made.check()


@with_mock_clock
async def test_one_winner_for_each_name() -> None:
    async with assembly() as made:
        async with trio.open_nursery() as nursery:
            for number in range(40):
                for rank in range(3):
                    nursery.start_soon(made.want, rank, f"name-{number}")
        assert sorted(name for name, _ in made.confirmed) == sorted(f"name-{number}" for number in range(40))
        assert len(made.refused) == 80
        made.check()


@pytest.mark.parametrize("ignorant", [1, 2])
@with_mock_clock
async def test_death_in_the_middle_of_a_spread(ignorant: int) -> None:
    """One of the two others has applied it; that one or the other takes over. Who asked, asks again: done once."""
    async with assembly() as made:
        await made.want(0, "before")
        made.network.stop(ignorant)
        asker = 3 - ignorant
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.want, asker, "wanted")
            with trio.fail_after(5):
                while ("wanted", f"rank {asker}") not in made.members[asker].log:  # noqa: ASYNC110 -- a list
                    await trio.sleep(0.01)
            assert made.confirmed == [("before", "rank 0")]
            made.kill(0)
            made.network.cont(ignorant)
        assert ("wanted", f"rank {asker}") in made.confirmed
        await made.want(1, "after")
        await made.wait_same()
        made.check()
        assert [name for name, _ in made.members[1].log] == ["before", "wanted", "after"]


@with_mock_clock
async def test_who_takes_over_waits_for_those_who_are_stopped() -> None:
    """What only a stopped node and the dead one knew was confirmed, and must not be lost."""
    async with assembly() as made:
        made.network.stop(1)
        await made.want(0, "waited for in vain")
        await made.want(0, "known to 0 and 2")
        made.network.stop(2)
        made.kill(0)
        made.network.cont(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.want, 1, "known to 1")
            await trio.sleep(30)
            assert "known to 1" not in made.members[1].names, "nothing is decided before 2 has been heard"
            made.network.cont(2)
        await made.wait_same()
        made.check()
        assert [name for name, _ in made.members[1].log] == ["waited for in vain", "known to 0 and 2", "known to 1"]


@with_mock_clock
async def test_a_stopped_node_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has missed more than the others would remember for themselves, and nobody changes anything afterwards."""
    monkeypatch.setattr(sequencer, "_REMEMBERED", 10)
    async with assembly() as made:
        await made.want(2, "before")
        made.network.stop(2)
        start_s = trio.current_time()
        for number in range(100):
            await made.want(number % 2, f"name-{number}")
        assert trio.current_time() - start_s < 3 * sequencer.APPLY_LIMIT_S, "waited for once, not each time"
        assert len(made.members[2].log) == 1
        made.network.cont(2)
        await made.wait_same()
        made.check()
        for number in range(50):
            await made.want(2, f"later-{number}")
        made.check()
        assert len(made.confirmed) == 151


@with_mock_clock
async def test_a_late_message_of_a_dead_node_is_not_applied() -> None:
    async with assembly() as made:
        made.kill(0)
        await made.want(1, "first of 1")
        late = [[2, [0, 2], ["second of 0", "rank 0"]]]
        assert await made.members[2].sequencer.handlers()["apply"](0, late, 0) == ["not me", 0]
        await made.want(2, "second of 1")
        made.check()
        assert [name for name, _ in made.members[2].log] == ["first of 1", "second of 1"]


@pytest.mark.parametrize("seed", range(40))
@with_mock_clock
async def test_random_deaths(seed: int) -> None:
    """Messages take a random time, nodes stop for a moment, up to two of four die, the deciding ones included."""
    chance = random.Random(seed)
    async with assembly(4) as made:

        async def programs(rank: int) -> None:
            for number in range(30):
                await trio.sleep(chance.random() * 0.1)
                if made.network.peers(rank).is_dead:
                    return
                name = f"common-{number}" if chance.random() < 0.3 else f"{rank}-{number}"
                await made.want(rank, name)

        async def trouble() -> None:
            for _ in range(12):
                await trio.sleep(chance.random() * 0.3)
                rank = chance.randrange(4)
                made.network.delay(rank, chance.random() * 0.05)
                if chance.random() < 0.3:
                    made.network.stop(rank)
                    await trio.sleep(chance.random() * 2)
                    made.network.cont(rank)
                elif len(made.living()) > 2 and chance.random() < 0.5:
                    made.kill(chance.choice([rank, made.living()[0].rank]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trouble)
            for rank in range(4):
                nursery.start_soon(programs, rank)
        await made.want(made.living()[-1].rank, "last")
        await made.wait_same()
        made.check()
        assert all(member.sequencer.leads == (member is made.living()[0]) for member in made.living())
