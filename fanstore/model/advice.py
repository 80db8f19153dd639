"""What a forecast means for the user: whether FanStore pays, from when on, what limits it and what to add.

Pure, like the forecasts it compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fanstore.model.caching import lru_hits, next_use_hits
from fanstore.model.forecast import Dataset, Forecast, Link, Training, Way, forecast
from fanstore.model.hardware import fewest
from fanstore.model.machine import Machine
from fanstore.model.shuffling import Shuffling, by_fraction, shufflings
from fanstore.units import format_duration

#: Less than this part is no difference: the model is not that exact.
_SAME = 0.03
#: What "keeps up" means: so much longer than with all the room that helps.
_KEEPS_UP = 1.05
#: Epochs behind the last one that are looked at for when it would pay.
_FAR = 100_000


@dataclass(frozen=True)
class Job:
    """What is planned for."""

    machine: Machine
    dataset: Dataset
    training: Training

    def run(self, way: Way, **changes: float | Shuffling) -> Forecast:
        """The forecast, with other values of the training."""
        return forecast(way, self.machine, self.dataset, replace(self.training, **changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        use: FanStore is worth it for this job.
        pays_from: the first epoch at whose end FanStore is ahead of reading from the shared file system; 0 if never.
        why: sentences.
        weakest: what limits FanStore in later epochs.
        add: what to add to get further, in a sentence.
        needs: of each kind, what a node must have to keep its GPUs busy in the last epoch; empty if computing takes no
            time.
        smallest_room_mb: on each node, with which FanStore still keeps up.
    """

    use: bool
    pays_from: int
    why: tuple[str, ...]
    weakest: Link
    add: str
    needs: dict[str, int]
    smallest_room_mb: float


def verdict(job: Job) -> Verdict:
    """Judges FanStore as it is without a known order: that needs nothing from the program."""
    direct, copy, ours = (job.run(way) for way in (Way.DIRECT, Way.COPY, Way.FANSTORE))
    pays_from = _pays_from(direct, ours)
    epochs = job.training.epochs
    use = 0 < pays_from <= epochs
    ordered = job.run(Way.ORDERED)
    room_mb = smallest_room_mb(job)
    return Verdict(
        use,
        pays_from,
        tuple(_why(job, direct, copy, ours, ordered, pays_from)),
        ours.weakest,
        _add(job, ours),
        needs(job, ours),
        room_mb,
    )


def _pays_from(direct: Forecast, ours: Forecast) -> int:
    """By a sum over epochs; behind the last one, they go on alike."""
    known = len(ours.epochs)
    ours_s, direct_s = ours.start_s, direct.start_s
    for number, (one, other) in enumerate(zip(ours.epochs, direct.epochs, strict=True), 1):
        ours_s += one.seconds
        direct_s += other.seconds
        if ours_s < (1 - _SAME) * direct_s:
            return number
    gain_s = (1 - _SAME) * direct.epochs[-1].seconds - ours.epochs[-1].seconds
    if gain_s <= 0:
        return 0
    behind_s = ours_s - (1 - _SAME) * direct_s
    later = known + math.floor(behind_s / gain_s) + 1
    return later if later <= _FAR else 0


