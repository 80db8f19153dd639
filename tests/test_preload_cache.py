"""Files that no program can read by itself, compressed or on another node: read from the daemon's memory."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import mpirun, run_fanstore
from conftest import MakePrepared
from mounting import LIMIT_S, Mount, needs_fuse, prepare, wait_until
from oddities import compressible
from sanitized import ADDRESS, ENVIRONMENT
from test_mount_damage import damage
from test_preload import FILES, HERE, Intercepted, compile_driver, intercept, library_sources, make_source

from fanstore.client.connection import ControlClient
from fanstore.format.index import Index

pytest_plugins = ["mounting"]
pytestmark = needs_fuse

#: kind, token, entry, number; token, error, offset, bytes, stamp (native/format/sharedcache.h).
REQUEST, ANSWER = struct.Struct("<4I"), struct.Struct("<IiQQQ")
WANT, HOLD = 1, 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_source(tmp_path_factory.mktemp("cache") / "source")
    for name in FILES:
        (root / name).write_bytes(compressible((root / name).stat().st_size, len(name)))
    return root


@pytest.fixture(scope="module")
def compressed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(source, tmp_path_factory.mktemp("cache") / "d.fan", "--partitions", "2", "--codec", "lz4")


@pytest.fixture(scope="module")
def programs(source: Path, compressed: Path, module_mount: Mount) -> Intercepted:
    return intercept(module_mount(compressed), source)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_driver(tmp_path_factory.mktemp("driver") / "drive", (), ())


def cache_of(programs: Intercepted) -> dict[str, int]:
    section: dict[str, int] = programs.mounted.statistics()["cache"]
    return section


# --- the same as through the mount ---


def test_calls_say_the_same(programs: Intercepted, driver: Path) -> None:
    said, counted = programs.both_ways(driver, "say", programs.mounted.path, "a/two")
    assert said.count("\n") > 190 and counted["opens"] > 15 and counted["reads"] > 20


@pytest.mark.parametrize("codec", ["zstd", "lz4hc"])
def test_python_says_the_same(source: Path, mount: Mount, tmp_path: Path, codec: str) -> None:
    programs = intercept(mount(prepare(source, tmp_path / "d.fan", "--codec", codec), "--verify=always"), source)
    said, counted = programs.both_ways(sys.executable, HERE / "preload_program.py", programs.mounted.path)
    assert "--- make_mistakes" in said
    assert counted["opens"] > 32 * 10 and counted["bytes"] > 32 * 9_000_000


def test_what_was_read_once_is_not_asked_for_again(source: Path, compressed: Path, mount: Mount) -> None:
    programs = intercept(mount(compressed), source)
    code = "import sys; [print(len(open(name, 'rb').read())) for name in sys.argv[1:] * 3]"
    fetches = []
    for _ in range(2):
        result = programs.run(sys.executable, "-c", code, *(programs.mounted.path / name for name in FILES))
        assert result.stdout.split() == ["107000", "207000", "307000", "9000001"] * 3, result.stderr
        fetches.append(cache_of(programs)["fetches"])
    counted = programs.counters()
    assert (counted["opens"], counted["passed"], counted["promotions"]) == (24, 0, 0)
    assert fetches[0] == fetches[1] == cache_of(programs)["chunks"] > 3, "the large one has three chunks"


def test_files_of_other_nodes(source: Path, tmp_path: Path, compressed: Path) -> None:
    """Two ranks, a partition each: nothing is left for the mount to read."""
    code = """if True:
        import hashlib, json, os, sys
        point = os.environ["FANSTORE_MOUNT"]
        for name in sys.argv[1:] * 3:
            print(name, hashlib.md5(open(f"{point}/{name}", "rb").read()).hexdigest())
        stats = json.load(open(f"{point}/.fanstore/stats.json"))
        print("counted", stats["intercepted"]["opens"], stats["intercepted"]["promotions"])
    """
    options = ["--local", str(tmp_path / "ssd{rank}"), "--stage-first", "--preload", "--", sys.executable, "-c", code]
    result = run_fanstore("mount", compressed, tmp_path / "m{rank}", *options, *FILES, prefix=mpirun(2))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for name in FILES:
        digest = hashlib.md5((source / name).read_bytes()).hexdigest()
        assert lines.count(f"{name} {digest}") == 6
    assert lines.count(f"counted {3 * len(FILES)} 0") == 2


# --- races, and memory that is short ---


@pytest.mark.parametrize("cache", ["0", "1MiB"])
def test_races_for_little_memory(source: Path, compressed: Path, mount: Mount, tmp_path: Path, cache: str) -> None:
    """What is evicted while it is copied is copied again. The library is in the program, with a sanitizer."""
    programs = intercept(mount(compressed, "--cache", cache), source)
    program = compile_driver(tmp_path / "drive", library_sources(), ADDRESS)
    variables = {name: value for name, value in programs.variables.items() if name != "LD_PRELOAD"}
    arguments: list[str | Path] = ["race", programs.mounted.path, source, "2", *FILES]
    result = subprocess.run(
        [program, *arguments], env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert cache_of(programs)["fetches"] > 10
    wait_until(lambda: cache_of(programs)["fetchers"] == 0, "end of all sockets", programs.mounted.evidence)
    assert cache_of(programs)["leases"] == 0


def test_damaged_files_are_errors(source: Path, mount: Mount, make_prepared: MakePrepared) -> None:
    prepared = make_prepared(source, codec="lz4", partitions=2)
    partition = damage(prepared, "a/two")
    mounted = mount(prepared, announced=[f"cannot read 'a/two' from partition file {re.escape(str(partition))}: "])
    programs = intercept(mounted, source)
    code = (
        "import sys\nfor name in sys.argv[1:]:\n try: print(len(open(name, 'rb', 0).read()))\n"
        " except OSError as error: print(error.errno)"
    )
    result = programs.run(sys.executable, "-c", code, *(mounted.path / name for name in FILES))
    assert result.stdout.split() == ["107000", "5", "307000", "9000001"], result.stderr


# --- deaths ---

_TWICE = """if True:
    import sys
    def read(names):
        for name in names:
            try: print(len(open(sys.argv[1] + "/" + name, "rb", 0).read()), flush=True)
            except OSError as error: print(error.errno, flush=True)
    read(sys.argv[2:3])
    sys.stdin.readline()
    read(sys.argv[2:])
