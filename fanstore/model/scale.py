"""FanStore on very many nodes: what grows with their number, and what the most asked node has to do.

Owns sums and counts for 16 to 10,000 nodes and 10^6 to 10^9 files: the index and its way to all nodes, the start, where
partitions are, what comes from other nodes and how unevenly, and what the loss of nodes costs. Reads are counted by
node, in whole permutations up to ``EXACT_FILES`` files, and drawn beyond that (``Outcome.exact``). Pure; bounded
memory. MB are 10^6 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fanstore.errors import UsageError

Counts = npt.NDArray[np.int64]

#: Up to so many files every read of every epoch is counted.
EXACT_FILES = 20_000_000
#: Draws of reads by node that are made at most, if they are drawn.
_DRAWS = 20_000_000
#: Bytes of an entry in the index, besides its name (docs/format.md).
ENTRY_BYTES = 80
#: Steps of the start in which every rank tells all others something, and what one such message costs a rank: 62,000 a
#: second between two (benchmarks/results/remote-reads.md).
STEPS, MESSAGE_S = 8, 16e-6
#: How long a node is silent before it counts as dead: fanstore-mount --peer-timeout.
SILENT_S = 2.0


@dataclass(frozen=True)
class Scale:
    """A job, and the machine that it runs on.

    Attributes:
        batch: samples of a node in an iteration; samples_per_s: of a node, infinite if computing takes no time.
        window: iterations that are read ahead, if the order is known; unevenness within is none.
        network_mb_per_s: of a node, each way; shared_mb_per_s: of the shared file system, for all.
        failures_per_node_hour: about what large clusters report: one node of 2,000 fails every three hours.
    """

    nodes: int
    files: int
    file_mb: float
    epochs: int = 90
    batch: int = 32
    samples_per_s: float = math.inf
    partition_mb: float = 1_074.0
    replicas: int = 1
    window: int = 32
    name_bytes: int = 24
    network_mb_per_s: float = 10_000.0
    shared_mb_per_s: float = 50_000.0
    failures_per_node_hour: float = 1.6e-4

    def __post_init__(self) -> None:
        for name in ("nodes", "files", "epochs", "batch", "replicas", "window"):
            if getattr(self, name) < 1:
                raise UsageError(f"'{name}' is {getattr(self, name)}; it must be 1 or more")
        for name in ("file_mb", "samples_per_s", "partition_mb", "network_mb_per_s", "shared_mb_per_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"'{name}' is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.failures_per_node_hour < math.inf:
            raise UsageError(f"'failures_per_node_hour' is {self.failures_per_node_hour}; it must be 0 or more")
        if self.replicas > self.nodes:
            raise UsageError(f"{self.replicas} copies of each partition do not fit on {self.nodes} nodes")
        if self.files < self.nodes * self.batch:
            raise UsageError(
                f"an epoch has {self.files:,} samples, and one batch of all nodes {self.nodes * self.batch:,}: nothing "
                "would be read; lower the batch or the number of nodes"
            )

    @property
    def dataset_mb(self) -> float:
        return self.files * self.file_mb

    @property
    def partitions(self) -> int:
        return max(1, math.ceil(self.dataset_mb / self.partition_mb))

    @property
    def iterations(self) -> int:
        """Of an epoch."""
        return self.files // (self.nodes * self.batch)

    def holder(self, partition: int | Counts, copy: int | Counts) -> Counts:
        """The node that has a copy of a partition: in turn, as fanstore.dataset.placement has it where all partitions
        are of one size."""
        return np.asarray((partition * self.replicas + copy) % self.nodes)


@dataclass(frozen=True)
class Outcome:
    """What was found.

    Attributes:
        exact: every read was counted; otherwise so many iterations were drawn as ``iterations`` says.
        index_mb: in the memory of every node.
        start_s: until all nodes have the index and have agreed, without what the launcher takes.
        staging_s: until everything is on the nodes, at the speed of the shared file system or of the nodes.
        holding: nodes that have any partition; largest_share_mb: of the one that has most; mean_share_mb of all.
        remote: the part of reads that comes from other nodes.
        asked_mean, asked_most: reads that a node serves in an iteration: of all, and of the most asked one. The same in
            a window: window_mean, window_most.
        epoch_s: without a known order each iteration waits for the most asked node; ordered_s: each window does;
            even_s: if all were asked alike.
        failures_per_hour: of all nodes.
        restore_s: until a partition of a lost node has as many copies as before.
        bare_per_hour: partitions that lose their last copy, in an hour; their files are then read from the shared file
            system.
    """

    scale: Scale
    exact: bool
    iterations: int
    index_mb: float
    start_s: float
    staging_s: float
    holding: int
    largest_share_mb: float
    mean_share_mb: float
    remote: float
    asked_mean: float
    asked_most: float
    window_mean: float
    window_most: float
    epoch_s: float
    ordered_s: float
    even_s: float
    failures_per_hour: float
    restore_s: float
    bare_per_hour: float


def simulate(scale: Scale, seed: int = 0) -> Outcome:
    """Count or draw the reads, and add up the rest."""
    copies = scale.holder(np.arange(scale.partitions)[:, np.newaxis], np.arange(scale.replicas))
    held = np.bincount(copies.ravel(), minlength=scale.nodes)
    partition_mb = scale.dataset_mb / scale.partitions
    index_mb = scale.files * (ENTRY_BYTES + scale.name_bytes) / 1e6
    counted = _Counted(scale)
    exact = scale.files <= EXACT_FILES
    random = np.random.default_rng(seed)
    if exact:
        for _ in range(scale.epochs):
            counted.add(*_epoch(scale, random))
    else:
        _draw(scale, held, random, counted)
    iterations = counted.iterations
    per_epoch = scale.iterations / iterations
    copied_mb = scale.dataset_mb * scale.replicas
    restore_s = SILENT_S + _spread(held.max(), scale.nodes) * partition_mb / scale.network_mb_per_s
    return Outcome(
        scale=scale,
        exact=exact,
        iterations=iterations,
        index_mb=index_mb,
        start_s=_start_s(scale, index_mb),
        staging_s=max(copied_mb / scale.shared_mb_per_s, held.max() * partition_mb / scale.network_mb_per_s),
        holding=int((held > 0).sum()),
        largest_share_mb=float(held.max() * partition_mb),
        mean_share_mb=copied_mb / scale.nodes,
        remote=counted.remote / (iterations * scale.nodes * scale.batch),
        asked_mean=counted.remote / (iterations * scale.nodes),
        asked_most=counted.most / iterations,
        window_mean=counted.window_remote / max(counted.windows, 1) / scale.nodes,
        window_most=counted.window_most / max(counted.windows, 1),
        epoch_s=counted.seconds * per_epoch,
        ordered_s=counted.window_seconds * per_epoch,
        even_s=counted.even_seconds * per_epoch,
        failures_per_hour=scale.nodes * scale.failures_per_node_hour,
        restore_s=restore_s,
        bare_per_hour=bare_per_hour(scale, float(copies.size) / scale.nodes, restore_s),
    )


def _spread(partitions: int, nodes: int) -> int:
    """Partitions of a lost node that one of the others has to copy."""
    return max(1, math.ceil(partitions / max(nodes - 1, 1)))


def _start_s(scale: Scale, index_mb: float) -> float:
    """The index is read once and sent to all (a long message passes each network twice), and in some steps every rank
    tells all others something."""
    read_s = index_mb / min(scale.network_mb_per_s, scale.shared_mb_per_s)
    send_s = 2 * index_mb / scale.network_mb_per_s if scale.nodes > 1 else 0.0
    return read_s + send_s + STEPS * (scale.nodes - 1) * MESSAGE_S


def bare_per_hour(scale: Scale, partitions_of_node: float, restore_s: float) -> float:
    """Partitions that lose their last copy: a node fails, and each of the others that have the same partition fails
    before there is a new copy."""
    within = scale.failures_per_node_hour * restore_s / 3600
    return scale.nodes * scale.failures_per_node_hour * partitions_of_node * within ** (scale.replicas - 1)


# --- reads ---


class _Counted:
    """Sums over iterations, and over windows of several.

    Attributes:
        remote, most: reads from other nodes, and those of the most asked node, summed over iterations.
        seconds, even_seconds: as ``Outcome.epoch_s`` and ``even_s``, of all iterations counted.
    """

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._compute_s = scale.batch / scale.samples_per_s
        self.iterations = self.windows = 0
        self.remote = self.most = self.window_remote = self.window_most = 0
        self.seconds = self.window_seconds = self.even_seconds = 0.0

    def add(self, served: Counts, fetched: Counts) -> None:
        """Reads that each node served and fetched (from others), a row for each iteration."""
        scale = self._scale
        transfer_s = scale.file_mb / scale.network_mb_per_s
        busiest = np.maximum(served.max(axis=1), fetched.max(axis=1))
        self.iterations += len(served)
        self.remote += int(served.sum())
        self.most += int(served.max(axis=1).sum())
        self.seconds += float(np.maximum(busiest * transfer_s, self._compute_s).sum())
        mean = served.sum(axis=1) / scale.nodes
        self.even_seconds += float(np.maximum(mean * transfer_s, self._compute_s).sum())
        for begin in range(0, len(served), scale.window):
            part_served = served[begin : begin + scale.window].sum(axis=0)
            part_fetched = fetched[begin : begin + scale.window].sum(axis=0)
            count = len(served[begin : begin + scale.window])
            busiest_s = max(int(part_served.max()), int(part_fetched.max())) * transfer_s
            self.window_seconds += max(busiest_s, count * self._compute_s)
            if count == scale.window or len(served) < scale.window:
                self.windows += 1
                self.window_remote += int(part_served.sum())
                self.window_most += int(part_served.max())


def _epoch(scale: Scale, random: np.random.Generator) -> tuple[Counts, Counts]:
    """All reads of an epoch, by iteration and node: a new permutation, of which each node in turn takes a batch. A copy
    on the node itself is read there; otherwise readers take the copies in turn."""
    count = scale.iterations * scale.nodes * scale.batch
    order = random.permutation(np.arange(scale.files, dtype=np.int32))[:count]
    partition = order.astype(np.int64) * scale.partitions // scale.files
    place = np.arange(count)
    reader = place // scale.batch % scale.nodes
    iteration = place // (scale.batch * scale.nodes)
    holder = scale.holder(partition, place % scale.replicas)
    away = holder != reader
    for copy in range(scale.replicas) if scale.replicas > 1 else ():
        away &= scale.holder(partition, copy) != reader
    shape = (scale.iterations, scale.nodes)
    served = np.bincount((iteration * scale.nodes + holder)[away], minlength=shape[0] * shape[1]).reshape(shape)
    fetched = np.bincount((iteration * scale.nodes + reader)[away], minlength=shape[0] * shape[1]).reshape(shape)
    return served, fetched


def _draw(scale: Scale, held: Counts, random: np.random.Generator, counted: _Counted) -> None:
    """The same, drawn: each read asks a node by what it has, and is at home with the probability that it has it."""
    wanted = scale.iterations * scale.epochs
    iterations = int(min(wanted, max(scale.window, _DRAWS // scale.nodes)))
    share = held / held.sum()
    at_home = float(np.mean(np.minimum(1.0, held / scale.partitions)))
    block = max(1, scale.window)
    for begin in range(0, iterations, block):
        rows = min(block, iterations - begin)
        fetched = random.binomial(scale.batch, 1 - at_home, (rows, scale.nodes)).astype(np.int64)
        served = np.stack([random.multinomial(int(total), share) for total in fetched.sum(axis=1)]).astype(np.int64)
        counted.add(served, fetched)
