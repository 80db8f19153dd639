"""fanstore.mount: a mount for as long as a program wants it, and nothing left however that program ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import environments
import pytest
from commands import mpirun
from mounting import LIMIT_S, needs_fuse, opened, prepare, wait_until

import fanstore
from fanstore.cli.fanstore import parsers
from fanstore.client.mounted import _SENSELESS, MountedJob, Options
from fanstore.mounttable import find_mount

pytestmark = needs_fuse
HERE = Path(__file__).parent

#: Mounts, writes an output, says where, and waits.
PROGRAM = """
import os, sys, fanstore
job = fanstore.mount(sys.argv[1], output=sys.argv[2])
(job.path / "written").write_text("an output")
if sys.argv[3] == "fork" and os.fork() == 0:
    assert (job.path / "file").read_text() == "content"
    job.close()  # is not its own
    sys.stdin.readline()
    os._exit(0)
print(job.path, flush=True)
sys.stdin.readline()
if sys.argv[3] == "raise":
    raise SystemExit(3)
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dataset")
    source = directory / "source"
    (source / "below").mkdir(parents=True)
    (source / "file").write_text("content")
    for number in range(20):
        (source / "below" / str(number)).write_bytes(bytes([number]) * 5_000)
    return prepare(source, directory / "small.fan", "--partitions", "3")


@pytest.fixture
def job(prepared: Path, tmp_path: Path) -> Iterator[MountedJob]:
    with fanstore.mount(prepared, local=tmp_path / "ssd", stage_first=True, log=tmp_path / "log") as job:
        yield job


def is_gone(path: Path) -> bool:
    return find_mount(path) is None and not path.exists()


def check_end(path: Path, output: Path) -> None:
    """The mount goes, and its process; what was written is safe."""
    wait_until(lambda: is_gone(path), f"the end of the mount {path}", lambda: str(os.listdir(path.parent)))
    wait_until(lambda: not daemons_of(path), f"the end of the daemon of {path}", lambda: str(daemons_of(path)))
    assert (output / "written").read_text() in ("an output", "in a cell")


