"""Python environments that some tests need and .venv cannot hold.

``python tests/environments.py NAME...`` makes what is missing, and prints the Python of each, one per line. Owns the
requirements, and the directory where environments are kept between runs and for all clones:
``${XDG_CACHE_HOME:-~/.cache}/fanstore-test``, one for each set of requirements and Python. It is complete when it has
a stamp, which is written last: what a killed run has left is made anew. A lock lets one run make them while
others wait. What nobody has used for a month is removed. Used by scripts/test and scripts/examples.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: To install one of them; two minutes is usual for the frameworks.
LIMIT_S = 600.0
UNUSED_S = 30 * 86_400.0
#: PyTorch without CUDA, a tenth of the size; used where it can be reached.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class MakeError(Exception):
    """One sentence for whoever runs the tests."""


@dataclass(frozen=True)
class Environment:
    """What is installed, and the room that must be free before it is (what it takes, and half as much again)."""

    name: str
    requirements: tuple[str, ...]
    room_bytes: int

    def directory(self) -> Path:
        """Where it is kept: another requirement or another Python is another directory."""
        base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        parts = [*self.requirements, base, sys.version, platform.machine()]
        return cache() / f"{self.name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"

    def python(self) -> Path:
        return self.directory() / "bin" / "python"

    def is_complete(self) -> bool:
        # The Python that it was made with may be gone, or may no longer run.
        is_there = stamp(self.directory()).exists() and self.python().exists()
        return is_there and subprocess.run([self.python(), "-I", "-c", ""], capture_output=True).returncode == 0


#: Open MPI is in .venv; both in one environment would make mpirun ambiguous. FanStore itself comes from .venv.
MPICH = Environment("mpich", ("mpi4py>=4.0", "mpich>=5.0"), 100 << 20)
#: PyTorch is named exactly: of a newer one there may be builds with CUDA only, gigabytes of it.
FRAMEWORKS = Environment(
    "frameworks",
    (
        "torch==2.13.0",
        "torchvision",
        "timm",
        "accelerate",
        "webdataset",
        "opencv-python-headless",
        "tensorflow-cpu",
        "tensorboard",
        "h5py",
        "pillow",
    ),
    4 << 30,
)
#: A server that speaks S3, made for tests; it runs as a process of its own (object_servers.py).
MOTO = Environment("moto", ("moto[server]>=5.1",), 300 << 20)
#: Data that is learned, and pictures, for benchmarks/shuffle_accuracy.py.
DIGITS = Environment("digits", ("scikit-learn>=1.5", "matplotlib>=3.8", "pillow"), 400 << 20)
#: Notebooks without a browser; FanStore and Python are those of .venv.
JUPYTER = Environment("jupyter", ("ipykernel>=6", "jupyter_client>=8"), 200 << 20)
ENVIRONMENTS = {environment.name: environment for environment in (MPICH, FRAMEWORKS, MOTO, DIGITS, JUPYTER)}


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fanstore-test"


def stamp(directory: Path) -> Path:
    """Its time is that of the last use."""
    return directory / "fanstore-test.stamp"


def ensure(environment: Environment) -> Path:
    """Make the environment unless it is there; its Python. Raises MakeError, and then leaves nothing."""
    directory = environment.directory()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        if not environment.is_complete():
            with locked(directory.parent):
                if not environment.is_complete():  # nobody else has made it while we waited
                    remove_unused(directory.parent)
                    make(environment)
        os.utime(stamp(directory))
    except OSError as error:
        raise MakeError(f"environment '{environment.name}' cannot be kept in {cache()}: {error}") from error
    return environment.python()


def make(environment: Environment) -> None:
    directory = environment.directory()
    shutil.rmtree(directory, ignore_errors=True)
    free_bytes = shutil.disk_usage(directory.parent).free
    if free_bytes < environment.room_bytes:
        raise MakeError(
            f"environment '{environment.name}' needs {environment.room_bytes / 1e9:.1f} GB in {directory.parent}, "
            f"where {free_bytes / 1e9:.1f} GB are free; make room, or set XDG_CACHE_HOME to another disk"
        )
    say(f"making {directory} with {' '.join(environment.requirements)}")
    pip = [sys.executable, "-m", "pip", "--python", str(environment.python()), "install", "-q", "--no-cache-dir"]
    pip += ["--disable-pip-version-check", "--no-input", *index_options(environment)]
    try:
        run(environment, [sys.executable, "-m", "venv", "--without-pip", str(directory)])
        run(environment, [*pip, *environment.requirements])
        stamp(directory).touch()
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def run(environment: Environment, command: list[str]) -> None:
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # pip does its work in a process of its own
            if isinstance(error, subprocess.TimeoutExpired):
                raise MakeError(f"environment '{environment.name}' was not ready in {LIMIT_S:.0f} s") from error
            raise
    if process.returncode:
        last = (
            f"environment '{environment.name}' could not be made: '{' '.join(command)}' ended with {process.returncode}"
        )
        raise MakeError(f"{output[-4_000:]}\n{last}")


def index_options(environment: Environment) -> list[str]:
    if environment is not FRAMEWORKS:
        return []
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=5):
            return ["--extra-index-url", CPU_INDEX]
    except OSError:
        return []  # pip takes what its own indexes and directories have


def remove_unused(directory: Path) -> None:
    """Environments of earlier requirements; called with the lock."""
    for other in directory.iterdir():
        used = stamp(other) if stamp(other).exists() else other
        if other.is_dir() and time.time() - used.stat().st_mtime > UNUSED_S:
            shutil.rmtree(other, ignore_errors=True)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    with open(directory / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is making an environment; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)  # which has a time limit
        yield


def say(text: str) -> None:
    print(f"environments: {text}", file=sys.stderr, flush=True)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing half-made and no pip is left
    try:
        for name in sys.argv[1:]:
            print(ensure(ENVIRONMENTS[name]), flush=True)
    except MakeError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
