"""What every transport must do: scenarios that each rank of a job runs at the same time. No pytest here.

A scenario is an async function of one ``Node``, which asserts. In-process, test_transport.py runs it for all ranks in
one loop; over MPI, mpi_driver.py runs it in every rank. ``Node.kill``, ``stop`` and ``cont`` do it to a real process
there (SIGKILL, SIGSTOP, SIGCONT) and to a simulated one here.
"""

import functools
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import trio

from fanstore.dataset.mapping import map_file
from fanstore.errors import FanstoreError
from fanstore.format.storage import Stored
from fanstore.transport.peers import (
    MESSAGE_BYTES,
    NOT_YET,
    PeerBusyError,
    PeerLostError,
    PeerRefusedError,
    Peers,
    PeerTimeoutError,
)

RANKS = 3
#: Long enough for any step on a machine that does much else as well; nothing waits for it when all is well. What must
#: not wait at all is given a longer limit and must be through within this one.
LIMIT_S = 40.0
KIB, MIB = 1 << 10, 1 << 20
PARTITION_BYTES = 5 * MIB
#: Partitions from this one on are being copied.
COPIED = 3000
SIZES = (1, 2, 23, 24, 100, 4095, 4096, 4097, 64 * KIB - 1, 64 * KIB, 107 * KIB, MIB + 1, 4 * MIB + 23)


@functools.cache
def content(partition: int) -> memoryview:
    """What every rank knows to be in a partition, mapped from a file."""
    fd = os.memfd_create("partition")
    try:
        os.write(fd, np.random.default_rng(partition).integers(0, 256, PARTITION_BYTES, np.uint8).data)
        return map_file(fd, PARTITION_BYTES)
    finally:
        os.close(fd)


class Served:
    """The host of one rank: it holds partition p if p modulo the number of ranks is its rank, or is copying it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.words: dict[int, list[bytes]] = {other: [] for other in range(size)}
        self.lost_ranks: list[int] = []
        self.is_bringing = False
        self.changed = trio.Event()

    def mapped_partition(self, partition: int) -> memoryview | None:
        return content(partition) if partition % self.size == self.rank and partition < COPIED else None

    async def bring(self, partition: int, offset: int, length: int) -> Stored:
        """Of partitions that are being copied: at the second question."""
        if partition % self.size != self.rank or partition < COPIED:
            return b""
        self.is_bringing = not self.is_bringing
        return NOT_YET if self.is_bringing else content(partition)[offset : offset + length]

    async def answer(self, peer: int, question: bytes) -> bytes:
        return b"" if question == b"refuse" else b"%d:" % peer + question[: MESSAGE_BYTES - 8]

    def heard(self, peer: int, word: bytes) -> None:
        self.words[peer].append(word)
        self._change()

    def lost(self, peer: int) -> None:
        self.lost_ranks.append(peer)
        self._change()

    def _change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class Node:
    """One rank of a scenario.

    Attributes:
        kill, stop, cont: faults of another rank.
    """

    def __init__(
        self, peers: Any, kill: Callable[[int], None], stop: Callable[[int], None], cont: Callable[[int], None]
    ):
        self.peers: Peers = peers
        self.rank: int = peers.rank
        self.size: int = peers.size
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.host = Served(self.rank, self.size)
        self.kill, self.stop, self.cont = kill, stop, cont
        self._meetings = 0

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that the host hears of, or that time brings."""
        with trio.move_on_after(LIMIT_S):
            while not condition():
                with trio.move_on_after(0.01):
                    await self.host.changed.wait()
            return
        raise AssertionError(f"rank {self.rank}: after {LIMIT_S:.0f} s still not: {what}")

    async def meet(self, *ranks: int) -> None:
        """Wait until these ranks (default: all) are here as well."""
        self._meetings += 1
        word = b"meeting %d" % self._meetings
        self.peers.tell(word)
        others = set(ranks or range(self.size)) - {self.rank}
        await self.until(lambda: all(word in self.host.words[other] for other in others), f"all at {word!r}")

    async def check_fetch(self, peer: int, partition: int, offset: int, length: int) -> None:
        data = await self.peers.fetch(peer, partition, offset, length, LIMIT_S)
        assert data == content(partition)[offset : offset + length], f"wrong bytes {peer=} {offset=} {length=}"

    def partition_of(self, peer: int, number: int = 0) -> int:
        return peer + number * self.size

    def counter(self, name: str) -> int:
        value = self.peers.statistics()[name]
        assert type(value) is int
        return value


