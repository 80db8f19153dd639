"""What was planned for a job, to be shown beside what it did: read from what ``fanstore-plan job --json`` printed.

Owns the reading of that document, which may be anything. Light: a daemon reads it before it imports numpy. Used by
cli/mount.py and cli/stat.py; the page is made in planbeside.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fanstore.errors import UsageError

#: Version of the document that is understood.
VERSION = 1
#: Ways that a job with FanStore may go, in the document.
WAYS = ("fanstore", "ordered")
#: Columns of the first epoch.
_RATES = ("local", "network", "shared", "staging")


@dataclass(frozen=True)
class PlannedWay:
    """Of all nodes together, but for ``room_bytes``, which is of each."""

    seconds: float
    start_s: float
    epochs_s: tuple[float, ...]
    shared_bytes: float
    network_bytes: float
    room_bytes: float


@dataclass(frozen=True)
class Planned:
    """A plan.

    Attributes:
        files: of the dataset. asked: how many nodes it was made for.
        by_nodes: the ways of WAYS, for several numbers of nodes.
        first_epoch: how it goes with so many nodes as was asked for, by way: ends of intervals, and bytes per second by
            where they come from (_RATES).
    """

    files: int
    asked: int
    by_nodes: Mapping[int, Mapping[str, PlannedWay]]
    first_epoch: Mapping[str, Mapping[str, Sequence[float]]]


def read_plan(path: Path) -> Planned:
    """From a file. Raises UsageError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the plan '{path}': {error.strerror}") from None
    try:
        return _planned(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"'{path}' is no plan that this version of FanStore knows; fanstore-plan job ... --json > FILE makes one"
        ) from None


def _planned(document: Mapping[str, Any]) -> Planned:
    if document["version"] != VERSION:
        raise ValueError
    by_nodes = {
        int(nodes): {name: _way(ways[name]) for name in WAYS if "impossible" not in ways[name]}
        for nodes, ways in document["nodes"].items()
    }
    first_epoch = {
        name: {key: _numbers(course[key]) for key in ("ends_s", *_RATES)}
        for name, course in document["first_epoch"].items()
        if name in WAYS
    }
    if any(len({len(values) for values in course.values()}) != 1 for course in first_epoch.values()):
        raise ValueError
    return Planned(int(document["dataset"]["files"]), int(document["job"]["nodes"]), by_nodes, first_epoch)


def _way(found: Mapping[str, Any]) -> PlannedWay:
    names = ("seconds", "start_s", "shared_bytes", "network_bytes", "room_bytes")
    return PlannedWay(
        epochs_s=tuple(_numbers(found["epochs_s"])), **dict(zip(names, _numbers(found[n] for n in names), strict=True))
    )


def _numbers(values: Any) -> list[float]:
    numbers = [float(value) for value in values]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError
    return numbers
