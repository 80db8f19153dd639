"""Real mounts for tests: one fixture that starts fanstore-mount, waits until it answers, and checks what it leaves.

Owns the processes it starts. Nothing here sleeps and hopes: waiting is polling with a limit, and a limit that is
reached ends the test with the daemon's log, its output and the stacks of its threads. After a test no mount, process,
local file or created mount point may be left, and no WARNING in a daemon's log that the test did not announce.
Use it with ``pytest_plugins = ["mounting"]`` in a test module. (PYTEST_DONT_REWRITE: the test modules import it as
well, before pytest could.)
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import leftovers
import pytest
from conftest import fanstore_command

from fanstore.job.job_directory import JobDirectory
from fanstore.mounttable import find_mount

#: Seconds for a mount to come up or to end. It takes one; the limit is only there to end a hang.
LIMIT_S = 60.0


def fuse_problem() -> str:
    """Why nothing can be mounted here; "" if it can."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"cannot open /dev/fuse: {error.strerror}"
    return ""


#: Set for tests that themselves run where there is no mount: what they would mount is at this path for them.
GIVEN = os.environ.get("FANSTORE_TEST_GIVEN", "")

needs_fuse = pytest.mark.skipif(not GIVEN and bool(fuse_problem()), reason=fuse_problem() or "-")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can do this")


def wait_until(condition: Callable[[], bool], what: str, evidence: Callable[[], str], limit_s: float = LIMIT_S) -> None:
    """Poll until the condition holds; otherwise the test ends with the evidence."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not happen within {limit_s:g} s\n{evidence()}", pytrace=False)
        time.sleep(0.01)


class Mounted:
    """One fanstore-mount in the foreground.

    Attributes:
        path: the mount point; prepared: what is mounted; local: base directory of staged files, or None.
        engine: which engine must answer.
        process: the command; log: its log file.
        announced: patterns of warnings that its log may, and must, hold.
    """

    def __init__(
        self,
        prepared: Path | str,
        point: Path,
        options: Sequence[str],
        directory: Path,
        local: Path | None,
        engine: str,
    ) -> None:
        self.prepared = Path(prepared)  # of an address, nothing that leads anywhere
        self.engine = engine
        self.path = point
        self.local = local
        self.log = directory / "mount.log"
        self.announced: list[str] = []
        self._existed = os.path.lexists(point)  # False of a dead mount
        self._output = directory / "output"
        command = [fanstore_command("mount"), str(prepared), str(point), "--log", str(self.log)]
        command += ["--engine", engine, "--quiet", *options]
        if local is not None:
            command += ["--local", str(local), "--stage-first"]
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    # --- waiting ---

    def wait_up(self) -> None:
        """Until the mount answers; a command that ends before is an error at once."""
        wait_until(lambda: self._dead() or self.is_up(), f"mount on {self.path}", self.evidence)
        if self.process.poll() is not None:
            pytest.fail(f"fanstore-mount ended with {self.process.returncode}\n{self.evidence()}", pytrace=False)

    def wait_end(self, limit_s: float = LIMIT_S) -> int:
        """Until the command has ended; its exit code."""
        wait_until(self._dead, f"end of the mount on {self.path}", self.evidence, limit_s)
        return self.process.returncode

    def _dead(self) -> bool:
        return self.process.poll() is not None

    def is_up(self) -> bool:
        mount = find_mount(self.path.resolve())
        return mount is not None and mount.is_fanstore and "INFO fanstore.fuse.session: mounted " in self.log_text()

    # --- looking ---

    def statistics(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / ".fanstore" / "stats.json").read_bytes())
        return loaded

    def count(self, operation: str) -> int:
        """How many requests of a kind have reached the daemon."""
        return int(self.statistics()["operations"].get(operation, {"count": 0})["count"])

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def evidence(self) -> str:
        """Output, log and, while it lives, the stacks of all threads."""
        if self.process.poll() is None:
            before = len(self.log_text())
            self.process.send_signal(signal.SIGUSR2)
            deadline = time.monotonic() + 2
            while len(self.log_text()) == before and time.monotonic() < deadline:
                time.sleep(0.01)
        return f"--- output\n{self.output()}\n--- log\n{self.log_text()}"

    # --- ending ---

    def signal(self, number: int) -> None:
        """Send it; after SIGSTOP all threads have really stopped: one that runs may answer a little longer."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            tasks = Path(f"/proc/{self.process.pid}/task")
            wait_until(
                lambda: all(path.read_text().rpartition(")")[2].split()[0] == "T" for path in tasks.glob("*/stat")),
                "stop of all threads",
                self.evidence,
            )

    def stop(self) -> None:
        """End it by SIGTERM, as a batch system does, and check that all is well and nothing is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.wait_end() == 0, self.evidence()
        self.check_clean()

    def check_clean(self) -> None:
        """Nothing is left, and nothing was logged that was not announced."""
        evidence = self.evidence()
        assert find_mount(Path(os.path.realpath(self.path))) is None, f"still mounted\n{evidence}"
        if not self._existed:
            assert not self.path.exists(), f"the created mount point is still there\n{evidence}"
        if self.local is not None and self.local.exists():
            left = [path for path in self.local.iterdir() if not leftovers.is_kept(path)]
            assert not left, f"local files are left: {left}\n{evidence}"
        problems = [
            line for line in self.log_text().splitlines() if re.match(r"\S+ \S+ (WARNING|ERROR|CRITICAL) ", line)
        ]
        surprises = [line for line in problems if not any(re.search(pattern, line) for pattern in self.announced)]
        assert not surprises, "logged, but not announced:\n" + "\n".join(surprises)
        missing = [pattern for pattern in self.announced if not any(re.search(pattern, line) for line in problems)]
        assert not missing, f"announced, but not logged: {missing}\n{evidence}"

    def destroy(self) -> None:
        """Whatever has happened: no process and no mount survives the test."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(LIMIT_S)
        if find_mount(Path(os.path.realpath(self.path))) is not None:
            subprocess.run(["umount", "-l", str(self.path)], check=False, timeout=LIMIT_S, capture_output=True)
        if self.process.returncode < 0 and self.local is None:
            # What the next mount without --local would remove; there may be none before the run ends.
            JobDirectory.sweep(Path(tempfile.gettempdir()), self._is_own)

    def _is_own(self, directory: Path) -> bool:
        recorded = directory / "mount.json"
        return recorded.exists() and json.loads(recorded.read_bytes())["path"] == os.path.realpath(self.path)


