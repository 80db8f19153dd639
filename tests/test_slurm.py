"""Jobs on a real Slurm: submitted by an ordinary user with the template in scripts/, on two nodes, ended in all ways.

The cluster is slurm_cluster.py's: every node has its own name, address, /tmp, mounts and processes. The program
(slurm_train.py) notes in a file of its own which checkpoints it may rely on. Skipped where Slurm is not installed,
unless FANSTORE_TEST_SLURM=1 says that it must be (python tests/packages.py installs it).
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import leftovers
import pytest
from jobs import problem as job_problem
from slurm_cluster import ClusterError, Host, SlurmCluster, problem, slurm_cluster
from slurm_train import name_of
from templates import SCRIPTS, SLURM, with_values
from users import account

TESTS = Path(__file__).parent
REQUIRED = os.environ.get("FANSTORE_TEST_SLURM") == "1"
OBSTACLE = job_problem() or problem()

pytestmark = [
    pytest.mark.skipif(bool(OBSTACLE) and not REQUIRED, reason=f"no Slurm: {OBSTACLE}"),
]

#: Another way for Slurm to find the processes of a job than the usual one: ``linuxproc``.
KIND = os.environ.get("FANSTORE_TEST_PROCTRACK", "")

#: Seconds for a job to get somewhere. It needs three; it is only there to end a hang, with all logs.
JOB_LIMIT_S = 60.0

#: Directories of Open MPI itself, in what is left on a node.
OPEN_MPI = re.compile(r": (ompi|prted|prterun)\.")


@dataclass
class Site:
    """A cluster and somebody who uses it.

    Attributes:
        user: number and group; home: their directory, on all nodes; prepared: their dataset.
        source: what it was made from.
    """

    cluster: SlurmCluster
    user: tuple[int, int]
    home: Path
    source: Path
    prepared: Path
    _jobs: list["Submitted"] = field(default_factory=list)

    def submit(self, name: str, epochs: int, background: bool = False) -> "Submitted":
        """Submit the template; jobs of the same name have the same output directory."""
        output, notes = self.home / name, self.home / f"{name}.notes"
        notes.mkdir(exist_ok=True)
        os.chown(notes, *self.user)
        rank = "$SLURM_PROCID" if background else "$FANSTORE_RANK"  # of the program, which srun or FanStore starts
        train = self.home / f"{name}.sh"
        train.write_text(
            f"#!/bin/sh\nhostname >{notes}/host{rank}\n"
            f'exec {sys.executable} {TESTS}/slurm_train.py "$FANSTORE_MOUNT" --seed "{rank}" --epochs {epochs} '
            f'--checkpoints "$FANSTORE_MOUNT/checkpoints/{rank}" --notes "{notes}/{rank}"\n'
        )
        train.chmod(0o755)
        values = {
            "fanstore": Path(sys.executable).parent,
            "prepared": self.prepared,
            "output": output,
            "train": train,
        }
        text = with_values(SLURM, values, background).replace("#SBATCH --nodes=4\n", "#SBATCH --nodes=2\n")
        script = self.home / f"{name}.sbatch"
        script.write_text(text)
        shown = self.run("sbatch", "--parsable", script)
        job = Submitted(self, int(shown.stdout), output, notes)
        self._jobs.append(job)
        return job

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """A command of the user on the login node."""
        return self.cluster.run(*command, user=self.user, environment={"HOME": str(self.home)}, cwd=self.home)

    def cancel(self, job: "Submitted") -> str:
        """Cancel a job as its user does, wait for its end; the state in which it ends."""
        if self.cluster.proctrack == "cgroup":
            self.run("scancel", str(job.number))
            return job.wait_end()["JobState"]
        # Slurm would signal every process by itself, srun included, which kills (docs/operations.md).
        self.run("scancel", "--batch", "--signal=TERM", str(job.number))
        return job.wait_end()["JobState"].replace("COMPLETED", "CANCELLED")

    def kill(self) -> None:
        """End everything of the user on all nodes at once, as Slurm does with what is left after KillWait."""
        for node in self.cluster.nodes:
            for line in node.processes(self.user[0]):
                with contextlib.suppress(ProcessLookupError):  # its parent has ended it
                    os.kill(int(line.partition(":")[0]), signal.SIGKILL)

    def left(self) -> list[str]:
        """What there is of jobs on the nodes: mounts, processes, files in /tmp and in /dev/shm."""
        return [f"{node.name}: {line}" for node in self.cluster.nodes for line in self._left_on(node)]

    def _left_on(self, node: Host) -> list[str]:
        # Of its directories only those in which the shared ones are mounted belong there.
        files = [path.name for path in node.tmp.iterdir() if Path("/tmp", path.name) not in self.cluster.mounted_in()]
        return [*node.mounts(), *node.processes(self.user[0]), *files, *node.shared_memory()]

    def evidence(self) -> str:
        outputs = [f"--- output of job {job.number}\n{job.said()}" for job in self._jobs]
        return "\n".join([*outputs, *self.left(), self.cluster.evidence()])


@dataclass
class Submitted:
    """A job.

    Attributes:
        number: Slurm's; output: its ``--output``; notes: a file for each rank, with what its program relies on.
    """

    site: Site
    number: int
    output: Path
    notes: Path

    def said(self) -> str:
        log = self.site.home / f"slurm-{self.number}.out"
        return log.read_text(errors="replace") if log.exists() else ""

    def noted(self) -> dict[int, list[tuple[int, str, str]]]:
        """By rank: epoch, ``closed`` or ``synced``, digest."""
        found = {}
        for rank in range(2):
            path = self.notes / str(rank)
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            words = [line.split() for line in lines if line.endswith("\n")]
            found[rank] = [(int(epoch), kind, digest) for epoch, kind, digest in words]
        return found

    def wait_epoch(self, epoch: int) -> None:
        """Until both ranks have noted so many."""
        self._wait(lambda: all(len(notes) >= epoch for notes in self.noted().values()), f"epoch {epoch} of both ranks")

    def wait_end(self) -> dict[str, str]:
        """Until Slurm has nothing to do with it any more; what it says of it."""
        over = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")
        # Not too often: it takes several processes to ask.
        self._wait(lambda: self.site.cluster.job(self.number)["JobState"] in over, "the end of the job", 0.25)
        return self.site.cluster.job(self.number)

    def _wait(self, condition: Callable[[], bool], what: str, every_s: float = 0.05) -> None:
        try:
            self.site.cluster.wait(condition, f"{what} (job {self.number})", JOB_LIMIT_S, every_s)
        except ClusterError as error:
            pytest.fail(f"{error}\n{self.site.evidence()}", pytrace=False)

    def saved(self, rank: int) -> dict[str, str]:
        """Digests of the checkpoints in the output directory."""
        directory = self.output / "checkpoints" / str(rank)
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.glob("*.npz")}

    def lost(self, *kinds: str) -> list[str]:
        """Checkpoints that a program relies on, and that are not there as it has written them."""
        return [
            f"{name_of(epoch)} of rank {rank} ({kind})"
            for rank, notes in self.noted().items()
            for epoch, kind, digest in notes
            if kind in kinds and self.saved(rank).get(name_of(epoch)) != digest
        ]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    if OBSTACLE:
        pytest.fail(f"FANSTORE_TEST_SLURM=1, but {OBSTACLE}")
    # Not below /tmp, which is the local disk of the nodes: --output may not lie in --local.
    directory = Path(tempfile.mkdtemp(prefix="fanstore-slurm-", dir="/var/tmp"))
    directory.chmod(0o755)
    try:
        for path in ("cluster", "home"):
            (directory / path).mkdir()
            (directory / path).chmod(0o755)
        # On a cluster these are on a file system that all nodes see and all users may read.
        shared = [Path(sys.base_prefix), SCRIPTS.parent, directory / "home"]
        with account("s") as entry, slurm_cluster(directory / "cluster", shared=shared, kind=KIND) as cluster:
            user, home = (entry.pw_uid, entry.pw_gid), directory / "home"
            os.chown(home, *user)
            source = home / "images"
            images = [sys.executable, str(SCRIPTS / "demo_images.py"), str(source), "--images", "60", "--classes", "3"]
            subprocess.run(images, check=True, timeout=60, capture_output=True)
            site = Site(cluster, user, home, source, home / "images.fan")
            site.run(Path(sys.executable).parent / "fanstore-prep", source, site.prepared, "--partitions", "2")
            yield site
        assert leftovers.mounts_below(directory) == []
    finally:
        shutil.rmtree(directory)


@contextmanager
def references(site: Site, name: str, epochs: int) -> Iterator[list[str]]:
    """Digests of the last checkpoints if the same programs train on the plain directory, without interruption.

    Made while the body runs; there after it. On the login node, in the environment that the jobs have: what is set
    here, OPENBLAS_CORETYPE for one, may change the last bit of a sum.
    """
    directory = site.home / f"{name}.reference"
    directory.mkdir()
    os.chown(directory, *site.user)

    def train(rank: int) -> str:
        own = directory / str(rank)
        words = ["--seed", rank, "--epochs", epochs, "--checkpoints", own, "--notes", f"{own}.notes"]
        site.run(sys.executable, TESTS / "slurm_train.py", site.source, *map(str, words))
        return hashlib.sha256((own / name_of(epochs)).read_bytes()).hexdigest()

    digests: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        futures = [pool.submit(train, rank) for rank in range(2)]
        yield digests
        digests.extend(future.result() for future in futures)


def test_trains(site: Site) -> None:
    job = site.submit("whole", epochs=3)
    with references(site, "whole", 3) as expected:
        ended = job.wait_end()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), site.evidence()
    hosts = {(job.notes / f"host{rank}").read_text().strip() for rank in range(2)}
    assert hosts == {node.name for node in site.cluster.nodes}, "one on each node"
    for rank in range(2):
        names = [name_of(epoch) for epoch in (1, 2, 3)]
        assert sorted(os.listdir(job.output / "checkpoints" / str(rank))) == names, site.evidence()
        assert job.saved(rank)[names[-1]] == expected[rank]
    assert job.lost("closed", "synced") == []
    assert os.listdir(job.output) == ["checkpoints"]
    assert site.left() == [], site.evidence()


def test_cancelled_and_submitted_again(site: Site) -> None:
    """scancel in the middle leaves nothing on any node, and loses nothing; the next job goes on from there."""
    job = site.submit("again", epochs=100_000)
    job.wait_epoch(3)
    assert site.cancel(job) == "CANCELLED"
    assert job.said().count("the last") == 2, f"the programs had time to end\n{site.evidence()}"
    assert job.lost("closed", "synced") == [], site.evidence()
    assert site.left() == [], site.evidence()
    assert not [name for name in os.listdir(job.output) if name.startswith(".fanstore")], site.evidence()

    epochs = max(notes[-1][0] for notes in job.noted().values()) + 1
    second = site.submit("again", epochs)
    with references(site, "again", epochs) as expected:
        ended = second.wait_end()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), site.evidence()
    assert len(re.findall("goes on from epoch", second.said())) == 2
    assert [second.saved(rank)[name_of(epochs)] for rank in range(2)] == expected
    assert site.left() == [], site.evidence()


def test_cancelled_with_srun(site: Site) -> None:
    """The second way of the template: the mount in the background, the program started by srun."""
    if site.cluster.proctrack != "cgroup":
        pytest.skip("scancel has no gentle way for this without proctrack/cgroup")
    job = site.submit("srun", epochs=100_000, background=True)
    job.wait_epoch(3)
    assert site.cancel(job) == "CANCELLED"
    assert job.said().count("the last") == 2, f"the programs had time to end\n{site.evidence()}"
    assert job.lost("closed", "synced") == [], site.evidence()
    # Its mpirun is none of Slurm's steps: it may be killed with the rest of the job before it has cleaned up.
    assert [line for line in site.left() if not OPEN_MPI.search(line)] == [], site.evidence()


def test_killed(site: Site) -> None:
    """What Slurm has to kill: everything synced is safe, and --recover on the nodes saves and cleans up the rest."""
    job = site.submit("killed", epochs=100_000)
    job.wait_epoch(4)
    site.kill()
    job.wait_end()
    assert job.lost("synced") == [], site.evidence()
    assert all(node.mounts() for node in site.cluster.nodes), "dead ones"
    program = Path(sys.executable).parent / "fanstore-mount"
    site.run("srun", "--nodes=2", program, "--recover", "--local", "/tmp")
    assert job.lost("closed", "synced") == [], site.evidence()
    left = [line for line in site.left() if not OPEN_MPI.search(line)]
    assert left == [], site.evidence()
