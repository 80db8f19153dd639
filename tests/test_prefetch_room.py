"""What ranks own is kept in the cache of their node, and let go: with ranks that die, and with too little room."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import trio
from core_parts import Parts, opened
from mounting import prepare
from oddities import compressible

from fanstore.client.protocol import ControlError
from fanstore.client.server import Client
from fanstore.prefetch import room as room_module
from fanstore.prefetch.hooked import Hooked
from fanstore.prefetch.room import Room

FILES, BYTES = 40, 10_000
NAMES = [f"{number:02d}.jpg" for number in range(FILES)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two partitions of compressed files, of which the first is taken to be on this node."""
    root = tmp_path_factory.mktemp("room") / "source"
    root.mkdir()
    for number, name in enumerate(NAMES):
        (root / name).write_bytes(compressible(BYTES, number))
    return prepare(root, root.parent / "d.fan", "--codec", "lz4", "--partitions", "2")


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110  (nobody tells of it)
            await trio.sleep(0.005)


class Ranks:
    """Ranks of one node, as their connections are seen."""

    def __init__(self, parts: Parts) -> None:
        index = parts.prepared.index
        hooked = Hooked(index, lambda stream: None, lambda: None, lambda *words: None, lambda: False)
        self.parts = parts
        self.room = Room(index, parts.broker, lambda partition: partition == 0, hooked.entries)
        self.here = [name for name in NAMES if index.partition[parts.entry(name)] == 0]
        self.away = [name for name in NAMES if index.partition[parts.entry(name)] == 1]

    async def own(self, client: Client, names: Sequence[str]) -> dict[str, object]:
        take = self.room.requests()["own"].handler
        middle = len(names) // 2
        pieces = [names[:middle], names[middle:]]
        for piece, last in zip(pieces, (False, True), strict=True):
            reply = await take(client, "\0".join(piece).encode(), last)
        assert reply is not None
        return dict(reply.values)

    async def wait_kept(self, chunks: int) -> None:
        await until(lambda: self.parts.broker.cache()["chunks"] == chunks and not self.room.describe()["waiting"])

    async def read(self, name: str) -> bytes:
        return await self.parts.broker.read(self.parts.entry(name), 0, BYTES)


def run(parts: Parts, main: Callable[[Ranks], Awaitable[None]]) -> None:
    async def with_room() -> None:
        ranks = Ranks(parts)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ranks.room.run)
            await main(ranks)
            nursery.cancel_scope.cancel()

    parts.run(with_room)


def test_kept_as_long_as_somebody_owns_it(prepared: Path) -> None:
    """Read again and again without another fetch; what has left goes, but not what another rank owns."""

    async def main(ranks: Ranks) -> None:
        one, other = Client(), Client()
        away = ranks.away
        assert await ranks.own(one, [*ranks.here, *away[:8], "missing.jpg"]) == {
            "files": len(ranks.here) + 9,
            "kept": 8,
        }
        await ranks.wait_kept(8)
        assert await ranks.own(other, away[4:12]) == {"files": 8, "kept": 8}
        await ranks.wait_kept(12)
        assert ranks.room.describe() == {"files": 12, "bytes": 12 * BYTES, "waiting": 0}
        fetched = ranks.parts.broker.cache()["prefetched"]
        for _ in range(3):
            for number, name in enumerate(away[:12]):
                assert await ranks.read(name) == compressible(BYTES, NAMES.index(name)), number
        now = ranks.parts.broker.cache()
        assert now["misses"] == now["prefetched"] == fetched == 12, "nobody has fetched anything since"
        await ranks.own(one, away[6:9])
        await ranks.wait_kept(8)
        one.at_end.close()
        other.at_end.close()
        await ranks.wait_kept(0)
        assert ranks.room.describe() == {"files": 0, "bytes": 0, "waiting": 0}

    with opened(prepared) as parts:
        run(parts, main)


def test_a_rank_that_dies_in_the_middle_of_an_exchange(prepared: Path) -> None:
    """With half of its arrivals here, and while it tells the next list; the other rank notices nothing."""

    async def main(ranks: Ranks) -> None:
        dying, other = Client(), Client()
        await ranks.own(dying, ranks.away)
        await ranks.own(other, ranks.away[-3:])
        dying.at_end.close()
        await ranks.wait_kept(3)
        again = Client()
        await ranks.room.requests()["own"].handler(again, ranks.away[0].encode(), False)
        again.at_end.close()
        await ranks.wait_kept(3)
        for name in ranks.away:
            assert await ranks.read(name) == compressible(BYTES, NAMES.index(name))

    with opened(prepared) as parts:
        run(parts, main)


def test_a_node_without_enough_room(prepared: Path) -> None:
    """A quarter of what is owned fits: the rest is read when it is read."""

    async def main(ranks: Ranks) -> None:
        client = Client()
        await ranks.own(client, ranks.away)
        await until(lambda: not ranks.room.describe()["waiting"] and not ranks.parts.broker.cache()["in_line"])
        cache = ranks.parts.broker.cache()
        assert 0 < cache["used_bytes"] <= cache["capacity_bytes"] == len(ranks.away) * BYTES // 4
        for _ in range(2):
            for name in ranks.away:
                assert await ranks.read(name) == compressible(BYTES, NAMES.index(name))
        client.at_end.close()
        await ranks.wait_kept(0)

    with opened(prepared, cache_bytes=len(NAMES) * BYTES // 8) as parts:
        run(parts, main)


def test_more_than_a_rank_can_own(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "_TOLD_MOST", 100)

    async def main(ranks: Ranks) -> None:
        client = Client()
        with pytest.raises(ControlError, match="more paths than a rank can own"):
            await ranks.own(client, NAMES)
        client.at_end.close()

    with opened(prepared) as parts:
        run(parts, main)
