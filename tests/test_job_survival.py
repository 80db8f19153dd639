"""What happens to the others when one daemon of a job dies, stops, or has a bad disk: real signals, real files.

Every read under load is compared with its source. The memory cache is kept small, so that reads reach the other nodes.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from jobs import PEER_TIMEOUT_S, ULFM, StartJob, needs_jobs, needs_strace, once_per_rank
from load import Source, load, make_files
from mounting import Mount, needs_root, prepare

pytest_plugins = ["jobs", "mounting"]
pytestmark = needs_jobs

SMALL_CACHE = ("--cache", "1MiB", "--stage-first")
DIED = r"rank 1 on \S+ has died"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("survival") / "source", 40)


@pytest.fixture(scope="module")
def source(root: Path) -> Source:
    return Source(root)


@pytest.fixture(scope="module")
def prepared(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("prepared")
    return {
        codec: prepare(root, base / f"{codec}.fan", "--codec", codec, "--partitions", "8") for codec in ("none", "lz4")
    }


def files_of(partitions: list[int], mount: Path, source: Source) -> list[str]:
    """Names of the files that are in these partitions, as the mount tells it."""
    wanted = {f"part-{number:05d}.tar".encode() for number in partitions}
    return [name for name in source.contents if os.getxattr(mount / name, "user.fanstore.partition") in wanted]


# --- death ---


@pytest.mark.parametrize(("codec", "replicas"), [("none", 2), ("lz4", 1)])
def test_daemon_is_killed_under_load(
    start_job: StartJob, prepared: dict[str, Path], source: Source, codec: str, replicas: int
) -> None:
    job = start_job(prepared[codec], 4, "--replicas", str(replicas), *SMALL_CACHE, local=True, launcher=ULFM)
    survivors = [0, 2, 3]
    with load(source, [job.mount(rank) for rank in survivors]) as reading:
        reading.wait_reads(20)
        assert any(job.peer(rank, 1)["fetches"] for rank in survivors), "what it has is used"
        job.announced.append(DIED)
        job.kill(1)
        job.wait_log(DIED)
        reading.wait_reads(20)
        reading.reset()
        before = [job.peer(rank, 1) for rank in survivors]
        reading.wait_reads(60)
        assert [job.peer(rank, 1) for rank in survivors] == before, "nobody asks the dead any more"
        assert reading.slowest_s < PEER_TIMEOUT_S / 2, "and nobody waits for them"
    shared = [job.reads(rank, "shared") for rank in survivors]
    assert all(shared) if replicas == 1 else not any(shared)
    once_per_rank(job, DIED, survivors)
    for rank in survivors:
        assert [node["state"] for node in job.nodes(rank)] == ["up", "lost", "up", "up"]
        assert job.nodes(rank)[rank]["peers_lost"] == [1]
    job.stop()


def test_death_of_rank_0(start_job: StartJob, prepared: dict[str, Path], source: Source) -> None:
    """Rank 0 is special at the start only."""
    job = start_job(prepared["none"], 3, "--replicas", "2", *SMALL_CACHE, local=True, launcher=ULFM)
    job.announced.append(r"rank 0 on \S+ has died")
    with load(source, [job.mount(1), job.mount(2)]) as reading:
        reading.wait_reads(10)
        job.kill(0)
        job.wait_log(r"rank 0 on \S+ has died")
        reading.wait_reads(20)
    job.stop()


def test_death_with_a_command(start_job: StartJob, prepared: dict[str, Path], root: Path, tmp_path: Path) -> None:
    """The commands of the others go on to their end; the job's exit code tells that not all went well."""
    script = (
        f'while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; diff -r "$0" "$FANSTORE_MOUNT" && '
        f"touch {tmp_path}/right$FANSTORE_RANK"
    )
    job = start_job(prepared["lz4"], 3, "--stage-first", local=True, launcher=ULFM, command=["sh", "-c", script, root])
    job.announced.append(DIED)
    job.kill(1)
    job.wait_log(DIED)
    (tmp_path / "go").touch()
    assert job.wait_end() != 0
    assert sorted(path.name for path in tmp_path.glob("right*")) == ["right0", "right2"]
    job.check_clean()


@needs_strace
def test_death_without_ulfm_ends_all(start_job: StartJob, prepared: dict[str, Path]) -> None:
    job = start_job(prepared["none"], 3, "--stage-first", local=True, merciful=2)
    job.kill(1)
    assert job.wait_end() != 0
    job.announced.append("rank 1 on .* does not answer; .* 'mpirun --with-ft ulfm'")
    job.check_clean()
    assert "mpirun --with-ft ulfm" in job.output(), "said where the user looks"


# --- silence ---


