"""The slow shared file system of the benchmarks (throttled_fs.c): right bytes, counted operations, no faster than told.

What is asserted about time are lower bounds, which a busy machine cannot break: who waits for a turn waits at least so
long.
"""

import errno
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jobs import needs_jobs
from leftovers import mounts_below
from mounting import needs_fuse

pytestmark = [needs_fuse, pytest.mark.timeout(120)]

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
Mount = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    """harness.throttled, which is a package of the benchmarks alone."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from harness import throttled

        yield throttled
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def program(module: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = module.build(tmp_path_factory.mktemp("program"))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Files of several sizes, more names in one directory than fit in one listing, a link, an empty directory."""
    root = tmp_path / "source"
    (root / "many").mkdir(parents=True)
    (root / "empty").mkdir()
    for number in range(400):
        (root / "many" / f"file-{number:04}-{'x' * 40}").write_bytes(b"%d" % number)
    (root / "large").write_bytes(os.urandom(3_000_001))
    (root / "nothing").touch()
    (root / "link").symlink_to("large")
    return root


@pytest.fixture
def mount(module: ModuleType, program: Path, source: Path, tmp_path: Path) -> Mount:
    """Mounts the source with the given speed; all of it is off unless told otherwise."""

    def start(
        clients: int = 1, keep_data: bool = False, writable: bool = False, **speed: float
    ) -> AbstractContextManager[Any]:
        figures = {"metadata_latency_us": 0.0, "metadata_rate": 0.0, "read_latency_us": 0.0, "bandwidth": 0.0, **speed}
        profile = module.Profile(name="test", timeout_s=60.0, why="a test", **figures)
        directory = tmp_path / "job"
        directory.mkdir()
        mounted: AbstractContextManager[Any] = module.throttled(
            program, profile, source, directory, clients, keep_data, writable
        )
        return mounted

    return start


def test_same_tree(mount: Mount, source: Path, tmp_path: Path) -> None:
    with mount(clients=2) as shared:
        for client in shared.clients:
            done = subprocess.run(
                ["diff", "--recursive", "--no-dereference", source, client], capture_output=True, text=True, timeout=60
            )
            assert (done.returncode, done.stdout) == (0, "")
            assert sorted(os.listdir(client / "many")) == sorted(os.listdir(source / "many"))
            assert (client / "large").stat().st_mtime_ns == (source / "large").stat().st_mtime_ns
            assert os.readlink(client / "link") == "large"
    assert mounts_below(tmp_path) == []


def test_read_only(mount: Mount) -> None:
    acts: list[Callable[[Path], object]] = [Path.mkdir, Path.touch, lambda path: path.symlink_to("large")]
    with mount() as shared:
        for act in acts:
            with pytest.raises(OSError) as caught:
                act(shared.clients[0] / "new")
            assert caught.value.errno == errno.EROFS
        with pytest.raises(FileNotFoundError):
            (shared.clients[0] / "absent").stat()


def test_writable(mount: Mount, source: Path) -> None:
    """Made by one client, read by another; what is written takes the time of what is read; then removed."""
    content = os.urandom(2_000_001)
    with mount(clients=2, writable=True, bandwidth=2e7) as shared:
        made, seen = (client / "new" / "below" for client in shared.clients)
        made.mkdir(parents=True)
        begin_s = time.monotonic()
        with (made / "file").open("xb") as file:
            file.write(content)
            os.fsync(file.fileno())
        assert time.monotonic() - begin_s >= len(content) / 2e7
        with pytest.raises(FileExistsError):
            (made / "file").open("xb")
        assert (seen / "file").read_bytes() == content == (source / "new/below/file").read_bytes()
        with pytest.raises(OSError) as caught:
            made.rmdir()
        assert caught.value.errno == errno.ENOTEMPTY
        (made / "file").unlink()
        made.rmdir()
        (shared.clients[0] / "new").rmdir()
    assert not (source / "new").exists()


def asked(shared: Any, path: Path) -> tuple[int, int, int]:
    """What reading a file costs the servers: metadata operations, whether there were reads, bytes."""
    before = shared.counts()
    path.read_bytes()
    after = shared.counts()
    metadata = after.metadata_operations - before.metadata_operations
    return metadata, int(after.reads > before.reads), after.bytes - before.bytes


