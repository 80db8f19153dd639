"""The figures of all nodes of a job, put together: sums, one course of time for all, who got how much from whom.

Pure functions and what they return; the data is that of ``report.json`` (docs/operations.md), and comes from other
machines: a node may be missing, or tell only a part. Used by report/page.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy

#: Where bytes come from, in the order of the pictures: the best first.
SOURCES = ("local", "cache", "remote", "shared")

#: Points in time of the pictures, at most.
POINTS_MOST = 240

#: Nodes of the matrix; if there are more, neighbours are taken together.
MATRIX_MOST = 64

Node: TypeAlias = Mapping[str, Any]
Values: TypeAlias = list[float]


@dataclass(frozen=True)
class Course:
    """The job over time. All lists are as long as ``ends_s``: a value per interval, which ends there.

    Attributes:
        ends_s: in seconds since the start; the first interval begins at 0.
        rates: by source, bytes per second that programs on all nodes have read.
        memory_most, memory_mean, cache_most, cache_mean: of the nodes that told of that time, bytes.
        pending, pending_bytes: outputs that do not stand in --output; all nodes know all, so the highest counts.
        waiting: readers that waited for bytes, on average, on all nodes together; empty if nobody has told.
    """

    ends_s: Values
    rates: Mapping[str, Values]
    memory_most: Values
    memory_mean: Values
    cache_most: Values
    cache_mean: Values
    pending: Values
    pending_bytes: Values
    waiting: Values

    def total_rates(self) -> Values:
        return [sum(values) for values in zip(*self.rates.values(), strict=True)]


#: A time in which less than this part of the highest rate was read is no reading: an epoch from the page cache, in
#: which a file here and there comes from us.
_SILENCE = 0.01


def reading(course: Course) -> tuple[float, float]:
    """How long programs have read something, in seconds, and how many bytes a second then."""
    rates = course.total_rates()
    starts = [0.0, *course.ends_s]
    busy = [
        (end - start, rate)
        for start, end, rate in zip(starts, course.ends_s, rates, strict=False)
        if rate > _SILENCE * max(rates)
    ]
    seconds = sum(step for step, _ in busy)
    return seconds, sum(step * rate for step, rate in busy) / seconds if seconds else 0.0


@dataclass(frozen=True)
class Matrix:
    """Bytes that ranks got from ranks.

    Attributes:
        labels: of rows and columns: a rank, or ranks that were taken together. cells: by row (who got it), then column.
    """

    labels: list[str]
    cells: list[Values]

    def most(self) -> float:
        return max((value for row in self.cells for value in row), default=0.0)


def has_told(nodes: Sequence[Node]) -> list[Node]:
    """Nodes of which more is known than that they exist."""
    return [node for node in nodes if "sources" in node]


def duration_s(nodes: Sequence[Node]) -> float:
    return max((float(node["uptime_s"]) for node in has_told(nodes)), default=0.0)


def by_source(nodes: Sequence[Node], key: str) -> dict[str, int]:
    """Sums over all nodes of a counter of the sources."""
    return {name: sum(int(node["sources"][name][key]) for node in has_told(nodes)) for name in SOURCES}


def total(nodes: Sequence[Node], section: str, key: str) -> int:
    return sum(int(node[section][key]) for node in has_told(nodes))


def intercepted(nodes: Sequence[Node], key: str) -> int:
    """Sum over all nodes of what programs have done by themselves; a daemon of an older version does not tell."""
    return sum(int((node.get("intercepted") or {}).get(key, 0)) for node in has_told(nodes))


def metadata(nodes: Sequence[Node]) -> int | None:
    """Operations on names and attributes that the shared file system was not asked; None if nobody has told."""
    told = [node["metadata"] for node in has_told(nodes) if node.get("metadata") is not None]
    return sum(sum(map(int, each.values())) for each in told) if told else None


def waited_s(nodes: Sequence[Node]) -> float:
    """How long readers have waited for bytes, all of them together."""
    return sum(sum(node["samples"].get("waited_ms", ())) for node in has_told(nodes) if "samples" in node) / 1e3


def places(nodes: Sequence[Node]) -> bool:
    """Whether it differs between nodes where the dataset is mounted, or where its copies are."""
    told = {(node.get("mountpoint"), node.get("local")) for node in has_told(nodes) if "mountpoint" in node}
    return len(told) > 1


def outputs(nodes: Sequence[Node]) -> list[Mapping[str, Any]]:
    """What nodes said of outputs, the newest first. All know of all outputs, but those that ended before the others
    did not see the last ones saved."""
    told = [node for node in has_told(nodes) if node.get("outputs") is not None]
    return [node["outputs"] for node in sorted(told, key=lambda node: -float(node["uptime_s"]))]


@dataclass(frozen=True)
class Ordered:
    """What was known of the order of reads, on nodes for which it was the same, and what that was good for."""

    ranks: list[int]
    words: str
    files: int
    predicted: int
    prefetched: int
    late: int
    waited_s: float


def orders(nodes: Sequence[Node]) -> list[Ordered]:
    """The order of reads on all nodes that looked for one."""
    groups: dict[str, list[Node]] = {}
    for node in has_told(nodes):
        if node.get("order") is not None:
            groups.setdefault(order_words(node["order"]), []).append(node)
    return [
        Ordered(
            ranks=[int(node["rank"]) for node in group],
            words=words,
            files=sum(int(node["order"]["files"]) + int(node["order"].get("lost", 0)) for node in group),
            predicted=total(group, "order", "predicted"),
            prefetched=total(group, "order", "prefetched"),
            late=total(group, "order", "late"),
            waited_s=sum(float(node["order"]["waited_s"]) for node in group),
        )
        for words, group in groups.items()
    ]


def order_words(order: Mapping[str, Any]) -> str:
    """How an order is known, and what it is."""
    if order["source"] == "none":
        return "not known"
    known = [str(order["sampler"])] if order["sampler"] is not None else []
    known += [f"seed {order['seed']}"] if order["seed"] is not None else []
    return f"{order['source']}: {', '.join(known)}" if known else str(order["source"])


def course(nodes: Sequence[Node]) -> Course:
    """One course of time for all nodes, which began at the same moment but may have been asked at different ones."""
    sampled = [node["samples"] for node in nodes if "samples" in node]
    end_s = max((samples["at_s"][-1] for samples in sampled), default=0.0)
    count = min(max((len(samples["at_s"]) - 1 for samples in sampled), default=0), POINTS_MOST)
    if end_s <= 0 or count < 1:
        return Course([], {name: [] for name in SOURCES}, [], [], [], [], [], [], [])
    edges = numpy.linspace(0.0, end_s, count + 1)
    rates = {name: numpy.zeros(count) for name in SOURCES}
    waiting = numpy.zeros(count)
    for samples in sampled:
        for name, rate in (*rates.items(), ("waited_ms", waiting)):
            # After its last sample a node has read nothing that we know of.
            sums = numpy.interp(edges, samples["at_s"], numpy.cumsum(samples.get(name, [0] * len(samples["at_s"]))))
            rate += numpy.diff(sums) / numpy.diff(edges)
    memory = _highest(sampled, "memory_bytes", edges)
    cache = _highest(sampled, "cached_bytes", edges)
    return Course(
        ends_s=edges[1:].tolist(),
        rates={name: values.tolist() for name, values in rates.items()},
        memory_most=_over_nodes(memory, numpy.nanmax),
        memory_mean=_over_nodes(memory, numpy.nanmean),
        cache_most=_over_nodes(cache, numpy.nanmax),
        cache_mean=_over_nodes(cache, numpy.nanmean),
        pending=_over_nodes(_highest(sampled, "pending", edges), numpy.nanmax),
        pending_bytes=_over_nodes(_highest(sampled, "pending_bytes", edges), numpy.nanmax),
        waiting=(waiting / 1e3).tolist(),
    )


def _highest(sampled: Sequence[Mapping[str, Any]], name: str, edges: Any) -> Any:
    """Per node and interval the highest value; not a number after the last sample of a node."""
    rows = numpy.full((len(sampled), len(edges) - 1), numpy.nan)
    for row, samples in zip(rows, sampled, strict=True):
        times, values = numpy.asarray(samples["at_s"]), numpy.asarray(samples[name], dtype=float)
        # A sample speaks for the time since the one before it.
        first = numpy.searchsorted(times, edges[:-1], side="right")
        last = numpy.maximum(numpy.searchsorted(times, edges[1:], side="left"), first)
        known = first < len(times)
        ranges = numpy.column_stack((first[known], numpy.minimum(last[known], len(times) - 1) + 1)).ravel()
        if len(ranges):
            # Every second one is the maximum from a first to its last; the others are what is between.
            row[known] = numpy.maximum.reduceat(numpy.append(values, -numpy.inf), ranges)[::2]
    return rows


def _over_nodes(rows: Any, function: Any) -> Values:
    """Of the nodes that told of an interval; 0 if none did."""
    known = ~numpy.isnan(rows).all(axis=0)
    values = numpy.zeros(rows.shape[1])
    if known.any():
        values[known] = function(rows[:, known], axis=0)
    result: Values = values.tolist()
    return result


def matrix(nodes: Sequence[Node]) -> Matrix:
    """Who got how many bytes from whom."""
    size = len(nodes)
    group = -(-size // MATRIX_MOST)
    groups = -(-size // group)
    cells = [[0.0] * groups for _ in range(groups)]
    for node in nodes:
        for peer, count in node.get("fetched", {}).items():
            if int(peer) < size:
                cells[int(node["rank"]) // group][int(peer) // group] += count
    if group == 1:
        return Matrix([str(rank) for rank in range(size)], cells)
    starts = range(0, size, group)
    return Matrix([f"{start}-{min(start + group, size) - 1}" for start in starts], cells)


def flows(nodes: Sequence[Node], most: int) -> list[tuple[int, int, int]]:
    """The largest: bytes, who got them, from whom."""
    every = [
        (int(count), int(node["rank"]), int(peer)) for node in nodes for peer, count in node.get("fetched", {}).items()
    ]
    return sorted(every, key=lambda flow: (-flow[0], flow[1], flow[2]))[:most]


def histogram(nodes: Sequence[Node], name: str) -> tuple[list[int], list[int]]:
    """Bounds in nanoseconds and counts below each, the last above all; of all nodes. Empty if nobody has told."""
    told = [node["latency"][name] for node in has_told(nodes) if name in node["latency"]]
    if not told:
        return [], []
    bounds: list[int] = list(told[0]["bounds_ns"])
    counts = [sum(each) for each in zip(*(times["octaves"] for times in told), strict=True)]
    return bounds, counts


def percentile_ns(bounds: Sequence[int], counts: Sequence[int], share: float) -> int | None:
    """A bound that this share of all did not exceed; None if it is above all bounds, or nothing was counted."""
    wanted, seen = share * sum(counts), 0
    for bound, count in zip(bounds, counts, strict=False):
        seen += count
        if seen and seen >= wanted:
            return bound
    return None


def longest_us(nodes: Sequence[Node], name: str) -> float:
    return max(
        (float(node["latency"][name]["latency_us"]["max"]) for node in has_told(nodes) if name in node["latency"]),
        default=0.0,
    )


@dataclass(frozen=True)
class Happening:
    """One thing that happened, on one node or on several: the same words are told once.

    Attributes:
        first_s, last_s: when it was told first and last. ranks: where, in order. count: how often.
    """

    first_s: float
    last_s: float
    ranks: list[int]
    level: str
    kind: str
    text: str
    count: int


def happenings(nodes: Sequence[Node], most: int) -> tuple[list[Happening], int]:
    """What happened on all nodes, in order of time, and how many are left out.

    If there are too many, warnings and errors stay before others, and the first ones before the last.
    """
    alike: dict[tuple[str, str, str], list[tuple[float, int]]] = {}
    for node in nodes:
        for at_s, level, kind, text in node.get("events", []):
            alike.setdefault((level, kind, text), []).append((float(at_s), int(node["rank"])))
    every = [
        Happening(min(when)[0], max(when)[0], sorted({rank for _, rank in when}), *words, len(when))
        for words, when in alike.items()
    ]
    left_out = sum(int(node.get("events_left_out", 0)) for node in nodes) + max(0, len(every) - most)
    kept = sorted(every, key=lambda event: (event.level == "info", event.first_s))[:most]
    return sorted(kept, key=lambda event: (event.first_s, event.ranks)), left_out
