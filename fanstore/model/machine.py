"""The machine as it was measured: what a plan for a real job is made from.

Owns the keys of the TOML file that ``fanstore-plan measure`` writes (docs/model.md has an example); reading and writing
the file is left to the callers. MB are 10^6 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fanstore.errors import UsageError
from fanstore.model.curve import Curve
from fanstore.model.system import REQUEST_S

VERSION = 1


@dataclass(frozen=True)
class Machine:
    """Nodes, their network and the shared file system; all nodes are alike, as fast as the slowest one measured.

    Attributes:
        measured: when and where, in words; empty if nothing was measured.
        small_mb: size of the files that ``small_files_per_s`` is for.
        small_files_per_s: of the shared file system, by the number of readers in all nodes: open, read, close.
        large_mb_per_s: of the shared file system, in large sequential reads, likewise.
        disk_mb: free on a node's own disk; disk_read, disk_write: MB/s by threads.
        memory_mb: free for caches on a node; memory_mb_per_s: one thread copies from there.
        network_mb_per_s: of a node, each way, while all nodes send and receive; None if it was measured on one node.
        request_s: to ask another node for a small file, besides its bytes.
        cores: of a node; decode_mb_per_s: of one core, uncompressed bytes; None if the dataset is not compressed.
    """

    measured: str
    small_mb: float
    small_files_per_s: Curve
    large_mb_per_s: Curve
    disk_mb: float
    disk_read: Curve
    disk_write: Curve
    memory_mb: float
    memory_mb_per_s: float
    network_mb_per_s: float | None
    request_s: float
    cores: int
    decode_mb_per_s: float | None

    def files_per_s(self, size_mb: float, readers: float) -> float:
        """Files of this size that the shared file system gives to so many readers: a cost for each file, and one for
        its bytes, of which the two measured speeds are made."""
        bytes_s = 1 / float(self.large_mb_per_s.at(readers))
        file_s = max(1 / float(self.small_files_per_s.at(readers)) - self.small_mb * bytes_s, 0.0)
        return 1 / max(file_s + size_mb * bytes_s, 1e-12)

    def scaled(self, network: float = 1.0, shared: float = 1.0) -> Machine:
        """The same with a faster or slower network, or shared file system."""
        small, large = (
            replace(curve, mb_per_s=tuple(shared * value for value in curve.mb_per_s))
            for curve in (self.small_files_per_s, self.large_mb_per_s)
        )
        faster = None if self.network_mb_per_s is None else network * self.network_mb_per_s
        return replace(self, network_mb_per_s=faster, small_files_per_s=small, large_mb_per_s=large)


#: A usual cluster, for a first look: NVMe, 10 Gbit/s, a shared file system that is good at large files.
ASSUMED = Machine(
    measured="",
    small_mb=0.1,
    small_files_per_s=Curve.of({1: 400, 16: 4_000, 64: 8_000}, "small files"),
    large_mb_per_s=Curve.of({1: 600, 16: 5_000, 64: 8_000}, "large reads"),
    disk_mb=400_000,
    disk_read=Curve.of({1: 1_000, 4: 2_500}, "disk"),
    disk_write=Curve.of({1: 1_000}, "disk"),
    memory_mb=64_000,
    memory_mb_per_s=5_000,
    network_mb_per_s=1_100,
    request_s=50e-6,
    cores=32,
    decode_mb_per_s=2_000,
)


def machine_of(settings: Mapping[str, Any], what: str) -> Machine:
    """From the content of a file; ``what`` names it in messages."""
    reader = _Reader(settings, what)
    if (version := settings.get("version")) != VERSION:
        found = "does not say which version of measurements it has" if version is None else f"has version {version!r}"
        raise UsageError(f"{what} {found}, and this program reads {VERSION}: measure again with fanstore-plan measure")
    hosts = settings.get("hosts", [])
    network = "network" in settings
    decode = "decode" in settings
    return Machine(
        measured=f"{settings.get('measured', 'at some time')} on {', '.join(map(str, hosts)) or 'some nodes'}",
        small_mb=reader.number("shared", "small_bytes") / 1e6,
        small_files_per_s=reader.curve("shared", "small", "readers", "files_per_s"),
        large_mb_per_s=reader.curve("shared", "large", "readers", "mb_per_s"),
        disk_mb=reader.number("local", "free_mb", zero=True),
        disk_read=reader.curve("local", "read", "threads", "mb_per_s"),
        disk_write=reader.curve("local", "write", "threads", "mb_per_s"),
        memory_mb=reader.number("memory", "free_mb", zero=True),
        memory_mb_per_s=reader.number("memory", "mb_per_s"),
        network_mb_per_s=reader.number("network", "mb_per_s") if network else None,
        request_s=reader.number("network", "request_s", zero=True) if network else REQUEST_S,
        cores=int(reader.number("memory", "cores")),
        decode_mb_per_s=reader.number("decode", "mb_per_s") if decode else None,
    )


class _Reader:
    """Takes values out of tables, and says what is missing or wrong."""

    def __init__(self, settings: Mapping[str, Any], what: str) -> None:
        self._settings = settings
        self._what = what

    def _value(self, table: str, key: str) -> Any:
        content = self._settings.get(table)
        if not isinstance(content, Mapping) or key not in content:
            raise UsageError(f"{self._what} has no '{key}' in [{table}]; measure again with fanstore-plan measure")
        return content[key]

    def number(self, table: str, key: str, *, zero: bool = False) -> float:
        value = self._value(table, key)
        right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not right or value < 0 or (value == 0 and not zero):
            least = "of 0 or more" if zero else "above 0"
            raise UsageError(f"'{key}' in [{table}] of {self._what} is {value!r}; it must be a number {least}")
        return float(value)

    def curve(self, table: str, key: str, by: str, unit: str) -> Curve:
        value = self._value(table, key)
        name = f"'{key}' in [{table}] of {self._what}"
        entries = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, Mapping) and entry.keys() == {by, unit} for entry in entries):
            raise UsageError(f"{name} must be a list of {{ {by} = NUMBER, {unit} = NUMBER }}")
        points = {}
        for entry in entries:
            for number in entry.values():
                if not isinstance(number, int | float) or isinstance(number, bool):
                    raise UsageError(f"{name} has {number!r} where a number must be")
            points[entry[by]] = entry[unit]
        return Curve.of(points, name)
