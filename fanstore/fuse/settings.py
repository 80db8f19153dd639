"""What the user asked of a mount, and what it says of itself in config.json. Used by session.py; no behaviour."""

import enum
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from fanstore import __version__
from fanstore.dataset.sources import Verify
from fanstore.errors import UsageError
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import Storage
from fanstore.fuse.reporting import Publishing
from fanstore.fuse.writing import Writing
from fanstore.job.job import Job
from fanstore.prefetch.specification import Mode, Specification
from fanstore.processes import start_ticks


class EngineChoice(enum.StrEnum):
    """Which engine is to answer the kernel."""

    AUTO = "auto"  #: native if it can run here, else python
    NATIVE = "native"  #: C threads in front of pyfuse3; an error if they cannot run
    PYTHON = "python"  #: pyfuse3 alone


@dataclass(frozen=True)
class MountSettings:
    """What the user asked for; paths are absolute."""

    prepared: Storage
    mountpoint: Path
    local: Path | None  #: directory for staged partitions; None reads them where they are
    capacity_bytes: int | None  #: how much of its disk a node may use; None for all that is free
    replicas: int  #: copies of each partition, on different nodes
    stage_first: bool  #: mount only when everything is staged
    peer_timeout_s: float  #: how long another node may take to answer a read
    cache_bytes: int
    verify: Verify
    allow_other: bool
    engine: EngineChoice
    writing: Writing | None  #: outputs; None if nothing can be written
    command: tuple[str, ...]  #: run while mounted; empty waits for a signal or an unmount
    log_file: Path | None  #: for config.json: where the log is
    publishing: Publishing  #: report and metrics
    success: tuple[Path, ...]  #: where it is to be said that all has ended well; ``STANDARD_OUTPUT`` for a line there
    order: Mode | Path | Specification  #: what is known of the order in which programs read
    preload: bool  #: the command is intercepted
    no_fuse: bool = False  #: there is no mount: programs that are intercepted see the dataset, and nobody else
    keep_local: bool = False  #: staged copies stay for the next job, and those of earlier jobs are used
    problem: UsageError | None = None  #: found already, so that this node cannot start; all nodes are told of it


def describe(
    settings: MountSettings, prepared: PreparedDataset, job: Job, directory: Path | None, control: Path | None
) -> dict[str, object]:
    """What config.json says; ``control`` is the control socket."""
    return {
        "fanstore": __version__,
        "prepared": str(settings.prepared),
        "storage": settings.prepared.words,
        "mountpoint": str(settings.mountpoint),
        "codec": prepared.manifest.codec,
        "partitions": len(prepared.manifest.partitions),
        "totals": asdict(prepared.manifest.totals),
        "rank": job.rank,
        "size": job.size,
        "replicas": settings.replicas,
        "local": None if settings.local is None else str(settings.local),
        "keep_local": settings.keep_local,
        "cache_bytes": settings.cache_bytes,
        "verify": str(settings.verify),
        "allow_other": settings.allow_other,
        "output": None if settings.writing is None else str(settings.writing.output or "scratch"),
        "job_directory": None if directory is None else str(directory),
        "mounted": not settings.no_fuse,
        "control_socket": None if control is None else str(control),
        "order": _order_text(settings.order),
        "log": None if settings.log_file is None else str(settings.log_file),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        # With the process number this names one process for ever; the number alone is used again.
        "start_ticks": start_ticks(os.getpid()),
    }


def _order_text(order: Mode | Path | Specification) -> str:
    if isinstance(order, Specification):
        values = ",".join(f"{key}={value}" for key, value in order.values.items())
        return f"{order.name}:{values}" if values else order.name
    return str(order)
