"""Where the ranks of a training program run: all nodes come to the same, whoever comes when, and whoever dies."""

from collections.abc import Callable, Sequence

import trio
import trio.testing
from inprocess_transport import Network

from fanstore.job.job import Job
from fanstore.job.training_ranks import PATIENCE_S


class Nodes:
    """The daemons of a job, without anything to read."""

    def __init__(self, size: int) -> None:
        self.network = Network(size)
        self.jobs = [Job(self.network.peers(rank)) for rank in range(size)]
        for job in self.jobs:
            assert job.peers is not None
            job.peers.serve(job)

    async def ask(self, where: Sequence[tuple[int, int]], ranks: int, key: str = "k") -> list[Sequence[int] | None]:
        """What is answered to (node, rank) that ask again and again, as programs do."""
        answers: list[Sequence[int] | None] = [None] * len(where)
        with trio.move_on_after(4 * PATIENCE_S):
            while any(answer is None for answer in answers):
                for number, (node, rank) in enumerate(where):
                    answers[number] = self.jobs[node].training.nodes(key, ranks, rank)
                await trio.sleep(1.0)
        return answers


def run(main: Callable[[], object]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))  # type: ignore[arg-type]


def test_all_learn_where_all_are() -> None:
    """Ranks are numbered otherwise than nodes; one node has none, and two programs are at work."""

    async def main() -> None:
        nodes = Nodes(4)
        where = [(2, 0), (1, 1), (2, 2), (0, 3)]
        assert await nodes.ask(where[:3], 4) == [[]] * 3, "the last one does not come in time"
        assert await nodes.ask(where[3:], 4) == [[]], "and it is too late then"
        assert await nodes.ask(where, 4, "another") == [[2, 1, 2, 0]] * 4
        assert await nodes.ask([(1, 0)], 1, "alone") == [[1]]

    run(main)


def test_a_job_of_one_node() -> None:
    async def main() -> None:
        job = Job(None)
        assert job.training.nodes("k", 2, 1) is None
        assert job.training.nodes("k", 2, 0) == [0, 0] == job.training.nodes("k", 2, 1)

    run(main)


def test_deaths_do_not_make_ranks_disagree(expect_warnings: Callable[..., None]) -> None:
    """Whoever decides dies before, or after it has decided; the answer remains the same for all."""
    expect_warnings("rank [01] on .* has died")

    async def main() -> None:
        nodes = Nodes(4)
        assert nodes.jobs[3].training.nodes("k", 2, 0) is None
        await trio.sleep(0.1)
        nodes.network.kill(0)
        assert await nodes.ask([(3, 0), (1, 1)], 2) == [[3, 1]] * 2
        nodes.network.kill(1)
        await trio.sleep(0.1)
        assert nodes.jobs[2].training.nodes("k", 2, 1) == [3, 1] == nodes.jobs[3].training.nodes("k", 2, 0)

    run(main)


def test_who_decides_dies_before_all_have_heard(expect_warnings: Callable[..., None]) -> None:
    """The next one has heard, and tells the others."""
    expect_warnings("rank 0 on .* has died")

    async def main() -> None:
        nodes = Nodes(4)
        assert nodes.jobs[1].training.heard(0, b"ranks k 2 3 1")
        assert nodes.jobs[1].training.heard(0, b"ranks alone 2")
        nodes.network.kill(0)
        assert await nodes.ask([(3, 0), (1, 1)], 2) == [[3, 1]] * 2
        assert await nodes.ask([(3, 0), (1, 1)], 2, "alone") == [[]] * 2

    run(main)


def test_slow_messages() -> None:
    """A node that hears late waits, and then knows what the others know; one that decides may hear too late."""

    async def main() -> None:
        nodes = Nodes(3)
        nodes.network.delay(2, PATIENCE_S / 2)
        assert await nodes.ask([(2, 0), (0, 1), (1, 2)], 3) == [[2, 0, 1]] * 3
        nodes.network.delay(0, 2 * PATIENCE_S)
        assert await nodes.ask([(2, 0), (0, 1), (1, 2)], 3, "late") == [[]] * 3

    run(main)
