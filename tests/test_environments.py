"""environments.py: an environment is made once for all runs, whole or not at all, and a failure is one."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import environments
import pytest
from environments import Environment, MakeError, ensure, stamp

MAKE_MPICH = [sys.executable, environments.__file__, "mpich"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Not that of whoever runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return environments.cache()


@pytest.fixture
def tiny(tmp_path: Path) -> Environment:
    """One package, which needs no index."""
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny.py", "ANSWER = 42\n")
        file.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        file.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("tiny-1.0.dist-info/RECORD", "")
    return Environment("tiny", (str(wheel),), 1)


def answer(python: Path) -> str:
    return subprocess.run([python, "-c", "import tiny; print(tiny.ANSWER)"], capture_output=True, text=True).stdout


def test_made_once(tiny: Environment) -> None:
    python = ensure(tiny)
    assert answer(python) == "42\n"
    made_ns = tiny.directory().joinpath("pyvenv.cfg").stat().st_mtime_ns
    assert ensure(tiny) == python
    assert tiny.directory().joinpath("pyvenv.cfg").stat().st_mtime_ns == made_ns


def test_other_requirements_are_another_environment(tiny: Environment) -> None:
    assert Environment("tiny", (*tiny.requirements, "numpy"), 1).directory() != tiny.directory()


@pytest.mark.parametrize("damage", ["no stamp", "no python"])
def test_half_of_one_is_made_anew(tiny: Environment, damage: str) -> None:
    """A run was killed while it installed, or the Python below was removed."""
    python = ensure(tiny)
    (tiny.directory() / "junk").touch()
    (stamp(tiny.directory()) if damage == "no stamp" else python).unlink()
    assert answer(ensure(tiny)) == "42\n"
    assert not (tiny.directory() / "junk").exists()


def test_two_runs_at_once_make_it_once(tiny: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    pythons: list[Path] = []
    threads = [threading.Thread(target=lambda: pythons.append(ensure(tiny))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer(python) for python in pythons] == ["42\n", "42\n"]
    assert capsys.readouterr().err.count("environments: making ") == 1


def test_what_cannot_be_installed_is_a_failure_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(MakeError, match=r"absent\.whl(.|\n)*\nenvironment 'broken' could not be made: "):
        ensure(Environment("broken", (str(tmp_path / "absent.whl"),), 1))
    assert os.listdir(cache) == ["lock"]


def test_a_full_disk_is_seen_before(tiny: Environment, cache: Path) -> None:
    with pytest.raises(MakeError, match=r"needs 1000000000\.0 GB in .* make room, or set XDG_CACHE_HOME"):
        ensure(Environment(tiny.name, tiny.requirements, 10**18))
    assert os.listdir(cache) == ["lock"]


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    done = subprocess.run(MAKE_MPICH, env=variables, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("environments: error: environment 'mpich' cannot be kept in ")
    assert done.stderr.count("\n") == 1


def test_ended_in_the_middle_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    """As scripts/test ends it when lint has failed: pip is at an index that never answers."""
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as silent, open(log, "wb") as output:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        variables |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/"}
        variables |= {"PIP_DEFAULT_TIMEOUT": "3600"}
        maker = subprocess.Popen(MAKE_MPICH, env=variables, stdout=output, stderr=output)
        try:
            silent.settimeout(60)
            connection, _ = silent.accept()
            maker.terminate()
            assert maker.wait(60) == 128 + signal.SIGTERM
        finally:
            maker.kill()
            maker.wait()
        with connection:
            connection.settimeout(60)
            while connection.recv(1 << 16):
                pass  # until pip, too, has ended and its end of the connection is closed
    assert os.listdir(cache) == ["lock"], log.read_text()


def test_what_nobody_uses_is_removed(tiny: Environment, cache: Path) -> None:
    old, recent = cache / "tiny-old", cache / "tiny-recent"
    for directory in (old, recent):
        directory.mkdir(parents=True)
        stamp(directory).touch()
    long_ago_s = time.time() - environments.UNUSED_S - 60
    os.utime(stamp(old), (long_ago_s, long_ago_s))
    ensure(tiny)
    assert not old.exists() and recent.exists()
