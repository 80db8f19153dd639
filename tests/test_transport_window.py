"""Places for questions to one peer: at most so many, with at most so many bytes, the longest waiter first."""

from collections.abc import Awaitable, Callable

import trio
import trio.testing

from fanstore.transport.window import WINDOW, WINDOW_BYTES, Window

LARGE = WINDOW_BYTES // 4


class Tasks:
    """Tasks that ask for a place; ``inside`` names those that have one."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.window = Window()
        self.inside: list[str] = []
        self._nursery = nursery
        self._leave: dict[str, trio.Event] = {}
        self.scopes: dict[str, trio.CancelScope] = {}

    async def start(self, name: str, answer_bytes: int) -> None:
        self._leave[name], self.scopes[name] = trio.Event(), trio.CancelScope()
        self._nursery.start_soon(self._run, name, answer_bytes)
        await trio.testing.wait_all_tasks_blocked()

    async def _run(self, name: str, answer_bytes: int) -> None:
        with self.scopes[name]:
            if not self.window.enter_nowait(answer_bytes):
                await self.window.wait(answer_bytes)
            self.inside.append(name)
            await self._leave[name].wait()
            self.window.leave(answer_bytes)

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        self.inside.remove(name)
        await trio.testing.wait_all_tasks_blocked()

    async def end(self) -> None:
        while self.inside:
            await self.leave(self.inside[0])
        assert (self.window.under_way, self.window.under_way_bytes) == (0, 0)


def run(scenario: Callable[[Tasks], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                tasks = Tasks(nursery)
                await scenario(tasks)
                await tasks.end()

    trio.run(main)


def test_the_number_is_bounded() -> None:
    async def scenario(tasks: Tasks) -> None:
        for number in range(WINDOW + 2):
            await tasks.start(f"{number}", 10)
        assert tasks.inside == [f"{number}" for number in range(WINDOW)]
        await tasks.leave("3")
        assert tasks.inside[-1] == f"{WINDOW}" and tasks.window.under_way == WINDOW

    run(scenario)


def test_the_bytes_are_bounded() -> None:
    async def scenario(tasks: Tasks) -> None:
        for name in "abcd":
            await tasks.start(name, LARGE)
        for name in "efgh":
            await tasks.start(name, 10)
        assert tasks.inside == list("abcd")
        await tasks.leave("b")
        assert sorted(tasks.inside) == list("acdefgh"), "one that leaves makes room for several small ones"
        await tasks.start("i", LARGE)
        await tasks.start("j", LARGE)
        assert sorted(tasks.inside) == list("acdefghi")
        await tasks.leave("e")
        assert sorted(tasks.inside) == list("acdfghi"), "a small one makes no room for a large one"
        await tasks.leave("a")
        assert sorted(tasks.inside) == list("cdfghij")

    run(scenario)


def test_one_that_is_larger_than_all_comes_through() -> None:
    async def scenario(tasks: Tasks) -> None:
        await tasks.start("small", 10)
        await tasks.start("huge", 2 * WINDOW_BYTES)
        await tasks.start("next", 10)
        assert tasks.inside == ["small", "huge"]
        await tasks.leave("huge")
        assert tasks.inside == ["small", "next"]

    run(scenario)


def test_who_goes_away_leaves_the_line() -> None:
    async def scenario(tasks: Tasks) -> None:
        for name in "abcdefg":
            await tasks.start(name, LARGE)
        tasks.scopes["e"].cancel()
        await trio.testing.wait_all_tasks_blocked()
        await tasks.leave("a")
        assert tasks.inside == list("bcdf")

    run(scenario)
