"""What a cluster in a box is, and the job that runs on it: one dataclass, read from TOML or changed in code.

Owns names, units, defaults and limits; knows nothing of how they are made true. MB are 10^6 bytes.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from harness.command import BenchmarkError

#: Hosts at most: the address of a host is 10.98.0.N, and more are too many for two cores.
HOSTS_MOST = 16

#: How a job gets at its data.
#: shared: straight from the shared file system; copied: all files were copied to each disk first; raw: mpi4py alone,
#: which moves what FanStore would have to move, and nothing else; the others: FanStore with --order so and so.
WAYS = ("shared", "copied", "raw", "fanstore-off", "fanstore-auto", "fanstore-stated")


@dataclass(frozen=True)
class Settings:
    """The cluster, the dataset and the job.

    Attributes:
        hosts: how many.
        link_mbit_per_s: of each host, each way; 0: no limit.
        disk_mb_per_s: read and written, each for itself, on each host's own disk; 0: no limit.
        room_mb: what FanStore may keep on that disk (--capacity); 0: no limit.
        memory_mb: of each host, page cache and processes; 0: no limit.
        shared_mb_per_s: of the shared file system, all hosts together; 0: no limit.
        shared_latency_us: of each read and of each metadata operation there; shared_metadata_per_s: of those, for all
            hosts together; 0: no limit.
        files, file_bytes: of the dataset, the mean; classes: folders; partitions: of the prepared one.
        epochs, batch, seed: of the job; the order is that of torch's DistributedSampler.
        workers: threads of a host that read, each a batch ahead of its turn as often as ``ahead`` says.
        compute_us: per file, slept.
        together: hosts wait for each other after every batch, as where gradients are averaged.
        forget: a reader drops what it has read from the kernel's page cache, as if the dataset were much larger than
            memory.
        shuffle: the order, one of those in shuffles.py instead of torch's DistributedSampler; with fanstore-auto only.
        options: more of them for fanstore-mount.
    """

    hosts: int = 4
    link_mbit_per_s: float = 100.0
    disk_mb_per_s: float = 60.0
    room_mb: float = 0.0
    memory_mb: float = 0.0
    shared_mb_per_s: float = 60.0
    shared_latency_us: float = 500.0
    shared_metadata_per_s: float = 1500.0
    files: int = 2400
    file_bytes: int = 107_000
    classes: int = 20
    partitions: int = 16
    epochs: int = 3
    batch: int = 20
    seed: int = 0
    workers: int = 2
    ahead: int = 2
    compute_us: float = 10_000.0
    together: bool = True
    forget: bool = True
    shuffle: str = ""
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= HOSTS_MOST:
            raise BenchmarkError(f"hosts = {self.hosts}: there can be 1 to {HOSTS_MOST}")
        for name in ("files", "file_bytes", "classes", "partitions", "epochs", "batch", "workers", "ahead"):
            if getattr(self, name) < 1:
                raise BenchmarkError(f"{name} = {getattr(self, name)}: it must be 1 or more")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise BenchmarkError(f"{field.name} = {value}: it must be 0 or more")
        if self.files < self.hosts * self.batch:
            raise BenchmarkError(
                f"{self.files} files are less than a batch of {self.batch} for each of {self.hosts} hosts"
            )

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a TOML file with these names at its top level."""
        try:
            return cls.of(tomllib.loads(path.read_text()))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise BenchmarkError(f"{path}: {error}") from None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        kinds = {name: type(value) for name, value in asdict(cls()).items()}
        if unknown := sorted(values.keys() - kinds.keys()):
            raise BenchmarkError(f"unknown settings: {', '.join(unknown)}; there are {', '.join(kinds)}")
        made = {}
        for name, value in values.items():
            kind = kinds[name]
            right = (int, float) if kind is float else (list, tuple) if kind is tuple else (kind,)
            if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool):
                raise BenchmarkError(f"{name} = {value!r}: it must be of type {kind.__name__}")
            made[name] = kind(value)
        return cls(**made)

    def changed(self, **values: Any) -> Self:
        return replace(self, **values)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def dataset_mb(self) -> float:
        return self.files * self.file_bytes / 1e6

    def sentence(self) -> str:
        """The machine, for people."""

        def rate(value: float, unit: str) -> str:
            return f"{value:g} {unit}" if value else "no limit"

        return (
            f"{self.hosts} hosts; each: link {rate(self.link_mbit_per_s, 'Mbit/s')} each way, own disk "
            f"{rate(self.disk_mb_per_s, 'MB/s')}; the shared file system: {rate(self.shared_mb_per_s, 'MB/s')} and "
            f"{rate(self.shared_metadata_per_s, 'metadata operations/s')} for all hosts together, "
            f"{self.shared_latency_us:g} us per request"
        )
