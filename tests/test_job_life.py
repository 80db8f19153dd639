"""The life of a job: the COMMAND on each node, every way to end, and what the next job finds after a crash."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from commands import mpirun
from jobs import PEER_TIMEOUT_S, ULFM, Job, StartJob, needs_jobs, needs_strace
from load import Source, make_files
from mounting import command, prepare, wait_until

from fanstore.mounttable import find_mount

pytest_plugins = ["jobs"]
pytestmark = needs_jobs


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("life") / "source", 30)


@pytest.fixture(scope="module")
def prepared(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(source, tmp_path_factory.mktemp("prepared") / "d.fan", "--partitions", "6")


# --- the COMMAND ---


@pytest.mark.parametrize("ft", [False, True])
def test_command_once_per_rank(start_job: StartJob, prepared: Path, ft: bool) -> None:
    script = 'echo "$FANSTORE_RANK of $FANSTORE_SIZE at $FANSTORE_MOUNT: $(ls "$FANSTORE_MOUNT" | wc -l)"'
    job = start_job(
        prepared,
        3,
        local=True,
        launcher=ULFM if ft else (),
        command=["sh", "-c", f"{script}; test $FANSTORE_RANK = 1 && exit 7; exit 0"],
        wait=False,
    )
    assert job.wait_end() == 7
    said = sorted(line for line in job.output().splitlines() if " of 3 at " in line)
    assert said == [f"{rank} of 3 at {job.mount(rank)}: 5" for rank in range(3)]
    job.check_clean()


def test_end_without_hurry(start_job: StartJob, prepared: Path) -> None:
    """SIGURG to mpirun reaches the commands of all nodes as SIGTERM, and who needs longer gets what others have."""
    script = (
        'trap "sleep $FANSTORE_RANK; sleep $FANSTORE_RANK; cat $FANSTORE_MOUNT/*/* | wc -c; exit 0" TERM; '
        "echo ready; while :; do sleep 0.05; done"
    )
    job = start_job(prepared, 2, local=True, launcher=ULFM, command=["sh", "-c", script])
    wait_until(lambda: job.output().count("ready\n") == 2, "start of the commands", job.evidence)
    job.process.send_signal(signal.SIGURG)
    assert job.wait_end() == 0, job.evidence()
    sizes = job.output().split("ready\n")[-1].split()
    assert len(sizes) == 2 and sizes[0] == sizes[1], job.evidence()
    job.check_clean()


def test_success_of_all_is_success(start_job: StartJob, prepared: Path) -> None:
    job = start_job(prepared, 3, local=True, command=["true"], wait=False)
    assert job.wait_end() == 0
    assert job.output() == ""
    job.check_clean()


@pytest.mark.parametrize("ft", [False, True])
def test_command_that_cannot_start_on_one_node(start_job: StartJob, prepared: Path, tmp_path: Path, ft: bool) -> None:
    """The others must not wait for a node that has left."""
    (tmp_path / "bin").mkdir()
    for rank in (0, 2):
        (tmp_path / "bin" / f"train{rank}").symlink_to("/bin/sleep")
    job = start_job(
        prepared,
        3,
        wrapper=["sh", "-c", 'exec "$@" -- "$0$OMPI_COMM_WORLD_RANK" 0.5', tmp_path / "bin" / "train"],
        launcher=ULFM if ft else (),
        wait=False,
    )
    assert job.wait_end() == 127
    job.announced.append("train1' was not found")
    assert job.output().lower().count("fanstore-mount: error: command ") == 1, job.evidence()
    job.check_clean()


def test_early_end_keeps_serving(start_job: StartJob, prepared: Path, source: Path, tmp_path: Path) -> None:
    """Rank 0 is through at once; afterwards the others read everything, for which they need its disk."""
    script = (
        'if [ "$FANSTORE_RANK" = 0 ]; then exit 0; fi; while [ ! -e "$0/go" ]; do sleep 0.05; done; '
        'diff -r "$1" "$FANSTORE_MOUNT" && cp "$FANSTORE_MOUNT/.fanstore/stats.json" "$0/stats$FANSTORE_RANK"'
    )
    job = start_job(prepared, 3, "--stage-first", local=True, command=["sh", "-c", script, tmp_path, source], wait=True)
    job.wait_log("the command ended with 0", ranks=[0])
    (tmp_path / "go").touch()
    assert job.wait_end() == 0, job.evidence()
    for rank in (1, 2):
        statistics = json.loads((tmp_path / f"stats{rank}").read_bytes())
        assert next(n for n in statistics["peers"]["nodes"] if n["rank"] == 0)["fetches"] > 0
        assert statistics["sources"]["shared"]["reads"] == 0
    job.check_clean()


# --- ends ---


@needs_strace
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("with_command", [False, True])
def test_signal_to_mpirun(
    start_job: StartJob, prepared: Path, number: signal.Signals, with_command: bool, tmp_path: Path
) -> None:
    script = (
        f'trap "ls $FANSTORE_MOUNT >{tmp_path}/got$FANSTORE_RANK; exit 3" TERM; '
        f"touch {tmp_path}/ready$FANSTORE_RANK; while :; do sleep 0.05; done"
    )
    job = start_job(prepared, 3, local=True, command=["sh", "-c", script] if with_command else (), merciful=3)
    if with_command:
        wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 3, "start of the commands", job.evidence)
    job.signal_launcher(number)
    assert job.wait_end() != 0, "mpirun says that it was ended"
    job.check_clean()
    if with_command:
        for rank in range(3):
            assert (tmp_path / f"got{rank}").read_text().count("class-") == 5, "it could still read"


def test_term_to_one_daemon_ends_all(start_job: StartJob, prepared: Path) -> None:
    job = start_job(prepared, 3, local=True)
    job.kill(1, signal.SIGTERM)
    assert job.wait_end() == 0, job.evidence()
    job.check_clean()


def test_umount_ends_all(start_job: StartJob, prepared: Path) -> None:
    job = start_job(prepared, 3, local=True)
    assert command("umount", job.mount(2)).returncode == 0
    assert job.wait_end() == 0, job.evidence()
    job.check_clean()


def test_signal_while_staging(start_job: StartJob, prepared: Path) -> None:
    """Before the mounts are up: a rank that is stopped keeps the others waiting when the signal comes."""
    stop = 'if [ $OMPI_COMM_WORLD_RANK = 1 ]; then sleep 600; fi; exec "$@"'
    job = start_job(prepared, 3, "--stage-first", local=True, wrapper=["sh", "-c", stop, "sh"], wait=False)
    wait_until(lambda: len(job.processes()) >= 4, "start", job.evidence)
    time.sleep(1)  # in the middle of MPI's own start, where nothing of ours can be seen
    job.signal_launcher(signal.SIGTERM)
    job.wait_end()
    job.announced = []
    wait_until(lambda: not job.processes(), "end", job.evidence)
    assert not any(os.path.lexists(job.mount(rank)) for rank in range(3))


def test_background_and_umount(prepared: Path, source: Path, tmp_path: Path) -> None:
    """--launch: the command returns when all are up, and fanstore-umount of any mount ends all of them."""
    local = tmp_path / "ssd{rank}"
    started = command(
        "mount",
        prepared,
        tmp_path / "m{rank}",
        "--local",
        local,
        "--peer-timeout",
        str(PEER_TIMEOUT_S),
        "--background",
        "--launch",
        " ".join(mpirun(3)),
        "--log",
        tmp_path / "log{rank}",
    )
    assert started.returncode == 0, started.stderr
    try:
        assert started.stdout.count("is mounted on") + started.stderr.count("is mounted on") == 1, started
        contents = Source(source)
        for rank in range(3):
            contents.check(tmp_path / f"m{rank}")
        pids = [json.loads((tmp_path / f"m{rank}/.fanstore/config.json").read_bytes())["pid"] for rank in range(3)]
    finally:
        ended = command("umount", tmp_path / "m1")
    assert ended.returncode == 0, ended.stderr
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids),
        "end of all daemons",
        lambda: "\n".join(log.read_text() for log in tmp_path.glob("log*")),
    )
    assert all(find_mount(tmp_path / f"m{rank}") is None for rank in range(3))
    assert {path.name[:3] for path in tmp_path.iterdir()} == {"log"}
    assert not any(" WARNING " in path.read_text() for path in tmp_path.glob("log*"))


def test_background_failure_is_told(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "m1").mkdir()
    (tmp_path / "m1" / "in-the-way").touch()
    result = command(
        "mount",
        prepared,
        tmp_path / "m{rank}",
        "--background",
        "--launch",
        " ".join(mpirun(3)),
        "--log",
        tmp_path / "log{rank}",
    )
    assert result.returncode == 1
    assert result.stderr.count("the start failed on") == 1
    assert "(rank 1), so no node is mounted: mount point " in result.stderr
    assert [path.name for path in tmp_path.glob("m*")] == ["m1"]


# --- crash ---


def test_crash_of_all_beside_a_live_job(start_job: StartJob, prepared: Path, source: Path, tmp_path: Path) -> None:
    """All daemons are killed at once. A job that lives on the same base goes on, and is not touched by the clean-up."""
    base = tmp_path / "ssd"
    base.mkdir()
    neighbour = start_job(prepared, 2, "--stage-first", "--cache", "1MiB", local=str(base))
    its = set(base.iterdir())
    crashed = start_job(prepared, 3, "--stage-first", local=str(base))
    left = set(base.iterdir()) - its
    assert (len(its), len(left)) == (2, 3)
    assert neighbour.shared_memory() + crashed.shared_memory() == [], "gone as soon as everybody has mapped it"
    for rank in range(3):
        crashed.kill(rank)
    crashed.wait_end()
    assert set(base.iterdir()) == its | left
    for rank in range(3):
        mount = find_mount(crashed.mount(rank))
        assert mount is not None and mount.is_fanstore
    again = start_job(prepared, 3, "--stage-first", local=str(base), directory=crashed.directory)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in its)
    logs = "".join(map(again.log_text, range(3)))  # whoever comes across one of them first
    for mount_point in map(crashed.mount, range(3)):
        assert re.search(rf"unmounted the dead mount of \S+ that \S+ \S+ job left at {mount_point}\n", logs), logs
    contents = Source(source)
    for mount_point in [*neighbour.mounts(), *again.mounts()]:
        contents.check(mount_point)
    assert all(neighbour.reads(rank, "shared") == 0 for rank in range(2)), "it still has its files"
    end_at_used_places(again)
    assert set(base.iterdir()) == its
    contents.check(neighbour.mount(0))
    neighbour.stop()
    assert list(base.iterdir()) == []


def test_term_followed_by_kill(start_job: StartJob, prepared: Path, tmp_path: Path) -> None:
    """As batch systems do it: SIGTERM to everything, SIGKILL shortly after, while the commands refuse to end."""
    base = tmp_path / "ssd"
    base.mkdir()
    script = f'trap "" TERM; echo $$ >{tmp_path}/command$FANSTORE_RANK; while :; do sleep 0.1; done'
    job = start_job(prepared, 3, local=str(base), command=["sh", "-c", script])
    wait_until(lambda: len(list(tmp_path.glob("command*"))) == 3, "start of the commands", job.evidence)
    commands = [int(path.read_text()) for path in tmp_path.glob("command*")]
    for number in [*job.pids, *commands]:
        os.kill(number, signal.SIGTERM)
    job.wait_log("SIGTERM is passed on to the command")  # and now the daemons would wait for ten seconds
    for number in [job.process.pid, *job.supervisors, *job.pids, *commands]:
        os.kill(number, signal.SIGKILL)
    job.wait_end()
    wait_until(lambda: not job.processes(), "end of all", job.evidence)
    assert len(list(base.iterdir())) == 3, "what the kill has left"
    again = start_job(prepared, 3, "--stage-first", local=str(base), directory=job.directory)
    assert len(list(base.iterdir())) == 3, "only its own"
    end_at_used_places(again)
    assert list(base.iterdir()) == []


def end_at_used_places(job: Job) -> None:
    """Mount points that a crash has left were there before this job, so they stay; unless another rank was the first to
    clean up, and removed them."""
    job.end()
    for rank in range(job.size):
        wait_until(lambda rank=rank: find_mount(job.mount(rank)) is None, "unmount", job.evidence)  # type: ignore[misc]
        with contextlib.suppress(FileNotFoundError):
            job.mount(rank).rmdir()
    job.check_clean()