"""


def test_when_the_daemon_dies_what_is_in_memory_stays(source: Path, compressed: Path, mount: Mount) -> None:
    """And the rest is an error, not a hang."""
    mounted = mount(compressed)
    programs = intercept(mounted, source)
    process = subprocess.Popen(
        [sys.executable, "-c", _TWICE, mounted.path, "a/one", "a/two"],
        env=os.environ | programs.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "107000\n"
    config = json.loads((mounted.path / ".fanstore" / "config.json").read_bytes())
    mounted.signal(signal.SIGKILL)  # its supervisor, with which it dies
    mounted.process.wait(LIMIT_S)
    wait_until(lambda: not Path(f"/proc/{config['pid']}").exists(), "death of the daemon", mounted.evidence)
    said, _ = process.communicate("\n", timeout=LIMIT_S)
    first, second = map(int, said.split())
    assert first == 107000
    assert os.strerror(second) == "Transport endpoint is not connected"
    shutil.rmtree(Path(config["job_directory"]))


# --- programs that hold, die, or are rude ---


@pytest.fixture
def client(programs: Intercepted) -> Iterator[ControlClient]:
    config = json.loads((programs.mounted.path / ".fanstore" / "config.json").read_bytes())
    with ControlClient(Path(config["control_socket"]), "test") as client:
        os.close(client.ask("cache").descriptors[0])
        yield client


def fetcher(client: ControlClient) -> socket.socket:
    made = socket.socket(fileno=client.ask("fetcher").descriptors[0])
    made.settimeout(LIMIT_S)
    return made


def entry_of(programs: Intercepted, path: str) -> int:
    index = Index.from_buffer((Path(programs.variables["FANSTORE_PRELOAD_STATE"]) / "index").read_bytes())
    entry = 0
    for name in path.split("/"):
        entry = index.lookup(entry, name.encode())
    return int(index.inode[entry])


def test_a_client_that_is_killed_frees_what_it_holds(programs: Intercepted, client: ControlClient) -> None:
    entry = entry_of(programs, "a/three")
    with fetcher(client) as asking:
        asking.send(REQUEST.pack(HOLD, 1, entry, 0))
        token, error, _, length, _ = ANSWER.unpack(asking.recv(100))
        assert (token, error, length) == (1, 0, 307_000)
        cache = cache_of(programs)
        assert (cache["leases"], cache["held_bytes"]) == (1, 307_000)
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        try:
            asking.close()
            assert cache_of(programs)["held_bytes"] == 307_000, "the child has the socket, too"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    wait_until(lambda: cache_of(programs)["leases"] == 0, "end of the lease", programs.mounted.evidence)
    assert cache_of(programs)["held_bytes"] == 0


def test_hostile_requests(programs: Intercepted, client: ControlClient) -> None:
    """They cost the socket, and nobody else anything; what is asked in between is answered."""
    generator = random.Random(5)
    right = entry_of(programs, "a/one")
    refused = cache_of(programs)["fetches_refused"]
    for _ in range(300):
        with fetcher(client) as asking:
            body = REQUEST.pack(*(generator.choice((0, 1, 2, 3, right, 2**32 - 1)) for _ in range(4)))
            for _ in range(generator.randrange(1, 4)):
                sent = generator.choice((body, body + b"x", body[:7], generator.randbytes(70), body * 3))
                try:
                    asking.send(sent, socket.MSG_NOSIGNAL)
                except OSError:
                    break
    with fetcher(client) as asking:
        asking.send(REQUEST.pack(WANT, 9, right, 0))
        assert ANSWER.unpack(asking.recv(100))[:2] == (9, 0)
        for wrong in ((0, 1, right, 0), (WANT, 1, right, 1), (WANT, 1, 2**32 - 1, 0), (WANT, 1, 0, 0)):
            with fetcher(client) as other:
                other.send(REQUEST.pack(*wrong))
                assert other.recv(100) == b"", "it is cut off"
    wait_until(lambda: cache_of(programs)["fetchers"] == 0, "end of all sockets", programs.mounted.evidence)
    assert cache_of(programs)["fetches_refused"] > refused + 100
    assert cache_of(programs)["leases"] == 0


def test_who_takes_no_answers_is_cut_off(programs: Intercepted, client: ControlClient) -> None:
    right = entry_of(programs, "a/one")
    with fetcher(client) as asking:
        asking.setblocking(False)
        sent = 0
        try:
            for _ in range(100_000):
                asking.send(REQUEST.pack(WANT, sent, right, 0), socket.MSG_NOSIGNAL)
                sent += 1
        except OSError:  # it is full, or cut off already
            assert sent > 10
    wait_until(lambda: cache_of(programs)["fetchers"] == 0, "end of all sockets", programs.mounted.evidence)


def test_programs_cannot_write(client: ControlClient) -> None:
    [cache] = client.ask("cache").descriptors
    try:
        assert os.fstat(cache).st_mode & 0o777 == 0o400
        with pytest.raises(OSError):
            os.pwrite(cache, b"x", 0)
    finally:
        os.close(cache)
