"""The file systems that are compared: how each is prepared from a tree, mounted and taken away again.

A peer knows its own programs only; it knows nothing of readers or rounds. Used by read_peers.py.
Every mount is a block: when the block ends, however it ends, the mount and its process are gone.
"""

import json
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.caches import files_below
from harness.command import GRACE_S, BenchmarkError, find_program, run, started
from harness.machine import program_version
from harness.workspace import is_mounted, unmount

#: A mount that is not there after this many seconds will not come.
_MOUNT_S = 120.0
#: A mount is only touched by child processes with a time limit: one that hangs must not hang the benchmark.
_ANSWER_S = 30.0
_PREPARE_S = 1800.0


class Peer(ABC):
    """One way to get at the files of the dataset.

    Attributes:
        name: as in tables and on the command line.
        image: what ``prepare`` wrote, a file or a directory; of the source the tree itself.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.image = Path()

    @abstractmethod
    def missing(self) -> str | None:
        """What would have to be installed before this peer can take part; None when it can."""

    @abstractmethod
    def version(self) -> str:
        """What is compared, for the record."""

    @abstractmethod
    def prepare(self, source: Path, directory: Path) -> None:
        """Turn the source tree into this peer's form below ``directory``."""

    @abstractmethod
    @contextmanager
    def mounted(self, mountpoint: Path) -> Iterator[int | None]:
        """A fresh mount; gives the id of the process that serves it, None where the kernel does."""

    def root(self, mountpoint: Path) -> Path:
        """Where the tree is when it is mounted."""
        return mountpoint

    def served_by(self, mountpoint: Path) -> str | None:
        """Which of several paths through the peer answers, as it says itself; None where there is only one."""
        return None

    def files(self) -> list[Path]:
        """The files that hold the bytes, for those who can drop caches per file only."""
        return files_below(self.image)


def _first_missing(programs: Sequence[str]) -> str | None:
    absent = [program for program in programs if find_program(program) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def _program(name: str) -> str:
    found = find_program(name)
    if found is None:
        raise BenchmarkError(f"{name} is not installed")
    return found


@contextmanager
def _daemon(argv: Sequence[str], mountpoint: Path) -> Iterator[int | None]:
    """A foreground FUSE process as long as the block, with its mount waited for, and its log in every error."""
    log = mountpoint.with_name(mountpoint.name + ".log")
    with started(argv, log) as process:
        try:
            deadline = time.monotonic() + _MOUNT_S
            while not is_mounted(mountpoint):
                if process.poll() is not None or time.monotonic() > deadline:
                    last_lines = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
                    raise BenchmarkError(f"{Path(argv[0]).name} did not mount: {last_lines}")
                time.sleep(0.01)
            run(["stat", str(mountpoint)], _ANSWER_S)  # answered only when the process serves requests
            yield process.pid
        finally:
            unmount(mountpoint)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)  # it ends by itself once its mount is gone, and cleans up; if not, it is ended


class Source(Peer):
    """The directory tree itself, on the file system where it lies: what all others are compared with."""

    def __init__(self) -> None:
        super().__init__("source")

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        return "the directory itself"

    def prepare(self, source: Path, directory: Path) -> None:
        self.image = source

    @contextmanager
    def mounted(self, mountpoint: Path) -> Iterator[int | None]:
        yield None

    def root(self, mountpoint: Path) -> Path:
        return self.image


class Fanstore(Peer):
    """This project: prepared with one codec, mounted on one node, partitions read where they are."""

    def __init__(self, codec: str, engine: str | None = None) -> None:
        super().__init__(f"fanstore-{codec}" + (f"-{engine}" if engine else ""))
        self._codec = codec
        self._engine = engine

    def missing(self) -> str | None:
        return _first_missing(["fanstore-prep", "fanstore-mount"])

    def version(self) -> str:
        return program_version(_program("fanstore-mount"), "--version")

    def prepare(self, source: Path, directory: Path) -> None:
        self.image = directory / f"{self.name}.fan"
        run([_program("fanstore-prep"), str(source), str(self.image), "--codec", self._codec], _PREPARE_S)

    @contextmanager
    def mounted(self, mountpoint: Path) -> Iterator[int | None]:
        engine = ["--engine", self._engine] if self._engine else []
        with _daemon([_program("fanstore-mount"), str(self.image), str(mountpoint), *engine], mountpoint) as pid:
            if self._engine not in (None, self.served_by(mountpoint)):
                raise BenchmarkError(f"engine {self._engine} was asked for, {self.served_by(mountpoint)} answers")
            yield pid

    def served_by(self, mountpoint: Path) -> str | None:
        config = run(["cat", str(mountpoint / ".fanstore" / "config.json")], _ANSWER_S).stdout
        return str(json.loads(config)["engine"])


