"""What the user asked of a mount, and what it says of itself in config.json. Used by session.py; no behaviour."""

import enum
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from fanstore import __version__
from fanstore.core.job import Job
from fanstore.core.reader import Verify
from fanstore.format.prepared import PreparedDataset
from fanstore.fuse.processes import start_ticks
from fanstore.fuse.reporting import Publishing
from fanstore.fuse.writing import Writing


class EngineChoice(enum.StrEnum):
    """Which engine is to answer the kernel."""

    AUTO = "auto"  #: native if it can run here, else python
    NATIVE = "native"  #: C threads in front of pyfuse3; an error if they cannot run
    PYTHON = "python"  #: pyfuse3 alone


@dataclass(frozen=True)
class MountSettings:
    """What the user asked for; paths are absolute."""

    prepared: Path
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


def describe(settings: MountSettings, prepared: PreparedDataset, job: Job, directory: Path | None) -> dict[str, object]:
    """What config.json says."""
    return {
        "fanstore": __version__,
        "prepared": str(settings.prepared),
        "mountpoint": str(settings.mountpoint),
        "codec": prepared.manifest.codec,
        "partitions": len(prepared.manifest.partitions),
        "totals": asdict(prepared.manifest.totals),
        "rank": job.rank,
        "size": job.size,
        "replicas": settings.replicas,
        "local": None if settings.local is None else str(settings.local),
        "cache_bytes": settings.cache_bytes,
        "verify": str(settings.verify),
        "allow_other": settings.allow_other,
        "output": None if settings.writing is None else str(settings.writing.output or "scratch"),
        "job_directory": None if directory is None else str(directory),
        "log": None if settings.log_file is None else str(settings.log_file),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        # With the process number this names one process for ever; the number alone is used again.
        "start_ticks": start_ticks(os.getpid()),
    }
