"""The native engine by itself: its door to Python, and the whole of it under sanitizers and valgrind.

The driver is tests/native/engine_drive.c: many threads on the cache, on the content of real partitions, on names that
are listed ahead, on fetching from peers that fail in all ways, and on outputs; an engine whose kernel is the driver;
and, as root, one behind a real mount, with processes that read it and are killed. It compares all bytes with the
source. The module as a whole is mounted with the address sanitizer (native/sanitized_mount.py).
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import mounting
import pytest
from core_parts import native_broker
from mounting import LIMIT_S, command, lister_of, needs_fuse, wait_until
from oddities import compressible, incompressible
from sanitized import (
    ADDRESS,
    DRIVERS,
    ENVIRONMENT,
    LIBRARIES,
    NATIVE,
    compile_c,
    compile_module,
    preload,
    room_sources,
)

from fanstore import _native
from fanstore.format.prepared import PreparedDataset
from fanstore.mounttable import find_mount

CHUNK_BYTES = 4 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of one and of several chunks, some that compression shrinks and some that it does not, and an empty one."""
    root = tmp_path_factory.mktemp("engine") / "source"
    (root / "deep" / "deeper").mkdir(parents=True)
    for number in range(24):
        make = compressible if number % 2 else incompressible
        (root / "deep" / f"small-{number}").write_bytes(make(700 + 9_877 * number, number))
    for name, make in (("text", compressible), ("noise", incompressible)):
        (root / f"large-{name}").write_bytes(make(9_000_001, 1))
        (root / "deep" / f"exact-{name}").write_bytes(make(2 * CHUNK_BYTES, 2))
        (root / "deep" / "deeper" / f"medium-{name}").write_bytes(make(1_500_000, 3))
    (root / "empty").write_bytes(b"")
    (root / "link").symlink_to("deep/small-1")
    return root


@pytest.fixture(scope="module")
def prepared(source: Path) -> Path:
    return mounting.prepare(source, source.parent / "d.fan", "--codec", "lz4", "--partition-size", "9MiB")


# --- the door to Python ---


def make_engine(dataset: PreparedDataset) -> _native.Engine:
    return _native.Engine(native_broker(dataset), 0, 0, -1, 1, 1, 1, 12)


def test_the_best_file_of_a_partition_is_used(prepared: Path) -> None:
    """The store may open a file several times, and tell of a prepared one after its local copy."""
    dataset = PreparedDataset.open(prepared)
    before = descriptors()
    broker = native_broker(dataset)
    with open(prepared / "part-00000.tar", "rb") as file:
        results = [broker.use(0, file.fileno(), number, False) for number in (1, 1, 2, 1, 2)]
        assert results == [True, False, True, False, False]
        kept = descriptors() - before - {str(file.fileno())}
        # Its eventfd, the prepared one, the copy, and those for direct I/O if their file system can.
        assert 3 <= len(kept) <= 5
        with pytest.raises(OSError, match="Invalid argument"):
            broker.use(10_000, file.fileno(), 1, False)
        with pytest.raises(OSError, match="Bad file descriptor"):
            broker.use(1, 1_000_000, 1, False)
    assert all(is_closed_on_exec(descriptor) for descriptor in kept)
    del broker
    assert descriptors() == before


