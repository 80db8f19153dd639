"""The suite's own safety nets (conftest.py, leftovers.py) must catch what they are there for."""

import fnmatch
import os
import subprocess
import sys
import uuid
from pathlib import Path

import fast
import leftovers
import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parent / "conftest.py"


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A session of its own, with the real conftest and what it imports."""
    # The grace is there for daemons; what is forgotten below never ends by itself, so do not wait for it.
    pytester.makeconftest(CONFTEST.read_text().replace("GRACE_S = 20.0", "GRACE_S = 0.2"))
    pytester.makepyfile(**{name: CONFTEST.with_name(f"{name}.py").read_text() for name in ("leftovers", "fast")})
    monkeypatch.delenv(leftovers.MARK_VARIABLE, raising=False)
    monkeypatch.setenv("TMPDIR", str(pytester.mkdir("temporary")))
    return pytester


def run(inner: pytest.Pytester, source: str) -> pytest.RunResult:
    inner.makepyfile(test_inner=source)
    return inner.runpytest_subprocess("-p", "no:cacheprovider", "--basetemp", str(inner.path / "base"))


def test_unannounced_warning_fails(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
        import logging
        import pytest

        def test_silent():
            logging.getLogger("fanstore.core").info("fine")
            logging.getLogger("elsewhere").warning("not ours")

        def test_loud():
            logging.getLogger("fanstore.core").warning("the disk smells")

        def test_announced(expect_warnings):
            expect_warnings("disk .* smells")
            logging.getLogger("fanstore.core").error("the disk really smells")

        def test_announced_in_vain(expect_warnings):
            expect_warnings("never said")

        @pytest.fixture
        def noisy_end():
            yield
            logging.getLogger("fanstore.fuse").warning("late")

        def test_loud_teardown(noisy_end):
            pass
        """,
    )
    result.assert_outcomes(passed=3, failed=2, errors=1)
    result.stdout.fnmatch_lines_random(
        ["WARNING fanstore.core: the disk smells", "*never logged: never said", "WARNING fanstore.fuse: late"]
    )


def test_forgotten_process_fails_the_session(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
        import subprocess

        def test_forgets():
            with open("pid", "w") as file:
                file.write(str(subprocess.Popen(["sleep", "30"], start_new_session=True).pid))
        """,
    )
    number = int((inner.path / "pid").read_text())
    os.kill(number, 15)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"left behind by the tests: process {number}: sleep 30"])


def test_forgotten_job_directory_fails_the_session(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
        import os, tempfile

        def test_forgets():
            os.mkdir(os.path.join(tempfile.gettempdir(), "fanstore-0-77"))
        """,
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["left behind by the tests: job directory */fanstore-0-77"])


def test_mounts_below(tmp_path: Path) -> None:
    assert leftovers.mounts_below(tmp_path) == []
    assert any(line.startswith("mount /proc ") for line in leftovers.mounts_below(Path("/")))


def test_process_found_by_command_line_without_mark(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()", f"{tmp_path}/x"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as sleeper:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()  # for an instant after exec a process has no command line in /proc
        try:
            found = leftovers.processes_of(None, tmp_path)
            assert [line.split(":")[0] for line in found] == [f"process {sleeper.pid}"]
            assert leftovers.processes_of(uuid.uuid4().hex, tmp_path / "other") == []
        finally:
            sleeper.communicate(b"\n")


def test_every_pattern_of_the_fast_tests_finds_some() -> None:
    """Otherwise a test that was renamed would leave the inner loop without a word."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(CONFTEST.parent)]
    collected = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=CONFTEST.parent.parent)
    names = [line.removeprefix("tests/") for line in collected.stdout.splitlines() if "::" in line]
    assert len(names) > 1_000, collected.stdout + collected.stderr
    assert [pattern for pattern in (*fast.FAST, *fast.SLOW) if not fnmatch.filter(names, pattern)] == []