def daemons_of(path: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(path) in (process / "cmdline").read_bytes().split(b"\0"):
                found.append(process.name)
        except OSError:
            continue  # it has ended
    return found


def test_with_a_job(prepared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "output"
    output.mkdir()
    with fanstore.mount(prepared, local=tmp_path / "ssd", output=output, engine="native") as job:
        assert job.path.name.startswith("small-") and (job.path / "file").read_text() == "content"
        (job.path / "new").write_text("of a program")
        statistics = job.statistics()
        assert statistics["engine"]["name"] == "native"
        assert sum(source["bytes"] for source in statistics["sources"].values()) == len("content")
        assert job.log is not None and job.log.exists() and "closed" not in repr(job)
    assert (output / "new").read_text() == "of a program"
    assert is_gone(job.path) and not daemons_of(job.path) and "closed" in repr(job)
    assert os.listdir(tmp_path) == ["output"]
    job.close()
    with pytest.raises(fanstore.MountError, match=r"is not mounted any more|does not answer"):
        job.statistics()
    with pytest.raises(fanstore.MountError, match="is not mounted any more"):
        job.prefetch(["file"])
    assert capfd.readouterr().out == ""


def test_files_are_fetched_ahead(job: MountedJob) -> None:
    names = [f"below/{number}" for number in range(20)]
    job.prefetch([names[0], job.path / names[1], *names[2:]])
    job.prefetch([])
    wait_until(lambda: job.statistics()["order"]["streams"] == 1, "a stream", lambda: str(job.statistics()["order"]))
    for name in names:
        (job.path / name).read_bytes()
    wait_until(lambda: job.statistics()["order"]["files"] == 20, "all files", lambda: str(job.statistics()["order"]))
    order = job.statistics()["order"]
    assert order["predicted"] == 20 and order["bad_lines"] == 0
    with pytest.raises(fanstore.MountError, match="a line feed"):
        job.prefetch(["a\nb"])


def test_at_a_place_that_was_named_and_without_with(prepared: Path, tmp_path: Path) -> None:
    job = fanstore.mount(prepared, tmp_path / "m", scratch=True, order="off", quiet=True)
    try:
        assert job.path == tmp_path / "m"
        with pytest.raises(fanstore.MountError, match="order='off'"):
            job.prefetch(["file"])
        with opened(job.path / "file", os.O_RDONLY):  # a mount in use is taken away all the same
            job.close()
    finally:
        job.close()
    assert is_gone(job.path)


def test_somebody_else_ends_it(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unmounted = fanstore.mount(prepared, tmp_path / "one")
    subprocess.run(["fusermount3", "-u", str(unmounted.path)], check=True)
    unmounted.close()
    killed = fanstore.mount(prepared, tmp_path / "two", local=tmp_path)
    pid = json.loads((killed.path / ".fanstore" / "config.json").read_bytes())["pid"]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(fanstore.MountError, match="was killed by SIGKILL") as raised:
        killed.close()
    assert raised.value.exit_code == 137
    assert is_gone(unmounted.path) and is_gone(killed.path)
    killed.close()
    with fanstore.mount(prepared, local=tmp_path):  # and cleans up what that one has left
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        ({"engin": "native"}, 2, "there is no option --engin; did you mean --engine?"),
        ({"cache": "much"}, 2, "'much' is not a size"),
        ({"replicas": 2}, 2, "--replicas needs --local"),
        ({"no_fuse": True}, 2, "fanstore.mount has no no_fuse: .* use fanstore-mount --no-fuse or fanstore-run"),
        ({"local": ["/a"]}, 2, "local of fanstore.mount is a text, a path or a number, not \\['/a'\\]"),
        ({"output": "/proc/outputs"}, 1, "--output /proc/outputs"),
    ],
)
def test_what_is_wrong_is_said(prepared: Path, options: dict[str, Any], code: int, sentence: str) -> None:
    with pytest.raises(fanstore.MountError, match=sentence) as raised:
        fanstore.mount(prepared, **options)
    assert raised.value.exit_code == code


def test_a_dataset_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(fanstore.MountError, match=r"'nothing\.fan' does not exist"):
        fanstore.mount("nothing.fan")


@pytest.mark.parametrize("way", ["kill", "fork", "raise", "exit"])
def test_nothing_is_left_of_a_program(way: str, prepared: Path, tmp_path: Path) -> None:
    """It is killed, also while a child of it lives, or ends without a word."""
    output = tmp_path / "output"
    output.mkdir()
    command = [sys.executable, "-c", PROGRAM, str(prepared), str(output), way]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None and program.stdout is not None
        path = Path(program.stdout.readline().strip())
        assert (path / "file").read_text() == "content"
        if way in ("kill", "fork"):
            program.kill()
            check_end(path, output)
        program.stdin.close()  # lets the child of fork go, too
        assert program.wait(LIMIT_S) == {"kill": -9, "fork": -9, "raise": 3, "exit": 0}[way]
        if way in ("raise", "exit"):  # without a moment to wait
            assert is_gone(path) and (output / "written").exists()
    check_end(path, output)


def test_an_interrupt_while_it_is_mounted(tmp_path: Path) -> None:
    """Of a dataset that does not answer: nothing is left, and it is a KeyboardInterrupt."""
    fake = tmp_path / "fake.fan"
    fake.mkdir()
    os.mkfifo(fake / "manifest.json")
    script = f"import fanstore; fanstore.mount({str(fake)!r}, log={str(tmp_path / 'log')!r})"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as program:
        wait_until((tmp_path / "log").exists, "the daemon", lambda: "")
        program.send_signal(signal.SIGINT)
        assert program.wait(LIMIT_S) == -signal.SIGINT
        assert program.stderr is not None and program.stderr.read().endswith("KeyboardInterrupt\n")
    assert daemons_of(fake) == []


@pytest.mark.parametrize("way", ["restart", "kill"])
def test_nothing_is_left_of_a_notebook(way: str, prepared: Path, tmp_path: Path) -> None:
    try:
        packages = environments.ensure(environments.JUPYTER).parent.parent / "lib"
    except environments.MakeError as error:
        pytest.skip(f"Jupyter cannot be installed: {error}")
    output = tmp_path / "output"
    output.mkdir()
    variables = {"PYTHONPATH": str(next(packages.glob("python*/site-packages"))), "JUPYTER_PLATFORM_DIRS": "1"}
    variables |= {"IPYTHONDIR": str(tmp_path / "ipython"), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")}
    command = [sys.executable, str(HERE / "notebook.py"), way, str(prepared), str(output)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | variables
    ) as notebook:
        assert notebook.stdin is not None and notebook.stdout is not None
        path = Path(notebook.stdout.readline().strip())
        assert notebook.stdout.readline() == "1 content\n" and notebook.stdout.readline() == "content\n"
        notebook.stdin.write("\n")
        notebook.stdin.flush()
        assert notebook.stdout.readline() == "gone\n"
        check_end(path, output)
        notebook.stdin.close()
        assert notebook.wait(LIMIT_S) == 0


def test_a_job_of_two_nodes(prepared: Path, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    launcher = " ".join(mpirun(2))
    options: Options = {"local": str(tmp_path / "ssd{rank}"), "launch": launcher, "peer_timeout": 60}
    with fanstore.mount(prepared, tmp_path / "m{rank}", **options) as job:
        assert job.path == tmp_path / "m0" and (tmp_path / "m1" / "file").read_text() == "content"
        assert "peers" in job.statistics()
    assert os.listdir(tmp_path) == []
    with pytest.raises(fanstore.MountError, match=r"put \{rank\} into MOUNTPOINT"):
        fanstore.mount(prepared, launch=launcher)


def test_a_rank_of_a_launcher_is_refused(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(fanstore.MountError, match="start fanstore-mount with the launcher"):
        fanstore.mount(prepared)


def test_every_option_is_a_keyword() -> None:
    """Or it is said why it is none."""
    known = {
        option.removeprefix("--").replace("-", "_"): action.choices
        for action in parsers()["fanstore-mount"]._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    hints = get_type_hints(Options)
    assert set(hints) | set(_SENSELESS) | {"help", "version"} == set(known)
    for name, choices in known.items():
        if choices is not None:
            assert set(get_args(hints[name])) == set(choices)


def test_importing_is_cheap() -> None:
    script = "import sys, fanstore; fanstore.mount; print(*{'numpy', 'trio', 'pyfuse3', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert result.stdout.split() == []
