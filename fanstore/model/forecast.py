"""What a real job will do, in four ways to get at its data: seconds, bytes, and what limits it.

Owns the closed forms (docs/model.md, *A job*): each epoch takes as long as its busiest link, and while partitions are
staged that is followed step by step. Unlike the simulation it knows sums, not samples, so that it costs nothing for any
number of nodes; tests compare the two. MB are 10^6 bytes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import Enum

from fanstore.errors import UsageError
from fanstore.model.caching import lru_hits, seen, seen_again
from fanstore.model.machine import Machine
from fanstore.model.shuffling import Shuffling, global_shuffle

#: What a file costs a reader besides its bytes, through the mount: 10,500 small files/s with two readers, where ext4
#: has 21,400 (benchmarks/results/growth.md).
MOUNT_S = 100e-6
#: The same for a file in the kernel's memory, whichever file system it belongs to: some 200,000 files/s with two
#: readers (the same record, warm).
WARM_S = 10e-6
#: Until the daemons of a job are up and have agreed, besides the index.
START_S = 1.0
#: Threads of a node that copy partitions (fanstore/dataset/staging.py).
STAGERS = 4
#: Hits of an epoch that differ by less from those before are the same.
_SAME_HITS = 1e-7
#: Epochs that are planned at most.
_MOST_EPOCHS = 100_000
#: Steps in which an epoch with staging is followed: the first one, those behind it, and those from _LATE_EPOCH on, when
#: little changes within one.
_STEPS, _MIDDLE_STEPS, _LATE_STEPS, _LATE_EPOCH = 200, 40, 1, 40


class Way(Enum):
    """How training gets at its data; the value is its name for people."""

    DIRECT = "shared file system"
    COPY = "a copy on every node"
    FANSTORE = "FanStore"
    ORDERED = "FanStore, order known"


class Link(Enum):
    """What may limit an epoch."""

    COMPUTE = "computing"
    SHARED = "shared file system"
    DISK = "local disk"
    NETWORK = "network"
    WORKERS = "data loader workers"
    DECODE = "decompression"


@dataclass(frozen=True)
class Dataset:
    """``content_mb`` is what programs read, ``stored_mb`` what is stored, perhaps compressed."""

    files: int
    content_mb: float
    stored_mb: float
    index_mb: float = 0.0
    compressed: bool = False

    def __post_init__(self) -> None:
        if self.files < 1 or self.content_mb <= 0:
            raise UsageError("the dataset has no bytes in any file: there is nothing to plan for")


@dataclass(frozen=True)
class Training:
    """The job.

    Attributes:
        gpus: of a node; samples_per_s: of a GPU, infinite if computing is to take no time.
        batch: samples of a GPU in an iteration.
        workers: processes of a node that read.
        room_mb: for the dataset on a node's own disk.
        stage_first: FanStore copies everything before the first read.
        shuffling: how ranks share the dataset with FanStore; None is a global shuffle.
    """

    nodes: int
    gpus: int
    samples_per_s: float
    epochs: int
    batch: int
    workers: int
    room_mb: float
    stage_first: bool = False
    shuffling: Shuffling | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "epochs", "batch", "workers"):
            if getattr(self, name) < 1:
                raise UsageError(f"'--{name}' is {getattr(self, name)}; it must be 1 or more")
        if self.epochs > _MOST_EPOCHS:
            raise UsageError(f"'--epochs' is {self.epochs:,}; at most {_MOST_EPOCHS:,} are planned")
        if not self.samples_per_s > 0:
            raise UsageError(f"'--samples-per-second' is {self.samples_per_s:g}; it must be above 0")
        if not self.room_mb >= 0:
            raise UsageError(f"the room on a node is {self.room_mb:g} MB; it must be 0 or more")


@dataclass(frozen=True)
class Epoch:
    """One epoch: how long each link is busy for it, and what was read from where by all nodes together."""

    seconds: float
    busy_s: dict[Link, float]
    shared_mb: float
    network_mb: float

    @property
    def weakest(self) -> Link:
        """What limits it."""
        return max(self.busy_s, key=self.busy_s.__getitem__)


@dataclass(frozen=True)
class Moment:
    """A step of the first epoch: its end, and MB/s read by all nodes from each source, and staged.

    What comes from the shared file system through the node that keeps it is read there, and counted as staged.
    """

    end_s: float
    local_mb_per_s: float
    network_mb_per_s: float
    shared_mb_per_s: float
    staging_mb_per_s: float


@dataclass(frozen=True)
class Forecast:
    """What a job does in one way.

    Attributes:
        impossible: why it cannot be done; empty if it can. Then there are no epochs.
        start_s: before the first sample is read.
        start_shared_mb: read from the shared file system until then, by all nodes.
        room_mb: needed on each node's disk.
        course: of the first epoch.
    """

    way: Way
    nodes: int
    impossible: str
    start_s: float
    start_shared_mb: float
    epochs: tuple[Epoch, ...]
    room_mb: float
    course: tuple[Moment, ...] = ()

    @property
    def seconds(self) -> float:
        """The whole job."""
        return self.start_s + sum(one.seconds for one in self.epochs) if self.epochs else math.inf

    @property
    def first_end_s(self) -> float:
        """When the first epoch is done."""
        return self.start_s + self.epochs[0].seconds

    @property
    def later_s(self) -> float:
        """Mean of the epochs behind the first."""
        later = self.epochs[1:] or self.epochs
        return sum(one.seconds for one in later) / len(later)

    @property
    def shared_mb(self) -> float:
        return self.start_shared_mb + sum(one.shared_mb for one in self.epochs)

    @property
    def network_mb(self) -> float:
        return sum(one.network_mb for one in self.epochs)

    @property
    def later_network_mb(self) -> float:
        """Mean of the epochs behind the first."""
        later = self.epochs[1:] or self.epochs
        return sum(one.network_mb for one in later) / len(later)

    @property
    def weakest(self) -> Link:
        """What limits the last epoch."""
        return self.epochs[-1].weakest


def forecast(way: Way, machine: Machine, dataset: Dataset, training: Training) -> Forecast:
    """What the job does in this way."""
    if training.nodes > 1 and machine.network_mb_per_s is None and way in (Way.FANSTORE, Way.ORDERED):
        raise UsageError(
            "the network was not measured, because one node measured alone; measure under mpirun on the nodes of a "
            "job, or plan with --nodes 1"
        )
    return _Calculation(way, machine, dataset, training).run()


@dataclass(frozen=True)
class _Calculation:
    """Sums for one way; all of them for one epoch of all nodes."""

    way: Way
    machine: Machine
    dataset: Dataset
    training: Training

    def __post_init__(self) -> None:
        if self.samples < 1:
            whole = self.training.nodes * self.training.gpus * self.training.batch
            raise UsageError(
                f"an epoch has {self.dataset.files:,} samples, and one batch of all GPUs {whole:,}: nothing would be "
                "read; lower --batch, --gpus or --nodes"
            )

    @functools.cached_property
    def samples(self) -> int:
        """Of an epoch; the last incomplete batch is dropped."""
        whole = self.training.nodes * self.training.gpus * self.training.batch
        return self.dataset.files // whole * whole

    @property
    def _sample_mb(self) -> float:
        return self.dataset.content_mb / self.dataset.files

    @property
    def _stored_mb(self) -> float:
        """Of a sample, as it comes: only FanStore has it compressed."""
        direct = self.way in (Way.DIRECT, Way.COPY)
        return self._sample_mb if direct else self.dataset.stored_mb / self.dataset.files

    @property
    def _readers(self) -> int:
        return self.training.nodes * self.training.workers

    @functools.cached_property
    def _files_per_s(self) -> float:
        """Of the shared file system."""
        return self.machine.files_per_s(self._stored_mb, self._readers)

    @functools.cached_property
    def _shuffling(self) -> Shuffling:
        shuffling = self.training.shuffling
        if shuffling is None or self.way in (Way.DIRECT, Way.COPY):
            return global_shuffle(self.training.nodes)
        return shuffling

    @functools.cached_property
    def _hits(self) -> float:
        """Of the nodes' memory, once it is full."""
        share = self.machine.memory_mb / self.dataset.content_mb
        nodes = self.training.nodes
        if self._shuffling.own:  # a node reads its own share again, as one node alone would
            share, nodes = share * nodes / self._shuffling.share, 1
        return lru_hits(nodes, share)

    def _hits_in(self, epoch: int) -> float:
        """Of what is read in this epoch."""
        if not epoch:
            return 0.0
        if self._shuffling.own:
            remote = self._shuffling.remote
            return (1 - remote) * self._hits + remote * self._hits_of_what_comes(epoch)
        return min(self._hits, seen(self.training.nodes, epoch))

    def _hits_of_what_comes(self, epoch: int) -> float:
        """Of samples that come to a node which reads its own share: they are in memory if they were there before, and
        what the node has read since then is not too much."""
        shuffling, nodes = self._shuffling, self.training.nodes
        if nodes == 1 or not shuffling.remote:
            return 0.0
        spare = nodes * self.machine.memory_mb / self.dataset.content_mb - shuffling.share
        remembered = min(epoch - 1, max(0.0, spare) / shuffling.remote)
        return seen_again(nodes, shuffling.remote, remembered)

    def run(self) -> Forecast:
        if self.way is Way.DIRECT:
            return self._result(0.0, 0.0, self._all_steady(staged=0.0), 0.0)
        if self.way is Way.COPY:
            return self._copy()
        return self._fanstore()

    def _result(
        self,
        start_s: float,
        start_mb: float,
        epochs: tuple[Epoch, ...],
        room_mb: float,
        course: tuple[Moment, ...] = (),
    ) -> Forecast:
        return Forecast(self.way, self.training.nodes, "", start_s, start_mb, epochs, room_mb, course)

    def _copy(self) -> Forecast:
        """Everything to every node's disk, in large reads, before training begins."""
        whole_mb, nodes = self.dataset.content_mb, self.training.nodes
        if whole_mb > self.training.room_mb:
            why = f"{whole_mb:,.0f} MB do not fit into {self.training.room_mb:,.0f} MB on each node"
            return Forecast(self.way, nodes, why, 0.0, 0.0, (), whole_mb)
        start_s = max(
            nodes * whole_mb / float(self.machine.large_mb_per_s.at(STAGERS * nodes)),
            whole_mb / float(self.machine.disk_write.at(STAGERS)),
        )
        return self._result(start_s, nodes * whole_mb, self._all_steady(staged=1.0), whole_mb)

    # --- an epoch in which nothing is staged any more ---

    def _all_steady(self, staged: float, begin: int = 0) -> tuple[Epoch, ...]:
        """The epochs from this one to the last. Once memory is full, and what nodes read has moved as far as it will,
        they are all alike."""
        epochs: list[Epoch] = []
        for number in range(begin, self.training.epochs):
            if epochs and self._is_like(number, number - 1, staged):
                epochs += [epochs[-1]] * (self.training.epochs - number)
                break
            epochs.append(self._steady(number, staged))
        return tuple(epochs)

    def _is_like(self, epoch: int, other: int, staged: float) -> bool:
        hits = self._hits_in(epoch) - self._hits_in(other)
        remote = self._remote(epoch, staged) - self._remote(other, staged)
        return max(abs(hits), abs(remote)) < _SAME_HITS

    def _steady(self, epoch: int, staged: float) -> Epoch:
        busy_s = self._busy_s(epoch, staged)
        missed = 1 - self._hits_in(epoch)
        read_mb = self.samples * missed * self._stored_mb
        return Epoch(
            max(busy_s.values()),
            busy_s,
            shared_mb=read_mb * (1 - staged),
            network_mb=read_mb * self._remote(epoch, staged),
        )

    def _remote(self, epoch: int, staged: float) -> float:
        """The part of reads that comes from other nodes, of those that memory does not answer."""
        if self.way is Way.COPY:
            return 0.0
        shuffling = self._shuffling
        if not shuffling.own:
            return staged * shuffling.remote
        foreign = shuffling.foreign(self.training.nodes, epoch)
        if not epoch:
            return staged * foreign
        came = min(shuffling.remote, foreign)
        missed = 1 - self._hits_in(epoch)
        remote = came * (1 - self._hits_of_what_comes(epoch)) + (foreign - came) * (1 - self._hits)
        return staged * min(1.0, remote / missed) if missed else 0.0

    def _busy_s(self, epoch: int, staged: float, kept: float | None = None) -> dict[Link, float]:
        """How long each link is busy for an epoch, if ``staged`` of the dataset is on disks of the nodes, and ``kept``
        comes through nodes that have it or are copying it."""
        kept = staged if kept is None else kept
        machine, training, nodes = self.machine, self.training, self.training.nodes
        hits = self._hits_in(epoch)
        missed = 1 - hits
        remote, shared = self._remote(epoch, kept), 1 - staged
        local = staged * (1 - remote / kept) if kept else 0.0
        samples = self.samples / nodes
        network = machine.network_mb_per_s or math.inf
        # Of one reader alone: that others are there, too, is what the links below are busy with.
        waiting_s = (
            local * self._stored_mb / float(machine.disk_read.at(1))
            + remote * (machine.request_s + self._stored_mb / network)
            + shared / machine.files_per_s(self._stored_mb, 1)
        )
        if self.way is Way.ORDERED:
            waiting_s = 0.0  # fetched ahead, many at a time
        mount_s = 0.0 if self.way in (Way.DIRECT, Way.COPY) else MOUNT_S
        reading_s = hits * WARM_S + missed * (mount_s + waiting_s) + self._sample_mb / machine.memory_mb_per_s
        busy_s = {
            Link.COMPUTE: self.samples / (nodes * training.gpus * training.samples_per_s),
            Link.SHARED: self.samples * missed * shared / self._files_per_s,
            Link.DISK: samples * missed * staged * self._stored_mb / float(machine.disk_read.at(training.workers)),
            Link.NETWORK: samples * missed * remote * self._stored_mb / network,
            Link.WORKERS: samples * reading_s / training.workers,
        }
        if self.dataset.compressed and self.way in (Way.FANSTORE, Way.ORDERED):
            if machine.decode_mb_per_s is None:
                raise UsageError(
                    "the dataset is compressed, and decompression was not measured; measure with --dataset"
                )
            busy_s[Link.DECODE] = samples * missed * self._sample_mb / (machine.cores * machine.decode_mb_per_s)
        return busy_s

    # --- FanStore, which stages behind the first reads ---

    def _fanstore(self) -> Forecast:
        machine, nodes, dataset = self.machine, self.training.nodes, self.dataset
        kept = min(1.0, nodes * self.training.room_mb / dataset.stored_mb)
        index_s = dataset.index_mb / float(machine.large_mb_per_s.at(1))
        if nodes > 1:
            index_s += math.ceil(math.log2(nodes)) * dataset.index_mb / (machine.network_mb_per_s or math.inf)
        staging_s = kept * dataset.stored_mb / self._staging_mb_per_s() if self.training.stage_first else 0.0
        staged = kept if self.training.stage_first else 0.0
        epochs: list[Epoch] = []
        course: tuple[Moment, ...] = ()
        while staged < kept and len(epochs) < self.training.epochs:
            epoch, staged, steps = self._staging(len(epochs), staged, kept)
            course = course or steps
            epochs.append(epoch)
        epochs += self._all_steady(kept, begin=len(epochs))
        start_mb = dataset.index_mb + staged * dataset.stored_mb * self.training.stage_first
        room_mb = kept * dataset.stored_mb / nodes
        return self._result(START_S + index_s + staging_s, start_mb, tuple(epochs), room_mb, course)

    def _staging_mb_per_s(self, part: float = 1.0) -> float:
        """All nodes together, with so much of the shared file system."""
        nodes = self.training.nodes
        large = float(self.machine.large_mb_per_s.at(STAGERS * nodes))
        return min(part * large, nodes * float(self.machine.disk_write.at(STAGERS)))

    def _staging(self, number: int, staged: float, kept: float) -> tuple[Epoch, float, tuple[Moment, ...]]:
        """An epoch while partitions are copied: followed in steps of equal numbers of samples.

        The time of the shared file system is shared by readers and threads that stage, which also get what readers
        leave. What readers want before it is staged comes through the node that keeps it, and is staged with that.
        """
        training, stored_mb = self.training, self.dataset.stored_mb
        missed = 1 - self._hits_in(number)
        steps = _STEPS if number == 0 else _MIDDLE_STEPS if number < _LATE_EPOCH else _LATE_STEPS
        step = self.samples / steps
        written_mb_per_s = training.nodes * float(self.machine.disk_write.at(STAGERS))
        now_s = shared_mb = network_mb = 0.0
        total_s = dict.fromkeys(self._busy_s(number, staged), 0.0)
        course = []
        for index in range(steps):
            # Of what is still to be read in the first epoch, nothing was brought for readers: each file is read once.
            read = self.samples / self.dataset.files * index / steps if number == 0 else 0.0
            here = max(0.0, (staged - kept * read) / (1 - read))
            busy_s = {link: seconds / steps for link, seconds in self._busy_s(number, here, kept).items()}
            copying = staged < kept
            reads_mb = step * missed * self._stored_mb
            missing_mb = (kept - staged) * stored_mb
            brought_mb = min(reads_mb * max(0.0, kept - here), missing_mb)
            if copying:  # readers have only their part of the shared file system
                busy_s[Link.SHARED] *= (training.workers + STAGERS) / training.workers
                busy_s[Link.DISK] += brought_mb / written_mb_per_s
            step_s = max(busy_s.values())
            from_shared_mb = reads_mb * (1 - kept)
            idle = max(0.0, 1 - step * missed * (1 - here) / self._files_per_s / step_s)
            staged_mb = min(
                step_s * self._staging_mb_per_s(idle),
                max(0.0, step_s * written_mb_per_s - brought_mb),
                missing_mb - brought_mb,
            )
            network_step_mb = reads_mb * self._remote(number, kept)
            course.append(
                Moment(
                    now_s + step_s,
                    local_mb_per_s=(reads_mb * kept - network_step_mb) / step_s,
                    network_mb_per_s=network_step_mb / step_s,
                    shared_mb_per_s=from_shared_mb / step_s,
                    staging_mb_per_s=(brought_mb + staged_mb) / step_s,
                )
            )
            for link, seconds in busy_s.items():
                total_s[link] += seconds
            now_s += step_s
            network_mb += network_step_mb
            shared_mb += from_shared_mb + brought_mb + staged_mb
            staged = min(kept, staged + (brought_mb + staged_mb) / stored_mb)
            if kept - staged < 1e-9:
                staged = kept
        return Epoch(now_s, total_s, shared_mb, network_mb), staged, tuple(course)
