"""How a job starts: one read of the metadata for all ranks, what goes where, and all mounts are up or none is."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from commands import mpirun
from conftest import fanstore_command
from jobs import LIMIT_S, Job, StartJob, needs_jobs, needs_strace
from load import Source, make_files
from mounting import prepare, wait_until

pytest_plugins = ["jobs"]
pytestmark = needs_jobs


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("start") / "source", 40)


@pytest.fixture(scope="module")
def prepared(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(source, tmp_path_factory.mktemp("prepared") / "d.fan", "--codec", "lz4", "--partitions", "8")


def check_all(job: Job, source: Path) -> None:
    contents = Source(source)
    for mount in job.mounts():
        contents.check(mount)


@needs_strace
def test_metadata_is_read_once(start_job: StartJob, prepared: Path, tmp_path: Path) -> None:
    """The opens of manifest and index by all processes of the job, and the looks at partitions, as the kernel sees."""
    trace = tmp_path / "trace"
    calls = "trace=open,openat,openat2,/stat"
    watch = ["strace", "-D", "-f", "-qq", "--seccomp-bpf", "-e", calls, "-A", "-o", str(trace)]
    job = start_job(prepared, 4, wrapper=watch)
    job.stop()
    looked_at = re.findall(r'stat\w*\([^"]*"([^"]*/part-[^"]*)"', trace.read_text())
    assert sorted(looked_at) == [str(prepared / f"part-{number:05d}.tar") for number in range(8)]
    # A call that another process interrupts in the trace has its result in a later line: only the names count.
    opened = re.findall(r'open\w*\([^"]*"([^"]*)"', trace.read_text())
    counts = {name: opened.count(str(prepared / name)) for name in ("manifest.json", "index.fsx")}
    assert counts == {"manifest.json": 1, "index.fsx": 1}
    assert opened.count("/dev/fuse") >= 4, "the daemons of all ranks were watched"


def test_start_line_and_nodes(start_job: StartJob, prepared: Path) -> None:
    job = start_job(prepared, 3, "--replicas", "2", "--stage-first", local=True)
    line = f"{prepared} is mounted on {job.mount(0)} (40 files, "
    wait_until(lambda: line in job.output(), "the start line, which mpirun passes on", job.evidence)
    assert job.output().count(line) == 1, "rank 0 speaks for all"
    assert "3 nodes, 8 of 8 partitions on local disks (16 copies, " in job.output()
    for rank in range(3):
        nodes = job.nodes(rank)
        assert [node["rank"] for node in nodes] == [0, 1, 2]
        assert {node["state"] for node in nodes} == {"up"}
        assert [node["pid"] for node in nodes] == job.pids
        assert (job.config(rank)["rank"], job.config(rank)["size"]) == (rank, 3)
    sizes = [node["local_bytes"] for node in job.nodes(1)]
    assert max(sizes) < 1.5 * min(sizes), f"balanced by bytes: {sizes}"
    for rank in range(3):
        (directory,) = job.local(rank).iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        assert sum(path.stat().st_size for path in directory.glob("part-*.tar")) == sizes[rank]
    job.stop()


def test_one_failing_rank_ends_all(start_job: StartJob, prepared: Path, tmp_path: Path) -> None:
    """Rank 2 cannot mount: something is in the way."""
    directory = tmp_path / "job"
    (directory / "m2").mkdir(parents=True)
    (directory / "m2" / "precious").write_text("mine")
    job = start_job(prepared, 4, "--stage-first", local=True, directory=directory, wait=False)
    assert job.wait_end() == 1
    errors = [line for line in job.output().splitlines() if "error" in line.lower()]
    assert len(errors) == 1, job.output()
    assert errors[0].startswith(
        f"fanstore-mount: error: the start failed on {os.uname().nodename.partition('.')[0]} (rank 2), "
        f"so no node is mounted: mount point {directory}/m2 is not empty "
    )
    assert (directory / "m2" / "precious").read_text() == "mine"
    (directory / "m2" / "precious").unlink()
    (directory / "m2").rmdir()
    job.announced.append("the start failed on .* so no node is mounted")
    job.check_clean()


def test_rank_0_cannot_read_the_dataset(start_job: StartJob, source: Path, tmp_path: Path) -> None:
    incomplete = prepare(source, tmp_path / "incomplete.fan", "--partitions", "3")
    (incomplete / "part-00002.tar").unlink()
    for path, sentence in (
        (tmp_path / "absent.fan", "the prepared dataset '.*absent.fan' does not exist"),
        (incomplete, f"partition file '{incomplete}/part-00002.tar' is missing; copy the dataset again"),
    ):
        job = start_job(path, 3, local=True, wait=False)
        assert job.wait_end() == 1
        errors = [line for line in job.output().splitlines() if "error" in line.lower()]
        assert len(errors) == 1, job.output()
        assert re.match(f"fanstore-mount: error: {sentence}", errors[0]), errors
        job.announced.append(sentence)
        job.check_clean()


def test_fewer_partitions_than_ranks(start_job: StartJob, source: Path, tmp_path: Path) -> None:
    small = prepare(source, tmp_path / "small.fan", "--partitions", "2")
    job = start_job(small, 4, "--replicas", "9", "--stage-first", local=True)
    assert all(node["partitions"]["local"] == [0, 1] for node in job.nodes(3)), "as many copies as there are nodes"
    job.stop()
    job = start_job(small, 4, "--stage-first", local=True)
    assert sorted(p for node in job.nodes(3) for p in node["partitions"]["local"]) == [0, 1]
    check_all(job, source)
    assert all(job.reads(rank, "shared") == 0 for rank in range(4))
    job.stop()


def test_capacity(start_job: StartJob, prepared: Path, source: Path) -> None:
    """Two of three copies' worth of room: the rest is read where it is."""
    sizes = [part["bytes"] for part in json.loads((prepared / "manifest.json").read_bytes())["partitions"]]
    room = sum(sizes) // 5
    job = start_job(
        prepared, 3, "--capacity", str(room), "--stage-first", local=True, announced=["do not fit on local disks"]
    )
    nodes = job.nodes(0)
    assert all(0 < node["local_bytes"] <= room for node in nodes), nodes
    kept = sorted(p for node in nodes for p in node["partitions"]["local"])
    assert len(kept) == len(set(kept)) < 8
    check_all(job, source)
    assert all(job.reads(rank, source) for rank in range(3) for source in ("local", "remote", "shared"))
    assert f", {8 - len(kept)} do not fit and are read where they are (" in job.output()
    job.stop()


def test_usage_error_is_said_once(prepared: Path, tmp_path: Path) -> None:
    for options, sentence in (
        ([f"{tmp_path}/m"], "several ranks share this machine: put {rank} into MOUNTPOINT"),
        ([f"{tmp_path}/m{{rank}}", "--background"], "--background cannot be used under it"),
    ):
        result = subprocess.run(
            [*mpirun(3), fanstore_command("mount"), str(prepared), *options],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert result.returncode == 2
        assert result.stderr.count("fanstore-mount: error: ") == 1
        assert sentence in result.stderr
    assert list(tmp_path.iterdir()) == []
