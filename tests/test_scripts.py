"""The commands of the README: scripts/setup, scripts/test, scripts/demo, and the training loop that the demo runs."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import leftovers
import pytest
from conftest import fanstore_command

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
SHELL_SCRIPTS = [*(SCRIPTS / name for name in ("setup", "test", "demo", "examples")), ROOT / ".ci" / "run"]

#: Programs that scripts/setup itself uses; a machine that has only these lacks everything that FanStore needs.
COREUTILS = ("bash", "cat", "dirname", "env", "find", "flock", "mktemp", "rm", "sha256sum", "sort", "tail", "xargs")


def run(*command: str | Path, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=os.environ | environment, cwd="/"
    )


def is_set_up() -> bool:
    """Whether .venv belongs to this clone as it is; otherwise scripts/setup would build for a minute and need PyPI."""
    return (ROOT / ".venv" / "fanstore-setup.stamp").exists() and Path(sys.prefix) == ROOT / ".venv"


needs_setup = pytest.mark.skipif(not is_set_up(), reason="runs under scripts/test, where the clone is set up")


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_script_is_executable_and_parses(script: Path) -> None:
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n#"), "begins with what it is"
    assert "\nset -euo pipefail\n" in text
    assert run("bash", "-n", script).returncode == 0
    if shutil.which("shellcheck"):
        checked = run("shellcheck", script)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("script", ["setup", "demo", "examples"])
def test_help_and_wrong_usage(script: str) -> None:
    shown = run(SCRIPTS / script, "--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"usage: scripts/{script} ")
    wrong = run(SCRIPTS / script, "--no-such-thing")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1 and "--no-such-thing" in wrong.stderr
    assert wrong.stdout == ""


def test_setup_refuses_what_is_no_python() -> None:
    result = run(SCRIPTS / "setup", "--python", "/bin/true")
    assert result.returncode == 1
    assert result.stderr == "setup: error: '/bin/true' is not a Python that runs here\n"


def test_setup_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\ncat >/dev/null\necho /usr/bin/python3.9 3.9 old\n")
    old.chmod(0o755)
    result = run(SCRIPTS / "setup", "--python", str(old))
    assert result.returncode == 1
    assert "is Python 3.9; FanStore needs 3.11 or newer" in result.stderr


def test_setup_does_not_overwrite_a_directory(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    result = run(SCRIPTS / "setup", "--venv", str(tmp_path), "--python", sys.executable)
    assert result.returncode == 1
    assert "is not a virtual environment" in result.stderr
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_setup_names_missing_packages_when_it_may_not_install(tmp_path: Path) -> None:
    """An ordinary user on a bare machine is told what to ask for, package by package."""
    for name in COREUTILS:
        program = shutil.which(name)
        assert program is not None
        (tmp_path / name).symlink_to(program)
    command: list[str | Path] = ["bash", SCRIPTS / "setup"]
    result = run(*command, PATH=str(tmp_path))
    assert result.returncode == 1
    assert "may not install packages" in result.stderr
    for package in ("fuse3", "gcc", "pkg-config", "lz4"):
        assert re.search(rf"^  {package} +\w", result.stderr, re.MULTILINE), result.stderr
    assert re.search(r"^Have an administrator run:  apt-get install .*\bfuse3\b", result.stderr, re.MULTILINE)
    assert "environment modules" in result.stderr


def section(document: str, title: str) -> str:
    text = (ROOT / document).read_text()
    match = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"{document} has no section '{title}'"
    return match[1]


@pytest.mark.parametrize("command", ["prep", "mount", "umount", "stat", "verify", "doctor"])
def test_reference_has_all_options_and_no_others(command: str) -> None:
    shown = run(fanstore_command(command), "--help", COLUMNS="200").stdout
    existing = set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", shown, re.MULTILINE)) - {"--help", "--version"}
    described = section("docs/commands.md", f"fanstore-{command}")
    # What is refused in this version stands among its limits; what is the default anyway needs no word.
    elsewhere = section("README.md", "Limits of this version")
    undocumented = {option for option in existing - {"--foreground"} if option not in described + elsewhere}
    assert not undocumented
    assert set(re.findall(r"`(--[a-z-]+)", described)) <= existing


@needs_setup
def test_second_setup_takes_a_moment() -> None:
    result = run(SCRIPTS / "setup")
    assert result.returncode == 0, result.stderr
    assert "is up to date" in result.stdout
    assert result.stdout.count("\n") == 1, "nothing is built or installed"


def test_training_loop_knows_nothing_of_us() -> None:
    assert "fanstore" not in (SCRIPTS / "demo_train.py").read_text().lower()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "images"
    result = run(sys.executable, SCRIPTS / "demo_images.py", directory, "--images", "120", "--classes", "4")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("120 images, ")
    return directory


def test_demo_images_look_like_photographs(images: Path) -> None:
    files = sorted(images.rglob("*.JPEG"))
    assert len(files) == 120
    assert {path.parent.parent.name for path in files} == {"train", "val"}
    assert 50_000 < sum(path.stat().st_size for path in files) / len(files) < 150_000


def test_training_is_repeatable_and_learns(images: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(images, copy)
    outputs = [run(sys.executable, SCRIPTS / "demo_train.py", place).stdout for place in (images, copy)]
    losses = [re.findall(r"loss (\d+\.\d+)", output) for output in outputs]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert float(losses[0][-1]) < float(losses[0][0])


@needs_setup
def test_demo_runs_and_cleans_up(tmp_path: Path) -> None:
    result = run(SCRIPTS / "demo", "--images", "60", timeout=100, TMPDIR=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Same loss" in result.stdout
    assert list(tmp_path.iterdir()) == []
    assert leftovers.mounts_below(tmp_path) == []


@needs_setup
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_interrupted_cleans_up(tmp_path: Path, number: signal.Signals) -> None:
    """Interrupted while it is mounted, as Ctrl-C and a batch system do it: the whole group gets the signal."""
    with subprocess.Popen(
        [SCRIPTS / "demo", "--images", "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        output = []
        for line in demo.stdout:
            output.append(line)
            if line.startswith("epoch 1"):
                os.killpg(demo.pid, number)
                break
        output.append(demo.stdout.read())
        assert demo.wait(timeout=60) == 128 + number, "".join(output)
    assert list(tmp_path.iterdir()) == []
    assert leftovers.mounts_below(tmp_path) == []
