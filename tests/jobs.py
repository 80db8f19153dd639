"""Real jobs for tests: a fixture that runs fanstore-mount under mpirun, watches the ranks and checks what they leave.

Owns the launcher and its daemons; all ranks run on this machine, each with its own mount point ``m<rank>``, log
``log<rank>`` and (with ``local``) directory ``ssd<rank>`` below a directory of the job's own. Waiting is polling with a
limit, and a limit that is reached ends the test with all output and all logs. At its end a job may leave no process, no
mount, no mount point and no local file, but for ranks that the test has killed, and no WARNING that the test did not
announce. Use it with ``pytest_plugins = ["jobs"]``; benchmarks/soak.py uses the class alone. (PYTEST_DONT_REWRITE: the
test modules import it as well, before pytest could.)
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import leftovers
import pytest
from commands import BIN, mpirun
from conftest import fanstore_command
from mounting import fuse_problem, wait_until

from fanstore.job.job_directory import JobDirectory
from fanstore.mounttable import find_mount

#: Seconds for a job to come up or to end. Four ranks on two idle cores need two; it is only there to end a hang.
LIMIT_S = 60.0

#: Peers may take so long to answer, unless a test asks for less: on a busy machine the default is too short for an
#: honest one.
PEER_TIMEOUT_S = 60.0

ULFM = ("--with-ft", "ulfm")

#: After a signal a daemon has an eighth of a second to find out whether another one has died. An honest one that needs
#: longer to answer is suspected, which is no fault.
MISSING = r"rank \d+ on \S+ does not answer; if it has died .* 'mpirun --with-ft ulfm'"

#: Where daemons make directories for the shared memory of MPI (fuse/sharedmemory.py).
SHARED_MEMORY = Path("/dev/shm")


def problem() -> str:
    """Why no job can run here; "" if it can."""
    return fuse_problem() or ("" if (BIN / "mpirun").exists() else "no MPI in this environment")


needs_jobs = pytest.mark.skipif(bool(problem()), reason=problem() or "-")
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


class Job:
    """One mpirun with its daemons.

    Attributes:
        directory: for everything of this job; size: how many ranks; has_local: whether they stage.
        process: the launcher (or whatever the test starts instead of it).
        pids: of the daemons, by rank, once they are up; supervisors: of the processes that wait for them.
        dead: ranks that the test has killed; what they leave is for the next job to clean up.
        announced: patterns of warnings that the logs may, and must, hold.
        _children: processes that the launcher has started, as seen while we waited for something.
        _signalled: the test has sent a signal to the launcher or to a daemon.
        _is_merciful: strace holds up the launcher's SIGKILL.
    """

    def __init__(
        self,
        prepared: Path | str,
        directory: Path,
        size: int,
        options: Sequence[str | Path] = (),
        *,
        local: bool | str = False,
        launcher: Sequence[str] = (),
        wrapper: Sequence[str | Path] = (),
        command: Sequence[str | Path] = (),
        prefix: Sequence[str | Path] = (),
        engine: str = "native",
        merciful: int = 0,
    ) -> None:
        """``prefix``: what runs mpirun; ``launcher``: its options; ``wrapper``: what runs each fanstore-mount;
        ``command``: the COMMAND.

        ``merciful``: mpirun ends its daemons with SIGCONT, SIGTERM, and a quarter of a second later SIGKILL, which is
        too short on a busy machine. With the number of daemons that will be alive then, strace holds up the SIGKILL
        until ``wait_end`` has seen that their mount points are gone, which is the last that they clean up.

        ``local``: stage to ``ssd<rank>``, or to the given path, which may hold ``{rank}``.
        """
        self.prepared = prepared
        self.directory = directory
        self.size = size
        self.local_pattern = local if isinstance(local, str) else f"{directory}/ssd{{rank}}" if local else ""
        self.announced: list[str] = []
        self.dead: set[int] = set()
        self.pids: list[int] = []
        self.supervisors: list[int] = []
        self._children: set[int] = set()
        self._signalled = False
        self._output = directory / "output"
        self._is_merciful = merciful > 0
        if merciful:
            hold = f"inject=kill:delay_enter={LIMIT_S:.0f}s:when={2 * merciful + 1}"
            prefix = ["strace", "-D", "-qq", "-o", "/dev/null", "-e", "trace=kill", "-e", hold, *prefix]
        line: list[str | Path] = [*prefix, *mpirun(size), *launcher, *wrapper, fanstore_command("mount")]
        line += [prepared, f"{directory}/m{{rank}}", "--log", f"{directory}/log{{rank}}"]
        line += ["--engine", engine, "--peer-timeout", str(PEER_TIMEOUT_S), "--quiet", *options]
        if self.local_pattern:
            line += ["--local", self.local_pattern]
        if command:
            line += ["--", *command]
        for rank in range(size):
            (directory / f"log{rank}").unlink(missing_ok=True)  # of an earlier job at the same place
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                list(map(str, line)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=directory,
                # mpirun keeps its session there, and leaves it when it is killed.
                env={**os.environ, "TMPDIR": str(directory)},
            )

    # --- places ---

    def mount(self, rank: int) -> Path:
        return self.directory / f"m{rank}"

    def mounts(self) -> list[Path]:
        return [self.mount(rank) for rank in self.living()]

    def local(self, rank: int) -> Path:
        return Path(self.local_pattern.replace("{rank}", str(rank)))

    def living(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.dead]

    # --- waiting ---

    def wait_up(self) -> None:
        """Until all ranks have said that they are mounted; a job that ends before is an error at once."""
        wait_until(lambda: self._ended() or self.is_up(), "the start of the job", self.evidence, LIMIT_S)
        if self._ended():
            pytest.fail(f"mpirun ended with {self.process.returncode}\n{self.evidence()}", pytrace=False)
        self.pids = [int(self.config(rank)["pid"]) for rank in range(self.size)]
        self.supervisors = [parent_of(pid) for pid in self.pids]

    def is_up(self) -> bool:
        return all("INFO fanstore.fuse.session: mounted " in self.log_text(rank) for rank in range(self.size))

    def wait_end(self, limit_s: float = LIMIT_S) -> int:
        """Until the launcher has ended; its exit code."""
        if self._is_merciful:
            for point in self.mounts():
                wait_until(functools.partial(is_absent, point), f"the end of {point}", self.evidence, limit_s)
            end_tracer(self.process.pid)
        wait_until(self._ended, "the end of the job", self.evidence, limit_s)
        return self.process.returncode

    def wait_log(self, pattern: str, ranks: Sequence[int] | None = None, limit_s: float = LIMIT_S) -> None:
        """Until the logs of these ranks (all that live) hold the pattern."""
        for rank in self.living() if ranks is None else ranks:
            wait_until(
                lambda rank=rank: re.search(pattern, self.log_text(rank)) is not None,  # type: ignore[misc]
                f"'{pattern}' in the log of rank {rank}",
                self.evidence,
                limit_s,
            )

    def _ended(self) -> bool:
        for pid in (self.process.pid, *self._children):  # the launcher's, and their daemons
            with contextlib.suppress(OSError):  # it has ended
                self._children |= set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        return self.process.poll() is not None

    def wait_staged(self) -> None:
        self.wait_log(r"INFO fanstore\.job\.node: staged ")

    # --- looking ---

    def _control(self, rank: int, name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.mount(rank) / ".fanstore" / name).read_bytes())
        return loaded

    def config(self, rank: int) -> dict[str, Any]:
        return self._control(rank, "config.json")

    def statistics(self, rank: int) -> dict[str, Any]:
        return self._control(rank, "stats.json")

    def nodes(self, rank: int, silent: Collection[int] = ()) -> list[dict[str, Any]]:
        """What nodes.json of this rank says of all, once exactly these are silent.

        Asked again until then: a healthy node of a busy machine can take longer than the second that it is given.
        """
        nodes: list[dict[str, Any]] = []

        def is_settled() -> bool:
            nodes[:] = self._control(rank, "nodes.json")["nodes"]
            return {node["rank"] for node in nodes if node["state"] == "silent"} == set(silent)

        wait_until(is_settled, f"nodes.json with silent nodes {list(silent)}", lambda: f"{nodes}\n{self.evidence()}")
        return nodes

    def peer(self, rank: int, peer: int) -> dict[str, Any]:
        """What this rank has counted of a peer."""
        found: dict[str, Any] = next(node for node in self.statistics(rank)["peers"]["nodes"] if node["rank"] == peer)
        return found

    def reads(self, rank: int, source: str) -> int:
        return int(self.statistics(rank)["sources"][source]["reads"])

    def log_text(self, rank: int) -> str:
        log = self.directory / f"log{rank}"
        return log.read_text(errors="replace") if log.exists() else ""

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def evidence(self) -> str:
        logs = "\n".join(f"--- log of rank {rank}\n{self.log_text(rank)}" for rank in range(self.size))
        running = "\n".join(self.processes())
        return f"--- output\n{self.output()}\n{logs}\n--- running\n{running}"

    def processes(self) -> list[str]:
        """What runs of this job, its COMMANDs included if they name its directory."""
        return leftovers.processes_of(None, self.directory)

    def shared_memory(self) -> list[Path]:
        """What its daemons have, or have left, of the shared memory of MPI; what other jobs have there is not ours."""
        left = {path for pid in self._children for path in SHARED_MEMORY.glob(f"fanstore-{os.geteuid()}-*-{pid}-*")}
        for pid in self._children:
            maps = Path(f"/proc/{pid}/maps")
            mapped = re.findall(rf"{SHARED_MEMORY}/.*", maps.read_text()) if maps.exists() else []
            left |= {Path(name) for name in mapped if not name.endswith(" (deleted)")}
        return sorted(left)

    # --- harm ---

    def signal_launcher(self, number: int) -> None:
        """To the launcher, as Ctrl-C or a batch system does."""
        self._signalled = True
        self.process.send_signal(number)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """To one daemon. SIGKILL comes as with the loss of its node: nobody is left there who could clean up."""
        self._signalled = True
        if number == signal.SIGKILL:
            os.kill(self.pids[rank], signal.SIGSTOP)  # or it would begin to end, without its supervisor
            os.kill(self.supervisors[rank], number)
            self.dead.add(rank)
        os.kill(self.pids[rank], number)

    def kill_daemon(self, rank: int) -> None:
        """Out of memory: its supervisor cleans up."""
        self._signalled = True
        os.kill(self.pids[rank], signal.SIGKILL)

    # --- ending ---

    def end(self) -> None:
        """End it by unmounting one of its mounts.

        Not by a signal to mpirun, which kills its daemons a quarter of a second later: a busy machine needs longer.
        """
        if not self._ended():
            subprocess.run(["fusermount3", "-u", self.mounts()[0]], check=True, timeout=LIMIT_S)
        code = self.wait_end()
        assert code == 0 or self.dead, f"mpirun ended with {code}\n{self.evidence()}"

    def stop(self) -> None:
        """End it, and check that nothing is left."""
        self.end()
        self.check_clean()

    def check_clean(self) -> None:
        """Nothing is left, and nothing was logged that was not announced."""
        # mpirun does not always wait for its daemons; what matters is that they end by themselves.
        wait_until(lambda: not self.processes(), "the end of all processes", self.evidence)
        evidence = self.evidence()
        for rank in self.living():
            point = self.mount(rank)
            assert find_mount(point) is None, f"{point} is still mounted\n{evidence}"
            assert not os.path.lexists(point), f"the mount point {point} is still there\n{evidence}"
            if self.local_pattern and (local := self.local(rank)).exists():
                left = [path for path in local.iterdir() if not leftovers.is_live(path) and not leftovers.is_kept(path)]
                assert not left, f"local files are left: {left}\n{evidence}"
        self.check_logs()

    def check_logs(self) -> None:
        lines = [line for rank in range(self.size) for line in self.log_text(rank).splitlines()]
        problems = [line for line in lines if re.match(r"\S+ \S+ (WARNING|ERROR|CRITICAL) ", line)]
        expected = [*self.announced, *([MISSING] if self._signalled else [])]
        surprises = [line for line in problems if not any(re.search(pattern, line) for pattern in expected)]
        assert not surprises, "logged, but not announced:\n" + "\n".join(surprises) + "\n" + self.evidence()
        missing = [pattern for pattern in self.announced if not any(re.search(pattern, line) for line in problems)]
        assert not missing, f"announced, but never logged: {missing}\n{self.evidence()}"
        assert "Traceback" not in self.output() + "".join(lines), self.evidence()

    def destroy(self) -> None:
        """Whatever has happened: no process and no mount survives the test."""
        for line in self.processes():
            number = int(line.split()[1].rstrip(":"))
            for kind in (signal.SIGCONT, signal.SIGKILL):
                try:
                    os.kill(number, kind)
                except ProcessLookupError:
                    break
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        for line in leftovers.mounts_below(self.directory):
            subprocess.run(["umount", "-l", line.split()[1]], check=False, timeout=LIMIT_S, capture_output=True)


class StartJob(Protocol):
    """The fixture ``start_job``: start a job, wait until all ranks are up."""

    def __call__(
        self,
        prepared: Path | str,
        size: int,
        *options: str | Path,
        local: bool | str = False,
        launcher: Sequence[str] = (),
        wrapper: Sequence[str | Path] = (),
        command: Sequence[str | Path] = (),
        announced: Sequence[str] = (),
        directory: Path | None = None,
        wait: bool = True,
        merciful: int = 0,
    ) -> Job: ...


@pytest.fixture
def start_job(tmp_path: Path, engine: str) -> Iterator[StartJob]:
    """``start_job(prepared, 4, "--replicas", "2", local=True)``; ended and checked if the test has not done so."""
    started: list[Job] = []

    def start(
        prepared: Path | str,
        size: int,
        *options: str | Path,
        local: bool | str = False,
        launcher: Sequence[str] = (),
        wrapper: Sequence[str | Path] = (),
        command: Sequence[str | Path] = (),
        announced: Sequence[str] = (),
        directory: Path | None = None,
        wait: bool = True,
        merciful: int = 0,
    ) -> Job:
        own = directory if directory is not None else tmp_path / f"job-{len(started)}"
        own.mkdir(exist_ok=True)
        job = Job(
            prepared,
            own,
            size,
            options,
            local=local,
            launcher=launcher,
            wrapper=wrapper,
            command=command,
            engine=engine,
            merciful=merciful,
        )
        job.announced.extend(announced)
        started.append(job)
        if wait:
            job.wait_up()
        return job

    try:
        yield start
        for job in reversed(started):
            if job.process.poll() is None:
                job.stop()
    finally:
        for job in reversed(started):
            job.destroy()
        JobDirectory.sweep(SHARED_MEMORY)  # as the next daemon would, after those that were killed while they started

        def left() -> list[Path]:
            return [path for job in started for path in job.shared_memory()]

        wait_until(lambda: not left(), "the end of all daemons", lambda: str(left()))
        assert leftovers.mounts_below(tmp_path) == []


def end_tracer(pid: int) -> None:
    """End the strace of a process; what it holds up goes on."""
    tracer = int(Path(f"/proc/{pid}/status").read_text().partition("TracerPid:")[2].split()[0])
    if tracer:
        os.kill(tracer, signal.SIGKILL)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_absent(path: Path) -> bool:
    return not os.path.lexists(path)


def once_per_rank(job: Job, pattern: str, ranks: Sequence[int]) -> None:
    """Each of these ranks has logged the pattern exactly once."""
    counts = {rank: len(re.findall(pattern, job.log_text(rank))) for rank in ranks}
    assert counts == dict.fromkeys(ranks, 1), f"'{pattern}'\n{job.evidence()}"


def in_threads(*calls: Callable[[], object]) -> None:
    """Call several functions at once; an exception of one is raised here."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 -- raised again by the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a call hangs"
    if errors:
        raise errors[0]