def test_stopped_and_continued(start_job: StartJob, prepared: dict[str, Path], source: Source) -> None:
    quiet = r"rank 2 \(\S+\) did not answer within 4 s"  # which is enough for the others, however busy the machine
    job = start_job(
        prepared["none"], 3, *SMALL_CACHE, "--peer-timeout", "4", local=True, launcher=ULFM, announced=[quiet]
    )
    others = [0, 1]
    with load(source, [job.mount(rank) for rank in others]) as reading:
        reading.wait_reads(20)
        job.kill(2, signal.SIGSTOP)
        job.wait_log(quiet, ranks=others)
        reading.wait_reads(10)
        before = [job.peer(rank, 2) for rank in others]
        assert all(peer["timeouts"] for peer in before)
        assert all(peer["state"] == "silent" for peer in before)
        reading.wait_reads(60)
        after = [job.peer(rank, 2)["timeouts"] for rank in others]
        assert after == [peer["timeouts"] for peer in before], "nobody waits for it any more"
        assert all(job.reads(rank, "shared") for rank in others)
        assert [node["state"] for node in job.nodes(0, silent=[2])] == ["up", "up", "silent"]
        job.kill(2, signal.SIGCONT)
        job.wait_log(r"rank 2 \(\S+\) answers again", ranks=others)
        fetched = [job.peer(rank, 2)["fetches"] for rank in others]
        reading.wait_reads(40)
        assert all(job.peer(rank, 2)["fetches"] > count for rank, count in zip(others, fetched, strict=True))
        assert [node["state"] for node in job.nodes(0)] == ["up"] * 3
    once_per_rank(job, quiet, others)
    source.check(job.mount(2))
    assert any(job.statistics(rank)["peers"]["transport"]["late_answers"] for rank in others)
    job.stop()


# --- bad disks ---


def test_damaged_copy(start_job: StartJob, prepared: dict[str, Path], source: Source) -> None:
    """One byte of each file in one node's copy of a partition is wrong: the others notice and read elsewhere."""
    job = start_job(
        prepared["lz4"],
        3,
        *SMALL_CACHE,
        local=True,
        announced=[r"rank \d \(\S+\) gave damaged bytes of partition \d+"],
    )
    (directory,) = job.local(1).iterdir()
    copy = sorted(directory.glob("part-*.tar"))[0]
    partition = int(copy.stem.removeprefix("part-"))
    names = files_of([partition], job.mount(0), source)
    assert names
    content = copy.read_bytes()
    with open(copy, "r+b") as file:  # in place: the daemon has it mapped
        file.write(bytes(byte ^ (offset % 512 == 77) for offset, byte in enumerate(content)))
    for rank in (0, 2):
        source.check(job.mount(rank))
        assert job.peer(rank, 1)["damaged"] >= 1
        assert job.reads(rank, "shared") >= 1
        assert len(re.findall("gave damaged bytes", job.log_text(rank))) == 1, "one line per peer and partition"
    job.stop()


@needs_root
def test_full_local_disk(start_job: StartJob, prepared: dict[str, Path], source: Source, tmp_path: Path) -> None:
    """Rank 1's disk has room, says the kernel, but no inode for a second copy: ENOSPC in the middle of staging."""
    small = tmp_path / "job" / "ssd1"
    small.mkdir(parents=True)
    # One each is for the root, the job's directory, its lock, where it is mounted, the control socket, the file for
    # orders, and one copy.
    options = "size=300m,nr_inodes=7"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", small], check=True, timeout=60)
    try:
        full = r"cannot be copied to .*/ssd1/.*, it is read where it is: No space left on device"
        job = start_job(prepared["none"], 3, "--stage-first", local=True, directory=tmp_path / "job", announced=[full])
        nodes = job.nodes(0)
        assert len(nodes[1]["partitions"]["local"]) == 1
        missing = [p for p in range(8) if not any(p in node["partitions"]["local"] for node in nodes)]
        warnings = re.findall(full, job.log_text(1))
        assert 1 <= len(warnings) <= len(missing), "one for each at most"
        for mount in job.mounts():
            source.check(mount)
        assert all(job.reads(rank, "shared") for rank in range(3))
        job.stop()
    finally:
        subprocess.run(["umount", "-l", small], check=True, timeout=60)


@pytest.fixture
def unreadable(prepared: dict[str, Path], tmp_path: Path, mount: Mount) -> Path:
    """The dataset with one partition that is there, as the kernel remembers, and cannot be read: its server is dead."""
    copy, held = tmp_path / "unreadable.fan", tmp_path / "held"
    copy.mkdir()
    held.mkdir()
    for path in prepared["none"].glob("[!.]*"):
        os.link(path, copy / path.name)
    os.link(copy / "part-00003.tar", held / "part-00003.tar")
    os.rename(copy / "part-00003.tar", copy / "hidden")
    server = mount(prepare(held, tmp_path / "held.fan"))
    (copy / "part-00003.tar").symlink_to(server.path / "part-00003.tar")
    (copy / "part-00003.tar").stat()
    server.process.kill()
    server.wait_end()
    return copy


def test_unreadable_partition_while_staging(start_job: StartJob, unreadable: Path, source: Source) -> None:
    job = start_job(unreadable, 3, "--stage-first", local=True, announced=["part-00003.tar cannot be copied to "])
    warnings = [line for rank in range(3) for line in job.log_text(rank).splitlines() if "cannot be copied" in line]
    assert len(warnings) == 1
    os.replace(unreadable / "hidden", unreadable / "part-00003.tar")  # the file server is back
    for mount in job.mounts():
        source.check(mount)
    assert all(job.reads(rank, "shared") for rank in range(3))
    job.stop()
