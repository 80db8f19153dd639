"""What a node tells of itself for the report of its job: sums, how they came about over time, and what happened.

Owns the shape of one node's part of ``report.json`` (docs/operations.md), how a sample is taken, and how all of it is
made to fit in one message to another node. Used by job/node.py and job/job.py. Trio thread only.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fanstore.dataset.broker import Broker
from fanstore.dataset.remote import Remote
from fanstore.dataset.store import PartitionStore
from fanstore.telemetry.events import Events
from fanstore.telemetry.history import History, Sample
from fanstore.telemetry.statistics import OperationStatistics, Source, Statistics
from fanstore.transport.peers import MESSAGE_BYTES

if TYPE_CHECKING:
    from fanstore.job.job import Job

#: Version of the shape of report.json; a reader that finds another one must not guess.
REPORT_VERSION = 1

#: Fields of a sample that only grow; of these the differences are told, which are shorter.
_SUMS = (*map(str, Source), "waited_ms")

#: Requests of the kernel that a shared file system would have had to answer, by what they are about: names, attributes,
#: directories, and files that are opened.
_METADATA = {
    "names": ("lookup",),
    "attributes": ("getattr", "getxattr", "readlink"),
    "listings": ("opendir", "readdir", "readdirplus"),
    "opens": ("open",),
}

#: What can be left out so that an account fits in a message, in this order.
_DISPENSABLE = ("events", "fetched", "samples")


class Account:
    """The account of one node.

    Attributes:
        history, events: what it is made of, beside the statistics.
        started_s: when this node began, by the clock on the wall.
    """

    def __init__(
        self,
        job: Job,
        store: PartitionStore,
        broker: Broker,
        remote: Remote | None,
        statistics: Statistics,
        events: Events,
        config: Callable[[], Mapping[str, object]],
    ) -> None:
        self.history = History()
        self.events = events
        self.started_s = time.time()
        self._config = config
        self._job = job
        self._store = store
        self._broker = broker
        self._remote = remote
        self._statistics = statistics

    def sample(self) -> Sample:
        """How this node is now."""
        sources = self._statistics.totals().sources
        saver = None if self._job.outputs is None else self._job.outputs.saver
        pending, pending_bytes = (0, 0) if saver is None else saver.pending()
        cache = self._broker.cache()
        return Sample(
            round(self.history.now_s(), 3),
            **{str(source): sources[source].bytes for source in Source},
            cached_bytes=cache["used_bytes"],
            memory_bytes=_resident_bytes(),
            pending=pending,
            pending_bytes=pending_bytes,
            waited_ms=cache["waited_ns"] // 1_000_000,
        )

    async def keep(self) -> None:
        """Write the history, until it is cancelled."""
        await self.history.run(self.sample)

    def histograms(self) -> dict[str, dict[str, object]]:
        """Times of reads as the kernel waits for them and, with other nodes, of what was fetched from these."""
        read = self._statistics.totals().operations.get("read", OperationStatistics())
        found = {"read": read.histogram()}
        if self._remote is not None:
            found["fetch"] = self._remote.latency().histogram()
        return found

    def describe(self) -> dict[str, Any]:
        """What report.json says of this node."""
        stats: dict[str, Any] = self._statistics.snapshot()
        now = self.sample()
        peers = stats.get("peers", {"nodes": [], "transport": {}})
        config = self._config()
        return {
            "rank": self._job.rank,
            "host": self._job.host,
            "pid": os.getpid(),
            "started_s": round(self.started_s, 3),
            "uptime_s": now.at_s,
            "engine": stats["engine"]["name"],
            "local_bytes": self._store.local_bytes(),
            "sources": stats["sources"],
            "errors": stats["errors"],
            "staging": stats["staging"],
            "copies": stats.get("copies"),
            "memory": stats["memory"],
            "cache_capacity_bytes": self._broker.cache()["capacity_bytes"],
            "outputs": stats.get("outputs"),
            "order": stats.get("order"),
            "intercepted": stats.get("intercepted"),
            "metadata": _metadata(stats),
            "mountpoint": config.get("mountpoint"),
            "local": config.get("local"),
            "latency": self.histograms(),
            "served_bytes": peers["transport"].get("served_bytes", 0),
            "fetched": {str(peer["rank"]): peer["fetched_bytes"] for peer in peers["nodes"] if peer["fetched_bytes"]},
            "samples": _columns([*self.history.samples(), now]),
            **self.describe_events(),
        }

    def describe_events(self) -> dict[str, Any]:
        """The part of it that says what happened, which goes on to the very end."""
        return {
            "warnings": self.events.warnings + self.events.errors,
            "events": [
                [round(event.at_s - self.history.start_s, 3), event.level, event.kind, event.text]
                for event in self.events.snapshot()
            ],
            "events_left_out": self.events.left_out,
        }

    def pack(self) -> bytes:
        """The same as one message to another node."""
        return pack(self.describe())


def pack(account: Mapping[str, Any]) -> bytes:
    """An account as a message; if it is too long, without what can be spared."""
    kept = dict(account)
    for name in (*_DISPENSABLE, None):
        message = zlib.compress(json.dumps(kept).encode(), 6)
        if len(message) < MESSAGE_BYTES - 64 or name is None:
            break
        kept.pop(name, None)
    return message


def unpack(message: bytes) -> dict[str, Any]:
    """The account in a message of another node. Raises ValueError."""
    try:
        account: dict[str, Any] = json.loads(zlib.decompress(message))
    except zlib.error as error:
        raise ValueError(f"not an account: {error}") from error
    return account


def _columns(samples: list[Sample]) -> dict[str, list[float]]:
    """Samples by field; of sums the increments."""
    columns: dict[str, list[float]] = {
        name: list(values) for name, values in zip(Sample._fields, zip(*samples, strict=True), strict=True)
    }
    for name in _SUMS:
        values = columns[name]
        columns[name] = [later - earlier for earlier, later in zip([0, *values], values, strict=False)]
    return columns


def _metadata(stats: Mapping[str, Any]) -> dict[str, int]:
    """What the shared file system was not asked, because it was answered here; of programs that are intercepted, too.

    Where the kernel opens files by itself, that they are opened is known from their first read.
    """
    asked = stats["operations"]
    counted = {what: sum(asked[name]["count"] for name in names if name in asked) for what, names in _METADATA.items()}
    order, own = stats.get("order"), stats.get("intercepted") or {}
    begun = 0 if order is None else order["files"] + order["lost"]
    counted["opens"] = max(counted["opens"] + own.get("opens", 0), begun)
    counted["attributes"] += own.get("stats", 0)
    counted["listings"] += own.get("listings", 0)
    return counted


def _resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", "rb") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