async def fetch_all_sizes(node: Node) -> None:
    node.peers.serve(node.host)
    for peer in node.others:
        for size in SIZES:
            for offset in {0, 1, PARTITION_BYTES - size}:
                await node.check_fetch(peer, node.partition_of(peer), offset, size)
    assert node.counter("fetched_bytes") >= 3 * sum(SIZES)
    await node.meet()


async def brought(node: Node) -> None:
    """Bytes of a partition that is being copied: who is told to ask again gets them then, and nobody is silent."""
    node.peers.serve(node.host)
    await node.meet()
    if node.rank == 0:
        for peer in node.others:
            partition = node.partition_of(peer, COPIED)
            for size in (2, 107 * KIB, 4 * MIB):
                try:
                    await node.check_fetch(peer, partition, 1, size)
                except PeerBusyError:
                    await node.check_fetch(peer, partition, 1, size)
                else:
                    raise AssertionError("it had them at once")
            assert not node.peers.is_silent(peer)
    await node.meet()
    if node.rank != 0:
        assert (node.counter("served"), node.counter("refused")) == (3, 0)


async def serve_later(node: Node) -> None:
    """A request that comes before the other side serves is answered when it does."""
    if node.rank == 1:
        assert await node.peers.gather_all(b"") == [b""] * node.size
        await trio.sleep(0.2)
        node.peers.serve(node.host)
    else:
        assert await node.peers.gather_all(b"") == [b""] * node.size
        node.peers.serve(node.host)
        await node.check_fetch(1, node.partition_of(1), 0, 1000)
    await node.meet()


async def broadcast_and_gather(node: Node) -> None:
    for size in (0, 1, 5 * MIB + 3):
        value = bytes(content(0)) * 2
        got = await node.peers.broadcast(value[:size] if node.rank == 0 else None)
        assert got == value[:size]
    values = await node.peers.gather_all(b"rank %d" % node.rank * (node.rank + 1))
    assert values == [b"rank %d" % rank * (rank + 1) for rank in range(node.size)]
    node.peers.serve(node.host)
    await node.meet()


async def gather_while_serving(node: Node) -> None:
    """A rank that waits for the others in a collective step goes on serving them."""
    node.peers.serve(node.host)
    if node.rank == 0:
        await trio.sleep(0.3)
        for peer in node.others:
            await node.check_fetch(peer, node.partition_of(peer), 0, MIB)
    for step in range(20):
        values = await node.peers.gather_all(b"%d of %d" % (step, node.rank) * 500)
        assert values == [b"%d of %d" % (step, rank) * 500 for rank in range(node.size)]
    await node.meet()


async def killed_while_gathering(node: Node) -> None:
    """A collective step that a dead rank has not reached fails on all others, before anybody serves."""
    await node.peers.gather_all(b"here")
    if node.rank == 2:
        await trio.sleep_forever()
    if node.rank == 0:
        await trio.sleep(0.2)
        node.kill(2)
    with trio.fail_after(LIMIT_S):  # its own limit is longer
        try:
            await node.peers.gather_all(b"and you?")
        except FanstoreError as error:
            assert "2 has died" in str(error) or "failed" in str(error)
        else:
            raise AssertionError("a dead rank has taken part")


async def fetch_all_to_all(node: Node) -> None:
    """Every rank asks every other with far more tasks than the window has places."""
    node.peers.serve(node.host)
    chance = random.Random(node.rank)

    async def reader(peer: int) -> None:
        for _ in range(8):
            size = chance.choice(SIZES[:-1])
            partition = node.partition_of(peer, chance.randrange(2))
            await node.check_fetch(peer, partition, chance.randrange(PARTITION_BYTES - size), size)

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            for peer in node.others * 40:
                nursery.start_soon(reader, peer)
    await node.meet()
    assert node.counter("served") == 8 * 40 * len(node.others)


async def refused(node: Node) -> None:
    node.peers.serve(node.host)
    for peer in node.others:
        for partition, offset, length in ((node.rank, 0, 10), (peer, PARTITION_BYTES - 9, 10), (peer, 1 << 40, 10)):
            try:
                await node.peers.fetch(peer, partition, offset, length, LIMIT_S)
            except PeerRefusedError as error:
                assert f"rank {peer}" in str(error)
            else:
                raise AssertionError("bytes that the peer does not have")
        try:
            await node.peers.ask(peer, b"refuse", LIMIT_S)
        except PeerRefusedError:
            pass
        else:
            raise AssertionError("an answer to what cannot be answered")
        assert not node.peers.is_lost(peer) and not node.peers.is_silent(peer)
    await node.meet()
    assert node.counter("refused") == 3 * len(node.others)