@pytest.mark.parametrize("keep_data", [False, True])
def test_counts(mount: Mount, source: Path, keep_data: bool) -> None:
    """A lookup and an open at first, then an open; data once more unless it is kept; each client for itself."""
    size = (source / "large").stat().st_size
    again = (1, 0, 0) if keep_data else (1, 1, size)
    with mount(clients=2, keep_data=keep_data) as shared:
        for client in shared.clients:
            client.stat()  # the root's own attributes
            assert asked(shared, client / "large") == (2, 1, size)
            assert asked(shared, client / "large") == again


def read_by_all(shared: Any, names: list[str]) -> float:
    """Every client reads all of these files, all at once; seconds."""
    threads = [
        threading.Thread(target=lambda client=client: [(client / name).read_bytes() for name in names])
        for client in shared.clients
    ]
    begin_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return time.monotonic() - begin_s


def test_latencies_add_up(mount: Mount, source: Path) -> None:
    names = [f"many/{name}" for name in sorted(os.listdir(source / "many"))[:10]]
    with mount(metadata_latency_us=5000, read_latency_us=7000) as shared:
        assert read_by_all(shared, names) >= 10 * (2 * 0.005 + 0.007)


def test_clients_share_the_metadata_server(mount: Mount, source: Path) -> None:
    """Two clients, 20 files each, two operations per file, 200 of them per second in all."""
    names = [f"many/{name}" for name in sorted(os.listdir(source / "many"))[:20]]
    with mount(clients=2, metadata_rate=200) as shared:
        before = shared.counts().metadata_operations
        seconds = read_by_all(shared, names)
        operations = shared.counts().metadata_operations - before
        assert operations >= 2 * 2 * 20
        assert seconds >= (operations - 1) / 200


def test_clients_share_the_bandwidth(mount: Mount, source: Path) -> None:
    size = (source / "large").stat().st_size
    with mount(clients=2, bandwidth=2e7) as shared:
        assert read_by_all(shared, ["large"]) >= 2 * size / 2e7
        assert shared.counts().bytes == 2 * size


def test_ends_when_unmounted_by_others(program: Path, source: Path, tmp_path: Path) -> None:
    point = tmp_path / "point"
    point.mkdir()
    process = subprocess.Popen([program, source, point], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            subprocess.run(["fusermount3", "-u", point] if os.geteuid() else ["umount", point], check=True, timeout=30)
            assert process.wait(30) == 0
            assert json.loads(process.stdout.read())["reads"] == 0
        finally:
            process.terminate()


@needs_jobs
def test_short_run(tmp_path: Path) -> None:
    """shared_fs.py itself on two nodes: all files in each epoch, and FanStore asks the servers for little."""
    line = [sys.executable, BENCHMARKS / "shared_fs.py", "--files", "60", "--mean-bytes", "20000", "--classes", "3"]
    line += ["--nodes", "2", "--readers", "2", "--rounds", "1", "--settle", "0", "--profile", "none"]
    line += ["--contenders", "shared", "copied", "fanstore-staged", "--work-dir", tmp_path, "--results", tmp_path]
    gentle = os.environ | {"FANSTORE_BENCH_GENTLE": "1"}  # other tests use this machine, too
    done = subprocess.run([*map(str, line), "--name", "short"], capture_output=True, text=True, timeout=100, env=gentle)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(gzip.decompress((tmp_path / "short.json.gz").read_bytes()))
    runs = {item["contender"]: item for item in result["runs"]}
    assert set(runs) == {"shared", "copied", "fanstore-staged"}
    for item in runs.values():
        assert [(epoch["epoch"], epoch["files"]) for epoch in item["epochs"]] == [
            (name, 60) for name in ("first", "second", "emptied")
        ]
        assert {epoch["bytes"] for epoch in item["epochs"]} == {result["dataset"]["bytes"]}
    assert runs["fanstore-staged"]["asked"]["metadata_operations"] < 60 < runs["shared"]["asked"]["metadata_operations"]
    assert runs["shared"]["startup_s"] == 0 < runs["copied"]["startup_s"]
    sources = runs["fanstore-staged"]["epochs"][0]["sources"]
    assert sources["local"] > 0 < sources["remote"] and sources["shared"] == 0
    assert {path.suffix for path in tmp_path.iterdir()} <= {".gz", ".md", ".png"}, "and nothing is left"