def _why(job: Job, direct: Forecast, copy: Forecast, ours: Forecast, ordered: Forecast, pays_from: int) -> list[str]:
    epochs, found = job.training.epochs, []
    if 0 < pays_from <= epochs:
        found.append(
            f"FanStore takes {_ratio(direct.seconds, ours.seconds)} of the time that the shared file system takes, and "
            f"is ahead from epoch {pays_from} on. Without it, the job is limited by {_limit(direct)}."
        )
    elif pays_from:
        found.append(
            f"{epochs} epochs are too few: FanStore would be ahead from epoch {pays_from:,} on, because of the time "
            "that it takes to start and to stage."
        )
    elif direct.weakest is Link.COMPUTE:
        found.append(
            "The shared file system and the memory of the nodes keep up with the GPUs: there is little to gain."
        )
    else:
        found.append(
            f"FanStore would not be faster: it is limited by {_limit(ours)}, and an epoch takes as long with it as "
            "from the shared file system, or longer."
        )
    if copy.impossible:
        found.append(f"A copy on every node is not possible: {copy.impossible}.")
    else:
        other, name = (ours, "FanStore") if 0 < pays_from <= epochs else (direct, "the shared file system")
        if ours.nodes > 1 and copy.seconds < (1 - _SAME) * other.seconds:
            found.append(
                f"A copy on every node is faster: {_ratio(other.seconds, copy.seconds)} of the time with {name}, with "
                f"{job.dataset.content_mb:,.0f} MB on each node; fanstore-mount --replicas {ours.nodes} makes one."
            )
    first = job.run(Way.FANSTORE, stage_first=True)
    if first.first_end_s < (1 - _SAME) * ours.first_end_s:
        found.append(
            f"With --stage-first the first epoch ends after {format_duration(first.first_end_s)} instead of "
            f"{format_duration(ours.first_end_s)}, because reads do not compete with the copying."
        )
    if ordered.seconds < (1 - _SAME) * ours.seconds:
        found.append(f"With a known order FanStore would take {_ratio(ours.seconds, ordered.seconds)} of that.")
    if job.dataset.stored_mb > ours.nodes * job.training.room_mb:
        part = 1 - ours.nodes * job.training.room_mb / job.dataset.stored_mb
        found.append(
            f"{part:.0%} of the dataset has no room on the nodes and is read from the shared file system in every "
            f"epoch; {job.dataset.stored_mb / ours.nodes:,.0f} MB on each node would do."
        )
    return found


def _limit(one: Forecast) -> str:
    return f"the {one.weakest.value}" if one.weakest is not Link.COMPUTE else "computing"


def _ratio(of: float, part: float) -> str:
    """``part`` as a share of ``of``."""
    share = part / of
    return f"{share:.0%}" if share >= 0.095 else f"1/{1 / share:.0f}"


#: What more of a link is called.
_MORE = {
    Link.SHARED: "room on the nodes, or of the shared file system",
    Link.DISK: "SSDs in each node",
    Link.NETWORK: "network interfaces in each node",
    Link.WORKERS: "data loader workers",
    Link.DECODE: "processor cores",
}


def _add(job: Job, ours: Forecast) -> str:
    busy_s = ours.epochs[-1].busy_s
    weakest = ours.weakest
    if weakest is Link.COMPUTE:
        return "Nothing: computing is the limit."
    others = {link: seconds for link, seconds in busy_s.items() if link is not weakest}
    following = max(others, key=others.__getitem__)
    if not others[following]:
        return f"More {_MORE[weakest]}: nothing else takes time."
    computing = busy_s[Link.COMPUTE]
    sentence = (
        f"{_times(busy_s[weakest] / others[following])} the {_MORE[weakest]}; then the limit is {following.value}"
    )
    if computing and following is not Link.COMPUTE:
        sentence += f", and {_times(busy_s[weakest] / computing)} would keep the GPUs busy"
    return f"{sentence}."


def needs(job: Job, one: Forecast) -> dict[str, int]:
    """Of each kind so many as fast as those that were measured, as the talk's tables have it (``hardware``)."""
    busy_s = one.epochs[-1].busy_s
    if not busy_s[Link.COMPUTE]:
        return {}
    have = {
        Link.DISK: ("SSDs", 1),
        Link.NETWORK: ("network interfaces", 1),
        Link.WORKERS: ("data loader workers", job.training.workers),
        Link.DECODE: ("cores for decompression", job.machine.cores),
    }
    return {
        name: fewest(count * busy_s[link], busy_s[Link.COMPUTE])
        for link, (name, count) in have.items()
        if busy_s.get(link)
    }


def _times(factor: float) -> str:
    return f"{factor:.1f} times" if factor < 10 else f"{factor:,.0f} times"


