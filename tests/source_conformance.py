"""What every source of stored bytes must do (fanstore/dataset/source.py): one class of tests, run for each of them.

A source is given as a ``Case``: with it come the ways to take its bytes away, as they are taken away in its world.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from fanstore.dataset.source import PartitionSource, PreparedSource
from fanstore.errors import CorruptDataError
from fanstore.format.storage import Stored
from fanstore.telemetry.statistics import Source
from fanstore.transport.peers import PeerError

#: What a source may raise; all of them are a reason to ask the next one.
PROBLEMS = (OSError, CorruptDataError, PeerError)
LIMIT_S = 30.0


def unchecked(stored: Stored) -> Stored:
    """A check that takes everything."""
    return stored


class Case(ABC):
    """One source, open. ``content``: the bytes of partition 0 as they should be."""

    source: PartitionSource
    content: bytes

    @abstractmethod
    def remove(self) -> None:
        """The partition is not there any more."""

    @abstractmethod
    def forbid(self) -> None:
        """It is there, and must not or cannot be read."""

    @abstractmethod
    def change(self) -> None:
        """Other bytes have come in its place, of the same length."""

    @abstractmethod
    def hold(self) -> None:
        """From now on it does not answer, until ``go_on``."""

    @abstractmethod
    def go_on(self) -> None:
        """It answers again."""

    async def read(self, offset: int, length: int) -> bytes:
        with trio.fail_after(LIMIT_S):
            return bytes(await self.source.read(0, offset, length, self.check))

    def check(self, stored: Stored) -> Stored:
        """As the reader has it: bytes that are not as they were are refused. On the source's thread."""
        if bytes(stored) not in self.content:
            raise CorruptDataError("they do not match their checksum")
        return stored


class SourceConformance(ABC):
    """Inherit, say how the source is made and under which name it is counted, and all of this is run."""

    name: Source

    @abstractmethod
    def opened(self, prepared: Path, base: Path) -> AsyncIterator[Case]:
        """An async generator that gives the case."""

    def run(self, prepared: Path, base: Path, test: object) -> None:
        async def main() -> None:
            async with asynccontextmanager(self.opened)(prepared, base) as case:
                await test(case)  # type: ignore[operator]

        trio.run(main)

    def test_exact_ranges(self, prepared: Path, tmp_path: Path) -> None:
        async def body(case: Case) -> None:
            whole = len(case.content)
            for offset, length in ((0, 1), (0, whole), (511, 1025), (whole - 1, 1), (whole // 2, whole // 3)):
                assert await case.read(offset, length) == case.content[offset : offset + length]

        self.run(prepared, tmp_path, body)

    def test_many_at_a_time(self, prepared: Path, tmp_path: Path) -> None:
        async def body(case: Case) -> None:
            async def one(offset: int) -> None:
                assert await case.read(offset, 777) == case.content[offset : offset + 777]

            async with trio.open_nursery() as nursery:
                for offset in range(0, 40 * 512, 512):
                    nursery.start_soon(one, offset)

        self.run(prepared, tmp_path, body)

    @pytest.mark.parametrize("beyond", [1, 100_000])
    def test_a_range_that_ends_or_begins_behind_the_end(self, prepared: Path, tmp_path: Path, beyond: int) -> None:
        async def body(case: Case) -> None:
            with pytest.raises(PROBLEMS):
                await case.read(len(case.content) - 10, 10 + beyond)
            with pytest.raises(PROBLEMS):
                await case.read(len(case.content) + beyond, 10)

        self.run(prepared, tmp_path, body)

    @pytest.mark.parametrize("what", ["remove", "forbid", "change"])
    def test_bytes_that_are_taken_away(self, prepared: Path, tmp_path: Path, what: str) -> None:
        """Missing, unreadable, changed: an error that says so, never wrong bytes."""

        async def body(case: Case) -> None:
            assert await case.read(0, 4096) == case.content[:4096]
            getattr(case, what)()
            with pytest.raises(PROBLEMS) as caught:
                await case.read(4096, 4096)
            text = getattr(caught.value, "strerror", None) or str(caught.value)
            assert text
            assert "\n" not in text

        self.run(prepared, tmp_path, body)

    def test_cancelled_while_reading(self, prepared: Path, tmp_path: Path) -> None:
        """It ends, at once or with the read that is under way, and leaves nothing that disturbs the next one."""

        async def body(case: Case) -> None:
            assert await case.read(0, 512) == case.content[:512]
            case.hold()
            async with trio.open_nursery() as nursery:

                async def resume() -> None:
                    # Who must wait for the end of a read is let go on only after it was cancelled.
                    await trio.sleep(0.3)
                    case.go_on()

                with trio.move_on_after(0.1) as scope:
                    nursery.start_soon(resume)
                    await case.read(0, 512)
                assert scope.cancel_called
            assert await case.read(512, 512) == case.content[512:1024]

        self.run(prepared, tmp_path, body)

    def test_name_in_statistics(self, prepared: Path, tmp_path: Path) -> None:
        async def body(case: Case) -> None:
            assert case.source.name is self.name

        self.run(prepared, tmp_path, body)

    def test_stream_for_staging(self, prepared: Path, tmp_path: Path) -> None:
        """Of those that have one: all bytes in order; and what is taken away is an error, or ends early."""

        async def body(case: Case) -> None:
            source = case.source
            if not isinstance(source, PreparedSource):
                return
            assert await trio.to_thread.run_sync(lambda: b"".join(map(bytes, source.stream(0)))) == case.content
            case.remove()
            with pytest.raises(FileNotFoundError) as caught:
                await trio.to_thread.run_sync(lambda: list(source.stream(0)))
            assert caught.value.strerror

        self.run(prepared, tmp_path, body)
