"""Scenarios of one's own, from settings as a TOML file has them (docs/model.md has an example).

Owns their keys: those of HDMLP's configuration files, which describe a system, and more, which describe the job. What a
file does not say is taken from the scenario that it is based on. Reading the file is left to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fanstore.errors import UsageError
from fanstore.model.curve import Curve
from fanstore.model.scenario import SCENARIOS, Scenario
from fanstore.model.system import StorageClass

#: Keys of a system that are numbers, by the name of its attribute.
_SYSTEM = {
    "nodes": "nodes",
    "c": "compute_mb_per_s",
    "beta": "preprocess_mb_per_s",
    "b_c": "network_mb_per_s",
    "b_fs": "pfs_network_mb_per_s",
    "request_s": "request_s",
}
_RATES = {"c", "beta", "b_c", "b_fs"}
_JOB = {"samples", "mean_mb", "sigma_mb", "epochs", "batch"}
_TABLES = {"storage_classes", "pfs_bandwidth"}
#: Keys of HDMLP that mean nothing to a simulation.
_IGNORED = {"distributed_threads", "checkpoint", "checkpoint_path"}
_CLASS = {"name", "capacity", "threads", "bandwidth", "write_bandwidth", "backend", "backend_options"}
_WHOLE = {"nodes", "samples", "epochs", "batch", "threads", "processes"}

_BASED_ON = "S2"


def scenario_of(name: str, settings: Mapping[str, Any]) -> Scenario:
    """The scenario that the settings describe; what they do not say is that of ``based_on``, or S2."""
    based_on = settings.get("based_on", _BASED_ON)
    if based_on not in SCENARIOS:
        raise UsageError(f"'based_on' is {based_on!r}; there are the scenarios {', '.join(SCENARIOS)}")
    _check_keys(settings, {"based_on", "summary", *_SYSTEM, *_JOB, *_TABLES}, _IGNORED, "a scenario")
    base = SCENARIOS[based_on]
    numbers = {key: _number(key, settings[key]) for key in {*_SYSTEM, *_JOB} & settings.keys()}
    for key in _RATES & numbers.keys():  # by the names that the file has for them
        if not 0 < numbers[key] < math.inf:
            raise UsageError(f"'{key}' is {numbers[key]} MB/s; it must be above 0")
    system: dict[str, Any] = {_SYSTEM[key]: value for key, value in numbers.items() if key in _SYSTEM}
    if "pfs_bandwidth" in settings:
        system["pfs"] = _curve(settings["pfs_bandwidth"], "pfs_bandwidth", "processes")
    if "storage_classes" in settings:
        classes = _tables(settings["storage_classes"], "storage_classes")
        system["classes"] = tuple(_storage_class(number, entry) for number, entry in enumerate(classes))
    return replace(
        base,
        name=name,
        summary=str(settings.get("summary", f"based on {base.name}")),
        system=replace(base.system, **system),
        **{key: value for key, value in numbers.items() if key in _JOB},
    )


def _storage_class(number: int, entry: Mapping[str, Any]) -> StorageClass:
    name = str(entry.get("name", f"class {number}" if number else "staging"))
    what = f"storage class '{name}'"
    _check_keys(entry, _CLASS, set(), what)
    for key in ("capacity", "threads", "bandwidth"):
        if key not in entry:
            raise UsageError(f"{what} has no '{key}'")
    return StorageClass(
        name=name,
        capacity_mb=_number("capacity", entry["capacity"]),
        threads=_number("threads", entry["threads"]),
        read=_curve(entry["bandwidth"], f"'bandwidth' of {what}", "threads"),
        write=_curve(entry.get("write_bandwidth", entry["bandwidth"]), f"'write_bandwidth' of {what}", "threads"),
    )


def _curve(table: object, what: str, key: str) -> Curve:
    """From ``[{ threads = 1, bw = 66 }, ...]``; the key is "threads" or "processes"."""
    points = {}
    for entry in _tables(table, what):
        if entry.keys() != {key, "bw"}:
            raise UsageError(f"{what} has an entry {dict(entry)}; it must be {{ {key} = NUMBER, bw = MB/s }}")
        points[_number(key, entry[key])] = _number("bw", entry["bw"])
    return Curve.of(points, what)


def _tables(value: object, what: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise UsageError(f"{what} must be a list of tables")
    return value


def _number(key: str, value: Any) -> Any:
    """The value, if it is a number; a whole one where the key asks for it."""
    kind = int if key in _WHOLE else int | float
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UsageError(f"'{key}' is {value!r}; it must be a {'whole ' * (key in _WHOLE)}number")
    return value


def _check_keys(settings: Mapping[str, Any], known: set[str], ignored: set[str], what: str) -> None:
    for key in settings:
        if key not in known | ignored:
            raise UsageError(f"{what} has no setting '{key}'; there are {', '.join(sorted(known))}")