class Ratarmount(Peer):
    """ratarmount on a plain tar file; its SQLite index is made in ``prepare``, as it would be kept beside the file."""

    def __init__(self) -> None:
        super().__init__("ratarmount")

    def missing(self) -> str | None:
        return _first_missing(["ratarmount", "tar"])

    def version(self) -> str:
        return program_version(_program("ratarmount"), "--version")

    def prepare(self, source: Path, directory: Path) -> None:
        self.image = directory / "ratarmount.tar"
        run([_program("tar"), "-cf", str(self.image), "-C", str(source), "."], _PREPARE_S)
        mountpoint = directory / "ratarmount-index"
        mountpoint.mkdir()
        with self.mounted(mountpoint):
            pass

    @contextmanager
    def mounted(self, mountpoint: Path) -> Iterator[int | None]:
        argv = [_program("ratarmount"), "-f", "--index-file", f"{self.image}.index.sqlite"]
        with _daemon([*argv, str(self.image), str(mountpoint)], mountpoint) as pid:
            yield pid


class Squashfuse(Peer):
    """A squashfs image served by squashfuse, its multi-entry-point variant squashfuse_ll where installed."""

    def __init__(self, codec: str) -> None:
        super().__init__(f"squashfuse-{codec}")
        self._codec = codec

    def _mounter(self) -> str:
        return find_program("squashfuse_ll") or _program("squashfuse")

    def missing(self) -> str | None:
        return _first_missing(["mksquashfs", "squashfuse"])

    def version(self) -> str:
        mounter = self._mounter()
        return f"{Path(mounter).name}: {program_version(mounter, '--version')}"

    def prepare(self, source: Path, directory: Path) -> None:
        self.image = directory / f"{self.name}.squashfs"
        # Tail ends kept with their files: the image is made for reading whole files.
        plain = ["-noI", "-noD", "-noF", "-noX", "-no-fragments"]
        options = plain if self._codec == "none" else ["-comp", self._codec, "-no-fragments"]
        run([_program("mksquashfs"), str(source), str(self.image), "-no-progress", *options], _PREPARE_S)

    @contextmanager
    def mounted(self, mountpoint: Path) -> Iterator[int | None]:
        with _daemon([self._mounter(), "-f", str(self.image), str(mountpoint)], mountpoint) as pid:
            yield pid


class Erofs(Peer):
    """An erofs image: served by the kernel over a loop device for root, by erofsfuse for others."""

    def __init__(self, codec: str) -> None:
        super().__init__(f"erofs-{codec}")
        self._codec = codec
        self._in_kernel = os.geteuid() == 0 and "erofs" in Path("/proc/filesystems").read_text().split()

    def missing(self) -> str | None:
        return _first_missing(["mkfs.erofs"] if self._in_kernel else ["mkfs.erofs", "erofsfuse"])

    def version(self) -> str:
        how = "kernel, loop device" if self._in_kernel else program_version(_program("erofsfuse"), "--version")
        return f"{how}; {program_version(_program('mkfs.erofs'), '--version')}"

    def prepare(self, source: Path, directory: Path) -> None:
        self.image = directory / f"{self.name}.erofs"
        codec = [] if self._codec == "none" else [f"-z{self._codec}"]
        run([_program("mkfs.erofs"), "--quiet", *codec, str(self.image), str(source)], _PREPARE_S)

    @contextmanager
    def mounted(self, mountpoint: Path) -> Iterator[int | None]:
        if not self._in_kernel:
            with _daemon([_program("erofsfuse"), "-f", str(self.image), str(mountpoint)], mountpoint) as pid:
                yield pid
            return
        try:
            run(["mount", "-t", "erofs", "-o", "ro,loop", str(self.image), str(mountpoint)], _MOUNT_S)
            yield None
        finally:
            unmount(mountpoint)


def all_peers(engines: Sequence[str]) -> list[Peer]:
    """Everything that can be compared, the source first; FanStore once per engine (its own choice when none)."""
    choices: list[str | None] = [*engines] if engines else [None]
    fanstore = [Fanstore(codec, engine) for engine in choices for codec in ("none", "lz4")]
    others = [Ratarmount(), Squashfuse("none"), Squashfuse("lz4"), Erofs("none"), Erofs("lz4")]
    return [Source(), *fanstore, *others]
