"""The file systems that are compared: how each is prepared from a tree, mounted and taken away again.

A peer knows its own programs only; it knows nothing of readers or rounds. Used by read_peers.py.
Every mount is a block: when the block ends, however it ends, the mount and its process are gone.
"""

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.builds import commands_of
from harness.caches import files_below
from harness.command import GRACE_S, BenchmarkError, find_program, run, started
from harness.machine import program_version
from harness.workspace import is_mounted, unmount

_HERE = Path(__file__).parent.parent
#: A mount that is not there after this many seconds will not come.
_MOUNT_S = 120.0
#: A mount is only touched by child processes with a time limit: one that hangs must not hang the benchmark.
_ANSWER_S = 30.0
_PREPARE_S = 1800.0
#: After staging, the disk and the host of a virtual machine are still writing: reads of the copy in the next seconds
#: took twice as long (372 against 190 µs for a cold file). A job stages once and reads for hours.
_SETTLE_S = 8.0


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

    def under(self, mountpoint: Path) -> list[str]:
        """What a reader of the mount is started with."""
        return []

    def served_by(self, mountpoint: Path) -> str | None:
        """Which of several paths through the peer answers, as it says itself; None where there is only one."""
        return None

    def files(self) -> list[Path]:
        """The files that hold the bytes while it is mounted, for those who can drop caches per file only."""
        return files_below(self.image)

    def warm_up(self) -> None:
        """Bring all bytes of the image into the page cache, not through the mount."""
        for path in self.files():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass


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


@contextmanager
def _kernel_mount(kind: str, image: Path, mountpoint: Path) -> Iterator[None]:
    """An image mounted by the kernel over a loop device as long as the block; root only."""
    try:
        run(["mount", "-t", kind, "-o", "ro,loop", str(image), str(mountpoint)], _MOUNT_S)
        yield
    finally:
        unmount(mountpoint)


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
    """This project: prepared with one codec, mounted on one node, partitions read where they are or staged first.

    Datasets with the same codec are prepared once: all engines and ways to mount it share one image.
    """

    def __init__(
        self,
        codec: str,
        engine: str | None = None,
        staged: bool = False,
        workers: int | None = None,
        build: tuple[str, Path] | None = None,
        preload: bool = False,
    ) -> None:
        """``preload``: programs are intercepted, beside the mount.

        ``workers``: so many threads of the native engine, by mount_with_workers.py; None for its own choice.
        ``build``: a name, and another clone whose commands are used.
        """
        name, clone = build or (None, None)
        self._clone: Path | None = clone
        threads = f"{workers}threads" if workers else None
        parts = ["fanstore", codec, engine, "staged" if staged else None, "preload" if preload else None, threads, name]
        super().__init__("-".join(part for part in parts if part))
        self._codec = codec
        self._engine = engine
        self._workers = workers
        self._staged = staged
        self._preload = preload
        self._local = Path()

    def missing(self) -> str | None:
        return _first_missing(["fanstore-prep", "fanstore-mount"])

    def version(self) -> str:
        return program_version(self._command("fanstore-mount"), "--version")

    def _command(self, name: str) -> str:
        return _program(name) if self._clone is None else str(commands_of(self._clone) / name)

    def prepare(self, source: Path, directory: Path) -> None:
        of = f"-{self.name.rpartition('-')[2]}" if self._clone else ""  # formats may differ
        self.image = directory / f"fanstore-{self._codec}{of}.fan"
        self._local = directory / f"{self.name}.local"
        self._local.mkdir()
        if not self.image.exists():
            run([self._command("fanstore-prep"), str(source), str(self.image), "--codec", self._codec], _PREPARE_S)

    def _mounter(self) -> list[str]:
        if self._workers is None:
            return [self._command("fanstore-mount")]
        return [sys.executable, str(_HERE / "mount_with_workers.py"), str(self._workers)]

    @contextmanager
    def mounted(self, mountpoint: Path) -> Iterator[int | None]:
        options = ["--engine", self._engine] if self._engine else []
        if self._staged:
            options += ["--local", str(self._local), "--stage-first"]
        with _daemon([*self._mounter(), str(self.image), str(mountpoint), *options], mountpoint) as pid:
            if self._engine not in (None, self.served_by(mountpoint)):
                raise BenchmarkError(f"engine {self._engine} was asked for, {self.served_by(mountpoint)} answers")
            if self._staged:
                os.sync()
                time.sleep(_SETTLE_S)
            yield pid
            if self._preload and not self._intercepted_opens(mountpoint):
                raise BenchmarkError("no open was intercepted: this is not what was to be measured")

    def under(self, mountpoint: Path) -> list[str]:
        return [self._command("fanstore-run"), str(mountpoint), "--"] if self._preload else []

    def _intercepted_opens(self, mountpoint: Path) -> int:
        counted = json.loads(run(["cat", str(mountpoint / ".fanstore" / "stats.json")], _ANSWER_S).stdout)[
            "intercepted"
        ]
        return int(counted["opens"] + counted["listings"])

    def served_by(self, mountpoint: Path) -> str | None:
        config = run(["cat", str(mountpoint / ".fanstore" / "config.json")], _ANSWER_S).stdout
        return str(json.loads(config)["engine"])

    def files(self) -> list[Path]:
        return files_below(self._local) if self._staged else files_below(self.image)

    def warm_up(self) -> None:
        if not self._staged:  # of a copy the page cache holds what staging has left there
            super().warm_up()


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