async def ask_and_tell(node: Node) -> None:
    """Questions of every length, and words that arrive in the order of telling, long ones among short ones."""
    node.peers.serve(node.host)
    for peer in node.others:
        for length in (0, 1, 100, 5000, MESSAGE_BYTES - 8):
            assert await node.peers.ask(peer, b"q" * length, LIMIT_S) == b"%d:" % node.rank + b"q" * length
    words = [b"%d" % number * (9000 if number % 7 == 0 else 1) for number in range(200)]
    for word in words:
        node.peers.tell(word)
    await node.until(lambda: all(len(node.host.words[peer]) >= len(words) for peer in node.others), "all words heard")
    for peer in node.others:
        assert node.host.words[peer][: len(words)] == words
    await node.meet()


async def stopped_and_continued(node: Node) -> None:
    """A peer that does not answer costs one time-out, and is used again when it is back. Late answers land nowhere."""
    node.peers.serve(node.host)
    await node.meet()
    if node.rank == 0:
        await _ask_the_stopped(node, 1, 2)
    elif node.rank == 2:
        await node.until(lambda: b"over" in node.host.words[0], "the end of the test")
    await node.meet()


async def _ask_the_stopped(node: Node, peer: int, healthy: int) -> None:
    peers = node.peers
    given_up: list[str] = []

    async def too_late(number: int) -> None:
        begin_s = time.monotonic()
        try:
            await peers.fetch(peer, node.partition_of(peer), number * 10 * KIB, 100 * KIB, 0.3)
        except PeerTimeoutError as error:
            took_s = time.monotonic() - begin_s
            assert 0.25 < took_s < LIMIT_S, f"a time-out of 0.3 s took {took_s} s"
            given_up.append(str(error))

    node.stop(peer)
    async with trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(too_late, number)
        for _ in range(5):
            await node.check_fetch(healthy, node.partition_of(healthy), 7, 50 * KIB)
    assert len(given_up) == 30
    assert f"rank {peer} did not answer within 0.3 s" in given_up[0]
    assert peers.is_silent(peer) and not peers.is_lost(peer) and not peers.is_silent(healthy)
    assert peers.statistics()["peers_silent"] == [peer]
    # The window is full of unanswered requests: that it is silent is known, and said at once.
    with trio.fail_after(LIMIT_S):
        for _ in range(3):
            try:
                await peers.fetch(peer, node.partition_of(peer), 0, 10, 2 * LIMIT_S)
            except PeerTimeoutError:
                continue
            raise AssertionError("a stopped peer has answered")
    await node.check_fetch(healthy, node.partition_of(healthy), 0, MIB)

    node.cont(peer)
    await node.until(lambda: not peers.is_silent(peer), "the peer is back")
    await node.until(lambda: node.counter("late_answers") == 16, "all late answers counted")
    for size in SIZES:
        await node.check_fetch(peer, node.partition_of(peer), 1, size)
    assert peers.statistics()["peers_silent"] == []
    peers.tell(b"over")


async def readers_give_up(node: Node) -> None:
    """Readers that go away while their answers are under way: other readers still get the right bytes."""
    node.peers.serve(node.host)
    peer = (node.rank + 1) % node.size

    async def impatient(number: int) -> None:
        with trio.move_on_after(0.0005 * (number % 5)):
            await node.check_fetch(peer, node.partition_of(peer), number * KIB, 200 * KIB)

    async def patient(number: int) -> None:
        await node.check_fetch(peer, node.partition_of(peer, 1), number * KIB, 200 * KIB)

    with trio.fail_after(LIMIT_S):
        for _ in range(5):
            async with trio.open_nursery() as nursery:
                for number in range(30):
                    nursery.start_soon(impatient, number)
                    nursery.start_soon(patient, number)
    assert not node.peers.is_silent(peer), "a reader that goes away is no fault of the peer"
    assert node.counter("timeouts") == 0
    await node.meet()


