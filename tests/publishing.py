"""What a daemon publishes of itself, without a mount and on a clock that jumps over all waiting: hours in a moment.

Used by the tests of the metrics and of the report.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import trio
import trio.testing

from fanstore.dataset.placement import place
from fanstore.dataset.sources import Verify
from fanstore.format.prepared import PreparedDataset
from fanstore.fuse.reporting import Publishing, Reporting
from fanstore.job.job import Job
from fanstore.job.node import Node, NodeSettings
from fanstore.telemetry.statistics import Statistics


def lone_node(prepared: Path, statistics: Statistics, reporting: Reporting) -> tuple[Node, Job]:
    dataset = PreparedDataset.open(prepared)
    parts = dataset.manifest.partitions
    placement = place([part.bytes for part in parts], [part.everywhere for part in parts], [0], 1)
    config = {
        "fanstore": "0",
        "mountpoint": "/m",
        "prepared": str(prepared),
        "storage": "shared file system",
        "rank": 0,
        "size": 1,
        "local": None,
    }
    config |= {
        "codec": "none",
        "partitions": 1,
        "replicas": 1,
        "engine": "python",
        "totals": asdict(dataset.manifest.totals),
    }
    job = Job(None)
    settings = NodeSettings(1 << 20, Verify.FIRST, 2.0)
    return Node(dataset, job, placement, None, settings, statistics, lambda: config, reporting.events), job


def follow(
    prepared: Path, publishing: Publishing, scenario: Callable[[Reporting, Statistics], Awaitable[None]]
) -> Reporting:
    """Run what a daemon publishes on a clock that jumps over all waiting, beside a scenario."""
    statistics = Statistics()
    reporting = Reporting(publishing, statistics)
    node, job = lone_node(prepared, statistics, reporting)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reporting.run, node, job)
            await scenario(reporting, statistics)
            nursery.cancel_scope.cancel()

    reporting.open()
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.001))
    reporting.take_last_figures()
    reporting.close()
    node.close()
    return reporting
