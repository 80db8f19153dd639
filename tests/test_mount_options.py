"""The command lines: what is refused and how, what --help teaches. Nothing is mounted here."""

from pathlib import Path

import pytest
from mounting import command

pytest_plugins = ["mounting"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--replicas", "2"], "--replicas needs --local"),
        (["--capacity", "lots", "--local", "/tmp"], "'lots' is not a size"),
        (["--launch", "no-such-mpirun -n 2"], "the launcher of --launch 'no-such-mpirun -n 2' was not found"),
        (["--replicas", "0"], "--replicas must be at least 1"),
        (["--fsync", "local"], "--fsync is about --output, which is not given"),
        (["--cache", "much"], "'much' is not a size"),
        (["--background", "--", "true"], "--background returns at once"),
        (["--"], "there is no COMMAND behind --"),
        (["--log", "/no/such/directory/log"], "cannot write the log /no/such/directory/log"),
    ],
)
def test_refused(tmp_path: Path, options: list[str], sentence: str) -> None:
    result = command("mount", tmp_path / "d.fan", tmp_path / "m", *options)
    assert result.returncode == 2
    assert result.stderr.startswith(f"fanstore-mount: error: {sentence}")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    "environment",
    [{"OMPI_COMM_WORLD_SIZE": "4"}, {"PMI_SIZE": "2"}, {"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "3"}],
)
def test_background_under_a_launcher_is_refused(tmp_path: Path, environment: dict[str, str]) -> None:
    result = command("mount", tmp_path / "d.fan", tmp_path / "m", "--background", **environment)
    assert result.returncode == 2
    assert "--background --launch 'mpirun -n N'" in result.stderr


@pytest.mark.parametrize(
    "environment",
    [{"OMPI_COMM_WORLD_SIZE": "1"}, {"SLURM_NTASKS": "8"}, {"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}],
)
def test_one_rank_is_not_refused(tmp_path: Path, environment: dict[str, str]) -> None:
    """It comes as far as looking for the dataset."""
    options = ["--engine", "python", "--replicas", "1", "--foreground"]
    result = command("mount", tmp_path / "d.fan", tmp_path / "m", *options, **environment)
    assert result.returncode == 1
    assert "d.fan' does not exist; make one with fanstore-prep" in result.stderr or "/dev/fuse" in result.stderr


def test_local_inside_the_mount_point(tmp_path: Path) -> None:
    result = command("mount", tmp_path / "d.fan", tmp_path / "m", "--local", tmp_path / "m/ssd")
    assert result.returncode == 2
    assert "lies inside the mount point" in result.stderr
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("name", ["mount", "umount", "stat"])
def test_help_teaches(name: str) -> None:
    result = command(name, "--help")
    assert result.returncode == 0
    for word in ("examples:", f"fanstore-{name} /", "exit codes:"):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120


@pytest.mark.parametrize("name", ["mount", "umount", "stat"])
def test_wrong_usage(name: str) -> None:
    result = command(name, "--no-such-option", "x")
    assert result.returncode == 2
    assert result.stderr == f"fanstore-{name}: error: there is no option --no-such-option; see fanstore-{name} --help\n"
