"""What the preloaded library asks of the daemon over the control socket: answered, refused, and with nobody there."""

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import MakePrepared
from control_clients import answer, greeted, packet
from mounting import LIMIT_S, Mount, needs_fuse, prepare, wait_until
from sanitized import ADDRESS, DRIVERS, ENVIRONMENT, compile_c
from test_mount_damage import damage
from test_preload import FILES, QUIET, THREADS, Intercepted, intercept, library_sources, link_renamed, make_source

pytest_plugins = ["mounting"]
pytestmark = needs_fuse

#: F_SEAL_SEAL, SHRINK, GROW and WRITE.
SEALS = 15


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("ask") / "source")


@pytest.fixture(scope="module")
def compressed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(source, tmp_path_factory.mktemp("ask") / "d.fan", "--partitions", "2", "--codec", "lz4")


@pytest.fixture(scope="module")
def programs(source: Path, compressed: Path, module_mount: Mount) -> Intercepted:
    return intercept(module_mount(compressed), source)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arguments: list[str | Path] = [*QUIET, DRIVERS / "ask_drive.c", *library_sources(), "-lpthread"]
    return compile_c(tmp_path_factory.mktemp("driver") / "ask", arguments, ADDRESS)


def run(programs: Intercepted, *argv: str | Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """The driver has the library in it."""
    return subprocess.run(
        [str(word) for word in argv],
        env=ENVIRONMENT | own_variables(programs) | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def own_variables(programs: Intercepted) -> dict[str, str]:
    return {name: value for name, value in programs.variables.items() if name != "LD_PRELOAD"}


def fnv(data: bytes) -> str:
    value = 14695981039346656037
    for byte in data:
        value = (value ^ byte) * 1099511628211 % 2**64
    return f"{value:016x}"


def line_of(path: Path) -> str:
    return f"{path.stat().st_size} {fnv(path.read_bytes())} {SEALS} {os.O_RDONLY}"


NAMES = ("a/one", "hard", "small.txt", "empty", "a/b/text.txt")


def test_content_is_a_sealed_file(programs: Intercepted, driver: Path) -> None:
    point = programs.mounted.path
    result = run(programs, driver, "content", *(point / name for name in NAMES), point / "a", point / "link")
    assert result.stderr == ""
    assert result.stdout.splitlines() == [*(line_of(programs.source / name) for name in NAMES), "EIO", "EIO"]


def test_a_longer_path_than_an_address(
    source: Path, compressed: Path, mount: Mount, tmp_path: Path, driver: Path
) -> None:
    local = tmp_path / ("x" * 120)
    local.mkdir()
    programs = intercept(mount(compressed, local=local), source)
    result = run(programs, driver, "content", programs.mounted.path / "a" / "one")
    assert result.stdout.splitlines() == [line_of(source / "a" / "one")]


def test_damaged_content_is_an_error(source: Path, mount: Mount, make_prepared: MakePrepared, driver: Path) -> None:
    prepared = make_prepared(source, codec="none", partitions=2)
    partition = damage(prepared, "a/two")
    mounted = mount(prepared, announced=[f"cannot read 'a/two' from partition file {partition}: "])
    programs = intercept(mounted, source)
    result = run(programs, driver, "content", mounted.path / "a" / "two", mounted.path / "a" / "one")
    assert result.stdout.splitlines() == ["EIO", line_of(source / "a" / "one")]


def test_what_is_no_file_has_no_content(programs: Intercepted) -> None:
    config = json.loads((programs.mounted.path / ".fanstore" / "config.json").read_bytes())
    with greeted(Path(config["control_socket"])) as connection:
        for number, entry in enumerate((0, -1, 2**32, 2**63, 10**6)):
            connection.send(packet(number, request="content", entry=entry))
            got, values = answer(connection)
            assert (got, values["error"]) == (number, "failed") and "is not a regular file" in values["message"]


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_races_of_those_who_ask(programs: Intercepted, driver: Path, tmp_path: Path, kind: str) -> None:
    """More threads than connections, and children."""
    program = driver if kind == "address" else link_renamed(tmp_path, THREADS, "ask_drive.c")
    names = [name for name in FILES if name != "a/b/large"]
    arguments: list[str | Path] = ["race", "1", programs.source, programs.mounted.path, *names]
    result = run(programs, program, *arguments, TSAN_OPTIONS="die_after_fork=0")
    assert (result.returncode, result.stderr) == (0, "")


def test_numbers_that_the_program_wants_for_itself(programs: Intercepted, driver: Path) -> None:
    result = run(programs, driver, "numbers", programs.mounted.path / "a" / "one")
    assert (result.stdout.splitlines(), result.stderr) == ([line_of(programs.source / "a" / "one")] * 6, "")


def wait_for(programs: Intercepted, driver: Path, **variables: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [driver, "wait", programs.mounted.path / "small.txt"],
        env=ENVIRONMENT | own_variables(programs) | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == line_of(programs.source / "small.txt") + "\n"
    return process


def test_a_daemon_that_does_not_answer_is_an_error(source: Path, compressed: Path, mount: Mount, driver: Path) -> None:
    mounted = mount(compressed)
    programs = intercept(mounted, source)
    process = wait_for(programs, driver, FANSTORE_PRELOAD_TIMEOUT="1")
    daemon = json.loads((mounted.path / ".fanstore" / "config.json").read_bytes())["pid"]
    os.kill(daemon, signal.SIGSTOP)
    try:
        said, _ = process.communicate("", timeout=LIMIT_S)
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert said == "EIO\n"


def test_a_daemon_that_is_dead_is_an_error(source: Path, compressed: Path, mount: Mount, driver: Path) -> None:
    mounted = mount(compressed)
    programs = intercept(mounted, source)
    process = wait_for(programs, driver)
    config = json.loads((mounted.path / ".fanstore" / "config.json").read_bytes())
    mounted.signal(signal.SIGKILL)  # its supervisor, with which it dies
    mounted.process.wait(LIMIT_S)
    wait_until(lambda: not Path(f"/proc/{config['pid']}").exists(), "death of the daemon", mounted.evidence)
    said, _ = process.communicate("", timeout=LIMIT_S)
    assert said == "EIO\n"
    shutil.rmtree(Path(config["job_directory"]))


#: What the other end says to hello, and then to the first request.
_ODD: Sequence[Sequence[bytes | None]] = (
    (b"",),
    (None,),
    (b"\x82\xa5error\xa8protocol\xa7message\xa1x",),
    (b"\x81\xa8protocol\x02",),
    (b"\x81\xa8protocol\x01", b"\xdf\xff\xff\xff\xff"),
    (b"\x81\xa8protocol\x01", b"\x80"),
    (b"\x81\xa8protocol\x01", b"x" * 60_000),
    (b"\x81\xa8protocol\x01", b"\x82\xa5error\xa1x\xa5errno\xcd\xff\xff"),
    (b"\x81\xa8protocol\x01", None),
)


@pytest.mark.parametrize("said", _ODD)
def test_a_daemon_that_talks_nonsense_is_an_error(
    programs: Intercepted, driver: Path, tmp_path: Path, said: Sequence[bytes | None]
) -> None:
    job = tmp_path / "job"
    shutil.copytree(
        programs.variables["FANSTORE_PRELOAD_STATE"], job / "preload", ignore=shutil.ignore_patterns("placeholder")
    )
    os.mknod(job / "preload" / "placeholder", 0o140600)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(job / "control"))
        listening.listen(1)
        process = subprocess.Popen(
            [driver, "content", programs.mounted.path / "a" / "one"],
            env=ENVIRONMENT | {"FANSTORE_PRELOAD_STATE": str(job / "preload")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        listening.settimeout(LIMIT_S)
        connection, _ = listening.accept()
        with connection:
            for words in said:
                number = connection.recv(1 << 16)[:4]
                if words is not None:
                    connection.send(number + bytes(4) + words if words else b"short")
        told, errors = process.communicate(timeout=LIMIT_S)
    assert (told, errors) == ("EIO\n", "")
