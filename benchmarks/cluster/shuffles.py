"""Shuffles of our own on a cluster in a box: what a rank reads, and what it tells its daemon, as fanstore.torch does.

Owns what a training program would bring: who owns what at the beginning, losses, and the words to the daemon. Losses
are made up, the same on all hosts, so that nothing needs to be gathered.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from cluster.orders import Spec
from cluster.settings import Settings
from fanstore.client.connection import connect
from fanstore.format.prepared import PreparedDataset
from fanstore.order import (
    GlobalShuffle,
    ImportanceExchange,
    LocalityAware,
    LocalShuffle,
    PartialLocalShuffle,
    ShardShuffle,
    Shuffle,
    ownership,
)

#: By name: how it is made, and whether a rank reads what it owns and nothing else.
SHUFFLES: dict[str, tuple[Callable[..., Shuffle], bool]] = {
    "global": (GlobalShuffle, False),
    "local": (LocalShuffle, True),
    "partial 0.1": (partial(PartialLocalShuffle, fraction=0.1), True),
    "partial 0.3": (partial(PartialLocalShuffle, fraction=0.3), True),
    "importance 0.1": (partial(ImportanceExchange, fraction=0.1, pairing=False, lagging=False), True),
    "importance 0.1, pairs": (partial(ImportanceExchange, fraction=0.1, pairing=True, lagging=False), True),
    "importance 0.1, lagging pairs": (partial(ImportanceExchange, fraction=0.1, pairing=True, lagging=True), True),
    "locality-aware": (LocalityAware, False),
    "shards": (partial(ShardShuffle, buffer=200, shards=32), False),
}
#: Bytes of paths in one message.
_MESSAGE_BYTES = 60_000


def expected(settings: Settings) -> float:
    """The share of an epoch's samples that cross between hosts; ownership begins as even shares."""
    make, _ = SHUFFLES[settings.shuffle]
    options = {"batch": settings.batch} if make is LocalityAware else {}
    order = make(samples=settings.files, ranks=settings.hosts, seed=settings.seed, **options)
    return float(np.mean([order.traffic(epoch).share for epoch in range(1, settings.epochs)]))


class Shuffled:
    """What one host reads, epoch by epoch."""

    def __init__(self, spec: Spec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        make, self._reads_own = SHUFFLES[spec.shuffle]
        options = {"batch": spec.batch} if make is LocalityAware else {}
        self._order = make(
            samples=len(spec.paths), ranks=spec.hosts, seed=spec.seed, ownership=self._ownership(), **options
        )
        self._client = connect(json.loads((Path(spec.mount) / ".fanstore" / "config.json").read_bytes()), "reader.py")

    def _ownership(self) -> np.ndarray:
        """Each file to a host that has its partition, evenly."""
        spec = self._spec
        index = PreparedDataset.open(Path(spec.prepared)).index
        partition = np.array([index.partition[index.resolve(path.encode())] for path in spec.paths])
        holders: list[list[int]] = [[] for _ in range(index.partition_count)]
        for node in json.loads((Path(spec.mount) / ".fanstore" / "nodes.json").read_bytes())["nodes"]:
            for placed in node["partitions"]["placed"]:
                holders[placed].append(node["rank"])
        return ownership.balanced(ownership.of_holders(partition, holders, range(spec.hosts)), spec.hosts)

    def begin(self, epoch: int) -> list[int]:
        """Numbers of files; the daemon is told of what this host owns in this epoch, and will own by its end."""
        order, spec = self._order, self._spec
        if isinstance(order, ImportanceExchange):
            known = epoch - order.lagging  # the latest epoch whose losses are known
            if known >= 0:
                order.record(known, np.random.RandomState(known).exponential(size=len(spec.paths)))
        reading = order.samples(epoch, self._rank)
        if self._reads_own:
            arriving = order.exchange(epoch, self._rank).received
            staying = np.flatnonzero(order.ownership(epoch + 1) == self._rank)
            self._tell(np.concatenate([reading, arriving, staying]).tolist())
        numbers: list[int] = reading.tolist()
        return numbers

    def _tell(self, owned: list[int]) -> None:
        assert self._client is not None
        names = list(dict.fromkeys(self._spec.paths[each].encode() for each in owned))
        each = _MESSAGE_BYTES // max(map(len, names))
        for start in range(0, len(names), each):
            self._client.ask("own", paths=b"\0".join(names[start : start + each]), last=start + each >= len(names))
