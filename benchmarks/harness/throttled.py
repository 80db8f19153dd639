"""A shared file system to compare with: throttled_fs.c with the figures of a published one.

Owns the profiles, the compiled program and its mounts; knows nothing of readers. Used by shared_fs.py, dlio.py and
cluster/. Main thread. Every mount is a block: when the block ends, however it ends, the mounts and the process are
gone.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.command import BenchmarkError, run, started
from harness.workspace import unmount

_SOURCE = Path(__file__).parent.parent / "throttled_fs.c"
_LIMIT_S = 30.0
#: What a Lustre client reads ahead of a program: 64 MB of a file that is read in order, and files below 2 MB as a whole
#: (SBI_DEFAULT_READAHEAD_MAX and _WHOLE_MAX in llite_internal.h of Linux 4.17, drivers/staging/lustre). The kernel's
#: 128 KiB for FUSE would cut each file of an image dataset in two.
_READ_AHEAD_KIB = 64 << 10


@dataclass(frozen=True)
class Profile:
    """How slow, and who says so; benchmarks/README.md has the addresses.

    Attributes:
        metadata_rate: operations per second for all clients together; 0 for no limit.
        bandwidth: bytes per second for all clients together; 0 for no limit.
        timeout_s: how long a client believes names and attributes.
        slice_bytes: of a request, served before others get their turn; 0 for all of it.
        read_ahead_kib: how far a client reads ahead of a program.
    """

    name: str
    metadata_latency_us: float
    metadata_rate: float
    read_latency_us: float
    bandwidth: float
    timeout_s: float
    why: str
    slice_bytes: int = 0
    read_ahead_kib: int = _READ_AHEAD_KIB

    def options(self) -> list[str]:
        return [
            *("--metadata-latency-us", str(self.metadata_latency_us), "--metadata-rate", str(self.metadata_rate)),
            *("--read-latency-us", str(self.read_latency_us), "--bandwidth", str(self.bandwidth)),
            *("--timeout", str(self.timeout_s), "--slice", str(self.slice_bytes)),
        ]

    def sentence(self) -> str:
        rate = f"at most {self.metadata_rate:,.0f}/s in all" if self.metadata_rate else "without a limit"
        pipe = f"{self.bandwidth / 1e6:,.0f} MB/s in all" if self.bandwidth else "without a limit"
        return (
            f"{self.name}: {self.metadata_latency_us / 1e3:g} ms per metadata operation, {rate}; "
            f"{self.read_latency_us / 1e3:g} ms per read, {pipe}"
        )


#: One thread of mdtest gets "over 2K" stats of files per second from an idle Lustre (Dell, 2015 and 2016): 0.5 ms.
_LATENCY_US = 500.0
#: A Lustre client keeps what it knows as long as it has the lock on it, minutes to hours if nobody writes.
_LOCKED_S = 3600.0
PROFILES = {
    profile.name: profile
    for profile in (
        Profile("lustre", _LATENCY_US, 6000, _LATENCY_US, 1.2e9, _LOCKED_S, "FSx, 6,000 metadata IOPS"),
        Profile("lustre-small", _LATENCY_US, 1500, _LATENCY_US, 1.5e8, _LOCKED_S, "FSx, the smallest"),
        Profile("lustre-idle", _LATENCY_US, 0, _LATENCY_US, 0, _LOCKED_S, "latency alone: nobody else is there"),
        Profile("none", 0, 0, 0, 0, _LOCKED_S, "what FUSE itself costs"),
    )
}


@dataclass(frozen=True)
class Counts:
    """What all clients together have asked of the servers."""

    metadata_operations: int
    reads: int
    bytes: int


class Throttled:
    """A file system that is mounted.

    Attributes:
        clients: the mount points, each a client of its own.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, clients: Sequence[Path]) -> None:
        self.clients = tuple(clients)
        self._process = process
        self._log = log

    def _lines(self) -> list[str]:
        """Whole lines only: the last one may still be on its way."""
        return self._log.read_text().split("\n")[:-1]

    def wait_for_line(self, count: int) -> str:
        """The line number ``count`` of the log, as soon as it is there."""
        deadline = time.monotonic() + _LIMIT_S
        while len(self._lines()) < count:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"throttled_fs does not answer: {self._log.read_text().strip()}")
            time.sleep(0.002)
        return self._lines()[count - 1]

    def counts(self) -> Counts:
        known = len(self._lines())
        self._process.send_signal(signal.SIGUSR1)
        return Counts(**json.loads(self.wait_for_line(known + 1)))


def build(directory: Path) -> Path:
    """Compile the program; BenchmarkError names what is missing."""
    program = directory / "throttled_fs"
    flags = ["-O2", "-std=gnu11", "-pthread", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    libfuse = run(["pkg-config", "--cflags", "--libs", "fuse3"], 60).stdout.split()
    run(["cc", *flags, str(_SOURCE), "-o", str(program), *libfuse], 120)
    return program


def _read_ahead(mountpoint: Path, kib: int) -> None:
    """As far as the profile says; only root may say so, and the record has who ran it."""
    if os.geteuid() == 0:
        device = run(["stat", "--format", "%Hd:%Ld", str(mountpoint)], _LIMIT_S).stdout.strip()
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(f"{kib}\n")


@contextmanager
def throttled(
    program: Path,
    profile: Profile,
    source: Path,
    directory: Path,
    clients: int,
    keep_data: bool = True,
    writable: bool = False,
) -> Iterator[Throttled]:
    """``source`` as seen by so many clients, mounted in ``directory`` (client-0 and so on)."""
    mountpoints = [directory / f"client-{number}" for number in range(clients)]
    for mountpoint in mountpoints:
        mountpoint.mkdir(exist_ok=True)
    log = directory / "throttled_fs.log"
    flags = [*(["--keep-data"] if keep_data else []), *(["--writable"] if writable else [])]
    argv = [str(program), *profile.options(), *flags, str(source)]
    with started([*argv, *map(str, mountpoints)], log) as process:
        try:
            mounted = Throttled(process, log, mountpoints)
            if mounted.wait_for_line(1) != "ready":
                raise BenchmarkError(f"throttled_fs did not mount: {log.read_text().strip()}")
            for mountpoint in mountpoints:
                _read_ahead(mountpoint, profile.read_ahead_kib)
            yield mounted
        finally:
            for mountpoint in mountpoints:
                unmount(mountpoint)
