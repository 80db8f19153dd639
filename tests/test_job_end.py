"""No crash counts as success: what a job says at its end, whatever the launcher makes of it, and what it leaves.

Exit codes and the proof of success (``--success``) after every kind of bad end; the supervisors of daemons that were
killed; ``--launch``, which compares the two.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import leftovers
import pytest
from commands import mpirun
from conftest import MakePrepared, fanstore_command
from jobs import LIMIT_S, ULFM, Job, StartJob, needs_jobs, parent_of
from mounting import command, wait_until

from fanstore.fuse.success import SUCCESS_LINE
from fanstore.mounttable import find_mount

pytest_plugins = ["jobs"]
pytestmark = needs_jobs

#: Of a COMMAND: until the test says so.
WAIT = "while [ ! -e {}/go ]; do sleep 0.05; done"
DIED = "rank {} on \\S+ has died"


@pytest.fixture
def prepared(tmp_path: Path, make_prepared: MakePrepared) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("content")
    return make_prepared(source, quiet=True)


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    path = tmp_path / "proof"
    path.write_text('{"ended": "2026-01-01T00:00:00+00:00", "nodes": 1}\n')
    return path


def start(start_job: StartJob, prepared: Path, size: int, proof: Path, script: str, *options: str | Path) -> Job:
    return start_job(
        prepared, size, "--success", proof, *options, local=True, launcher=ULFM, command=["sh", "-c", script]
    )


def check_nothing_is_left(job: Job) -> None:
    """Of no rank, killed or not."""
    wait_until(lambda: not job.processes(), "the end of all processes", job.evidence)
    for rank in range(job.size):
        assert find_mount(job.mount(rank)) is None, job.evidence()
        assert not job.mount(rank).exists() and not job.local(rank).exists(), job.evidence()


# --- the proof, and the exit code ---


@pytest.mark.parametrize("size", [1, 2])
def test_a_good_end_is_proved(start_job: StartJob, prepared: Path, proof: Path, tmp_path: Path, size: int) -> None:
    script = f"{WAIT.format(tmp_path)}; echo saved >$FANSTORE_MOUNT/out$FANSTORE_RANK"
    job = start(start_job, prepared, size, proof, script, "--output", tmp_path / "out")
    assert not proof.exists(), "that of the job before"
    (tmp_path / "go").touch()
    assert job.wait_end() == 0, job.evidence()
    assert f'"nodes": {size}' in proof.read_text()
    assert all((tmp_path / f"out/out{rank}").read_text() == "saved\n" for rank in range(size))
    job.check_clean()


def test_a_command_that_fails(start_job: StartJob, prepared: Path, proof: Path, tmp_path: Path) -> None:
    job = start(start_job, prepared, 2, proof, f"{WAIT.format(tmp_path)}; exit $FANSTORE_RANK")
    (tmp_path / "go").touch()
    assert job.wait_end() == 1
    assert not proof.exists()
    job.check_clean()


def test_a_rank_that_never_starts(start_job: StartJob, prepared: Path, proof: Path, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text('#!/bin/sh\n[ "$OMPI_COMM_WORLD_RANK" = 1 ] && exit 0\nexec "$@"\n')
    wrapper.chmod(0o755)
    job = start_job(prepared, 2, "--success", proof, launcher=ULFM, wrapper=[wrapper], command=["true"], wait=False)
    wait_until(lambda: not proof.exists() or job.process.poll() is not None, "the start", job.evidence)
    job.signal_launcher(signal.SIGTERM)  # it would wait for two minutes
    job.wait_end()
    assert not proof.exists()


def test_outputs_that_are_not_saved(start_job: StartJob, prepared: Path, proof: Path, tmp_path: Path) -> None:
    """Every COMMAND has ended with 0, and one node cannot save what it wrote."""
    out = tmp_path / "out"
    script = (
        f"while [ ! -e {tmp_path}/gone ]; do sleep 0.05; done; [ $FANSTORE_RANK = 0 ] || echo x >$FANSTORE_MOUNT/late"
    )
    job = start(start_job, prepared, 2, proof, script, "--output", out)
    job.announced += ["cannot .* to .*; it is tried again", "1 outputs could not be saved"]
    out.rename(tmp_path / "away")
    (tmp_path / "gone").touch()
    job.wait_log("it is tried again", ranks=[1])
    for _ in range(4):  # SIGINT is only answered at first
        for pid in job.pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGTERM)
        if job.process.poll() is not None:
            break
        job.wait_log("SIGTERM: ending")
    assert job.wait_end() != 0
    assert not proof.exists()
    job.check_logs()
    (tmp_path / "away").rename(out)
    assert command("mount", "--recover", "--local", job.local(1)).returncode == 0
    assert (out / "late").read_text() == "x\n"


def test_a_proof_that_cannot_be_written(start_job: StartJob, prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    job = start(start_job, prepared, 1, tmp_path / "d/proof", WAIT.format(tmp_path))
    (tmp_path / "d").rmdir()
    (tmp_path / "go").touch()
    job.announced.append("all has ended well, but --success .* cannot be written: No such file")
    assert job.wait_end() == 1
    job.check_clean()


# --- daemons that were killed ---


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_daemons_are_killed(start_job: StartJob, prepared: Path, proof: Path, size: int) -> None:
    """mpirun may say 0; but there is no proof, each death is a sentence, and nothing is left on the nodes."""
    job = start(start_job, prepared, size, proof, "exec sleep 100")
    for rank in range(size):
        job.kill_daemon(rank)
    code = job.wait_end()
    assert code == 137 if size == 1 else True, "the supervisor knows that nobody else is left"
    assert not proof.exists()
    for rank in range(size):
        assert job.output().count(f"the daemon of rank {rank} on ") == 1
    check_nothing_is_left(job)


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_is_killed(start_job: StartJob, prepared: Path, proof: Path, tmp_path: Path, victim: int) -> None:
    """The other one goes on to its end; the job has failed. On the node of the first nothing is left meanwhile."""
    script = f"{WAIT.format(tmp_path)}; cat $FANSTORE_MOUNT/file >{tmp_path}/read"
    job = start(start_job, prepared, 2, proof, script)
    job.announced.append(DIED.format(victim))
    job.kill_daemon(victim)
    job.wait_log(DIED.format(victim), ranks=[1 - victim])
    wait_until(lambda: not job.local(victim).exists(), "cleaning up", job.evidence)
    assert find_mount(job.mount(victim)) is None
    (tmp_path / "go").touch()
    assert job.wait_end() != 0, job.evidence()
    assert (tmp_path / "read").read_text() == "content"
    assert not proof.exists()
    check_nothing_is_left(job)
    job.check_logs()


def test_the_last_one_is_killed(start_job: StartJob, prepared: Path, proof: Path) -> None:
    """It knows that it is the last, so that its supervisor can say so with an exit code."""
    job = start(start_job, prepared, 2, proof, "exec sleep 100")
    job.announced.append(DIED.format(0))
    job.kill_daemon(0)
    job.wait_log(DIED.format(0), ranks=[1])
    job.kill_daemon(1)
    assert job.wait_end() == 137
    assert not proof.exists()
    check_nothing_is_left(job)


def test_outputs_of_a_killed_daemon_are_saved(start_job: StartJob, prepared: Path, proof: Path, tmp_path: Path) -> None:
    """And a COMMAND that does not end by SIGTERM is killed: it gets the time that it always has."""
    script = f'trap "echo told >{tmp_path}/told; exit" TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done'
    out = tmp_path / "out"
    job = start(start_job, prepared, 1, proof, script, "--output", out)
    wait_until((tmp_path / "ready").exists, "the command", job.evidence)
    (job.mount(0) / "closed").write_text("closed")
    job.kill_daemon(0)
    assert job.wait_end() == 137
    assert (tmp_path / "told").read_text() == "told\n"
    assert (out / "closed").read_text() == "closed"
    check_nothing_is_left(job)


def test_the_supervisor_is_killed(start_job: StartJob, prepared: Path, proof: Path) -> None:
    """The launcher takes the daemon for dead: it ends, in order."""
    job = start(start_job, prepared, 1, proof, "exec sleep 100")
    os.kill(job.supervisors[0], signal.SIGKILL)
    job.wait_end()
    wait_until(lambda: not job.processes(), "the end of the daemon", job.evidence)
    assert not proof.exists()
    check_nothing_is_left(job)


def test_a_supervisor_is_killed_in_a_job_without_a_command(start_job: StartJob, prepared: Path, proof: Path) -> None:
    """Its daemon ends alone, in order; the others go on."""
    job = start_job(prepared, 2, "--success", proof, local=True, launcher=ULFM)
    job.dead.add(1)
    os.kill(job.supervisors[1], signal.SIGKILL)
    wait_until(lambda: not job.local(1).exists() and not job.mount(1).exists(), "its end", job.evidence)
    assert (job.mount(0) / "file").read_text() == "content"
    job.end()
    assert not proof.exists()
    check_nothing_is_left(job)


def test_the_launcher_is_killed(start_job: StartJob, prepared: Path, proof: Path) -> None:
    """The MPI library ends the daemons without asking them."""
    job = start(start_job, prepared, 2, proof, "exec sleep 100")
    job.process.kill()
    os.kill(parent_of(job.supervisors[0]), signal.SIGKILL)
    wait_until(lambda: not job.processes(), "the end of all", job.evidence)
    assert not proof.exists()
    check_nothing_is_left(job)


def test_a_supervisor_is_small(start_job: StartJob, prepared: Path, proof: Path) -> None:
    job = start(start_job, prepared, 1, proof, "exec sleep 100")
    modules = Path(f"/proc/{job.supervisors[0]}/maps").read_text()
    assert "numpy" not in modules and "_native" not in modules
    assert "numpy" in Path(f"/proc/{job.pids[0]}/maps").read_text()
    job.kill(0, signal.SIGTERM)
    job.wait_end()


# --- --launch ---


@contextmanager
def launched(directory: Path, prepared: Path, launcher: Sequence[str], *words: str) -> Iterator[subprocess.Popen[str]]:
    line = [fanstore_command("mount"), str(prepared), f"{directory}/m{{rank}}", "--launch", " ".join(launcher), *words]
    process = subprocess.Popen(
        line,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(directory)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)
        wait_until(lambda: not leftovers.processes_of(None, directory), "the end of all", lambda: "")


def test_launch_passes_on_what_there_is(prepared: Path, tmp_path: Path) -> None:
    """Output, exit code; and no line of ours."""
    script = "printf 'no end of line'; exit $FANSTORE_EXIT"
    for code in (0, 7):
        with launched(
            tmp_path, prepared, [*mpirun(2), *ULFM], "--", "env", f"FANSTORE_EXIT={code}", "sh", "-c", script
        ) as job:
            out, err = job.communicate(timeout=LIMIT_S)
        assert job.returncode == code, err
        assert out.replace("\n", "") == 2 * "no end of line"


@pytest.mark.parametrize("file", [False, True], ids=["line", "file"])
def test_launch_does_not_believe_a_launcher(prepared: Path, tmp_path: Path, file: bool) -> None:
    """All daemons are killed, mpirun ends with 0; that is an error, and a sentence says so."""
    proof = tmp_path / "proof"
    words = ["--success", str(proof)] if file else []
    script = f"echo $PPID >{tmp_path}/pid$FANSTORE_RANK; exec sleep 100"
    with launched(tmp_path, prepared, [*mpirun(2), *ULFM], *words, "--", "sh", "-c", script) as job:
        pids = [tmp_path / f"pid{rank}" for rank in range(2)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in pids), "the commands", lambda: "")
        for path in pids:
            os.kill(int(path.read_text()), signal.SIGKILL)
        _, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode not in (0, None)
    assert "mpirun ended with 0, but not every node of the job has ended well" in err or job.returncode == 137
    assert not proof.exists()


def test_launch_with_a_launcher_that_starts_nothing(prepared: Path, tmp_path: Path) -> None:
    with launched(tmp_path, prepared, ["true"], "--", "true") as job:
        out, err = job.communicate(timeout=LIMIT_S)
    assert (job.returncode, out) == (1, "")
    assert err.startswith("fanstore-mount: error: true ended with 0, but not every node of the job has ended well")


def test_launch_passes_signals_on(prepared: Path, tmp_path: Path) -> None:
    script = f'trap "exit 5" TERM; touch {tmp_path}/up$FANSTORE_RANK; while :; do sleep 0.1; done'
    with launched(tmp_path, prepared, [*mpirun(2), *ULFM], "--", "sh", "-c", script) as job:
        wait_until(lambda: len(list(tmp_path.glob("up*"))) == 2, "the commands", lambda: "")
        job.send_signal(signal.SIGURG)
        out, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 5
    assert SUCCESS_LINE not in out