def smallest_room_mb(job: Job) -> float:
    """On each node, with which later epochs take no longer than with room for everything, but for a twentieth."""
    return _least(job.dataset.stored_mb / job.training.nodes, lambda mb: job.run(Way.FANSTORE, room_mb=mb).later_s)


def smallest_memory_mb(job: Job) -> float:
    """For the dataset on each node, with which later epochs take no longer than with all the memory that there is, but
    for a twentieth."""

    def later_s(mb: float) -> float:
        return replace(job, machine=replace(job.machine, memory_mb=mb)).run(Way.FANSTORE).later_s

    return _least(min(job.machine.memory_mb, job.dataset.content_mb), later_s)


def _least(most_mb: float, later_s: Callable[[float], float]) -> float:
    """With which it takes no longer than with ``most_mb``, but for a twentieth; more never makes it longer."""
    enough_s = _KEEPS_UP * later_s(most_mb)
    if later_s(0.0) <= enough_s:
        return 0.0
    low_mb, high_mb = 0.0, most_mb
    while high_mb - low_mb > most_mb / 200:
        middle_mb = (low_mb + high_mb) / 2
        if later_s(middle_mb) <= enough_s:
            high_mb = middle_mb
        else:
            low_mb = middle_mb
    return high_mb


# --- what if ---


def memory_hits(job: Job) -> tuple[float, float]:
    """The part of reads that the nodes' memory answers once it is full; and at best, keeping what is wanted next."""
    share, nodes = job.machine.memory_mb / job.dataset.content_mb, job.training.nodes
    hits = lru_hits(nodes, share)
    return hits, hits if share >= 1 else max(hits, next_use_hits(nodes, share, job.training.epochs))


def node_counts(most: int) -> list[int]:
    """1, 2, 4 ... and the number itself."""
    counts = [2**power for power in range(most.bit_length()) if 2**power < most]
    return [*counts, most]


def by_nodes(job: Job) -> dict[int, dict[Way, Forecast]]:
    """All ways, on 1 ... N nodes; numbers of nodes for which a batch is too large are left out."""
    whole = job.training.gpus * job.training.batch
    counts = [nodes for nodes in node_counts(job.training.nodes) if nodes * whole <= job.dataset.files]
    return {nodes: {way: job.run(way, nodes=nodes) for way in Way} for nodes in counts or [job.training.nodes]}


def by_room(job: Job, shares: Sequence[float] = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)) -> dict[float, Forecast]:
    """FanStore, with room for so much of the dataset on all nodes together."""
    most_mb = job.dataset.stored_mb / job.training.nodes
    return {share: job.run(Way.FANSTORE, room_mb=share * most_mb) for share in shares}


def by_speed(job: Job, factors: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0)) -> dict[float, tuple[Forecast, Forecast]]:
    """FanStore with a network, and with a shared file system, that is faster by so much."""
    return {
        factor: (
            replace(job, machine=job.machine.scaled(network=factor)).run(Way.FANSTORE),
            replace(job, machine=job.machine.scaled(shared=factor)).run(Way.FANSTORE),
        )
        for factor in factors
    }


#: FanStore without and with a known order.
_OURS = (Way.FANSTORE, Way.ORDERED)
#: Fractions of partial shuffling that a curve goes through.
_FRACTIONS = tuple(tenths / 10 for tenths in range(11))


def by_shuffle(job: Job) -> dict[Shuffling, dict[Way, Forecast]]:
    """FanStore with each shuffle of ``fanstore.order``; nothing on one node, where all reads are local."""
    training = job.training
    if training.nodes == 1:
        return {}
    found = shufflings(training.nodes, training.gpus, training.batch, job.dataset.files)
    return {one: {way: job.run(way, shuffling=one) for way in _OURS} for one in found}


def by_exchanged(job: Job) -> dict[float, dict[Way, Forecast]]:
    """FanStore with partial shuffling, by the fraction that is exchanged."""
    found = by_fraction(job.training.nodes, _FRACTIONS)
    return {
        fraction: {way: job.run(way, shuffling=one) for way in _OURS}
        for fraction, one in zip(_FRACTIONS, found, strict=True)
    }