async def killed(node: Node) -> None:
    """Whoever waits for a dead peer learns it at once, whoever asks later does not wait at all; the others go on."""
    node.peers.serve(node.host)
    await node.meet()
    victim, errors = 2, []
    if node.rank == victim:
        await trio.sleep_forever()
    if node.rank == 0:
        node.stop(victim)  # so that requests are certainly under way when it dies

    async def reader(offset: int) -> None:
        try:
            for _ in range(10_000):  # some are on the link, some held on this side, some wait for a place
                await node.check_fetch(victim, node.partition_of(victim), offset, (100 * KIB, 4 * MIB)[offset % 2])
        except PeerLostError as error:
            errors.append(str(error))

    async with trio.open_nursery() as nursery:
        for offset in range(30):
            nursery.start_soon(reader, offset)
        await trio.sleep(0.2)
        if node.rank == 0:
            node.kill(victim)
    # Who had waited for the time-out would not have learnt of a loss.
    assert len(errors) == 30 and f"rank {victim}" in errors[0]
    await node.until(lambda: node.host.lost_ranks == [victim], "the host knows it")
    assert node.peers.is_lost(victim) and node.peers.statistics()["peers_lost"] == [victim]
    with trio.fail_after(LIMIT_S):
        for _ in range(20):
            try:
                await node.peers.fetch(victim, node.partition_of(victim), 0, 10, 2 * LIMIT_S)
            except PeerLostError:
                continue
            raise AssertionError("a dead peer has answered")
    survivor = 1 - node.rank
    for size in SIZES:
        await node.check_fetch(survivor, node.partition_of(survivor), 5, size)
    node.peers.tell(b"to all that live")
    await node.meet(0, 1)
    assert node.host.lost_ranks == [victim]


async def killed_under_load(node: Node) -> None:
    """A peer that dies in the middle of its work: requests posted in that very moment end with the others."""
    node.peers.serve(node.host)
    await node.meet()
    victim, ended = 2, 0
    if node.rank == victim:
        await trio.sleep_forever()

    async def reader(offset: int) -> None:
        nonlocal ended
        try:
            while True:
                await node.check_fetch(victim, node.partition_of(victim), offset, 10 * KIB)
        except PeerLostError:
            ended += 1

    async with trio.open_nursery() as nursery:
        for offset in range(30):
            nursery.start_soon(reader, offset)
        await trio.sleep(0.3)
        if node.rank == 0:
            node.kill(victim)
        await node.until(lambda: ended == 30, "every reader knows of the death")
    assert node.counter("timeouts") == 0, "known to be dead, not silent"
    await node.meet(0, 1)


async def one_leaves(node: Node) -> None:
    """A peer that ends orderly is not asked any more; it is no loss, and nobody waits for it."""
    node.peers.serve(node.host)
    await node.meet()
    if node.rank == 2:
        return  # the caller closes, which says BYE

    async def reader(length: int) -> None:
        while True:  # whatever is under way when it leaves ends as well
            try:
                await node.check_fetch(2, node.partition_of(2), 0, length)
                await node.peers.ask(2, b"still there?", LIMIT_S)
            except PeerLostError:
                break

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            for length in (100 * KIB, *[4 * MIB] * 6):
                nursery.start_soon(reader, length)
    assert node.peers.is_lost(2)
    assert node.host.lost_ranks == []
    await node.check_fetch(1 - node.rank, node.partition_of(1 - node.rank), 0, MIB)
    await node.meet(0, 1)


async def many_ask_one(node: Node) -> None:
    """Memory of the asked one and of the askers stays flat, also when readers give up."""
    node.peers.serve(node.host)
    await node.check_fetch(node.others[0], node.partition_of(node.others[0]), 0, 4 * MIB)
    for rank in range(node.size):
        content(rank)
    await node.meet()

    async def reader(number: int) -> None:
        for turn in range(6):
            with trio.move_on_after(0.002 if (number + turn) % 3 == 0 else LIMIT_S):
                await node.peers.fetch(0, 0, number * KIB, 4 * MIB, LIMIT_S)

    before = resident_bytes()
    with trio.fail_after(LIMIT_S):
        for _ in range(2):
            if node.rank != 0:
                async with trio.open_nursery() as nursery:
                    for number in range(50):
                        nursery.start_soon(reader, number)
            await node.meet()
    # 16 MiB and one answer of 4 MiB under way, and what the allocator and MPI's own pools keep.
    assert resident_bytes() - before < 64 * MIB, f"{(resident_bytes() - before) / MIB:.0f} MiB more"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


Scenario = Callable[[Node], Awaitable[None]]

SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        fetch_all_sizes,
        brought,
        serve_later,
        broadcast_and_gather,
        gather_while_serving,
        killed_while_gathering,
        fetch_all_to_all,
        refused,
        ask_and_tell,
        stopped_and_continued,
        readers_give_up,
        killed,
        killed_under_load,
        one_leaves,
        many_ask_one,
    )
}
