"""The largest flow through a network of links, and the links that limit it (max-flow, min-cut). Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from fanstore.errors import UsageError

#: A link from one place to another.
Link = tuple[str, str]


@dataclass(frozen=True)
class Flow:
    """What flows from the source to the sink, and the links that must be widened for more to flow (the cut next to the
    source)."""

    amount: float
    cut: tuple[Link, ...]


def max_flow(capacity: Mapping[Link, float], source: str, sink: str) -> Flow:
    """By shortest augmenting paths (Edmonds and Karp). Capacities may be infinite, but not all along a path."""
    for (begin, end), value in capacity.items():
        if not value >= 0:  # also refuses NaN
            raise UsageError(f"the link from {begin} to {end} has a capacity of {value}; it must be 0 or more")
    left: dict[str, dict[str, float]] = {source: {}, sink: {}}
    for (begin, end), value in capacity.items():
        left.setdefault(begin, {}).setdefault(end, 0.0)
        left.setdefault(end, {}).setdefault(begin, 0.0)
        left[begin][end] += value
    # What rounding leaves of a link is none.
    nothing = 1e-12 * max((value for value in capacity.values() if value < float("inf")), default=0.0)
    amount = 0.0
    while True:
        before = _reachable(left, source, nothing)
        if sink not in before:
            break
        path = [sink]
        while path[-1] != source:
            path.append(before[path[-1]])
        links = list(zip(path[1:], path, strict=False))
        step = min(left[begin][end] for begin, end in links)
        if step == float("inf"):
            raise UsageError(f"nothing limits what flows from {source} to {sink}")
        for begin, end in links:
            left[begin][end] -= step
            left[end][begin] += step
        amount += step
    cut = tuple(link for link in capacity if link[0] in before and link[1] not in before)
    return Flow(amount, cut)


def _reachable(left: Mapping[str, Mapping[str, float]], source: str, nothing: float) -> dict[str, str]:
    """Places that can be reached from the source, with the place before each on the shortest path."""
    before = {source: source}
    queue = deque([source])
    while queue:
        place = queue.popleft()
        for other, value in left[place].items():
            if value > nothing and other not in before:
                before[other] = place
                queue.append(other)
    return before
