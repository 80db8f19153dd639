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


@pytest.mark.parametrize("script", ["setup", "bundle", "demo", "examples"])
def test_help_and_wrong_usage(script: str) -> None:
    shown = run(SCRIPTS / script, "--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"usage: scripts/{script} ")
    wrong = run(SCRIPTS / script, "--no-such-thing")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1 and "--no-such-thing" in wrong.stderr
    assert wrong.stdout == ""


def test_help_of_the_tests() -> None:
    shown = run(SCRIPTS / "test", "--help", CI="true")
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage: scripts/test ")
    assert all(f"\n  {option} " in shown.stdout for option in ("--fast", "--all"))


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


def test_setup_refuses_unknown_extras() -> None:
    result = run(SCRIPTS / "setup", "--extras", "mpi,mpy")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "'mpi,mpy' is not a comma-separated list of: mpi objects demo bench dev" in result.stderr


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


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With three tests of its own. Set-up, packages, lint and types have nothing to do; the rest of the run is real."""
    for name in ("MPICH", "FRAMEWORKS", "HUGE", "BUNDLE"):
        monkeypatch.delenv(f"FANSTORE_TEST_{name}", raising=False)  # of the run that we are in
    root = tmp_path / "clone"
    (root / "tests").mkdir(parents=True)
    for name in ("scripts/test", ".ci/run", "pyproject.toml", *(f"tests/{name}.py" for name in OF_A_RUN)):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    for program, text in {"ruff": "", "mypy": "", "python": f'exec "{sys.executable}" "$@"'}.items():
        executable(root / ".venv" / "bin" / program, text)
    executable(root / "scripts" / "setup", "")
    executable(root / "scripts" / "bundle", 'echo "bundle $*"')
    # In one piece: what is run meanwhile prints to the same terminal.
    (root / "tests" / "packages.py").write_text(
        "import os, sys\nos.write(1, b'packages %b\\n' % os.fsencode(' '.join(sys.argv[1:])))\n"
    )
    (root / "tests" / "test_core_small.py").write_text(SMALL_TESTS)
    return root


#: What scripts/test itself uses.
OF_A_RUN = ("conftest", "environments", "fast", "leftovers")
SMALL_TESTS = """
import os
import pytest

@pytest.mark.skipif("FANSTORE_TEST_MPICH" not in os.environ, reason="no MPICH")
@pytest.mark.parametrize("number", range(2))
def test_needs_mpich(number):
    print(*(os.environ[f"FANSTORE_TEST_{name}"] for name in ("MPICH", "FRAMEWORKS", "HUGE", "BUNDLE")))

def test_fine():
    pass
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_test_names_what_was_skipped(clone: Path) -> None:
    """Also if what some tests need could not be installed."""
    (clone / "tests" / "environments.py").write_text("import sys\nassert sys.argv[1:] == ['moto']\nsys.exit(1)\n")
    result = run(clone / "scripts" / "test", CI="")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "\n2 skipped, no MPICH:\n    tests/test_core_small.py::test_needs_mpich (2)\n" in result.stdout
    assert "\ntest: all is well after " in result.stdout


@pytest.mark.parametrize("way", ["--all", "CI=true", ".ci/run"])
def test_test_leaves_nothing_out_when_asked(clone: Path, way: str) -> None:
    (clone / "tests" / "environments.py").write_text("import sys\nprint(*sys.argv[1:], sep='-python\\n')\n")
    script = clone / (".ci/run" if way == ".ci/run" else "scripts/test")
    options = ["--all"] if way == "--all" else []
    result = run(script, *options, "-rP", CI="true" if way == "CI=true" else "")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "packages --required\n" in result.stdout
    bundle = re.search(r"^bundle --output (\S+) --python \S+/python$", result.stdout, re.MULTILINE)
    assert bundle is not None
    assert f"mpich-python frameworks-python 1 {bundle[1]}\n" in result.stdout
    assert "\nno test was skipped\n" in result.stdout


def test_fast_runs_a_part_and_installs_nothing(clone: Path) -> None:
    (clone / "tests" / "test_slow.py").write_text("def test_slow():\n    raise AssertionError\n")
    result = run(clone / "scripts" / "test", "--fast", CI="true")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed, 2 skipped in " in result.stdout and "packages" not in result.stdout


def test_environment_that_cannot_be_made_is_a_failure(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run(clone / "scripts" / "test", CI="true", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert result.returncode == 1
    assert "environments: error: environment 'mpich' cannot be kept in " in result.stderr
    assert result.stderr.endswith("test: FAILED\n") and "test: tests" not in result.stdout


def test_a_failure_does_not_wait_for_an_environment(clone: Path) -> None:
    (clone / "tests" / "environments.py").write_text("import time\ntime.sleep(3600)\n")
    executable(clone / ".venv" / "bin" / "ruff", "exit 1")
    result = run(clone / "scripts" / "test", "--all")
    assert result.returncode == 1
    assert result.stderr == "test: FAILED\n", "and nothing is left behind"


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
    assert result.stdout.count("\n") == 1, "nothing is built or installed, and what --dev has added stays"


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
    work, report = tmp_path / "work", tmp_path / "report.html"
    work.mkdir()
    result = run(SCRIPTS / "demo", "--images", "480", "--report", report, timeout=150, TMPDIR=str(work))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Same losses" in result.stdout
    assert "kill -9" in result.stdout
    assert "<html" in report.read_text()
    assert list(work.iterdir()) == []
    assert leftovers.mounts_below(tmp_path) == []


@needs_setup
@pytest.mark.parametrize(("number", "epochs"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_demo_interrupted_cleans_up(tmp_path: Path, number: signal.Signals, epochs: int) -> None:
    """Interrupted while it reads from the shared file system, and from FanStore.

    As Ctrl-C and a batch system do it, the whole group gets the signal.
    """
    work = tmp_path / "work"
    work.mkdir()
    with subprocess.Popen(
        [SCRIPTS / "demo", "--images", "240", "--report", tmp_path / "report.html"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(work)},
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        output = []
        for line in demo.stdout:
            output.append(line)
            epochs -= line.startswith("node 0, epoch 1")
            if not epochs:
                os.killpg(demo.pid, number)
                break
        output.append(demo.stdout.read())
        assert demo.wait(timeout=60) == 128 + number, "".join(output)
    assert list(work.iterdir()) == []
    assert leftovers.mounts_below(tmp_path) == []