class Squashfs(Peer):
    """A squashfs image: served by squashfuse (its multi-entry-point variant where installed), or by the kernel."""

    def __init__(self, codec: str, in_kernel: bool) -> None:
        super().__init__(f"squashfs-{codec}" if in_kernel else f"squashfuse-{codec}")
        self._codec = codec
        self._in_kernel = in_kernel

    def _mounter(self) -> str:
        return find_program("squashfuse_ll") or _program("squashfuse")

    def missing(self) -> str | None:
        if not self._in_kernel:
            return _first_missing(["mksquashfs", "squashfuse"])
        if os.geteuid() != 0:
            return "a kernel mount needs root"
        if "squashfs" not in Path("/proc/filesystems").read_text().split():
            return "the kernel has no squashfs"
        return _first_missing(["mksquashfs"])

    def version(self) -> str:
        maker = program_version(_program("mksquashfs"), "-version")
        if self._in_kernel:
            return f"kernel, loop device; {maker}"
        mounter = self._mounter()
        return f"{Path(mounter).name}: {program_version(mounter, '--version')}"

    def prepare(self, source: Path, directory: Path) -> None:
        self.image = directory / f"{self._codec}.squashfs"
        if self.image.exists():  # the other way to mount it has made it
            return
        # Tail ends kept with their files: the image is made for reading whole files.
        plain = ["-noI", "-noD", "-noF", "-noX", "-no-fragments"]
        options = plain if self._codec == "none" else ["-comp", self._codec, "-no-fragments"]
        run([_program("mksquashfs"), str(source), str(self.image), "-no-progress", *options], _PREPARE_S)

    @contextmanager
    def mounted(self, mountpoint: Path) -> Iterator[int | None]:
        if self._in_kernel:
            with _kernel_mount("squashfs", self.image, mountpoint):
                yield None
            return
        with _daemon([self._mounter(), "-f", str(self.image), str(mountpoint)], mountpoint) as pid:
            yield pid


class Dwarfs(Peer):
    """A DwarFS image with FanStore's idea of compression: lz4, or none."""

    def __init__(self, codec: str) -> None:
        super().__init__(f"dwarfs-{codec}")
        self._codec = codec

    def missing(self) -> str | None:
        absent = _first_missing(["mkdwarfs", "dwarfs"])
        return absent and f"{absent}: neither in Debian nor on PyPI; binaries are at github.com/mhx/dwarfs"

    def version(self) -> str:
        return program_version(_program("dwarfs"), "--version")

    def prepare(self, source: Path, directory: Path) -> None:
        self.image = directory / f"{self.name}.dwarfs"
        codec = "null" if self._codec == "none" else self._codec
        run([_program("mkdwarfs"), "-i", str(source), "-o", str(self.image), "-C", codec, "--no-progress"], _PREPARE_S)

    @contextmanager
    def mounted(self, mountpoint: Path) -> Iterator[int | None]:
        with _daemon([_program("dwarfs"), str(self.image), str(mountpoint), "-f"], mountpoint) as pid:
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
        with _kernel_mount("erofs", self.image, mountpoint):
            yield None


def all_peers(engines: Sequence[str], builds: Sequence[tuple[str, Path]] = ()) -> list[Peer]:
    """Everything that can be compared, the source first; FanStore once per engine (its own choice if none), build."""
    choices: list[str | None] = [*engines] if engines else [None]
    codecs = ("none", "lz4")
    fanstore = [
        Fanstore(codec, engine, staged, build=build, preload=preload)
        for build in (None, *builds)
        for engine in choices
        for staged in (False, True)
        for preload in (False, True)
        for codec in codecs
    ]
    squashfs = [Squashfs(codec, in_kernel) for in_kernel in (False, True) for codec in codecs]
    others = [Ratarmount(), *map(Dwarfs, codecs), *squashfs, *map(Erofs, codecs)]
    return [Source(), *fanstore, *others]
