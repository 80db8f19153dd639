"""fanstore-prep under mpirun: the ranks share the work, and the dataset is the same, byte for byte, as from one alone.

An error on any rank is one sentence and the end of all; nothing waits for a rank that has given up.
"""

import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import oddities
import pytest
from commands import BIN, mpirun, run_fanstore, run_inside
from materialise import Prepared
from oddities import IS_ROOT, incompressible

pytestmark = pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="no MPI in this environment")

MIB = 1 << 20


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = oddities.build(tmp_path_factory.mktemp("mpi") / "tree")
    yield root
    oddities.remove_tree(root)


def same_dataset(a: Path, b: Path) -> bool:
    """Index and partitions are the same bytes; the manifests differ in their time only."""
    names = sorted(os.listdir(a))
    if names != sorted(os.listdir(b)):
        return False
    files = set(names) - {"manifest.json", ".users"}
    same_files = all((a / name).read_bytes() == (b / name).read_bytes() for name in files)
    drop = {"created": 0, "checksum": 0}
    return same_files and Prepared(a).manifest | drop == Prepared(b).manifest | drop


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_the_same_dataset_as_alone(tree: Path, ranks: int, codec: str, tmp_path: Path) -> None:
    options = ("--codec", codec, "--partition-size", "8MiB")
    assert run_inside("prep", tree, tmp_path / "alone.fan", *options).returncode == 0
    result = run_fanstore("prep", tree, tmp_path / "together.fan", *options, prefix=mpirun(ranks))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("prepared in") == 1, "one summary, not one per rank"
    assert same_dataset(tmp_path / "alone.fan", tmp_path / "together.fan")
    assert sorted(os.listdir(tmp_path)) == ["alone.fan", "together.fan"]


def test_more_ranks_than_partitions(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(b"x")
    result = run_fanstore("prep", tmp_path / "source", tmp_path / "out.fan", prefix=mpirun(4))
    assert result.returncode == 0, result.stderr
    assert Prepared(tmp_path / "out.fan").paths() == {b"file"}


def test_tar_sources_and_index_only(tmp_path: Path) -> None:
    (tmp_path / "member").write_bytes(incompressible(300_000))
    paths = []
    for number in range(3):
        paths.append(tmp_path / f"{number}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for member in range(5):
                tar.add(tmp_path / "member", f"{number}/{member}")
    for options in (("--index-only",), ("--partitions", "4")):
        alone, together = tmp_path / "alone.fan", tmp_path / "together.fan"
        assert run_inside("prep", *paths, alone, *options).returncode == 0
        result = run_fanstore("prep", *paths, together, *options, prefix=mpirun(2))
        assert result.returncode == 0, result.stderr
        assert same_dataset(alone, together)
        for path in (alone, together):
            shutil.rmtree(path)


def assert_one_error_under_mpirun(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode not in (0, None)
    errors = [line for line in result.stderr.splitlines() if "fanstore-prep: error: " in line]
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return errors[0]


def test_an_existing_out(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "out.fan").mkdir()
    result = run_fanstore("prep", tmp_path / "source", tmp_path / "out.fan", prefix=mpirun(3), limit_s=60)
    assert "--force" in assert_one_error_under_mpirun(result)


def test_a_missing_source_and_wrong_usage(tmp_path: Path) -> None:
    result = run_fanstore("prep", tmp_path / "nowhere", tmp_path / "out.fan", prefix=mpirun(2), limit_s=60)
    assert "nowhere" in assert_one_error_under_mpirun(result)
    (tmp_path / "source").mkdir()
    result = run_fanstore(
        "prep", tmp_path / "source", tmp_path / "out.fan", "--partitions", "0", prefix=mpirun(2), limit_s=60
    )
    assert result.returncode not in (0, None)
    assert "Traceback" not in result.stderr
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.skipif(not IS_ROOT, reason="needs root to mount a small disk")
def test_a_full_disk(tmp_path: Path) -> None:
    disk, source = tmp_path / "disk", tmp_path / "source"
    disk.mkdir()
    source.mkdir()
    for number in range(20):
        (source / f"{number}").write_bytes(incompressible(MIB, number))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True, timeout=60)
    try:
        result = run_fanstore("prep", source, disk / "out.fan", "--partitions", "6", prefix=mpirun(3), limit_s=60)
        left = os.listdir(disk)
    finally:
        subprocess.run(["umount", disk], check=True, timeout=60)
    assert "full" in assert_one_error_under_mpirun(result)
    assert left == []


@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_interrupted(whom: str, tmp_path: Path) -> None:
    """Ctrl-C reaches the launcher, which passes it on; or a batch system signals one process only."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(4):
        with open(source / f"giant-{number}", "wb") as file:
            file.truncate(100 << 30)
    command = [*mpirun(2), str(BIN / "fanstore-prep"), str(source), str(tmp_path / "out.fan"), "--partitions", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob(".out.fan.partial-*/part-*"))) < 4:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        target = process.pid if whom == "launcher" else _ranks(process.pid)[0]
        os.kill(target, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert "Traceback" not in errors
    if whom == "rank":  # mpirun ends its ranks in its own way
        assert f"fanstore-prep: interrupted by SIGINT (rank 0 on {os.uname().nodename})" in errors
    assert os.listdir(tmp_path) == ["source"], errors


def _ranks(launcher: int) -> list[int]:
    """Processes of fanstore-prep that the launcher has started, lowest rank first."""
    found = {}
    for process in Path("/proc").iterdir():
        try:
            status = (process / "stat").read_text().rsplit(")", 1)[1].split()
            environment = (process / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if int(status[1]) == launcher:
            rank = next((v.split(b"=")[1] for v in environment if v.startswith(b"OMPI_COMM_WORLD_RANK=")), None)
            if rank is not None:
                found[int(rank)] = int(process.name)
    assert found
    return [found[rank] for rank in sorted(found)]
