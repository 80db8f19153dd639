"""What Remote tells whoever fetches beside it, and what it makes of the failures that come back."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import oddities
import pytest
import trio
from core_cluster import cluster

from fanstore.dataset import remote as remote_module
from fanstore.dataset.remote import Failure, Remote
from fanstore.telemetry.statistics import Source

MakePrepared = Callable[..., Path]
ExpectWarnings = Callable[..., None]

SIZE = 3
NO_TIMES = (0, 0, 0, 0, bytes(8 * 304))


class Fetcher:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.routes: dict[int, list[int]] = {}
        self.given = [(0, 0)] * SIZE

    def route(self, partition: int, ranks: Sequence[int]) -> None:
        self.routes[partition] = list(ranks)

    def fetched(self) -> tuple[Sequence[tuple[int, int]], tuple[int, int, int, int, bytes]]:
        return self.given, NO_TIMES


@pytest.fixture
def prepared(tmp_path: Path, make_prepared: MakePrepared) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    for number in range(12):
        (root / f"{number:02d}").write_bytes(oddities.incompressible(50_000, number))
    return make_prepared(root, out=tmp_path / "d.fan", codec="none", partitions=3)


def nodes(remote: Remote) -> list[dict[str, Any]]:
    found = remote.statistics()["nodes"]
    assert isinstance(found, list)
    return found


def test_routes_follow_what_is_known(
    prepared: Path, tmp_path: Path, expect_warnings: ExpectWarnings, caplog: pytest.LogCaptureFixture
) -> None:
    expect_warnings("gave damaged bytes of partition")

    async def main() -> None:
        async with cluster(prepared, tmp_path, size=SIZE, replicas=3) as job:
            remote, fetcher = job.nodes[0].remote, Fetcher()
            remote.share_with(fetcher)
            assert fetcher.routes == {partition: [1, 2] for partition in range(len(job.placement.holders))}
            remote.note_failure(Failure.DAMAGED, 2, 1)
            remote.note_failure(Failure.DAMAGED, 2, 1)
            assert fetcher.routes[1] == [1], "asked last, so not by the one who asks once"
            remote.note_failure(Failure.LOST, 1, 0)
            assert fetcher.routes[0] == [1, 2], "who is lost is known to the transport"
            one, two = nodes(remote)
            assert (one["lost"], two["damaged"]) == (1, 2)
            assert caplog.text.count("gave damaged bytes") == 1, "one line per peer and partition"

    trio.run(main)


def test_a_refusal_counts_for_a_while(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with cluster(prepared, tmp_path, size=SIZE, replicas=3) as job:
            remote, fetcher = job.nodes[0].remote, Fetcher()
            remote.share_with(fetcher)
            remote.note_failure(Failure.REFUSED, 1, 0)
            assert (fetcher.routes[0], fetcher.routes[1]) == ([2], [1, 2])
            remote.note_failure(Failure.REFUSED, 2, 0)
            assert fetcher.routes[0] == []
            assert not remote.has(0)
            monkeypatch.setattr(remote_module, "REFUSAL_NS", 0)
            assert remote.has(0)  # as the next read asks, which has come here
            assert 1 in fetcher.routes[0]

    trio.run(main)


def test_a_refusal_that_python_met_is_known_to_the_fetcher(prepared: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(prepared, tmp_path, size=SIZE, replicas=1, staged=False) as job:
            node, fetcher = job.nodes[0], Fetcher()
            node.remote.share_with(fetcher)
            elsewhere = [p for p, ranks in fetcher.routes.items() if ranks]
            assert elsewhere
            for number in range(12):
                await node.read(f"{number:02d}")
            assert node.reads(Source.SHARED) == 12
            assert all(fetcher.routes[partition] == [] for partition in elsewhere)

    trio.run(main)


def test_both_are_counted(prepared: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(prepared, tmp_path, size=2, replicas=1) as job:
            node, fetcher = job.nodes[0], Fetcher()
            node.remote.share_with(fetcher)
            for number in range(12):
                await node.read(f"{number:02d}")
            (before,) = nodes(node.remote)
            fetcher.given = [(0, 0), (5, 700)]
            (after,) = nodes(node.remote)
            assert before["fetches"] > 0
            assert after["fetches"] - before["fetches"] == 5
            assert after["fetched_bytes"] - before["fetched_bytes"] == 700

    trio.run(main)


def test_silence_is_reported_once(
    prepared: Path, tmp_path: Path, expect_warnings: ExpectWarnings, caplog: pytest.LogCaptureFixture
) -> None:
    expect_warnings("did not answer within")

    async def main() -> None:
        async with cluster(prepared, tmp_path, size=SIZE, replicas=3) as job:
            remote = job.nodes[0].remote
            remote.share_with(Fetcher())
            for _ in range(3):
                remote.note_failure(Failure.SILENT, 2, 0)
            assert nodes(remote)[1]["timeouts"] == 3
            assert caplog.text.count("did not answer within") == 1

    trio.run(main)