class Given(Mounted):
    """What is at GIVEN: there is no command to be started or stopped."""

    def __init__(self) -> None:
        self.path = Path(GIVEN)

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {"engine": {"name": "native"}}  # that of the test's name


class Mount(Protocol):
    """The fixture ``mount``: start fanstore-mount, wait until it answers."""

    def __call__(
        self,
        prepared: Path | str,
        *options: str,
        point: Path | None = None,
        local: Path | None = None,
        announced: Sequence[str] = (),
        wait: bool = True,
    ) -> Mounted: ...


@pytest.fixture
def mount(tmp_path: Path, engine: str) -> Iterator[Mount]:
    """``mount(prepared, "--verify", "always", local=DIR)``; ended and checked after the test if the test has not."""
    yield from _mounts(tmp_path, engine)


@pytest.fixture(scope="module")
def module_mount(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Iterator[Mount]:
    """The same, for mounts that all tests of a module only read from."""
    yield from _mounts(tmp_path_factory.mktemp("module"), engine)


def _mounts(directory: Path, engine: str) -> Iterator[Mount]:
    started: list[Mounted] = []

    def start(
        prepared: Path | str,
        *options: str,
        point: Path | None = None,
        local: Path | None = None,
        announced: Sequence[str] = (),
        wait: bool = True,
    ) -> Mounted:
        own = directory / f"mount-{len(started)}"
        own.mkdir()
        mounted = Mounted(prepared, point if point is not None else own / "m", options, own, local, engine)
        mounted.announced.extend(announced)
        started.append(mounted)
        if wait:
            mounted.wait_up()
        return mounted

    try:
        yield start
        for mounted in reversed(started):
            if mounted.process.poll() is None:
                mounted.stop()
    finally:
        for mounted in reversed(started):
            mounted.destroy()
        assert leftovers.mounts_below(directory) == []


@contextlib.contextmanager
def small_file_system(path: Path, size: str) -> Iterator[Path]:
    """A file system with little room, such as ``16m``; root only."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True, timeout=LIMIT_S)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True, timeout=LIMIT_S)


def lister_of(point: Path, program: bytes = b"fanstore-names") -> int | None:
    """The process that lists directories of a mount ahead, or another one; None when there is none, or it has ended."""
    wanted = [program, os.fsencode(point)]
    for process in Path("/proc").iterdir():
        try:
            argv = (process / "cmdline").read_bytes().split(b"\0")[:2] if process.name.isdigit() else []
        except OSError:
            continue  # it ended meanwhile
        if argv and [os.path.basename(argv[0]), *argv[1:]] == wanted:
            return int(process.name)
    return None


def prepare(source: Path, target: Path, *options: str) -> Path:
    """fanstore-prep, for datasets that outlive one test (the fixture make_prepared is for those that do not)."""
    command = [fanstore_command("prep"), str(source), str(target), *options]
    result = subprocess.run(command, capture_output=True, timeout=100, errors="replace")
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return target


def command(name: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``fanstore-<name>`` to its end, with a limit."""
    return subprocess.run(
        [fanstore_command(name), *map(str, arguments)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
    )


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor, for a while."""
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)