def descriptors() -> set[str]:
    """What is open; not the descriptor with which that is found out."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}


def is_closed_on_exec(descriptor: str) -> bool:
    flags = re.search(r"flags:\s+(\d+)", Path(f"/proc/self/fdinfo/{descriptor}").read_text())
    return flags is not None and bool(int(flags[1], 8) & os.O_CLOEXEC)


def test_only_peers_of_the_job_are_asked(prepared: Path) -> None:
    broker = native_broker(PreparedDataset.open(prepared))
    exchange = _native.Exchange((1,) * 7, (0, 0, 0), (8, 24, 8), 3, 100, 0)
    for call in (lambda: broker.route(0, [1]), broker.fetched):
        with pytest.raises(ValueError, match="asks no peers"):
            call()
    assert broker.take_failures() == []
    with pytest.raises(TypeError, match="an Exchange"):
        broker.ask_peers(broker, 0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="with a limit"):
        broker.ask_peers(exchange, 0, 0.0)
    broker.ask_peers(exchange, 0, 1.0)
    with pytest.raises(ValueError, match="said once"):
        broker.ask_peers(exchange, 0, 1.0)
    broker.route(0, [1, 2])
    broker.route(0, [])
    for partition, ranks in ((0, [3]), (0, [-1]), (10_000, [1])):
        with pytest.raises(ValueError, match="no such partition, or no such rank"):
            broker.route(partition, ranks)
    with pytest.raises(TypeError):
        broker.route(0, ["1"])  # type: ignore[list-item]
    assert broker.take_failures() == []
    peers, times = broker.fetched()
    assert (peers, times[:4]) == ([(0, 0)] * 3, (0, 0, 0, 0))


def test_answers_while_the_engine_stops(prepared: Path) -> None:
    """Another thread may be in the middle of an answer, without the lock of Python, when the engine is freed."""
    for _ in range(5):
        engine = make_engine(PreparedDataset.open(prepared))
        device, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, python = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wake = os.eventfd(0, os.EFD_NONBLOCK)
        engine.start(device.fileno(), ours.fileno(), wake)
        answered, ended = threading.Event(), threading.Event()

        def answer(engine: _native.Engine, answered: threading.Event, ended: threading.Event) -> None:
            while not ended.is_set():
                for token in range(50):
                    engine.answer(token, bytes(100))
                answered.set()

        threads = [threading.Thread(target=answer, args=(engine, answered, ended)) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert answered.wait(LIMIT_S)
        assert engine.stop(3000)
        ended.set()
        for thread in threads:
            thread.join(LIMIT_S)
        for end in (device, kernel, ours, python):
            end.close()
        os.close(wake)


@needs_fuse
def test_command_inherits_nothing(prepared: Path, tmp_path: Path) -> None:
    """A child that kept a descriptor of /dev/fuse would keep a dead mount from being noticed."""
    (tmp_path / "ssd").mkdir()
    script = "import os; print([os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')])"
    options = ["--engine", "native", "--local", str(tmp_path / "ssd"), "--", sys.executable, "-S", "-c", script]
    result = command("mount", prepared, tmp_path / "m", *options)
    assert result.returncode == 0, result.stderr
    assert not re.search(r"fuse|socket|anon_inode|\.tar", result.stdout), result.stdout


# --- the driver ---

#: Rounds or seconds for each mode; valgrind is some 30 times slower than the rest, and the thread sanitizer five.
MODES = {
    "address": {
        "slabs": "3000",
        "broker": "100",
        "ahead": "2000",
        "names": "20",
        "fetch": "2000",
        "fetch-few-cores": "2000",
        "busy_poll": "300",
        "socket": "60",
        "outputs": "10000",
        "mount": "1",
        "hang": "0",
    },
    "thread": {
        "slabs": "1000",
        "broker": "20",
        "ahead": "600",
        "names": "10",
        "fetch": "800",
        "fetch-few-cores": "800",
        "busy_poll": "100",
        "socket": "40",
        "outputs": "3000",
        "mount": "0.6",
    },
    "valgrind": {
        "slabs": "100",
        "broker": "2",
        "ahead": "60",
        "names": "1",
        "fetch": "80",
        "fetch-few-cores": "80",
        "busy_poll": "10",
        "socket": "12",
        "outputs": "200",
        "mount": "0.4",
    },
}
#: The thread sanitizer and valgrind look at zstd, whose decoder belongs to its thread; the other two are much alike.
CODEC = {"address": "lz4", "thread": "zstd", "valgrind": "zstd"}
#: The thread sanitizer does not know fences, and says so.
FLAGS = {"address": ADDRESS, "thread": ("-fsanitize=thread", "-Wno-tsan"), "valgrind": ()}
#: drive_ahead.c stands between the engine and the disk.
WRAP = "-Wl,--wrap=pread,--wrap=preadv2,--wrap=fstatfs"
VALGRIND = ["valgrind", "--quiet", "--leak-check=full", "--error-exitcode=9", "--fair-sched=yes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drivers")


def run_driver(arguments: list[str], mount: Path) -> tuple[int, str, str]:
    """Exit code, and what it has said; its mount is gone afterwards.

    A driver that was ended by its alarm may leave a thread in the hands of its own mount: it cannot be waited for
    before that is aborted.
    """
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=100)
        except BaseException:
            subprocess.run(["umount", "-f", str(mount)], check=False, timeout=LIMIT_S)
            process.kill()
            raise
        finally:
            if find_mount(mount) is not None:
                subprocess.run(["umount", "-l", str(mount)], check=False, timeout=LIMIT_S)
    return process.returncode, stdout, stderr


@pytest.mark.parametrize("build", MODES)
def test_engine_drive(build: str, source: Path, folder: Path) -> None:
    """All modes of the driver with one build: no report, all bytes right, everything freed at the end."""
    if build == "valgrind" and shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    rooms = ("base", "format", "mpi", "chunks", "clients", "outputs", "fuse")
    sources = [path for room in rooms for path in room_sources(room)]
    sources += [DRIVERS / "engine_drive.c", *sorted(DRIVERS.glob("drive_*.c"))]
    program = compile_c(folder / build, [*sources, WRAP, *LIBRARIES, "-lpthread"], FLAGS[build])
    prefix = VALGRIND if build == "valgrind" else []
    can_mount = os.geteuid() == 0 and not mounting.fuse_problem()
    (folder / "mount").mkdir(exist_ok=True)
    prepared = mounting.prepare(source, folder / f"{build}.fan", "--codec", CODEC[build], "--partition-size", "9MiB")
    for mode, rounds in MODES[build].items():
        if mode in ("mount", "hang") and not can_mount:
            continue
        arguments = [str(program), mode, rounds, str(prepared / "index.fsx"), str(source), str(folder)]
        arguments += map(str, sorted(prepared.glob("part-*.tar")))
        code, stdout, stderr = run_driver([*prefix, *arguments], folder / "mount")
        assert code == 0, f"{mode}: {code}\n{stderr[-8_000:]}"
        assert (stdout, stderr) == ("done\n", ""), mode


# --- the module, mounted ---


@pytest.fixture(scope="module")
def module(folder: Path) -> Path:
    """The extension module, and next to it the programs that it works with."""
    for program in ("names", "pages"):
        compile_c(folder / f"fanstore-{program}", [NATIVE / "programs" / f"{program}.c"])
    return compile_module(folder / "_native.so")


@needs_fuse
@pytest.mark.parametrize(
    "options", [["--verify", "always", "--cache", "6MiB"], ["--local", "ssd"]], ids=["shared", "local"]
)
def test_no_sanitizer_report_of_a_mount(
    options: list[str], module: Path, source: Path, prepared: Path, tmp_path: Path
) -> None:
    point, log = tmp_path / "m", tmp_path / "mount.log"
    (tmp_path / "ssd").mkdir()
    arguments = [str(prepared), str(point), "--engine", "native", "--log", str(log), "--foreground", *options]
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(DRIVERS / "sanitized_mount.py"), str(module), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=tmp_path,
            env=ENVIRONMENT | {"LD_PRELOAD": preload()},
        )

    def evidence() -> str:
        return (tmp_path / "output").read_text() + (log.read_text() if log.exists() else "")

    try:
        wait_until(lambda: " mounted " in evidence() or process.poll() is not None, "mount", evidence)
        statistics_file = point / ".fanstore" / "stats.json"
        wait_until(lambda: lister_of(point) is not None, "start of the lister", evidence)
        compare_by_name(source, point)
        wait_until(
            lambda: json.loads(statistics_file.read_bytes())["engine"]["names_ahead"]["directories"] == 1,
            "listing ahead",
            evidence,
        )
        for _ in range(2):
            compare_trees(source, point)
        statistics = json.loads(statistics_file.read_bytes())
        assert statistics["engine"]["answered_native"] > 100
        assert statistics["engine"]["answered_python"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0, evidence()
    finally:
        process.kill()
        process.wait(LIMIT_S)
        if find_mount(point) is not None:
            subprocess.run(["umount", "-l", str(point)], check=False, timeout=LIMIT_S)
    assert not point.exists()
    assert "Sanitizer" not in evidence() and "runtime error" not in evidence()


def compare_by_name(source: Path, mounted: Path) -> None:
    """Without listing the directory."""
    for path in sorted((source / "deep").glob("small-*")):
        assert (mounted / "deep" / path.name).read_bytes() == path.read_bytes()


def compare_trees(source: Path, mounted: Path) -> None:
    """Names, targets and bytes, of whole files and of pieces past the cache of the kernel."""
    for folder, folders, files in os.walk(source):
        there = mounted / Path(folder).relative_to(source)
        assert sorted(os.listdir(there)) == sorted([*folders, *files])
        for name in files:
            true, ours = Path(folder, name), there / name
            assert ours.is_symlink() == true.is_symlink()
            if true.is_symlink():
                assert os.readlink(ours) == os.readlink(true)
                continue
            content = true.read_bytes()
            assert ours.read_bytes() == content
            assert os.getxattr(ours, "user.fanstore.codec") in (b"lz4", b"none")
            fd = os.open(ours, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                for place in range(0, len(content), 1_000_003):
                    assert os.pread(fd, 5_000, place) == content[place : place + 5_000]
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        assert not (there / "no such name").exists()
